"""The command lines: errors before anything is started, workers that fail, and a whole run."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from experiments import compare, train
from experiments.compare import WorkerFailed, follow, started
from experiments.links import Link


@pytest.mark.parametrize("command", [compare.main, train.main], ids=["compare", "train"])
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--compressor", "powersdg"], "did you mean 'powersgd'"),
        (["--compressor", "powersgd:rank=0"], "rank"),
        (["--task", "imagenet"], "imagenet"),
        (["--task", "cifar10"], "--data DIR"),
        (["--steps", "0"], "--steps"),
        (["--plugin", "no_such_module"], "--plugin no_such_module"),
    ],
    ids=lambda each: each[-1] if isinstance(each, list) else "",
)
def test_errors_name_the_option_before_anything_starts(command: Any, arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2
    assert complaint in " ".join(result.output.replace("│", " ").split())


def test_the_links_are_listed() -> None:
    result = CliRunner().invoke(compare.main, ["--link", "5g"])
    assert result.exit_code == 2
    assert "100mbit" in result.output


def processes(*scripts: str) -> list["subprocess.Popen[bytes]"]:
    return [subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL) for script in scripts]


def reap(workers: list["subprocess.Popen[bytes]"]) -> None:
    for worker in workers:
        worker.kill()
        worker.wait(timeout=10)


def test_one_worker_that_dies_ends_the_run_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "events").touch()
    (tmp_path / "worker1.log").write_text("Traceback\nValueError: [/nonsense] is not to be had\n")
    workers = processes("import time; time.sleep(60)", "raise SystemExit(3)")
    try:
        with pytest.raises(WorkerFailed, match=r"worker 1 ended with 3(.|\n)*\[/nonsense\] is not to be had"):
            follow(workers, tmp_path, lambda event: None)
    finally:
        reap(workers)


def test_silence_is_a_failure_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "SECONDS_WITHOUT_NEWS", 0.2)
    (tmp_path / "events").touch()
    workers = processes("import time; time.sleep(60)")
    try:
        with pytest.raises(WorkerFailed, match=r"nothing heard .* 0\.2 s"):
            follow(workers, tmp_path, lambda event: None)
    finally:
        reap(workers)


def test_events_are_passed_on_in_order(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("".join(json.dumps({"kind": kind}) + "\n" for kind in ("probe", "run")))
    heard: list[str] = []
    workers = processes("pass", "pass")
    follow(workers, tmp_path, lambda event: heard.append(event["kind"]))
    assert heard == ["probe", "run"]


def test_workers_are_gone_when_the_context_ends(tmp_path: Path) -> None:
    link = Link("loopback", None, "lo", "127.0.0.1", ((),) * 2)
    with pytest.raises(KeyboardInterrupt), started(link, 2, [], tmp_path) as workers:
        raise KeyboardInterrupt
    assert all(worker.poll() is not None for worker in workers)


def test_a_worker_on_a_leash_ends_with_its_owner() -> None:
    script = "import threading, time; from experiments.train import end_with_standard_input as end; "
    script += "threading.Thread(target=end, daemon=True).start(); print('up', flush=True); time.sleep(60)"
    worker = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert worker.stdin is not None
    assert worker.stdout is not None
    assert worker.stdout.readline() == b"up\n"
    begun = time.monotonic()
    worker.stdin.close()
    assert worker.wait(timeout=10) == 1
    assert time.monotonic() - begun < 5
    worker.stdout.close()


@pytest.mark.parametrize(
    ("attained", "words"), [(96e6, "100mbit"), (50e6, "100mbit, of which this machine attains 50 Mbit/s")]
)
def test_the_verdict_is_about_the_link_as_it_is(attained: float, words: str) -> None:
    link = Link("namespaces", 100e6, "eth0", "10.77.0.1", ((),))
    assert compare.link_in_words("100mbit", link, {"bits_per_second": attained}) == words


def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "RESULTS", tmp_path)
    arguments = ["--workers", "2", "--steps", "4", "--link", "1gbit", "--compressor", "none", "--compressor", "sign"]
    result = CliRunner().invoke(compare.main, arguments)
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "compare.json").read_text())
    assert [row["compressor"] for row in content["rows"]] == ["none", "sign"]
    assert (content["task"], content["link"], content["workers"]) == ("mnist", "1gbit", 2)
    plain, sign = content["rows"]
    assert plain["steps"] == sign["steps"] == 4
    assert plain["formula_bytes_per_step"] == 4 * 1_002_250
    assert sign["ratio_vs_fp32"] > 25
    assert (tmp_path / "compare.png").exists()
    if content["link_kind"] == "namespaces":
        assert plain["wire_bytes_per_step"] == pytest.approx(plain["expected_wire_bytes_per_step"], rel=0.03)
        assert sign["wire_bytes_per_step"] == pytest.approx(sign["expected_wire_bytes_per_step"], rel=0.1)
    else:
        assert plain["wire_bytes_per_step"] is None
