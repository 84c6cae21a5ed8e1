"""Published volumes, reproduced by counting the bytes of real exchanges on the models' shapes.

PowerSGD: Vogels et al., 2019, arXiv:1905.13727 (compression ratio and data sent an epoch, by rank).
DGC: Lin et al., 2018, arXiv:1712.01887 (gradient size and ratio). Cost model: ring and pairwise formulas.
"""

from math import prod

import pytest
import torch

from compress import (
    AllGather,
    AllReduce,
    AllToAll,
    PowerSGD,
    Simulation,
    Split,
    TensorSpec,
    TopK,
    UnitLayout,
    parse,
    price,
)
from compress.cost import price_request
from tests.published.models import Shapes, alexnet_caffe, lstm_wikitext2, resnet18_cifar, resnet50

MIB = 2.0**20


def layout_of(shapes: Shapes, spec: str) -> UnitLayout:
    return UnitLayout.build([TensorSpec(f"p{number}", shape) for number, shape in enumerate(shapes)], parse(spec).place)


def payload(shapes: Shapes, spec: str) -> float:
    """Bytes that each worker hands to all-reduces in one step. With two workers a ring carries just those."""
    return price(spec, layout_of(shapes, spec), 2, bits_per_second=1e9).wire_bytes


def powersgd(rank: int) -> str:
    return f"powersgd:rank={rank},min_compression_rate=1"


def test_the_models_are_those_of_the_papers() -> None:
    """Numbers of parameters, of matrices, and of floats in vectors."""

    def counted(shapes: Shapes) -> tuple[int, int, int]:
        matrices = [shape for shape in shapes if len(shape) > 1]
        return sum(map(prod, shapes)), len(matrices), sum(prod(shape) for shape in shapes if len(shape) < 2)

    assert counted(resnet18_cifar()) == (11_173_962, 21, 9_610)
    assert counted(lstm_wikitext2()) == (28_949_319, 7, 44_469)
    assert counted(resnet50()) == (25_557_032, 54, 54_120)
    assert counted(alexnet_caffe()) == (60_965_224, 8, 10_568)


@pytest.mark.parametrize(
    ("rank", "floats", "ratio"), [(1, 45_935, 243.26), (2, 82_260, 135.84), (4, 154_910, 72.13), (8, 300_210, 37.22)]
)
def test_floats_a_step_of_resnet18(rank: int, floats: int, ratio: float) -> None:
    sent = payload(resnet18_cifar(), powersgd(rank))
    assert sent == 4 * floats == 4 * (9_610 + 36_325 * rank)
    assert round(payload(resnet18_cifar(), "none") / sent, 2) == ratio


@pytest.mark.parametrize(("rank", "mebibytes"), [(None, 1023.01), (1, 4.21), (2, 7.53), (4, 14.18)])
def test_data_an_epoch_of_resnet18(rank: int | None, mebibytes: float) -> None:
    """The paper's MB are MiB: 50 000 images, 16 workers with 128 each, so 24 whole steps."""
    sent = payload(resnet18_cifar(), "none" if rank is None else powersgd(rank)) * (50_000 // (16 * 128)) / MIB
    assert round(sent, 2) == mebibytes


@pytest.mark.parametrize(("rank", "ratio"), [(1, 309.66), (2, 203.14), (4, 120.35)])
def test_floats_a_step_of_the_language_model(rank: int, ratio: float) -> None:
    sent = payload(lstm_wikitext2(), powersgd(rank))
    assert sent == 4 * (44_469 + 49_019 * rank)
    assert round(payload(lstm_wikitext2(), "none") / sent, 2) == ratio


@pytest.mark.parametrize(
    ("rank", "mebibytes", "printed"), [(None, 7730.3, 7730), (1, 25.0, 25), (2, 38.1, 38), (4, 64.2, 64)]
)
def test_data_an_epoch_of_the_language_model(rank: int | None, mebibytes: float, printed: int) -> None:
    """70 steps an epoch."""
    sent = 70 * payload(lstm_wikitext2(), "none" if rank is None else powersgd(rank)) / MIB
    assert round(sent, 1) == mebibytes
    assert round(sent) == printed


def test_a_real_exchange_of_resnet18_sends_what_the_table_says() -> None:
    """On tensors with numbers in them, metered as they travel; the error is no more than the gradient."""
    compressor = PowerSGD(rank=2, min_compression_rate=1.0)
    simulation = Simulation(compressor, layout_of(resnet18_cifar(), str(compressor)), 2)
    gradient = torch.randn(simulation.layout.numel, generator=torch.Generator().manual_seed(0))
    outcomes = simulation.step([gradient, gradient])
    assert simulation.traffic[0].payload_bytes == {"all_reduce": 4 * 82_260}
    assert simulation.traffic[0].wire_bytes == 4 * 82_260 + simulation.traffic[0].control_bytes
    assert simulation.traffic[0].collectives == 2
    assert float(outcomes[0].residual.norm()) < float(gradient.norm())


@pytest.mark.parametrize(
    ("shapes", "dense_mib", "ratio", "sent_mib"),
    [(alexnet_caffe(), 232.56, 597.7, 0.389), (resnet50(), 97.49, 276.7, 0.352)],
    ids=["AlexNet", "ResNet-50"],
)
def test_ratios_of_deep_gradient_compression(shapes: Shapes, dense_mib: float, ratio: float, sent_mib: float) -> None:
    """0.1 % of the entries of matrices at 32 + 16 bits, vectors dense: chunked top-k has just that format."""
    compressor = Split(TopK(density=0.001, select="chunk"))
    layout = layout_of(shapes, str(compressor))
    sent = payload(shapes, str(compressor))  # two workers: the gather and the ring both carry one payload
    assert round(layout.dense_bytes / MIB, 2) == dense_mib
    # The last chunk of 1000 is not full: one entry of 6 bytes at most.
    assert layout.dense_bytes / sent == pytest.approx(ratio, abs=0.05)
    assert sent / MIB == pytest.approx(sent_mib, abs=0.0005)


# --- the cost table: ResNet-50, 20 microseconds a message, in milliseconds --------------------------------------------

D = 25_557_032


def request_of(
    kind: type[AllReduce | AllGather | AllToAll], nbytes: float, workers: int
) -> AllReduce | AllGather | AllToAll:
    whole = round(nbytes)
    shape = (workers, whole // workers) if kind is AllToAll else (whole,)
    return kind((torch.empty(shape, dtype=torch.uint8, device="meta"),))


def gathered(nbytes: float, workers: int, gbit: float) -> float:
    return price_request(request_of(AllGather, nbytes, workers), workers, gbit * 1e9, 20e-6).seconds


def two_sided(nbytes: float, workers: int, gbit: float) -> float:
    requests = [request_of(AllToAll, nbytes, workers), request_of(AllGather, nbytes / workers, workers)]
    return sum(price_request(request, workers, gbit * 1e9, 20e-6).seconds for request in requests)


def reduced(nbytes: float, workers: int, gbit: float) -> float:
    return price_request(request_of(AllReduce, nbytes, workers), workers, gbit * 1e9, 20e-6).seconds


COST_TABLE = [
    # gbit, W, fp32, bf16, 1-bit gathered, 1-bit two-sided, top-k 1 % gathered, int8 two-sided, PowerSGD at ratio 100
    (1, 4, 1226.86, 613.49, 76.73, 38.46, 36.86, 306.80, 12.51),
    (1, 64, 1612.61, 807.57, 1611.35, 52.84, 774.10, 405.04, 21.14),
    (10, 16, 153.94, 77.27, 38.64, 5.39, 18.70, 38.94, 2.73),
    (100, 16, 15.93, 8.27, 4.13, 1.08, 2.14, 4.43, 1.35),
    (100, 64, 18.62, 10.57, 17.36, 3.02, 8.99, 6.55, 5.20),
]


@pytest.mark.parametrize("row", COST_TABLE, ids=lambda row: f"{row[0]} Gbit/s, W = {row[1]}")
def test_the_cost_table(row: tuple[float, ...]) -> None:
    """All columns by the price of their requests; those of `none` and `bf16` also by pricing the compressor. Shown with
    two decimals; messages of whole bytes are off by less than a byte for each worker."""
    gbit, workers, *expected = row
    count = int(workers)
    computed = [
        reduced(4 * D, count, gbit),
        reduced(2 * D, count, gbit),
        gathered(D / 8, count, gbit),
        two_sided(D / 8, count, gbit),
        gathered(0.01 * D * 6, count, gbit),
        two_sided(D, count, gbit),
        2 * reduced(4 * D / 200, count, gbit),
    ]
    assert [1e3 * seconds for seconds in computed] == pytest.approx(expected, abs=0.0051)
    for spec, milliseconds in zip(("none", "bf16"), expected, strict=False):
        cost = price(spec, layout_of(resnet50(), spec), count, bits_per_second=gbit * 1e9, latency=20e-6)
        assert 1e3 * cost.seconds == pytest.approx(milliseconds, abs=0.0051)


@pytest.mark.parametrize(
    ("spec", "column", "overhead"), [("sign:block=8192", 5, 4 / 1024), ("int8:block=2048", 7, 4 / 2048)]
)
@pytest.mark.parametrize("row", COST_TABLE, ids=lambda row: f"{row[0]} Gbit/s, W = {row[1]}")
def test_our_scales_cost_what_they_take(row: tuple[float, ...], spec: str, column: int, overhead: float) -> None:
    """The table's codes have no scales: ours take four bytes a block more, and fill up each worker's last block."""
    gbit, workers = row[0], int(row[1])
    cost = price(spec, layout_of(resnet50(), spec), workers, bits_per_second=gbit * 1e9, latency=20e-6)
    latency = 2 * (workers - 1) * 20e-6
    bare = row[column] / 1e3 - latency
    assert cost.latency_seconds == pytest.approx(latency, rel=1e-12)
    padding = 8192 * workers / D
    assert bare - 6e-6 <= cost.bandwidth_seconds <= bare * (1 + overhead) * (1 + padding) + 6e-6


def test_all_gather_of_one_bit_loses_to_dense_from_65_workers_on() -> None:
    """(W - 1) d/8 > 2 (W - 1)/W 4d, that is W > 64, where latency is nothing."""

    def wire(kind: type[AllReduce | AllGather | AllToAll], nbytes: float, workers: int) -> float:
        return price_request(request_of(kind, nbytes, workers), workers, 1e9, 0.0).wire_bytes

    bits, dense = 1 << 20, 32 << 20
    for workers, loses in ((33, False), (63, False), (65, True), (128, True)):
        assert (wire(AllGather, bits, workers) > wire(AllReduce, dense, workers)) == loses
    assert wire(AllGather, bits, 64) == wire(AllReduce, dense, 64)
