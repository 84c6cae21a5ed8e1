"""Stop at any step, load with weights_only, go on: bit for bit the trajectory of never stopping."""

import copy
from typing import Any

import pytest
import torch

from tests.optim.training import (
    KINDS,
    Net,
    Steady,
    batch,
    contents,
    differences,
    loaded,
    make,
    parameters,
    rank,
    run,
    saved,
    step,
    wrapped,
)
from tests.pool import Pool

STEPS = 14
each_kind = pytest.mark.parametrize("kind", list(KINDS))


def options(kind: str) -> dict[str, Any]:
    """Freeze at 3 (0/1 Adam: 6), a criterion of its own for one more."""
    return {"weight_decay": 0.01}


def trajectory(kind: str) -> tuple[Any, Any, list[bytes]]:
    """A run that never stops, with a checkpoint after each step."""
    model = wrapped(Net())
    optimizer = make(kind, model, **options(kind))
    checkpoints = [saved(model.module, optimizer)]
    for number in range(STEPS):
        step(model, optimizer, batch(number, rank()))
        checkpoints.append(saved(model.module, optimizer))
    return model, optimizer, checkpoints


def resumed(kind: str, content: bytes, after: int) -> tuple[Any, Any]:
    model_state, optimizer_state = loaded(content)
    model = Net(seed=1)
    model.load_state_dict(model_state)
    model = wrapped(model)  # sends rank 0's parameters to all
    optimizer = make(kind, model, **options(kind))
    optimizer.load_state_dict(optimizer_state)
    run(model, optimizer, range(after, STEPS))
    return model, optimizer


def wrong_stops(kind: str) -> list[str]:
    """On a worker or here: stops after which something differs at the end."""
    model, optimizer, checkpoints = trajectory(kind)
    wrong = []
    for after in range(STEPS):
        again, other = resumed(kind, checkpoints[after], after)
        found = differences(contents(optimizer), contents(other))
        if not torch.equal(parameters(model), parameters(again)):
            found.append("parameters")
        wrong += [f"stopped after {after}: {each}" for each in found]
    return wrong


@each_kind
def test_resuming_after_any_step(kind: str) -> None:
    assert wrong_stops(kind) == []


@each_kind
def test_resuming_after_any_step_on_two_ranks(two: Pool, kind: str) -> None:
    """0/1 Adam: between synchronisations too, when DDP gives all ranks the parameters of rank 0."""
    assert two.run(__name__, "wrong_stops", kind=kind) == [[], []]


def test_resuming_with_automatic_freezing() -> None:
    """The criterion's memory belongs to the checkpoint: one step before it decides."""

    def build() -> tuple[Any, Any]:
        model = wrapped(Steady())
        return model, make("adam", model, freeze_step=None, betas=(0.8, 0.9))  # looks every 10 steps

    model, optimizer = build()
    contents_before, number = b"", 0
    while not optimizer.frozen:
        contents_before = saved(model.module, optimizer)
        run(model, optimizer, [number], torch.float64)
        number += 1
        assert number < 300
    run(model, optimizer, range(number, number + 3), torch.float64)
    again, other = build()
    for thing, state in zip((again.module, other), loaded(contents_before), strict=True):
        thing.load_state_dict(state)
    run(again, other, range(number - 1, number + 3), torch.float64)
    assert other.frozen_at == optimizer.frozen_at == number
    assert torch.equal(parameters(model), parameters(again))


@each_kind
def test_a_checkpoint_is_not_changed_by_those_who_load_it(kind: str) -> None:
    model = wrapped(Net())
    optimizer = make(kind, model)
    run(model, optimizer, range(8))
    state = optimizer.state_dict()
    untouched, other_model = copy.deepcopy(state), wrapped(Net())
    other = make(kind, other_model)
    other.load_state_dict(state)
    run(other_model, other, range(8, 12))
    again = make(kind, wrapped(Net()))
    again.load_state_dict(state)
    assert differences(contents(again), _flattened(kind, untouched)) == []


def _flattened(kind: str, state: dict[str, Any]) -> dict[str, Any]:
    optimizer = make(kind, wrapped(Net()))
    optimizer.load_state_dict(state)
    return contents(optimizer)


@each_kind
def test_loading_back_in_mid_run(kind: str) -> None:
    """The optimiser that has gone on returns to where it was."""
    model = wrapped(Net())
    optimizer = make(kind, model)
    run(model, optimizer, range(9))
    content = saved(model.module, optimizer)
    run(model, optimizer, range(9, 13))
    end = parameters(model)
    for thing, state in zip((model.module, optimizer), loaded(content), strict=True):
        thing.load_state_dict(state)
    run(model, optimizer, range(9, 13))
    assert torch.equal(parameters(model), end)


def test_learning_rates_and_groups_come_from_the_checkpoint() -> None:
    model = wrapped(Net())
    optimizer = make("adam", model, lr=0.5)
    content = saved(optimizer)
    other = make("adam", wrapped(Net()), lr=0.1)
    other.load_state_dict(loaded(content)[0])
    assert other.param_groups[0]["lr"] == 0.5


def checkpoint(kind: str = "adam", **keywords: Any) -> dict[str, Any]:
    model = wrapped(Net())
    optimizer = make(kind, model, **keywords)
    run(model, optimizer, range(8))
    return loaded(saved(optimizer))[0]


def edited(**changes: Any) -> dict[str, Any]:
    state = checkpoint()
    for path, value in changes.items():
        outer, inner = path.split("__")
        state[outer] = {**state[outer], inner: value}
    return state


@pytest.mark.parametrize(
    ("make_state", "message"),
    [
        (lambda: torch.optim.Adam(Net().parameters()).state_dict(), r"no 'stage'.*not one of OneBitAdam"),
        (lambda: checkpoint("lamb"), r"one of OneBitLamb, not of OneBitAdam"),
        (lambda: checkpoint("zeroone"), r"one of ZeroOneAdam, not of OneBitAdam"),
        (lambda: checkpoint(compressor="int8"), r"compressor 'int8', this state has 'sign'"),
        (lambda: checkpoint(seed=3), r"seed 3, this state has 0"),
        (lambda: edited(exchange__world_size=4), r"saved by 4 ranks, now there are 1"),
        (lambda: edited(exchange__rank=2), r"rank 2, this is rank 0"),
    ],
    ids=["torch", "lamb", "zeroone", "compressor", "seed", "ranks", "rank"],
)
def test_a_checkpoint_of_something_else_is_refused_and_changes_nothing(make_state: Any, message: str) -> None:
    model = wrapped(Net())
    optimizer = make("adam", model)
    run(model, optimizer, range(5))
    before = contents(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(make_state())
    assert differences(before, contents(optimizer)) == []


def test_a_checkpoint_of_another_model_is_refused() -> None:
    state = checkpoint()
    optimizer = make("adam", wrapped(Net(width=41)))
    with pytest.raises(ValueError, match=r"another model: parameter 1 has the shape \[41, 5\].*there \[40, 5\]"):
        optimizer.load_state_dict(state)
    fewer = wrapped(torch.nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"groups of \[5\] parameters, this OneBitAdam has groups of \[2\]"):
        make("adam", fewer).load_state_dict(state)


def test_before_the_first_step_there_is_a_checkpoint_too() -> None:
    content = saved(make("adam", wrapped(Net())))
    model = wrapped(Net())
    optimizer = make("adam", model)
    optimizer.load_state_dict(loaded(content)[0])
    run(model, optimizer, range(5))
    assert optimizer.frozen
