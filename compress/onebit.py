"""1-bit SGD: a sign and two means per row, the origin of error feedback and of the two-sided exchange."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.compressor import Compressor, Context, Exchange, Round, State, server_chunk
from compress.kernels import signs
from compress.layout import Group, PlaceKey, TensorSpec, UnitLayout
from compress.options import register
from compress.protocols import Codec, parallel, served_chunk, two_sided, two_sided_rounds
from compress.state import Chunk


@dataclass(frozen=True)
class TwoMeansCodec(Codec):
    """A bit per element, and the means of a block's non-negative and of its negative elements.

    Only whole blocks: the rows of matrices.
    """

    block: int

    def encode_(self, x: Tensor) -> tuple[Tensor, ...]:
        rows = x.view(-1, self.block)
        negative = rows.signbit()
        count = negative.sum(1, dtype=x.dtype)
        total, below = rows.sum(1), (rows * negative).sum(1)
        low = below / count.clamp(min=1)
        high = (total - below) / (self.block - count).clamp(min=1)
        rows.sub_(torch.where(negative, low[:, None], high[:, None]))
        return signs.pack(negative), torch.stack((high, low), dim=1)

    def decode_add_(self, out: Tensor, payload: tuple[Tensor, ...], weight: float = 1.0) -> None:
        rows = out.view(-1, self.block)
        bits, means = (part[: len(rows)] for part in payload)
        means = means * weight
        rows.add_(torch.where(signs.unpack(bits, self.block), means[:, 1:], means[:, :1]))

    def block_bytes(self, itemsize: int) -> int:
        return -(self.block // -8) + 2 * itemsize


@dataclass(frozen=True)
class OneBitState(State):
    """One server chunk for each group of equally long rows."""

    server: tuple[Chunk, ...] = server_chunk()


@register("onebit")
@dataclass(frozen=True)
class OneBit(Compressor):
    """1-bit SGD (Seide, Fu, Droppo, Li, Yu, Interspeech 2014), two-sided, with error feedback on both sides.

    Each row (the weights into one output of nn.Linear; a whole vector counts as one row) is sent as signs and two
    numbers, the means of its non-negative and of its negative elements.

    On the wire: m/8 + 8 bytes for a row of m elements, each way; rows are dealt out evenly, so the bytes do not
    grow with W where there are more rows than workers.
    Law: conserves, with server memory. Contraction: at least 1/m for rows of m elements.
    Not for: the first steps of training, which its authors sent uncompressed (warmup), or models of many short rows.

    >>> from compress import simulate
    >>> simulate("onebit", [[[1.0, 3.0, -5.0], [1.0, 3.0, -5.0]]]).means[0].tolist()
    [2.0, 2.0, -5.0]
    """

    def place(self, spec: TensorSpec) -> PlaceKey:
        n, m = spec.matrix or (1, spec.numel)
        return (0, m) if n * m else (1, 0)

    def init(self, ctx: Context) -> State:
        groups = self._groups(ctx.layout)
        return OneBitState(tuple(served_chunk(codec, ctx, group.start, group.stop) for group, codec in groups))

    @staticmethod
    def _groups(layout: UnitLayout) -> list[tuple[Group, TwoMeansCodec]]:
        """Runs of rows of one length, each with its codec."""
        return [(group, TwoMeansCodec(group.key[1])) for group in layout.groups if group.key[0] == 0]

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        assert isinstance(state, OneBitState)
        groups = self._groups(ctx.layout)
        results = yield from parallel(
            [
                two_sided(codec, x[group.start : group.stop], chunk, ctx)
                for (group, codec), chunk in zip(groups, state.server, strict=True)
            ]
        )
        mean = ctx.result(x)
        for (group, _), (part, _) in zip(groups, results, strict=True):
            mean[group.start : group.stop] = part
        return mean, OneBitState(tuple(chunk for _, chunk in results))

    def rounds(self, ctx: Context) -> Sequence[Round]:
        each = [two_sided_rounds(codec, ctx, group.stop - group.start) for group, codec in self._groups(ctx.layout)]
        return [(kinds[0][0], sum(payload for _, payload in kinds)) for kinds in zip(*each, strict=True)]

    def contraction(self, layout: UnitLayout) -> float:
        return 1 / max((codec.block for _, codec in self._groups(layout)), default=1)
