"""Elements whose frozen variance is zero or almost zero: embedding rows that never or hardly occurred."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from hooks.optim.base import adams_bound
from tests.optim.training import generator, make, rank, same_on_all_ranks, wrapped
from tests.pool import Pool

ROWS, WIDTH, LR, FREEZE = 40, 16, 1e-2, 8
NEVER, ONCE = range(30, 40), range(20, 30)
"""Rows that never occur; rows that occur once before the freeze, with tiny gradients."""


class Embedding(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Parameter(0.1 * torch.randn(ROWS, WIDTH, generator=generator(5)))
        self.out = torch.nn.Linear(WIDTH, 4)
        with torch.no_grad():
            self.out.weight.copy_(torch.randn(4, WIDTH, generator=generator(6)))
            self.out.bias.zero_()

    def forward(self, index: Tensor, weight: Tensor) -> Tensor:
        return (self.out(self.rows[index].tanh()).square().sum(1) * weight).mean()


def words(number: int, which: int) -> tuple[Tensor, Tensor]:
    """Rows 0 to 19 at every step; those of ONCE at the second with weight 1e-7, and fully from the freeze on."""
    index = torch.randint(0, 20, (24,), generator=generator(number, which, 1))
    weight = torch.ones(24)
    if number == 2:
        index, weight = torch.cat((index, torch.tensor(ONCE))), torch.cat((weight, torch.full((len(ONCE),), 1e-7)))
    if number > FREEZE:
        index, weight = torch.cat((index, torch.tensor(ONCE))), torch.cat((weight, torch.ones(len(ONCE))))
    return index, weight


def train(kind: str, steps: int = 60) -> tuple[list[float], bool, bool, float]:
    """On a worker: the largest move at each step in units of lr, whether the rows of NEVER have kept their bits,
    whether replicas are equal, and the last loss."""
    model = wrapped(Embedding())
    start, moves = model.module.rows.detach().clone(), []
    options = {"local_step_clipper": 1} if kind == "zeroone" else {}
    optimizer = make(kind, model, lr=LR, freeze_step=FREEZE, **options)
    loss = torch.zeros(())
    for number in range(1, steps + 1):
        before = model.module.rows.detach().clone()
        optimizer.zero_grad()
        loss = model(*words(number, rank()))
        loss.backward()
        optimizer.step()
        moves.append(float((model.module.rows.detach() - before).abs().max()) / LR)
    stayed = torch.equal(model.module.rows[NEVER.start :], start[NEVER.start :])
    return moves, stayed, same_on_all_ranks(model), loss.item()


def compressing_the_momentum_itself(steps: int = 30) -> float:
    """The published recursion, m compressed with one scale a block and then divided by D: its largest move, in units
    of lr, after the freeze. Independent of the library's optimisers."""
    model, (b1, b2), eps = Embedding(), (0.9, 0.999), 1e-8
    m, v, e = (torch.zeros(ROWS, WIDTH) for _ in range(3))
    largest = 0.0
    for number in range(1, steps + 1):
        model.zero_grad()
        model(*words(number, 0)).backward()
        g = model.rows.grad
        assert g is not None
        m = b1 * m + (1 - b1) * g
        if number <= FREEZE:
            v = b2 * v + (1 - b2) * g**2
            move = (m / (1 - b1**number)) / ((v / (1 - b2**number)).sqrt() + eps)
        else:
            x = m + e
            m = x.abs().mean() * x.sign()
            e = x - m
            move = m / ((v / (1 - b2**FREEZE)).sqrt() + eps)
            largest = max(largest, float(move.abs().max()))
        with torch.no_grad():
            model.rows -= LR * move.clamp(-10, 10)  # not to leave the range of numbers
    return largest


def test_compressing_the_momentum_itself_blows_up() -> None:
    """A million times the step that Adam could make: what the guards are against."""
    assert compressing_the_momentum_itself() > 1e5


@pytest.mark.parametrize("kind", ["adam", "zeroone"])
def test_no_move_exceeds_adams_bound(two: Pool, kind: str) -> None:
    bound = adams_bound(0.9, 0.999)
    for moves, stayed, equal, loss in two.run(__name__, "train", kind=kind):
        assert max(moves) <= bound * (1 + 1e-5)
        assert stayed
        assert equal
        assert loss < 1.0


def test_zeroone_adam_before_the_freeze_is_bounded_too() -> None:
    """Rows with tiny variance from step 2 that come fully at step 3, where gradients over it travel in one bit."""
    model = wrapped(Embedding())
    optimizer, bound = make("zeroone", model, lr=LR, freeze_step=100, variance_scaler=1), adams_bound(0.9, 0.999)
    index, weight = words(2, 0)
    for number in range(1, 4):
        before = model.module.rows.detach().clone()
        optimizer.zero_grad()
        model(index, torch.ones_like(weight) if number == 3 else weight).backward()
        optimizer.step()
    moved = (model.module.rows.detach() - before).abs().max().item() / LR
    assert 1.0 < moved <= bound + 1.0  # what the momentum already was may have been a unit


def test_lambs_moves_are_bounded_by_its_rates(two: Pool) -> None:
    """lr times trust ratio (at most max_coeff), times factor (at most factor_max), times its larger bound."""
    bound = adams_bound(0.9, 0.999) / (1 - 0.999**FREEZE) ** 0.5
    for moves, stayed, equal, _ in two.run(__name__, "train", kind="lamb"):
        assert max(moves) <= 10 * 4 * bound
        assert stayed
        assert equal


@pytest.mark.parametrize("kind", ["adam", "zeroone", "lamb"])
def test_momentum_where_nothing_ever_came_stays_zero(kind: str) -> None:
    model = wrapped(Embedding())
    optimizer = make(kind, model, lr=LR, freeze_step=FREEZE)
    for number in range(1, 30):
        optimizer.zero_grad()
        model(*words(number, 0)).backward()
        optimizer.step()
    state = optimizer.state[model.module.rows]
    assert bool(state["denominator"][NEVER.start :].isinf().all())
    assert bool(state["denominator"][: NEVER.start].isfinite().all())
    assert not state["update"][NEVER.start :].any()
    assert bool(state["update"][: NEVER.start].any(1).all())


class Slope(torch.nn.Module):
    """Gradients of a given size on `used` elements of `size`."""

    def __init__(self, size: int, used: int) -> None:
        super().__init__()
        self.p = torch.nn.Parameter(torch.linspace(1, 2, size, dtype=torch.float64))
        self.used = used

    def forward(self, gradient: float) -> Tensor:
        return gradient * (self.p[: self.used] * torch.linspace(1, 2, self.used)).sum()


def lambs_factors(gradients: list[float], size: int, used: int, **options: Any) -> list[float]:
    """1-bit LAMB's correction after each step, frozen after three."""
    model, factors = wrapped(Slope(size, used)), []
    optimizer = make("lamb", model, compressor="none", lr=1e-4, **options)
    for gradient in gradients:
        optimizer.zero_grad()
        model(gradient).backward()
        optimizer.step()
        factors.append(float(optimizer.state[model.module.p]["factor"]))
    return factors


def test_lambs_correction_does_not_look_at_elements_without_variance() -> None:
    gradients = [1.0 + 0.1 * (number % 3) for number in range(20)]
    assert lambs_factors(gradients, 20, 10) == lambs_factors(gradients, 10, 10)


@pytest.mark.parametrize(
    ("later", "beta2", "end", "rate"), [(1e-3, 0.5, 2.0, 1.1), (1e3, 0.9, 0.75, 0.9)], ids=["shrinking", "growing"]
)
def test_lambs_correction_moves_slowly_to_its_bounds(later: float, beta2: float, end: float, rate: float) -> None:
    """Gradients a thousand times smaller or larger from the freeze on: ten per cent a step, up to 2 or down to 3/4."""
    factors = lambs_factors([1.0] * 3 + [later] * 57, 10, 10, betas=(0.9, beta2), factor_max=2.0, factor_min=0.75)
    assert factors[:3] == [1.0] * 3
    assert factors[-1] == end
    ratios = [now / before for before, now in itertools.pairwise(factors)]
    assert all(0.9 - 1e-12 <= ratio <= 1.1 + 1e-12 for ratio in ratios)
    assert ratios.count(pytest.approx(rate)) >= 2
