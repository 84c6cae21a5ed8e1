"""No compression: the exact mean. The fall-back of every rule and the yardstick of every comparison."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from compress.compressor import Compressor, Context, Exchange, Round, State
from compress.layout import UnitLayout
from compress.options import register
from compress.requests import AllReduce


@register("none")
@dataclass(frozen=True)
class Exact(Compressor):
    """Average everything in the arena's own precision.

    On the wire: one all-reduce of d elements. Law: conserves, with a residual of zero.
    Not for: links that are slower than the computation; this is what the other compressors avoid.

    >>> from compress import simulate
    >>> simulate("none", [[[1.0, 2.0], [3.0, 6.0]]]).means[0].tolist()
    [2.0, 4.0]
    """

    @property
    def keeps_memory(self) -> bool:
        return False

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        (mean,) = yield AllReduce((x,))
        return mean, state

    def rounds(self, ctx: Context) -> Sequence[Round]:
        return [(AllReduce, ctx.layout.dense_bytes)]

    def contraction(self, layout: UnitLayout) -> float:
        return 1.0
