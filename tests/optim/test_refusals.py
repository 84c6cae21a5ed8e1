"""Misuse is refused at once, with the argument, its value and the remedy."""

import gc
import weakref
from typing import Any

import pytest
import torch

import hooks
from hooks.optim.base import optimizer_hook
from tests.optim.training import KINDS, Net, batch, make, run, step, wrapped

each_kind = pytest.mark.parametrize("kind", list(KINDS))


@each_kind
def test_needs_the_ddp_model(kind: str) -> None:
    for wrong in (Net().parameters(), list(Net().parameters()), Net(), None):
        with pytest.raises(TypeError, match=r"needs the DistributedDataParallel model first, not its parameters"):
            KINDS[kind](wrong)


@each_kind
def test_the_model_has_room_for_one_hook(kind: str) -> None:
    model = wrapped(Net())
    make(kind, model)
    with pytest.raises(RuntimeError, match="its own communication hook, but this model has one already"):
        make(kind, model)
    compressed = wrapped(Net())
    hooks.register(compressed, "sign")
    with pytest.raises(RuntimeError, match="has one already"):
        make(kind, compressed)


@each_kind
def test_all_trainable_parameters_must_be_there(kind: str) -> None:
    net = Net()
    net.second.bias.requires_grad_(False)
    model = wrapped(net)
    every = list(model.parameters())
    with pytest.raises(ValueError, match=r"must hold all trainable parameters.*2 are missing, 0 are not"):
        make(kind, model, params=[p for p in every if p.requires_grad][2:])
    with pytest.raises(ValueError, match=r"0 are missing, 1 are not the model's"):
        make(kind, model, params=every)
    optimizer = make(kind, model)
    run(model, optimizer, range(8))
    with pytest.raises(RuntimeError, match=r"takes its parameter groups when it is made \(params=\)"):
        optimizer.add_param_group({"params": [net.second.bias]})


@each_kind
def test_a_failed_construction_can_be_repeated_with_better_arguments(kind: str) -> None:
    model = wrapped(Net())
    with pytest.raises(ValueError, match="eps"):
        make(kind, model, params=[{"params": list(model.parameters()), "eps": -1.0}])
    with pytest.raises(ValueError, match="nonsense"):
        make(kind, model, compressor="nonsense")
    run(model, make(kind, model), range(2))


@each_kind
def test_a_step_needs_a_backward_through_ddp(kind: str) -> None:
    model = wrapped(Net())
    optimizer = make(kind, model)
    with pytest.raises(RuntimeError, match=r"step\(\) without gradients from its DDP model: run forward and backward"):
        optimizer.step()
    step(model, optimizer, batch(0))
    with pytest.raises(RuntimeError, match="without gradients"):
        optimizer.step()
    with model.no_sync():
        model(batch(1)).mean().backward()
    with pytest.raises(RuntimeError, match=r"last micro-batch outside no_sync\(\)"):
        optimizer.step()
    model.module(batch(1)).mean().backward()
    with pytest.raises(RuntimeError, match="without gradients"):
        optimizer.step()


COMMON: list[tuple[str, Any, str]] = [
    ("lr", -1e-3, r"lr must be a number of at least 0, got -0.001"),
    ("lr", float("nan"), r"lr must .* got nan"),
    ("lr", "0.1", r"lr must .* got '0.1'"),
    ("lr", torch.tensor(0.1), r"lr must be a number .* got tensor"),
    ("betas", (0.9, 1.0), r"betas must be two numbers with 0 <= beta < 1, got \(0.9, 1.0\)"),
    ("betas", (-0.1, 0.9), r"betas must .* got \(-0.1, 0.9\)"),
    ("betas", (0.9,), r"betas must .* got \(0.9,\)"),
    ("betas", 0.9, r"betas must .* got 0.9"),
    ("eps", 0.0, r"eps must be a number greater than 0, got 0.0"),
    ("eps", None, r"eps must .* got None"),
    ("weight_decay", -0.1, r"weight_decay must be a number of at least 0, got -0.1"),
    ("freeze_step", 0, r"freeze_step must be an int of at least 1, got 0"),
    ("freeze_step", 2.5, r"freeze_step must .* got 2.5"),
    ("freeze_step", True, r"freeze_step must .* got True"),
]


@each_kind
@pytest.mark.parametrize(("name", "value", "message"), COMMON)
def test_illegal_hyperparameters_name_argument_and_value(kind: str, name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(kind, wrapped(torch.nn.Linear(2, 2)), **{name: value})


@pytest.mark.parametrize(
    ("kind", "name", "value", "message"),
    [
        ("zeroone", "freeze_step", None, r"freeze_step must .* got None"),
        ("zeroone", "variance_scaler", 0, r"variance_scaler must be an int of at least 1, got 0"),
        ("zeroone", "local_step_scaler", -3, r"local_step_scaler must .* got -3"),
        ("zeroone", "local_step_clipper", 0.5, r"local_step_clipper must .* got 0.5"),
        ("lamb", "coeff_beta", 1.0, r"coeff_beta must .* got 1.0"),
        ("lamb", "min_coeff", 0.0, r"min_coeff <= max_coeff, got 0.0 and 10.0"),
        ("lamb", "max_coeff", 0.001, r"min_coeff <= max_coeff, got 0.01 and 0.001"),
        ("lamb", "factor_max", 0.9, r"factor_min <= 1 <= factor_max, got 0.5 and 0.9"),
        ("lamb", "factor_min", 1.5, r"factor_min <= 1 <= factor_max, got 1.5 and 4.0"),
        ("lamb", "factor_threshold", 0.0, r"factor_threshold must .* got 0.0"),
    ],
)
def test_illegal_hyperparameters_of_one_optimiser(kind: str, name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(kind, wrapped(torch.nn.Linear(2, 2)), **{name: value})


@each_kind
def test_groups_are_checked_too(kind: str) -> None:
    model = wrapped(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"betas must .* got \(0.9, 2\)"):
        make(kind, model, params=[{"params": list(model.parameters()), "betas": (0.9, 2)}])


@each_kind
def test_takes_no_scaler(kind: str) -> None:
    """HookState's option is for gradients that carry the scale into the exchange; here none does."""
    with pytest.raises(TypeError, match=r"takes no grad_scaler.*use the scaler as with any optimiser"):
        make(kind, wrapped(torch.nn.Linear(2, 2)), grad_scaler=torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize("state", [None, "state"])
def test_the_hook_by_itself_is_refused(state: Any) -> None:
    model = wrapped(torch.nn.Linear(2, 2))
    model.register_comm_hook(hooks.HookState("sign", model=model) if state else None, optimizer_hook)
    with pytest.raises(TypeError, match="belongs to a 1-bit optimiser, which registers it itself"):
        model(torch.ones(1, 2)).sum().backward()


def test_nothing_outlives_model_and_optimiser() -> None:
    """Their communicator is given back when both are gone."""
    model = wrapped(Net())
    optimizer = make("adam", model)
    run(model, optimizer, range(6))
    state = weakref.ref(optimizer.exchange_state)
    del model, optimizer
    gc.collect()
    assert state() is None
