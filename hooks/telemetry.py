"""What an exchange cost: bytes, messages, seconds."""

import copy
from dataclasses import dataclass, field

from compress.requests import Traffic


@dataclass
class StepStats(Traffic):
    """Traffic and time of one step, or summed over steps, of this worker.

    Args:
        dense_bytes: bytes of the gradient as it would be without compression, in the arena's precision.
        encode_seconds: computing before the last reply (forming the arena included).
        communicate_seconds: in collectives, waiting for slower peers included. On CUDA these three are the
            host's seconds for issuing, not the device's.
        decode_seconds: computing after the last reply (writing the result included).
    """

    dense_bytes: int = 0
    encode_seconds: float = 0.0
    communicate_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """Dense bytes over payload bytes: how many times smaller what this worker hands in is."""
        payload = sum(self.payload_bytes.values()) + self.control_bytes
        return self.dense_bytes / payload if payload else float("inf")

    def add(self, other: "StepStats") -> None:
        for kind, payload in other.payload_bytes.items():
            self.payload_bytes[kind] = self.payload_bytes.get(kind, 0) + payload
        self.control_bytes += other.control_bytes
        self.wire_bytes += other.wire_bytes
        self.collectives += other.collectives
        self.dense_bytes += other.dense_bytes
        self.encode_seconds += other.encode_seconds
        self.communicate_seconds += other.communicate_seconds
        self.decode_seconds += other.decode_seconds


@dataclass
class Stats:
    """Telemetry of a state.

    Args:
        steps: exchanges finished, skipped ones (non-finite) included.
        skipped: steps that were not committed because something was non-finite.
        last: the last step.
        total: the sum over all steps.
    """

    steps: int = 0
    skipped: int = 0
    last: StepStats = field(default_factory=StepStats)
    total: StepStats = field(default_factory=StepStats)

    def finish(self, step: StepStats) -> None:
        """Enter a finished step."""
        self.steps += 1
        self.last = copy.deepcopy(step)
        self.total.add(step)
