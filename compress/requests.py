"""The collectives an exchange may ask for, and what each costs on the wire.

An exchange never talks to a network. It *yields* one of these requests and is sent the reply, so the same
lines run on a process group, in the lockstep simulation and under the cost model.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

Replies = tuple[Tensor, ...]


@dataclass(frozen=True)
class Request:
    """A collective that every worker on `axis` asks for in the same round, with equal shapes and dtypes.

    The tensors travel as one message. They are given up: the reply may reuse their storage.

    Args:
        tensors: what this worker sends; the reply has one tensor for each.
        axis: the group of peers ("world" is every worker).
        control: a few floats of the driver's own (flags), [k]; when present the reply ends with its mean.
    """

    kind: ClassVar[str]

    tensors: tuple[Tensor, ...]
    axis: str = "world"
    control: Tensor | None = None

    @property
    def payload_bytes(self) -> int:
        """Bytes of the tensors that this worker hands in, without the control."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    @property
    def control_bytes(self) -> int:
        """Bytes of the driver's flags that ride in the same message."""
        if self.control is None:
            return 0
        return sum(part.numel() * part.element_size() for part in self.parts) - self.payload_bytes

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Every tensor of the message: the payload and, last, the control in the form this kind needs."""
        return self.tensors if self.control is None else (*self.tensors, self._control_part(self.control))

    def wire_bytes(self, peers: int) -> float:
        """Bytes this worker sends, control included, by the ring (all-reduce) or pairwise formula."""
        return self.factor(peers) * (self.payload_bytes + self.control_bytes)

    def with_control(self, control: Tensor) -> "Request":
        return replace(self, control=control)

    def without_control(self, replies: Replies) -> tuple[Replies, Tensor]:
        """Split the replies into the exchange's own and the mean of the control over the peers, fp32 [k]."""
        return replies[:-1], self._control_mean(replies[-1])

    @staticmethod
    def factor(peers: int) -> float:
        """Bytes sent by one worker per byte handed in."""
        raise NotImplementedError

    def _control_part(self, control: Tensor) -> Tensor:
        return control

    def _control_mean(self, reply: Tensor) -> Tensor:
        return reply.mean(0, dtype=torch.float32)


class AllReduce(Request):
    """[*s] -> [*s], the mean over peers. All tensors have one floating dtype.

    Half-width tensors are divided by the number of peers before they are summed, so that the sum does not
    overflow where the mean would not.
    """

    kind = "all_reduce"

    @staticmethod
    def factor(peers: int) -> float:
        return 2 * (peers - 1) / peers

    def _control_part(self, control: Tensor) -> Tensor:
        return control.to(self.tensors[0].dtype)  # a reduction has one dtype; flags survive any of them

    def _control_mean(self, reply: Tensor) -> Tensor:
        return reply.float()


class AllGather(Request):
    """[*s] -> [peers, *s], rows in the order of the peers."""

    kind = "all_gather"

    @staticmethod
    def factor(peers: int) -> float:
        return peers - 1


class AllToAll(Request):
    """[peers, *c] -> [peers, *c]: row i goes to peer i, row i of the reply came from peer i."""

    kind = "all_to_all"

    @staticmethod
    def factor(peers: int) -> float:
        return (peers - 1) / peers

    def _control_part(self, control: Tensor) -> Tensor:
        return control.expand(len(self.tensors[0]), *control.shape)


@dataclass
class Traffic:
    """What one worker sent: bytes by kind of collective.

    Args:
        payload_bytes: bytes handed in, by kind, without the driver's flags.
        control_bytes: bytes of the driver's flags.
        wire_bytes: bytes sent by the ring or pairwise formula, flags included.
        collectives: number of messages.
    """

    payload_bytes: dict[str, int] = field(default_factory=dict)
    control_bytes: int = 0
    wire_bytes: float = 0.0
    collectives: int = 0

    def count(self, request: Request, peers: int) -> None:
        """Add one request, answered by `peers` workers."""
        self.payload_bytes[request.kind] = self.payload_bytes.get(request.kind, 0) + request.payload_bytes
        self.control_bytes += request.control_bytes
        self.wire_bytes += request.wire_bytes(peers)
        self.collectives += 1
