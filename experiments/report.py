"""From the runs to rows, a table, two plots and a verdict: pure functions of what was measured."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from experiments.probe import FRAME_OVERHEAD

BASELINE = "none"
TOLERANCE = 0.005
"""The target is plain DDP's final accuracy less half a point."""


@dataclass(frozen=True)
class Row:
    """One way to communicate.

    Args:
        compressor: spec or optimiser; "none" is plain DDP.
        accuracy: on the test set at the end, share.
        loss: on the test set at the end, nats.
        steps: taken.
        step_seconds: median of a step.
        step_ratio: that over plain DDP's, or None without it.
        wire_bytes_per_step: sent by one worker, by the interface's counter, headers included; None if not counted.
        formula_bytes_per_step: by the formula, without headers.
        ratio_vs_fp32, ratio_vs_bf16: how many times fewer formula bytes than a dense all-reduce.
        seconds_to_target: training seconds until plain DDP's final accuracy less half a point, or None if never.
        collectives_per_step: messages.
        expected_wire_bytes_per_step: what the interface should count: formula, frame headers, and the probed bytes
            per collective; None if not counted.
        loss_spread: largest less smallest final loss over seeds.
    """

    compressor: str
    accuracy: float
    loss: float
    steps: int
    step_seconds: float
    step_ratio: float | None
    wire_bytes_per_step: float | None
    formula_bytes_per_step: float
    ratio_vs_fp32: float | None
    ratio_vs_bf16: float | None
    seconds_to_target: float | None
    collectives_per_step: float
    expected_wire_bytes_per_step: float | None
    loss_spread: float


def _mean(values: Sequence[float]) -> float:
    return statistics.mean(values)


def seconds_to(target: float, runs: Sequence[dict[str, Any]]) -> float | None:
    """Mean training seconds of the runs until the accuracy was reached; None unless all reached it."""
    firsts = [next((each["seconds"] for each in run["history"] if each["accuracy"] >= target), None) for run in runs]
    reached = [first for first in firsts if first is not None]
    return _mean(reached) if len(reached) == len(runs) else None


def expected_wire_bytes(run: dict[str, Any], collective_bytes: Mapping[str, float]) -> float:
    """What the interface should count per step: the formula, the headers of full frames, and so many bytes more for
    each collective of a kind."""
    fixed = sum(number * collective_bytes.get(kind, 0.0) for kind, number in run["collectives_per_step"].items())
    return run["formula_bytes_per_step"] * (1 + FRAME_OVERHEAD) + fixed


def make_rows(
    runs: Sequence[dict[str, Any]], workers: int, collective_bytes: Mapping[str, float] | None = None
) -> list[Row]:
    """Rows, in the order of the runs, averaged over seeds.

    Args:
        collective_bytes: kind -> bytes of one collective beside payload and full frames, as probed.
    """
    names = list(dict.fromkeys(run["name"] for run in runs))
    of = {name: [run for run in runs if run["name"] == name] for name in names}
    final = {name: [run["history"][-1] for run in of[name]] for name in names}
    base = _mean([run["step_seconds"] for run in of[BASELINE]]) if BASELINE in of else None
    target = _mean([last["accuracy"] for last in final[BASELINE]]) - TOLERANCE if BASELINE in of else math.inf
    rows = []
    for name in names:
        step_seconds = _mean([run["step_seconds"] for run in of[name]])
        formula = _mean([run["formula_bytes_per_step"] for run in of[name]])
        dense = 2 * (workers - 1) / workers * 4 * of[name][0]["parameters"]
        losses = [last["loss"] for last in final[name]]
        wire = [run["wire_bytes_per_step"] for run in of[name] if run["wire_bytes_per_step"] is not None]
        rows.append(
            Row(
                compressor=name,
                accuracy=_mean([last["accuracy"] for last in final[name]]),
                loss=_mean(losses),
                steps=of[name][0]["steps"],
                step_seconds=step_seconds,
                step_ratio=step_seconds / base if base else None,
                wire_bytes_per_step=_mean(wire) if wire else None,
                formula_bytes_per_step=formula,
                ratio_vs_fp32=dense / formula if formula else None,
                ratio_vs_bf16=dense / 2 / formula if formula else None,
                seconds_to_target=seconds_to(target, of[name]),
                collectives_per_step=_mean([sum(run["collectives_per_step"].values()) for run in of[name]]),
                expected_wire_bytes_per_step=(
                    _mean([expected_wire_bytes(run, collective_bytes or {}) for run in of[name]]) if wire else None
                ),
                loss_spread=max(losses) - min(losses),
            )
        )
    return rows


def table(rows: Sequence[Row], title: str) -> Table:
    """The rows for people."""
    result = Table(title=title, title_justify="left")
    for heading, justify in (
        ("compressor", "left"),
        ("accuracy", "right"),
        ("loss", "right"),
        ("to target", "right"),
        ("ms/step", "right"),
        ("x DDP", "right"),
        ("wire kB/step", "right"),
        ("formula kB", "right"),
        ("wire/expected", "right"),
        ("vs fp32", "right"),
        ("vs bf16", "right"),
    ):
        result.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        result.add_row(
            row.compressor,
            f"{row.accuracy:.2%}",
            f"{row.loss:.4f}" + (f" ±{row.loss_spread / 2:.4f}" if row.loss_spread else ""),
            "never" if row.seconds_to_target is None else f"{row.seconds_to_target:.1f} s",
            f"{row.step_seconds * 1e3:.1f}",
            "" if row.step_ratio is None else f"{row.step_ratio:.3f}",
            "—" if row.wire_bytes_per_step is None else f"{row.wire_bytes_per_step / 1e3:.1f}",
            f"{row.formula_bytes_per_step / 1e3:.1f}",
            "—"
            if row.wire_bytes_per_step is None or not row.expected_wire_bytes_per_step
            else f"{row.wire_bytes_per_step / row.expected_wire_bytes_per_step:.3f}",
            "" if row.ratio_vs_fp32 is None else f"{row.ratio_vs_fp32:.1f}",
            "" if row.ratio_vs_bf16 is None else f"{row.ratio_vs_bf16:.1f}",
        )
    return result


def verdict(rows: Sequence[Row], link: str) -> str:
    """What to do on this link, in a paragraph."""
    by_name = {row.compressor: row for row in rows}
    if BASELINE not in by_name:
        return "Without the row `none` (plain DDP) there is nothing to compare with."
    plain = by_name[BASELINE]
    others = [row for row in rows if row.compressor != BASELINE]
    good = [row for row in others if row.accuracy >= plain.accuracy - 0.01]
    if not others:
        return "Only plain DDP was run: nothing to compare."
    if not good:
        return f"Don't compress on this link ({link}): no compressor came within a point of plain DDP's accuracy."
    best = min(
        good, key=lambda row: (math.inf if row.seconds_to_target is None else row.seconds_to_target, row.step_seconds)
    )
    gain = plain.step_seconds / best.step_seconds
    lost = [row.compressor for row in others if row not in good]
    aside = f" More than a point of accuracy was lost with {', '.join(lost)}." if lost else ""
    if gain < 1.05:
        return (
            f"Don't compress on this link ({link}): the best compressor within a point of plain DDP's accuracy, "
            f"{best.compressor}, takes {1 / gain:.2f} times plain DDP's time per step.{aside}"
        )
    words = (
        f"Compress on this link ({link}): {best.compressor} takes the same {plain.steps} steps {gain:.1f} times sooner "
        f"than plain DDP, sends {plain.formula_bytes_per_step / max(best.formula_bytes_per_step, 1):.0f} times fewer "
        f"bytes, and ends at {best.accuracy:.1%} against {plain.accuracy:.1%}."
    )
    if best.seconds_to_target is not None and plain.seconds_to_target is not None:
        words += (
            f" It reaches plain DDP's final accuracy less half a point after {best.seconds_to_target:.1f} s, plain DDP "
            f"after {plain.seconds_to_target:.1f} s."
        )
    half = by_name.get("bf16")
    if half is not None and half is not best:
        words += f" Against bf16, the baseline to beat, it is {half.step_seconds / best.step_seconds:.1f} times faster."
    return words + aside


def plot(rows: Sequence[Row], runs: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Accuracy against bytes, and against time, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for row in rows:
        left.scatter(row.formula_bytes_per_step / 1e3, row.accuracy * 100, label=row.compressor)
        run = next(run for run in runs if run["name"] == row.compressor)
        seconds, accuracy = zip(*((each["seconds"], each["accuracy"] * 100) for each in run["history"]), strict=True)
        right.plot(seconds, accuracy, marker=".", label=row.compressor)
    for axes, label in ((left, "kB sent per worker and step"), (right, "training seconds")):
        axes.set(xscale="log", xlabel=label, ylabel="test accuracy, %")
        axes.grid(alpha=0.3)
    right.legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def as_json(rows: Sequence[Row], **context: Any) -> dict[str, Any]:
    """The stable form of the results file."""
    return {"rows": [asdict(row) for row in rows], **context}
