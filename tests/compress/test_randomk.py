"""Random-k: which entries, how often, and what that costs in expectation."""

import math

import pytest
import torch

from compress import Context, Simulation, UnitLayout
from tests.strategies import Recipe

D, K, STEPS = 50, 5, 2000


def samples(**changes: object) -> torch.Tensor:
    """How often each of D entries was chosen in STEPS steps, and a check of each choice."""
    counts = torch.zeros(D)
    for step in range(STEPS):
        chosen = Context(UnitLayout(()), step=step, **changes).shared_sample(K, D)  # type: ignore[arg-type]
        assert chosen.dtype == torch.int64
        assert bool((chosen[1:] > chosen[:-1]).all())
        assert int(chosen[0]) >= 0
        assert int(chosen[-1]) < D
        counts[chosen] += 1
    return counts


@pytest.mark.parametrize("changes", [{}, {"seed": 7}, {"salt": "unit3."}], ids=str)
def test_every_entry_is_chosen_equally_often(changes: dict[str, object]) -> None:
    """Chi-square of sampling without replacement, D - 1 degrees of freedom: within 4 standard deviations. Below that
    range it would not be random but a sweep."""
    expected = STEPS * K / D
    chi_square = float(((samples(**changes) - expected) ** 2).sum()) / (expected * (1 - K / D)) * (D - 1) / D
    assert abs(chi_square - (D - 1)) < 4 * math.sqrt(2 * (D - 1))


def test_workers_agree_while_steps_units_and_seeds_differ() -> None:
    def chosen(**changes: object) -> list[int]:
        return Context(UnitLayout(()), **{"peers": 4, **changes}).shared_sample(20, 1000).tolist()  # type: ignore[arg-type]

    assert chosen() == chosen(index=3)
    different = [chosen(), chosen(step=1), chosen(seed=1), chosen(salt="1."), chosen(step=10, seed=1)]
    assert len({tuple(each) for each in different}) == len(different)


def test_the_error_is_one_minus_density_in_expectation() -> None:
    """E |x - C(x)|^2 = (1 - k/d) |x|^2 with equality, whatever x is."""
    simulation = Simulation("randomk:density=0.1", [(D,)], 1, dtype=torch.float64, error_feedback=False)
    x = Recipe("heavy", 1).gradient(D, torch.float64, 0)
    errors = torch.tensor([float(simulation.step([x])[0].residual.square().sum()) for _ in range(STEPS)]).double()
    mean, spread = float(errors.mean()), float(errors.std()) / math.sqrt(STEPS)
    assert spread > 0
    assert abs(mean - (1 - K / D) * float(x @ x)) < 4 * spread


@pytest.mark.parametrize(
    ("numel", "density", "sent"), [(0, 0.5, 0), (1, 0.01, 1), (1000, 0.01, 10), (7, 0.5, 4), (5, 1.0, 5)]
)
def test_how_many_entries_are_sent(numel: int, density: float, sent: int) -> None:
    simulation = Simulation(f"randomk:density={density}", [(numel,)], 2)
    simulation.step([torch.ones(numel)] * 2)
    assert simulation.traffic[0].payload_bytes == {"all_reduce": 4 * sent}


def test_global_generators_are_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    simulation = Simulation("randomk:density=0.5", [(100,)], 2)
    simulation.step([torch.ones(100)] * 2)
    assert torch.equal(torch.rand(3), expected)
