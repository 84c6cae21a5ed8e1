"""Train one task with one or more compressors, one after the other: the script of every worker.

    torchrun --nproc-per-node 4 -m experiments.train --compressor powersgd:rank=4
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29400 -m experiments.train --compressor sign

Back end: nccl where CUDA is there, gloo otherwise.
"""

import importlib
import json
import os
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, TextIO

import click
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hooks
from compress import Request, parse
from compress.requests import Replies
from experiments.links import simulated
from experiments.probe import Transport, probe, settled_bytes
from experiments.tasks import TASKS, Task

OPTIMISERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "onebit_adam": hooks.OneBitAdam,
    "zeroone_adam": hooks.ZeroOneAdam,
    "onebit_lamb": hooks.OneBitLamb,
}
"""Rows that are not a compressor of gradients but an optimiser with its own hook."""

WARM_UP_SHARE = 0.2
"""Share of the steps in which these optimisers average exactly."""

DEFAULT = ("none",)


@dataclass
class Checkpoint:
    """The model on the test set, in the middle of training.

    Args:
        step: steps taken.
        seconds: spent in training steps so far.
        accuracy: share of the test set predicted right.
        loss: mean on the test set, nats.
    """

    step: int
    seconds: float
    accuracy: float
    loss: float


@dataclass
class Run:
    """One training run, as this worker saw it.

    Args:
        name: the compressor's spec, or the optimiser.
        steps: taken.
        step_seconds: median of a step's time.
        compute_seconds: median of forward and backward without any communication.
        wire_bytes_per_step: sent by this worker per step, by the interface's counter, headers included; None where
            there is no such counter.
        formula_bytes_per_step: by the compressor's formula, without headers.
        collectives_per_step: messages, by kind.
        parameters: of the model.
        history: on the test set.
    """

    name: str
    steps: int
    step_seconds: float = 0.0
    compute_seconds: float = 0.0
    wire_bytes_per_step: float | None = None
    formula_bytes_per_step: float = 0.0
    collectives_per_step: dict[str, float] = field(default_factory=dict)
    parameters: int = 0
    history: list[Checkpoint] = field(default_factory=list)


def check_name(name: str) -> str:
    """The row's canonical name.

    Raises:
        ValueError: it is neither a compressor's spec nor an optimiser.
    """
    return name if name in OPTIMISERS else str(parse(name))


class Tally:
    """A transport that counts the collectives of each kind.

    Args:
        inner: the transport that it wraps, or None for the real network.
    """

    def __init__(self, inner: Transport | None = None) -> None:
        self._inner = inner
        self.count: Counter[str] = Counter()

    def __call__(self, perform: Callable[[Request], Replies]) -> Callable[[Request], Replies]:
        below = self._inner(perform) if self._inner else perform

        def counted(request: Request) -> Replies:
            self.count[request.kind] += 1
            return below(request)

        return counted


class Trainer:
    """One model on one worker with one way to communicate.

    Args:
        task: what to train.
        name: a compressor's spec or a key of OPTIMISERS. "none" is plain DDP without a hook.
        steps: of the whole run.
        seed: of the model and the order of the data; equal on all workers.
        transport: of a simulated link, or None.
        timeout: seconds that a collective waits for a peer.
    """

    def __init__(
        self, task: Task, name: str, steps: int, seed: int, transport: Transport | None = None, timeout: float = 120.0
    ) -> None:
        torch.manual_seed(seed)
        self.task, self.steps, self.seed = task, steps, seed
        self.worker, self.workers = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        module = task.model().to(self.device) if self.device else task.model()
        self.model = DistributedDataParallel(module)
        self.state: hooks.HookState | None = None
        self.tally = Tally(transport)
        options: dict[str, Any] = {"seed": seed, "timeout": timeout, "transport": self.tally}
        if name in OPTIMISERS:
            rate = 3 * task.lr if name == "onebit_lamb" else task.lr
            freeze = {"freeze_step": max(round(WARM_UP_SHARE * steps), 2)}
            self.optimizer = OPTIMISERS[name](self.model, lr=rate, **freeze, **options)
            self.state = self.optimizer.exchange_state  # type: ignore[attr-defined]
        else:
            if name != "none" or transport is not None:
                self.state = hooks.register(self.model, name, **options)
            parameters = self.model.parameters()
            self.optimizer = (
                torch.optim.Adam(parameters, lr=task.lr)
                if task.adaptive
                else torch.optim.SGD(parameters, lr=task.lr, momentum=task.momentum)
            )
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer,
            max_lr=[group["lr"] for group in self.optimizer.param_groups],
            total_steps=steps + 1,
            pct_start=0.3,
            cycle_momentum=False,
            div_factor=10,
        )
        self.run = Run(name, 0, parameters=sum(parameter.numel() for parameter in module.parameters()))

    def step(self, number: int) -> float:
        """One step; returns its seconds."""
        inputs, targets = self.task.train_batch(number, self.worker, self.workers, self.seed)
        if self.device:
            inputs, targets = inputs.to(self.device), targets.to(self.device)
        started = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        self.task.loss(self.model(inputs), targets).backward()
        self.optimizer.step()
        self.schedule.step()
        if self.device:
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def computation(self, steps: int = 8) -> float:
        """Median seconds of forward and backward alone, on all workers at once."""
        seconds = []
        dist.barrier()
        with self.model.no_sync():
            for number in range(steps):
                inputs, targets = self.task.train_batch(number, self.worker, self.workers, self.seed)
                if self.device:
                    inputs, targets = inputs.to(self.device), targets.to(self.device)
                started = time.perf_counter()
                self.task.loss(self.model(inputs), targets).backward()
                seconds.append(time.perf_counter() - started)
        self.optimizer.zero_grad(set_to_none=True)
        return statistics.median(seconds)

    def evaluate(self) -> tuple[float, float]:
        """Accuracy and mean loss on the whole test set, each worker doing its part."""
        totals = self.task.evaluate(self.model.module, self.worker, self.workers)
        if self.device:
            totals = totals.float().to(self.device)
        dist.all_reduce(totals)
        correct, loss, count = totals.tolist()
        return correct / count, loss / count

    def train(self, interface: str | None, evaluations: int, progress: Callable[[Run], None]) -> Run:
        """All steps, with evaluations in between that count neither in time nor in bytes.

        Args:
            interface: whose counters to read, or None.
            evaluations: how many times to look at the test set.
            progress: called after each evaluation.
        """
        run, seconds = self.run, []
        sent: list[int] = []
        counted: list[int] = []
        run.compute_seconds = self.computation()
        every = max(self.steps // evaluations, 1)
        for begin in range(0, self.steps, every):
            end = min(begin + every, self.steps)
            dist.barrier()
            before = settled_bytes(interface) if interface else 0
            for number in range(begin, end):
                seconds.append(self.step(number))
            sent.append(settled_bytes(interface) - before if interface else 0)
            counted.append(end - begin)
            if begin == 0:  # what DDP and the hook settle at the beginning is not the exchange
                settling = Counter(self.tally.count)
                settled = self.state.stats.total.wire_bytes if self.state else 0.0
            run.steps = end
            accuracy, loss = self.evaluate()
            run.history.append(Checkpoint(run.steps, sum(seconds), accuracy, loss))
            run.step_seconds = statistics.median(seconds)
            progress(run)
        # Without the first steps, in which DDP and the hook also settle who exchanges what.
        if len(counted) > 1:
            sent, counted, messages = sent[1:], counted[1:], self.tally.count - settling
        else:
            messages, settled = self.tally.count, 0.0
        if interface:
            run.wire_bytes_per_step = sum(sent) / sum(counted)
        if self.state is None:
            run.formula_bytes_per_step = 2 * (self.workers - 1) / self.workers * 4 * run.parameters
            run.collectives_per_step = {"all_reduce": float(self._buckets())}
        else:
            stats = self.state.stats
            if run.name in OPTIMISERS:  # whose phases send different amounts
                run.formula_bytes_per_step = (stats.total.wire_bytes - settled) / sum(counted)
            else:
                run.formula_bytes_per_step = self.state.formula_bytes()
            run.collectives_per_step = {kind: number / sum(counted) for kind, number in messages.items()}
            self.state.close()
        return run

    def _buckets(self) -> int:
        """How many messages plain DDP makes of a gradient."""
        sizes = self.model._get_ddp_logging_data().get("rebuilt_bucket_sizes") or "one"
        return len(str(sizes).split(","))


def slowest(run: Run) -> Run:
    """The run with the times of the slowest worker and the bytes of the mean worker; collective."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, run)
    run.step_seconds = max(each.step_seconds for each in everyones)
    run.compute_seconds = max(each.compute_seconds for each in everyones)
    counted = [each.wire_bytes_per_step for each in everyones if each.wire_bytes_per_step is not None]
    run.wire_bytes_per_step = statistics.mean(counted) if counted else None
    run.formula_bytes_per_step = statistics.mean(each.formula_bytes_per_step for each in everyones)
    for number, checkpoint in enumerate(run.history):
        checkpoint.seconds = max(each.history[number].seconds for each in everyones)
    return run


def work(
    task: Task,
    names: Sequence[str],
    steps: int,
    seeds: Sequence[int],
    report: TextIO | None,
    interface: str | None,
    simulated_rate: float | None,
    evaluations: int,
    probed: bool,
) -> None:
    """A worker's whole life: every row and seed in turn; rank 0 reports each event as a line of JSON."""

    def tell(kind: str, **content: Any) -> None:
        if report is not None:
            report.write(json.dumps({"kind": kind, **content}) + "\n")
            report.flush()

    workers = dist.get_world_size()
    transport = None if simulated_rate is None else simulated(simulated_rate, workers)
    if probed and workers > 1:
        parameters = sum(parameter.numel() for parameter in task.model().parameters())
        tell("probe", **asdict(probe(parameters, interface, transport)))
    for name in names:
        for seed in seeds:
            trainer = Trainer(task, name, steps, seed, transport)
            run = trainer.train(
                interface,
                evaluations,
                lambda run: tell("progress", name=run.name, steps=run.steps, accuracy=run.history[-1].accuracy),
            )
            tell("run", seed=seed, **asdict(slowest(run)))
            del trainer


def import_plugins(modules: Sequence[str]) -> None:
    """Let modules register their compressors.

    Raises:
        click.UsageError: one cannot be imported.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise click.UsageError(
                f"--plugin {module}: {error}; give the name of a module in this folder or on PYTHONPATH"
            ) from error


def end_with_standard_input() -> None:
    """End this process when whoever started it has gone, even if killed."""
    while os.read(0, 1):
        pass
    os._exit(1)


@click.command(help=__doc__)
@click.option("--compressor", "names", multiple=True, default=DEFAULT, show_default=True, metavar="SPEC",
              help="Compressor or 1-bit optimiser; may be repeated.")  # fmt: skip
@click.option("--task", "task_name", type=click.Choice(list(TASKS)), default="mnist", show_default=True)
@click.option("--data", help="Folder with the task's data, where it needs one.")
@click.option("--steps", type=click.IntRange(min=1), help="Training steps [default: the task's].")
@click.option("--seed", "seeds", type=int, multiple=True, default=(0,), show_default=True)
@click.option("--evaluations", type=click.IntRange(min=1), default=15, show_default=True)
@click.option("--interface", help="Network interface whose byte counter is read.")
@click.option("--simulated-rate", type=float, help="Simulate a link of so many bits per second.")
@click.option("--probe", "probed", is_flag=True, help="Measure the link first.")
@click.option("--leashed", is_flag=True, help="End when standard input is closed.")
@click.option("--plugin", multiple=True, metavar="MODULE", help="Import a module that registers compressors.")
@click.option("--report", type=click.File("w"), default="-", help="Where rank 0 writes events as JSON lines.")
def main(
    names: tuple[str, ...],
    task_name: str,
    data: str | None,
    steps: int | None,
    seeds: tuple[int, ...],
    evaluations: int,
    interface: str | None,
    simulated_rate: float | None,
    probed: bool,
    leashed: bool,
    plugin: tuple[str, ...],
    report: TextIO,
) -> None:
    if leashed:
        threading.Thread(target=end_with_standard_input, daemon=True).start()
    import_plugins(plugin)
    try:
        names = tuple(check_name(name) for name in names)
        task = TASKS[task_name](data)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if not torch.cuda.is_available():
        torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    else:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(seconds=120))
    try:
        first = dist.get_rank() == 0
        work(
            task,
            names,
            steps or task.steps[0],
            seeds,
            report if first else None,
            interface,
            simulated_rate,
            evaluations,
            probed,
        )
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
