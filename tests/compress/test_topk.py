"""Top-k: the selection against a sort, ties, NaN, and the chunked form."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress import Context, Request, Simulation, State, TensorSpec, TopK, UnitLayout
from compress.driver import drive
from compress.kernels import selection
from compress.kernels.selection import largest, largest_of_each_chunk
from compress.requests import Replies
from compress.topk import narrowest, scatter_mean
from tests.strategies import Recipe, more, recipes, same_bits


@more(20)
@given(numel=st.integers(1, 60), density=st.floats(0.01, 1.0), recipe=recipes)
def test_no_other_k_entries_would_do_better(numel: int, density: float, recipe: Recipe) -> None:
    """|x - topk(x)| is the least of all vectors with k entries: the d - k smallest squares are left, by a sort."""
    compressor = TopK(density=density)
    x = recipe.gradient(numel, torch.float64, 0)
    (outcome,) = Simulation(compressor, [(numel,)], 1, dtype=torch.float64).step([x])
    k = min(numel, max(1, round(density * numel)))
    least = np.sort(np.square(x.numpy()))[: numel - k].sum()
    assert float(outcome.residual.square().sum()) == pytest.approx(least, rel=1e-12)  # sums of 60 squares
    sent = outcome.residual != x
    assert int(sent.sum()) <= k
    assert not outcome.residual[sent].any(), "what was sent leaves a residual of exactly zero"
    assert same_bits(outcome.mean[sent], x[sent])
    assert not outcome.mean[~sent].any()


@more(20)
@given(numel=st.integers(1, 60), count=st.integers(1, 70), recipe=recipes)
def test_largest_selects_by_magnitude_and_exactly_k(numel: int, count: int, recipe: Recipe) -> None:
    """Also among ties: k of them, no more."""
    x = recipe.gradient(numel, torch.float32, 0)
    index = largest(x, count)
    assert index.dtype == torch.int64
    assert len(set(index.tolist())) == len(index) == min(count, numel)
    chosen = np.sort(np.abs(x.numpy()[index.numpy()]))
    assert np.array_equal(chosen, np.sort(np.abs(x.numpy()))[numel - len(index) :])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_sent(bad: float) -> None:
    """So that every worker hears of it."""
    x = torch.linspace(-5, 5, 30)
    x[17] = bad
    assert 17 in largest(x, 1).tolist()
    assert largest_of_each_chunk(x, 10)[1] == 7


@more(20)
@given(numel=st.integers(0, 60), chunk=st.integers(1, 70), recipe=recipes)
def test_chunks_send_their_first_largest_entry(numel: int, chunk: int, recipe: Recipe) -> None:
    x = recipe.gradient(numel, torch.float32, 0)
    offsets = largest_of_each_chunk(x, chunk).tolist()
    expected = [int(np.argmax(np.abs(x.numpy()[start : start + chunk]))) for start in range(0, numel, chunk)]
    assert offsets == expected


def test_chunks_are_found_across_cache_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    x = Recipe("gaussian", 3).gradient(1000, torch.float32, 0)
    whole = largest_of_each_chunk(x, 7)
    monkeypatch.setattr(selection, "ROWS", 50)
    assert torch.equal(largest_of_each_chunk(x, 7), whole)


@given(numel=st.integers(1, 300), recipe=recipes, workers=st.integers(1, 4))
def test_one_of_each_chunk_crosses_the_wire(numel: int, recipe: Recipe, workers: int) -> None:
    simulation = Simulation("topk:density=0.1,select=chunk", [(numel,)], workers)
    gradients = recipe.step(simulation)
    outcomes = simulation.step(gradients)
    expected = torch.zeros(numel)
    for gradient in gradients:
        for start in range(0, numel, 10):
            row = gradient[start : start + 10]
            position = start + int(np.argmax(np.abs(row.numpy())))
            expected[position] += gradient[position] / workers
    assert same_bits(outcomes[0].mean + 0.0, expected + 0.0)
    assert simulation.traffic[0].payload_bytes == {"all_gather": math.ceil(numel / 10) * (4 + 1)}


@pytest.mark.parametrize(
    ("density", "select", "numel", "index_bytes"),
    [
        (0.01, "exact", 1000, 4),
        (0.01, "chunk", 1000, 1),
        (1 / 256, "chunk", 1000, 1),
        (1 / 257, "chunk", 1000, 2),
        (1e-3, "chunk", 5000, 2),
        (1 / 40000, "chunk", 80000, 4),
    ],
)
def test_bytes_of_an_index(density: float, select: str, numel: int, index_bytes: int) -> None:
    compressor = TopK(density=density, select=select)  # type: ignore[arg-type]
    simulation = Simulation(compressor, [(numel,)], 2)
    simulation.step([torch.ones(numel)] * 2)
    entries = compressor.count(numel)
    assert simulation.traffic[0].payload_bytes == {"all_gather": entries * (4 + index_bytes)}


@pytest.mark.parametrize(
    ("index", "dtype"),
    [
        (0, torch.uint8),
        (255, torch.uint8),
        (256, torch.int16),
        (2**15 - 1, torch.int16),
        (2**15, torch.int32),
        (2**31 - 1, torch.int32),
        (2**31, torch.int64),
    ],
)
def test_the_narrowest_type_holds_the_index(index: int, dtype: torch.dtype) -> None:
    assert narrowest(index) == dtype
    assert torch.tensor([index]).to(dtype).long().item() == index


def test_the_same_entry_from_several_workers_adds_up() -> None:
    index = torch.tensor([[0, 2], [2, 1], [2, 0]])
    value = torch.tensor([[3.0, 6.0], [9.0, 12.0], [3.0, 6.0]])
    assert scatter_mean(index, value, torch.zeros(4)).tolist() == [3.0, 4.0, 6.0, 0.0]


@pytest.mark.parametrize("select", ["exact", "chunk"])
def test_peers_are_counted_from_the_reply(select: str) -> None:
    """On an axis of its own an exchange may meet other numbers of peers than its context tells."""
    layout = UnitLayout.build([TensorSpec("p", (4,))])
    x = torch.tensor([1.0, 8.0, 2.0, 3.0])

    def perform(request: Request) -> Replies:
        return tuple(torch.stack([part] * 3) for part in request.parts)

    compressor = TopK(density=0.25, select=select)  # type: ignore[arg-type]
    mean, _ = drive(compressor.exchange(x, State(), Context(layout, peers=1)), perform)
    assert mean.tolist() == [0.0, 8.0, 0.0, 0.0]


def test_entries_that_wait_are_sent_in_the_end() -> None:
    """Constant gradient, 1 of 4 entries a step: every entry gets across within four steps."""
    simulation = Simulation("topk:density=0.25", [(4,)], 1)
    means = [simulation.step([torch.tensor([4.0, 3.0, 2.0, 1.5])])[0].mean for _ in range(8)]
    assert bool(torch.stack(means).any(0).all())
