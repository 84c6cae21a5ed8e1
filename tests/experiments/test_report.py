"""From runs to rows, table, verdict and files."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from experiments.probe import FRAME_OVERHEAD
from experiments.report import Row, as_json, expected_wire_bytes, make_rows, plot, seconds_to, table, verdict

PARAMETERS, WORKERS = 1_000_000, 4
DENSE = 2 * 3 / 4 * 4 * PARAMETERS


def run(
    name: str,
    accuracies: list[float],
    step_seconds: float,
    formula: float = DENSE,
    wire: float | None = None,
    loss: float = 0.5,
) -> dict[str, Any]:
    """What a worker reports of a run with an evaluation after every tenth step."""
    history = [
        {"step": 10 * number, "seconds": 10 * number * step_seconds, "accuracy": accuracy, "loss": loss}
        for number, accuracy in enumerate(accuracies, 1)
    ]
    return {
        "name": name,
        "steps": 10 * len(accuracies),
        "step_seconds": step_seconds,
        "compute_seconds": 0.05,
        "wire_bytes_per_step": wire,
        "formula_bytes_per_step": formula,
        "collectives_per_step": {"all_reduce": 2.0},
        "parameters": PARAMETERS,
        "history": history,
    }


PLAIN = run("none", [0.5, 0.96, 0.97], 0.5, wire=1.01 * DENSE)
FAST = run("powersgd:rank=2", [0.5, 0.95, 0.968], 0.1, DENSE / 100, DENSE / 90)
POOR = run("sign", [0.4, 0.8, 0.9], 0.05, DENSE / 30)


def test_a_row_is_measured_against_plain_ddp() -> None:
    plain, fast, poor = make_rows([PLAIN, FAST, POOR], WORKERS)
    assert (plain.step_ratio, plain.ratio_vs_fp32, plain.ratio_vs_bf16) == (1.0, 1.0, 0.5)
    assert fast.step_ratio == pytest.approx(0.2)
    assert (fast.ratio_vs_fp32, fast.ratio_vs_bf16) == (pytest.approx(100), pytest.approx(50))
    assert (fast.accuracy, fast.loss, fast.steps, fast.collectives_per_step) == (0.968, 0.5, 30, 2)
    assert fast.wire_bytes_per_step == pytest.approx(DENSE / 90)
    assert poor.wire_bytes_per_step is None
    assert poor.expected_wire_bytes_per_step is None


def test_the_target_is_plain_ddps_final_accuracy_less_half_a_point() -> None:
    plain, fast, poor = make_rows([PLAIN, FAST, POOR], WORKERS)
    assert plain.seconds_to_target == pytest.approx(15.0)  # 96.5 % is not reached by 96 %
    assert fast.seconds_to_target == pytest.approx(3.0)
    assert poor.seconds_to_target is None


def test_over_several_seeds_all_must_reach_the_target() -> None:
    again = run("powersgd:rank=2", [0.97, 0.97, 0.98], 0.1, loss=0.7)
    assert seconds_to(0.965, [FAST, again]) == pytest.approx(2.0)
    assert seconds_to(0.97, [FAST, again]) is None
    _, row = make_rows([PLAIN, FAST, again], WORKERS)
    assert row.accuracy == pytest.approx(0.974)
    assert row.loss_spread == pytest.approx(0.2)


def test_the_order_of_rows_is_that_of_the_runs() -> None:
    assert [row.compressor for row in make_rows([FAST, PLAIN, FAST], WORKERS)] == ["powersgd:rank=2", "none"]


def test_without_plain_ddp_there_is_nothing_to_compare_with() -> None:
    (row,) = make_rows([FAST], WORKERS)
    assert row.step_ratio is None
    assert row.seconds_to_target is None
    assert row.ratio_vs_fp32 == pytest.approx(100)
    assert "`none`" in verdict([row], "100mbit")


def test_the_interface_should_count_formula_frame_headers_and_a_fixed_number_for_each_collective() -> None:
    expected = FAST["formula_bytes_per_step"] * (1 + FRAME_OVERHEAD) + 2 * 4700
    assert expected_wire_bytes(FAST, {"all_reduce": 4700, "all_gather": 2400}) == pytest.approx(expected)
    assert 0.01 < FRAME_OVERHEAD < 0.012


def printed(rows: list[Row]) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table(rows, "mnist"))
    return capture.get()


def test_the_table_says_what_was_not_reached_and_not_counted() -> None:
    lines = printed(make_rows([PLAIN, FAST, POOR], WORKERS, {"all_reduce": 3333})).splitlines()
    (poor,) = [line for line in lines if "sign" in line]
    assert "never" in poor
    assert "—" in poor
    (fast,) = [line for line in lines if "powersgd" in line]
    assert "96.80%" in fast
    assert "3.0 s" in fast
    assert "0.200" in fast


def test_the_verdict_names_the_fastest_that_keeps_the_accuracy() -> None:
    words = verdict(make_rows([PLAIN, FAST, POOR], WORKERS), "100mbit")
    assert words.startswith("Compress on this link (100mbit): powersgd:rank=2")
    assert "5.0 times sooner" in words
    assert "lost with sign" in words


@pytest.mark.parametrize(
    "rows",
    [
        [PLAIN, run("powersgd:rank=2", [0.97], 0.49)],
        [PLAIN, run("powersgd:rank=2", [0.97], 0.6)],
        [PLAIN, POOR],
    ],
    ids=["no gain", "slower", "too inaccurate"],
)
def test_the_verdict_may_be_not_to_compress(rows: list[dict[str, Any]]) -> None:
    assert verdict(make_rows(rows, WORKERS), "10gbit").startswith("Don't compress on this link (10gbit)")


FIELDS = {
    "compressor",
    "accuracy",
    "loss",
    "steps",
    "step_seconds",
    "step_ratio",
    "wire_bytes_per_step",
    "formula_bytes_per_step",
    "ratio_vs_fp32",
    "ratio_vs_bf16",
    "seconds_to_target",
}


def test_scripts_rely_on_the_names_of_the_results() -> None:
    content = as_json(make_rows([PLAIN, POOR], WORKERS), task="mnist", link="100mbit", workers=4, versions={})
    read = json.loads(json.dumps(content, allow_nan=False))
    assert {"rows", "task", "link", "workers", "versions"} <= set(read)
    assert all(set(row) >= FIELDS for row in read["rows"])
    assert read["rows"][0]["compressor"] == "none"
    assert read["rows"][1]["seconds_to_target"] is None


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    runs = [PLAIN, FAST, POOR]
    plot(make_rows(runs, WORKERS), runs, "mnist", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
