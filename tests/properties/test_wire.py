"""What travels: equal results on all workers, and bytes as claimed, metered and priced."""

from itertools import groupby

import torch
from hypothesis import given
from hypothesis import strategies as st

from compress import AllGather, AllReduce, AllToAll, Compressor, Context, Request, Simulation, price, registry
from compress.driver import drive
from compress.layout import TensorSpec, UnitLayout
from compress.requests import Replies
from tests.strategies import CASES, Recipe, Shapes, dtypes, each, recipes, same_bits, shapes, workers

KIND = {kind.kind: kind for kind in (AllReduce, AllGather, AllToAll)}


@each()
@given(chosen=shapes(), count=workers | st.just(8), recipe=recipes)
def test_all_workers_receive_the_same_bits(compressor: Compressor, chosen: Shapes, count: int, recipe: Recipe) -> None:
    simulation = Simulation(compressor, chosen, count)
    for step in range(3):
        first, *others = simulation.step(recipe.step(simulation, step))
        assert all(same_bits(first.mean, other.mean) for other in others)


@each()
@given(dtype=dtypes, chosen=shapes(), count=workers | st.just(8), recipe=recipes)
def test_the_bytes_sent_are_those_claimed_and_priced(
    compressor: Compressor, dtype: torch.dtype, chosen: Shapes, count: int, recipe: Recipe
) -> None:
    simulation = Simulation(compressor, chosen, count, dtype=dtype)
    claimed: dict[str, int] = {}
    wire_bytes = messages = 0.0
    for step in range(3):
        ctx = simulation.context(0)
        for kind, payload in compressor.rounds(ctx):
            claimed[kind.kind] = claimed.get(kind.kind, 0) + payload
        cost = price(compressor, simulation.layout, count, bits_per_second=1e9, step=step)
        wire_bytes, messages = wire_bytes + cost.wire_bytes, messages + cost.collectives
        # Sums of the same products in another order differ by a few units of rounding.
        assert abs(cost.wire_bytes - compressor.wire_bytes(ctx)) <= 1e-12 * cost.wire_bytes
        simulation.step(recipe.step(simulation, step))
    for traffic in simulation.traffic:
        sent = sum(KIND[kind].factor(count) * payload for kind, payload in traffic.payload_bytes.items())
        assert traffic.payload_bytes == claimed
        assert traffic.collectives == messages
        assert abs(wire_bytes - sent) <= 1e-12 * sent


@each()
@given(chosen=shapes(), count=workers | st.just(64), step=st.sampled_from([0, 1, 2, 1000]))
def test_it_runs_on_meta_tensors_and_asks_for_what_it_claims(
    compressor: Compressor, chosen: Shapes, count: int, step: int
) -> None:
    """In the order claimed; so nothing in an exchange looks at a value on the host.

    A claim does not tell reductions of different dtypes apart that run side by side; on the wire they are separate.
    """
    specs = [TensorSpec(f"p{number}", shape) for number, shape in enumerate(chosen)]
    layout = UnitLayout.build(specs, compressor.place)
    ctx = Context(layout, count, step=step, device=torch.device("meta"))
    asked: list[tuple[type[Request], torch.dtype | None, int]] = []

    def perform(request: Request) -> Replies:
        dtype = request.tensors[0].dtype if isinstance(request, AllReduce) else None
        asked.append((type(request), dtype, request.payload_bytes))
        if isinstance(request, AllGather):
            return tuple(part.expand(count, *part.shape).clone() for part in request.parts)
        return request.parts

    x = torch.empty(layout.numel, device="meta")
    mean, _ = drive(compressor.exchange(x, compressor.init(ctx), ctx), perform)
    assert mean.shape == x.shape
    assert mean.device.type == "meta"
    merged = [
        [(kind, payload) for kind, _, payload in run] for _, run in groupby(asked, key=lambda request: request[0])
    ]
    claimed = [list(run) for _, run in groupby(compressor.rounds(ctx), key=lambda claim: claim[0])]
    for requests, claims in zip(merged, claimed, strict=True):
        one_dtype = len({dtype for _, dtype, _ in asked if dtype is not None}) < 2
        assert requests == claims if one_dtype else total(requests) == total(claims)


def total(claims: list[tuple[type[Request], int]]) -> int:
    return sum(payload for _, payload in claims)


@each()
@given(chosen=shapes(min_elements=1), count=workers, recipe=recipes)
def test_the_flags_of_the_driver_ride_along(compressor: Compressor, chosen: Shapes, count: int, recipe: Recipe) -> None:
    """They cost a few bytes and no message, and are metered apart from the payload."""
    plain, flagged = (Simulation(compressor, chosen, count) for _ in range(2))
    slots = len(plain.layout.slots)
    plain.step(recipe.step(plain))
    flagged.step(recipe.step(flagged), [torch.ones(slots)] * count)
    assert flagged.traffic[0].collectives == plain.traffic[0].collectives
    assert flagged.traffic[0].payload_bytes == plain.traffic[0].payload_bytes
    assert flagged.traffic[0].control_bytes == (1 + slots) * plain.traffic[0].control_bytes > 0


def test_every_registered_compressor_has_an_example() -> None:
    assert {case.name for case in CASES} == set(registry)
