"""Saving and loading changes nothing, to the bit."""

import io
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from compress import Compressor, Simulation
from compress.state import load_state, save_state
from tests.strategies import Recipe, Shapes, each, everything_in, recipes, same_bits, same_contents, shapes, workers


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
@given(chosen=shapes(), count=workers, recipe=recipes)
def test_what_is_saved_does_not_change_afterwards(
    compressor: Compressor, chosen: Shapes, count: int, recipe: Recipe
) -> None:
    simulation = Simulation(compressor, chosen, count)
    simulation.step(recipe.step(simulation, 0))
    saved = [save_state(carry.state, simulation.layout) for carry in simulation.carries]
    kept = through_a_file(saved)
    simulation.step(recipe.step(simulation, 1))
    assert repr(saved) == repr(kept)
