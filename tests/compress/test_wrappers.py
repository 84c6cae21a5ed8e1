"""Split and Warmup: what goes where, and how few messages it takes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress import (
    BF16,
    FP16,
    Compressor,
    Exact,
    PowerSGD,
    RandomK,
    Sign,
    SignSGD,
    Simulation,
    Split,
    TensorSpec,
    TopK,
    UnitLayout,
    Warmup,
)
from tests.strategies import CASES, Recipe, each, exact_mean, fewer, gaussians, same_bits, seeds, shapes, unit

SHAPES = [(20, 16), (16,), (12, 20), (20,)]


def run(compressor: Compressor | str, shapes: list[tuple[int, ...]] = SHAPES, workers: int = 2) -> Simulation:
    return Simulation(compressor, shapes, workers)


@given(recipe=gaussians)
def test_each_part_gets_what_its_compressor_would_give_it_alone(recipe: Recipe) -> None:
    """Bit for bit; here matrices by sign, vectors by top-k."""
    both = run("split:child=(topk:density=0.25)/sign:block=256")
    matrices, vectors = run("sign:block=256", [(20, 16), (12, 20)]), run("topk:density=0.25", [(16,), (20,)])
    for step in range(3):
        gradients = recipe.step(both, step)
        received = both.step(gradients)[0].mean
        (inner, _), (child, _) = both.layout.part(0), both.layout.part(1)
        assert same_bits(received[inner], matrices.step([gradient[inner] for gradient in gradients])[0].mean)
        assert same_bits(received[child], vectors.step([gradient[child] for gradient in gradients])[0].mean)


def test_vectors_are_those_with_fewer_than_two_axes() -> None:
    split = Split()
    assert [split.place(TensorSpec("p", shape))[0] for shape in [(), (5,), (0,), (1, 5), (2, 2, 2)]] == [1, 1, 1, 0, 0]
    assert split.place(TensorSpec("p", (5, 2), is_complex=True))[0] == 1
    assert not split.needs_names


@pytest.mark.parametrize(
    ("match", "matching"),
    [
        ("*embed*", {"embed.weight", "pos_embed"}),
        ("?os_*", {"pos_embed"}),
        ("head.[bw]*", {"head.weight", "head.bias"}),
    ],
)
def test_patterns_are_of_whole_names(match: str, matching: set[str]) -> None:
    split = Split(match=match)
    names = ["embed.weight", "pos_embed", "head.weight", "head.bias", "Head.bias"]
    assert {name for name in names if split.place(TensorSpec(name, (4, 4)))[0] == 1} == matching
    assert split.needs_names
    assert Warmup(split).needs_names
    assert Split(child=split).needs_names
    assert Split(split).needs_names


@pytest.mark.parametrize(
    ("compressor", "messages"),
    [
        (Split(PowerSGD(min_compression_rate=0.0), child=Exact()), 2),  # the vectors ride with P
        (Split(Exact(), child=Exact()), 1),
        (Split(RandomK(density=0.5), child=Exact()), 1),
        (Split(Sign(), child=Sign(block=256)), 2),
        (Split(Sign(), child=Exact()), 3),
        (Split(TopK(), child=TopK(density=0.5)), 1),
        (Split(Split(TopK(), match="p0", child=TopK(density=0.5)), child=TopK(density=1.0)), 1),
        (Split(Split(PowerSGD(min_compression_rate=0.0), match="p0", child=Exact()), child=RandomK()), 2),
        (Split(Exact(), child=BF16()), 2),  # a reduction has one dtype
        (Warmup(Split(Sign(), child=Exact()), steps=1), 1),
        (Warmup(Split(Sign(), child=Exact()), steps=0), 3),
    ],
    ids=str,
)
def test_what_fits_together_is_one_message(compressor: Compressor, messages: int) -> None:
    simulation = run(compressor)
    simulation.step([torch.ones(simulation.layout.numel)] * 2)
    assert simulation.traffic[0].collectives == messages


def test_a_split_sends_the_bytes_of_its_parts() -> None:
    both, inner, child = run("split/sign"), run("sign", [(20, 16), (12, 20)]), run("none", [(16,), (20,)])
    for simulation in (both, inner, child):
        simulation.step([torch.ones(simulation.layout.numel)] * 2)
    assert both.traffic[0].payload_bytes == inner.traffic[0].payload_bytes | child.traffic[0].payload_bytes


def test_randomk_in_two_parts_draws_two_sets() -> None:
    """Or entries of equal place in both would always go together."""
    simulation = run(Split(RandomK(density=0.1), child=RandomK(density=0.1)), [(500, 1), (500,)])
    received = simulation.step([torch.ones(1000)] * 2)[0].mean.view(2, 500)
    assert received[0].count_nonzero() == received[1].count_nonzero() == 50
    assert not torch.equal(received[0], received[1])


def test_an_exact_part_owes_nothing_while_the_other_does() -> None:
    simulation = run(Split(TopK(density=0.1), child=Exact()))
    simulation.step(Recipe("gaussian", 1).step(simulation))
    span, _ = simulation.layout.part(1)
    assert not simulation.owed()[span].any()
    assert simulation.owed().any()


@each([case for case in CASES if not case.is_wrapper])
@fewer(0.5)
@given(chosen=shapes(), seed=seeds, workers=st.integers(1, 3))
def test_warm_up_is_exact_and_then_the_inner_compressor(
    compressor: Compressor, chosen: list[tuple[int, ...]], seed: int, workers: int
) -> None:
    """For exactly that many steps, owing nothing; then what the inner one would do from its own start."""
    steps = 2
    warm, plain = Simulation(Warmup(compressor, steps=steps), chosen, workers), Simulation(compressor, chosen, workers)
    plain.step_number = steps
    for step in range(steps + 2):
        gradients = Recipe("gaussian", seed).step(warm, step)
        received = warm.step(gradients)[0].mean
        if step < steps:
            scale = max(float(gradient.norm()) for gradient in gradients)
            assert float((received - exact_mean(gradients)).norm()) <= 4 * unit(torch.float32) * scale
            assert not warm.owed().any()
        else:
            assert same_bits(received, plain.step(gradients)[0].mean)


def test_a_step_that_is_skipped_does_not_count_as_warm_up() -> None:
    simulation = run("warmup:steps=1/topk:density=0.01", [(100,)])
    simulation.step([torch.full((100,), torch.nan)] * 2)
    assert simulation.step([torch.ones(100)] * 2)[0].mean.tolist() == [1.0] * 100
    assert simulation.step([torch.ones(100)] * 2)[0].mean.count_nonzero() == 1


@pytest.mark.parametrize("case", CASES, ids=str)
def test_wrappers_forward_what_they_do_not_change(case: Compressor) -> None:
    layout = UnitLayout.build([TensorSpec(f"p{number}", shape) for number, shape in enumerate(SHAPES)], case.place)
    wrapped = Warmup(case)
    assert wrapped.keeps_memory == case.keeps_memory
    assert wrapped.rounding == case.rounding
    assert wrapped.largest == case.largest
    assert wrapped.prepares == case.prepares
    assert wrapped.needs_names == case.needs_names
    assert wrapped.contraction(layout) == case.contraction(layout)
    assert wrapped.law == case.law
    assert all(wrapped.place(slot.spec) == case.place(slot.spec) for slot in layout.slots)


def test_a_split_is_as_good_as_its_weaker_part() -> None:
    split = Split(TopK(density=0.5), child=BF16())
    layout = UnitLayout.build([TensorSpec("a", (4, 4)), TensorSpec("b", (7,))], split.place)
    assert split.contraction(layout) == 0.5
    assert split.rounding == BF16().rounding
    assert Split(FP16()).largest == Split(child=FP16()).largest == FP16().largest < Split().largest
    assert split.law == "conserves"
    assert Split(SignSGD()).law == Split(child=SignSGD()).law == Warmup(Split(SignSGD())).law == "none"
    assert Split(RandomK()).contraction(UnitLayout.build([TensorSpec("a", (4, 4))], Split(RandomK()).place)) is None
    assert Split(RandomK()).contraction(UnitLayout.build([TensorSpec("b", (4,))], Split(RandomK()).place)) == 1.0
