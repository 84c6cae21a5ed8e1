"""Scaled sign with error feedback: one bit per element."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from compress.compressor import Compressor, Context, Exchange, Round, State, server_chunk
from compress.kernels import signs
from compress.layout import UnitLayout
from compress.options import option, register
from compress.protocols import Codec, served_chunk, two_sided, two_sided_rounds
from compress.state import Chunk


@dataclass(frozen=True)
class SignCodec(Codec):
    """sgn(x) times the mean magnitude of the block, the least-squares scale."""

    block: int = 2048

    def encode_(self, x: Tensor) -> tuple[Tensor, ...]:
        return signs.encode_(x, self.block)

    def decode_add_(self, out: Tensor, payload: tuple[Tensor, ...], weight: float = 1.0) -> None:
        bits, scales = payload
        signs.decode_add_(out, bits, scales, weight)

    def block_bytes(self, itemsize: int) -> int:
        return self.block // 8 + itemsize


@dataclass(frozen=True)
class SignState(State):
    server: Chunk = server_chunk()


@register("sign")
@dataclass(frozen=True)
class Sign(Compressor):
    """EF-signSGD (Karimireddy et al., 2019, arXiv:1901.09847), block-wise and two-sided as in dist-EF-SGD
    (Zheng et al., 2019, arXiv:1905.10936).

    C(x) = |x|_1 / B · sgn(x) on each block of B elements, at the workers and again at the servers.

    Args:
        block: elements that share a scale, a multiple of 8. Smaller: better approximation, more bytes (4 a block).

    On the wire: B/8 + 4 bytes a block, each way; (W-1)/W of it is sent twice, whatever W is.
    Law: conserves, with server memory. Contraction: |x|_1^2 / (B |x|_2^2) in each block, at least 1/B.
    Not for: tensors whose entries differ wildly in size within a block (split norms and biases off).

    >>> from compress import simulate
    >>> simulate("sign", [[[1.0, -1.0], [3.0, -3.0]]]).means[0].tolist()
    [2.0, -2.0]
    """

    block: Literal[256, 512, 1024, 2048, 4096, 8192] = option(2048)

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(), cls(block=256)]

    @property
    def codec(self) -> SignCodec:
        return SignCodec(self.block)

    def init(self, ctx: Context) -> State:
        return SignState(served_chunk(self.codec, ctx))

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        assert isinstance(state, SignState)
        mean, server = yield from two_sided(self.codec, x, state.server, ctx)
        return mean, SignState(server)

    def rounds(self, ctx: Context) -> Sequence[Round]:
        return two_sided_rounds(self.codec, ctx)

    def contraction(self, layout: UnitLayout) -> float:
        return 1 / min(self.block, max(layout.numel, 1))
