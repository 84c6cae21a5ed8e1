"""Non-finite gradients on one rank: every rank leaves the step out, and it leaves no trace."""

from typing import Any

import pytest
import torch

from tests.optim.training import (
    KINDS,
    Net,
    batch,
    contents,
    differences,
    make,
    parameters,
    rank,
    run,
    same_on_all_ranks,
    step,
    wrapped,
)
from tests.pool import Pool

STEPS = 12
POISON = (0, 2, 3, 5, 6, 9)
"""Before which step: the first; in the warm-up; the freeze of two optimisers, of 0/1 Adam; after it, also at one of
its synchronisations."""


def train(kind: str, poison: int | None, victim: int, scaled: bool) -> tuple[Any, Any, Any, Any]:
    model = wrapped(Net())
    # Power-of-two scales cost no bits. All of 0/1 Adam's steps are collective here.
    optimizer = make(kind, model, **({"local_step_clipper": 1} if kind == "zeroone" else {}))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000, enabled=scaled)
    scales = []

    def attempt(number: int, factor: float) -> None:
        optimizer.zero_grad()
        scaler.scale(model(batch(number, rank())).mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())

    for number in range(STEPS):
        if number == poison:
            attempt(number + 100, float("inf") if rank() == victim else 1.0)
        attempt(number, 1.0)
    return model, optimizer, scaler, scales


def traces(kind: str, scaled: bool) -> list[str]:
    """On a worker: what differs in any bit from a run in which the bad step never came."""
    clean_model, clean, _, _ = train(kind, None, 1, scaled)
    wrong = []
    for poison in POISON:
        model, optimizer, _, scales = train(kind, poison, 1, scaled)
        found = differences(contents(clean), contents(optimizer), but=["/stage/skipped"])
        if not torch.equal(parameters(clean_model), parameters(model)):
            found.append("parameters")
        if not same_on_all_ranks(model):
            found.append("replicas")
        if optimizer.skipped != (0 if scaled else 1):
            found.append(f"skipped = {optimizer.skipped}")
        if scaled and scales != [2.0**10] * poison + [2.0**9] * (STEPS + 1 - poison):
            found.append(f"scales {scales}")
        wrong += [f"before step {poison}: {each}" for each in found]
    return wrong


@pytest.mark.parametrize("scaled", [True, False], ids=["scaler", "no scaler"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_bad_gradient_on_one_rank_leaves_no_trace_on_any(two: Pool, kind: str, scaled: bool) -> None:
    assert two.run(__name__, "traces", kind=kind, scaled=scaled) == [[], []]


def alone_in_a_local_step(scaled: bool) -> tuple[bool, list[bool], int, bool]:
    """On a worker: rank 1 has a bad gradient between two synchronisations, and once at one."""
    model = wrapped(Net())
    optimizer = make("zeroone", model, freeze_step=2, local_step_scaler=1, local_step_clipper=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000, enabled=scaled)
    synchronised = []
    for number in range(1, 20):
        optimizer.zero_grad()
        bad = number in (8, 13) and rank() == 1  # synchronises at 3, 5, 9, 13, 17
        scaler.scale(model(batch(number, rank())).mean() * (float("nan") if bad else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        synchronised.append(optimizer.synchronised)
        if optimizer.synchronised and not same_on_all_ranks(model):
            return False, synchronised, optimizer.skipped, False
    momenta = torch.cat([optimizer.state[p]["update"].reshape(-1) for p in model.parameters()])
    return bool(parameters(model).isfinite().all()), synchronised, optimizer.skipped, bool(momenta.isfinite().all())


@pytest.mark.parametrize("scaled", [True, False], ids=["scaler", "no scaler"])
def test_a_rank_may_leave_out_a_local_step_by_itself(two: Pool, scaled: bool) -> None:
    """The others go on, all meet at the next synchronisation, and nobody's parameters are harmed. A synchronisation
    all leave out, and make up for in the next step."""
    first, second = two.run(__name__, "alone_in_a_local_step", scaled=scaled)
    assert first[0]
    assert second[0]
    assert first[1] == second[1]
    assert (first[2], second[2]) == ((0, 0) if scaled else (1, 2))
    assert first[3]
    assert second[3]


def momenta_after_a_lone_skip() -> list[float]:
    """On a worker: 0/1 Adam's momentum at the synchronisation after rank 1 has left out a step."""
    model = wrapped(Net())
    optimizer = make("zeroone", model, freeze_step=2, local_step_scaler=1, local_step_clipper=4)
    for number in range(1, 10):
        bad = number == 8 and rank() == 1
        optimizer.zero_grad()
        (model(batch(number, rank())).mean() * (float("nan") if bad else 1.0)).backward()
        optimizer.step()
        if number > 7 and optimizer.synchronised:
            return torch.cat([optimizer.state[p]["update"].reshape(-1) for p in model.parameters()]).tolist()
    raise AssertionError("no synchronisation")


def test_after_a_lone_skip_momenta_agree_again(two: Pool) -> None:
    """They follow from the mean way and the mean of the learning rates: not from each rank's own count."""
    first, second = two.run(__name__, "momenta_after_a_lone_skip")
    assert first == second


def test_clipping_and_unscaling_act_on_what_is_there() -> None:
    """Scaler with clipping in between, in all stages: as no scaler with clipping."""
    for kind in KINDS:
        ends = []
        for scaled in (False, True):
            model = wrapped(Net())
            optimizer = make(kind, model)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=scaled)
            for number in range(10):
                optimizer.zero_grad()
                scaler.scale(model(batch(number)).mean()).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                scaler.step(optimizer)
                scaler.update()
            ends.append(parameters(model))
        assert torch.equal(*ends)


def test_gradients_spoilt_after_backward_are_an_error_that_says_so() -> None:
    """In the compressed stage nobody would notice a NaN that clipping made, until all momenta were NaN."""
    model = wrapped(Net())
    optimizer = make("adam", model)
    run(model, optimizer, range(5))
    optimizer.zero_grad()
    model(batch(5)).mean().backward()
    next(model.parameters()).grad.fill_(torch.nan)
    with pytest.raises(RuntimeError, match=r"non-finite to exchange.*before step\(\)"):
        optimizer.step()


def test_very_large_gradients_that_overflow_over_their_denominator_are_clamped() -> None:
    for kind in KINDS:
        model = wrapped(Net())
        optimizer = (
            make(kind, model, betas=(0.0, 0.9), local_step_clipper=1)
            if kind == "zeroone"
            else make(kind, model, betas=(0.0, 0.9))
        )
        run(model, optimizer, range(8))
        before = parameters(model)
        step(model, optimizer, batch(8), 1e34)
        assert optimizer.skipped == 0
        assert bool(parameters(model).isfinite().all())
        assert float((parameters(model) - before).abs().max()) < 1.0
