"""PowerSGD against dense linear algebra in double precision."""

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compress import Context, PowerSGD, Simulation, TensorSpec, UnitLayout
from compress.powersgd import PowerSGDState, revived
from tests.strategies import Recipe, gaussians, same_bits, seeds, unit

MATRICES = [(20, 16), (5, 7), (7, 5), (1, 9), (9, 1), (12, 3), (24, 24)]
each_shape = pytest.mark.parametrize("shape", MATRICES, ids=str)
each_rank = pytest.mark.parametrize("rank", [1, 2, 4])


def lossy(rank: int, **options: bool) -> PowerSGD:
    """Compresses every matrix, whether it is worth it or not."""
    return PowerSGD(rank=rank, min_compression_rate=0.0, **options)


def run(rank: int, shape: tuple[int, int], workers: int = 1, *, feedback: bool = True) -> Simulation:
    return Simulation(lossy(rank), [shape], workers, dtype=torch.float64, error_feedback=feedback)


def matrix(seed: int, shape: tuple[int, int], dtype: torch.dtype = torch.float64) -> Tensor:
    return Recipe("gaussian", seed).gradient(shape[0] * shape[1], dtype, 0).view(shape)


def of_rank(rank: int, seed: int, shape: tuple[int, int]) -> Tensor:
    return matrix(seed, (shape[0], rank)) @ matrix(seed + 1, (rank, shape[1]))


def with_spectrum(values: Sequence[float], seed: int, shape: tuple[int, int]) -> Tensor:
    """A matrix with these singular values, the others zero."""
    left = torch.linalg.qr(matrix(seed, (shape[0], len(values)))).Q
    right = torch.linalg.qr(matrix(seed + 1, (shape[1], len(values)))).Q
    return left @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ right.T


def best_error(x: Tensor, rank: int) -> float:
    """Eckart–Young: the least squared error of any matrix of that rank."""
    return float(torch.linalg.svdvals(x)[rank:].square().sum())


def warm_q(simulation: Simulation) -> Tensor:
    """The right factor that the next step starts from, [columns, rank]."""
    state = simulation.carries[0].state
    assert isinstance(state, PowerSGDState)
    return state.q[0][0].T


@each_rank
@each_shape
@given(seed=seeds)
def test_a_step_is_the_projection_onto_the_range_of_mean_times_q(shape: tuple[int, int], rank: int, seed: int) -> None:
    """P = orth(M Q), estimate P P^T M; each worker keeps M_w - P P^T M_w, so P^T e_w = 0."""
    simulation = run(rank, shape, 3)
    for step in range(3):
        locals_ = [
            (gradient + carry.memory).view(shape)
            for gradient, carry in zip(Recipe("gaussian", seed).step(simulation, step), simulation.carries, strict=True)
            if carry.memory is not None
        ]
        mean, q = sum(locals_[1:], locals_[0]) / 3, warm_q(simulation)
        left = torch.linalg.svd(mean @ q, full_matrices=False).U  # another orthonormal basis of the same range
        outcomes = simulation.step(Recipe("gaussian", seed).step(simulation, step))
        scale = max(float(x.norm()) for x in locals_)
        # M Q of Gaussian matrices this small may be near singular: its range is then off by its condition number.
        singular = torch.linalg.svdvals(mean @ q)
        allowed = 1e3 * unit(torch.float64) * scale * float(singular[0] / singular[-1])
        assert float((outcomes[0].mean.view(shape) - left @ (left.T @ mean)).norm()) <= allowed
        for x, outcome in zip(locals_, outcomes, strict=True):
            residual = outcome.residual.view(shape)
            assert float((left.T @ residual).norm()) <= allowed
            assert float((residual - (x - left @ (left.T @ x))).norm()) <= allowed


@each_rank
@each_shape
@given(seed=seeds)
def test_the_error_is_at_least_that_of_the_best_approximation(shape: tuple[int, int], rank: int, seed: int) -> None:
    """And at most the matrix itself; what is captured is at least what Q captured before (P15)."""
    simulation, x = run(rank, shape), matrix(seed, shape)
    q = torch.linalg.qr(warm_q(simulation)).Q
    estimate = simulation.step([x.flatten()])[0].mean.view(shape)
    square = float(x.square().sum())
    error = float((x - estimate).square().sum())
    assert best_error(x, rank) - 1e-12 * square <= error <= (1 + 1e-12) * square
    assert float(estimate.norm()) >= float((x @ q).norm()) * (1 - 1e-12)
    assert float(torch.linalg.matrix_rank(estimate)) <= rank


@each_rank
@pytest.mark.parametrize("true_rank", [1, 2, 3])
@each_shape
def test_a_matrix_of_no_higher_rank_is_exact_from_a_cold_start(
    shape: tuple[int, int], true_rank: int, rank: int
) -> None:
    """Whichever columns of Q are superfluous. Error: rounding times the condition of the factors, below 1e3."""
    simulation, x = run(rank, shape), of_rank(min(true_rank, *shape), 11, shape)
    (outcome,) = simulation.step([x.flatten()])
    error = float((outcome.mean.view(shape) - x).norm()) / float(x.norm())
    if rank >= min(true_rank, *shape):
        assert error <= 1e3 * 168 * unit(torch.float64)
    else:
        assert error > 1e-3


@each_rank
def test_repeated_steps_converge_to_the_best_approximation(rank: int) -> None:
    """Singular values fall by 1.6 a place: 50 steps shrink the rest by 1.6^-50 = 6e-11; the square by less."""
    shape = (20, 16)
    x = with_spectrum([1.6**-place for place in range(16)], 3, shape)
    simulation = run(rank, shape, feedback=False)
    for _ in range(50):
        estimate = simulation.step([x.flatten()])[0].mean.view(shape)
    assert float((x - estimate).square().sum()) == pytest.approx(best_error(x, rank), rel=1e-9)
    u, s, v = torch.linalg.svd(x)
    best = u[:, :rank] @ torch.diag(s[:rank]) @ v[:rank]
    assert float((estimate - best).norm()) <= 1e-6 * float(x.norm())


@each_rank
@each_shape
@given(seed=seeds)
def test_the_captured_energy_of_a_fixed_matrix_never_falls(shape: tuple[int, int], rank: int, seed: int) -> None:
    simulation, x = run(rank, shape, feedback=False), matrix(seed, shape)
    captured = [float(simulation.step([x.flatten()])[0].mean.norm()) for _ in range(6)]
    # One rounding of a step, relative to all of the matrix.
    slack = 168 * unit(torch.float64) * float(x.norm())
    assert all(later >= earlier - slack for earlier, later in pairwise(captured))
    assert all(energy <= float(x.norm()) + slack for energy in captured)


def test_without_warm_start_every_step_draws_new_numbers() -> None:
    x = matrix(1, (20, 16)).flatten()
    cold = Simulation(lossy(1, warm_start=False), [(20, 16)], 1, dtype=torch.float64, error_feedback=False)
    warm = Simulation(lossy(1), [(20, 16)], 1, dtype=torch.float64, error_feedback=False)
    estimates = [cold.step([x])[0].mean for _ in range(3)]
    assert not torch.allclose(estimates[0], estimates[1])
    assert not torch.allclose(estimates[1], estimates[2])
    for _ in range(10):
        last = warm.step([x])[0].mean
    assert float(last.norm()) > max(float(estimate.norm()) for estimate in estimates)


@each_rank
@given(seed=seeds, workers=st.sampled_from([2, 3, 4]))
def test_workers_are_one_worker_with_the_mean_matrix(rank: int, seed: int, workers: int) -> None:
    """Also in the factors that the next step starts from."""
    shape = (20, 16)
    many, single = run(rank, shape, workers), run(rank, shape)
    for step in range(3):
        gradients = Recipe("gaussian", seed).step(many, step)
        expected = single.step([sum(gradients[1:], gradients[0]) / workers])[0].mean
        assert torch.allclose(many.step(gradients)[0].mean, expected, rtol=0, atol=1e-9)
        assert torch.allclose(warm_q(many), warm_q(single), rtol=0, atol=1e-9)


SHAPES = [(6, 5), (4,), (6, 5), (3, 2, 2), (), (6, 5), (3, 4), (0,), (2,)]
NAMES = ["a", "b", "c", "d", "e", "f", "g", "h", "i"]


def by_name(names: Sequence[str], gradients: dict[str, list[Tensor]], steps: int = 3) -> dict[str, Tensor]:
    """What each parameter received, over all steps, with the named parameters in one unit in that order."""
    compressor = lossy(2)
    specs = [TensorSpec(name, SHAPES[NAMES.index(name)]) for name in names]
    layout = UnitLayout.build(specs, compressor.place, torch.float64)
    simulation = Simulation(compressor, layout, 2)
    received: dict[str, list[Tensor]] = {name: [] for name in names}
    for step in range(steps):
        arenas = []
        for worker in range(2):
            parts = [gradients[slot.spec.name][2 * step + worker].flatten() for slot in layout.slots]
            arenas.append(torch.cat(parts))
        mean = simulation.step(arenas)[0].mean
        for slot in layout.slots:
            received[slot.spec.name].append(slot.view(mean).clone())
    return {name: torch.stack(values) for name, values in received.items()}


@given(order=st.permutations(NAMES), cuts=st.sets(st.integers(1, len(NAMES) - 1)), seed=seeds)
def test_order_batching_and_units_change_nothing(order: list[str], cuts: set[int], seed: int) -> None:
    """Matrices of one shape are handled together; alone, in any order and in any unit they get the same."""
    gradients = {
        name: [Recipe("gaussian", seed).gradient(math.prod(shape), torch.float64, call, number) for call in range(6)]
        for number, (name, shape) in enumerate(zip(NAMES, SHAPES, strict=True))
    }
    together = by_name(NAMES, gradients)
    edges = [0, *sorted(cuts), len(NAMES)]
    for first, last in pairwise(edges):
        for name, values in by_name(order[first:last], gradients).items():
            assert torch.allclose(values, together[name], rtol=0, atol=1e-9), name


@each_rank
def test_a_layer_without_gradient_is_not_dead_for_ever(rank: int) -> None:
    """Zeros for a while, then a Gaussian matrix: the estimate has full rank again at once."""
    simulation = run(rank, (20, 16), 2)
    simulation.step([matrix(5, (20, 16)).flatten()] * 2)
    for _ in range(3):
        simulation.step([torch.zeros(320, dtype=torch.float64) - carry.memory for carry in simulation.carries])  # type: ignore[operator]
    estimate = simulation.step([matrix(7, (20, 16)).flatten()] * 2)[0].mean.view(20, 16)
    assert int(torch.linalg.matrix_rank(estimate)) == rank


@pytest.mark.parametrize("rank", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_rank_one_gradient_leaves_all_columns_alive(rank: int, dtype: torch.dtype) -> None:
    """Columns of Q with nothing to capture are drawn anew, or the rank would be one from then on."""
    simulation = Simulation(lossy(rank), [(20, 16)], 1, dtype=dtype)
    x = of_rank(1, 2, (20, 16)).to(dtype)
    for _ in range(3):
        (outcome,) = simulation.step([x.flatten()])
        assert float((outcome.mean.view(20, 16) - x).norm()) <= 1e3 * unit(dtype) * float(x.norm())
    estimate = simulation.step([matrix(7, (20, 16), dtype).flatten()])[0].mean.view(20, 16)
    # The least of four singular values of a projected Gaussian is about 1; rounding is far below.
    assert float(torch.linalg.svdvals(estimate)[rank - 1]) > 0.1


def test_vanished_rows_are_replaced_and_others_scaled() -> None:
    fresh = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]]])
    q = torch.tensor([[[3e-25, 4e-25], [0.0, 0.0], [1e-38, 0.0]]])
    renewed = revived(q, fresh)
    assert torch.allclose(renewed, torch.tensor([[[0.6, 0.8], [0.0, 1.0], [0.6, 0.8]]]), atol=1e-7)


@each_rank
@pytest.mark.parametrize("scale", [1e-25, 1e-15, 1e12, 1e25])
def test_tiny_and_huge_gradients_are_treated_alike(scale: float, rank: int) -> None:
    """No absolute threshold anywhere: up to rounding the estimate scales with the gradient."""
    plain, scaled = (Simulation(lossy(rank), [(20, 16), (5,)], 2) for _ in range(2))
    for step in range(4):
        gradients = Recipe("gaussian", 3).step(plain, step)
        expected = plain.step(gradients)[0].mean
        received = scaled.step([gradient * scale for gradient in gradients])[0].mean / scale
        # Each step is 168 roundings of gradient + memory, below 100 here, and starts from the last.
        assert float((received - expected).norm()) <= 4 * 168 * unit(torch.float32) * 100


@pytest.mark.parametrize(
    ("shape", "rank", "rate", "compressed"),
    [
        ((10, 10), 1, 2.0, True),
        ((10, 10), 5, 1.0, False),  # (10 + 10) 5 = 10 x 10: not worth it
        ((10, 10), 4, 1.0, True),
        ((10, 10), 2, 2.5, False),
        ((10, 10), 2, 2.4, True),
        ((4, 100), 8, 1.0, False),
        ((3, 100), 8, 0.5, True),  # the rank is capped at 3
        ((8, 2, 5), 1, 2.0, True),
        ((1, 100), 1, 1.0, False),
        ((100,), 1, 0.0, False),
        ((), 1, 0.0, False),
        ((0, 5), 1, 0.0, False),
    ],
)
def test_a_matrix_is_compressed_if_it_is_worth_it(
    shape: tuple[int, ...], rank: int, rate: float, compressed: bool
) -> None:
    """(n + m) r · rate < n m, strictly; the others are averaged exactly and owe nothing."""
    compressor = PowerSGD(rank=rank, min_compression_rate=rate)
    simulation = Simulation(compressor, [shape], 2)
    numel = math.prod(shape)
    gradients = Recipe("gaussian", 1).step(simulation)
    outcomes = simulation.step(gradients)
    assert simulation.traffic[0].collectives == (2 if compressed else 1)
    if compressed:
        n, m = shape[0], numel // shape[0]
        assert simulation.traffic[0].payload_bytes == {"all_reduce": 4 * min(rank, n, m) * (n + m)}
    else:
        assert simulation.traffic[0].payload_bytes == {"all_reduce": 4 * numel}
        assert same_bits(outcomes[0].mean, (gradients[0] + gradients[1]) / 2)
        assert not simulation.owed().any()


def test_complex_matrices_are_left_alone() -> None:
    """The real view of a complex matrix has twice its rank."""
    assert lossy(1).place(TensorSpec("w", (8, 8, 2), is_complex=True)) == lossy(1).place(TensorSpec("b", (8,)))


def test_two_collectives_however_many_tensors() -> None:
    """What is not compressed rides with the first."""
    simulation = Simulation(lossy(2), [(6, 5), (4,), (7, 5), (3, 2, 2), (6, 5), ()], 2)
    simulation.step([torch.ones(simulation.layout.numel)] * 2)
    assert simulation.traffic[0].collectives == 2
    floats = 2 * (6 + 5 + 6 + 5 + 7 + 5 + 3 + 4) + 5
    assert simulation.traffic[0].payload_bytes == {"all_reduce": 4 * floats}


@given(recipe=gaussians)
def test_uncompressed_tensors_are_averaged_exactly_and_owe_exactly_nothing(recipe: Recipe) -> None:
    """Known fault of other implementations: their memory of what was sent exactly random-walks."""
    simulation = Simulation(lossy(1), [(6, 5), (7,), ()], 3)
    for step in range(3):
        gradients = recipe.step(simulation, step)
        outcomes = simulation.step(gradients)
        span, tail = simulation.layout.part(1)
        assert tail.numel == 8
        assert same_bits(outcomes[0].mean[span], (gradients[0][span] + gradients[1][span] + gradients[2][span]) / 3)
        assert all(not outcome.residual[span].any() for outcome in outcomes)


def test_the_memory_of_noise_does_not_grow() -> None:
    """Independent gradients: with the local residual it stays where it is, about 44; with M - estimate, as in other
    implementations, it doubles with four times the steps, and is 248 by step 250."""
    simulation = run(2, (20, 16), 4)
    size = {}
    for step in range(1, 251):
        simulation.step(Recipe("gaussian", 17).step(simulation, step))
        if step in (50, 100, 150, 200, 250):
            squares = [float(carry.memory.square().sum()) for carry in simulation.carries if carry.memory is not None]
            size[step] = math.sqrt(sum(squares) / len(squares))
    # It fluctuates by a few per cent from step to step; 44 is the average of the reference run.
    assert all(abs(value - 44) < 6 for value in size.values()), size


def test_starting_factors_depend_on_name_and_seed_alone() -> None:
    compressor = lossy(2)

    def start(name: str, seed: int = 0, **place: object) -> Tensor:
        layout = UnitLayout.build([TensorSpec(name, (6, 5))], compressor.place)
        state = compressor.init(Context(layout, seed=seed, **place))  # type: ignore[arg-type]
        assert isinstance(state, PowerSGDState)
        return state.q[0]

    assert same_bits(start("a"), start("a", peers=3, index=2, step=7, salt="x"))
    assert not torch.equal(start("a"), start("b"))
    assert not torch.equal(start("a"), start("a", seed=1))
