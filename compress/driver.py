"""Running exchanges: the only place with error feedback, finiteness and commit.

One worker's step of one unit is itself a generator of requests, so that a process group, the lockstep
simulation and anything else that can perform a collective run the very same lines.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from compress.compressor import Compressor, Context, Exchange, State
from compress.layout import UnitLayout
from compress.requests import Replies, Request
from compress.state import keep_unused, select

Result = TypeVar("Result")
Perform = Callable[[Request], Replies]
Load = Callable[[Tensor, Tensor | None], None]


def drive(exchange: Generator[Request, Replies, Result], perform: Perform) -> Result:
    """Run an exchange to its end; `perform` carries out each request (process group, price list, recorder)."""
    try:
        request = next(exchange)
        while True:
            request = exchange.send(perform(request))
    except StopIteration as done:
        return done.value
    finally:
        exchange.close()


@dataclass
class Carry:
    """What one worker keeps of one unit from step to step.

    Args:
        state: the compressor's.
        memory: the residuals kept, [d] in the arena's dtype, or None without error feedback.
        spare: the arena in which the next step is formed; becomes the memory when the step is committed.
        keeps: whether residuals are kept. If not, a memory there is (see `owe`) lasts for one step.
    """

    state: State
    memory: Tensor | None
    spare: Tensor
    keeps: bool = True

    def owe(self, total: Tensor) -> None:
        """Add `total`, [d], to what this worker owes; without error feedback it is delivered in the next step."""
        if self.memory is None:
            self.memory = torch.zeros_like(self.spare)
        self.memory.add_(total)

    @classmethod
    def start(cls, compressor: Compressor, ctx: Context, error_feedback: bool = True) -> "Carry":
        """A unit that owes nothing yet."""
        arena = torch.zeros(ctx.layout.numel, dtype=ctx.layout.dtype, device=ctx.device)
        keeps = error_feedback and compressor.keeps_memory
        return cls(compressor.init(ctx), arena if keeps else None, torch.empty_like(arena), keeps)


@dataclass(frozen=True)
class Outcome:
    """A finished exchange, not yet committed.

    Args:
        mean: the estimate of the mean over workers, [d], equal on all of them; NaN where not `finite`.
        residual: what this worker did not get across, [d]; it is `carry.spare`.
        state: the compressor's new state.
        finite: whether input and result were finite on all workers (a 0-d bool tensor on a device).
        used: which slots were used by any worker, bool [slots], or None if it was not asked.
    """

    mean: Tensor
    residual: Tensor
    state: State
    finite: bool | Tensor
    used: Tensor | None


def all_finite(x: Tensor) -> bool | Tensor:
    """Whether every element is finite: a bool on CPU, a 0-d bool tensor elsewhere (no synchronisation)."""
    if x.device.type == "cpu":
        # A sum is the cheapest pass that no NaN or infinity survives; only an overflow needs the second look.
        return bool(x.sum().isfinite()) or bool(x.isfinite().all())
    return x.isfinite().all()


def exchange_unit(
    compressor: Compressor, load: Load, carry: Carry, ctx: Context, used: Tensor | None = None
) -> Generator[Request, Replies, Outcome]:
    """One worker's step of one unit. Changes nothing but `carry.spare`; see `commit`.

    Args:
        load: `load(out, memory)` writes the local gradient (plus `memory` unless None) into `out`, [d].
        used: which slots took part in this worker's backward, fp32 [slots] of 0 and 1, if that can vary.

    The first request also carries whether this worker's input is finite. On CPU a non-finite input ends the
    exchange after that request on all workers alike; on a device it goes on and the result is replaced.
    """
    x, state = carry.spare, carry.state
    if compressor.prepares:
        load(x, None)
        x, state = compressor.prepare(x, state, ctx)
        if carry.memory is not None:
            x.add_(carry.memory)
    else:
        load(x, carry.memory)
    finite = all_finite(x)
    flag = torch.as_tensor(finite, device=ctx.device).logical_not().float().reshape(1)
    exchange = compressor.exchange(x, state, ctx)
    try:
        request = next(exchange)
        replies, agreed = request.without_control(
            (yield request.with_control(flag if used is None else torch.cat((flag, used))))
        )
        used = None if used is None else agreed[1:] > 0
        finite = agreed[0] == 0
        if ctx.device.type == "cpu" and not finite:
            return Outcome(torch.full_like(x, torch.nan), x, carry.state, False, used)
        mean, state = yield from _resume(exchange, replies)
    except StopIteration as done:
        mean, state = done.value
        used = None  # nothing was asked for, so nothing was exchanged that could be thrown away
    finally:
        exchange.close()
    if mean.shape != x.shape or mean.dtype != x.dtype:
        raise TypeError(
            f"{compressor.name}: exchange must return the mean as {list(x.shape)} {x.dtype}, "
            f"got {list(mean.shape)} {mean.dtype}"
        )
    if isinstance(finite, Tensor) and finite.device.type != "cpu":
        finite = finite & all_finite(mean)
        return Outcome(torch.where(finite, mean, torch.nan), x, state, finite, used)
    if not all_finite(mean):
        return Outcome(torch.full_like(x, torch.nan), x, carry.state, False, used)
    return Outcome(mean, x, state, True, used)


def _resume(exchange: Exchange, replies: Replies) -> Exchange:
    """The rest of an exchange that waits for `replies`."""
    while True:
        try:
            request = exchange.send(replies)
        except StopIteration as done:
            return done.value
        replies = yield request


def commit(carry: Carry, outcome: Outcome, accept: bool | Tensor, layout: UnitLayout) -> None:
    """Make a step permanent, or leave no trace of it.

    All units of a step are committed together, with one `accept` that is equal on all workers: true only if
    every unit was finite, so that an optimiser which skips the step loses nothing.

    A slot that no worker used keeps its memory: DDP throws away what was exchanged for it.
    """
    if accept is False:
        return
    state, residual = outcome.state, outcome.residual
    if outcome.used is not None:
        state = keep_unused(outcome.used, state, carry.state, residual, carry.memory, layout)
    if not carry.keeps:
        carry.memory = None
    if isinstance(accept, Tensor):
        state = select(accept, state, carry.state, layout)
        if carry.memory is not None:
            torch.where(accept, residual, carry.memory, out=carry.memory)
    elif carry.memory is not None:
        carry.memory, carry.spare = residual, carry.memory
    carry.state = state
