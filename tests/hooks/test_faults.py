"""What goes wrong on one rank is heard on all, in words, within the time-out; and never as wrong numbers."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hooks
from hooks import PowerSGDState, powersgd_hook
from tests.pool import Pool

PROGRAMS = "tests.hooks.programs"


def test_an_exception_in_a_compressor_reaches_every_rank() -> None:
    with Pool(2) as pool:
        (healthy, _, _, waited), (failing, cause, later, _) = pool.run(PROGRAMS, "failure")
    assert "ZeroDivisionError: no luck on this rank" in failing
    assert "programs.py" in failing, "the original traceback is part of the message"
    assert "rank 1 in unit 0" in failing
    assert cause == "ZeroDivisionError('no luck on this rank')"
    assert "no luck on this rank" in later, "and it is said again at the next use"
    assert "rank 0 in unit 0" in healthy
    assert "all_reduce" in healthy
    assert waited < 30, "the time-out of 60 s was not waited for"


def test_a_rank_that_does_not_come_costs_the_time_out() -> None:
    with Pool(2) as pool:
        _, heard = pool.run(PROGRAMS, "absent")
    assert "gradient exchange failed on rank 1 in unit 0" in heard
    assert "during all_" in heard, "the collective is named"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([{"spec": "powersgd:rank=2"}, {"spec": "powersgd:rank=4"}], ["powersgd:rank=2", "powersgd:rank=4"]),
        ([{"spec": "sign"}, {"spec": "topk:density=0.1"}], ["rank 0 has sign", "rank 1 has topk"]),
        ([{"seed": 0}, {"seed": 1}], ["rank 0 has seed=0", "rank 1 has seed=1"]),
        ([{"error_feedback": True}, {"error_feedback": False}], ["error_feedback"]),
        ([{"unit_cap_mb": 1.0}, {"unit_cap_mb": 2.0}], ["unit_cap_mb"]),
        ([{"shapes": [(4, 4), (3,)]}, {"shapes": [(4, 4), (5,)]}], ["p1 [3]", "p1 [5]"]),
        ([{"shapes": [(4, 4), (3,)]}, {"shapes": [(4, 4)]}], ["nothing"]),
    ],
)
def test_ranks_that_differ_hear_the_same_error(two: Pool, options: list[dict[str, Any]], words: list[str]) -> None:
    first, second = two.run(PROGRAMS, "disagreement", per_rank=options)
    assert first == second
    assert all(word in first for word in words), first


def test_ranks_that_agree_hear_nothing(two: Pool) -> None:
    assert two.run(PROGRAMS, "disagreement", per_rank=[{}]) == ["", ""]


@pytest.mark.parametrize(
    "spec", ["powersgd:rank=2", "sign", "onebit", "topk:density=0.1", "randomk:density=0.2", "bf16"]
)
def test_an_infinity_on_one_rank_leaves_no_trace(two: Pool, spec: str) -> None:
    for noticed, same, skipped in two.run(PROGRAMS, "overflow", spec=spec):
        assert noticed, "the rank without the infinity must skip the step too"
        assert same, "the next steps must be as if that step had never been"
        assert skipped == 1


def test_a_replica_that_drifted_is_found(three: Pool) -> None:
    heard = three.run(PROGRAMS, "drifted")
    assert heard[0] == heard[1] == heard[2]
    assert "ranks [2]" in heard[0]
    assert "'p3'" in heard[0]


@pytest.mark.usefixtures("alone")
class TestBadInput:
    """In one process: each message names what was given and what to do."""

    def model(self) -> DistributedDataParallel:
        return DistributedDataParallel(nn.Linear(4, 4))

    def test_the_state_forgotten(self) -> None:
        model = self.model()
        model.register_comm_hook(None, powersgd_hook)
        with pytest.raises(TypeError, match=r"powersgd_hook expects a state.*PowerSGDState"):
            model(torch.ones(1, 4)).sum().backward()

    def test_a_second_hook(self) -> None:
        model = self.model()
        hooks.register(model, "sign")
        with pytest.raises(RuntimeError, match="already"):
            hooks.register(model, "sign")

    def test_no_ddp_model(self) -> None:
        with pytest.raises(TypeError, match="Linear"):
            hooks.register(nn.Linear(2, 2), "sign")  # type: ignore[arg-type]

    def test_one_state_for_two_models(self) -> None:
        first, second = self.model(), self.model()
        state = hooks.register(first, "sign")
        first(torch.ones(1, 4)).sum().backward()
        second.register_comm_hook(state, hooks.compress_hook)
        with pytest.raises(ValueError, match="a state of its own"):
            second(torch.ones(1, 4)).sum().backward()

    def test_sparse_gradients(self) -> None:
        model = DistributedDataParallel(nn.Embedding(4, 4, sparse=True))
        hooks.register(model, "sign")
        with pytest.raises(ValueError, match="sparse embedding"):
            model(torch.tensor([1])).sum().backward()

    def test_names_where_there_are_none(self) -> None:
        model = self.model()
        model.register_comm_hook(hooks.HookState("split:match=*w*/sign"), hooks.compress_hook)
        with pytest.raises(ValueError, match="does not know"):
            model(torch.ones(1, 4)).sum().backward()

    @pytest.mark.parametrize(
        "options", [{"seed": 1.5}, {"timeout": 0}, {"timeout": float("inf")}, {"unit_cap_mb": -1}, {"unit_cap_mb": "1"}]
    )
    def test_options_of_the_state(self, options: dict[str, Any]) -> None:
        with pytest.raises((TypeError, ValueError), match=next(iter(options))):
            hooks.HookState("sign", **options)

    @pytest.mark.parametrize("options", [{"rank": 0}, {"rank": 2.5}, {"rank": "4"}, {"rnak": 2}])
    def test_options_of_the_compressor(self, options: dict[str, Any]) -> None:
        with pytest.raises((TypeError, ValueError), match=next(iter(options))):
            PowerSGDState(**options)

    def test_before_init_process_group(self) -> None:
        dist.destroy_process_group()
        try:
            with pytest.raises(RuntimeError, match="init_process_group"):
                hooks.HookState("sign")
        finally:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def test_any_callable_becomes_a_hook(self) -> None:
        model = self.model()
        state = hooks.HookState("none", model=model)

        class Callable:
            def __call__(self, state: "hooks.HookState", given: "Any") -> Any:
                return hooks.none_hook(state, given)

        model.register_comm_hook(state, hooks.ddp_hook(functools.partial(Callable().__call__)))
        model(torch.ones(1, 4)).sum().backward()
        assert torch.equal(model.module.weight.grad, torch.ones(4, 4))
