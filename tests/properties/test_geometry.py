"""Scaling, contraction, bounded memory, and the workers as a set."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from compress import Compressor, Simulation
from tests.strategies import (
    CASES,
    ROUNDINGS,
    Recipe,
    Shapes,
    conserving,
    dtypes,
    each,
    exact_mean,
    fewer,
    gaussians,
    recipes,
    same_bits,
    shapes,
    unit,
    workers,
)

# Not where the wire has a narrow range of exponents (float16): there a scaled gradient may overflow or vanish.
HOMOGENEOUS = [case for case in conserving() if case.largest >= 1e30]


@each(HOMOGENEOUS)
@given(dtype=dtypes, chosen=shapes(), count=workers, recipe=recipes, exponent=st.integers(-30, 30))
def test_a_power_of_two_times_the_gradient_is_that_times_the_result(
    compressor: Compressor, dtype: torch.dtype, chosen: Shapes, count: int, recipe: Recipe, exponent: int
) -> None:
    """To the bit, since it changes no mantissa, in memory and state too."""
    factor = 2.0**exponent
    plain, scaled = (Simulation(compressor, chosen, count, dtype=dtype) for _ in range(2))
    for step in range(3):
        gradients = recipe.step(plain, step)
        expected = plain.step(gradients)[0].mean * factor
        assert same_bits(scaled.step([gradient * factor for gradient in gradients])[0].mean, expected)


def squared(x: torch.Tensor) -> float:
    return float(x.double().square().sum())


_SAMPLE = [(24, 24), (1, 40), (7,)]
CONTRACTIVE = [case for case in CASES if case.contraction(Simulation(case, _SAMPLE).layout) is not None]


def test_contraction_is_claimed_by_most() -> None:
    """So that the tests below have something to hold on to."""
    assert {"none", "topk", "sign", "int8", "int4", "bf16"} <= {case.name for case in CONTRACTIVE}


@each(CONTRACTIVE)
@given(dtype=dtypes, chosen=shapes(min_elements=1), count=workers, recipe=recipes)
def test_the_residual_is_smaller_than_claimed(
    compressor: Compressor, dtype: torch.dtype, chosen: Shapes, count: int, recipe: Recipe
) -> None:
    """|x - C(x)|^2 <= (1 - delta) |x|^2 on every worker, for its first gradient and with memory added."""
    simulation = Simulation(compressor, chosen, count, dtype=dtype)
    delta = compressor.contraction(simulation.layout)
    assert delta is not None
    assert 0 < delta <= 1
    for step in range(3):
        gradients = recipe.step(simulation, step)
        entering = [
            gradient if carry.memory is None else gradient + carry.memory
            for gradient, carry in zip(gradients, simulation.carries, strict=True)
        ]
        outcomes = simulation.step(gradients)
        slack = ROUNDINGS * unit(dtype)  # the mean of a block is off by at most a unit for each element
        if compressor.keeps_memory:
            for x, outcome in zip(entering, outcomes, strict=True):
                assert squared(outcome.residual) <= (1 - delta + slack) * squared(x)
        elif count == 1:
            assert squared(entering[0] - outcomes[0].mean) <= (1 - delta + slack) * squared(entering[0])


@each([case for case in CONTRACTIVE if case.keeps_memory])
@fewer(0.25)
@given(chosen=shapes(min_elements=1), count=workers, recipe=recipes, period=st.integers(1, 4))
def test_the_memory_stays_bounded(
    compressor: Compressor, chosen: Shapes, count: int, recipe: Recipe, period: int
) -> None:
    """|e_t| <= sqrt(1 - delta) / (1 - sqrt(1 - delta)) max |g|, by induction from the contraction."""
    simulation = Simulation(compressor, chosen, count, dtype=torch.float64)
    delta = compressor.contraction(simulation.layout)
    assert delta is not None
    kept = math.sqrt(1 - delta)
    largest = 0.0
    for step in range(20):
        gradients = recipe.step(simulation, step % period)
        largest = max(largest, *(float(gradient.norm()) for gradient in gradients))
        simulation.step(gradients)
        for carry in simulation.carries:
            assert carry.memory is not None
            assert float(carry.memory.norm()) <= (kept / (1 - kept) + 1e-12) * largest


@each()
@given(
    chosen=shapes(min_elements=1),
    order=st.sampled_from([2, 3, 4]).flatmap(lambda count: st.permutations(range(count))),
    recipe=gaussians,
)
def test_the_order_of_the_workers_does_not_matter(
    compressor: Compressor, chosen: Shapes, order: list[int], recipe: Recipe
) -> None:
    """The result is the same and each keeps its own residual. Generic gradients: a tie may be broken by rounding.

    1e-9 is far above what another order of summation changes in double precision, far below any real change;
    a reduction on a narrower wire rounds by as much as it says.
    """
    allowed = 1e-9 + compressor.rounding
    plain, permuted = (Simulation(compressor, chosen, len(order), dtype=torch.float64) for _ in range(2))
    for step in range(3):
        gradients = recipe.step(plain, step)
        scale = max(float(gradient.norm()) for gradient in gradients)
        expected = plain.step(gradients)[0].mean
        received = permuted.step([gradients[worker] for worker in order])[0].mean
        assert float((received - expected).norm()) <= allowed * scale
        for carry, worker in zip(permuted.carries, order, strict=True):
            memory = plain.carries[worker].memory
            if memory is not None and carry.memory is not None:
                assert float((carry.memory - memory).norm()) <= allowed * scale


# Those whose docstring says "is linear": what they send depends on the sum over workers alone.
LINEAR = [case for case in CASES if case.name in ("none", "randomk", "powersgd")]


@each(LINEAR)
@given(chosen=shapes(min_elements=1), count=st.sampled_from([2, 3, 4, 8]), recipe=gaussians)
def test_linear_compressors_see_only_the_mean(
    compressor: Compressor, chosen: Shapes, count: int, recipe: Recipe
) -> None:
    """W workers are one worker with the mean gradient, and with the mean memory after several steps."""
    many = Simulation(compressor, chosen, count, dtype=torch.float64)
    single = Simulation(compressor, chosen, 1, dtype=torch.float64)
    for step in range(3):
        gradients = recipe.step(many, step)
        scale = max(float(gradient.norm()) for gradient in gradients)
        expected = single.step([exact_mean(gradients)])[0].mean
        assert float((many.step(gradients)[0].mean - expected).norm()) <= 1e-9 * scale
        assert float((many.owed() - single.owed()).norm()) <= 1e-9 * scale
