"""The communicator of one lane: a process group that nothing else uses.

It must not be shared, since two users of one gloo group abort the process.
"""

from collections import Counter
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed the flat all-gather and warns about the old name.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

lane_groups: set[str] = set()
"""Names of the registered process groups that lanes made for themselves."""

_made: Counter[tuple[int, ...]] = Counter()


class Channel(Protocol):
    """Collectives on flat tensors; blocking (gloo) or ordered by the current stream (NCCL)."""

    peers: int
    device: torch.device
    """Where messages of a few bytes should live."""

    def all_reduce_(self, flat: Tensor) -> None:
        """flat = its sum over the peers."""

    def all_gather(self, received: Tensor, sent: Tensor) -> None:
        """received [peers * n] = everybody's sent [n], in order."""

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        """Row i of sent [peers, n] goes to peer i; row i of received came from peer i."""

    def close(self, abort: bool = False) -> None:
        """Give the group back; with `abort`, peers that wait in a collective fail at once. May be repeated."""


class GlooChannel:
    """A gloo communicator outside torch.distributed's registry, whose names for groups of some of the ranks depend on
    how many other groups each rank has at the moment.

    Collective on the ranks, which must make their channels in the same order.

    Args:
        ranks: of the default group, the same on all.
        timeout: seconds after which a collective that a peer does not join raises.
    """

    def __init__(self, ranks: list[int], timeout: float) -> None:
        key, self.peers = tuple(ranks), len(ranks)
        prefix = f"gradwire/{'-'.join(map(str, key))}/{_made[key]}"
        _made[key] += 1
        store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        limit = timedelta(seconds=timeout)
        self.device = torch.device("cpu")
        group: Any = dist.ProcessGroupGloo(store, ranks.index(dist.get_rank()), self.peers, limit)
        # A rank that fails and leaves before the others have connected would look like a fault of theirs.
        group.barrier().wait()
        self._group = group

    @property
    def _open(self) -> Any:
        if self._group is None:
            raise RuntimeError("the lane's process group was closed")
        return self._group

    def all_reduce_(self, flat: Tensor) -> None:
        host = flat.cpu()  # itself, unless on a device: gloo is at home on the host
        self._open.allreduce([host]).wait()
        if host is not flat:
            flat.copy_(host)

    def all_gather(self, received: Tensor, sent: Tensor) -> None:
        host = torch.empty_like(received, device="cpu") if received.is_cuda else received
        self._open._allgather_base(host, sent.cpu()).wait()
        if host is not received:
            received.copy_(host)

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        host = torch.empty_like(received, device="cpu") if received.is_cuda else received
        self._open.alltoall_base(host, sent.cpu(), [], []).wait()
        if host is not received:
            received.copy_(host)

    def close(self, abort: bool = False) -> None:
        group, self._group = self._group, None
        if group is not None and abort:
            with suppress(AttributeError):  # torch before 2.7: dropping the group closes its connections
                group.abort()


class GroupChannel:
    """A process group of torch.distributed, for NCCL and other back ends.

    Collective on the ranks of `parent` (default: all). Not given back where it has only some of the ranks: the next
    group of the same ranks could get its name again.
    """

    def __init__(self, parent: dist.ProcessGroup | None, timeout: float) -> None:
        limit = timedelta(seconds=timeout)
        self._reusable = parent is None or parent is dist.group.WORLD
        if self._reusable:
            self._group = dist.new_group(timeout=limit)
        else:
            ranks = dist.get_process_group_ranks(parent)  # type: ignore[arg-type]
            self._group = dist.new_group(ranks, timeout=limit, use_local_synchronization=True)
        self._closed = False
        self.peers = dist.get_world_size(self._group)
        accelerated = torch.cuda.is_available() and dist.get_backend(self._group) == dist.Backend.NCCL
        self.device = torch.device("cuda", torch.cuda.current_device()) if accelerated else torch.device("cpu")
        lane_groups.add(self._group.group_name)

    def all_reduce_(self, flat: Tensor) -> None:
        dist.all_reduce(flat, group=self._group)

    def all_gather(self, received: Tensor, sent: Tensor) -> None:
        _all_gather_flat(received, sent, group=self._group)

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        dist.all_to_all_single(received, sent, group=self._group)

    def close(self, abort: bool = False) -> None:
        if self._closed or not dist.is_initialized():
            return
        self._closed = True
        if abort:
            with suppress(RuntimeError, ValueError, AttributeError):
                self._group.abort()
        elif self._reusable:
            with suppress(RuntimeError, ValueError, AssertionError):
                dist.destroy_process_group(self._group)
                lane_groups.discard(self._group.group_name)


def open_channel(parent: dist.ProcessGroup | None, timeout: float) -> Channel:
    """A communicator of its own for the ranks of `parent` (default: all); collective on them."""
    if dist.get_backend(parent) == dist.Backend.GLOO:
        ranks = list(range(dist.get_world_size())) if parent is None else dist.get_process_group_ranks(parent)
        return GlooChannel(ranks, timeout)
    return GroupChannel(parent, timeout)
