"""Small models, data and loops that the tests of the optimisers share, here and in worker processes."""

import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import hooks

KINDS: dict[str, Callable[..., Any]] = {
    "adam": hooks.OneBitAdam,
    "lamb": hooks.OneBitLamb,
    "zeroone": hooks.ZeroOneAdam,
}

BATCH = 6


def generator(*key: int) -> torch.Generator:
    """Numbers that depend on the key alone."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(key).generate_state(1)[0]))


class Net(torch.nn.Module):
    """A net with matrices, vectors and a scalar; more than one block of the sign codec."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32, width: int = 40) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(5, width), torch.nn.Linear(width, 60)
        self.gain = torch.nn.Parameter(torch.ones(()))
        random = generator(seed, 99)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim():
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=random))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return (self.gain * self.second(self.first(x).tanh())).square().mean(1)


class Steady(torch.nn.Module):
    """Gradients of a settled size, of which no element ever exceeds the warm-up's by much: |c| between 0.5 and 2,
    plus noise and a pull towards zero."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        shapes = [(40, 60), (60,), (), (300,)]
        random = generator(7)
        self.tensors = torch.nn.ParameterList(
            [torch.nn.Parameter(0.3 * torch.randn(s, generator=random)) for s in shapes]
        )
        signs = [torch.randn(s, generator=random).sign() for s in shapes]
        self.slopes = [(sign * (0.5 + 1.5 * torch.rand(sign.shape, generator=random))).to(dtype) for sign in signs]
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        noise = 0.2 * x.tanh().sum(1)
        losses = [
            (p * c).sum() * (1 + noise) + 0.05 * p.square().sum()
            for p, c in zip(self.tensors, self.slopes, strict=True)
        ]
        return torch.stack(losses).sum(0)


def batch(step: int, rank: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(BATCH, 5, generator=generator(step, rank)).to(dtype)


def rank() -> int:
    return dist.get_rank()


def wrapped(model: torch.nn.Module, **options: Any) -> DDP:
    return DDP(model, **options)


def make(kind: str, model: DDP, **options: Any) -> Any:
    """An optimiser that freezes after three steps; 0/1 Adam with steps of every sort before that."""
    defaults: dict[str, Any] = {"lr": 1e-2, "freeze_step": 3, "unit_cap_mb": 0.006}
    if kind == "zeroone":
        defaults |= {"freeze_step": 6, "variance_scaler": 1, "local_step_scaler": 3, "local_step_clipper": 4}
    return KINDS[kind](model, **(defaults | options))


def step(model: DDP, optimizer: Any, x: Tensor, factor: float = 1.0) -> float:
    optimizer.zero_grad()
    loss = model(x).mean()
    (loss * factor).backward()
    optimizer.step()
    return loss.item()


def run(model: DDP, optimizer: Any, steps: Iterable[int], dtype: torch.dtype = torch.float32) -> None:
    for number in steps:
        step(model, optimizer, batch(number, rank(), dtype))


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All elements in one vector; complex ones as pairs."""
    return torch.cat([(torch.view_as_real(t) if t.is_complex() else t).detach().double().reshape(-1) for t in tensors])


def parameters(model: torch.nn.Module) -> Tensor:
    return flat(model.parameters())


def same_on_all_ranks(model: torch.nn.Module) -> bool:
    """Whether this rank's parameters are rank 0's, bit for bit."""
    mine = parameters(model)
    theirs = mine.clone()
    dist.broadcast(theirs, 0)
    verdict = torch.tensor(float(torch.equal(mine, theirs)))
    dist.all_reduce(verdict, dist.ReduceOp.MIN)
    return bool(verdict)


def contents(optimizer: Any) -> dict[str, Any]:
    """Everything an optimiser has, flattened: path -> value."""
    found: dict[str, Any] = {}

    def visit(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                visit(f"{path}/{key}", inner)
        elif isinstance(value, (list, tuple)):
            for number, inner in enumerate(value):
                visit(f"{path}/{number}", inner)
        else:
            found[path] = value

    visit("", optimizer.state_dict())
    return found


def differences(a: dict[str, Any], b: dict[str, Any], but: Sequence[str] = ()) -> list[str]:
    """Paths at which two optimisers differ in a bit."""
    wrong = []
    for path in sorted(a.keys() | b.keys()):
        if any(path.endswith(each) for each in but):
            continue
        x, y = a.get(path, "absent"), b.get(path, "absent")
        equal = torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x is y or x == y
        if not equal:
            wrong.append(path)
    return wrong


def saved(*things: Any) -> bytes:
    stream = io.BytesIO()
    torch.save([thing.state_dict() for thing in things], stream)
    return stream.getvalue()


def loaded(content: bytes) -> list[Any]:
    return torch.load(io.BytesIO(content), weights_only=True)
