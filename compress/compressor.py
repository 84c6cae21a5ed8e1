"""The interface: what an algorithm must say, and what it is given."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from compress.layout import PlaceKey, TensorSpec, UnitLayout
from compress.options import check_options, format_options
from compress.requests import Replies, Request

Round = tuple[type[Request], int]


@dataclass(frozen=True)
class State:
    """What a compressor keeps between steps besides the error memory; subclasses declare their fields' kinds."""


Exchange = Generator[Request, Replies, tuple[Tensor, State]]


def per_matrix() -> Any:
    """A field with one stacked tensor [slots, ...] for each group of the layout, equal on all workers."""
    return field(metadata={"kind": "per_matrix"})


def server_chunk() -> Any:
    """A field with this worker's slice of a unit-wide vector (see `protocols.chunk_bounds`)."""
    return field(metadata={"kind": "server_chunk"})


def nested(part: int | None = None) -> Any:
    """A field with the state of an inner compressor, on the whole layout or on one part of it."""
    return field(metadata={"kind": "nested", "part": part})


@dataclass(frozen=True)
class Context:
    """What an exchange may know of where it runs.

    Args:
        layout: the arena's layout.
        peers: number of workers on the axis of the exchange. For splitting what is sent; replies say
            themselves how many answered.
        index: this worker's place among them, 0 <= index < peers.
        step: exchanges completed before this one, equal on all workers.
        seed: shared by all workers.
        device: where the arena lives.
        salt: tells units, and the children of one unit, apart in `shared_sample`.
        arena: room for the estimate, [d], reused from step to step; see `result`.
    """

    layout: UnitLayout
    peers: int = 1
    index: int = 0
    step: int = 0
    seed: int = 0
    device: torch.device = torch.device("cpu")
    salt: str = ""
    arena: Tensor | None = None

    def result(self, x: Tensor) -> Tensor:
        """Room for the estimate, in the form of x, contents undefined: fresh memory would cost more than to fill it."""
        return torch.empty_like(x) if self.arena is None or self.arena.shape != x.shape else self.arena

    def _generator(self, *purpose: object) -> np.random.Generator:
        words = "/".join(map(str, (self.seed, *purpose)))
        return np.random.Generator(np.random.SFC64(list(hashlib.blake2b(words.encode(), digest_size=16).digest())))

    def shared_normal(self, shape: Sequence[int], *purpose: object) -> Tensor:
        """Standard normal numbers [*shape], equal on all workers.

        The purpose (a parameter's name, the step …) alone decides them, whatever unit they are drawn for.
        """
        if self.device.type == "meta":
            return torch.empty(*shape, dtype=self.layout.dtype, device="meta")
        numbers = self._generator("normal", *purpose).standard_normal(tuple(shape), dtype=np.float64)
        return torch.from_numpy(numbers).to(self.device, self.layout.dtype)

    def private_bits(self, count: int) -> Tensor:
        """Fair coins, bool [count], new each step and each worker's own."""
        if self.device.type == "meta":
            return torch.empty(count, dtype=torch.bool, device="meta")
        octets = self._generator("bits", self.salt, self.step, self.index).bytes(-(count // -8))
        return torch.from_numpy(np.unpackbits(np.frombuffer(octets, np.uint8))[:count]).to(self.device, torch.bool)

    def shared_sample(self, count: int, population: int) -> Tensor:
        """`count` distinct indices below `population`, ascending, int64; new each step, equal on all workers."""
        if self.device.type == "meta":
            return torch.empty(count, dtype=torch.int64, device="meta")
        if count == population:
            return torch.arange(population, device=self.device)
        chosen = self._generator("sample", self.salt, self.step).choice(population, count, replace=False, shuffle=False)
        return torch.from_numpy(np.sort(chosen)).to(self.device)


class Compressor(ABC):
    """A compression algorithm: frozen hyper-parameters; state is passed in and a new one handed back.

    Subclasses are frozen dataclasses registered by `@register(name)`, final, and constructible without
    arguments. `exchange` is all that an algorithm must have, with `rounds` as the claim it is held to.
    """

    name: ClassVar[str]
    is_wrapper: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_options(self)

    def __str__(self) -> str:
        return format_options(self)

    @classmethod
    def examples(cls) -> "Sequence[Compressor]":
        """Configurations which the property suite checks."""
        return [cls()]

    @property
    def law(self) -> str:
        """`conserves`: mean of inputs (+ server memory) = estimate + mean of residuals (+ server memory); or `none`."""
        return "conserves"

    @property
    def keeps_memory(self) -> bool:
        """Whether what was not sent is kept for the next step. If not, x is free for reuse in `exchange`."""
        return True

    @property
    def rounding(self) -> float:
        """Relative rounding of arithmetic on the wire, by which the law may be missed beyond the arena's own."""
        return 0.0

    @property
    def largest(self) -> float:
        """Largest magnitude the wire carries; beyond it values arrive non-finite and the step is to be skipped."""
        return 1e30

    @property
    def needs_names(self) -> bool:
        """Whether `place` depends on the parameters' names in the model."""
        return False

    @property
    def prepares(self) -> bool:
        """Whether `prepare` does anything; without it gradient and memory are added in one pass."""
        return type(self).prepare is not Compressor.prepare

    def place(self, spec: TensorSpec) -> PlaceKey:
        """Sort key of a tensor in the arena; tensors with equal keys lie together."""
        return ()

    def init(self, ctx: Context) -> State:
        """The state before the first step."""
        return State()

    def prepare(self, grad: Tensor, state: State, ctx: Context) -> tuple[Tensor, State]:
        """See the raw gradient [d] before the memory is added (momentum lives here)."""
        return grad, state

    @abstractmethod
    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """From x = gradient + memory, [d], return (estimate of the mean over peers [d], new state).

        Leaves in x the residual: exactly what this worker did not get across. Writes nothing else.
        """

    @abstractmethod
    def rounds(self, ctx: Context) -> Sequence[Round]:
        """The claim: kind and payload bytes of each collective of one exchange, in order."""

    def contraction(self, layout: UnitLayout) -> float | None:
        """The claim: delta with |x - C(x)|^2 <= (1 - delta) |x|^2 for one worker, or None if there is none."""
        return None

    def wire_bytes(self, ctx: Context) -> float:
        """Bytes one worker sends in one exchange, by the ring or pairwise formula, without the driver's flags."""
        return sum(kind.factor(ctx.peers) * payload for kind, payload in self.rounds(ctx))
