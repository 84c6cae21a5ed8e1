"""Half-width wire: float16 and bfloat16."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from compress.compressor import Compressor, Context, Exchange, Round, State, server_chunk
from compress.layout import UnitLayout
from compress.options import option, register
from compress.protocols import Codec, served_chunk, two_sided, two_sided_rounds
from compress.requests import AllReduce
from compress.state import Chunk


@dataclass(frozen=True)
class HalfCodec(Codec):
    """Round to nearest in a 16-bit format."""

    dtype: torch.dtype
    block: int = 256

    def encode_(self, x: Tensor) -> tuple[Tensor, ...]:
        padded = torch.zeros(-(-x.numel() // self.block) * self.block, dtype=self.dtype, device=x.device)
        sent = padded[: x.numel()].copy_(x)
        x.sub_(sent)
        return (padded.view(-1, self.block),)

    def decode_add_(self, out: Tensor, payload: tuple[Tensor, ...], weight: float = 1.0) -> None:
        out.add_(payload[0].reshape(-1)[: out.numel()], alpha=weight)

    def block_bytes(self, itemsize: int) -> int:
        return self.block * self.dtype.itemsize


@dataclass(frozen=True)
class HalfState(State):
    server: Chunk = server_chunk()


@dataclass(frozen=True)
class Half(Compressor):
    """What float16 and bfloat16 share; see the subclasses."""

    dtype: ClassVar[torch.dtype]

    wide_sum: bool = option(False)
    memory: bool = option(False)

    @classmethod
    def examples(cls) -> "Sequence[Compressor]":
        return [cls(wide_sum, memory) for wide_sum in (False, True) for memory in (False, True)]

    @property
    def keeps_memory(self) -> bool:
        return self.memory

    @property
    def codec(self) -> HalfCodec:
        return HalfCodec(self.dtype)

    def init(self, ctx: Context) -> State:
        return HalfState(served_chunk(self.codec, ctx)) if self.wide_sum else State()

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        if self.wide_sum:
            assert isinstance(state, HalfState)
            mean, server = yield from two_sided(self.codec, x, state.server, ctx)
            if not self.memory:
                server = replace(server, values=torch.zeros_like(server.values))
            return mean, HalfState(server)
        sent = x.to(self.dtype)
        if self.memory:
            x.sub_(sent)
        (mean,) = yield AllReduce((sent,))
        return (mean.to(x.dtype) if self.memory else x.copy_(mean)), state

    def rounds(self, ctx: Context) -> Sequence[Round]:
        if self.wide_sum:
            return two_sided_rounds(self.codec, ctx)
        return [(AllReduce, ctx.layout.numel * self.dtype.itemsize)]


@register("fp16")
@dataclass(frozen=True)
class FP16(Half):
    """All-reduce in float16.

    Args:
        wide_sum: sum in the arena's precision (all-to-all, then all-gather; same bytes): one rounding a worker
            and one of the mean, whatever the number of workers. For many workers.
        memory: keep what rounding lost and send it later; what is lost in the sum, such as means below 6e-8,
            only with wide_sum.

    On the wire: 2 bytes an element in one all-reduce, or each way of the two-sided exchange.
    Law: conserves up to the rounding of the sum; exactly with wide_sum and memory.
    Not for: gradients beyond 65504 (they arrive as infinities, and the step should be skipped, as GradScaler
    does) or mostly below 6e-8.

    >>> from compress import simulate
    >>> simulate("fp16", [[[1.0, 2.0], [3.0, 6.0]]]).means[0].tolist()
    [2.0, 4.0]
    """

    dtype = torch.float16
    rounding = 2.0**-9
    largest = 60000.0


@register("bf16")
@dataclass(frozen=True)
class BF16(Half):
    """All-reduce in bfloat16: the range of float32 with 8 significant bits. The baseline to beat.

    Args:
        wide_sum: sum in the arena's precision (all-to-all, then all-gather; same bytes): one rounding a worker
            and one of the mean, whatever the number of workers. For more than about 8 workers.
        memory: keep what rounding lost and send it later.

    On the wire: 2 bytes an element in one all-reduce, or each way of the two-sided exchange.
    Law: conserves up to the rounding of the sum; exactly with wide_sum and memory.
    Not for: links where half of the bytes still take longer than the computation.

    >>> from compress import simulate
    >>> simulate("bf16", [[[1.0, 2.0], [3.0, 6.0]]]).means[0].tolist()
    [2.0, 4.0]
    """

    dtype = torch.bfloat16
    rounding = 2.0**-6

    def contraction(self, layout: UnitLayout) -> float:
        return 1 - 2.0**-16
