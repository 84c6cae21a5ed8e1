"""The slow link: each worker behind a token bucket, in a network namespace of its own.

As root each worker gets a namespace, joined by veth pairs to a bridge, with the rate enforced on both ends of every
pair. Without root, where user namespaces are allowed, all workers share one namespace whose loopback is shaped to the
workers' rates together. Where neither is allowed the link is simulated in the transport, and labelled so.

Frames are 9,000 bytes, so that headers are below 1 % of the bytes which the interfaces count; segmentation offload is
off and the bucket holds about 2 ms of the line's rate, so that small payloads cannot slip through unthrottled.
"""

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from compress.requests import Replies, Request

RATES: dict[str, float | None] = {"100mbit": 100e6, "1gbit": 1e9, "10gbit": 10e9, "none": None}
"""Name of a link -> bits per second of one worker, each way; None: unthrottled loopback."""

MTU = 9000
BURST_SECONDS = 0.002
PREFIX = "gw"


@dataclass(frozen=True)
class Link:
    """Where workers run, and how to start a command there.

    Args:
        kind: "namespaces", "shared namespace", "simulated" or "loopback".
        rate: bits per second of one worker, each way; None if unthrottled.
        interface: the network interface whose counters a worker reads.
        address: of the first worker, where the others meet it.
        prefixes: for each worker, the words in front of its command.
        workers_per_interface: how many workers one interface's counters add up.
    """

    kind: str
    rate: float | None
    interface: str
    address: str
    prefixes: tuple[tuple[str, ...], ...]
    workers_per_interface: int = 1

    def command(self, worker: int, command: Sequence[str]) -> list[str]:
        """The command of one worker, as it must be started from outside."""
        return [*self.prefixes[worker], *command]

    def describe(self) -> str:
        """The link in words."""
        rate = "unthrottled" if self.rate is None else f"{self.rate / 1e6:g} Mbit/s each way per worker"
        return {
            "namespaces": f"{rate}; a network namespace for each worker, token bucket of "
            f"{bucket_bytes(self.rate or 0)} bytes, frames of {MTU} bytes",
            "shared namespace": f"{rate}; one namespace, its loopback shaped to all workers together (no root)",
            "simulated": f"{rate}, SIMULATED in the transport: no namespaces are allowed here",
            "loopback": f"{rate} loopback",
        }[self.kind]


def bucket_bytes(rate: float) -> int:
    """Size of the token bucket: 2 ms of the line's rate, two frames at least."""
    return max(int(rate / 8 * BURST_SECONDS), 2 * MTU)


def _run(*command: str) -> None:
    """Run a network command.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


def _shape(interface: str, rate: float, within: Sequence[str] = ()) -> None:
    _run(
        *within, "tc", "qdisc", "add", "dev", interface, "root", "tbf",
        "rate", f"{int(rate)}bit", "burst", f"{bucket_bytes(rate)}", "latency", "400ms",
    )  # fmt: skip


def remove_stale() -> None:
    """Remove namespaces of earlier runs that ended without cleaning up; those of living processes stay."""
    with contextlib.suppress(OSError, RuntimeError, subprocess.TimeoutExpired):
        names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=20).stdout
        for owner in {int(match) for match in re.findall(rf"^{PREFIX}(\d+)-\d+", names, re.M)}:
            if not Path(f"/proc/{owner}").exists():
                _remove(owner, names)


def _remove(owner: int, names: str | None = None) -> None:
    """Remove all namespaces and interfaces of one run."""
    if names is None:
        names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=20).stdout
    for name in re.findall(rf"^({PREFIX}{owner}-\S+)", names, re.M):
        with contextlib.suppress(RuntimeError):
            _run("ip", "netns", "del", name)  # its end of the veth pair goes with it


@contextlib.contextmanager
def _namespaces(rate: float, workers: int) -> Iterator[Link]:
    """A namespace for each worker, and one more with the bridge between them."""
    owner = os.getpid()
    switch = f"{PREFIX}{owner}-switch"
    try:
        _run("ip", "netns", "add", switch)
        inside_switch = ("ip", "netns", "exec", switch)
        _run(*inside_switch, "ip", "link", "add", "bridge", "mtu", str(MTU), "type", "bridge")
        _run(*inside_switch, "ip", "link", "set", "bridge", "up")
        prefixes = []
        for worker in range(workers):
            name, port = f"{PREFIX}{owner}-{worker}", f"port{worker}"
            inside = ("ip", "netns", "exec", name)
            _run("ip", "netns", "add", name)
            _run(*inside_switch, "ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            for within, interface in ((inside_switch, port), (inside, "eth0")):
                _run(*within, "ip", "link", "set", interface, "mtu", str(MTU), "gso_max_segs", "1", "up")
                _shape(interface, rate, within)
            _run(*inside_switch, "ip", "link", "set", port, "master", "bridge")
            _run(*inside, "ip", "address", "add", f"10.77.0.{worker + 1}/24", "dev", "eth0")
            _run(*inside, "ip", "link", "set", "lo", "up")
            prefixes.append(inside)
        yield Link("namespaces", rate, "eth0", "10.77.0.1", tuple(prefixes))
    finally:
        _remove(owner)


@contextlib.contextmanager
def _shared_namespace(rate: float, workers: int) -> Iterator[Link]:
    """One user and network namespace; it ends with the process that holds it."""
    total = rate * workers
    setup = (
        f"ip link set lo mtu {MTU} gso_max_segs 1 up && "
        f"tc qdisc add dev lo root tbf rate {int(total)}bit burst {bucket_bytes(total)} latency 400ms && "
        "echo ready && exec sleep infinity"
    )
    holder = subprocess.Popen(
        ["unshare", "-Urn", "sh", "-c", setup], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        if holder.stdout.readline().strip() != "ready":
            raise RuntimeError("a user namespace with a shaped loopback is not allowed here")
        enter = ("nsenter", "-t", str(holder.pid), "-U", "-n", "--preserve-credentials")
        yield Link("shared namespace", rate, "lo", "127.0.0.1", (enter,) * workers, workers)
    finally:
        holder.kill()
        holder.wait(timeout=20)


@contextlib.contextmanager
def open_link(name: str, workers: int) -> Iterator[Link]:
    """The best link of that rate that is allowed here; gone when the context ends, however it ends.

    Args:
        name: a key of RATES.
    """
    rate = RATES[name]
    if rate is None:
        yield Link("loopback", None, "lo", "127.0.0.1", ((),) * workers, workers)
        return
    remove_stale()
    for build in (_namespaces, _shared_namespace):
        with contextlib.ExitStack() as stack:
            try:
                link = stack.enter_context(build(rate, workers))
            except (RuntimeError, OSError, subprocess.TimeoutExpired):
                continue
            yield link
            return
    yield Link("simulated", rate, "lo", "127.0.0.1", ((),) * workers, workers)


def sent_bytes(interface: str) -> int:
    """Bytes that the interface has sent so far, by its own counter, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, colon, counters = line.partition(":")
        if colon and name.strip() == interface:
            return int(counters.split()[8])
    raise ValueError(f"there is no network interface {interface!r}")


def probe_bits_per_second(elements: int = 1 << 20) -> float:
    """Throughput of one worker's link, bits sent per second, in a plain all-reduce of fp32 elements; collective."""
    peers = dist.get_world_size()
    ones = torch.ones(elements)
    dist.all_reduce(torch.ones(1))
    started = time.perf_counter()
    dist.all_reduce(ones)
    return 2 * (peers - 1) / peers * elements * 32 / (time.perf_counter() - started)


def simulated(rate: float) -> Callable[[Callable[[Request], Replies]], Callable[[Request], Replies]]:
    """A transport that takes as long as a link of `rate` bits per second would, by the requests' own formula."""

    def wrap(perform: Callable[[Request], Replies]) -> Callable[[Request], Replies]:
        def delayed(request: Request) -> Replies:
            started = time.perf_counter()
            replies = perform(request)
            due = started + request.wire_bytes(dist.get_world_size()) * 8 / rate
            time.sleep(max(due - time.perf_counter(), 0.0))
            return replies

        return delayed

    return wrap
