"""signSGD: the majority of signs, against a count."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress import Simulation
from tests.strategies import Recipe, each_dtype, more, recipes, same_bits, unit


def votes(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Positive less negative signs; a zero's sign counts."""
    return sum(
        (torch.where(gradient.signbit(), -1, 1) for gradient in gradients[1:]),
        torch.where(gradients[0].signbit(), -1, 1),
    )


@more(5)
@given(numel=st.integers(0, 100), workers=st.integers(1, 8), recipe=recipes)
def test_the_majority_decides(numel: int, workers: int, recipe: Recipe) -> None:
    simulation = Simulation("signsgd", [(numel,)], workers)
    gradients = recipe.step(simulation)
    received, count = simulation.step(gradients)[0].mean, votes(gradients)
    assert bool((received.abs() == 1).all())
    assert torch.equal(received[count != 0], count[count != 0].sign().float())


@more(5)
@given(numel=st.integers(1, 100), workers=st.integers(2, 8), recipe=recipes, data=st.data())
def test_fewer_than_half_of_the_margin_cannot_turn_it(
    numel: int, workers: int, recipe: Recipe, data: st.DataObject
) -> None:
    simulation, attacked = (Simulation("signsgd", [(numel,)], workers) for _ in range(2))
    gradients = recipe.step(simulation)
    traitors = data.draw(st.sets(st.integers(0, workers - 1), max_size=workers // 2), label="traitors")
    safe = votes(gradients).abs() > 2 * len(traitors)
    flipped = [-gradient if worker in traitors else gradient for worker, gradient in enumerate(gradients)]
    assert torch.equal(attacked.step(flipped)[0].mean[safe], simulation.step(gradients)[0].mean[safe])


@given(recipe=recipes, factor=st.floats(1e-10, 1e10), workers=st.integers(1, 5))
def test_magnitudes_do_not_matter(recipe: Recipe, factor: float, workers: int) -> None:
    plain, scaled = (Simulation("signsgd", [(50,)], workers) for _ in range(2))
    gradients = recipe.step(plain)
    expected = plain.step(gradients)[0].mean
    assert same_bits(scaled.step([gradient * factor for gradient in gradients])[0].mean, expected)


def test_ties_are_fair_and_new_each_step() -> None:
    """Two workers that always disagree: 10 000 coins, within 4 standard deviations of one half."""
    simulation = Simulation("signsgd", [(10_000,)], 2)
    first, second = (simulation.step([torch.ones(10_000), -torch.ones(10_000)])[0].mean for _ in range(2))
    for received in (first, second, first * second):
        assert abs(float(received.sum())) < 4 * 10_000**0.5


@each_dtype
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_scaled_is_in_units_of_the_gradient(workers: int, dtype: torch.dtype) -> None:
    """Times the mean over workers of the mean magnitude."""
    simulation = Simulation("signsgd:scaled=true", [(200,)], workers, dtype=dtype)
    gradients = Recipe("gaussian", 1).step(simulation)
    received = simulation.step(gradients)[0].mean
    scale = float(torch.stack(gradients).double().abs().mean())
    assert torch.allclose(
        received.double().abs(), torch.tensor(scale, dtype=torch.float64), rtol=200 * unit(dtype), atol=0
    )


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_one_bit_an_element_each_way(workers: int) -> None:
    simulation = Simulation("signsgd", [(8 * 8 * 3 * 10,)], workers)
    simulation.step([torch.ones(1920)] * workers)
    assert simulation.traffic[0].payload_bytes == {"all_to_all": 240, "all_gather": 240 // workers}
