"""State as data: saving by parameter name, loading, and selecting, written once over the kinds of fields."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from compress.compressor import State
from compress.layout import Slot, UnitLayout

Saved = dict[str, dict[str, Any]]
Visit = Callable[[str, str, Any, UnitLayout, int], Any]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Elements [start, start + len(values)) of a unit-wide vector that is spread over the workers."""

    values: Tensor
    start: int

    def overlaps(self, layout: UnitLayout, offset: int) -> Iterator[tuple[Slot, slice, int]]:
        """For each slot with elements in this chunk: the slot, its range in `values`, its first element there."""
        for slot in layout.slots:
            start, stop = max(slot.start, self.start), min(slot.stop, self.start + self.values.numel())
            if start < stop:
                yield slot, slice(start - self.start, stop - self.start), start - slot.start


def map_state(state: State, layout: UnitLayout, visit: Visit, path: str = "", offset: int = 0) -> State:
    """Rebuild a state field by field: `visit(path, kind, value, layout, offset)` gives the new value.

    `layout` is that of the part of the unit the field belongs to, `offset` where the part begins.
    """
    new: dict[str, Any] = {}
    for field in dataclasses.fields(state):
        value, where = getattr(state, field.name), f"{path}{field.name}"
        kind = field.metadata.get("kind")
        if kind == "nested":
            part = field.metadata["part"]
            span, inner = (slice(0, 0), layout) if part is None else layout.part(part)
            new[field.name] = map_state(value, inner, visit, f"{where}.", offset + span.start)
        elif kind is None:
            raise TypeError(f"{type(state).__qualname__}.{field.name} has no kind: declare it with per_matrix(), …")
        else:
            new[field.name] = visit(where, kind, value, layout, offset)
    return type(state)(**new)


def save_state(state: State, layout: UnitLayout) -> Saved:
    """Field path -> parameter name -> tensor (per matrix) or {"start", "values"} (server chunks); clones."""
    saved: Saved = {}

    def visit(path: str, kind: str, value: Any, layout: UnitLayout, offset: int) -> Any:
        entries = saved.setdefault(path, {})
        if kind == "per_matrix":
            for group, stacked in zip(layout.groups, value, strict=True):
                if stacked.numel():
                    entries |= {slot.spec.name: row.clone() for slot, row in zip(group.slots, stacked, strict=True)}
        else:
            for slot, span, first in value.overlaps(layout, offset):
                entries[slot.spec.name] = {"start": first, "values": value.values[span].clone()}
        return value

    map_state(state, layout, visit)
    return saved


def load_state(fresh: State, layout: UnitLayout, saved: Saved) -> State:
    """The saved values in the form of `fresh`, a newly initialised state.

    Raises:
        KeyError: a field or parameter is missing, with its name.
        ValueError: a tensor's shape differs.
    """

    def visit(path: str, kind: str, value: Any, layout: UnitLayout, offset: int) -> Any:
        entries = saved[path]
        if kind == "per_matrix":
            return tuple(
                _stack(path, stacked, [entries[slot.spec.name] for slot in group.slots]) if stacked.numel() else stacked
                for group, stacked in zip(layout.groups, value, strict=True)
            )
        values = value.values.clone()
        for slot, span, first in value.overlaps(layout, offset):
            entry = entries.get(slot.spec.name)
            if entry is None:
                raise KeyError(f"{path} of parameter {slot.spec.name}")
            _fill(values[span], first, entry["values"], entry["start"])
        return Chunk(values, value.start)

    return map_state(fresh, layout, visit)


def _stack(path: str, like: Tensor, rows: list[Tensor]) -> Tensor:
    stacked = torch.stack(rows).to(like.device, like.dtype)
    if stacked.shape != like.shape:
        raise ValueError(f"{path}: expected {list(like.shape)}, the checkpoint has {list(stacked.shape)}")
    return stacked


def _fill(target: Tensor, target_start: int, source: Tensor, source_start: int) -> None:
    """Copy where the two ranges of one parameter overlap."""
    start = max(target_start, source_start)
    stop = min(target_start + target.numel(), source_start + source.numel())
    if start < stop:
        target[start - target_start : stop - target_start] = source[start - source_start : stop - source_start]


def select(accept: Tensor, new: State, old: State, layout: UnitLayout) -> State:
    """`new` where the 0-d bool tensor is true, else `old`, without looking at it on the host."""
    olds: dict[str, Any] = {}

    def remember(path: str, kind: str, value: Any, layout: UnitLayout, offset: int) -> Any:
        olds[path] = value
        return value

    def choose(path: str, kind: str, value: Any, layout: UnitLayout, offset: int) -> Any:
        if kind == "per_matrix":
            return tuple(torch.where(accept, n, o) for n, o in zip(value, olds[path], strict=True))
        return Chunk(torch.where(accept, value.values, olds[path].values), value.start)

    map_state(old, layout, remember)
    return map_state(new, layout, choose)


def keep_unused(
    used: Tensor, new: State, old: State, residual: Tensor, memory: Tensor | None, layout: UnitLayout
) -> State:
    """Undo an exchange for the slots that no worker used: their memory (in `residual`) and server memory.

    Args:
        used: bool [slots of the unit].
    """
    mask = dict(zip((slot.spec.name for slot in layout.slots), used, strict=True))
    for slot in layout.slots:
        if memory is None:
            break
        span = slice(slot.start, slot.stop)
        torch.where(mask[slot.spec.name], residual[span], memory[span], out=residual[span])
    olds: dict[str, Any] = {}

    def remember(path: str, kind: str, value: Any, layout: UnitLayout, offset: int) -> Any:
        olds[path] = value
        return value

    def choose(path: str, kind: str, value: Any, layout: UnitLayout, offset: int) -> Any:
        if kind != "server_chunk":
            return value
        values = value.values.clone()
        for slot, span, _ in value.overlaps(layout, offset):
            values[span] = torch.where(mask[slot.spec.name], values[span], olds[path].values[span])
        return Chunk(values, value.start)

    map_state(old, layout, remember)
    return map_state(new, layout, choose)


def server_memory(states: list[State], layout: UnitLayout) -> Tensor:
    """What the servers of all workers still owe, as one vector [d]: part of the conservation law."""
    total = torch.zeros(layout.numel, dtype=layout.dtype)

    def visit(path: str, kind: str, value: Any, layout: UnitLayout, offset: int) -> Any:
        if kind == "server_chunk":
            start = offset + value.start
            total[start : start + value.values.numel()] += value.values.cpu()
        return value

    for state in states:
        map_state(state, layout, visit)
    return total
