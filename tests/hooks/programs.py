"""What the workers of the pools run: each function is called on every rank, and its result goes back to the test."""

import io
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hooks
from compress import AllReduce, Compressor, Context, State
from compress.requests import Replies, Request
from hooks.sharded import load_sharded, save_sharded

SHAPES = [(16, 8), (8,), (), (1, 40), (12, 12), (4, 3, 3, 3), (0, 3), (16, 8)]


class Fed(nn.Module):
    """A model whose gradient is what it is fed: loss = sum of p * g; None leaves a parameter out."""

    def __init__(self, shapes: list[Any] = SHAPES, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for number, shape in enumerate(shapes):
            generator = torch.Generator().manual_seed(number)
            self.register_parameter(f"p{number}", nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))

    def forward(self, gradients: list[Tensor | None]) -> Tensor:
        pairs = zip(self.parameters(), gradients, strict=True)
        products = [(p * g).sum().float() for p, g in pairs if g is not None]
        return torch.stack(products).sum()


def gradient(step: int, rank: int, number: int, shape: Any) -> Tensor:
    """Reproducible, different for each step, rank and parameter."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(10007 * step + 101 * rank + number))


def gradients(step: int, rank: int, shapes: list[Any] = SHAPES) -> list[Tensor | None]:
    return [gradient(step, rank, number, shape) for number, shape in enumerate(shapes)]


def backward(model: nn.Module, fed: list[Tensor | None]) -> list[Tensor | None]:
    """One backward; the synchronised gradients."""
    model.zero_grad(set_to_none=True)
    model(fed).backward()
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def steps(spec: str, count: int, ddp: Mapping[str, Any], unit_cap_mb: float = 25.0) -> list[list[Tensor | None]]:
    """The gradients after each of `count` steps."""
    model = DistributedDataParallel(Fed(), **ddp)
    state = hooks.register(model, spec, unit_cap_mb=unit_cap_mb)
    result = [backward(model, gradients(step, dist.get_rank())) for step in range(count)]
    state.close()
    return result


def statistics(spec: str) -> dict[str, Any]:
    """One step's telemetry, and what the formula says."""
    model = DistributedDataParallel(Fed())
    state = hooks.register(model, spec)
    backward(model, gradients(0, dist.get_rank()))
    formula = state.formula_bytes()
    last = state.stats.last
    state.close()
    return {
        "formula": formula,
        "wire": last.wire_bytes,
        "collectives": last.collectives,
        "dense": last.dense_bytes,
        "payload": last.payload_bytes,
        "seconds": (last.encode_seconds, last.communicate_seconds, last.decode_seconds),
    }


def accumulated(spec: str) -> bool:
    """Two micro-batches under no_sync give the gradient of their sum."""
    results = []
    for split in (False, True):
        model = DistributedDataParallel(Fed())
        state = hooks.register(model, spec)
        first, second = gradients(0, dist.get_rank()), gradients(1, dist.get_rank())
        if split:
            with model.no_sync():
                model(first).backward()
            model(second).backward()
        else:
            model([a + b for a, b in zip(first, second, strict=True)]).backward()  # type: ignore[operator]
        results.append([p.grad.clone() for p in model.parameters()])  # type: ignore[union-attr]
        state.close()
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def unused(spec: str) -> float:
    """A parameter that every rank uses only in every other step: relative loss of its gradient sum after draining."""
    shapes = [(12, 8), (10, 6)]
    model = DistributedDataParallel(Fed(shapes), find_unused_parameters=True)
    state = hooks.register(model, spec)
    wanted, got = torch.zeros(shapes[1]), torch.zeros(shapes[1])
    for step in range(80):
        fed = gradients(step, dist.get_rank(), shapes) if step < 20 else [torch.zeros(shape) for shape in shapes]
        if step % 2:
            fed[1] = None
        else:
            mean = fed[1].clone()  # type: ignore[union-attr]
            dist.all_reduce(mean)
            wanted += mean / dist.get_world_size()
        after = backward(model, fed)
        assert (after[1] is None) == (fed[1] is None)
        got += 0 if after[1] is None else after[1]
    state.close()
    return float((got - wanted).norm() / wanted.norm())


def odd_parameters(spec: str) -> list[float]:
    """Relative errors against the exact mean: transposed, channels-last, complex, double, bf16, tied parameters."""
    transposed = torch.randn(8, 24).t()
    channels_last = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    tensors = [transposed, channels_last, torch.randn(3, dtype=torch.complex64), torch.randn(5, 3).double()]
    tensors.append(torch.randn(6, 4).bfloat16())
    model = nn.Module()
    for number, tensor in enumerate(tensors):
        model.register_parameter(f"p{number}", nn.Parameter(tensor))
    model.again = model.p0
    parameters = list(model.parameters())
    model.forward = lambda fed: sum((p * g.conj()).sum().real.float() for p, g in zip(parameters, fed, strict=True))
    wrapped = DistributedDataParallel(model)
    state = hooks.register(wrapped, spec)
    fed = []
    for number, p in enumerate(parameters):
        g = gradient(1, dist.get_rank(), number, p.shape)
        fed.append((torch.complex(g, g.flip(0)) if p.is_complex() else g).to(p.dtype))
    wrapped(fed).backward()
    errors = []
    for p, g in zip(parameters, fed, strict=True):
        mean = torch.view_as_real(g).clone() if p.is_complex() else g.double()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        got = torch.view_as_real(p.grad) if p.is_complex() else p.grad.double()
        errors.append(float((got - mean).norm() / mean.norm()))
    state.close()
    return errors


def joined(spec: str) -> float:
    """Uneven inputs under Join: how far the last rank's parameters are from those of the exact sums over W."""
    shapes = [(12, 8), (9,)]
    model = DistributedDataParallel(Fed(shapes))
    start = [p.detach().clone() for p in model.parameters()]
    state = hooks.register(model, spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rank, peers = dist.get_rank(), dist.get_world_size()
    with model.join(divide_by_initial_world_size=True):
        for step in range(2 + rank):
            optimizer.zero_grad()
            model([torch.full(shape, float(step + 1)) for shape in shapes]).backward()
            optimizer.step()
    state.close()
    owed = sum((step + 1) * sum(1 for other in range(peers) if step < 2 + other) / peers for step in range(1 + peers))
    return max(float((p - q + owed).abs().max()) for p, q in zip(model.parameters(), start, strict=True))


def order(units: int) -> list[str]:
    """The kinds and sizes of all requests of five steps, with delays of each rank's own in backward."""
    seen: list[str] = []

    def record(perform: Callable[[Request], Replies]) -> Callable[[Request], Replies]:
        def recorded(request: Request) -> Replies:
            seen.append(f"{request.kind} {request.payload_bytes}")
            return perform(request)

        return recorded

    module = Fed([(16, 8)] * units)
    delays = iter(torch.rand(5 * units, generator=torch.Generator().manual_seed(dist.get_rank())).tolist())
    for p in module.parameters():
        p.register_hook(lambda g: time.sleep(next(delays) * 0.004))
    model = DistributedDataParallel(module, bucket_cap_mb=0.0002)
    state = hooks.register(model, "powersgd:rank=1", unit_cap_mb=0.0006, transport=record)
    for step in range(5):
        backward(model, gradients(step, dist.get_rank(), [(16, 8)] * units))
    state.close()
    return seen


def overlap() -> bool:
    """Whether unit 0 was exchanged while the last gradient was still held back in backward."""
    exchanged = threading.Event()

    def announce(perform: Callable[[Request], Replies]) -> Callable[[Request], Replies]:
        def announced(request: Request) -> Replies:
            replies = perform(request)
            exchanged.set()
            return replies

        return announced

    module = Fed([(16, 8)] * 4)
    model = DistributedDataParallel(module, bucket_cap_mb=0.0002)
    state = hooks.register(model, "powersgd:rank=1", unit_cap_mb=0.0006, transport=announce)
    for step in range(2):
        backward(model, gradients(step, dist.get_rank(), [(16, 8)] * 4))  # DDP rebuilds its buckets
    exchanged.clear()
    seen = []
    module.p0.register_hook(lambda g: seen.append(exchanged.wait(20)))
    # p0 comes last in backward: its gradient waits for the exchange of the first unit.
    backward(model, gradients(2, dist.get_rank(), [(16, 8)] * 4))
    state.close()
    return seen == [True]


@dataclass(frozen=True)
class Failing(Compressor):
    """Raises on rank 1 in its second step. Not registered: it is nobody's compressor."""

    name = "failing"

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Generator[Request, Replies, tuple[Tensor, State]]:
        if ctx.step == 1 and ctx.index == 1:
            raise ZeroDivisionError("no luck on this rank")
        (mean,) = yield AllReduce((x.clone(),))
        return mean, state

    def rounds(self, ctx: Context) -> list[Any]:
        return [(AllReduce, ctx.layout.dense_bytes)]


def failure() -> tuple[str, str, str, float]:
    """What each rank hears when rank 1 fails: from backward, as the kept cause, at the next use; seconds."""
    model = DistributedDataParallel(Fed())
    state = hooks.register(model, Failing(), timeout=60)
    backward(model, gradients(0, dist.get_rank()))
    started = time.monotonic()
    heard = []
    for step in (1, 2):
        try:
            backward(model, gradients(step, dist.get_rank()))
            heard.append("")
        except RuntimeError as error:
            heard.append(str(error))
    return heard[0], repr(state.error), heard[1], time.monotonic() - started


def absent() -> str:
    """What the others hear of a rank that does not come, with a short time-out."""
    module = Fed()
    # Without DDP, which has collectives of its own with a time-out of half an hour.
    state = hooks.HookState("sign", model=module, timeout=2)
    for step in range(2):
        module.zero_grad()
        module(gradients(step, dist.get_rank())).backward()
        if dist.get_rank() == 0 and step == 1:
            return ""
        try:
            hooks.reduce_gradients(module, state)
        except RuntimeError as error:
            return str(error)
    return f"nothing heard, {state.stats.steps} steps"


def disagreement(per_rank: list[dict[str, Any]]) -> str:
    """The error of ranks with different options, or "" if there is none."""
    chosen = dict(per_rank[dist.get_rank() % len(per_rank)])
    shapes = chosen.pop("shapes", SHAPES)
    # The group of DDP itself refuses different shapes, so the exchange is asked without it.
    module = Fed(shapes)
    state = hooks.HookState(chosen.pop("spec", "powersgd:rank=2"), model=module, **chosen)
    for p, g in zip(module.parameters(), gradients(0, 0, shapes), strict=True):
        p.grad = g
    try:
        hooks.reduce_gradients(module, state)
    except hooks.AgreementError as error:
        return str(error)
    finally:
        state.close()
    return ""


def resumed(spec: str, stop: int, ddp: Mapping[str, Any] | None = None) -> bool:
    """Whether stopping, saving, loading and going on gives the bits of never stopping."""
    rank = dist.get_rank()
    model = DistributedDataParallel(Fed(), **(ddp or {}))
    state = hooks.register(model, spec)
    for step in range(stop):
        backward(model, gradients(step, rank))
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    expected = [backward(model, gradients(step, rank)) for step in range(stop, stop + 3)]
    state.close()
    file.seek(0)
    again = DistributedDataParallel(Fed(), bucket_cap_mb=0.0002)
    continued = hooks.register(again, spec)
    continued.load_state_dict(torch.load(file, weights_only=True))
    got = [backward(again, gradients(step, rank)) for step in range(stop, stop + 3)]
    continued.close()
    return all(torch.equal(a, b) for x, y in zip(expected, got, strict=True) for a, b in zip(x, y, strict=True))  # type: ignore[arg-type]


def saved_and_owed(spec: str, count: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A state dict after some steps, and what is owed by parameter name."""
    model = DistributedDataParallel(Fed())
    state = hooks.register(model, spec)
    for step in range(count):
        backward(model, gradients(step, dist.get_rank()))
    saved = state.state_dict()
    names = {p: name for name, p in model.module.named_parameters()}
    owed = {names[p]: tensor for p, tensor in state.flush().items()}
    state.close()
    return saved, owed


def owed_after_loading(spec: str, state_dict: dict[str, Any]) -> dict[str, Tensor]:
    """What is owed after a checkpoint was loaded here."""
    module = Fed()
    state = hooks.HookState(spec, model=module)
    state.load_state_dict(state_dict)
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    state.exact = True  # learn the parameters without touching what is owed
    hooks.reduce_gradients(module, state)
    names = {p: name for name, p in module.named_parameters()}
    owed = {names[p]: tensor for p, tensor in state.flush().items()}
    state.close()
    return owed


def overflow(spec: str) -> tuple[bool, bool, int]:
    """An infinity on rank 1 in one unit: all gradients of that step non-finite here? nothing changed? steps skipped."""
    rank, results = dist.get_rank(), []
    skipped = 0
    noticed = True
    for disturbed in (False, True):
        model = DistributedDataParallel(Fed())
        state = hooks.register(model, spec, unit_cap_mb=0.0006)
        after = []
        for step in range(4):
            if step == 2 and disturbed:
                bad = gradients(99, rank)
                if rank == 1:
                    bad[4][3, 3] = torch.inf  # type: ignore[index]
                seen = backward(model, bad)
                noticed = not seen[4].isfinite().any()  # type: ignore[union-attr]
            after.append(backward(model, gradients(step, rank)))
        skipped = state.stats.skipped
        results.append(after)
        state.close()
    same = all(torch.equal(a, b) for x, y in zip(*results, strict=True) for a, b in zip(x, y, strict=True))
    return noticed, same, skipped


def manual(spec: str) -> bool:
    """Whether reduce_gradients gives DDP's bits."""
    rank = dist.get_rank()
    model, module = DistributedDataParallel(Fed()), Fed()
    state, own = hooks.register(model, spec), hooks.HookState(spec, model=module)
    same = True
    for step in range(2):
        expected = backward(model, gradients(step, rank))
        module.zero_grad()
        module(gradients(step, rank)).backward()
        hooks.reduce_gradients(module, own)
        same &= all(torch.equal(a, p.grad) for a, p in zip(expected, module.parameters(), strict=True))  # type: ignore[arg-type]
    state.close()
    own.close()
    return same


def switched() -> float:
    """Relative gap between what went in and what came out over changes of compressor, ending with an exact one."""
    model = DistributedDataParallel(Fed())
    state = hooks.register(model, "sign", unit_cap_mb=0.0006)
    wanted = [torch.zeros(shape) for shape in SHAPES]
    got = [torch.zeros(shape) for shape in SHAPES]
    for number, spec in enumerate(["sign", "powersgd:rank=1", "topk:density=0.1", "onebit", "none"]):
        if number:
            state.switch(spec)
        for step in range(2):
            fed = gradients(10 * number + step, dist.get_rank())
            for total, out, mean in zip(got, backward(model, fed), fed, strict=True):
                total += out
                dist.all_reduce(mean)
            for total, mean in zip(wanted, fed, strict=True):
                total += mean / dist.get_world_size()  # type: ignore[operator]
    state.checksum()
    state.close()
    gaps = [(a - b).norm() / b.norm() for a, b in zip(got, wanted, strict=True) if b.numel()]
    return float(max(gaps))


def drifted() -> str:
    """What checksum says when one element of the last rank's replica has changed."""
    model = DistributedDataParallel(Fed())
    state = hooks.register(model, "sign")
    backward(model, gradients(0, dist.get_rank()))
    if dist.get_rank() == dist.get_world_size() - 1:
        with torch.no_grad():
            model.module.p3[0, 7] += 1
    try:
        state.checksum()
    except hooks.ReplicaError as error:
        return str(error)
    finally:
        state.close()
    return ""


def scale_change(spec: str) -> bool:
    """Whether a jump of the loss scale by 1024 changes no bit of training, with grad_scaler given."""
    results = []
    for jump in (False, True):
        module = Fed()
        model = DistributedDataParallel(module)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10**6)
        state = hooks.register(model, spec, grad_scaler=scaler)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(6):
            if jump and step == 3:
                scaler.update(1024.0 * 1024)
            optimizer.zero_grad()
            scaler.scale(model(gradients(step, dist.get_rank()))).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append([p.detach().clone() for p in module.parameters()])
        state.close()
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def threads_left(count: int) -> tuple[int, int]:
    """Lane threads after making `count` states, half of them closed and half dropped."""
    before = threading.active_count()
    for number in range(count):
        model = DistributedDataParallel(Fed([(4, 4)]))
        state = hooks.register(model, "sign")
        backward(model, gradients(0, dist.get_rank(), [(4, 4)]))
        if number % 2:
            state.close()
        del model, state
    import gc

    gc.collect()
    deadline = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    return before, threading.active_count()


def saved_sharded(spec: str, path: str) -> bool:
    """Save into one folder for all ranks; whether a fresh state that loads it goes on with the same bits."""
    rank = dist.get_rank()
    model = DistributedDataParallel(Fed())
    state = hooks.register(model, spec)
    for step in range(3):
        backward(model, gradients(step, rank))
    save_sharded(state, path)
    expected = backward(model, gradients(3, rank))
    state.close()
    again = DistributedDataParallel(Fed())
    continued = hooks.register(again, spec)
    load_sharded(continued, path)
    got = backward(again, gradients(3, rank))
    continued.close()
    return all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))  # type: ignore[arg-type]


def loaded_elsewhere(spec: str, path: str) -> bool:
    """Whether ranks of another number load that folder and owe the same on all of them."""
    module = Fed()
    state = hooks.HookState(spec, model=module)
    load_sharded(state, path)
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    hooks.reduce_gradients(module, state)
    state.close()
    return all(p.grad.isfinite().all() for p in module.parameters()) and any(p.grad.any() for p in module.parameters())
