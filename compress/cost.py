"""What an exchange costs on a link, without running it: the alpha-beta model on meta tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compress.compressor import Compressor, Context
from compress.driver import drive
from compress.layout import UnitLayout
from compress.options import parse
from compress.requests import AllGather, AllReduce, Replies, Request


@dataclass(frozen=True)
class Price:
    """The communication of one step.

    Args:
        wire_bytes: bytes that one worker sends.
        latency_seconds: messages that wait for one another, times the link's latency.
        bandwidth_seconds: bytes sent over the link's bandwidth.
        collectives: messages.
    """

    wire_bytes: float = 0.0
    latency_seconds: float = 0.0
    bandwidth_seconds: float = 0.0
    collectives: int = 0

    @property
    def seconds(self) -> float:
        """Latency and bandwidth terms together."""
        return self.latency_seconds + self.bandwidth_seconds

    def __add__(self, other: "Price") -> "Price":
        return Price(
            self.wire_bytes + other.wire_bytes,
            self.latency_seconds + other.latency_seconds,
            self.bandwidth_seconds + other.bandwidth_seconds,
            self.collectives + other.collectives,
        )


def price_request(request: Request, peers: int, bits_per_second: float, latency: float) -> Price:
    """One collective: ring all-reduce 2(W-1) messages deep, the others W-1; the wire carries `wire_bytes`."""
    hops = (2 if isinstance(request, AllReduce) else 1) * (peers - 1)
    sent = request.wire_bytes(peers)
    return Price(sent, hops * latency, sent * 8 / bits_per_second, 1)


def price(
    compressor: Compressor | str,
    layouts: UnitLayout | Sequence[UnitLayout],
    workers: int,
    *,
    bits_per_second: float,
    latency: float = 50e-6,
    step: int = 1 << 40,
) -> Price:
    """Price one step of one or more units, in bytes and seconds per worker, encode and decode not included.

    Args:
        bits_per_second: rate of one worker's link, each way.
        latency: seconds per message.
        step: which step; the default lies beyond any warm-up.

    The exchange is run on meta tensors, so models of any size cost milliseconds and no memory.
    """
    chosen = parse(compressor) if isinstance(compressor, str) else compressor
    total = Price()
    for layout in [layouts] if isinstance(layouts, UnitLayout) else layouts:
        ctx = Context(layout, workers, step=step, device=torch.device("meta"))

        def perform(request: Request) -> Replies:
            nonlocal total
            total += price_request(request, workers, bits_per_second, latency)
            if isinstance(request, AllGather):
                return tuple(part.expand(workers, *part.shape).clone() for part in request.parts)
            return request.parts

        x = torch.empty(layout.numel, dtype=layout.dtype, device="meta")
        drive(chosen.exchange(x, chosen.init(ctx), ctx), perform)
    return total
