"""With nothing lost on the way, the compressed stage is the dense algorithm with frozen variance."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hooks.optim.zeroone_adam import sync_interval, variance_steps
from tests.optim.training import Net, Steady, batch, flat, make, parameters, rank, run, step, wrapped
from tests.pool import Pool

STEPS, FREEZE, LR, EPS = 9, 3, 1e-2, 1e-8
DOUBLE = torch.float64


class Dense:
    """One tensor's training by formulas: `update(gradient)` moves `theta`."""

    def __init__(self, theta: Tensor, betas: tuple[float, float], weight_decay: float, decoupled: bool) -> None:
        self.theta, self.betas, self.weight_decay, self.decoupled = theta.clone(), betas, weight_decay, decoupled
        self.t, self.m, self.v = 0, torch.zeros_like(theta), torch.zeros_like(theta)


class FrozenAdam(Dense):
    """Adam; after FREEZE steps both moments are corrected for bias once, and the variance stays."""

    def update(self, g: Tensor) -> None:
        b1, b2 = self.betas
        self.t += 1
        if not self.decoupled:
            g = g + self.weight_decay * self.theta
        self.m = b1 * self.m + (1 - b1) * g
        if self.t <= FREEZE:
            self.v = b2 * self.v + (1 - b2) * g**2
            m, v = self.m / (1 - b1**self.t), self.v / (1 - b2**self.t)
        else:
            m, v = self.m, self.v
        if self.t == FREEZE:
            self.m, self.v = m, v
        decay = self.weight_decay * self.theta if self.decoupled else 0
        self.theta = self.theta - LR * (m / (v.sqrt() + EPS) + decay)


class FrozenLamb(Dense):
    """LAMB without bias correction, then 1-bit LAMB with an exact mean (sections 3 and 4 of its paper)."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.c = self.f = 0.0
        self.factors: list[float] = []

    def update(self, g: Tensor) -> None:
        b1, b2 = self.betas
        self.t += 1
        before = self.m
        self.m = b1 * self.m + (1 - b1) * g
        if self.t <= FREEZE:
            self.v = b2 * self.v + (1 - b2) * g**2
            step = self.m / (self.v.sqrt() + EPS) + self.weight_decay * self.theta
            sizes = float(self.theta.norm()), float(step.norm())
            c = min(max(sizes[0] / sizes[1], 0.01), 10) if all(sizes) else 1.0
            if c != 1:
                self.c = 0.9 * self.c + 0.1 * c if self.c else c
            self.theta = self.theta - LR * c * step
            self.fresh, self.f = self.v, 1.0
            return
        ghat = (self.m - b1 * before) / (1 - b1)
        assert torch.allclose(ghat, g, rtol=1e-4, atol=1e-12)
        self.fresh = b2 * self.fresh + (1 - b2) * ghat**2
        frozen, fresh = self.v.sqrt() + EPS, self.fresh.sqrt() + EPS
        m = self.m / frozen
        step = m + self.weight_decay * self.theta
        share = min(1.0, float(m.norm() / step.norm()))
        f = float((frozen / fresh).max()) * share + (1 - share)
        f = min(max(f, 0.5), 4.0)
        self.f = min(max(f, 0.9 * self.f), 1.1 * self.f)
        self.factors.append(self.f)
        self.theta = self.theta - LR * (self.c or 1.0) * self.f * step


def dense_run(
    oracle: Callable[..., Any], count: int, betas: tuple[float, float], weight_decay: float, decoupled: bool
) -> tuple[Tensor, list[Any]]:
    """Train by formulas on one large batch of all ranks."""
    model = Steady()
    tensors = list(model.parameters())
    dense = [oracle(p.detach(), betas, weight_decay, decoupled) for p in tensors]
    for number in range(STEPS):
        model.zero_grad()
        model(torch.cat([batch(number, each, DOUBLE) for each in range(count)])).mean().backward()
        for p, one in zip(tensors, dense, strict=True):
            one.update(p.grad)
            p.data.copy_(one.theta)
    return flat(tensors), dense


CASES = [(0.0, False), (0.1, False), (0.1, True)]
SMALL = 1e-9
"""Double precision rounds to 1e-16; nine steps through a net that amplifies gaps stay far below this."""


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.9), (0.0, 0.99)])
@pytest.mark.parametrize(("weight_decay", "decoupled"), CASES)
def test_onebit_adam_is_adam_with_frozen_variance(
    weight_decay: float, decoupled: bool, betas: tuple[float, float]
) -> None:
    model = wrapped(Steady())
    options = {"weight_decay": weight_decay, "decoupled_weight_decay": decoupled, "betas": betas, "lr": LR}
    run(model, make("adam", model, compressor="none", freeze_step=FREEZE, **options), range(STEPS), DOUBLE)
    expected, _ = dense_run(FrozenAdam, 1, betas, weight_decay, decoupled)
    assert float((parameters(model) - expected).abs().max()) < SMALL


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.9)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_onebit_lamb_is_lamb_with_frozen_variance(weight_decay: float, betas: tuple[float, float]) -> None:
    model = wrapped(Steady())
    optimizer = make("lamb", model, compressor="none", freeze_step=FREEZE, weight_decay=weight_decay, betas=betas)
    expected, dense = dense_run(FrozenLamb, 1, betas, weight_decay, True)
    factors: list[list[float]] = []
    for number in range(STEPS):
        step(model, optimizer, batch(number, 0, DOUBLE))
        if optimizer.frozen and number >= FREEZE:
            factors.append([float(optimizer.state[p]["factor"]) for p in model.parameters()])
    assert float((parameters(model) - expected).abs().max()) < SMALL
    for got, wanted in zip(zip(*factors, strict=True), (one.factors for one in dense), strict=True):
        assert got == pytest.approx(wanted, rel=1e-9)
        for before, now in zip((1.0, *got), got, strict=False):
            assert 0.5 <= now <= 4
            assert 0.9 - 1e-9 <= now / before <= 1.1 + 1e-9
    assert any(abs(factor - 1) > 0.05 for one in factors for factor in one)


def test_the_mean_gradient_is_rebuilt_from_two_momenta_in_single_precision() -> None:
    """To 1e-4: the difference of two momenta loses a factor 1/(1 - beta1) of precision (P32)."""
    model, beta1 = wrapped(Steady(torch.float32)), 0.9
    optimizer = make("lamb", model, compressor="none")
    run(model, optimizer, range(5))
    before = {p: optimizer.state[p]["last_update"].clone() for p in model.parameters()}
    step(model, optimizer, batch(5))
    for p in model.parameters():
        state = optimizer.state[p]
        rebuilt = (state["update"] - beta1 * before[p]) / (1 - beta1) * state["denominator"]
        assert float((rebuilt - p.grad).norm()) <= 1e-4 * float(p.grad.norm())


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("freeze_step", [3, 50])
def test_zeroone_adam_updating_and_synchronising_at_every_step_is_adam(weight_decay: float, freeze_step: int) -> None:
    """freeze_step 50: torch's AdamW throughout. 3: with the variance of step 3 from then on."""
    model = wrapped(Steady())
    optimizer = make(
        "zeroone",
        model,
        compressor="none",
        weight_decay=weight_decay,
        freeze_step=freeze_step,
        variance_scaler=1000,
        local_step_clipper=1,
    )
    run(model, optimizer, range(STEPS), DOUBLE)
    assert optimizer.synchronised
    if freeze_step == FREEZE:
        expected, _ = dense_run(FrozenAdam, 1, (0.9, 0.999), weight_decay, True)
    else:
        other = wrapped(Steady())
        run(other, torch.optim.AdamW(other.parameters(), lr=LR, weight_decay=weight_decay), range(STEPS), DOUBLE)
        expected = parameters(other)
    # The momentum is rebuilt from the parameters' way, less a first-order weight decay: exact up to rounding of
    # parameters of about 1 divided by lr.
    assert float((parameters(model) - expected).abs().max()) < SMALL


def test_zeroone_adam_with_a_fixed_variance_in_between_is_adam_with_that_variance() -> None:
    """The variance is updated at the scheduled steps only, and corrected for as many updates; the momentum always."""
    model = wrapped(Steady())
    optimizer = make("zeroone", model, compressor="none", freeze_step=8, variance_scaler=1, lr=LR)
    other, (b1, b2) = Steady(), (0.9, 0.999)
    moments = {p: [torch.zeros_like(p), torch.zeros_like(p)] for p in other.parameters()}
    updates = 0
    for number in range(1, 9):
        other.zero_grad()
        other(batch(number, 0, DOUBLE)).mean().backward()
        updates += number in (1, 2, 4, 8)
        for p, (m, v) in moments.items():
            m.mul_(b1).add_(p.grad, alpha=1 - b1)
            if number in (1, 2, 4, 8):
                v.mul_(b2).add_(p.grad**2, alpha=1 - b2)
            p.data -= LR * (m / (1 - b1**number)) / ((v / (1 - b2**updates)).sqrt() + EPS)
        step(model, optimizer, batch(number, 0, DOUBLE))
    assert float((parameters(model) - parameters(other)).abs().max()) < SMALL


def identity_on_this_rank(kind: str) -> list[float]:
    model = wrapped(Steady())
    options = {"local_step_clipper": 1, "variance_scaler": 1000} if kind == "zeroone" else {}
    run(model, make(kind, model, compressor="none", freeze_step=FREEZE, **options), range(STEPS), DOUBLE)
    return parameters(model).tolist()


@pytest.mark.parametrize(("kind", "oracle"), [("adam", FrozenAdam), ("lamb", FrozenLamb), ("zeroone", FrozenAdam)])
def test_two_ranks_are_one_with_a_batch_twice_as_large(two: Pool, kind: str, oracle: Any) -> None:
    expected, _ = dense_run(oracle, 2, (0.9, 0.999), 0.0, False)
    for got in two.run(__name__, "identity_on_this_rank", kind=kind):
        assert float((torch.tensor(got, dtype=DOUBLE) - expected).abs().max()) < SMALL


def local_steps_on_this_rank() -> list[list[float]]:
    model = wrapped(Steady())
    optimizer = make(
        "zeroone",
        model,
        compressor="none",
        freeze_step=1,
        local_step_scaler=1,
        local_step_clipper=4,
        weight_decay=0.1,
    )
    trajectory = [parameters(model).tolist()]
    for number in range(8):
        step(model, optimizer, batch(number, rank(), DOUBLE))
        trajectory.append(parameters(model).tolist())
    return trajectory


def test_local_steps_and_their_mean(two: Pool) -> None:
    """Between synchronisations AdamW on each rank's own gradient with the common variance; there the mean of the
    parameters, and the momentum that would have made the mean's way in equal steps.

    Freeze at 1; with local_step_scaler 1 and a clipper of 4 synchronisations are at 2, 4, 8."""
    b1, decay = 0.9, 0.1
    models = [Steady() for _ in range(2)]
    groups = [list(model.parameters()) for model in models]
    momenta: list[list[Tensor]] = []
    variances: list[Tensor] = []
    trajectory, anchors, last_sync = [[flat(group) for group in groups]], [p.data.clone() for p in groups[0]], 1
    for number in range(1, 9):
        for which, model in enumerate(models):
            model.zero_grad()
            model(batch(number - 1, which, DOUBLE)).mean().backward()
        if number == 1:
            means = [(a.grad + b.grad) / 2 for a, b in zip(*groups, strict=True)]
            variances, momenta = [g**2 for g in means], [[g.clone() for g in means] for _ in groups]
        for group, mine in zip(groups, momenta, strict=True):
            for i, p in enumerate(group):
                if number > 1:
                    mine[i] = b1 * mine[i] + (1 - b1) * p.grad
                p.data -= LR * (mine[i] / (variances[i].sqrt() + EPS) + decay * p.data)
        if number in (1, 2, 4, 8):
            for i, (a, b) in enumerate(zip(*groups, strict=True)):
                mean = (a.data + b.data) / 2
                if number > 1:
                    z = (anchors[i] - mean) / (LR * (number - last_sync)) - decay * anchors[i]
                    momenta[0][i] = momenta[1][i] = z * (variances[i].sqrt() + EPS)
                a.data, b.data, anchors[i] = mean, mean.clone(), mean.clone()
            last_sync = number
        trajectory.append([flat(group) for group in groups])
    results = two.run(__name__, "local_steps_on_this_rank")
    for number in range(9):
        for which in range(2):
            gap = torch.tensor(results[which][number], dtype=DOUBLE) - trajectory[number][which]
            assert float(gap.abs().max()) < SMALL
        assert (results[0][number] == results[1][number]) == (number in (0, 1, 2, 4, 8))


def test_what_is_owed_at_the_freeze_goes_into_the_momentum() -> None:
    """One compressed step lies before the freeze at 3. With it and what it lost the momentum is that of an exact mean,
    and nothing is owed any more: afterwards the memory holds ways, not gradients."""
    momenta = []
    for compressor in ("none", "sign"):
        model = wrapped(Steady())
        optimizer = make("zeroone", model, compressor=compressor, freeze_step=3, variance_scaler=1)
        run(model, optimizer, range(2), DOUBLE)
        assert not any(memory.any() for memory in optimizer.exchange_state.memory().values())
        run(model, optimizer, [2], DOUBLE)
        assert not any(memory.any() for memory in optimizer.exchange_state.memory().values())
        momenta.append(flat(optimizer.state[p]["update"] for p in model.parameters()))
        run(model, optimizer, [3], DOUBLE)
        assert (compressor == "sign") == any(bool(m.any()) for m in optimizer.exchange_state.memory().values())
    assert float((momenta[0] - momenta[1]).abs().max()) < SMALL


def test_steps_of_the_variance_policy() -> None:
    assert sorted(variance_steps(2, 30)) == [1, 2, 3, 5, 7, 11, 15, 23]
    assert sorted(variance_steps(1, 40)) == [1, 2, 4, 8, 16, 32]
    assert len(variance_steps(16, 16)) == 16


def test_steps_of_the_local_step_policy() -> None:
    assert [sync_interval(since, 4, 8) for since in range(0, 20, 2)] == [1, 1, 2, 2, 4, 4, 8, 8, 8, 8]
    assert sync_interval(10**9, 1, 16) == 16


def test_synchronisations_come_when_the_policy_says() -> None:
    model = wrapped(Net())
    optimizer = make("zeroone", model, freeze_step=4, local_step_scaler=3, local_step_clipper=4)
    seen = []
    for number in range(1, 25):
        step(model, optimizer, batch(number))
        seen += [number] if optimizer.synchronised else []
    # Steps 1 to 4 are common; 5 (since = 1) and 6 at interval 1, 7 (since = 3) begins interval 2, 11 interval 4.
    assert seen == [1, 2, 3, 4, 5, 6, 7, 9, 11, 15, 19, 23]
