"""Block-scaled integers with error feedback: a codec is all that a quantiser needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from compress.compressor import Compressor, Context, Exchange, Round, State, server_chunk
from compress.kernels import integers
from compress.layout import UnitLayout
from compress.options import option, register
from compress.protocols import Codec, served_chunk, two_sided, two_sided_rounds
from compress.state import Chunk


@dataclass(frozen=True)
class IntegerCodec(Codec):
    """Round to the nearest of 2 levels + 1 multiples of (largest magnitude of the block) / levels.

    Args:
        bits: 8 (one byte an element) or 4 (two elements a byte).
    """

    block: int = 256
    bits: int = 8

    @property
    def levels(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def encode_(self, x: Tensor) -> tuple[Tensor, ...]:
        codes, scales = integers.encode_(x, self.block, self.levels)
        return (codes if self.bits == 8 else integers.pack_nibbles(codes)), scales

    def decode_add_(self, out: Tensor, payload: tuple[Tensor, ...], weight: float = 1.0) -> None:
        codes, scales = payload
        integers.decode_add_(out, codes if self.bits == 8 else integers.unpack_nibbles(codes), scales, weight)

    def block_bytes(self, itemsize: int) -> int:
        return self.block * self.bits // 8 + itemsize


@dataclass(frozen=True)
class IntegerState(State):
    server: Chunk = server_chunk()


@dataclass(frozen=True)
class Integer(Compressor):
    """What int8 and int4 share; see the subclasses."""

    bits: ClassVar[int]

    block: Literal[64, 128, 256, 512, 1024, 2048] = option(256)

    @property
    def codec(self) -> IntegerCodec:
        return IntegerCodec(self.block, self.bits)

    def init(self, ctx: Context) -> State:
        return IntegerState(served_chunk(self.codec, ctx))

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        assert isinstance(state, IntegerState)
        mean, server = yield from two_sided(self.codec, x, state.server, ctx)
        return mean, IntegerState(server)

    def rounds(self, ctx: Context) -> Sequence[Round]:
        return two_sided_rounds(self.codec, ctx)

    def contraction(self, layout: UnitLayout) -> float:
        """Zero is a level and the largest entry of a block is exact, so at least 1/block is removed; no entry is
        missed by more than half a level, which bounds the rest: 1 - block / (4 levels^2) where that is more."""
        block = min(self.block, max(layout.numel, 1))
        return max(1 / block, 1 - block / (4 * IntegerCodec(bits=self.bits).levels ** 2))


@register("int8")
@dataclass(frozen=True)
class Int8(Integer):
    """Nearest of 255 levels per block, two-sided, with error feedback at workers and servers.

    Args:
        block: elements that share a scale. Smaller: better approximation, more bytes (4 a block).

    On the wire: block + 4 bytes a block, each way; a quarter of float32, whatever W is.
    Law: conserves, with server memory. Contraction: at least 1 - B / (4 · 127^2) for blocks of B.
    Not for: links so slow that a quarter of the bytes still dominate; sign or PowerSGD go further.

    >>> from compress import simulate
    >>> simulate("int8", [[[127.0, -127.0], [1.0, -1.0]]]).means[0].tolist()
    [64.0, -64.0]
    """

    bits = 8


@register("int4")
@dataclass(frozen=True)
class Int4(Integer):
    """Nearest of 15 levels per block, two-sided, with error feedback at workers and servers.

    Args:
        block: elements that share a scale. Smaller: better approximation, more bytes (4 a block).

    On the wire: block / 2 + 4 bytes a block, each way; an eighth of float32, whatever W is.
    Law: conserves, with server memory. Contraction: at least 1/B for blocks of B.
    Not for: gradients whose entries differ wildly in size within a block (split norms and biases off).

    >>> from compress import simulate
    >>> simulate("int4", [[[7.0, -7.0], [7.0, -7.0]]]).means[0].tolist()
    [7.0, -7.0]
    """

    bits = 4
