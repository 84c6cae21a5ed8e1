"""All ranks hold the same bits, and send as many bytes as the formula says."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hooks.optim.zeroone_adam import variance_steps
from tests.optim.training import Net, batch, make, rank, same_on_all_ranks, step, wrapped
from tests.pool import Pool

STEPS, FREEZE = 24, 6


def train(kind: str) -> list[tuple[bool, bool, bool, float, int, float]]:
    """On a worker, per step: equal parameters, equal momenta, in the exact phase, bytes sent, of them in compressed
    exchanges, messages."""
    model = wrapped(Net())
    optimizer = make(kind, model, freeze_step=FREEZE, weight_decay=0.01)
    state, seen = optimizer.exchange_state, []
    for number in range(1, STEPS + 1):
        before, messages = state.stats.total.wire_bytes, state.stats.total.collectives
        step(model, optimizer, batch(number, rank()))
        momenta = torch.cat([optimizer.state[p].get("update", p).reshape(-1) for p in model.parameters()])
        theirs = momenta.detach().clone()
        dist.broadcast(theirs, 0)
        common = torch.tensor(float(torch.equal(theirs, momenta)))
        dist.all_reduce(common, dist.ReduceOp.MIN)
        sent = state.stats.total.wire_bytes - before
        seen.append(
            (
                same_on_all_ranks(model),
                bool(common),
                getattr(optimizer, "synchronised", True),
                sent,
                state.formula_bytes(),
                state.stats.total.collectives - messages,
            )
        )
    return seen


def dense_bytes(peers: int) -> float:
    """Ring all-reduce of the model, and of a flag a unit."""
    elements, units = sum(p.numel() for p in Net().parameters()), 3
    return 2 * (peers - 1) / peers * 4 * (elements + units)


@pytest.mark.parametrize("kind", ["adam", "lamb"])
@pytest.mark.parametrize("peers", [2, 3])
def test_replicas_are_equal_after_every_step(request: pytest.FixtureRequest, kind: str, peers: int) -> None:
    pool: Pool = request.getfixturevalue("two" if peers == 2 else "three")
    for seen in pool.run(__name__, "train", kind=kind):
        for number, (parameters, momenta, _, sent, formula, messages) in enumerate(seen, 1):
            assert parameters
            assert momenta
            if number <= FREEZE:
                assert sent == pytest.approx(dense_bytes(peers), rel=1e-6)
            else:
                assert round(sent) == formula
                assert sent < dense_bytes(peers) / 4  # no more, since chunks are of whole blocks and the model is small
                assert messages == 6  # three units


@pytest.mark.parametrize("peers", [2, 3])
def test_replicas_are_equal_after_synchronisations_and_silent_between(
    request: pytest.FixtureRequest, peers: int
) -> None:
    pool: Pool = request.getfixturevalue("two" if peers == 2 else "three")
    for seen in pool.run(__name__, "train", kind="zeroone"):
        for number, (parameters, momenta, synchronised, sent, formula, _) in enumerate(seen, 1):
            assert parameters == synchronised
            if number in variance_steps(1, FREEZE):
                assert sent == pytest.approx(dense_bytes(peers), rel=1e-6)
            elif synchronised:
                assert momenta
                assert round(sent) == formula
            else:
                assert sent == 0
        assert {synchronised for _, _, synchronised, *_ in seen} == {True, False}


def messages_of_a_local_step() -> int:
    """On a worker: requests of any sort that the state performs in a step between synchronisations."""
    count = 0

    def counting(perform: Any) -> Any:
        def counted(asked: Any) -> Any:
            nonlocal count
            count += 1
            return perform(asked)

        return counted

    model = wrapped(Net())
    optimizer = make("zeroone", model, freeze_step=1, local_step_scaler=1, local_step_clipper=8, transport=counting)
    for number in range(1, 5):
        step(model, optimizer, batch(number, rank()))  # synchronises at 2 and 4, then at 8
    before = count
    assert before > 0
    for number in range(5, 8):
        step(model, optimizer, batch(number, rank()))
    return count - before


def test_a_local_step_sends_nothing_at_all(two: Pool) -> None:
    """Not even the agreement on finite gradients."""
    assert two.run(__name__, "messages_of_a_local_step") == [0, 0]
