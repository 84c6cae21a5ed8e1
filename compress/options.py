"""Options of compressors: declared once in the dataclass, checked at construction, written as spec strings.

    powersgd:rank=4    warmup:steps=1000/powersgd:rank=4    split:match=*embed*,child=(topk:density=0.01)/sign

A spec names a compressor and its options; wrappers come first, outermost first, separated by "/".
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from compress.compressor import Compressor

    CompressorType = TypeVar("CompressorType", bound=type[Compressor])

registry: dict[str, "type[Compressor]"] = {}
"""Spec name -> class, in order of registration."""


def register(name: str) -> "Callable[[CompressorType], CompressorType]":
    """Class decorator: make a compressor known by `name` to specs, command lines and the property suite.

    Raises:
        ValueError: the name is not lower-case letters, digits and "_", or is taken by another class.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"a compressor's name must be lower-case letters, digits and '_', got {name!r}")

    def add(cls: "CompressorType") -> "CompressorType":
        known = registry.get(name)
        if known is not None and known.__qualname__ != cls.__qualname__:
            raise ValueError(
                f"the name {name!r} is taken by {known.__qualname__}; choose another for {cls.__qualname__}"
            )
        cls.name = name
        registry[name] = cls
        return cls

    return add


def option(
    default: Any,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    shown: bool = False,
) -> Any:
    """A dataclass field with its legal range: low <= value <= high, value > above.

    `shown` options are always part of the spec string; others only where they differ from the default.
    """
    return dataclasses.field(default=default, metadata={"low": low, "high": high, "above": above, "shown": shown})


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def own_options(compressor_type: "type[Compressor]") -> list[dataclasses.Field[Any]]:
    """The fields that a user sets in a spec (all but a wrapper's `inner`)."""
    return [field for field in dataclasses.fields(compressor_type) if field.name != "inner"]  # type: ignore[arg-type]


def check_options(compressor: "Compressor") -> None:
    """Raise TypeError or ValueError, naming option, value and remedy, unless every option is legal."""
    for field in dataclasses.fields(compressor):  # type: ignore[arg-type]
        value, hint = getattr(compressor, field.name), _hints(type(compressor))[field.name]
        where = f"{compressor.name}: option {field.name!r}"
        if get_origin(hint) is Literal:
            if not any(type(value) is type(choice) and value == choice for choice in get_args(hint)):
                raise ValueError(f"{where} must be one of {', '.join(map(str, get_args(hint)))}, got {value!r}")
            continue
        fits = isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool)
        if hint is float and isinstance(value, int) and not isinstance(value, bool):
            object.__setattr__(compressor, field.name, float(value))
            fits, value = True, float(value)
        if not fits:
            raise TypeError(f"{where} must be of type {hint.__name__}, got {value!r} ({type(value).__name__})")
        limits = field.metadata
        low, high, above = limits.get("low"), limits.get("high"), limits.get("above")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{where} must be finite, got {value}")
        if low is not None and value < low:
            raise ValueError(f"{where} must be at least {low}, got {value}")
        if above is not None and value <= above:
            raise ValueError(f"{where} must be greater than {above}, got {value}")
        if high is not None and value > high:
            raise ValueError(f"{where} must be at most {high}, got {value}")


def format_options(compressor: "Compressor") -> str:
    """The spec string of a compressor; `parse` gives an equal compressor back."""
    written = []
    for field in own_options(type(compressor)):
        value = getattr(compressor, field.name)
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        if field.metadata.get("shown") or value != default:
            written.append(f"{field.name}={_format_value(value)}")
    spec = f"{compressor.name}:{','.join(written)}" if written else compressor.name
    return f"{spec}/{compressor.inner}" if compressor.is_wrapper else spec  # type: ignore[attr-defined]


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float, str)):
        return str(value)
    return f"({value})"


def parse(spec: str) -> "Compressor":
    """The compressor that a spec string describes.

    Raises:
        TypeError: `spec` is not a string.
        ValueError: unknown name or option, ill-typed or illegal value; the message lists what is valid.
    """
    if not isinstance(spec, str):
        raise TypeError(f"a spec is a string such as 'powersgd:rank=4', got {spec!r} ({type(spec).__name__})")
    try:
        *wrappers, innermost = [_parse_item(item) for item in _split(spec, "/")]
        cls, options = innermost
        if cls.is_wrapper:
            raise ValueError(f"{cls.name!r} wraps another compressor: write {cls.name}/powersgd:rank=4, for example")
        compressor = cls(**options)
        for cls, options in reversed(wrappers):
            if not cls.is_wrapper:
                raise ValueError(f"{cls.name!r} is not a wrapper, so it can only come last")
            compressor = cls(inner=compressor, **options)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"bad compressor spec {spec!r}: {error}") from error
    return compressor


def find(name: str) -> "type[Compressor]":
    """The class registered under `name`.

    Raises:
        ValueError: there is none; the message lists the names and the nearest one.
    """
    if name not in registry:
        near = difflib.get_close_matches(name, registry, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"unknown compressor {name!r}{hint}; known are {', '.join(registry)}")
    return registry[name]


def check_option_names(compressor_type: "type[Compressor]", names: "Iterator[str] | list[str]") -> None:
    """Raise ValueError, listing the valid ones, if a name is not an option of the compressor."""
    valid = [field.name for field in own_options(compressor_type)]
    for name in names:
        if name not in valid:
            raise ValueError(
                f"{compressor_type.name} has no option {name!r}; its options are {', '.join(valid) or 'none'}"
            )


def _parse_item(item: str) -> "tuple[type[Compressor], dict[str, Any]]":
    name, colon, rest = item.partition(":")
    cls = find(name.strip())
    options: dict[str, Any] = {}
    for assignment in _split(rest, ",") if colon else []:
        key, equals, text = assignment.partition("=")
        key = key.strip()
        if not equals or not text.strip():
            raise ValueError(f"expected option=value after {name!r}, got {assignment!r}")
        check_option_names(cls, [key])
        if key in options:
            raise ValueError(f"option {key!r} is given twice")
        options[key] = _parse_value(text.strip(), _hints(cls)[key], key)
    return cls, options


def _parse_value(text: str, hint: Any, key: str) -> Any:
    if get_origin(hint) is Literal:
        return next((choice for choice in get_args(hint) if str(choice) == text), text)
    if hint is str:
        return text
    if hint is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"option {key!r} must be true or false, got {text!r}")
        return text.lower() == "true"
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            raise ValueError(f"option {key!r} must be of type {hint.__name__}, got {text!r}") from None
    if not (text.startswith("(") and text.endswith(")")):
        raise ValueError(f"option {key!r} is a compressor and is written in parentheses, got {text!r}")
    return parse(text[1:-1])


def _split(text: str, separator: str) -> list[str]:
    """Split at separators outside parentheses."""
    pieces, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth < 0:
            raise ValueError("unbalanced ')'")
        if character == separator and depth == 0:
            pieces.append(text[start:position])
            start = position + 1
    if depth:
        raise ValueError("unbalanced '('")
    return [*pieces, text[start:]]
