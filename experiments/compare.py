"""The main job: train on real data over a slow link with each compressor, and say whether it pays.

    make compare                                        # 4 workers, 100 Mbit/s, about 7 minutes
    make compare QUICK=1
    python -m experiments.compare --link 1gbit --compressor none --compressor int8

Writes experiments/results/compare.json and compare.png.
"""

import contextlib
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

import compress
from compress import registry
from experiments.links import RATES, Link, open_link
from experiments.probe import FRAME_OVERHEAD
from experiments.report import BASELINE, Row, as_json, make_rows, plot, table, verdict
from experiments.tasks import TASKS
from experiments.train import check_name, import_plugins

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"
ROWS = {
    "mnist": (BASELINE, "bf16", "powersgd:rank=1", "powersgd:rank=2", "powersgd:rank=4", "sign", "topk:density=0.01"),
    "cifar10": (BASELINE, "bf16", "powersgd:rank=2", "powersgd:rank=4", "sign", "topk:density=0.01"),
    "charlm": (BASELINE, "bf16", "powersgd:rank=4", "sign", "onebit_adam", "zeroone_adam", "onebit_lamb"),
}
QUICK_ROWS = {
    "mnist": (BASELINE, "bf16", "powersgd:rank=2", "sign", "topk:density=0.01"),
    "cifar10": (BASELINE, "powersgd:rank=2", "sign"),
    "charlm": (BASELINE, "powersgd:rank=4", "onebit_adam"),
}
SECONDS_WITHOUT_NEWS = 180.0
"""If no worker has anything to tell for so long, the run is given up."""


class WorkerFailed(RuntimeError):
    """A worker ended with an error, or nothing was heard for too long."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM ends the run like Ctrl-C, so that namespaces are cleaned up."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def free_port() -> int:
    """A TCP port that is free on loopback now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def started(
    link: Link, workers: int, arguments: Sequence[str], folder: Path, module: str = "experiments.train"
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The workers, each running `module` where the link wants it; killed when the context ends."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "MASTER_ADDR": link.address,
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(workers),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": link.interface,
    }
    command = [sys.executable, "-m", module, "--leashed", *arguments]
    processes = []
    try:
        for worker in range(workers):
            with (folder / f"worker{worker}.log").open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        link.command(worker, command),
                        env={**environment, "RANK": str(worker), "LOCAL_RANK": str(worker)},
                        stdin=subprocess.PIPE,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate(timeout=20)


def follow(
    processes: Sequence["subprocess.Popen[bytes]"], folder: Path, tell: Callable[[dict[str, Any]], None]
) -> None:
    """Pass the events of rank 0 on until all workers are done.

    Raises:
        WorkerFailed: one ended with an error (its last words are in the message), or no event came for long.
    """
    heard = time.monotonic()
    with (folder / "events").open() as events:
        while True:
            finished = [process.poll() for process in processes]
            while line := events.readline():
                heard = time.monotonic()
                tell(json.loads(line))
            failed = [worker for worker, code in enumerate(finished) if code]
            if failed:
                words = (folder / f"worker{failed[0]}.log").read_text(errors="replace").strip().splitlines()[-12:]
                raise WorkerFailed(f"worker {failed[0]} ended with {finished[failed[0]]}:\n" + "\n".join(words))
            if all(code == 0 for code in finished):
                return
            if time.monotonic() - heard > SECONDS_WITHOUT_NEWS:
                raise WorkerFailed(f"nothing heard from the workers for {SECONDS_WITHOUT_NEWS:g} s")
            time.sleep(0.05)


def run_workers(
    link: Link, workers: int, names: Sequence[str], seeds: Sequence[int], steps: int, arguments: Sequence[str]
) -> list[dict[str, Any]]:
    """All rows on all workers, with a progress bar for each; the events told by rank 0."""
    told: list[dict[str, Any]] = []
    columns = (TextColumn("{task.description:24}"), BarColumn(), TextColumn("{task.fields[news]}"), TimeElapsedColumn())
    with tempfile.TemporaryDirectory() as scratch, Progress(*columns, console=Console(stderr=True)) as bars:
        folder = Path(scratch)
        (folder / "events").touch()
        bar = {name: bars.add_task(name, total=steps * len(seeds), news="", start=False) for name in names}
        done = dict.fromkeys(names, 0)

        def tell(event: dict[str, Any]) -> None:
            told.append(event)
            if event["kind"] == "progress":
                name = event["name"]
                bars.start_task(bar[name])
                completed = done[name] * steps + event["steps"]
                bars.update(bar[name], completed=completed, news=f"accuracy {event['accuracy']:.1%}")
            elif event["kind"] == "run":
                done[event["name"]] += 1
                if done[event["name"]] == len(seeds):
                    bars.stop_task(bar[event["name"]])

        with started(link, workers, [*arguments, "--report", str(folder / "events")], folder) as processes:
            follow(processes, folder, tell)
    return told


@click.command(help=__doc__)
@click.option(
    "--compressor", "names", multiple=True, metavar="SPEC", help="A row; may be repeated [default: the task's]."
)
@click.option("--all", "everything", is_flag=True, help="Every registered compressor.")
@click.option("--plugin", multiple=True, metavar="MODULE", help="Import a module that registers compressors.")
@click.option("--task", "task_name", type=click.Choice(list(TASKS)), default="mnist", show_default=True)
@click.option("--data", help="Folder with the task's data, where it needs one.")
@click.option("--link", "link_name", type=click.Choice(list(RATES)), default="100mbit", show_default=True)
@click.option("--workers", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), help="Training steps [default: the task's].")
@click.option("--seed", "seeds", type=int, multiple=True, default=(0,), show_default=True, help="May be repeated.")
@click.option("--quick", is_flag=True, help="Fewer steps and rows: under 2 minutes.")
def main(
    names: tuple[str, ...],
    everything: bool,
    plugin: tuple[str, ...],
    task_name: str,
    data: str | None,
    link_name: str,
    workers: int,
    steps: int | None,
    seeds: tuple[int, ...],
    quick: bool,
) -> None:
    import_plugins(plugin)
    if everything:
        names = tuple(str(cls()) for cls in registry.values() if not cls.is_wrapper)
    names = names or (QUICK_ROWS if quick else ROWS)[task_name]
    task = TASKS[task_name]
    try:
        names = tuple(dict.fromkeys(check_name(name) for name in names))
        parameters = sum(parameter.numel() for parameter in task(data).model().parameters())
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    steps = steps or task.steps[quick]
    console = Console(width=140)
    arguments = ["--probe", "--task", task_name, "--steps", str(steps)]
    arguments += [word for name in names for word in ("--compressor", name)]
    arguments += [word for seed in seeds for word in ("--seed", str(seed))]
    arguments += [word for module in plugin for word in ("--plugin", module)]
    arguments += ["--data", data] if data else []
    with interruptible(), open_link(link_name, workers) as link:
        console.print(f"{task.title} ({parameters:,} parameters); {workers} workers; link: {link.describe()}")
        if link.counted:
            arguments += ["--interface", link.interface]
        elif link.rate is not None:
            arguments += ["--simulated-rate", str(link.rate)]
        try:
            events = run_workers(link, workers, names, seeds, steps, arguments)
        except WorkerFailed as failure:
            console.print(Text(str(failure), style="red"))
            raise SystemExit(1) from failure
        except KeyboardInterrupt:
            raise SystemExit(130) from None
    runs = [event for event in events if event["kind"] == "run"]
    measured = next((event for event in events if event["kind"] == "probe"), None)
    rows = make_rows(runs, workers, measured["collective_bytes"] if measured else {})
    console.print("\n".join(describe(runs, measured, link)))
    console.print(table(rows, f"{task_name}, {link_name}, {workers} workers, {steps} steps"))
    console.print(verdict(rows, link_in_words(link_name, link, measured)))
    save(rows, runs, measured, task_name, link_name, link, workers)
    console.print(f"results: {RESULTS / 'compare.json'}, plot: {RESULTS / 'compare.png'}")


def describe(runs: Sequence[dict[str, Any]], measured: dict[str, Any] | None, link: Link) -> list[str]:
    """What must be known to read the table."""
    if measured is None:
        return []
    dense, attained = measured["dense_seconds"], measured["bits_per_second"]
    compute = statistics.median(run["compute_seconds"] for run in runs)
    factor = dense / compute
    lines = [
        f"probe: a dense all-reduce takes {dense * 1e3:.0f} ms ({attained / 1e6:.1f} Mbit/s sent by each worker), the "
        f"computation of a step {compute * 1e3:.0f} ms: "
        + (
            f"communication is {factor:.0f} times the computation, as in the networks that this library is for"
            if factor >= 10
            else f"communication is {factor:.1f} times the computation"
        )
    ]
    if measured["collective_bytes"]:
        each = ", ".join(f"{kind} {count:,.0f}" for kind, count in measured["collective_bytes"].items())
        lines.append(
            "wire: the interface's own counter, headers included; expected: formula + "
            f"{FRAME_OVERHEAD:.1%} frame headers and acknowledgements + bytes per collective, as probed: {each}"
        )
    return lines


def link_in_words(link_name: str, link: Link, measured: dict[str, Any] | None) -> str:
    """The link's name, and what it carries where that is far from it: few machines do 10 Gbit/s in software."""
    if measured is None or link.rate is None or measured["bits_per_second"] > 0.8 * link.rate:
        return link_name
    return f"{link_name}, of which this machine attains {measured['bits_per_second'] / 1e6:,.0f} Mbit/s"


def save(
    rows: Sequence[Row],
    runs: Sequence[dict[str, Any]],
    measured: dict[str, Any] | None,
    task_name: str,
    link_name: str,
    link: Link,
    workers: int,
) -> None:
    """Write the results file and the plot."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    content = as_json(
        rows,
        task=task_name,
        link=link_name,
        link_kind=link.kind,
        probe=measured,
        workers=workers,
        versions={
            "gradwire": compress.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        runs=list(runs),
    )
    (RESULTS / "compare.json").write_text(json.dumps(content, indent=1) + "\n")
    plot(rows, runs, f"{task_name}, {link_name}, {workers} workers", RESULTS / "compare.png")


if __name__ == "__main__":
    main()
