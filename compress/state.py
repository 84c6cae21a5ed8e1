"""State as data: saving by parameter name, loading, and selecting, written once over the kinds of fields."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from compress.compressor import State
from compress.layout import Slot, UnitLayout

Saved = dict[str, dict[str, Any]]
Visit = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Elements [start, start + len(values)) of a unit-wide vector that is spread over the workers."""

    values: Tensor
    start: int

    def overlaps(self, layout: UnitLayout) -> Iterator[tuple[Slot, slice, int]]:
        """For each slot with elements in this chunk: the slot, its range in `values`, its first element there."""
        for slot in layout.slots:
            start, stop = max(slot.start, self.start), min(slot.stop, self.start + self.values.numel())
            if start < stop:
                yield slot, slice(start - self.start, stop - self.start), start - slot.start


def map_state(visit: Visit, layout: UnitLayout, state: State, *others: State, path: str = "", offset: int = 0) -> State:
    """Rebuild a state field by field, side by side with others of the same form.

    `visit(path, kind, layout, offset, value, *other values)` gives the new value of a field; of a tuple of server
    chunks it sees one at a time. `layout` is that of the part of the unit which the field belongs to, `offset`
    where the part begins.
    """
    new: dict[str, Any] = {}
    for field in dataclasses.fields(state):
        where, kind = f"{path}{field.name}", field.metadata.get("kind")
        values = [getattr(each, field.name) for each in (state, *others)]
        if kind == "nested":
            part = field.metadata["part"]
            span, inner = (slice(0, 0), layout) if part is None else layout.part(part)
            new[field.name] = map_state(visit, inner, *values, path=f"{where}.", offset=offset + span.start)
        elif kind is None:
            raise TypeError(f"{type(state).__qualname__}.{field.name} has no kind: declare it with per_matrix(), …")
        elif kind == "server_chunk" and isinstance(values[0], tuple):
            new[field.name] = tuple(visit(where, kind, layout, offset, *each) for each in zip(*values, strict=True))
        else:
            new[field.name] = visit(where, kind, layout, offset, *values)
    return type(state)(**new)


def save_state(state: State, layout: UnitLayout) -> Saved:
    """Field path -> parameter name -> tensor (per matrix) or {"start", "values"} (server chunks); clones."""
    saved: Saved = {}

    def visit(path: str, kind: str, layout: UnitLayout, offset: int, value: Any) -> Any:
        entries = saved.setdefault(path, {})
        if kind == "per_matrix":
            for group, stacked in zip(layout.groups, value, strict=True):
                if stacked.numel():
                    entries |= {slot.spec.name: row.clone() for slot, row in zip(group.slots, stacked, strict=True)}
        else:
            for slot, span, first in value.overlaps(layout):
                entries[slot.spec.name] = {"start": first, "values": value.values[span].clone()}
        return value

    map_state(visit, layout, state)
    return saved


def load_state(fresh: State, layout: UnitLayout, saved: Saved) -> State:
    """The saved values in the form of `fresh`, a newly initialised state.

    Raises:
        KeyError: a field or parameter is missing, with its name.
        ValueError: a tensor's shape differs.
    """

    def visit(path: str, kind: str, layout: UnitLayout, offset: int, value: Any) -> Any:
        entries = saved[path]
        if kind == "per_matrix":
            return tuple(
                _stack(path, stacked, [entries[slot.spec.name] for slot in group.slots]) if stacked.numel() else stacked
                for group, stacked in zip(layout.groups, value, strict=True)
            )
        values = value.values.clone()
        for slot, span, first in value.overlaps(layout):
            entry = entries.get(slot.spec.name)
            if entry is None:
                raise KeyError(f"{path} of parameter {slot.spec.name}")
            _fill(values[span], first, entry["values"], entry["start"])
        return Chunk(values, value.start)

    return map_state(visit, layout, fresh)


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

    def choose(path: str, kind: str, layout: UnitLayout, offset: int, new: Any, old: Any) -> Any:
        if kind == "per_matrix":
            return tuple(torch.where(accept, n, o) for n, o in zip(new, old, strict=True))
        return Chunk(torch.where(accept, new.values, old.values), new.start)

    return map_state(choose, layout, new, old)


def keep_unused(
    used: Tensor, new: State, old: State, residual: Tensor, memory: Tensor | None, layout: UnitLayout
) -> State:
    """Undo an exchange for the slots that no worker used: their memory (in `residual`) and server memory.

    Args:
        used: bool [slots of the unit].
    """
    is_used = dict(zip((slot.spec.name for slot in layout.slots), used, strict=True))
    for slot in layout.slots:
        if memory is None:
            break
        span = slice(slot.start, slot.stop)
        torch.where(is_used[slot.spec.name], residual[span], memory[span], out=residual[span])

    def choose(path: str, kind: str, layout: UnitLayout, offset: int, new: Any, old: Any) -> Any:
        if kind != "server_chunk":
            return new
        values = new.values.clone()
        for slot, span, _ in new.overlaps(layout):
            values[span] = torch.where(is_used[slot.spec.name], values[span], old.values[span])
        return Chunk(values, new.start)

    return map_state(choose, layout, new, old)


def drain_servers(state: State, layout: UnitLayout, into: Tensor, weight: float) -> State:
    """Add weight times this worker's server memory to `into`, [d]; returns the state with none left."""

    def visit(path: str, kind: str, layout: UnitLayout, offset: int, value: Any) -> Any:
        if kind != "server_chunk":
            return value
        start = offset + value.start
        into[start : start + value.values.numel()].add_(value.values, alpha=weight)
        return Chunk(torch.zeros_like(value.values), value.start)

    return map_state(visit, layout, state)


def server_memory(states: list[State], layout: UnitLayout) -> Tensor:
    """What the servers of all workers still owe, as one vector [d]: part of the conservation law."""
    total = torch.zeros(layout.numel, dtype=layout.dtype)
    for state in states:
        drain_servers(state, layout, total, weight=1.0)
    return total
