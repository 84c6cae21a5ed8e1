"""Requests on a channel: each becomes one message."""

import math

import torch
from torch import Tensor

from compress.requests import AllGather, AllReduce, AllToAll, Replies, Request
from hooks.channel import Channel


class Transport:
    """Performs requests on one process group, blocking (gloo) or ordered by the current stream (NCCL).

    Args:
        channel: the lane's own communicator, or None for a single worker.

    Attributes:
        peers: number of workers.
        device: where messages of a few bytes should live.
        doing: the last request performed, in words, for error messages.
    """

    def __init__(self, channel: Channel | None) -> None:
        self.channel = channel
        self.peers = 1 if channel is None else channel.peers
        self.device = torch.device("cpu") if channel is None else channel.device
        self.doing = "no request yet"

    def __call__(self, request: Request) -> Replies:
        self.doing = f"{request.kind} of {request.payload_bytes} bytes"
        if request.axis != "world":
            raise ValueError(f"this transport has no axis {request.axis!r}, only 'world'")
        if isinstance(request, AllReduce):
            return self._all_reduce(request.parts)
        if isinstance(request, AllGather):
            return self._all_gather(request.parts)
        if isinstance(request, AllToAll):
            return self._all_to_all(request.parts)
        raise TypeError(f"unknown kind of request: {type(request).__name__}")

    def _all_reduce(self, parts: Replies) -> Replies:
        if self.channel is None:
            return parts
        dtypes = {part.dtype for part in parts}
        if len(dtypes) != 1:
            raise TypeError(f"tensors of one AllReduce must share a dtype, got {sorted(map(str, dtypes))}")
        flat = parts[0].reshape(-1) if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
        if flat.element_size() < 4:
            flat.div_(self.peers)
        self.channel.all_reduce_(flat)
        if flat.element_size() >= 4:
            flat.div_(self.peers)
        pieces = flat.split([part.numel() for part in parts])
        return tuple(piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True))

    def _all_gather(self, parts: Replies) -> Replies:
        if self.channel is None:
            return tuple(part.unsqueeze(0) for part in parts)
        # As bytes: one message whatever the dtypes, also those that a backend does not know.
        sent = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])
        received = sent.new_empty(self.peers * sent.numel())
        self.channel.all_gather(received, sent)
        return _columns(received.view(self.peers, -1), [(part.shape, part.dtype) for part in parts])

    def _all_to_all(self, parts: Replies) -> Replies:
        if self.channel is None:
            return parts
        rows = torch.cat([_row_bytes(part) for part in parts], dim=1)
        received = torch.empty_like(rows)
        self.channel.all_to_all(received, rows)
        return _columns(received, [(part.shape[1:], part.dtype) for part in parts])


def _row_bytes(part: Tensor) -> Tensor:
    """[peers, ...] -> uint8 [peers, bytes of a row]."""
    return part.contiguous().view(len(part), -1).view(torch.uint8)


def _columns(rows: Tensor, forms: list[tuple[torch.Size, torch.dtype]]) -> Replies:
    """Cut uint8 [peers, bytes] into one tensor [peers, *shape] for each (shape, dtype) of a row."""
    replies, start = [], 0
    for shape, dtype in forms:
        stop = start + math.prod(shape) * dtype.itemsize
        replies.append(rows[:, start:stop].contiguous().view(dtype).view(len(rows), *shape))
        start = stop
    return tuple(replies)
