"""The two-sided exchange and exchanges side by side."""

from collections.abc import Generator

import pytest
import torch
from torch import Tensor

from compress import AllGather, AllReduce, AllToAll, Context, Request, Simulation, TensorSpec, UnitLayout
from compress.protocols import chunk_blocks, parallel, served_chunk
from compress.requests import Replies
from compress.sign import SignCodec


def child(label: str, *requests: Request) -> Generator[Request, Replies, tuple[str, list[Replies]]]:
    """Asks for these, and returns what it was answered."""
    answers = []
    for request in requests:
        answers.append((yield request))
    return label, answers


def run(exchange: Generator[Request, Replies, list[tuple[str, list[Replies]]]]) -> tuple[list[Request], list[object]]:
    """All requests, answered with their own tensors plus one, and the results."""
    requests = []
    try:
        request = next(exchange)
        while True:
            requests.append(request)
            request = exchange.send(tuple(tensor + 1 for tensor in request.tensors))
    except StopIteration as done:
        return requests, done.value


def ones(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((size,), size, dtype=dtype)


def test_what_is_asked_for_together_travels_together() -> None:
    requests, results = run(
        parallel([child("a", AllReduce((ones(1),)), AllReduce((ones(2), ones(3)))), child("b", AllReduce((ones(4),)))])
    )
    assert [(request.kind, [len(t) for t in request.tensors]) for request in requests] == [
        ("all_reduce", [1, 4]),
        ("all_reduce", [2, 3]),
    ]
    assert [label for label, _ in results] == ["a", "b"]  # type: ignore[misc]


def test_each_child_gets_its_own_replies() -> None:
    children = [
        child(str(size), AllGather((ones(size), ones(size + 1))), AllGather((ones(size + 2),))) for size in (1, 5)
    ]
    _, results = run(parallel(children))
    for (label, answers), size in zip(results, (1, 5), strict=True):  # type: ignore[misc]
        assert label == str(size)
        assert [[t.tolist() for t in reply] for reply in answers] == [
            [[size + 1] * size, [size + 2] * (size + 1)],
            [[size + 3] * (size + 2)],
        ]


@pytest.mark.parametrize(
    ("first", "second", "messages"),
    [
        (AllReduce((ones(1),)), AllGather((ones(2),)), 2),
        (AllReduce((ones(1),)), AllReduce((ones(2),), axis="node"), 2),
        (AllReduce((ones(1),)), AllReduce((ones(2, torch.bfloat16),)), 2),
        (AllGather((ones(1),)), AllGather((ones(2, torch.bfloat16),)), 1),
        (AllToAll((ones(1),)), AllToAll((ones(2, torch.uint8),)), 1),
    ],
    ids=["kinds", "axes", "dtypes of a reduction", "dtypes of a gather", "dtypes of an all-to-all"],
)
def test_only_a_reduction_needs_one_dtype(first: Request, second: Request, messages: int) -> None:
    requests, _ = run(parallel([child("a", first), child("b", second)]))
    assert len(requests) == messages
    assert [request.kind for request in requests][:1] == [first.kind]


def test_children_may_ask_for_nothing_or_be_none() -> None:
    assert run(parallel([])) == ([], [])
    requests, results = run(parallel([child("a"), child("b", AllReduce((ones(1),)))]))
    assert len(requests) == 1
    assert results[0] == ("a", [])


@pytest.mark.parametrize(("numel", "workers", "block"), [(0, 3, 8), (1, 4, 8), (100, 3, 8), (64, 4, 16), (1000, 7, 64)])
def test_the_served_chunks_cover_the_unit_once(numel: int, workers: int, block: int) -> None:
    layout = UnitLayout.build([TensorSpec("p", (numel,))])
    chunks = [served_chunk(SignCodec(block), Context(layout, workers, index)) for index in range(workers)]
    position = 0
    for chunk in chunks:
        assert chunk.start == position
        assert chunk.start % block == 0 or not chunk.values.numel()
        position += chunk.values.numel()
    assert position == numel
    assert workers * chunk_blocks(numel, workers, block) * block >= numel


TWO_SIDED = ["sign", "sign:block=256", "onebit", "int8", "int4", "fp16:wide_sum=true", "bf16:wide_sum=true", "signsgd"]


@pytest.mark.parametrize("spec", TWO_SIDED)
def test_two_sided_bytes_are_flat_in_the_number_of_workers(spec: str) -> None:
    """2 (W - 1)/W times one payload, where chunks are whole: between one and two payloads for every W."""
    shape = (64, 2048)
    payloads = set()
    for workers in (2, 4, 16, 64):
        simulation = Simulation(spec, [shape], workers)
        sent = simulation.compressor.wire_bytes(simulation.context(0))
        payloads.add(round(sent * workers / (2 * (workers - 1)), 6))
    assert len(payloads) == 1


@pytest.mark.parametrize("spec", ["sign:block=256", "int8", "bf16:wide_sum=true", "onebit"])
def test_every_worker_serves_its_own_chunk(spec: str) -> None:
    """A change of one element at a server changes the result in that element's block alone."""
    workers, d = 4, 4 * 256
    shapes = [(d // 256, 256)]
    plain, changed = (Simulation(spec, shapes, workers, dtype=torch.float64) for _ in range(2))
    gradients = [torch.linspace(-1, 1, d).double() * (worker + 1) for worker in range(workers)]
    other = [gradient.clone() for gradient in gradients]
    for gradient in other:
        gradient[600] += 5
    difference = changed.step(other)[0].mean - plain.step(gradients)[0].mean
    assert bool(difference[512:768].any())
    assert not difference[:512].any()
    assert not difference[768:].any()
