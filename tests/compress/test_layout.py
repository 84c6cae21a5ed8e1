"""Where each parameter lies in the arena."""

import math

import torch
from hypothesis import given

from compress import PowerSGD, TensorSpec, UnitLayout
from tests.strategies import Shapes, more, shapes


def specs(chosen: Shapes) -> list[TensorSpec]:
    return [TensorSpec(f"p{number}", shape) for number, shape in enumerate(chosen)]


@more(10)
@given(chosen=shapes())
def test_the_slots_cover_the_arena_without_gaps(chosen: Shapes) -> None:
    layout = UnitLayout.build(specs(chosen), PowerSGD(min_compression_rate=0.0).place)
    position = 0
    for slot in layout.slots:
        assert slot.start == position
        position = slot.stop
    assert layout.numel == position == sum(math.prod(shape) for shape in chosen)
    assert layout.dense_bytes == 4 * layout.numel
    assert sorted(slot.spec.name for slot in layout.slots) == sorted(spec.name for spec in specs(chosen))


@more(10)
@given(chosen=shapes())
def test_tensors_of_one_key_lie_together_in_their_own_order(chosen: Shapes) -> None:
    layout = UnitLayout.build(specs(chosen), lambda spec: (len(spec.shape),))
    assert [group.key for group in layout.groups] == sorted({(len(shape),) for shape in chosen})
    for group in layout.groups:
        numbers = [int(slot.spec.name[1:]) for slot in group.slots]
        assert numbers == sorted(numbers)
        assert group.stop - group.start == sum(slot.spec.numel for slot in group.slots)


@more(10)
@given(chosen=shapes())
def test_the_parts_are_layouts_of_their_own(chosen: Shapes) -> None:
    layout = UnitLayout.build(specs(chosen), lambda spec: (len(spec.shape) % 2, len(spec.shape)))
    arena = torch.arange(float(layout.numel))
    seen = torch.zeros(layout.numel)
    for index in (0, 1):
        span, part = layout.part(index)
        seen[span] += 1
        assert part.numel == span.stop - span.start
        for slot in part.slots:
            (whole,) = [other for other in layout.slots if other.spec == slot.spec]
            assert torch.equal(slot.view(arena[span]), whole.view(arena))
            assert (index, *slot.key) == whole.key
    assert bool((seen == 1).all())


def test_a_view_writes_into_the_arena() -> None:
    layout = UnitLayout.build([TensorSpec("a", (2,)), TensorSpec("b", (2, 3))])
    arena = torch.zeros(layout.numel)
    layout.slots[1].view(arena)[1, 2] = 5
    assert arena.tolist() == [0, 0, 0, 0, 0, 0, 0, 5]


def test_what_counts_as_a_matrix() -> None:
    def matrix(*shape: int) -> tuple[int, int] | None:
        return TensorSpec("p", shape).matrix

    assert matrix(4, 6) == (4, 6)
    assert matrix(8, 3, 5, 5) == (8, 75)
    assert matrix(1, 9) == (1, 9)
    assert matrix() is matrix(7) is matrix(0, 3) is matrix(3, 0) is None
