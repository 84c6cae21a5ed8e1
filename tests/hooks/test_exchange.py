"""DDP hooks on real gloo workers: the same numbers as the lockstep simulation, in every mode of DDP."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compress import registry
from compress.compressor import Compressor, Context
from compress.driver import Carry, commit, exchange_unit
from compress.options import parse
from compress.simulate import lockstep
from hooks.units import NamedParameter, Unit, plan_units
from tests.hooks.programs import SHAPES, Fed, gradients
from tests.pool import Pool

PROGRAMS = "tests.hooks.programs"
SPECS = [str(example) for cls in registry.values() for example in cls.examples()]
DDP_MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "tiny buckets": {"bucket_cap_mb": 0.0002},
    "static graph": {"static_graph": True, "bucket_cap_mb": 0.0002},
    "bucket view": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0002},
    "find unused": {"find_unused_parameters": True, "bucket_cap_mb": 0.0002},
}


def simulated(spec: str, count: int, peers: int, unit_cap_mb: float = 25.0) -> list[list[Tensor]]:
    """What the workers' gradients must be after each step, from the exchanges run in lockstep in this process."""
    compressor: Compressor = parse(spec)
    module = Fed()
    parameters = [NamedParameter(name, p) for name, p in module.named_parameters()]
    units: list[list[Unit]] = [
        plan_units(parameters, compressor, unit_cap_mb, peers=peers, rank=rank, seed=0, error_feedback=True)
        for rank in range(peers)
    ]
    results = []
    for step in range(count):
        result: dict[str, Tensor] = {}
        fed = [
            dict(zip((each.name for each in parameters), gradients(step, rank), strict=True)) for rank in range(peers)
        ]
        for index, unit in enumerate(units[0]):
            carries: list[Carry] = [each[index].carry for each in units]

            def loader(rank: int, unit: Unit = unit, fed: Any = fed) -> Any:
                flat = torch.cat([torch.empty(0), *(fed[rank][s.spec.name].reshape(-1) for s in unit.layout.slots)])  # type: ignore[union-attr]

                def load(out: Tensor, memory: Tensor | None) -> None:
                    out.copy_(flat) if memory is None else torch.add(flat, memory, out=out)

                return load

            outcomes = lockstep(
                [
                    exchange_unit(
                        compressor,
                        loader(rank),
                        carries[rank],
                        Context(unit.layout, peers, rank, step, 0, salt=f"unit{index}."),
                    )
                    for rank in range(peers)
                ]
            )
            for carry, outcome in zip(carries, outcomes, strict=True):
                commit(carry, outcome, True, unit.layout)
            result |= {slot.spec.name: slot.view(outcomes[0].mean).clone() for slot in unit.layout.slots}
        results.append([result[each.name] for each in parameters])
    return results


@pytest.mark.parametrize("spec", SPECS)
def test_two_workers_equal_the_simulation_bit_for_bit(two: Pool, spec: str) -> None:
    # A sum of two has one order, so nothing may differ, over several steps and units.
    expected = simulated(spec, 3, 2, unit_cap_mb=0.0006)
    ddp = DDP_MODES["tiny buckets"]
    for got in two.run(PROGRAMS, "steps", spec=spec, count=3, ddp=ddp, unit_cap_mb=0.0006):
        for step, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
            for a, b in zip(mine, theirs, strict=True):
                assert torch.equal(a, b), f"step {step}"


@pytest.mark.parametrize("spec", SPECS)
def test_three_workers_equal_the_simulation_to_rounding(three: Pool, spec: str) -> None:
    # One step: three summands have an order, and one ulp in a memory can flip a later sign.
    (expected,) = simulated(spec, 1, 3)
    tolerance = 2e-6 + parse(spec).rounding
    results = three.run(PROGRAMS, "steps", spec=spec, count=1, ddp={})
    for (got,) in results:
        for a, b, first in zip(got, expected, results[0][0], strict=True):
            assert torch.equal(a, first), "replicas differ"
            assert torch.allclose(a, b, atol=tolerance * 5, rtol=tolerance)


@pytest.mark.parametrize("mode", DDP_MODES)
@pytest.mark.parametrize("spec", ["powersgd:rank=2", "sign", "topk:density=0.1"])
def test_ddps_modes_and_buckets_change_no_bit(two: Pool, mode: str, spec: str) -> None:
    expected = two.run(PROGRAMS, "steps", spec=spec, count=4, ddp={})
    got = two.run(PROGRAMS, "steps", spec=spec, count=4, ddp=DDP_MODES[mode])
    for a, b in zip(expected, got, strict=True):
        for x, y in zip(a, b, strict=True):
            assert all(torch.equal(p, q) for p, q in zip(x, y, strict=True))


def test_many_units_of_powersgd_are_one_to_rounding(two: Pool) -> None:
    one = two.run(PROGRAMS, "steps", spec="powersgd:rank=2", count=2, ddp={})[0]
    many = two.run(PROGRAMS, "steps", spec="powersgd:rank=2", count=2, ddp={}, unit_cap_mb=0.0006)[0]
    for x, y in zip(one, many, strict=True):
        for p, q in zip(x, y, strict=True):
            torch.testing.assert_close(p, q, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("spec", SPECS)
def test_bytes_are_those_of_the_formula(three: Pool, spec: str) -> None:
    for seen in three.run(PROGRAMS, "statistics", spec=spec):
        # The driver's flag is one number a unit, of 2 to 8 bytes, which the formula takes to be 4 or 8.
        assert abs(seen["wire"] - seen["formula"]) <= 8
        assert seen["dense"] == 4 * sum(torch.Size(shape).numel() for shape in SHAPES)
        assert all(seconds >= 0 for seconds in seen["seconds"])


def test_powersgd_needs_two_collectives_with_vectors_riding_along(two: Pool) -> None:
    for seen in two.run(PROGRAMS, "statistics", spec="powersgd:rank=1"):
        assert seen["collectives"] == 2


@pytest.mark.parametrize("spec", ["powersgd:rank=2", "sign", "bf16"])
def test_accumulation_under_no_sync(two: Pool, spec: str) -> None:
    assert all(two.run(PROGRAMS, "accumulated", spec=spec))


@pytest.mark.parametrize("spec", ["powersgd:rank=1", "topk:density=0.1", "int8"])
def test_what_is_owed_to_a_sometimes_unused_parameter_is_kept(two: Pool, spec: str) -> None:
    assert all(loss < 1e-2 for loss in two.run(PROGRAMS, "unused", spec=spec))


def test_parameters_of_every_kind_come_out_right(two: Pool) -> None:
    # Exact, so what is left is the rounding of each dtype: fp32, complex64, double (in a double arena), bf16.
    for errors in two.run(PROGRAMS, "odd_parameters", spec="powersgd:rank=24,min_compression_rate=0"):
        fp32, channels_last, complex64, double, bf16 = errors
        assert max(fp32, channels_last, complex64) < 1e-5
        assert double < 1e-6
        assert bf16 < 2**-8


def test_join_with_uneven_inputs(two: Pool) -> None:
    assert two.run(PROGRAMS, "joined", spec="powersgd:rank=8")[-1] < 1e-3


@pytest.mark.parametrize("spec", ["powersgd:rank=2", "sign"])
def test_gradients_without_ddp(two: Pool, spec: str) -> None:
    assert all(two.run(PROGRAMS, "manual", spec=spec))


def test_the_order_of_collectives_is_that_of_units_whatever_the_timing(three: Pool) -> None:
    first, *others = three.run(PROGRAMS, "order", units=8)
    assert len(first) > 16
    assert all(other == first for other in others)


def test_a_unit_is_exchanged_while_backward_goes_on(two: Pool) -> None:
    assert all(two.run(PROGRAMS, "overlap"))


def test_changes_of_compressor_lose_nothing(two: Pool) -> None:
    assert all(gap < 1e-5 for gap in two.run(PROGRAMS, "switched"))


@pytest.mark.parametrize("spec", ["topk:density=0.1", "powersgd:rank=1"])
def test_a_change_of_the_loss_scale_changes_nothing(two: Pool, spec: str) -> None:
    assert all(two.run(PROGRAMS, "scale_change", spec=spec))


def test_lanes_end_with_their_states(two: Pool) -> None:
    for before, after in two.run(PROGRAMS, "threads_left", count=10):
        assert after <= before


def test_hooks_names_are_accepted_by_ddp() -> None:
    import hooks

    found = [name for name in hooks.__all__ if name.endswith("_hook") and name != "ddp_hook"]
    assert len(found) >= 10
    for name in found:
        hook = getattr(hooks, name)
        assert hook.__name__ == name
        nn.parallel.DistributedDataParallel._check_comm_hook(None, hook)  # type: ignore[arg-type]
