"""Ways to turn payloads into a mean, each written once: the two-sided exchange and exchanges side by side."""

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from compress.compressor import Context, Round
from compress.requests import AllGather, AllReduce, AllToAll, Replies, Request
from compress.state import Chunk

Result = TypeVar("Result")


class Codec(ABC):
    """A wire format for blocks of a vector: a pure encoder and decoder.

    A payload is a tuple of tensors whose first axis counts blocks, so that a run of blocks can be cut out and
    sent on its own. The last block of a vector may be shorter than `block`; what pads it never enters a scale.
    """

    block: int
    """Elements of a block."""

    @abstractmethod
    def encode_(self, x: Tensor) -> tuple[Tensor, ...]:
        """The payload of x, [d]; **subtracts what the payload decodes to from x**, which is then the residual."""

    @abstractmethod
    def decode_add_(self, out: Tensor, payload: tuple[Tensor, ...], weight: float = 1.0) -> None:
        """out += weight * decoded payload, out [d] with d <= blocks * block."""

    @abstractmethod
    def block_bytes(self, itemsize: int) -> int:
        """Bytes of one block's payload, for an arena with elements of `itemsize` bytes."""


def chunk_blocks(numel: int, peers: int, block: int) -> int:
    """Blocks of the chunk that each peer serves: all peers the same number, together at least `numel` elements."""
    return math.ceil(math.ceil(numel / block) / peers)


def served_chunk(codec: Codec, ctx: Context, first: int = 0, last: int | None = None) -> Chunk:
    """The empty server memory of this worker: the elements it averages for the others, of [first, last) of the
    arena (all of it by default)."""
    last = ctx.layout.numel if last is None else last
    size = chunk_blocks(last - first, ctx.peers, codec.block) * codec.block
    start, stop = min(first + ctx.index * size, last), min(first + (ctx.index + 1) * size, last)
    return Chunk(torch.zeros(stop - start, dtype=ctx.layout.dtype, device=ctx.device), start)


def two_sided(
    codec: Codec, x: Tensor, server: Chunk, ctx: Context
) -> Generator[Request, Replies, tuple[Tensor, Chunk]]:
    """Compressed all-reduce: send each peer the part it serves, average and encode again there, gather.

    The server adds its memory to the mean before encoding and keeps what that encoding loses. Bytes per worker
    do not grow with their number, and all workers decode the same bytes.

    Args:
        x: gradient + memory, [d]; becomes this worker's residual.
        server: this worker's server memory (see `served_chunk`).

    Returns:
        The decoded mean [d] and the new server memory.

    Source: the exchange of 1-bit SGD (Seide et al., 2014) with both memories, analysed as DoubleSqueeze
    (Tang et al., 2019, arXiv:1905.05957).
    """
    blocks = chunk_blocks(x.numel(), ctx.peers, codec.block)
    payload = tuple(_pad_blocks(part, blocks * ctx.peers) for part in codec.encode_(x))
    received = yield AllToAll(tuple(part.view(ctx.peers, blocks, *part.shape[1:]) for part in payload))
    peers, served = len(received[0]), server.values.clone()
    for row in range(peers):
        codec.decode_add_(served, tuple(part[row] for part in received), 1 / peers)
    gathered = yield AllGather(tuple(_pad_blocks(part, blocks) for part in codec.encode_(served)))
    mean = ctx.result(x).zero_()
    codec.decode_add_(mean, tuple(part.flatten(0, 1) for part in gathered))
    return mean, Chunk(served, server.start)


def two_sided_rounds(codec: Codec, ctx: Context, numel: int | None = None) -> list[Round]:
    """The collectives of `two_sided` for `numel` elements (default: the whole arena), with their payload bytes."""
    blocks = chunk_blocks(ctx.layout.numel if numel is None else numel, ctx.peers, codec.block)
    chunk_bytes = blocks * codec.block_bytes(ctx.layout.itemsize)
    return [(AllToAll, ctx.peers * chunk_bytes), (AllGather, chunk_bytes)]


def _pad_blocks(part: Tensor, blocks: int) -> Tensor:
    """Zero blocks up to the given number; they decode to zero and belong to no element."""
    if len(part) == blocks:
        return part
    padded = part.new_zeros(blocks, *part.shape[1:])
    padded[: len(part)] = part
    return padded


def parallel(exchanges: Sequence[Generator[Request, Replies, Result]]) -> Generator[Request, Replies, list[Result]]:
    """Run exchanges side by side: what they ask for in one round, of one kind and axis, is one message.

    In a reduction the tensors must also share a dtype; what does not fit together travels separately, in the
    order of the exchanges.
    """
    results: list[Any] = [None] * len(exchanges)
    waiting: dict[int, Request] = {}

    def advance(child: int, replies: Replies | None) -> None:
        try:
            waiting[child] = next(exchanges[child]) if replies is None else exchanges[child].send(replies)
        except StopIteration as done:
            results[child] = done.value

    for child in range(len(exchanges)):
        advance(child, None)
    while waiting:
        messages: dict[tuple[Any, ...], list[int]] = {}
        for child, request in waiting.items():
            dtypes = {tensor.dtype for tensor in request.tensors} if isinstance(request, AllReduce) else set()
            messages.setdefault((type(request), request.axis, *dtypes), []).append(child)
        for children in messages.values():
            requests = [waiting.pop(child) for child in children]
            replies = yield replace(requests[0], tensors=tuple(t for r in requests for t in r.tensors))
            for child, request in zip(children, requests, strict=True):
                own, replies = replies[: len(request.tensors)], replies[len(request.tensors) :]
                advance(child, own)
    return results
