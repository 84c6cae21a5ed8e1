"""Requests on a process group: each becomes one message of torch.distributed."""

import math
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from compress.requests import AllGather, AllReduce, AllToAll, Replies, Request

# torch 2.13 renamed the flat all-gather and warns about the old name.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

lane_groups: set[str] = set()
"""Names of the process groups that states made for themselves."""


def new_lane_group(parent: dist.ProcessGroup | None, timeout: float) -> dist.ProcessGroup:
    """A process group with the ranks of `parent` (default: all) that nothing else communicates on.

    Collective on those ranks. A group of its own, because two users of one gloo group abort the process.

    Args:
        timeout: seconds after which a collective that a peer does not join raises.
    """
    if parent is None or parent is dist.group.WORLD:
        group = dist.new_group(timeout=timedelta(seconds=timeout))
    else:
        ranks = dist.get_process_group_ranks(parent)
        group = dist.new_group(ranks, timeout=timedelta(seconds=timeout), use_local_synchronization=True)
    lane_groups.add(group.group_name)
    return group


def drop_group(group: dist.ProcessGroup, abort: bool = False) -> None:
    """Give a lane's group back; with `abort`, peers that wait in a collective fail at once.

    Quiet when the group or all of torch.distributed is gone already.
    """
    lane_groups.discard(group.group_name)
    if not dist.is_initialized():
        return
    # Quiet: no backend for a device, a torch without abort, or a group that is gone already.
    if abort:
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            with suppress(RuntimeError, ValueError, AttributeError):
                group._get_backend(torch.device(device)).abort()
    with suppress(RuntimeError, ValueError, AssertionError):
        dist.destroy_process_group(group)


class Transport:
    """Performs requests on one process group, blocking (gloo) or ordered by the current stream (NCCL).

    Args:
        group: the lane's own group, or None for a single worker.

    Attributes:
        peers: number of workers in the group.
        doing: the last request performed, in words, for error messages.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.peers = 1 if group is None else dist.get_world_size(group)
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
        if self.group is None:
            return parts
        dtypes = {part.dtype for part in parts}
        if len(dtypes) != 1:
            raise TypeError(f"tensors of one AllReduce must share a dtype, got {sorted(map(str, dtypes))}")
        flat = parts[0].reshape(-1) if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
        if flat.element_size() < 4:
            flat.div_(self.peers)
        dist.all_reduce(flat, group=self.group)
        if flat.element_size() >= 4:
            flat.div_(self.peers)
        pieces = flat.split([part.numel() for part in parts])
        return tuple(piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True))

    def _all_gather(self, parts: Replies) -> Replies:
        if self.group is None:
            return tuple(part.unsqueeze(0) for part in parts)
        # As bytes: one message whatever the dtypes, also those that a backend does not know.
        sent = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])
        received = sent.new_empty(self.peers * sent.numel())
        _all_gather_flat(received, sent, group=self.group)
        return _columns(received.view(self.peers, -1), [(part.shape, part.dtype) for part in parts])

    def _all_to_all(self, parts: Replies) -> Replies:
        if self.group is None:
            return parts
        rows = torch.cat([_row_bytes(part) for part in parts], dim=1)
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows, group=self.group)
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
