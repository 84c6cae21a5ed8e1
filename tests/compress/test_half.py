"""16-bit wire: rounding bounds, range, and what error feedback keeps."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress import BF16, FP16, Compressor, Simulation
from compress.half import HalfCodec
from compress.state import server_memory
from tests.strategies import Recipe, dtypes, exact_mean, more, recipes, same_bits, unit

TINY = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134}
"""Half of the smallest number: what rounding loses where the format runs out of exponents."""

each_format = pytest.mark.parametrize("cls", [FP16, BF16])


@each_format
@more(5)
@given(recipe=recipes, numel=st.integers(1, 600), workers=st.sampled_from([1, 2, 3, 4, 8, 64]))
def test_a_wide_sum_rounds_twice_whatever_the_number_of_workers(
    cls: type[FP16 | BF16], recipe: Recipe, numel: int, workers: int
) -> None:
    """|y - mean| <= u (1 + u) mean |x| + u |mean| element by element, u = 2^-11 or 2^-9."""
    simulation = Simulation(cls(wide_sum=True), [(numel,)], workers, dtype=torch.float64)
    gradients = recipe.step(simulation)
    received = simulation.step(gradients)[0].mean
    u = unit(cls.dtype)
    mean, size = exact_mean(gradients), exact_mean([gradient.abs() for gradient in gradients])
    allowed = u * (1 + u) * size + u * mean.abs() + 2 * TINY[cls.dtype]
    assert bool(((received - mean).abs() <= allowed * (1 + 1e-12)).all())  # the bound itself is rounded, in float64


@each_format
@pytest.mark.parametrize("workers", [2, 3, 8, 64])
def test_workers_that_agree_lose_nothing_by_being_many(cls: type[FP16 | BF16], workers: int) -> None:
    """With a wide sum; a 16-bit sum of 64 loses more."""
    gradient = Recipe("gaussian", 4).gradient(500, torch.float32, 0)
    (alone,) = Simulation(cls(wide_sum=True), [(500,)], 1).step([gradient])
    together = Simulation(cls(wide_sum=True), [(500,)], workers).step([gradient] * workers)[0]
    assert same_bits(together.mean, alone.mean)


@each_format
@more(2)
@given(recipe=recipes, workers=st.integers(1, 4))
def test_a_16_bit_sum_rounds_no_more_than_it_says(cls: type[FP16 | BF16], recipe: Recipe, workers: int) -> None:
    """One rounding of each term, one of its division by W, W - 1 of partial sums: at most (W + 1) u of mean |x|."""
    simulation = Simulation(cls(), [(300,)], workers, dtype=torch.float64)
    gradients = recipe.step(simulation)
    received = simulation.step(gradients)[0].mean
    size = exact_mean([gradient.abs() for gradient in gradients])
    u = unit(cls.dtype)
    allowed = (workers + 1) * u * (1 + u) ** (workers + 1) * size + (workers + 1) * TINY[cls.dtype]
    assert bool(((received - exact_mean(gradients)).abs() <= allowed).all())


@each_format
def test_the_claimed_rounding_covers_a_sum_over_eight_workers(cls: type[FP16 | BF16]) -> None:
    """(1 + sum of i/W for i = 2…W) u = 5.4 u elementwise at W = 8, were all roundings of one sign."""
    simulation = Simulation(cls(), [(10_000,)], 8, dtype=torch.float64)
    gradients = [Recipe("gaussian", 9).gradient(10_000, torch.float64, 0) for _ in range(8)]
    received = simulation.step(gradients)[0].mean
    assert float((received - exact_mean(gradients)).norm()) <= cls().rounding * float(gradients[0].norm())


@each_format
@given(recipe=recipes, workers=st.sampled_from([1, 2, 4]), dtype=dtypes)
def test_a_wide_sum_with_memory_conserves_exactly(
    cls: type[FP16 | BF16], recipe: Recipe, workers: int, dtype: torch.dtype
) -> None:
    """To the arena's own rounding, not that of the wire: x minus its rounding is representable."""
    simulation = Simulation(cls(wide_sum=True, memory=True), [(300,)], workers, dtype=dtype)
    for step in range(4):
        gradients = recipe.step(simulation, step)
        before = simulation.owed().double()
        received = simulation.step(gradients)[0].mean.double()
        gap = before + exact_mean(gradients) - received - simulation.owed().double()
        # Sums of at most 4 terms at the worker, at the server and here.
        assert float(gap.norm()) <= 16 * unit(dtype) * max(float(gradient.double().norm()) for gradient in gradients)


@each_format
@given(recipe=recipes)
def test_memory_is_what_rounding_lost(cls: type[FP16 | BF16], recipe: Recipe) -> None:
    simulation = Simulation(cls(memory=True), [(300,)], 1)
    (gradient,) = recipe.step(simulation)
    (outcome,) = simulation.step([gradient])
    assert torch.equal(outcome.mean, gradient.to(cls.dtype).float())
    assert torch.equal(outcome.residual, gradient - outcome.mean)


def test_small_gradients_get_across_in_the_end_with_memory() -> None:
    """1e-8 is less than half of float16's smallest number: lost without memory, delivered with it. Where the sum is
    in float16 too, the division by W comes first and may lose it again."""
    gradient = torch.full((10,), 1e-8)
    for memory in (False, True):
        simulation = Simulation(FP16(wide_sum=True, memory=memory), [(10,)], 2)
        received = sum(simulation.step([gradient] * 2)[0].mean for _ in range(20))
        owed = simulation.owed()
        assert bool((received > 0).all()) == memory
        assert torch.allclose(received + owed, torch.full((10,), 2e-7 if memory else 0.0), rtol=1e-5, atol=0)


def test_without_memory_the_servers_keep_nothing() -> None:
    simulation = Simulation(BF16(wide_sum=True), [(300,)], 3)
    simulation.step(Recipe("gaussian", 1).step(simulation))
    assert not server_memory([carry.state for carry in simulation.carries], simulation.layout).any()


@pytest.mark.parametrize("compressor", [FP16(), FP16(wide_sum=True)], ids=str)
def test_eight_workers_with_9000_do_not_overflow(compressor: Compressor) -> None:
    """Their sum does: 72000 > 65504."""
    outcomes = Simulation(compressor, [(3,)], 8).step([torch.full((3,), 9000.0)] * 8)
    assert outcomes[0].mean.tolist() == [9000.0] * 3


@pytest.mark.parametrize("compressor", [FP16(), FP16(wide_sum=True), FP16(memory=True)], ids=str)
def test_beyond_the_range_is_a_step_to_skip(compressor: Compressor) -> None:
    outcomes = Simulation(compressor, [(3,)], 2).step([torch.full((3,), 70000.0)] * 2)
    assert not any(outcome.finite for outcome in outcomes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@more(2)
@given(recipe=recipes, numel=st.integers(0, 600))
def test_the_codec_rounds_to_nearest(dtype: torch.dtype, recipe: Recipe, numel: int) -> None:
    x = recipe.gradient(numel, torch.float64, 0)
    dense, codec, out = x.clone(), HalfCodec(dtype), torch.zeros(numel, dtype=torch.float64)
    payload = codec.encode_(x)
    assert payload[0].numel() * 2 == len(payload[0]) * codec.block_bytes(8)
    codec.decode_add_(out, payload)
    assert torch.equal(out, dense.to(dtype).double())
    assert torch.equal(x, dense - out)
    assert bool((x.abs() <= unit(dtype) * dense.abs() + TINY[dtype]).all())
