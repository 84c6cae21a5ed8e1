"""Scaled sign: the codec against dense maths, the blocked kernel against the reference, the two-sided exchange."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress import Sign, Simulation, simulate
from compress.kernels import signs
from compress.sign import SignCodec
from compress.state import server_memory
from tests.strategies import Recipe, dtypes, more, recipes, same_bits, unit

BLOCK = 64
lengths = st.integers(0, 4 * BLOCK + 8)


def blocks_of(x: np.ndarray, block: int) -> list[np.ndarray]:
    return [x[start : start + block] for start in range(0, len(x), block)]


@more(20)
@given(numel=lengths, recipe=recipes, dtype=dtypes)
def test_the_code_is_sign_bits_and_mean_magnitudes(numel: int, recipe: Recipe, dtype: torch.dtype) -> None:
    """Bit i of byte j is the sign of element 8j + i; a short last block is averaged over its own elements."""
    x = recipe.gradient(numel, dtype, 0)
    dense = x.numpy().copy()
    bits, scales = SignCodec(BLOCK).encode_(x)
    assert bits.shape == (math.ceil(numel / BLOCK), BLOCK // 8)
    flat = bits.flatten().tolist()
    for position, value in enumerate(dense):
        assert flat[position // 8] >> position % 8 & 1 == np.signbit(value)
    for position in range(numel, bits.numel() * 8):
        assert not flat[position // 8] >> position % 8 & 1, "padding leaks"
    for row, scale in zip(blocks_of(dense.astype(np.float64), BLOCK), scales.tolist(), strict=True):
        mean = np.abs(row).mean()
        assert abs(scale - mean) <= BLOCK * unit(dtype) * mean  # a sum of that many terms


@more(20)
@given(numel=lengths, recipe=recipes, dtype=dtypes, weight=st.sampled_from([1.0, 0.5, 1 / 3]))
def test_what_is_decoded_is_what_was_subtracted(numel: int, recipe: Recipe, dtype: torch.dtype, weight: float) -> None:
    x = recipe.gradient(numel, dtype, 0)
    dense, codec = x.clone(), SignCodec(BLOCK)
    payload = codec.encode_(x)
    assert sum(part.numel() * part.element_size() for part in payload) == len(payload[0]) * codec.block_bytes(
        dtype.itemsize
    )
    out = torch.zeros(numel, dtype=dtype)
    codec.decode_add_(out, payload, weight)
    bound = payload[1].repeat_interleave(BLOCK)[:numel].double() + dense.double().abs()
    assert bool(((out.double() / weight + x.double() - dense.double()).abs() <= 4 * unit(dtype) * bound).all())


@more(20)
@given(numel=lengths.filter(bool), recipe=recipes)
def test_the_error_is_one_minus_phi(numel: int, recipe: Recipe) -> None:
    """|e|^2 = (1 - phi) |x|^2 with phi = |x|_1^2 / (d |x|_2^2), an equality in every block."""
    x = recipe.gradient(numel, torch.float64, 0)
    dense = x.numpy().copy()
    SignCodec(BLOCK).encode_(x)
    for row, error in zip(blocks_of(dense, BLOCK), blocks_of(x.numpy(), BLOCK), strict=True):
        square = float(row @ row)
        if square:
            phi = np.abs(row).sum() ** 2 / (len(row) * square)
            # Each error is a difference of numbers up to |x|: a few units of rounding of the whole square.
            assert float(error @ error) == pytest.approx((1 - phi) * square, abs=64 * unit(torch.float64) * square)
            assert phi >= 1 / len(row) - 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("segment", [64, 128, 1 << 16])
def test_the_blocked_kernel_is_the_reference(segment: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every length modulo 8, modulo the block, and around the cache segments."""
    monkeypatch.setattr(signs, "SEGMENT", segment)
    near_a_segment = [(1 << 16) + offset for offset in (-65, -1, 0, 1, 9)] if segment == 1 << 16 else []
    for numel in [
        *range(BLOCK + 9),
        *range(2 * BLOCK - 9, 2 * BLOCK + 9),
        *range(4 * BLOCK - 1, 4 * BLOCK + 9),
        *near_a_segment,
    ]:
        x = Recipe("gaussian", numel).gradient(numel, dtype, 0)
        x[numel // 3 : numel // 2] = -0.0
        fast, plain = x.clone(), x.clone()
        bits, scales = signs.encode_(fast, BLOCK)
        expected_bits, expected_scales = signs.encode_reference_(plain, BLOCK)
        assert same_bits(bits, expected_bits)
        # Sums of BLOCK magnitudes, of mean about 1, in another order.
        rounding = BLOCK * unit(dtype)
        assert torch.allclose(scales, expected_scales, rtol=rounding, atol=0)
        assert torch.allclose(fast, plain, rtol=0, atol=2 * rounding)
        out, reference = x.clone(), x.clone()
        signs.decode_add_(out, bits, scales, 1 / 3)
        signs.decode_add_reference_(reference, bits, scales, 1 / 3)
        assert torch.allclose(out, reference, rtol=4 * unit(dtype), atol=4 * unit(dtype))


def test_negative_zero_is_negative() -> None:
    """On both sides, or memory and result would part company."""
    x = torch.tensor([-0.0, 0.0, 1.0, -1.0])
    (outcome,) = Simulation("sign", [(4,)], 1, error_feedback=False).step([x])
    assert outcome.mean.tolist() == [-0.5, 0.5, 0.5, -0.5]
    assert outcome.residual.tolist() == [0.5, -0.5, 0.5, -0.5]


@more(10)
@given(count=st.integers(0, 70), rows=st.integers(0, 3), seed=st.integers(0, 1000))
def test_packing_is_little_endian_and_invertible(count: int, rows: int, seed: int) -> None:
    negative = torch.from_numpy(np.random.default_rng(seed).random((rows, count)) < 0.5)
    octets = signs.pack(negative)
    assert octets.shape == (rows, math.ceil(count / 8))
    for row, packed in zip(negative.tolist(), octets.tolist(), strict=True):
        assert int.from_bytes(bytes(packed), "little") == sum(bit << place for place, bit in enumerate(row))
    assert torch.equal(signs.unpack(octets, count), negative)


def test_a_vector_with_one_magnitude_is_exact() -> None:
    x = torch.tensor([0.25, -0.25] * 500)
    (outcome,) = Simulation("sign", [(1000,)], 1).step([x])
    assert same_bits(outcome.mean, x)
    assert not outcome.residual.any()


def test_the_error_of_gaussian_gradients_is_the_published_one() -> None:
    """1 - 2/pi = 0.36338 for a mean-magnitude scale; blocks of B = 8192 fit it (1 - 2/pi)/B better."""
    x = Recipe("gaussian", 0).gradient(1 << 20, torch.float64, 0)
    square = float(x @ x)
    SignCodec(8192).encode_(x)
    # The standard deviation of the relative error is below 1 / sqrt(d) = 0.001.
    assert float(x @ x) / square == pytest.approx(1 - 2 / math.pi, abs=0.003)
    assert abs(float(x @ x) / square - 0.40423) > 0.03, "that is the scale |x|_2 / sqrt(d)"


def test_the_scale_does_not_expand_sparse_gradients() -> None:
    """With a root-mean-square scale the error of a one-hot vector is nearly 2 |x|^2; with ours it is below |x|^2."""
    (outcome,) = Simulation("sign:block=256", [(256,)], 1).step([3.0 * (torch.arange(256) == 7)])
    assert float(outcome.residual.square().sum()) == pytest.approx(9 * (1 - 1 / 256), rel=1e-6)


def test_server_memory_stays_bounded() -> None:
    """With |C(x)| <= |x|: |S| <= k / (1 - k) / (1 - k) max |g|, k = sqrt(1 - delta), delta = 1/d."""
    d, largest = 16, 0.0
    simulation = Simulation("sign:block=256", [(d,)], 3, dtype=torch.float64)
    kept = math.sqrt(1 - 1 / d)
    for step in range(200):
        gradients = Recipe("heavy", 5).step(simulation, step % 7)
        largest = max(largest, *(float(gradient.norm()) for gradient in gradients))
        simulation.step(gradients)
        server = server_memory([carry.state for carry in simulation.carries], simulation.layout)
        assert float(server.norm()) <= kept / (1 - kept) ** 2 * largest


def test_error_feedback_repairs_the_counter_example_to_sign_descent() -> None:
    """On [-1, 1], gradient 4 with probability 1/4, else -1: the mean is 1/4, so the minimum is at -1. The sign alone
    drifts to the wrong end; with memory, scaled steps follow the mean (Karimireddy et al., 2019, section 3)."""
    random = np.random.default_rng(0)
    draws = torch.from_numpy(np.where(random.random(2000) < 0.25, 4.0, -1.0))
    received = simulate("sign", draws.view(-1, 1, 1)).means.flatten()
    assert float(torch.sign(draws).mean()) < -0.4
    # Standard deviation of the mean of 2000 draws of spread 2.2: 0.05.
    assert float(received.mean()) == pytest.approx(0.25, abs=0.2)


def test_one_bit_an_element_whatever_the_number_of_workers() -> None:
    """2 (W - 1)/W (d/8 + 4 d/B) bytes for whole chunks: below twice the payload at every W."""
    block, d = 256, 64 * 256
    payload = d // 8 + 4 * d // block
    sent = {}
    for count in (2, 4, 8, 16, 32, 64):
        simulation = Simulation(Sign(block=block), [(d,)], count)
        simulation.step([torch.ones(d)] * count)
        traffic = simulation.traffic[-1]
        assert traffic.payload_bytes == {"all_to_all": payload, "all_gather": payload // count}
        flags = 4 * count * (count - 1) / count
        assert traffic.wire_bytes - flags == 2 * (count - 1) / count * payload
        sent[count] = traffic.wire_bytes - flags
    assert sent[64] < 2 * sent[2]
    assert sent[64] < 4 * d / 14  # of the 2 (W - 1)/W 4d bytes of a dense all-reduce, 1/28
