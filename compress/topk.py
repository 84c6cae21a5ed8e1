"""Top-k sparsification with error feedback."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from compress.compressor import Compressor, Context, Exchange, Round, State
from compress.kernels.selection import largest, largest_of_each_chunk
from compress.layout import UnitLayout
from compress.options import option, register
from compress.requests import AllGather


def scatter_mean(index: Tensor, value: Tensor, out: Tensor) -> Tensor:
    """The mean over peers of sparse vectors, dense.

    Args:
        index: int64 [peers, k], distinct within a row.
        value: [peers, k].
        out: where the mean is written, [d].

    Rows are added in the order of the peers, so that all workers round alike.
    """
    out.zero_()
    value = value / len(value)
    for row_index, row_value in zip(index, value, strict=True):
        out.index_add_(0, row_index, row_value)
    return out


def narrowest(largest_index: int) -> torch.dtype:
    """The smallest integer type for indices up to the given one."""
    for dtype in (torch.uint8, torch.int16, torch.int32):
        if largest_index <= torch.iinfo(dtype).max:
            return dtype
    return torch.int64


@register("topk")
@dataclass(frozen=True)
class TopK(Compressor):
    """Send the entries of largest magnitude (Aji & Heafield, 2017, arXiv:1704.05021; Stich et al., 2018,
    arXiv:1809.07599).

    Args:
        density: fraction of entries sent, 0 < density <= 1; lower is cheaper and learns more slowly.
        select: "exact" takes the k = round(density d) largest of the unit (at least 1); "chunk" takes the
            largest of each round(1 / density) consecutive entries: much cheaper to find, and a narrower index.

    On the wire: one all-gather of k values and k indices (int32; "chunk": the narrowest type for an offset).
    Bytes received, and sent by a ring, grow with W: above about 1/density workers prefer sign or PowerSGD.
    Law: conserves; what was sent leaves a residual of exactly 0. Contraction: k/d, or 1/chunk.
    Not for: many workers, or dense updates such as those of normalisation layers.

    >>> from compress import simulate
    >>> simulate("topk:density=0.5", [[[1.0, 9.0], [3.0, 6.0]]]).means[0].tolist()
    [0.0, 7.5]
    """

    density: float = option(0.01, above=0.0, high=1.0, shown=True)
    select: Literal["exact", "chunk"] = option("exact")

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(density=0.1), cls(density=0.1, select="chunk"), cls(density=1.0)]

    @property
    def chunk(self) -> int:
        """Entries of which one is sent, with select="chunk"."""
        return max(1, round(1 / self.density))

    def count(self, numel: int) -> int:
        """Entries sent of `numel`."""
        if self.select == "chunk":
            return -(-numel // self.chunk)
        return min(numel, max(1, round(self.density * numel)))

    def index_dtype(self, numel: int) -> torch.dtype:
        if self.select == "chunk":
            return narrowest(self.chunk - 1)
        return torch.int32 if numel <= torch.iinfo(torch.int32).max else torch.int64

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        if self.select == "chunk":
            offset = largest_of_each_chunk(x, self.chunk)
            first = torch.arange(0, x.numel(), self.chunk, device=x.device)
        else:
            offset, first = (
                largest(x, self.count(x.numel())),
                torch.zeros((), dtype=torch.int64, device=x.device),
            )
        value = x[first + offset]
        x[first + offset] = 0
        offset, value = yield AllGather((offset.to(self.index_dtype(x.numel())), value))
        return scatter_mean(first + offset.long(), value, ctx.result(x)), state

    def rounds(self, ctx: Context) -> Sequence[Round]:
        numel = ctx.layout.numel
        entry = self.index_dtype(numel).itemsize + ctx.layout.itemsize
        return [(AllGather, self.count(numel) * entry)]

    def contraction(self, layout: UnitLayout) -> float:
        if self.select == "chunk":
            return 1 / self.chunk
        return self.count(layout.numel) / layout.numel if layout.numel else 1.0
