"""1-bit SGD: two means a row."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress import OneBit, Simulation, TensorSpec
from compress.onebit import TwoMeansCodec
from tests.strategies import Recipe, more, recipes, same_bits, unit


@more(20)
@given(rows=st.integers(0, 5), width=st.integers(1, 40), recipe=recipes)
def test_each_element_becomes_the_mean_of_its_class(rows: int, width: int, recipe: Recipe) -> None:
    """So the residual sums to zero over each class of each row, and |e|^2 = |x|^2 - n+ mu+^2 - n- mu-^2, which is
    no more than with one scale for both."""
    codec = TwoMeansCodec(width)
    x = recipe.gradient(rows * width, torch.float64, 0)
    dense, out = x.clone().view(rows, width).numpy(), torch.zeros(rows * width, dtype=torch.float64)
    payload = codec.encode_(x)
    codec.decode_add_(out, payload)
    assert sum(part.numel() * part.element_size() for part in payload) == rows * codec.block_bytes(8)
    for row, decoded, error in zip(dense, out.view(rows, width).numpy(), x.view(rows, width).numpy(), strict=True):
        negative, square = np.signbit(row), float(row @ row)
        slack = 8 * width * unit(torch.float64)  # sums of `width` terms, relative to what is summed
        left = square
        for members in (negative, ~negative):
            if members.any():
                mean = row[members].mean()
                assert np.abs(decoded[members] - mean).max() <= slack * np.abs(row).sum()
                assert abs(error[members].sum()) <= slack * width * np.abs(row).sum()
                left -= members.sum() * mean**2
        assert abs(float(error @ error) - left) <= slack * width * max(square, 1e-300)
        assert left <= square - np.abs(row).sum() ** 2 / width + slack * square


def test_two_values_of_opposite_sign_are_exact() -> None:
    x = torch.where(torch.arange(64) % 3 == 0, 0.75, -2.5)
    (outcome,) = Simulation("onebit", [(4, 16)], 1).step([x])
    assert same_bits(outcome.mean, x)
    assert not outcome.residual.any()


def test_a_row_of_one_sign_has_an_empty_class() -> None:
    (outcome,) = Simulation("onebit", [(1, 4)], 1).step([torch.tensor([1.0, 2.0, 3.0, 6.0])])
    assert outcome.mean.tolist() == [3.0] * 4


@pytest.mark.parametrize(
    ("shape", "rows", "width"), [((6, 20), 6, 20), ((4, 3, 5), 4, 15), ((33,), 1, 33), ((), 1, 1), ((1, 9), 1, 9)]
)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_row_costs_a_bit_an_element_and_two_numbers(
    shape: tuple[int, ...], rows: int, width: int, workers: int
) -> None:
    simulation = Simulation("onebit", [shape], workers)
    simulation.step([torch.ones(rows * width)] * workers)
    chunk = math.ceil(rows / workers) * (math.ceil(width / 8) + 8)
    assert simulation.traffic[0].payload_bytes == {"all_to_all": workers * chunk, "all_gather": chunk}


def test_rows_of_one_length_are_dealt_out_together() -> None:
    """Two collectives, however many shapes."""
    simulation = Simulation("onebit", [(6, 20), (20,), (3, 2, 10), (5,), (7, 5)], 3)
    simulation.step([torch.ones(simulation.layout.numel)] * 3)
    assert simulation.traffic[0].collectives == 2
    place = OneBit().place
    assert place(TensorSpec("a", (6, 20))) == place(TensorSpec("b", (20,))) == place(TensorSpec("c", (3, 2, 10)))
