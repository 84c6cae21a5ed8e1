"""Bytes on the wire by kind of collective, and the driver's flags that ride along."""

import pytest
import torch

from compress import AllGather, AllReduce, AllToAll, Request
from compress.requests import Traffic
from compress.simulate import perform_together

WORKERS = [1, 2, 3, 4, 64]


@pytest.mark.parametrize("peers", WORKERS)
def test_bytes_sent_per_byte_handed_in(peers: int) -> None:
    """Ring all-reduce: 2(W-1)/W; all-to-all: own row stays; all-gather: to each of the others."""
    assert AllReduce.factor(peers) == pytest.approx(2 * (peers - 1) / peers, rel=1e-15)
    assert AllToAll.factor(peers) == pytest.approx((peers - 1) / peers, rel=1e-15)
    assert AllGather.factor(peers) == peers - 1


def test_payload_is_the_size_of_all_tensors() -> None:
    request = AllGather((torch.zeros(3, 5), torch.zeros(7, dtype=torch.uint8), torch.zeros(0)))
    assert request.payload_bytes == 4 * 15 + 7
    assert request.control_bytes == 0
    assert request.wire_bytes(3) == 2 * 67


@pytest.mark.parametrize(
    ("request_", "control_bytes"),
    [
        (AllReduce((torch.zeros(8),)), 8),
        (AllReduce((torch.zeros(8, dtype=torch.bfloat16),)), 4),
        (AllReduce((torch.zeros(8, dtype=torch.float64),)), 16),
        (AllGather((torch.zeros(8, dtype=torch.uint8),)), 8),
        (AllToAll((torch.zeros(4, 2, dtype=torch.uint8),)), 4 * 8),
    ],
    ids=["all_reduce", "bf16", "float64", "all_gather", "all_to_all"],
)
def test_flags_cost_their_own_bytes_and_no_payload(request_: Request, control_bytes: int) -> None:
    """In a reduction they take its dtype, in an all-to-all there is one copy for each peer."""
    flagged = request_.with_control(torch.zeros(2))
    assert flagged.payload_bytes == request_.payload_bytes
    assert flagged.control_bytes == control_bytes
    assert flagged.tensors == request_.tensors
    assert len(flagged.parts) == len(request_.tensors) + 1


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_flag_of_one_worker_is_seen_by_all(count: int, dtype: torch.dtype) -> None:
    """Whatever the reduction's dtype: 1/W is far above the smallest number of any of them."""
    for kind, payload in ((AllReduce, torch.zeros(2, dtype=dtype)), (AllGather, torch.zeros(2, dtype=torch.uint8))):
        requests = [
            kind((payload,)).with_control(torch.tensor([1.0 if worker == count - 1 else 0.0]))
            for worker in range(count)
        ]
        for request, replies in zip(requests, perform_together(requests), strict=True):
            own, flags = request.without_control(replies)
            assert len(own) == 1
            assert flags.dtype == torch.float32
            assert float(flags[0]) == pytest.approx(1 / count, rel=2**-8)


def test_traffic_adds_up_by_kind() -> None:
    traffic = Traffic()
    traffic.count(AllReduce((torch.zeros(10),)).with_control(torch.zeros(1)), 4)
    traffic.count(AllReduce((torch.zeros(2),)), 4)
    traffic.count(AllGather((torch.zeros(4, dtype=torch.uint8),)), 4)
    assert traffic.payload_bytes == {"all_reduce": 48, "all_gather": 4}
    assert traffic.control_bytes == 4
    assert traffic.wire_bytes == 1.5 * 52 + 3 * 4
    assert traffic.collectives == 3
