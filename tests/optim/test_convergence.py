"""The optimisers arrive where exact averaging arrives, and freeze when the variance has settled."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.optim.training import generator, make, rank, same_on_all_ranks, wrapped
from tests.pool import Pool

STEPS, FREEZE, DIMENSION, NOISE, LR = 400, 200, 400, 0.5, 1e-2


class Quadratic(torch.nn.Module):
    """f(x) = sum of h x^2 / 2 with curvatures from 0.1 to 10, seen through noise of each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.ones(DIMENSION))
        self.h = torch.logspace(-1, 1, DIMENSION)

    def forward(self, noise: Tensor) -> Tensor:
        return self.value() + (noise * self.x).sum()

    def value(self) -> Tensor:
        return (self.h * self.x.square()).sum() / 2


def quadratic(kind: str) -> tuple[float, bool]:
    """On a worker: the mean of f over the last fifth of the steps, and whether replicas are equal."""
    model = wrapped(Quadratic())
    settings: dict[str, Any] = {"lr": LR, "betas": (0.9, 0.98), "freeze_step": FREEZE}
    optimizer: Any
    if kind == "exact":
        optimizer = torch.optim.Adam(model.parameters(), lr=LR, betas=(0.9, 0.98))
    elif kind == "exact lamb":
        optimizer = make("lamb", model, **(settings | {"freeze_step": STEPS + 1}))
    elif kind == "zeroone":
        settings |= {"variance_scaler": 8, "local_step_scaler": 50, "local_step_clipper": 4}
        optimizer = make("zeroone", model, **settings)
    else:
        optimizer = make(kind, model, **settings)
    random, values = generator(rank(), 31), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(NOISE * torch.randn(DIMENSION, generator=random)).backward()
        optimizer.step()
        values.append(model.module.value().item())
    while not getattr(optimizer, "synchronised", True):
        optimizer.zero_grad()
        model(torch.zeros(DIMENSION)).backward()
        optimizer.step()
    return sum(values[-STEPS // 5 :]) / (STEPS // 5), same_on_all_ranks(model)


@pytest.fixture(scope="module")
def references(two: Pool) -> dict[str, float]:
    """Where exact averaging arrives."""
    return {kind: two.run(__name__, "quadratic", kind=kind)[0][0] for kind in ("exact", "exact lamb")}


@pytest.mark.parametrize(
    ("kind", "exact", "times"), [("adam", "exact", 1.2), ("zeroone", "exact", 1.2), ("lamb", "exact lamb", 2.5)]
)
def test_a_noisy_quadratic_to_the_neighbourhood_of_the_exact_optimiser(
    two: Pool, references: dict[str, float], kind: str, exact: str, times: float
) -> None:
    """1-bit LAMB's rate is raised by the element whose variance has shrunk most, which here is noise: its
    neighbourhood is as much larger."""
    (reached, equal), _ = two.run(__name__, "quadratic", kind=kind)
    reference = references[exact]
    assert equal
    assert reference < Quadratic().value().item() / 500
    assert reached < times * reference


def given_gradients(sizes: list[float], **options: Any) -> Any:
    """OneBitAdam after steps with gradients of these sizes, with beta2 = 0.9: a period of 10 steps."""

    class Slope(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p, self.q = (torch.nn.Parameter(torch.ones(5, dtype=torch.float64)) for _ in range(2))

        def forward(self, size: float) -> Tensor:
            return size * (self.p.sum() - 2 * self.q.sum())

    model = wrapped(Slope())
    optimizer = make("adam", model, freeze_step=None, betas=(0.9, 0.9), **options)
    for size in sizes:
        optimizer.zero_grad()
        model(size).backward()
        optimizer.step()
    return optimizer


def settled_at(sizes: list[float]) -> int | None:
    """By the formula: the first multiple of 10 whose |v|_1 is within 4 % of that 10 steps before."""
    v, norms = 0.0, {}
    for step, size in enumerate(sizes, 1):
        v = 0.9 * v + 0.1 * size**2
        norms[step] = v / (1 - 0.9**step)
        if step >= 20 and step % 10 == 0:
            low, high = sorted((norms[step - 10], norms[step]))
            if low >= 0.96 * high:
                return step
    return None


@pytest.mark.parametrize("sign", [-1, 1], ids=["shrinking", "growing"])
def test_freezes_when_the_variance_has_settled_and_not_before(sign: int) -> None:
    sizes = [2.0 ** (sign * min(step, 45) / 10) for step in range(120)]
    expected = settled_at(sizes)
    assert expected is not None
    assert 50 < expected <= 110
    assert given_gradients(sizes[: expected - 1]).frozen_at is None
    assert given_gradients(sizes).frozen_at == expected


def test_constant_gradients_freeze_after_two_periods() -> None:
    """The variance is corrected for its bias before it is compared: without that it would seem to grow."""
    assert given_gradients([1.0] * 25).frozen_at == 20


def test_a_variance_that_keeps_changing_never_freezes() -> None:
    assert given_gradients([1.03**step for step in range(150)]).frozen_at is None


def test_a_given_step_count_takes_precedence() -> None:
    optimizer = given_gradients([1.0] * 25)
    assert optimizer.freeze_step is None
    model = wrapped(torch.nn.Linear(2, 2))
    other = make("adam", model, betas=(0.9, 0.5), freeze_step=7)
    for _ in range(9):
        other.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        other.step()
    assert other.frozen_at == 7
