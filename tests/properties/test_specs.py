"""Specs and compressors are two forms of one thing; what is wrong is named."""

import dataclasses
import sys
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from compress import Compressor, parse, registry
from compress.options import own_options
from tests.strategies import CASES, compressors, each, more


@each()
def test_every_example_is_the_parse_of_its_spec(compressor: Compressor) -> None:
    assert parse(str(compressor)) == compressor


@pytest.mark.parametrize("name", registry)
def test_every_compressor_can_be_made_without_arguments(name: str) -> None:
    cls = registry[name]
    assert parse(str(cls())) == cls()
    if not cls.is_wrapper:
        assert parse(name) == cls()


@more(20)
@given(compressors)
def test_every_composition_is_the_parse_of_its_spec(compressor: Compressor) -> None:
    spec = str(compressor)
    assert parse(spec) == compressor
    assert str(parse(spec)) == spec
    assert hash(parse(spec)) == hash(compressor)


_pieces = st.sampled_from([*registry, *(str(case) for case in CASES), *":/,=()", " ", "density", "rank", "child"])
_values = st.sampled_from(["1", "-1", "0.5", "nan", "inf", "1e999", "9" * 5000, "true", "None", "\x00", "１", "\t"])


@more(20)
@given(st.text() | st.lists(_pieces | _values, max_size=8).map("".join))
@example("")
@example(")(")
def test_nonsense_is_a_value_error_and_sense_is_a_compressor(text: str) -> None:
    try:
        compressor = parse(text)
    except ValueError:
        return
    assert parse(str(compressor)) == compressor


def test_nesting_beyond_all_sense_is_a_value_error() -> None:
    depth = sys.getrecursionlimit() // 3
    with pytest.raises(ValueError, match="bad compressor spec"):
        parse("split:child=(" * depth + "none/" * depth + ")" * depth)


@pytest.mark.parametrize("nonsense", [None, 4, b"none", ["none"]], ids=repr)
def test_what_is_not_a_string_is_a_type_error(nonsense: object) -> None:
    with pytest.raises(TypeError, match="a spec is a string"):
        parse(nonsense)  # type: ignore[arg-type]


@more(5)
@given(st.text("abcdefghijklmnopqrstuvwxyz_0123456789", min_size=1).filter(lambda name: name not in registry))
def test_an_unknown_name_is_answered_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match="unknown compressor") as error:
        parse(name)
    assert repr(name) in str(error.value)
    assert all(known in str(error.value) for known in registry)


OPTIONS = [(name, field) for name, cls in registry.items() for field in own_options(cls)]
each_option = pytest.mark.parametrize(
    ("name", "field"), OPTIONS, ids=[f"{name}:{field.name}" for name, field in OPTIONS]
)


def spec_with(name: str, assignment: str) -> str:
    return f"{name}:{assignment}{'/none' if registry[name].is_wrapper else ''}"


@pytest.mark.parametrize("name", registry)
def test_an_unknown_option_is_answered_with_the_valid_ones(name: str) -> None:
    with pytest.raises(ValueError, match="no option 'colour'") as error:
        parse(spec_with(name, "colour=1"))
    assert all(field.name in str(error.value) for field in own_options(registry[name]))


@each_option
def test_a_value_of_the_wrong_type_names_option_and_value(name: str, field: dataclasses.Field[Any]) -> None:
    hint = get_type_hints(registry[name])[field.name]
    if hint is not str:
        with pytest.raises(ValueError, match=repr(field.name)) as error:
            parse(spec_with(name, f"{field.name}=banana"))
        assert "'banana'" in str(error.value)
        if get_origin(hint) is Literal:
            assert all(str(choice) in str(error.value) for choice in get_args(hint))
    for wrong in (object(), None, ["a"], 1j):
        with pytest.raises((TypeError, ValueError), match=repr(field.name)):
            registry[name](**{field.name: wrong})


@each_option
def test_a_value_out_of_range_names_option_value_and_limit(name: str, field: dataclasses.Field[Any]) -> None:
    limits, hint = field.metadata, get_type_hints(registry[name])[field.name]
    outside = {"low": -1, "high": 1, "above": 0}
    for limit, direction in outside.items():
        if limits.get(limit) is not None:
            value = hint(limits[limit] + direction)
            with pytest.raises(ValueError, match=f"{field.name!r} must be") as error:
                parse(spec_with(name, f"{field.name}={value}"))
            assert str(value) in str(error.value)
            assert str(limits[limit]) in str(error.value)
    if hint is float:
        for value in ("nan", "inf", "-inf"):
            with pytest.raises(ValueError, match=f"{field.name!r} must be finite"):
                parse(spec_with(name, f"{field.name}={value}"))


@each_option
def test_a_literal_takes_only_its_own_types(name: str, field: dataclasses.Field[Any]) -> None:
    """2048.0 equals 2048 and would fail much later, as a size."""
    hint = get_type_hints(registry[name])[field.name]
    if get_origin(hint) is Literal:
        for choice in get_args(hint):
            if isinstance(choice, int):
                with pytest.raises((TypeError, ValueError), match=repr(field.name)):
                    registry[name](**{field.name: float(choice)})


@pytest.mark.parametrize("name", registry)
def test_wrappers_come_first_and_never_last(name: str) -> None:
    if registry[name].is_wrapper:
        with pytest.raises(ValueError, match="wraps another compressor"):
            parse(name)
    else:
        with pytest.raises(ValueError, match="not a wrapper"):
            parse(f"{name}/none")


@pytest.mark.parametrize("name", registry)
def test_an_option_is_given_once(name: str) -> None:
    for field in own_options(registry[name]):
        value = getattr(registry[name](), field.name)
        text = f"({value})" if isinstance(value, Compressor) else str(value).lower()
        with pytest.raises(ValueError, match="given twice"):
            parse(spec_with(name, f"{field.name}={text},{field.name}={text}"))
