"""Saving and loading changes nothing, to the bit."""

import io
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compress import Compressor, Simulation
from compress.state import load_state, save_state
from tests.strategies import (
    Recipe,
    Shapes,
    each,
    everything_in,
    recipes,
    same_bits,
    same_contents,
    shapes,
    tensors_in,
    workers,
)


def through_a_file(saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@each()
@given(chosen=shapes(), count=workers, recipe=recipes, saved_after=st.integers(0, 3))
def test_a_run_that_is_resumed_goes_on_to_the_bit(
    compressor: Compressor, chosen: Shapes, count: int, recipe: Recipe, saved_after: int
) -> None:
    original = Simulation(compressor, chosen, count)
    for step in range(saved_after):
        original.step(recipe.step(original, step))

    resumed = Simulation(compressor, chosen, count)
    resumed.step_number = original.step_number
    for old, new in zip(original.carries, resumed.carries, strict=True):
        saved = through_a_file({"memory": old.memory, "state": save_state(old.state, original.layout)})
        if new.memory is not None:
            new.memory.copy_(saved["memory"])
        new.state = load_state(new.state, resumed.layout, saved["state"])

    assert same_contents(everything_in(original), everything_in(resumed))
    for step in range(saved_after, saved_after + 3):
        expected, received = original.step(recipe.step(original, step)), resumed.step(recipe.step(resumed, step))
        assert all(same_bits(a.mean, b.mean) for a, b in zip(expected, received, strict=True))
    assert same_contents(everything_in(original), everything_in(resumed))


@each()
@given(chosen=shapes(), recipe=recipes)
def test_what_is_saved_is_a_copy_and_no_larger_than_it_says(
    compressor: Compressor, chosen: Shapes, recipe: Recipe
) -> None:
    """A view would change with the state, and torch.save would write all of what it is a view of."""
    simulation = Simulation(compressor, chosen, 1)
    simulation.step(recipe.step(simulation))
    state = simulation.carries[0].state
    saved = save_state(state, simulation.layout)
    tensors = [
        entry if isinstance(entry, Tensor) else entry["values"]
        for entries in saved.values()
        for entry in entries.values()
    ]
    before = [tensor.clone() for tensor in tensors]
    for live in tensors_in(state):
        live.fill_(7.0)
    assert same_contents(before, tensors)
    assert all(tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() for tensor in tensors)
