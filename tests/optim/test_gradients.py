"""What users do with gradients: accumulation, parameters without one, late ones, complex and half-width ones."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.optim.training import (
    KINDS,
    Net,
    Steady,
    batch,
    generator,
    make,
    parameters,
    rank,
    run,
    same_on_all_ranks,
    step,
    wrapped,
)
from tests.pool import Pool

each_kind = pytest.mark.parametrize("kind", list(KINDS))


def accumulated(kind: str) -> float:
    """On a worker: how far three micro-batches with no_sync are from one large batch, relative to the way."""
    models = [wrapped(Steady()) for _ in range(2)]
    start = parameters(models[0])
    small, large = (make(kind, model, compressor="none") for model in models)
    for number in range(10):
        parts = [batch(3 * number + part, rank(), torch.float64) for part in range(3)]
        small.zero_grad()
        with models[0].no_sync():
            for part in parts[:-1]:
                (models[0](part).mean() / 3).backward()
        (models[0](parts[-1]).mean() / 3).backward()
        small.step()
        step(models[1], large, torch.cat(parts))
    assert kind != "zeroone" or not small.synchronised
    a, b = parameters(models[0]), parameters(models[1])
    return float((a - b).abs().max() / (b - start).abs().max())


@each_kind
def test_accumulation_without_synchronisation_is_a_large_batch(two: Pool, kind: str) -> None:
    assert max(two.run(__name__, "accumulated", kind=kind)) < 1e-9


class Branches(torch.nn.Module):
    """Two matrices, of which a forward uses one or both; and one that only a late forward uses."""

    def __init__(self) -> None:
        super().__init__()
        random = generator(11)
        self.a, self.b, self.late = (torch.nn.Parameter(torch.randn(30, 8, generator=random)) for _ in range(3))

    def forward(self, x: Tensor, use: str) -> Tensor:
        used = [getattr(self, name) for name in use.split()]
        return torch.stack([(x @ p.T).tanh().square().mean() for p in used]).sum()


def inputs(number: int, which: int) -> Tensor:
    return torch.randn(5, 8, generator=generator(number, which, 2))


def with_unused(kind: str, uses: list[list[str]]) -> tuple[bool, list[dict[str, Any]]]:
    """On a worker: train with what each step and rank uses. Equal replicas at the end, and after each step whether a
    parameter moved, what its counter and the size of its memory are."""
    model = wrapped(Branches(), find_unused_parameters=True)
    options = {"freeze_step": 4, "local_step_clipper": 1} if kind == "zeroone" else {"freeze_step": 4}
    optimizer = make(kind, model, **options)
    seen = []
    for number, use in enumerate(uses):
        before = {name: p.detach().clone() for name, p in model.module.named_parameters()}
        optimizer.zero_grad()
        model(inputs(number, rank()), use[rank() % len(use)]).backward()
        optimizer.step()
        memory = optimizer.exchange_state.memory()
        seen.append(
            {
                name: (
                    not torch.equal(before[name], p),
                    float(optimizer.state[p].get("step", 0)),
                    float(memory[name].norm()),
                )
                for name, p in model.module.named_parameters()
            }
        )
    return same_on_all_ranks(model), seen


@each_kind
def test_a_parameter_that_no_rank_uses_keeps_still(two: Pool, kind: str) -> None:
    """Its values, its momentum and what is owed to it; one that some rank uses moves on all."""
    uses = [["a b", "a b"]] * 6 + [["a", "a"]] * 2 + [["a", "a b"]] * 2 + [["a b", "a b"]]
    for equal, seen in two.run(__name__, "with_unused", kind=kind, uses=uses):
        assert equal
        for number, step_seen in enumerate(seen):
            assert step_seen["a"][0]
            assert step_seen["b"][0] == (number not in (6, 7))
            assert not step_seen["late"][0]
        assert seen[5]["b"][2] == seen[6]["b"][2] == seen[7]["b"][2] > 0
        assert seen[8]["b"][2] != seen[7]["b"][2]


@pytest.mark.parametrize("kind", ["adam", "lamb"])
def test_a_late_parameter_has_a_warm_up_of_its_own(two: Pool, kind: str) -> None:
    """Exactly averaged for as many steps as the others had, then compressed; the others go on meanwhile."""
    uses = [["a b", "a b"]] * 6 + [["a b late", "a b late"]] * 4 + [["a b late", "a b"]] * 3
    for equal, seen in two.run(__name__, "with_unused", kind=kind, uses=uses):
        assert equal
        assert [step_seen["late"][0] for step_seen in seen] == [False] * 6 + [True] * 7
        assert [step_seen["late"][2] > 0 for step_seen in seen] == [False] * 10 + [True] * 3
        assert all(step_seen["a"][0] for step_seen in seen)


def test_zeroone_adam_says_that_a_parameter_comes_too_late() -> None:
    model = wrapped(Branches(), find_unused_parameters=True)
    optimizer = make("zeroone", model, freeze_step=2)
    for number in range(3):
        optimizer.zero_grad()
        model(inputs(number, 0), "a b").backward()
        optimizer.step()
    optimizer.zero_grad()
    model(inputs(3, 0), "a b late").backward()
    with pytest.raises(RuntimeError, match=r"shape \[30, 8\].*first gradient after freeze_step=2.*freeze later"):
        optimizer.step()


def test_zeroone_adam_before_the_freeze_waits_for_a_step_that_shows_the_variance() -> None:
    """Steps 1, 2, 4 and 8 do: a parameter first used at step 5 starts at step 8."""
    model = wrapped(Branches(), find_unused_parameters=True)
    optimizer, moved = make("zeroone", model, freeze_step=8), []
    for number in range(1, 9):
        before = model.module.late.detach().clone()
        optimizer.zero_grad()
        model(inputs(number, 0), "a b late" if number >= 5 else "a b").backward()
        optimizer.step()
        moved.append(not torch.equal(before, model.module.late))
    assert moved == [False] * 7 + [True]


class Mixed(torch.nn.Module):
    """A complex parameter, a transposed one and a plain one."""

    def __init__(self) -> None:
        super().__init__()
        random = generator(12)
        self.z = torch.nn.Parameter(torch.randn(40, 3, dtype=torch.complex64, generator=random))
        self.t = torch.nn.Parameter(torch.randn(9, 40, generator=random).T)
        self.p = torch.nn.Parameter(torch.randn(40, generator=random))

    def forward(self, x: Tensor) -> Tensor:
        return (
            (x.to(torch.complex64) @ self.z).abs().sum() + (x @ self.t).square().mean() + (x @ self.p).tanh().sum()
        ) / 9


def test_complex_and_transposed_parameters_in_the_compressed_stage() -> None:
    """With the identity, as a model that holds their real parts contiguously."""

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            mixed = Mixed()
            self.z = torch.nn.Parameter(torch.view_as_real(mixed.z.detach()).clone())
            self.t = torch.nn.Parameter(mixed.t.detach().contiguous())
            self.p = torch.nn.Parameter(mixed.p.detach().clone())

        def forward(self, x: Tensor) -> Tensor:
            z = torch.complex(x @ self.z[..., 0], x @ self.z[..., 1])
            return (z.abs().sum() + (x @ self.t).square().mean() + (x @ self.p).tanh().sum()) / 9

    for kind in KINDS:
        models = [wrapped(Mixed()), wrapped(Plain())]
        assert not models[0].module.t.is_contiguous()
        optimizers = [make(kind, model, compressor="none", weight_decay=0.1) for model in models]
        for number in range(12):
            for model, optimizer in zip(models, optimizers, strict=True):
                step(model, optimizer, torch.randn(4, 40, generator=generator(number)))
        a, b = (
            torch.cat([(torch.view_as_real(p) if p.is_complex() else p).detach().reshape(-1) for p in m.parameters()])
            for m in models
        )
        assert torch.allclose(a, b, rtol=1e-4, atol=2e-4)  # atol: steps are of 1e-2, with sqrt(v) near zero somewhere


def half_width(kind: str) -> tuple[bool, list[str], float, float]:
    """On a worker: equal replicas, dtypes of what is kept, first and last loss of a bfloat16 model."""
    model = wrapped(Net(dtype=torch.bfloat16))
    optimizer = make(kind, model, lr=3e-3, local_step_clipper=1) if kind == "zeroone" else make(kind, model, lr=3e-3)
    losses = []
    for number in range(40):
        losses.append(step(model, optimizer, batch(number, rank(), torch.bfloat16)))
    kept = {str(v.dtype) for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)}
    return same_on_all_ranks(model), sorted(kept), losses[0], sum(losses[-5:]) / 5


@each_kind
def test_a_bfloat16_model_keeps_float32_states(two: Pool, kind: str) -> None:
    for equal, kept, first, last in two.run(__name__, "half_width", kind=kind):
        assert equal
        assert kept == ["torch.float32"]
        assert last < 0.5 * first


def test_zeroone_adam_does_not_lose_small_steps_of_half_width_parameters() -> None:
    """Steps of 1e-3 at parameters of 1, whose neighbours in bfloat16 are 0.004 and 0.008 away: the way is kept in
    float32, so that the parameters arrive where the float32 model does."""

    class Slope(torch.nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.p = torch.nn.Parameter(torch.ones(8, dtype=dtype))

        def forward(self) -> Tensor:
            return self.p.sum()

    ends = []
    for dtype in (torch.float32, torch.bfloat16):
        model = wrapped(Slope(dtype))
        optimizer = make(
            "zeroone", model, lr=1e-3, freeze_step=1, local_step_clipper=2, local_step_scaler=2, compressor="none"
        )
        for _ in range(61):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        ends.append(model.module.p[0].item())
    assert ends[0] == pytest.approx(1 - 61e-3, rel=1e-5)
    assert ends[1] == pytest.approx(ends[0], abs=0.004)


def test_no_element_moves_without_anything_to_move_it() -> None:
    """lr = 0: nothing moves in any stage, and the optimisers recover afterwards."""
    for kind in KINDS:
        model = wrapped(Net())
        optimizer = make(kind, model)
        run(model, optimizer, range(12))
        while kind == "zeroone" and not optimizer.synchronised:
            run(model, optimizer, [99])
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        before = parameters(model)
        if kind != "zeroone":  # which delivers what is still owed of the way
            run(model, optimizer, range(12, 20))
            assert torch.equal(before, parameters(model))
        for group in optimizer.param_groups:
            group["lr"] = 1e-3
        run(model, optimizer, range(20, 30))
        assert bool(parameters(model).isfinite().all())
        assert not torch.equal(before, parameters(model))
