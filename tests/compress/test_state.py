"""State by parameter name: missing and misshapen entries, and another number of workers."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compress import Context, PowerSGD, Sign, Simulation, State, TensorSpec, UnitLayout, parse
from compress.state import Chunk, Saved, load_state, map_state, save_state, server_memory
from tests.strategies import Recipe, Shapes, gaussians, recipes, same_bits, shapes, tensors_in

SERVED = ["sign:block=256", "int8:block=64", "onebit", "bf16:wide_sum=true,memory=true", "split:child=(int4)/sign"]


def merged(parts: list[Saved]) -> Saved:
    """The entries of all workers as if one had served everything."""
    whole: Saved = {}
    for saved in parts:
        for path, entries in saved.items():
            for name, entry in entries.items():
                if isinstance(entry, Tensor):
                    whole.setdefault(path, {})[name] = entry
                    continue
                end = entry["start"] + entry["values"].numel()
                known = whole.setdefault(path, {}).get(name, {"start": 0, "values": torch.zeros(0)})["values"]
                values = torch.zeros(max(end, known.numel()))
                values[: known.numel()] = known
                values[entry["start"] : end] = entry["values"]
                whole[path][name] = {"start": 0, "values": values}
    return whole


@pytest.mark.parametrize("spec", SERVED)
@given(chosen=shapes(), recipe=recipes, before=st.integers(1, 5), after=st.integers(1, 5))
def test_servers_may_become_more_or_fewer(spec: str, chosen: Shapes, recipe: Recipe, before: int, after: int) -> None:
    """Each element is served by one worker, before and after, and is owed the same, to the bit."""
    old = Simulation(spec, chosen, before)
    for step in range(2):
        old.step(recipe.step(old, step))
    saved = merged([save_state(carry.state, old.layout) for carry in old.carries])
    for path in [path for carry in old.carries for path in save_state(carry.state, old.layout)]:
        saved.setdefault(path, {})
    new = Simulation(spec, chosen, after)
    states = [load_state(carry.state, new.layout, saved) for carry in new.carries]
    assert same_bits(
        server_memory(states, new.layout), server_memory([carry.state for carry in old.carries], old.layout)
    )


@given(recipe=gaussians)
def test_factors_are_saved_by_the_name_of_the_parameter(recipe: Recipe) -> None:
    """Whatever the order of the parameters, and in whichever unit they lie."""
    compressor = PowerSGD(rank=2, min_compression_rate=0.0)
    names = ["a", "b", "c"]

    def layout(order: list[str]) -> UnitLayout:
        return UnitLayout.build([TensorSpec(name, (6, 5)) for name in order], compressor.place)

    old = Simulation(compressor, layout(names), 1)
    old.step(recipe.step(old))
    saved = save_state(old.carries[0].state, old.layout)
    assert {path: set(entries) for path, entries in saved.items()} == {"q": set(names), "fresh": set(names)}
    for order in (["c", "a", "b"], ["b"]):
        loaded = load_state(compressor.init(Context(layout(order))), layout(order), saved)
        (stacked, _) = (tensor for tensor in tensors_in(loaded))
        for row, name in zip(stacked, order, strict=True):
            assert same_bits(row, saved["q"][name])


def test_what_is_missing_is_named() -> None:
    simulation = Simulation("sign", [(5,), (6,)], 1)
    state, layout = simulation.carries[0].state, simulation.layout
    with pytest.raises(KeyError, match="server"):
        load_state(state, layout, {})
    saved = save_state(state, layout)
    del saved["server"]["p1"]
    with pytest.raises(KeyError, match="server of parameter p1"):
        load_state(state, layout, saved)
    factors = Simulation("powersgd:rank=1,min_compression_rate=0", [(4, 4)], 1)
    with pytest.raises(KeyError, match="p0"):
        load_state(factors.carries[0].state, factors.layout, {"q": {}, "fresh": {}})


def test_a_checkpoint_of_another_rank_is_refused() -> None:
    shapes = [(8, 8)]
    two, three = (Simulation(PowerSGD(rank=rank, min_compression_rate=0.0), shapes, 1) for rank in (2, 3))
    saved = save_state(two.carries[0].state, two.layout)
    with pytest.raises(ValueError, match=r"q: expected \[1, 3, 8\], the checkpoint has \[1, 2, 8\]"):
        load_state(three.carries[0].state, three.layout, saved)


def test_a_field_without_a_kind_is_an_error_that_says_what_to_do() -> None:
    @dataclass(frozen=True)
    class Forgetful(State):
        momentum: Tensor

    layout = UnitLayout.build([TensorSpec("p", (2,))])
    with pytest.raises(TypeError, match=r"Forgetful.momentum has no kind: declare it with per_matrix\(\)"):
        save_state(Forgetful(torch.zeros(2)), layout)


def test_a_chunk_knows_the_parameters_it_overlaps() -> None:
    layout = UnitLayout.build([TensorSpec("a", (4,)), TensorSpec("b", (0,)), TensorSpec("c", (5,))])
    overlaps = [(slot.spec.name, span, first) for slot, span, first in Chunk(torch.zeros(4), 2).overlaps(layout)]
    assert overlaps == [("a", slice(0, 2), 2), ("c", slice(2, 4), 0)]


def test_nested_fields_are_seen_in_their_own_layout() -> None:
    compressor = parse("split:child=(int8:block=64)/sign:block=256")
    layout = UnitLayout.build([TensorSpec("w", (10, 10)), TensorSpec("b", (7,))], compressor.place)
    seen: list[tuple[str, str, list[str], int]] = []

    def visit(path: str, kind: str, layout: UnitLayout, offset: int, value: Any) -> Any:
        seen.append((path, kind, [slot.spec.name for slot in layout.slots], offset))
        return value

    map_state(visit, layout, compressor.init(Context(layout)))
    assert seen == [("inner.server", "server_chunk", ["w"], 0), ("child.server", "server_chunk", ["b"], 100)]


def test_loading_does_not_touch_the_fresh_state() -> None:
    simulation = Simulation(Sign(block=256), [(300,)], 1)
    fresh = simulation.carries[0].state
    simulation.step([torch.linspace(-1, 1, 300) ** 3])
    saved = save_state(simulation.carries[0].state, simulation.layout)
    loaded = load_state(fresh, simulation.layout, saved)
    assert any(tensor.any() for tensor in tensors_in(loaded))
    assert not any(tensor.any() for tensor in tensors_in(fresh))
