"""Random-k sparsification with a shared seed: indices cost nothing, values can be all-reduced."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from compress.compressor import Compressor, Context, Exchange, Round, State
from compress.options import option, register
from compress.requests import AllReduce


@register("randomk")
@dataclass(frozen=True)
class RandomK(Compressor):
    """Send a random set of entries, the same on all workers, new each step (Stich et al., 2018,
    arXiv:1809.07599; Wangni et al., 2018, arXiv:1710.09854).

    Args:
        density: fraction of entries sent, 0 < density <= 1. An entry waits 1/density steps on average.

    On the wire: one all-reduce of k = round(density d) values (at least 1); no indices.
    Law: conserves, and is linear: W workers are one worker with the mean. Contraction: k/d in expectation.
    Not for: fast convergence at low density; top-k sends what matters first.

    >>> from compress import simulate
    >>> simulate("randomk:density=1.0", [[[1.0, 2.0], [3.0, 6.0]]]).means[0].tolist()
    [2.0, 4.0]
    """

    density: float = option(0.01, above=0.0, high=1.0, shown=True)

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(density=0.1), cls(density=1.0)]

    def count(self, numel: int) -> int:
        """Entries sent of `numel`."""
        return min(numel, max(1, round(self.density * numel)))

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        index = ctx.shared_sample(self.count(x.numel()), x.numel())
        value = x[index]
        x[index] = 0
        (value,) = yield AllReduce((value,))
        return ctx.result(x).zero_().index_copy_(0, index, value), state

    def rounds(self, ctx: Context) -> Sequence[Round]:
        return [(AllReduce, self.count(ctx.layout.numel) * ctx.layout.itemsize)]
