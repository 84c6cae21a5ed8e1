"""What the tests draw: compressors from the registry, layouts that shrink, gradients of many kinds."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import assume, settings
from hypothesis import strategies as st
from torch import Tensor

from compress import Compressor, Simulation, registry
from compress.options import own_options

Shapes = Sequence[tuple[int, ...]]

CASES: list[Compressor] = [example for cls in registry.values() for example in cls.examples()]
"""Every configuration that a registered compressor, also one from a plugin, shows as an example."""

ROUNDINGS = 168
"""Units of rounding by which a law may be missed: 1e-5 in float32 (2^-24), as many units in float64. An inner
product of length k is off by at most k units, and none of an exchange on the layouts drawn here is longer,
except the mean of a block, whose rounding cancels: what is sent is what is subtracted."""


def each(cases: Sequence[Compressor] = CASES) -> Any:
    """Parametrise a test by compressors."""
    return pytest.mark.parametrize("compressor", cases, ids=str)


each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def conserving(cases: Sequence[Compressor] = CASES) -> list[Compressor]:
    """Those that promise the conservation law."""
    return [case for case in cases if case.law == "conserves"]


def fewer(share: float) -> settings:
    """A share of the profile's examples, for a test whose examples are long."""
    return settings(max_examples=max(2, round(settings().max_examples * share)))


def more(times: int) -> settings:
    """A multiple of the profile's examples, for a test whose examples take microseconds."""
    return settings(max_examples=settings().max_examples * times)


def unit(dtype: torch.dtype) -> float:
    """The unit of rounding: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


# --- layouts ---------------------------------------------------------------------------------------------------------

_side = st.integers(1, 9)
_shape = st.one_of(
    st.tuples(_side),
    st.tuples(_side, _side),
    st.tuples(st.just(1), st.integers(1, 40)),
    st.tuples(st.integers(1, 40), st.just(1)),
    st.lists(st.integers(1, 4), min_size=3, max_size=4).map(tuple),
    st.tuples(st.integers(10, 24), st.integers(10, 24)),
    st.tuples(st.integers(200, 700)),
    st.sampled_from([(), (0,), (0, 3), (3, 0)]),
)


def shapes(min_elements: int = 0) -> st.SearchStrategy[Shapes]:
    """Parameters of one unit: up to four shapes, each up to three times."""
    repeated = st.lists(st.tuples(_shape, st.integers(1, 3)), min_size=min(min_elements, 1), max_size=4)
    drawn = repeated.map(lambda runs: [shape for shape, copies in runs for _ in range(copies)])
    return drawn.filter(lambda chosen: sum(int(np.prod(shape)) for shape in chosen) >= min_elements)


workers = st.sampled_from([1, 2, 3, 4])
dtypes = st.sampled_from([torch.float32, torch.float64])


# --- gradients -------------------------------------------------------------------------------------------------------

KINDS = ("gaussian", "heavy", "one_hot", "constant", "ties", "mixed", "zeros")


@dataclass(frozen=True)
class Recipe:
    """Which gradients: the same numbers for the same recipe, step and worker."""

    kind: str
    seed: int

    def gradient(self, numel: int, dtype: torch.dtype, worker: int, step: int = 0) -> Tensor:
        return _gradient(self, numel, dtype, worker, step).clone()

    def step(self, simulation: Simulation, step: int = 0) -> list[Tensor]:
        """One gradient for each worker of the simulation."""
        layout = simulation.layout
        return [self.gradient(layout.numel, layout.dtype, worker, step) for worker in range(simulation.workers)]


@lru_cache(maxsize=10_000)  # all compressors are tried on the same examples
def _gradient(recipe: Recipe, numel: int, dtype: torch.dtype, worker: int, step: int) -> Tensor:
    random = np.random.default_rng((recipe.seed, step, worker))
    normal = random.standard_normal(numel)
    wide = normal + np.copysign(0.25, normal)  # away from zero: what a 16-bit wire loses of it is bounded relatively
    if recipe.kind == "one_hot":
        values = np.zeros(numel)
        values[:1] = 3.0
        values = np.roll(values, int(random.integers(max(numel, 1))))
    else:
        values = {
            "gaussian": lambda: normal,
            "heavy": lambda: wide**5,
            "constant": lambda: np.full(numel, 0.7),
            "ties": lambda: random.integers(-2, 3, numel).astype(float),
            "mixed": lambda: wide * 10.0 ** random.uniform(-3, 3, numel),
            "zeros": lambda: np.copysign(0.0, normal),
        }[recipe.kind]()
    return torch.from_numpy(values).to(dtype)


seeds = st.integers(0, 1 << 16)
recipes = st.builds(Recipe, st.sampled_from(KINDS), seeds)
gaussians = st.builds(Recipe, st.just("gaussian"), seeds)


def exact_mean(tensors: Sequence[Tensor]) -> Tensor:
    """The mean in double precision."""
    return torch.stack([tensor.double() for tensor in tensors]).mean(0)


# --- comparisons -----------------------------------------------------------------------------------------------------


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit, the signs of zeros and the payloads of NaNs included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in a state, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def everything_in(simulation: Simulation) -> list[Tensor]:
    """Copies of all that the workers keep: memories, then states."""
    kept = [
        tensor
        for carry in simulation.carries
        for tensor in (*([] if carry.memory is None else [carry.memory]), *tensors_in(carry.state))
    ]
    return [tensor.clone() for tensor in kept]


def same_contents(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(map(same_bits, a, b))


# --- specs -----------------------------------------------------------------------------------------------------------


def _values(hint: Any, limits: Any, nested: st.SearchStrategy[Compressor]) -> st.SearchStrategy[Any]:
    """Legal values of an option, from its declaration alone."""
    low, high, above = limits.get("low"), limits.get("high"), limits.get("above")
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if hint is bool:
        return st.booleans()
    if hint is int:
        smallest = low if above is None else above + 1
        return st.integers(None if smallest is None else int(smallest), None if high is None else int(high))
    if hint is float:
        smallest = low if above is None else above
        return st.floats(smallest, high, exclude_min=above is not None, allow_nan=False, allow_infinity=False)
    if hint is str:
        return st.text(max_size=8) | st.text("abc.*?[]!_1", min_size=1, max_size=8)
    return nested


@st.composite
def _built(draw: Callable[..., Any], wraps: bool, nested: st.SearchStrategy[Compressor]) -> Compressor:
    cls = draw(st.sampled_from([cls for cls in registry.values() if cls.is_wrapper == wraps]))
    hints = get_type_hints(cls)
    options = {
        field.name: draw(_values(hints[field.name], field.metadata, nested))
        for field in own_options(cls)
        if draw(st.booleans())
    }
    if wraps:
        options["inner"] = draw(nested)
    try:
        return cls(**options)
    except ValueError:  # options that only their class can judge
        assume(False)
        raise


compressors: st.SearchStrategy[Compressor] = st.recursive(
    st.one_of(st.sampled_from(CASES), _built(False, st.nothing())),
    lambda nested: _built(True, nested),
    max_leaves=4,
)
"""Any composition of registered compressors with any legal options."""
