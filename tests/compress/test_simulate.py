"""The lockstep simulation: what it computes, and how it tells workers apart that disagree."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compress import (
    AllGather,
    AllReduce,
    AllToAll,
    Compressor,
    Context,
    Exchange,
    LockstepError,
    Request,
    Simulation,
    State,
    simulate,
)
from compress.compressor import Round
from compress.requests import Traffic
from compress.simulate import lockstep, mean_in_order, perform_together
from tests.strategies import Recipe, gaussians, same_bits


def asks(*requests: Request) -> Any:
    """A worker that asks for these, one after the other."""
    for request in requests:  # noqa: UP028 - replies are sent in, and a tuple takes none
        yield request


ONES = torch.ones(2)
REDUCE, GATHER = AllReduce((ONES,)), AllGather((ONES,))


@pytest.mark.parametrize(
    ("second", "first"),
    [
        (GATHER, REDUCE),
        (AllReduce((torch.ones(3),)), REDUCE),
        (AllReduce((ONES.double(),)), REDUCE),
        (AllReduce((ONES, ONES)), REDUCE),
        (AllReduce((ONES,), axis="node"), REDUCE),
        (REDUCE.with_control(torch.zeros(1)), REDUCE),
    ],
    ids=["kind", "shape", "dtype", "number of tensors", "axis", "flags"],
)
def test_workers_that_differ_are_an_error_that_names_both_requests(first: Request, second: Request) -> None:
    def words(request: Request) -> str:
        parts = ", ".join(f"{list(part.shape)} {str(part.dtype)[6:]}" for part in request.parts)
        return f"{request.kind} on '{request.axis}' of ({parts})"

    with pytest.raises(LockstepError) as error:
        lockstep([asks(first), asks(first), asks(second)])
    assert str(error.value) == f"worker 2 asked for {words(second)} where worker 0 asked for {words(first)}"


@pytest.mark.parametrize("early", [0, 1, 2])
def test_a_worker_that_is_done_before_its_peers_is_an_error(early: int) -> None:
    generators = [asks(REDUCE) if worker == early else asks(REDUCE, GATHER) for worker in range(3)]
    with pytest.raises(LockstepError) as error:
        lockstep(generators)
    assert (
        str(error.value) == f"workers [{early}] were done while others asked for all_gather on 'world' of ([2] float32)"
    )


@dataclass(frozen=True)
class Disagreeing(Compressor):
    """Worker 1 asks for something else in its second round."""

    name = "disagreeing"

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        (mean,) = yield AllReduce((x.clone(),))
        yield AllGather((x[: 2 - ctx.index].clone(),))
        return mean, state

    def rounds(self, ctx: Context) -> Sequence[Round]:
        return [(AllReduce, ctx.layout.dense_bytes)]


def test_a_disagreement_reaches_the_user_of_a_simulation() -> None:
    simulation = Simulation(Disagreeing(), [(3,)], 2)
    with pytest.raises(LockstepError, match=r"worker 1 asked for all_gather .*\[1\] float32.* worker 0 .*\[2\]"):
        simulation.step([torch.ones(3)] * 2)
    assert simulation.step_number == 0


@given(count=st.integers(1, 5), recipe=gaussians)
def test_what_each_collective_returns(count: int, recipe: Recipe) -> None:
    sent = [recipe.gradient(6, torch.float64, worker) for worker in range(count)]
    for replies in perform_together([AllGather((x,)) for x in sent]):
        assert same_bits(replies[0], torch.stack(sent))
    expected = torch.stack(sent).mean(0)
    for replies in perform_together([AllReduce((x.clone(),)) for x in sent]):
        assert torch.allclose(replies[0], expected, rtol=0, atol=1e-14)  # sums of at most five numbers below 10
    tables = [recipe.gradient(2 * count, torch.float64, worker).view(count, 2) for worker in range(count)]
    for worker, replies in enumerate(perform_together([AllToAll((table,)) for table in tables])):
        assert same_bits(replies[0], torch.stack([table[worker] for table in tables]))


def test_replies_are_each_workers_own() -> None:
    """A worker that writes into its reply changes nothing for its peers."""
    for kind in (AllReduce, AllGather):
        one, other = perform_together([kind((torch.ones(2),)), kind((torch.ones(2),))])
        one[0].zero_()
        assert bool(other[0].all())


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 9000.0), (torch.bfloat16, 3e38)], ids=str)
def test_a_mean_in_half_width_does_not_overflow_where_its_terms_do_not(dtype: torch.dtype, value: float) -> None:
    """Eight values of 9000 sum to more than float16 holds."""
    mean = mean_in_order([torch.full((1,), value, dtype=dtype)] * 8)
    assert bool(mean.isfinite().all())
    assert float(mean) == pytest.approx(value, rel=8 * torch.finfo(dtype).eps)


def test_traffic_is_counted_for_each_worker() -> None:
    meters = [Traffic(), Traffic()]
    lockstep([asks(REDUCE, GATHER), asks(REDUCE, GATHER)], meters)
    assert meters[0] == meters[1] == Traffic({"all_reduce": 8, "all_gather": 8}, 0, 16.0, 2)


def test_wrong_numbers_of_things_are_errors() -> None:
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        Simulation("none", [(2,)], 0)
    with pytest.raises(ValueError, match="expected 2 gradients, one per worker, got 3"):
        Simulation("none", [(2,)], 2).step([torch.ones(2)] * 3)
    with pytest.raises(ValueError, match=r"gradients must be \[steps, workers, elements…\], got \[2, 2\]"):
        simulate("none", [[1.0, 2.0], [3.0, 4.0]])


@given(recipe=gaussians, count=st.integers(1, 4))
def test_simulate_is_a_simulation_step_by_step(recipe: Recipe, count: int) -> None:
    by_hand = Simulation("topk:density=0.25", [(12,)], count, dtype=torch.float64)
    steps = [recipe.step(by_hand, step) for step in range(3)]
    expected = [by_hand.step(step)[0].mean for step in steps]
    result = simulate("topk:density=0.25", torch.stack([torch.stack(step) for step in steps]))
    assert same_bits(result.means, torch.stack(expected))
    assert same_bits(result.simulation.owed(), by_hand.owed())


def test_the_seed_is_shared_and_decides() -> None:
    gradients = torch.ones(1, 2, 50)
    first, again, other = (simulate("randomk:density=0.1", gradients, seed=seed).means for seed in (0, 0, 1))
    assert same_bits(first, again)
    assert not torch.equal(first, other)


def test_256_workers_fit_into_one_process() -> None:
    simulation = Simulation("none", [(64,)], 256)
    outcomes = simulation.step([torch.full((64,), float(worker)) for worker in range(256)])
    assert outcomes[0].mean.tolist() == outcomes[255].mean.tolist() == [127.5] * 64
