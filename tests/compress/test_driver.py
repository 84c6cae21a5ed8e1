"""Error feedback and commit: written once, so tested once."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from torch import Tensor

from compress import AllReduce, Compressor, Context, Exchange, Request, Simulation, State, TensorSpec, UnitLayout
from compress.compressor import Round
from compress.driver import Carry, Outcome, all_finite, commit, drive, exchange_unit
from compress.requests import Replies
from tests.strategies import (
    Recipe,
    Shapes,
    each,
    gaussians,
    same_bits,
    same_contents,
    shapes,
    tensors_in,
    workers,
)


@dataclass(frozen=True)
class Half(Compressor):
    """Sends half of every entry: the simplest compressor with a residual."""

    name = "half_of_it"

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        sent = x / 2
        x -= sent
        (mean,) = yield AllReduce((sent,))
        return mean, state

    def rounds(self, ctx: Context) -> Sequence[Round]:
        return [(AllReduce, ctx.layout.dense_bytes)]


@dataclass(frozen=True)
class Prepared(Half):
    """Doubles the gradient before the memory is added."""

    def prepare(self, grad: Tensor, state: State, ctx: Context) -> tuple[Tensor, State]:
        return grad * 2, state


@dataclass(frozen=True)
class Narrow(Half):
    """Returns the mean of the first elements only."""

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        (mean,) = yield AllReduce((x[:2].clone(),))
        return mean, state


@dataclass(frozen=True)
class Double(Half):
    """Returns the mean in another dtype."""

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        (mean,) = yield AllReduce((x.double(),))
        return mean, state


@dataclass(frozen=True)
class Silent(Half):
    """Asks for nothing, as a method with local steps does in between."""

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        return torch.zeros_like(x), state
        yield


def test_error_feedback_is_keeping_what_was_not_sent() -> None:
    """g = 1 at each step, half of gradient + memory sent: 1/2, 3/4, 7/8, …"""
    simulation = Simulation(Half(), [(1,)], 1)
    sent = [simulation.step([torch.ones(1)])[0].mean.tolist() for _ in range(4)]
    assert sent == [[0.5], [0.75], [0.875], [0.9375]]


def test_without_error_feedback_each_step_stands_alone() -> None:
    simulation = Simulation(Half(), [(1,)], 1, error_feedback=False)
    assert [simulation.step([torch.ones(1)])[0].mean.tolist() for _ in range(3)] == [[0.5]] * 3
    assert not simulation.owed().any()


def test_prepare_sees_the_gradient_before_the_memory_is_added() -> None:
    simulation = Simulation(Prepared(), [(1,)], 1)
    assert [simulation.step([torch.ones(1)])[0].mean.tolist() for _ in range(3)] == [[1.0], [1.5], [1.75]]


@pytest.mark.parametrize(("compressor", "got"), [(Narrow(), r"\[2\] torch.float32"), (Double(), "float64")], ids=str)
def test_a_mean_of_another_form_is_an_error_that_says_so(compressor: Compressor, got: str) -> None:
    with pytest.raises(TypeError, match=rf"half_of_it: exchange must return the mean as \[3\] .*{got}"):
        Simulation(compressor, [(3,)], 2).step([torch.ones(3)] * 2)


@pytest.mark.parametrize("flags", [[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]], ids=str)
def test_an_exchange_that_asks_for_nothing_may_be_given_flags(flags: list[float]) -> None:
    """Nothing was exchanged, so there is nothing to undo: the residual is kept as the exchange left it."""
    simulation = Simulation(Silent(), [(2,), (1,)], 2)
    outcomes = simulation.step([torch.ones(3), 3 * torch.ones(3)], [torch.tensor(flags)] * 2)
    assert all(outcome.finite for outcome in outcomes)
    assert simulation.owed().tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("values", "finite"),
    [
        ([3e38, 3e38], True),
        ([-3e38, -3e38], True),
        ([1.0, float("nan")], False),
        ([float("inf"), float("-inf")], False),
    ],
    ids=str,
)
def test_a_sum_that_overflows_does_not_make_its_terms_infinite(values: list[float], finite: bool) -> None:
    assert all_finite(torch.tensor(values)) is finite
    assert all_finite(torch.tensor([]))


def test_an_exchange_is_closed_when_a_collective_fails() -> None:
    closed = []

    def exchange() -> Exchange:
        try:
            yield AllReduce((torch.ones(1),))
        finally:
            closed.append(True)
        return torch.ones(1), State()

    def perform(request: Request) -> Replies:
        raise ConnectionError("peer is gone")

    with pytest.raises(ConnectionError, match="peer is gone"):
        drive(exchange(), perform)
    assert closed == [True]


def outcome_of(compressor: Compressor, carry: Carry, ctx: Context, gradient: Tensor) -> Outcome:
    """One worker's step, alone."""

    def load(out: Tensor, memory: Tensor | None) -> None:
        out.copy_(gradient if memory is None else gradient + memory)

    def perform(request: Request) -> Replies:
        if request.kind == "all_reduce":
            return tuple(part.clone() for part in request.parts)
        return tuple(part.clone() if request.kind == "all_to_all" else part[None].clone() for part in request.parts)

    return drive(exchange_unit(compressor, load, carry, ctx), perform)


@each()
@given(chosen=shapes(min_elements=1), recipe=gaussians)
def test_committing_by_a_tensor_is_committing_by_a_bool(compressor: Compressor, chosen: Shapes, recipe: Recipe) -> None:
    """As on a device, where the host must not look at it."""
    layout = UnitLayout.build(
        [TensorSpec(f"p{number}", shape) for number, shape in enumerate(chosen)], compressor.place
    )
    gradient = recipe.gradient(layout.numel, layout.dtype, 0)
    for accept in (True, False):
        kept = []
        for decision in (accept, torch.tensor(accept)):
            ctx = Context(layout)
            carry = Carry.start(compressor, ctx)
            for _ in range(2):
                commit(carry, outcome_of(compressor, carry, ctx, gradient), decision, layout)
            kept.append([*([] if carry.memory is None else [carry.memory]), *tensors_in(carry.state)])
        assert same_contents(*kept)


@each()
@given(chosen=shapes(), count=workers, recipe=gaussians)
def test_nothing_but_the_spare_arena_changes_before_the_commit(
    compressor: Compressor, chosen: Shapes, count: int, recipe: Recipe
) -> None:
    simulation = Simulation(compressor, chosen, 1)
    simulation.step(recipe.step(simulation))
    (carry,) = simulation.carries
    memory, state = carry.memory, carry.state
    before = [tensor.clone() for tensor in tensors_in((memory, state))]
    gradient = recipe.gradient(simulation.layout.numel, torch.float32, 0, 1)
    outcome = outcome_of(compressor, carry, simulation.context(0), gradient)
    assert carry.memory is memory
    assert carry.state is state
    assert same_contents(before, list(tensors_in((memory, state))))
    assert outcome.residual is carry.spare


def test_the_gradient_is_not_changed() -> None:
    simulation = Simulation("sign", [(100,)], 2)
    gradients = [torch.linspace(-1, 1, 100), torch.ones(100)]
    copies = [gradient.clone() for gradient in gradients]
    simulation.step(gradients)
    assert all(map(same_bits, gradients, copies))
