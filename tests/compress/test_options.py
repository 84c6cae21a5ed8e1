"""Options and specs, beyond what holds for every compressor (tests/properties/test_specs.py)."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compress import (
    Compressor,
    Context,
    Exact,
    Exchange,
    PowerSGD,
    Sign,
    Split,
    State,
    TopK,
    Warmup,
    option,
    parse,
    register,
    registry,
)
from compress.compressor import Round
from tests.strategies import more


@pytest.mark.parametrize(
    ("spec", "compressor"),
    [
        ("none", Exact()),
        ("powersgd:rank=4", PowerSGD(rank=4)),
        (" powersgd : rank = 4 ", PowerSGD(rank=4)),
        ("topk:density=1e-3,select=chunk", TopK(density=0.001, select="chunk")),
        ("warmup:steps=1000/powersgd:rank=4", Warmup(PowerSGD(rank=4), steps=1000)),
        ("warmup:steps=5/split/sign", Warmup(Split(Sign()), steps=5)),
        (
            "split:match=*embed*,child=(warmup:steps=3/topk:density=0.01)/sign",
            Split(Sign(), match="*embed*", child=Warmup(TopK(density=0.01), steps=3)),
        ),
    ],
)
def test_a_spec_says_what_a_constructor_says(spec: str, compressor: Compressor) -> None:
    assert parse(spec) == compressor


@pytest.mark.parametrize(
    ("compressor", "spec"),
    [
        (Exact(), "none"),
        (PowerSGD(), "powersgd:rank=1"),
        (Sign(), "sign"),
        (Sign(block=256), "sign:block=256"),
        (TopK(density=1), "topk:density=1.0"),
        (Warmup(Split(Sign()), steps=5), "warmup:steps=5/split/sign"),
    ],
)
def test_a_spec_shows_what_matters_and_what_differs_from_the_default(compressor: Compressor, spec: str) -> None:
    assert str(compressor) == spec


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("", "unknown compressor ''"),
        ("powersdg", "did you mean 'powersgd'"),
        ("powersgd:rnk=4", "powersgd has no option 'rnk'; its options are rank, min_compression_rate, warm_start"),
        ("none:rank=4", "none has no option 'rank'; its options are none"),
        ("powersgd:rank=0", "option 'rank' must be at least 1, got 0"),
        ("powersgd:rank=1.5", "option 'rank' must be of type int, got '1.5'"),
        ("powersgd:warm_start=maybe", "option 'warm_start' must be true or false, got 'maybe'"),
        ("topk:density=0", "option 'density' must be greater than 0.0, got 0.0"),
        ("topk:density=1.01", "option 'density' must be at most 1.0, got 1.01"),
        ("topk:density=nan", "option 'density' must be finite, got nan"),
        ("sign:block=100", "option 'block' must be one of 256, 512, 1024, 2048, 4096, 8192, got '100'"),
        ("powersgd:", "expected option=value after 'powersgd', got ''"),
        ("powersgd:rank", "expected option=value after 'powersgd', got 'rank'"),
        ("powersgd:rank=", "expected option=value after 'powersgd', got 'rank='"),
        ("powersgd:rank=1,rank=1", "option 'rank' is given twice"),
        ("warmup:steps=3", "'warmup' wraps another compressor"),
        ("sign/none", "'sign' is not a wrapper"),
        ("split:child=sign/none", "option 'child' is a compressor and is written in parentheses, got 'sign'"),
        ("split:child=(sgn)/none", "unknown compressor 'sgn' (did you mean 'sign'?)"),
        ("split:child=(sign/none", "unbalanced '('"),
        ("split:child=sign)/none", "unbalanced ')'"),
    ],
)
def test_a_wrong_spec_is_answered_with_what_is_right(spec: str, complaint: str) -> None:
    with pytest.raises(ValueError, match="bad compressor spec") as error:
        parse(spec)
    assert repr(spec) in str(error.value)
    assert complaint in str(error.value)


def test_numbers_are_not_truth_values() -> None:
    with pytest.raises(TypeError, match=r"option 'rank' must be of type int, got True \(bool\)"):
        PowerSGD(rank=True)
    with pytest.raises(TypeError, match=r"option 'warm_start' must be of type bool, got 1 \(int\)"):
        PowerSGD(warm_start=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"option 'density' must be of type float, got '0.1' \(str\)"):
        TopK(density="0.1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"option 'block' must be one of 256, .*, got 2048.0"):
        Sign(block=2048.0)  # type: ignore[arg-type]


def test_a_whole_number_will_do_for_a_fraction() -> None:
    assert TopK(density=1) == TopK(density=1.0)
    assert isinstance(TopK(density=1).density, float)


@more(20)
@given(
    st.text(min_size=1, max_size=6) | st.sampled_from(["a\t", "\n*", "\u00a0b", " ", "a b", "(*)", "a,b", "*=", "a/b"])
)
def test_a_pattern_is_refused_or_survives_the_spec(match: str) -> None:
    """White space around it would be lost, delimiters would be taken for the spec's own."""
    try:
        compressor = Split(match=match)
    except ValueError:
        with pytest.raises(ValueError, match="option 'match' must be 'vectors' or a pattern"):
            Split(match=match)
    else:
        assert parse(str(compressor)) == compressor


def test_compressors_are_values() -> None:
    assert len({PowerSGD(rank=2), PowerSGD(rank=2), PowerSGD(rank=3)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        PowerSGD().rank = 3  # type: ignore[misc]


@pytest.fixture
def clean_registry() -> object:
    known = dict(registry)
    yield registry
    registry.clear()
    registry.update(known)


@pytest.mark.usefixtures("clean_registry")
def test_an_outsiders_compressor_is_known_by_its_name() -> None:
    @register("outsider")
    @dataclass(frozen=True)
    class Outsider(Compressor):
        strength: int = option(3, low=1, high=9, shown=True)

        def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
            raise NotImplementedError

        def rounds(self, ctx: Context) -> Sequence[Round]:
            return []

    assert parse("warmup:steps=2/outsider:strength=4") == Warmup(Outsider(4), steps=2)
    assert str(Outsider()) == "outsider:strength=3"
    with pytest.raises(ValueError, match="option 'strength' must be at most 9, got 10"):
        parse("outsider:strength=10")


@pytest.mark.usefixtures("clean_registry")
def test_a_name_is_given_once_and_is_plain() -> None:
    with pytest.raises(ValueError, match=r"the name 'sign' is taken by Sign; choose another for TopK"):
        register("sign")(TopK)
    for name in ("", "Sign", "top-k", "1bit", "a/b"):
        with pytest.raises(ValueError, match="must be lower-case letters, digits and '_'"):
            register(name)
    assert registry["sign"] is Sign
