"""signSGD with majority vote: one bit up, one bit down, no memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.compressor import Compressor, Context, Exchange, Round, State
from compress.kernels import signs
from compress.options import option, register
from compress.requests import AllGather, AllToAll


@register("signsgd")
@dataclass(frozen=True)
class SignSGD(Compressor):
    """signSGD with majority vote (Bernstein et al., 2018, arXiv:1802.04434; 2019, arXiv:1810.05291).

    The estimate is +1 or -1 for each element: the sign that most workers have. A tie is decided by a random bit of
    the worker that counts the votes, since a fixed choice would be a drift where gradients are symmetric noise.
    An exact zero votes +1 (-0.0 votes -1).

    Args:
        scaled: multiply by the mean over workers of the mean |g|, to stay in units of the gradient; without it
            the learning rate must be about 100 times smaller than SGD's.

    On the wire: 1/8 byte an element each way, two-sided, whatever W is (scaled: and one number).
    Law: none: magnitudes are lost and nothing is remembered. Up to half of the workers may send garbage.
    Not for: convergence guarantees without large batches; `sign` has error feedback for the same bytes.

    >>> from compress import simulate
    >>> simulate("signsgd", [[[1.0, -9.0], [1.0, 2.0], [-4.0, -1.0]]]).means[0].tolist()
    [1.0, -1.0]
    """

    law = "none"

    scaled: bool = option(False)

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(), cls(scaled=True)]

    @property
    def keeps_memory(self) -> bool:
        return False

    @staticmethod
    def _chunk(ctx: Context) -> int:
        """Elements that each worker counts, a multiple of 8."""
        return math.ceil(ctx.layout.numel / (8 * ctx.peers)) * 8

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        chunk, numel = self._chunk(ctx), x.numel()
        ballots = x.new_zeros(ctx.peers * chunk)
        ballots[:numel] = x
        sent: tuple[Tensor, ...] = (signs.pack(ballots.view(ctx.peers, chunk).signbit()),)
        if self.scaled:
            sent += ((x.abs().sum() / max(numel, 1)).expand(ctx.peers, 1),)
        bits, *scale = yield AllToAll(sent)
        votes = signs.unpack(bits, chunk).sum(0)
        tied = 2 * votes == len(bits)
        negative = torch.where(tied, ctx.private_bits(chunk), 2 * votes > len(bits))
        (elected,) = yield AllGather((signs.pack(negative[None])[0],))
        mean = 1 - 2 * signs.unpack(elected, chunk).view(-1)[:numel].to(x.dtype)
        return (mean * scale[0].mean() if self.scaled else mean), state

    def rounds(self, ctx: Context) -> Sequence[Round]:
        chunk_bytes = self._chunk(ctx) // 8
        scales = ctx.peers * ctx.layout.itemsize * self.scaled
        return [(AllToAll, ctx.peers * chunk_bytes + scales), (AllGather, chunk_bytes)]
