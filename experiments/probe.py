"""What the link really does: throughput, and the bytes that a collective costs beside its payload. Collective."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from compress import AllGather, AllReduce, AllToAll, Request
from compress.requests import Replies
from experiments.links import MTU, sent_bytes
from hooks import HookState

Transport = Callable[[Callable[[Request], Replies]], Callable[[Request], Replies]]

HEADER_BYTES = 14 + 20 + 20 + 12
"""What an interface counts for each frame beside its payload: Ethernet, IPv4, TCP, and TCP's time stamps."""

FRAME_OVERHEAD = 1.5 * HEADER_BYTES / (MTU - 52)
"""Headers per payload byte in full frames; the half is the acknowledgement of every second frame that arrives."""

SETTLE_SECONDS = 0.02
"""What this worker has handed to the kernel has left after so long."""


@dataclass(frozen=True)
class Probe:
    """The link as measured by this worker.

    Args:
        dense_seconds: an all-reduce of the whole gradient, fp32.
        bits_per_second: that this worker sent while it ran.
        collective_bytes: kind of collective -> bytes that the interface counts for one of any size, beyond payload
            and FRAME_OVERHEAD: the frames that are not full, acknowledgements, and gloo's own messages.
    """

    dense_seconds: float
    bits_per_second: float
    collective_bytes: dict[str, float]


def settled_bytes(interface: str) -> int:
    """The interface's counter once nothing of this worker's is on its way."""
    time.sleep(SETTLE_SECONDS)
    return sent_bytes(interface)


def probe(
    elements: int, interface: str | None = None, transport: Transport | None = None, timeout: float = 120.0
) -> Probe:
    """Measure the link.

    Args:
        elements: of the gradient.
        interface: whose counter to read; without one `collective_bytes` is empty.
        transport: of a simulated link.
        timeout: seconds that a collective waits for a peer.
    """
    state = HookState("none", transport=transport, timeout=timeout)
    try:
        seconds = []
        for _ in range(4):
            request = AllReduce((torch.ones(elements),))
            started = time.perf_counter()
            state.perform(request)
            seconds.append(time.perf_counter() - started)
        dense = statistics.median(seconds[1:])  # the first one opens the connections
        collective_bytes = {}
        if interface is not None and state.peers > 1:
            for make in (
                lambda: AllReduce((torch.ones(1024 * state.peers),)),
                lambda: AllGather((torch.ones(1024),)),
                lambda: AllToAll((torch.ones(state.peers, 1024),)),
            ):
                collective_bytes[make().kind] = _collective_bytes(state, make, interface)
        return Probe(dense, 8 * AllReduce((torch.ones(elements),)).wire_bytes(state.peers) / dense, collective_bytes)
    finally:
        state.close()


def _collective_bytes(state: HookState, make: Callable[[], Request], interface: str, repeats: int = 20) -> float:
    state.perform(make())
    before = settled_bytes(interface)
    for _ in range(repeats):
        state.perform(make())
    counted = (settled_bytes(interface) - before) / repeats
    return counted - (1 + FRAME_OVERHEAD) * make().wire_bytes(state.peers)
