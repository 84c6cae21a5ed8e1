"""The price of an exchange: the alpha-beta model."""

import pytest
import torch

from compress import AllGather, AllReduce, AllToAll, Price, Request, TensorSpec, UnitLayout, parse, price
from compress.cost import price_request


def unit(*shapes: tuple[int, ...], spec: str = "none") -> UnitLayout:
    return UnitLayout.build([TensorSpec(f"p{number}", shape) for number, shape in enumerate(shapes)], parse(spec).place)


@pytest.mark.parametrize(
    ("request_", "hops", "sent"),
    [
        (AllReduce((torch.empty(100, device="meta"),)), 6, 600.0),
        (AllGather((torch.empty(100, device="meta"),)), 3, 1200.0),
        (AllToAll((torch.empty(4, 25, device="meta"),)), 3, 300.0),
    ],
    ids=["all_reduce", "all_gather", "all_to_all"],
)
def test_one_collective_among_four(request_: Request, hops: int, sent: float) -> None:
    """Ring or pairwise: so many messages one after the other, so many bytes."""
    assert price_request(request_, 4, 8e6, 1e-3) == Price(sent, hops * 1e-3, sent / 1e6, 1)


def test_prices_add_up() -> None:
    total = Price(1.0, 2.0, 3.0, 4) + Price(10.0, 20.0, 30.0, 40)
    assert total == Price(11.0, 22.0, 33.0, 44)
    assert total.seconds == 55.0
    layouts = [unit((8, 8)), unit((100,))]
    each = [price("none", layout, 4, bits_per_second=1e9) for layout in layouts]
    assert price("none", layouts, 4, bits_per_second=1e9) == each[0] + each[1]


def test_alone_there_is_nothing_to_pay() -> None:
    for spec in ("none", "sign", "powersgd", "topk"):
        cost = price(spec, unit((64, 64), spec=spec), 1, bits_per_second=1e9)
        assert cost.wire_bytes == cost.seconds == 0


def test_the_price_is_of_a_step_beyond_any_warm_up_unless_asked() -> None:
    layout = unit((100, 100), spec="powersgd")
    later, first = (
        price("warmup:steps=1000/powersgd", layout, 2, bits_per_second=1e9, **at) for at in ({}, {"step": 0})
    )
    assert later.wire_bytes == 4 * 200
    assert first.wire_bytes == 4 * 10_000


@pytest.mark.parametrize("spec", ["powersgd:rank=4", "sign", "int8", "topk:density=0.001", "bf16"])
def test_a_model_of_billions_of_parameters_takes_no_memory(spec: str) -> None:
    """A hundred matrices of 8192 x 8192, 27 GB."""
    layout = unit(*[(8192, 8192)] * 100, spec=spec)
    cost = price(spec, layout, 64, bits_per_second=1e10)
    assert layout.numel == 100 << 26
    assert cost.wire_bytes > 0


def test_latency_is_per_round_and_bandwidth_per_byte() -> None:
    """PowerSGD's two rounds wait for one another: four times (W - 1) latencies."""
    cost = price("powersgd:rank=1", unit((100, 100), spec="powersgd"), 8, bits_per_second=1e6, latency=1e-3)
    assert cost.collectives == 2
    assert cost.latency_seconds == pytest.approx(2 * 2 * 7 * 1e-3, rel=1e-12)
    assert cost.bandwidth_seconds == pytest.approx(2 * 7 / 8 * 4 * 200 * 8 / 1e6, rel=1e-12)
