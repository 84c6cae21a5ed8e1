"""What compressing costs, and when it pays: paired timings inside one interleaved run.

    make bench                       # encode + decode at W = 1, then step time at W = 2, unthrottled
    make bench QUICK=1
    python -m experiments.bench --link 1gbit --workers 4

The model is a transformer of 4.8 M parameters. In every round each variant takes one step, in rotated order; a ratio is
the median over rounds of (variant / plain DDP of the same round), with the 95 % interval of that median. Absolute times
on a shared machine mean little. Writes experiments/results/bench.json.
"""

import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import hooks
from compress import registry
from experiments.compare import RESULTS, follow, interruptible, started
from experiments.links import RATES, open_link
from experiments.tasks.charlm import Transformer
from experiments.train import end_with_standard_input

SYMBOLS, WIDTH, DEPTH, HEADS, LENGTH = 96, 256, 6, 4, 128
PLAIN = "plain DDP"
TORCH = {f"torch powersgd r{rank}": rank for rank in (1, 2, 4)}
OURS = {f"powersgd:rank={rank}": f"torch powersgd r{rank}" for rank in (1, 2, 4)}
"""Our variant -> torch's own that it is held against."""

MEMCPY_TARGETS = {
    "sign": 10, "topk:density=0.01,select=chunk": 8, "int8": 8, "fp16": 4, "bf16": 4,
    "powersgd:rank=1": 8, "powersgd:rank=2": 10, "powersgd:rank=4": 16,
}  # fmt: skip
"""Most that encode + decode may cost without optional kernels, in memcpys of the gradient."""
STEP_TARGETS = {"none": 1.03, "1gbit": 0.55, "100mbit": 0.12}
"""Most that a step may take against plain DDP at W = 2, by link."""


def variants(workers: int) -> dict[str, Callable[[DistributedDataParallel], Any]]:
    """Name -> how to attach it; what it returns is kept alive."""
    specs = [str(cls()) for cls in registry.values() if not cls.is_wrapper]
    specs += ["powersgd:rank=2", "powersgd:rank=4", "topk:density=0.01,select=chunk"]
    attach: dict[str, Callable[[DistributedDataParallel], Any]] = {PLAIN: lambda model: None}
    attach["torch fp16"] = lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    for name, rank in TORCH.items():
        attach[name] = partial(_attach_torch, rank=rank)
    for spec in specs:
        attach[spec] = partial(hooks.register, compressor=spec)
    return attach


def _attach_torch(model: DistributedDataParallel, rank: int) -> None:
    """Torch's own PowerSGD hook."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


class Bench:
    """All variants side by side in this process.

    Args:
        names: of the variants to run.
        backward_only: time backward alone (encode and decode are part of it), else the whole step.
    """

    def __init__(self, names: Sequence[str], backward_only: bool) -> None:
        attach = variants(dist.get_world_size())
        self.backward_only, self.models, self.kept = backward_only, {}, []
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.inputs = torch.randint(SYMBOLS, (1, LENGTH), generator=generator)
        for name in names:
            torch.manual_seed(0)
            # One bucket: torch's PowerSGD hook hangs on gloo with more.
            model = DistributedDataParallel(Transformer(SYMBOLS, WIDTH, DEPTH, HEADS, LENGTH), bucket_cap_mb=1000)
            self.kept.append(attach[name](model))
            self.models[name] = model
            for _ in range(4):  # past DDP's rebuild, the agreement, and the exact start of torch's hook
                self.step(name)

    def step(self, name: str) -> float:
        """Seconds of one step."""
        model = self.models[name]
        dist.barrier()
        begun = time.perf_counter()
        model.zero_grad(set_to_none=True)
        loss = model(self.inputs).flatten(0, -2).logsumexp(-1).mean()
        if self.backward_only:
            begun = time.perf_counter()
        loss.backward()
        return time.perf_counter() - begun

    def rounds(self, count: int, after: Callable[[int], object]) -> dict[str, list[float]]:
        """Seconds of each variant, round by round, in rotated order."""
        names = list(self.models)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for number in range(count):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                seconds[name].append(self.step(name))
            after(number)
        return seconds

    def memcpy(self, repeats: int = 21) -> float:
        """Median seconds to copy the gradient."""
        numel = sum(p.numel() for p in self.models[PLAIN].parameters())
        source, target, seconds = torch.ones(numel), torch.zeros(numel), []
        for _ in range(repeats):
            begun = time.perf_counter()
            target.copy_(source)
            seconds.append(time.perf_counter() - begun)
        return statistics.median(seconds)


@dataclass(frozen=True)
class Paired:
    """The median of paired values, with its 95 % interval by order statistics (no assumption on the noise)."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Paired":
        ordered = sorted(values)
        count = len(ordered)
        # The k-th smallest of n bounds the median with probability P(Binomial(n, 1/2) < k); 1.96 sd of it.
        reach = round(0.98 * count**0.5)
        middle = count / 2
        low, high = max(int(middle - reach), 0), min(int(middle + reach), count - 1)
        return cls(statistics.median(ordered), ordered[low], ordered[high])

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratios(seconds: dict[str, list[float]], name: str, base: str) -> Paired:
    """Paired ratio of two variants."""
    return Paired.of([a / b for a, b in zip(seconds[name], seconds[base], strict=True)])


def cost_table(seconds: dict[str, list[float]], memcpy: float) -> tuple[Table, list[dict[str, Any]]]:
    """Encode + decode in memcpys of the gradient."""
    table = Table(
        title=f"encode + decode at W = 1, in memcpys of the gradient ({memcpy * 1e3:.2f} ms)", title_justify="left"
    )
    for heading in ("variant", "x memcpy [95 %]", "target", ""):
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    rows = []
    for name in seconds:
        if name == PLAIN:
            continue
        extra = Paired.of([(a - b) / memcpy for a, b in zip(seconds[name], seconds[PLAIN], strict=True)])
        target = MEMCPY_TARGETS.get(name)
        met = "" if target is None else "met" if extra.low <= target else "missed"
        table.add_row(name, str(extra), "" if target is None else f"≤ {target}", met)
        rows.append({"variant": name, **asdict(extra), "target": target})
    return table, rows


def step_table(seconds: dict[str, list[float]], link: str, workers: int) -> tuple[Table, list[dict[str, Any]]]:
    """Step time against plain DDP and against torch's own hooks."""
    table = Table(title=f"step time, link {link}, W = {workers}", title_justify="left")
    for heading in ("variant", "ms", "x plain DDP [95 %]", "target", "", "x torch's PowerSGD [95 %]"):
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    rows = []
    for name in seconds:
        ratio = ratios(seconds, name, PLAIN)
        held = workers == 2 and name.split(":")[0] in ("sign", "topk", "powersgd")
        target = STEP_TARGETS.get(link) if held else None
        met = "" if target is None else "met" if ratio.low <= target else "missed"
        versus = ratios(seconds, name, OURS[name]) if OURS.get(name) in seconds else None
        milliseconds = statistics.median(seconds[name]) * 1e3
        table.add_row(
            name,
            f"{milliseconds:.1f}",
            str(ratio),
            "" if target is None else f"≤ {target}",
            met,
            "" if versus is None else str(versus),
        )
        rows.append(
            {
                "variant": name,
                "milliseconds": milliseconds,
                "versus_ddp": asdict(ratio),
                "target": target,
                "versus_torch": None if versus is None else asdict(versus),
            }
        )
    return table, rows


@click.command(help=__doc__)
@click.option("--link", type=click.Choice(list(RATES)), default="none", show_default=True)
@click.option("--workers", type=click.IntRange(min=2), default=2, show_default=True)
@click.option("--rounds", type=click.IntRange(min=5), help="Interleaved rounds [default: 60, quick 20].")
@click.option("--quick", is_flag=True, help="Fewer rounds and variants: about 2 minutes.")
@click.option("--variant", "names", multiple=True, help="Run only these, besides plain DDP; may be repeated.")
@click.option("--leashed", is_flag=True, hidden=True)
@click.option("--report", type=click.File("w"), hidden=True)
def main(
    link: str,
    workers: int,
    rounds: int | None,
    quick: bool,
    names: tuple[str, ...],
    leashed: bool,
    report: TextIO | None,
) -> None:
    rounds = rounds or (20 if quick else 60)
    every = list(variants(workers))
    unknown = [name for name in names if name not in every]
    if unknown:
        raise click.UsageError(f"unknown variant {unknown[0]!r}; known are {', '.join(every)}")
    fewer = [PLAIN, "torch fp16", *TORCH, "bf16", *OURS, "sign", "topk:density=0.01,select=chunk"]
    chosen = [PLAIN, *names] if names else fewer if quick else every
    torch.set_num_threads(1)
    if report is not None:
        if leashed:
            threading.Thread(target=end_with_standard_input, daemon=True).start()
        serve(chosen, rounds, report)
        return
    console = Console(width=120)
    result: dict[str, Any] = {"link": link, "workers": workers, "rounds": rounds, "torch": torch.__version__}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    bench = Bench(chosen, backward_only=True)
    bar = iter(track(range(rounds), "W = 1", console=Console(stderr=True)))
    seconds = bench.rounds(rounds, lambda _: next(bar, None))
    table, result["cost"] = cost_table(seconds, bench.memcpy())
    console.print(table)
    dist.destroy_process_group()
    del bench
    seconds = run_workers(link, workers, chosen, rounds)
    table, result["steps"] = step_table(seconds, link, workers)
    console.print(table)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "bench.json").write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"results: {RESULTS / 'bench.json'}")


def serve(names: Sequence[str], rounds: int, report: TextIO) -> None:
    """A worker: all variants, interleaved; rank 0 reports the seconds of the slowest rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    bench = Bench(names, backward_only=False)
    first = dist.get_rank() == 0

    def tell(event: dict[str, Any]) -> None:
        if first:
            report.write(json.dumps(event) + "\n")
            report.flush()

    seconds = bench.rounds(rounds, lambda number: tell({"kind": "round", "number": number}))
    for name in names:
        slowest = torch.tensor(seconds[name], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        tell({"kind": "seconds", "name": name, "seconds": slowest.tolist()})
    dist.destroy_process_group()


def run_workers(link_name: str, workers: int, names: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of each variant, round by round, on workers behind the link."""
    seconds: dict[str, list[float]] = {}
    bar = iter(track(range(rounds), f"W = {workers}, {link_name}", console=Console(stderr=True)))

    def tell(event: dict[str, Any]) -> None:
        if event["kind"] == "round":
            next(bar, None)
        else:
            seconds[event["name"]] = event["seconds"]

    with interruptible(), open_link(link_name, workers) as link, tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "events").touch()
        arguments = ["--report", str(folder / "events"), "--rounds", str(rounds), "--workers", str(workers)]
        arguments += [word for name in names if name != PLAIN for word in ("--variant", name)]
        with started(link, workers, arguments, folder, module="experiments.bench") as processes:
            follow(processes, folder, tell)
    return seconds


if __name__ == "__main__":
    sys.exit(main())
