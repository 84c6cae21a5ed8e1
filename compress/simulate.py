"""W workers in one process, in lockstep: exact, deterministic, milliseconds.

Every worker's exchange advances to its next request; the requests are compared, carried out together, and
answered. A worker that asks for something else than its peers is an error that says so, not a deadlock.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from compress.compressor import Compressor, Context
from compress.driver import Carry, Outcome, commit, exchange_unit
from compress.layout import TensorSpec, UnitLayout
from compress.options import parse
from compress.requests import AllGather, AllReduce, AllToAll, Replies, Request, Traffic
from compress.state import server_memory

Result = TypeVar("Result")


class LockstepError(RuntimeError):
    """Workers asked for different collectives in the same round."""


def mean_in_order(tensors: Sequence[Tensor]) -> Tensor:
    """The mean as an all-reduce gives it: summed in order; half-width tensors are divided first."""
    if tensors[0].element_size() < 4:
        tensors = [tensor / len(tensors) for tensor in tensors]
        return sum(tensors[1:], tensors[0].clone())
    return sum(tensors[1:], tensors[0].clone()).div_(len(tensors))


def perform_together(requests: Sequence[Request]) -> list[Replies]:
    """Carry out one collective for all workers; the replies in the order of the workers.

    Raises:
        LockstepError: the requests differ in kind, axis, shapes or dtypes.
    """
    for worker, request in enumerate(requests):
        if _describe(request) != _describe(requests[0]):
            raise LockstepError(
                f"worker {worker} asked for {_describe(request)} where worker 0 asked for {_describe(requests[0])}"
            )
    columns = list(zip(*(request.parts for request in requests), strict=True))
    if isinstance(requests[0], AllReduce):
        means = [mean_in_order(column) for column in columns]
        return [tuple(mean.clone() for mean in means) for _ in requests]
    if isinstance(requests[0], AllGather):
        return [tuple(torch.stack(column) for column in columns) for _ in requests]
    if isinstance(requests[0], AllToAll):
        return [
            tuple(torch.stack([t[worker] for t in column]) for column in columns) for worker in range(len(requests))
        ]
    raise TypeError(f"unknown kind of request: {type(requests[0]).__name__}")


def _describe(request: Request) -> str:
    tensors = ", ".join(f"{list(part.shape)} {str(part.dtype).removeprefix('torch.')}" for part in request.parts)
    return f"{request.kind} on {request.axis!r} of ({tensors})"


def lockstep(
    exchanges: Sequence[Generator[Request, Replies, Result]], traffic: Sequence[Traffic] | None = None
) -> list[Result]:
    """Run one exchange per worker to the end, round by round.

    Raises:
        LockstepError: workers differ in what they ask for, or in when they are done.
    """
    results: dict[int, Result] = {}
    replies: list[Any] = [None] * len(exchanges)
    while True:
        requests: list[Request] = []
        for worker, exchange in enumerate(exchanges):
            try:
                requests.append(exchange.send(replies[worker]))
            except StopIteration as done:
                results[worker] = done.value
        if len(results) == len(exchanges):
            return [results[worker] for worker in range(len(exchanges))]
        if results:
            raise LockstepError(f"workers {sorted(results)} were done while others asked for {_describe(requests[0])}")
        if traffic is not None:
            for meter, request in zip(traffic, requests, strict=True):
                meter.count(request, len(exchanges))
        replies = list(perform_together(requests))


class Simulation:
    """W workers that train one exchange unit.

    Args:
        compressor: a compressor or its spec.
        layout: the unit, or the shapes of its parameters.
        workers: W >= 1.
        seed: shared by the workers.
        error_feedback: keep residuals as memory.
        dtype: of the arena, float32 or float64; used when `layout` is given as shapes.

    Attributes:
        carries: each worker's memory and state.
        traffic: what each worker has sent so far.
        step_number: steps committed so far.
    """

    def __init__(
        self,
        compressor: Compressor | str,
        layout: UnitLayout | Sequence[Sequence[int]],
        workers: int = 2,
        *,
        seed: int = 0,
        error_feedback: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        self.compressor = parse(compressor) if isinstance(compressor, str) else compressor
        if not isinstance(layout, UnitLayout):
            specs = [TensorSpec(f"p{number}", tuple(shape)) for number, shape in enumerate(layout)]
            layout = UnitLayout.build(specs, self.compressor.place, dtype)
        self.layout, self.workers, self.seed, self.step_number = layout, workers, seed, 0
        self.carries = [Carry.start(self.compressor, self.context(worker), error_feedback) for worker in range(workers)]
        self.traffic = [Traffic() for _ in range(workers)]

    def context(self, worker: int) -> Context:
        """What that worker's next exchange is told."""
        return Context(self.layout, self.workers, worker, self.step_number, self.seed)

    def step(self, gradients: Sequence[Tensor], used: Sequence[Tensor] | None = None) -> list[Outcome]:
        """Exchange one gradient per worker, each [d] in the order of the arena, and commit.

        Returns:
            Each worker's outcome; `.mean` is what it received.

        Raises:
            LockstepError: workers asked for different things.
        """
        if len(gradients) != self.workers:
            raise ValueError(f"expected {self.workers} gradients, one per worker, got {len(gradients)}")

        def loader(gradient: Tensor) -> Any:
            def load(out: Tensor, memory: Tensor | None) -> None:
                out.copy_(gradient) if memory is None else torch.add(gradient, memory, out=out)

            return load

        outcomes = lockstep(
            [
                exchange_unit(
                    self.compressor,
                    loader(gradient.to(self.layout.dtype)),
                    self.carries[worker],
                    self.context(worker),
                    None if used is None else used[worker],
                )
                for worker, gradient in enumerate(gradients)
            ],
            self.traffic,
        )
        accept = all(outcome.finite for outcome in outcomes)
        for carry, outcome in zip(self.carries, outcomes, strict=True):
            commit(carry, outcome, accept, self.layout)
        self.step_number += accept
        return outcomes

    def owed(self) -> Tensor:
        """What has not been delivered yet, [d]: the mean of the workers' memories plus the server memory."""
        memories = [carry.memory for carry in self.carries if carry.memory is not None]
        owed = server_memory([carry.state for carry in self.carries], self.layout)
        return owed + sum(memories) / self.workers if memories else owed


@dataclass(frozen=True)
class SimulationResult:
    """What `simulate` returns.

    Args:
        means: what the workers received at each step, [steps, d].
        simulation: the workers as they are after the last step.
    """

    means: Tensor
    simulation: Simulation


def simulate(
    compressor: Compressor | str,
    gradients: Tensor | Sequence[Any],
    *,
    shapes: Sequence[Sequence[int]] | None = None,
    seed: int = 0,
    error_feedback: bool = True,
) -> SimulationResult:
    """Exchange given gradients step after step.

    Args:
        compressor: a compressor or its spec.
        gradients: [steps, workers, ...]; the last axes are flattened to the d elements of the unit.
        shapes: the parameters' shapes, together d elements; one vector of d unless given. The arena, and so
            the result, is in the order of `UnitLayout.build`.

    Raises:
        ValueError: the gradients are not [steps, workers, d].
    """
    values = torch.as_tensor(gradients, dtype=torch.float64 if _is_double(gradients) else torch.float32)
    if values.dim() < 3:
        raise ValueError(f"gradients must be [steps, workers, elements…], got {list(values.shape)}")
    values = values.flatten(2)
    simulation = Simulation(
        compressor,
        [(values.shape[2],)] if shapes is None else shapes,
        values.shape[1],
        seed=seed,
        error_feedback=error_feedback,
        dtype=values.dtype,
    )
    means = [simulation.step(list(step))[0].mean for step in values]
    return SimulationResult(torch.stack(means), simulation)


def _is_double(gradients: Any) -> bool:
    return isinstance(gradients, Tensor) and gradients.dtype == torch.float64
