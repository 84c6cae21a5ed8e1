"""What goes in comes out, now or later: the conservation law, step by step and summed."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compress import Compressor, Simulation
from compress.state import server_memory
from tests.strategies import (
    CASES,
    ROUNDINGS,
    Recipe,
    Shapes,
    conserving,
    each,
    each_dtype,
    exact_mean,
    fewer,
    recipes,
    same_bits,
    shapes,
    unit,
    workers,
)


def prepared(simulation: Simulation, gradients: list[Tensor]) -> list[Tensor]:
    """What `prepare` makes of the gradients: what goes into the law."""
    return [
        simulation.compressor.prepare(gradient.clone(), carry.state, simulation.context(worker))[0]
        for worker, (gradient, carry) in enumerate(zip(gradients, simulation.carries, strict=True))
    ]


def magnitude(simulation: Simulation, gradients: list[Tensor]) -> float:
    """The largest of what enters a step: gradient + memory of a worker, and the server memory."""
    entering = [
        gradient if carry.memory is None else gradient + carry.memory
        for gradient, carry in zip(gradients, simulation.carries, strict=True)
    ]
    server = server_memory([carry.state for carry in simulation.carries], simulation.layout)
    return max(float(x.double().norm()) for x in entering) + float(server.double().norm())


@each_dtype
@each(conserving())
@given(chosen=shapes(), count=workers | st.just(8), recipe=recipes)
def test_every_step_conserves(
    compressor: Compressor, dtype: torch.dtype, chosen: Shapes, count: int, recipe: Recipe
) -> None:
    simulation = Simulation(compressor, chosen, count, dtype=dtype)
    for step in range(3):
        gradients = prepared(simulation, recipe.step(simulation, step))
        before, scale = simulation.owed().double(), magnitude(simulation, gradients)
        received = simulation.step(recipe.step(simulation, step))[0].mean.double()
        gap = before + exact_mean(gradients) - received - simulation.owed().double()
        assert gap.norm() <= (ROUNDINGS * unit(dtype) + compressor.rounding) * scale


@each_dtype
@each(conserving())
@fewer(0.3)
@given(chosen=shapes(min_elements=1), count=workers, recipe=recipes)
def test_thirty_steps_telescope(
    compressor: Compressor, dtype: torch.dtype, chosen: Shapes, count: int, recipe: Recipe
) -> None:
    """Everything received plus everything still owed is the sum of the mean gradients."""
    steps = 30
    simulation = Simulation(compressor, chosen, count, dtype=dtype)
    given_in, received, scale = torch.zeros(()).double(), torch.zeros(()).double(), 0.0
    for step in range(steps):
        gradients = prepared(simulation, recipe.step(simulation, step))
        scale = max(scale, magnitude(simulation, gradients))
        given_in = given_in + exact_mean(gradients)
        received = received + simulation.step(recipe.step(simulation, step))[0].mean.double()
    gap = given_in - received - simulation.owed().double()
    # Independent roundings add up like a random walk; those of a narrow wire may all have one sign.
    allowed = ROUNDINGS * unit(dtype) * math.sqrt(steps) + compressor.rounding * steps
    assert gap.norm() <= allowed * scale


@each([case for case in conserving() if case.keeps_memory])
@given(chosen=shapes(), recipe=recipes)
def test_one_worker_gets_what_it_does_not_keep(compressor: Compressor, chosen: Shapes, recipe: Recipe) -> None:
    simulation = Simulation(compressor, chosen, 1, dtype=torch.float64)
    (x,) = prepared(simulation, recipe.step(simulation))
    (outcome,) = simulation.step(recipe.step(simulation))
    server = server_memory([outcome.state], simulation.layout)
    gap = outcome.mean + outcome.residual + server - x
    assert gap.norm() <= (ROUNDINGS * unit(torch.float64) + compressor.rounding) * x.norm()


@each([case for case in CASES if not case.keeps_memory])
@given(chosen=shapes(), count=workers, recipe=recipes)
def test_without_memory_nothing_is_owed(compressor: Compressor, chosen: Shapes, count: int, recipe: Recipe) -> None:
    simulation = Simulation(compressor, chosen, count)
    simulation.step(recipe.step(simulation))
    assert not simulation.owed().any()


@each()
@given(chosen=shapes(), count=workers, recipe=recipes, data=st.data())
def test_a_parameter_that_no_worker_used_keeps_what_it_is_owed(
    compressor: Compressor, chosen: Shapes, count: int, recipe: Recipe, data: st.DataObject
) -> None:
    simulation = Simulation(compressor, chosen, count, dtype=torch.float64)
    layout = simulation.layout
    for step in range(3):
        simulation.step(recipe.step(simulation, step))
    used = data.draw(
        st.lists(
            st.lists(st.sampled_from([0.0, 1.0]), min_size=len(layout.slots), max_size=len(layout.slots)),
            min_size=count,
            max_size=count,
        ),
        label="used",
    )
    gradients = prepared(simulation, recipe.step(simulation, 3))
    before, scale = simulation.owed(), magnitude(simulation, gradients)
    memories = [None if carry.memory is None else carry.memory.clone() for carry in simulation.carries]
    server = server_memory([carry.state for carry in simulation.carries], layout)
    outcomes = simulation.step(recipe.step(simulation, 3), [torch.tensor(flags) for flags in used])
    after = simulation.owed()
    for number, slot in enumerate(layout.slots):
        place = slice(slot.start, slot.stop)
        if any(flags[number] for flags in used):
            if compressor.law == "conserves":
                gap = (before + exact_mean(gradients) - outcomes[0].mean - after)[place]
                assert gap.norm() <= (ROUNDINGS * unit(torch.float64) + compressor.rounding) * scale
            continue
        for memory, carry in zip(memories, simulation.carries, strict=True):
            assert memory is None or same_bits(memory[place], carry.memory[place])
        now = server_memory([carry.state for carry in simulation.carries], layout)
        assert same_bits(server[place], now[place])


def test_the_law_does_catch_a_residual_that_is_not_what_was_kept_back() -> None:
    """The check itself: half of what a compressor kept back, lost, is a gap of that size."""
    simulation = Simulation("topk:density=0.25", [(8,)], 2)
    gradients = [torch.arange(1.0, 9.0), torch.ones(8)]
    received = simulation.step(gradients)[0].mean
    lost = torch.zeros(8)
    for carry in simulation.carries:
        assert carry.memory is not None
        lost += carry.memory / 4
        carry.memory /= 2
    gap = exact_mean(gradients) - received - simulation.owed()
    assert float(gap.norm()) == pytest.approx(float(lost.norm()), rel=ROUNDINGS * unit(torch.float32))
