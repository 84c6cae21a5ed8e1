"""Input of any size is survived; a step that is not finite leaves no trace."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from compress import Compressor, Simulation
from tests.strategies import (
    CASES,
    Recipe,
    Shapes,
    conserving,
    dtypes,
    each,
    everything_in,
    gaussians,
    recipes,
    same_bits,
    same_contents,
    shapes,
    workers,
)

PATTERNS = {
    "constant": lambda d: torch.ones(d, dtype=torch.float64),
    "alternating": lambda d: 1 - 2.0 * (torch.arange(d, dtype=torch.float64) % 2),
    "single": lambda d: (torch.arange(d) == d - 1).double(),
    "half": lambda d: (torch.arange(d) % 2).double(),
    "ramp": lambda d: torch.linspace(-1, 1, d, dtype=torch.float64),
}


def is_finite(simulation: Simulation) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in everything_in(simulation))


@each()
@given(
    dtype=dtypes,
    chosen=shapes(min_elements=1),
    count=workers,
    size=st.sampled_from(["largest", 1e15, 1.0, 1e-15, 1e-30, 1e-42, 1e-45]),
    pattern=st.sampled_from(sorted(PATTERNS)),
    recipe=gaussians,
)
@example(torch.float32, [(6, 5), (9,)], 2, 1e-42, "half", Recipe("gaussian", 0))
@example(torch.float32, [(6, 5), (9,)], 3, 1e-45, "ramp", Recipe("gaussian", 0))
@example(torch.float32, [(6, 5), (9,)], 4, "largest", "constant", Recipe("gaussian", 0))
def test_finite_input_of_any_size_gives_finite_output(
    compressor: Compressor,
    dtype: torch.dtype,
    chosen: Shapes,
    count: int,
    size: float | str,
    pattern: str,
    recipe: Recipe,
) -> None:
    """Down to the smallest denormal number and up to the largest that the wire is said to carry."""
    magnitude = compressor.largest if size == "largest" else min(float(size), compressor.largest)
    simulation = Simulation(compressor, chosen, count, dtype=dtype)
    gradient = (magnitude * PATTERNS[pattern](simulation.layout.numel)).to(dtype)
    for _ in range(3):
        outcomes = simulation.step([gradient.clone() for _ in range(count)])
        assert all(outcome.finite and bool(outcome.mean.isfinite().all()) for outcome in outcomes)
    assert is_finite(simulation)
    outcomes = simulation.step(recipe.step(simulation))
    assert all(outcome.finite for outcome in outcomes)
    assert is_finite(simulation)


@each(conserving())
@given(dtype=dtypes, chosen=shapes(min_elements=1), count=workers, recipe=gaussians)
def test_zero_in_gives_zero_out_and_does_not_kill(
    compressor: Compressor, dtype: torch.dtype, chosen: Shapes, count: int, recipe: Recipe
) -> None:
    """Also with signed zeros; of the next gradients that are not zero something gets across."""
    simulation = Simulation(compressor, chosen, count, dtype=dtype)
    zero = torch.copysign(torch.zeros(simulation.layout.numel), PATTERNS["alternating"](simulation.layout.numel))
    for _ in range(3):
        outcomes = simulation.step([zero.to(dtype) for _ in range(count)])
        assert all(outcome.finite and not outcome.mean.any() for outcome in outcomes)
        assert not simulation.owed().any()
    received = [simulation.step(recipe.step(simulation, step))[0].mean for step in range(3)]
    assert bool(torch.stack(received).any())


bad_values = st.sampled_from([math.nan, math.inf, -math.inf])


@each()
@given(
    chosen=shapes(min_elements=1),
    count=workers,
    recipe=recipes,
    when=st.integers(0, 3),
    data=st.data(),
)
def test_a_step_that_is_not_finite_leaves_no_trace(
    compressor: Compressor, chosen: Shapes, count: int, recipe: Recipe, when: int, data: st.DataObject
) -> None:
    """All workers see it, none keeps anything of it, and training goes on as if it had not been, to the bit."""
    struck, spared = (Simulation(compressor, chosen, count) for _ in range(2))
    for step in range(when):
        struck.step(recipe.step(struck, step))
        spared.step(recipe.step(spared, step))

    gradients = recipe.step(struck, 99)
    for worker in data.draw(st.sets(st.integers(0, count - 1), min_size=1), label="bad workers"):
        gradients[worker][data.draw(st.integers(0, struck.layout.numel - 1), label="element")] = data.draw(bad_values)
    outcomes = struck.step(gradients)

    assert not any(outcome.finite for outcome in outcomes)
    assert all(bool(outcome.mean.isnan().all()) for outcome in outcomes)
    assert struck.step_number == when
    assert same_contents(everything_in(struck), everything_in(spared))
    for step in range(when, when + 2):
        after, without = struck.step(recipe.step(struck, step)), spared.step(recipe.step(spared, step))
        assert all(same_bits(a.mean, b.mean) for a, b in zip(after, without, strict=True))
    assert same_contents(everything_in(struck), everything_in(spared))


NARROW = [case for case in CASES if case.largest < 1e30]


@pytest.mark.parametrize("compressor", NARROW, ids=str)
@given(chosen=shapes(min_elements=1), count=workers, recipe=recipes, data=st.data())
def test_what_overflows_on_the_wire_is_a_step_that_is_not_finite(
    compressor: Compressor, chosen: Shapes, count: int, recipe: Recipe, data: st.DataObject
) -> None:
    """On all workers alike, although each sees a finite gradient."""
    simulation = Simulation(compressor, chosen, count)
    simulation.step(recipe.step(simulation))
    kept = everything_in(simulation)
    gradient: Tensor = torch.zeros(simulation.layout.numel)
    gradient[data.draw(st.integers(0, simulation.layout.numel - 1), label="element")] = 1e6 * compressor.largest
    outcomes = simulation.step([gradient.clone() for _ in range(count)])
    assert not any(outcome.finite for outcome in outcomes)
    assert all(bool(outcome.mean.isnan().all()) for outcome in outcomes)
    assert simulation.step_number == 1
    assert same_contents(everything_in(simulation), kept)
