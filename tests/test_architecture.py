"""Decisions that cannot rot: what may import what, how long a file may be, what a docstring must say."""

import ast
import dataclasses
import doctest
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import compress
from compress import Compressor, registry

ROOT = Path(__file__).parents[1]
COMPRESS = sorted((ROOT / "compress").rglob("*.py"))
HOOKS = sorted((ROOT / "hooks").rglob("*.py"))
EXPERIMENTS = sorted((ROOT / "experiments").rglob("*.py"))

LONGEST = 220
LONGER = {"simulate.py": 230}
"""Stated exceptions: the simulation is driver, meter and convenience in one, and read as a whole."""

MACHINERY = {
    "__init__.py",
    "compressor.py",
    "cost.py",
    "driver.py",
    "options.py",
    "requests.py",
    "simulate.py",
    "state.py",
}
ALGORITHMS = [path for path in COMPRESS if path.name not in MACHINERY]


def each_file(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=[str(path.relative_to(ROOT)) for path in paths])


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def attributes(path: Path) -> set[str]:
    """Dotted names that a file mentions, such as torch.distributed, and the last part of each."""
    tree = ast.parse(path.read_text())
    return {
        text for node in ast.walk(tree) if isinstance(node, ast.Attribute) for text in (node.attr, ast.unparse(node))
    }


def test_there_is_something_to_look_at() -> None:
    assert {"powersgd.py", "sign.py", "topk.py"} <= {path.name for path in ALGORITHMS}
    assert HOOKS


@each_file(COMPRESS)
def test_the_mathematics_imports_torch_numpy_and_the_standard_library(path: Path) -> None:
    allowed = {"compress", "torch", "numpy", *sys.stdlib_module_names}
    assert {name.partition(".")[0] for name in imported(path)} <= allowed


FORBIDDEN = ("torch.distributed", "torch.multiprocessing", "threading", "multiprocessing", "logging", "asyncio", "time")


@each_file(COMPRESS)
def test_the_mathematics_knows_no_processes_threads_logs_or_clocks(path: Path) -> None:
    for name in [*imported(path), *attributes(path)]:
        assert not any(name == forbidden or name.startswith(f"{forbidden}.") for forbidden in FORBIDDEN), name


@each_file(COMPRESS)
def test_the_mathematics_draws_no_global_random_numbers(path: Path) -> None:
    """They come from the context, keyed by seed and step, or workers and resumed runs would differ."""
    drawn = {"torch.rand", "torch.randn", "torch.randperm", "torch.randint", "torch.manual_seed", "np.random.seed"}
    assert not drawn & attributes(path)


@each_file(ALGORITHMS)
def test_an_exchange_does_not_look_at_values_on_the_host(path: Path) -> None:
    assert not {"item", "tolist"} & attributes(path)


@each_file(COMPRESS)
def test_the_mathematics_fits_on_a_few_pages(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= LONGER.get(path.name, LONGEST), f"{path.name} has {lines} lines"


@each_file([*COMPRESS, *HOOKS])
def test_dependencies_point_one_way(path: Path) -> None:
    """experiments -> hooks -> compress."""
    forbidden = {"experiments", "tests"} | ({"hooks"} if path in COMPRESS else set())
    assert not forbidden & {name.partition(".")[0] for name in imported(path)}


@each_file(HOOKS)
def test_files_that_ddp_reads_have_real_annotations(path: Path) -> None:
    """DDP refuses hooks whose annotations are strings."""
    assert "__future__.annotations" not in set(imported(path))


OURS = [cls for cls in registry.values() if cls.__module__.partition(".")[0] == "compress"]
each_compressor = pytest.mark.parametrize("cls", OURS, ids=lambda cls: cls.name)


@each_compressor
def test_a_compressor_says_what_it_sends_what_it_keeps_and_when_not_to_use_it(cls: type[Compressor]) -> None:
    documentation = cls.__doc__ or ""
    for section in ("On the wire:", "Law:", "Not for:", ">>> "):
        assert section in documentation, f"{cls.__name__} lacks {section!r}"


@each_compressor
def test_a_compressor_explains_each_of_its_options(cls: type[Compressor]) -> None:
    fields = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    documentation = cls.__doc__ or ""
    assert not fields or "Args:" in documentation
    assert all(f"    {name}: " in documentation for name in fields)


@each_compressor
def test_a_compressor_is_a_frozen_dataclass_and_final(cls: type[Compressor]) -> None:
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert not cls.__subclasses__()


@each_file(COMPRESS)
def test_the_examples_in_docstrings_are_true(path: Path) -> None:
    parts = path.relative_to(ROOT).with_suffix("").parts
    module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
    failed, tried = doctest.testmod(module)
    assert not failed
    registered = [cls for cls in OURS if cls.__module__ == module.__name__]
    assert tried >= 2 * len(registered), "an import and a call for each compressor"


PUBLIC = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "BF16",
    "Codec",
    "Compressor",
    "Context",
    "Exact",
    "Exchange",
    "FP16",
    "Int4",
    "Int8",
    "LockstepError",
    "OneBit",
    "PowerSGD",
    "Price",
    "RandomK",
    "Request",
    "Sign",
    "SignSGD",
    "Simulation",
    "Split",
    "State",
    "TensorSpec",
    "TopK",
    "UnitLayout",
    "Warmup",
    "option",
    "parse",
    "per_matrix",
    "price",
    "register",
    "registry",
    "served_chunk",
    "server_chunk",
    "simulate",
    "two_sided",
    "two_sided_rounds",
]


def test_the_public_names_are_a_decision() -> None:
    """Adding one is a line here; taking one away breaks somebody's import."""
    assert sorted(compress.__all__) == PUBLIC
    assert all(hasattr(compress, name) for name in PUBLIC)
    assert len(set(compress.__all__)) == len(compress.__all__)
