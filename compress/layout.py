"""Where each parameter's gradient lies in the flat arena of one exchange unit."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import prod

import torch
from torch import Tensor

PlaceKey = tuple[int, ...]


@dataclass(frozen=True)
class TensorSpec:
    """A parameter as the compressors see it.

    Args:
        name: the name in the model; seeds and checkpoints are keyed by it.
        shape: the parameter's shape; a complex parameter has a last axis of 2 (real, imaginary) more.
        is_complex: low-rank methods leave complex tensors uncompressed, since the real view doubles the rank.
    """

    name: str
    shape: tuple[int, ...]
    is_complex: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def matrix(self) -> tuple[int, int] | None:
        """(rows, columns) with all axes but the first flattened, or None below two axes or without elements."""
        if len(self.shape) < 2 or self.numel == 0:
            return None
        return self.shape[0], self.numel // self.shape[0]


@dataclass(frozen=True)
class Slot:
    """One parameter's place: elements [start, stop) of the arena."""

    spec: TensorSpec
    key: PlaceKey
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.spec.numel

    def view(self, arena: Tensor) -> Tensor:
        """This parameter's part of `arena`, in its shape."""
        return arena[self.start : self.stop].view(self.spec.shape)


@dataclass(frozen=True)
class Group:
    """A contiguous run of slots with the same key, e.g. all matrices of one shape."""

    key: PlaceKey
    slots: tuple[Slot, ...]

    @property
    def start(self) -> int:
        return self.slots[0].start

    @property
    def stop(self) -> int:
        return self.slots[-1].stop


@dataclass(frozen=True)
class UnitLayout:
    """The arena of one exchange unit: its slots in order, without gaps.

    Args:
        slots: the parameters, sorted by the key that the compressor's `place` gave them.
        dtype: the arena's dtype, float32, or float64 for double-precision parameters.
    """

    slots: tuple[Slot, ...]
    dtype: torch.dtype = torch.float32

    @classmethod
    def build(
        cls,
        specs: Iterable[TensorSpec],
        place: Callable[[TensorSpec], PlaceKey] = lambda spec: (),
        dtype: torch.dtype = torch.float32,
    ) -> "UnitLayout":
        """Lay the tensors out sorted by `place`; equal keys keep their order."""
        slots, offset = [], 0
        for key, spec in sorted(((place(spec), spec) for spec in specs), key=lambda pair: pair[0]):
            slots.append(Slot(spec, key, offset))
            offset += spec.numel
        return cls(tuple(slots), dtype)

    @cached_property
    def numel(self) -> int:
        return self.slots[-1].stop if self.slots else 0

    @property
    def itemsize(self) -> int:
        """Bytes of one element of the arena."""
        return self.dtype.itemsize

    @property
    def dense_bytes(self) -> int:
        """Bytes of the uncompressed arena."""
        return self.numel * self.itemsize

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Runs of slots with equal keys."""
        return tuple(Group(key, tuple(run)) for key, run in groupby(self.slots, key=lambda slot: slot.key))

    def part(self, index: int) -> tuple[slice, "UnitLayout"]:
        """The slots whose key starts with `index`: their range in this arena, and a layout of their own."""
        chosen = [slot for slot in self.slots if slot.key[0] == index]
        start = chosen[0].start if chosen else 0
        inner = tuple(Slot(slot.spec, slot.key[1:], slot.start - start) for slot in chosen)
        return slice(start, start + sum(slot.spec.numel for slot in chosen)), UnitLayout(inner, self.dtype)
