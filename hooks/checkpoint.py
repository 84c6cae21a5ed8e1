"""Checkpoints of hook states: by parameter name, independent of units, buckets and device."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from compress.state import load_state, save_state
from hooks.units import NamedParameter, Unit


def save_units(
    units: Sequence[Unit], parameters: Sequence[NamedParameter], header: Mapping[str, Any]
) -> dict[str, Any]:
    """A state dict of plain tensors, numbers and strings."""
    memory: dict[str, torch.Tensor] = {}
    state: dict[str, dict[str, Any]] = {}
    for unit in units:
        if unit.carry.memory is not None:
            memory |= {slot.spec.name: slot.view(unit.carry.memory).clone() for slot in unit.layout.slots}
        for path, entries in save_state(unit.carry.state, unit.layout).items():
            state.setdefault(path, {}).update(entries)
    described = [[each.name, list(each.tensor.shape), str(each.tensor.dtype)] for each in parameters]
    return {**header, "parameters": described, "memory": memory, "state": state}


def load_units(units: Sequence[Unit], parameters: Sequence[NamedParameter], saved: Mapping[str, Any]) -> None:
    """Put a checkpoint's memories and states into the units.

    Raises:
        ValueError: the checkpoint is of a model with other parameters, or lacks something; says what.
    """
    mine = [(each.name, list(each.tensor.shape)) for each in parameters]
    theirs = [(name, list(shape)) for name, shape, _ in saved["parameters"]]
    if sorted(mine) != sorted(theirs):
        unknown = [entry for entry in theirs if entry not in mine] + [entry for entry in mine if entry not in theirs]
        raise ValueError(
            f"the checkpoint is of another model: parameter {unknown[0][0]} {unknown[0][1]} is in only one"
        )
    loaded = []
    for unit in units:
        memory = unit.carry.memory
        try:
            if memory is not None:
                memory = torch.empty_like(memory)
                for slot in unit.layout.slots:
                    slot.view(memory).copy_(saved["memory"][slot.spec.name])
            state = load_state(unit.carry.state, unit.layout, saved["state"])
            loaded.append(replace(unit.carry, state=state, memory=memory))
        except KeyError as error:
            raise ValueError(f"the checkpoint lacks {error.args[0]}") from error
    for unit, carry in zip(units, loaded, strict=True):
        unit.carry = carry


def merge_state_dicts(state_dicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state dict, for any number of ranks, from those of all ranks that saved.

    Every rank gets the mean of the memories and its slice of the server memory, so that what is still owed to
    the optimiser is delivered exactly once. With a linear compressor (PowerSGD, random-k) the trajectory is
    that of never stopping, up to rounding.

    Raises:
        ValueError: the state dicts are not those of all ranks of one run.
    """
    if not state_dicts or not all(state_dicts):
        raise ValueError("merge_state_dicts needs the state dicts of all ranks, saved after the first step")
    ordered = sorted(state_dicts, key=lambda each: each["rank"])
    first = ordered[0]
    if [each["rank"] for each in ordered] != list(range(first["world_size"])):
        raise ValueError(
            f"need the state dicts of ranks 0 to {first['world_size'] - 1}, got {[each['rank'] for each in ordered]}"
        )
    for key in ("format", "compressor", "seed", "step", "parameters"):
        if any(each[key] != first[key] for each in ordered):
            raise ValueError(f"the state dicts differ in {key}, so they are not of one checkpoint")
    memory = {name: torch.stack([each["memory"][name] for each in ordered]).mean(0) for name in first["memory"]}
    state: dict[str, dict[str, Any]] = {}
    for each in ordered:
        for path, entries in each["state"].items():
            merged = state.setdefault(path, {})
            for name, entry in entries.items():
                if isinstance(entry, torch.Tensor):
                    merged.setdefault(name, entry)
                elif name not in merged:
                    merged[name] = {"start": entry["start"], "values": entry["values"].clone()}
                else:
                    # Ranks serve consecutive chunks, so pieces of a parameter follow one another.
                    merged[name]["values"] = torch.cat((merged[name]["values"], entry["values"]))
    return {**first, "world_size": None, "rank": None, "memory": memory, "state": state}
