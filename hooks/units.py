"""Which parameters are exchanged together: a fixed partition of our own, independent of DDP's buckets."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.compressor import Compressor, Context
from compress.driver import Carry
from compress.layout import TensorSpec, UnitLayout

MIB = 1 << 20


@dataclass(frozen=True)
class NamedParameter:
    """A parameter with its name in the model (its place in registration order where that is unknown)."""

    name: str
    tensor: Tensor

    @property
    def spec(self) -> TensorSpec:
        shape = tuple(self.tensor.shape)
        return TensorSpec(self.name, (*shape, 2) if self.tensor.is_complex() else shape, self.tensor.is_complex())

    @property
    def arena_dtype(self) -> torch.dtype:
        """Gradients are compressed in float32, those of double-precision parameters in float64."""
        return torch.float64 if self.tensor.dtype in (torch.float64, torch.complex128) else torch.float32


@dataclass
class Unit:
    """An exchange unit of this worker.

    Args:
        index: its place in the order of exchanges.
        layout: where each parameter lies in the arena.
        parameters: in the order of the layout's slots.
        device: where the arena lives.
        carry: memory and state.
    """

    index: int
    layout: UnitLayout
    parameters: tuple[Tensor, ...]
    device: torch.device
    carry: Carry


def plan_units(
    parameters: Sequence[NamedParameter],
    compressor: Compressor,
    unit_cap_mb: float,
    *,
    peers: int,
    rank: int,
    seed: int,
    error_feedback: bool,
) -> list[Unit]:
    """Cut the parameters, in reverse order of registration, about the order in which gradients become ready,
    into units of at most `unit_cap_mb` MiB of arena (one parameter at least), one arena dtype and device each.
    """
    cuts: list[list[NamedParameter]] = []
    open_cuts: dict[tuple[torch.dtype, torch.device], tuple[list[NamedParameter], int]] = {}
    for parameter in reversed(parameters):
        key = parameter.arena_dtype, parameter.tensor.device
        size = parameter.spec.numel * parameter.arena_dtype.itemsize
        members, filled = open_cuts.get(key, ([], 0))
        if not members or filled + size > unit_cap_mb * MIB:
            members, filled = [], 0
            cuts.append(members)
        members.append(parameter)
        open_cuts[key] = members, filled + size
    units = []
    for index, members in enumerate(cuts):
        named = {parameter.name: parameter.tensor for parameter in members}
        layout = UnitLayout.build([parameter.spec for parameter in members], compressor.place, members[0].arena_dtype)
        device = members[0].tensor.device
        ctx = Context(layout, peers, rank, 0, seed, device, salt=f"unit{index}.")
        ordered = tuple(named[slot.spec.name] for slot in layout.slots)
        units.append(Unit(index, layout, ordered, device, Carry.start(compressor, ctx, error_feedback)))
    return units
