"""What the 1-bit compressors promise as algorithms, in the lockstep simulation."""

import itertools

import pytest
import torch
from torch import Tensor

from compress import Simulation, parse
from tests.optim.training import generator

ONE_BIT = ["sign", "onebit", "signsgd", "signsgd:scaled=true"]
TWO_SIDED = [*ONE_BIT, "int8", "int4"]


def gradients(workers: int, numel: int, *key: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(numel, generator=generator(worker, *key), dtype=dtype) for worker in range(workers)]


@pytest.mark.parametrize("spec", TWO_SIDED)
def test_bytes_sent_are_flat_from_two_to_sixty_four_workers(spec: str) -> None:
    """As metered in exchanges of a 64 x 2048 matrix: one payload at W = 2, less than two at W = 64; and what a worker
    hands in is one payload up and its share down."""
    sent = {}
    for workers in (2, 4, 8, 64):
        simulation = Simulation(spec, [(64, 2048)], workers)
        simulation.step(gradients(workers, 64 * 2048, 1, dtype=torch.float32))
        for meter in simulation.traffic:
            claimed = simulation.compressor.wire_bytes(simulation.context(0))
            assert claimed <= meter.wire_bytes <= claimed + 4 * 2 * workers
        sent[workers] = claimed
    for workers, count in sent.items():
        assert count == pytest.approx(sent[2] * 2 * (workers - 1) / workers, rel=1e-2)
    bits = {"int8": 8, "int4": 4}.get(spec, 1)
    assert sent[2] == pytest.approx(64 * 2048 * bits / 8, rel=0.04)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_onebit_sgd_leaves_class_sums_of_zero_and_the_energy_of_the_two_means(workers: int) -> None:
    """P5 on each worker, through the exchange: before any memory the residual is that of two means a row."""
    shape = (6, 50)
    simulation = Simulation("onebit", [shape], workers, dtype=torch.float64)
    given = gradients(workers, 300, 2)
    for outcome, x in zip(simulation.step(given), given, strict=True):
        for row, residual in zip(x.view(shape), outcome.residual.view(shape), strict=True):
            positive = row >= 0
            energy = float(row @ row)
            for members in (positive, ~positive):
                assert abs(float(residual[members].sum())) < 1e-12
                energy -= float(row[members].sum() ** 2 / members.sum())
            assert float(residual @ residual) == pytest.approx(energy, rel=1e-12)
            phi = float(row.abs().sum() ** 2 / (50 * (row @ row)))
            assert energy <= (1 - phi) * float(row @ row) * (1 + 1e-12)


@pytest.mark.parametrize("workers", [2, 3])
def test_onebit_sgd_is_exact_on_rows_of_two_values(workers: int) -> None:
    """Also of different values on the workers, where all share the signs: nothing is left at either stage."""
    simulation = Simulation("onebit", [(4, 32)], workers, dtype=torch.float64)
    negative = torch.arange(128) % 3 == 0
    given = [torch.where(negative, -1.0 - worker, 0.5 + worker).double() for worker in range(workers)]
    outcomes = simulation.step(given)
    assert torch.allclose(outcomes[0].mean, sum(given) / workers, rtol=1e-14)
    assert float(simulation.owed().abs().max()) < 1e-14


def margin(votes: list[Tensor]) -> Tensor:
    return torch.stack([torch.where(vote.signbit(), -1, 1) for vote in votes]).sum(0)


@pytest.mark.parametrize("workers", [3, 4, 5])
def test_the_majority_does_not_care_who_votes(workers: int) -> None:
    votes = gradients(workers, 100, 3)
    decided = margin(votes) != 0
    expected = Simulation("signsgd", [(100,)], workers).step(votes)[0].mean
    assert set(expected.tolist()) == {-1.0, 1.0}
    for order in itertools.islice(itertools.permutations(range(workers)), 0, None, 5):
        got = Simulation("signsgd", [(100,)], workers).step([votes[worker] for worker in order])[0].mean
        assert torch.equal(got[decided], expected[decided])


@pytest.mark.parametrize("workers", [3, 4, 7])
def test_flipping_fewer_votes_than_half_the_margin_changes_nothing(workers: int) -> None:
    """Exactly at each element: with as many of the majority turned as may be, and not with one more."""
    votes = gradients(workers, 64, 4)
    expected, margins = Simulation("signsgd", [(64,)], workers).step(votes)[0].mean, margin(votes)
    for extra in (0, 1):
        flipped = [vote.clone() for vote in votes]
        for element in range(64):
            may = (int(margins[element].abs()) - 1) // 2 + extra
            for vote in flipped:
                if may and vote[element].sign() == expected[element] and margins[element]:
                    vote[element] = -vote[element]
                    may -= 1
        got = Simulation("signsgd", [(64,)], workers).step(flipped)[0].mean
        decided = margins != 0
        if extra and workers % 2:
            assert torch.equal(got[decided], -expected[decided])
        elif not extra:
            assert torch.equal(got[decided], expected[decided])


@pytest.mark.parametrize("factor", [1e-6, 3.0, 1e6])
def test_the_majority_does_not_depend_on_scale(factor: float) -> None:
    votes = gradients(4, 80, 5)
    plain, scaled = (Simulation("signsgd", [(80,)], 4) for _ in range(2))
    expected = plain.step(votes)[0].mean
    assert torch.equal(scaled.step([factor * vote for vote in votes])[0].mean, expected)


def test_ties_are_decided_fairly_anew_and_alike_everywhere() -> None:
    """20 000 tied elements over 5 steps: each half the time, by 4 standard deviations; and not the same each time."""
    numel, steps = 4000, 5
    simulation = Simulation("signsgd", [(numel,)], 4)
    sides = torch.ones(numel)
    seen = []
    for _ in range(steps):
        outcomes = simulation.step([sides, -sides, sides, -sides])
        assert all(torch.equal(outcome.mean, outcomes[0].mean) for outcome in outcomes)
        seen.append(outcomes[0].mean)
    total = torch.stack(seen)
    assert abs(float(total.sum())) < 4 * (numel * steps) ** 0.5
    for one, other in itertools.combinations(seen, 2):
        assert abs(float((one * other).sum())) < 4 * numel**0.5


def test_sign_without_memory_goes_to_the_wrong_end_and_with_memory_to_the_right_one() -> None:
    """Karimireddy et al., 2019, counter-example 1: gradient 4 with probability 1/4, else -1, on [-1, 1]. The mean
    slope is +1/4, so the minimum is at -1; the majority of signs says +1."""
    numel, workers, steps, lr = 64, 3, 800, 0.02
    ends = {}
    for spec in ("signsgd", "sign"):
        simulation, x, random = Simulation(spec, [(numel,)], workers), torch.zeros(numel), generator(6)
        for _ in range(steps):
            slopes = [torch.where(torch.rand(numel, generator=random) < 0.25, 4.0, -1.0) for _ in range(workers)]
            x = (x - lr * simulation.step(slopes)[0].mean).clamp(-1, 1)
        ends[spec] = float(x.mean())
    assert ends["signsgd"] > 0.9
    assert ends["sign"] < -0.8


def test_sign_without_memory_cannot_leave_its_line() -> None:
    """Counter-example 2: f(x) = eps |x1 + x2| + |x1 - x2| from (1, 1). Signs of subgradients are +-(1, -1), along
    which x1 + x2 stays 2; with memory f comes near 0."""
    eps, lr, lowest = 0.5, 0.02, {}
    for spec in ("signsgd", "sign"):
        simulation, x, values = Simulation(spec, [(2,)], 1, dtype=torch.float64), torch.ones(2).double(), []
        for step in range(2000):
            side = 1.0 if x[0] >= x[1] else -1.0
            slope = eps * torch.sign(x.sum()) * torch.ones(2).double() + side * torch.tensor([1.0, -1.0]).double()
            x = x - lr / (1 + step) ** 0.5 * 5 * simulation.step([slope])[0].mean
            values.append(float(eps * (x[0] + x[1]).abs() + (x[0] - x[1]).abs()))
        lowest[spec] = min(values)
        if spec == "signsgd":
            assert float(x.sum()) == pytest.approx(2, abs=1e-9)
    assert lowest["signsgd"] >= 2 * eps - 1e-9
    assert lowest["sign"] < 0.2 * eps


@pytest.mark.parametrize("spec", ["sign", "onebit", "int8", "int4"])
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (2049,)])
def test_padding_enters_neither_scales_nor_memories(spec: str, workers: int, shape: tuple[int, ...]) -> None:
    """A constant comes back as it is, whatever has to be padded: a padded zero would lower the mean magnitude, a
    padded sign would be decoded."""
    numel = torch.Size(shape).numel()
    simulation = Simulation(spec, [shape], workers, dtype=torch.float64)
    outcomes = simulation.step([torch.full((numel,), -3.0).double()] * workers)
    assert outcomes[0].mean.shape == (numel,)
    assert torch.allclose(outcomes[0].mean, torch.full((numel,), -3.0).double(), rtol=1e-12)
    assert float(simulation.owed().abs().max()) < 1e-12


@pytest.mark.parametrize("spec", ["sign", "onebit", "signsgd:scaled=true", "int8", "int4"])
def test_zeros_alone_never_become_a_scale(spec: str) -> None:
    """A block that is zero on all workers, beside one that is not."""
    simulation = Simulation(spec, [(2, 2048)], 3, dtype=torch.float64)
    for step in range(5):
        given = gradients(3, 4096, 7, step)
        for gradient in given:
            gradient[2048:] = 0
        mean = simulation.step(given)[0].mean
        assert bool(mean[:2048].any())
        if spec != "signsgd:scaled=true":  # one magnitude for all, and no memory: its sign of zero is +1
            assert not mean[2048:].any()
            assert not simulation.owed()[2048:].any()


@pytest.mark.parametrize("spec", ONE_BIT)
def test_a_frozen_parameter_keeps_what_it_is_owed(spec: str) -> None:
    """Unused on all workers: the exchange goes on around it."""
    simulation = Simulation(spec, [(4, 60), (80,)], 2, dtype=torch.float64)
    simulation.step(gradients(2, 320, 8))
    slots = {slot.spec.name: slice(slot.start, slot.stop) for slot in simulation.layout.slots}
    names = [slot.spec.name for slot in simulation.layout.slots]
    frozen = slots["p1"]
    before = simulation.owed()[frozen].clone()
    flags = torch.tensor([float(name != "p1") for name in names])
    for step in range(3):
        given = gradients(2, 320, 9, step)
        for gradient in given:
            gradient[frozen] = 0
        simulation.step(given, [flags, flags])
        assert torch.equal(simulation.owed()[frozen], before)


def test_the_codecs_of_low_bits_share_the_exchange() -> None:
    """int8 and int4 are codecs of the same two-sided exchange: two messages, server memory, a tighter result."""
    errors = {}
    for spec in ("sign", "int4", "int8"):
        simulation = Simulation(spec, [(4096,)], 4, dtype=torch.float64)
        given = gradients(4, 4096, 10)
        outcome = simulation.step(given)[0]
        assert list(simulation.traffic[0].payload_bytes) == ["all_to_all", "all_gather"]
        errors[spec] = float((outcome.mean - sum(given) / 4).norm() / (sum(given) / 4).norm())
        assert parse(spec).law == "conserves"
    assert errors["int8"] < 0.1 < errors["int4"] < errors["sign"]
