"""Shaped links really shape, count what is sent, and leave nothing behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from compress import AllReduce
from experiments import links
from experiments.links import Link, LinkUnavailable, bucket_bytes, network, open_link, sent_bytes, simulated

RATE = 100e6

RECEIVE = """
import socket
with socket.create_server(("0.0.0.0", 5000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    while connection.recv(1 << 16):
        pass
"""
SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000), timeout=20) as connection:
    started = time.perf_counter()
    connection.sendall(bytes(int(sys.argv[2])))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
    print(time.perf_counter() - started)
print(open("/proc/self/net/dev").read())
"""


@pytest.fixture
def link() -> Iterator[Link]:
    try:
        with network(2, RATE) as made:
            yield made
    except LinkUnavailable as refusal:
        pytest.skip(str(refusal))


def send(link: Link, payload: int) -> tuple[float, int]:
    """Seconds for `payload` bytes from worker 1 to worker 0, and what worker 1's interface counted."""
    receiver = subprocess.Popen(
        link.command(0, [sys.executable, "-c", RECEIVE]), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    try:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        command = link.command(1, [sys.executable, "-c", SEND, link.address, str(payload)])
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
    finally:
        receiver.kill()
        receiver.communicate(timeout=10)
    seconds, counters = done.stdout.split("\n", 1)
    return float(seconds), sent_bytes(link.interface, counters)


def test_a_link_holds_its_rate_and_counts_what_is_sent(link: Link) -> None:
    payload = 2_000_000
    seconds, counted = send(link, payload)
    assert seconds > 0.95 * (8 * payload / RATE - 2 * links.BURST_SECONDS)
    assert payload < counted < 1.02 * payload


def test_each_worker_has_an_interface_of_its_own(link: Link) -> None:
    listed = [
        subprocess.run(
            link.command(worker, ["ip", "-brief", "address"]), capture_output=True, text=True, timeout=20
        ).stdout
        for worker in range(2)
    ]
    assert "10.77.0.1/" in listed[0]
    assert "10.77.0.2/" in listed[1]
    assert all(sorted(line.split("@")[0].split()[0] for line in each.splitlines()) == ["eth0", "lo"] for each in listed)


def test_two_runs_do_not_meet(link: Link) -> None:
    with network(2, RATE) as other:
        assert not set(link.prefixes) & set(other.prefixes)
        assert send(other, 1000)[1] > 1000


def holders(link: Link) -> list[int]:
    return [int(word.partition("=")[2]) for prefix in link.prefixes for word in prefix if word.startswith("--target=")]


def alive(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def test_the_namespaces_end_with_the_context() -> None:
    try:
        with network(2, RATE) as made:
            kept = holders(made)
            assert all(alive(pid) for pid in kept)
    except LinkUnavailable as refusal:
        pytest.skip(str(refusal))
    assert not any(alive(pid) for pid in kept)


HOLD = """
import sys, time
from experiments.links import network
with network(2, 1e8) as link:
    print(*(word.partition("=")[2] for prefix in link.prefixes for word in prefix if word.startswith("--target=")))
    sys.stdout.flush()
    time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=lambda each: each.name)
@pytest.mark.usefixtures("link")
def test_the_namespaces_end_with_the_process_that_made_them(how: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(links.__file__).parents[1])}
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    assert owner.stdout is not None
    kept = [int(word) for word in owner.stdout.readline().split()]
    assert len(kept) == 2
    owner.send_signal(how)
    owner.communicate(timeout=20)
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in kept):
        assert time.monotonic() < deadline, "the processes that keep the namespaces open did not end"
        time.sleep(0.02)


@pytest.mark.parametrize(("name", "kind"), [("100mbit", "simulated"), ("none", "loopback")])
def test_without_the_programs_the_link_says_what_it_is_instead(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links.shutil, "which", lambda program, path: None if program == "tc" else program)
    with open_link(name, 3) as made:
        assert made.kind == kind
        assert not made.counted
        assert made.command(2, ["python"]) == ["python"]
        assert "tc not found" in made.describe()
        assert ("SIMULATED" in made.describe()) == (kind == "simulated")


def test_what_was_refused_is_in_the_message() -> None:
    try:
        namespace = links.Namespace(as_user=os.geteuid() != 0)
    except LinkUnavailable as refusal:
        pytest.skip(str(refusal))
    try:
        with pytest.raises(LinkUnavailable, match=r"link set nonsense up"):
            namespace.configure("ip", "link set nonsense up")
    finally:
        namespace.close()


@pytest.mark.parametrize(("rate", "expected"), [(100e6, 25_000), (1e9, 250_000), (1e6, 2 * links.MTU)])
def test_the_bucket_holds_two_milliseconds(rate: float, expected: int) -> None:
    assert bucket_bytes(rate) == expected


TABLE = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:       1       2    0    0    0     0          0         0        3       4    0    0    0     0       0          0
  eth0: 5 6 0 0 0 0 0 0 7 8 0 0 0 0 0 0
"""  # noqa: E501


def test_the_counter_is_that_of_bytes_sent() -> None:
    assert sent_bytes("lo", TABLE) == 3
    assert sent_bytes("eth0", TABLE) == 7
    with pytest.raises(ValueError, match="no network interface 'eth1'"):
        sent_bytes("eth1", TABLE)


def test_a_simulated_link_takes_as_long_as_the_bytes() -> None:
    perform = simulated(rate=1e6, peers=4)(lambda request: request.tensors)
    request = AllReduce((torch.zeros(1000),))  # 6,000 bytes from each of 4 workers: 48 ms
    started = time.perf_counter()
    assert perform(request)[0] is request.tensors[0]
    assert time.perf_counter() - started > 0.047
