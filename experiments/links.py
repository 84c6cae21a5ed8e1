"""The slow link: each worker behind a token bucket, in a network namespace of its own.

    [worker 0: eth0] ══ [port0 ┐
    [worker 1: eth0] ══ [port1 ┤ switch]

A veth pair joins each worker's namespace to a bridge, with the rate enforced at both ends: on what the worker sends
and on what it receives. Root is not needed where users may have namespaces of their own. Where neither is allowed the
link is simulated in the transport, and labelled so.

The namespaces have no names. The kernel takes each away, with its interfaces, when the last process in it ends, and
the processes that keep them open end when the pipe from this one breaks: nothing is left behind, even by SIGKILL, and
two runs cannot meet.

Frames are 9,000 bytes, so that headers are about 1 % of the bytes which the interfaces count; segmentation offload is
off and the bucket holds about 2 ms of the line's rate, so that small payloads cannot slip through unthrottled.
"""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from compress.requests import Replies, Request

RATES: dict[str, float | None] = {"100mbit": 100e6, "1gbit": 1e9, "10gbit": 10e9, "none": None}
"""Name of a link -> bits per second of one worker, each way; None: unthrottled."""

MTU = 9000
"""Bytes of an IP packet."""

BURST_SECONDS = 0.002
"""Depth of the token bucket."""

QUEUE_SECONDS = 0.2
"""How long a packet may wait for tokens before it is dropped."""

COMMAND_SECONDS = 20.0
"""Time-out of each command that sets up the network."""

INTERFACE = "eth0"
PROGRAMS = ("ip", "tc", "unshare", "nsenter")


class LinkUnavailable(RuntimeError):
    """This system does not let us make a shaped link; the message says what was refused."""


@dataclass(frozen=True)
class Link:
    """Where workers run, and how to start a command there.

    Args:
        kind: "namespaces", "simulated" or "loopback".
        rate: bits per second of one worker, each way; None if unthrottled.
        interface: the network interface that the workers use.
        address: of the first worker, where the others meet it.
        prefixes: for each worker, the words in front of its command.
        why: what kept the link from being one of namespaces, if it is not.
    """

    kind: str
    rate: float | None
    interface: str
    address: str
    prefixes: tuple[tuple[str, ...], ...]
    why: str = ""

    @property
    def counted(self) -> bool:
        """Whether the interface's counters hold what one worker sends, and nothing else."""
        return self.kind == "namespaces"

    def command(self, worker: int, command: Sequence[str]) -> list[str]:
        """The command of one worker, as it must be started from outside."""
        return [*self.prefixes[worker], *command]

    def describe(self) -> str:
        """The link in words."""
        rate = "unthrottled" if self.rate is None else f"{self.rate / 1e6:g} Mbit/s each way per worker"
        if self.kind == "namespaces":
            bucket = "" if self.rate is None else f", token bucket of {bucket_bytes(self.rate):,} bytes"
            return f"{rate}; a network namespace for each worker{bucket}, frames of {MTU:,} bytes"
        if self.kind == "simulated":
            return f"{rate}, SIMULATED in the transport ({self.why})"
        return f"{rate} loopback ({self.why})"


def bucket_bytes(rate: float) -> int:
    """Size of the token bucket for a rate in bits per second: 2 ms of it, two frames at least."""
    return max(int(rate / 8 * BURST_SECONDS), 2 * MTU)


class Namespace:
    """An anonymous network namespace, kept open by a process that ends when this one does.

    Args:
        parent: of whose user namespace it becomes a part.
        as_user: make a user namespace too, in which this user is root.

    Raises:
        LinkUnavailable: not allowed here.
    """

    def __init__(self, parent: "Namespace | None" = None, as_user: bool = False) -> None:
        self._as_user: bool = parent._as_user if parent else as_user
        flags = ["--user", "--map-root-user"] if as_user else []
        command = ["unshare", *flags, "--net", "cat"]
        # cat lives as long as its standard input, whose other end nobody but this process holds. In a session of its
        # own it does not get the terminal's Ctrl-C, and the network lasts until the workers have ended.
        self._holder = subprocess.Popen(
            parent.command(command) if parent else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=_environment(),
        )
        assert self._holder.stdin
        assert self._holder.stdout
        try:
            with contextlib.suppress(BrokenPipeError):
                self._holder.stdin.write(b"\n")
                self._holder.stdin.flush()
            if not self._holder.stdout.readline():  # cat's echo: from here on it is inside
                complaint = self._holder.stderr.read() if self._holder.stderr else b""
                raise LinkUnavailable(complaint.decode(errors="replace").strip() or "no network namespace")
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """A process inside."""
        return self._holder.pid

    @property
    def prefix(self) -> tuple[str, ...]:
        """Put in front of a command, these words run it inside, in the very process that is started."""
        user = ("--user", "--preserve-credentials") if self._as_user else ()
        return ("nsenter", f"--target={self.pid}", *user, "--net", "--")

    def command(self, words: Sequence[str]) -> list[str]:
        return [*self.prefix, *words]

    def configure(self, program: str, *lines: str) -> None:
        """Run several commands of `ip` or `tc` inside.

        Raises:
            LinkUnavailable: one failed; says which.
        """
        done = subprocess.run(
            self.command([program, "-batch", "-"]),
            input="\n".join(lines),
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            env=_environment(),
        )
        if done.returncode:
            raise LinkUnavailable(f"{program}: {' '.join(done.stderr.split())}; in: {'; '.join(lines)}")

    def close(self) -> None:
        """Let go of the namespace; it lasts while other processes are in it."""
        assert self._holder.stdin
        with contextlib.suppress(BrokenPipeError):
            self._holder.stdin.close()
        try:
            self._holder.wait(COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            self._holder.kill()
            self._holder.wait(COMMAND_SECONDS)
        for stream in (self._holder.stdout, self._holder.stderr):
            if stream:
                stream.close()


@contextlib.contextmanager
def network(workers: int, rate: float | None) -> Iterator[Link]:
    """A namespace for each worker, and one more with the switch between them.

    Raises:
        LinkUnavailable: not allowed here, or a program is missing.
    """
    missing = [program for program in PROGRAMS if not shutil.which(program, path=_search_path())]
    if missing:
        raise LinkUnavailable(f"{', '.join(missing)} not found: install iproute2 and util-linux")
    with contextlib.ExitStack() as stack:

        def made(parent: Namespace | None = None, as_user: bool = False) -> Namespace:
            namespace = Namespace(parent, as_user)
            stack.callback(namespace.close)
            return namespace

        switch = made(as_user=os.geteuid() != 0)
        switch.configure("ip", f"link add switch mtu {MTU} type bridge", "link set switch addrgenmode none up")
        hosts = [made(switch) for _ in range(workers)]
        for index, host in enumerate(hosts):
            _plug(switch, host, index, rate)
        yield Link("namespaces", rate, INTERFACE, _address(0), tuple(host.prefix for host in hosts))


def _plug(switch: Namespace, host: Namespace, index: int, rate: float | None) -> None:
    """Join a host to the switch by a shaped cable."""
    port = f"port{index}"
    # No automatic addresses, whose announcements would be counted. One segment a packet on a shaped link (no
    # segmentation offload): the bucket and the counters see what a wire would carry.
    options = f"addrgenmode none {'' if rate is None else 'gso_max_segs 1'} up"
    switch.configure(
        "ip",
        f"link add {port} mtu {MTU} type veth peer name {INTERFACE} mtu {MTU} netns {host.pid}",
        f"link set {port} master switch",
        f"link set {port} {options}",
    )
    host.configure(
        "ip",
        "link set lo up",
        f"address add {_address(index)}/16 dev {INTERFACE}",
        f"link set {INTERFACE} {options}",
    )
    if rate is not None:
        for namespace, interface in ((switch, port), (host, INTERFACE)):
            namespace.configure(
                "tc",
                f"qdisc add dev {interface} root tbf rate {rate:.0f}bit burst {bucket_bytes(rate)} "
                f"latency {QUEUE_SECONDS * 1e3:.0f}ms",
            )


def _address(index: int) -> str:
    """A worker's IPv4 address. The network is closed, so any will do, for every run the same."""
    return f"10.77.{index // 250}.{index % 250 + 1}"


def _search_path() -> str:
    """Where programs are looked for: users' paths often lack the administrator's folders."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": _search_path()}


@contextlib.contextmanager
def open_link(name: str, workers: int) -> Iterator[Link]:
    """The best link of that name that is allowed here; gone when the context ends, however it ends.

    Args:
        name: a key of RATES.
    """
    rate = RATES[name]
    with contextlib.ExitStack() as stack:
        try:
            link = stack.enter_context(network(workers, rate))
        except (LinkUnavailable, OSError, subprocess.TimeoutExpired) as refusal:
            kind = "loopback" if rate is None else "simulated"
            link = Link(kind, rate, "lo", "127.0.0.1", ((),) * workers, f"no network namespaces here: {refusal}")
        yield link


def sent_bytes(interface: str, table: str | None = None) -> int:
    """Bytes that the interface has sent so far, by its own counter, headers included.

    Args:
        table: the text of /proc/net/dev, by default that of now.

    Raises:
        ValueError: there is no such interface.
    """
    table = Path("/proc/self/net/dev").read_text() if table is None else table
    for line in table.splitlines():
        name, colon, counters = line.partition(":")
        if colon and name.strip() == interface:
            return int(counters.split()[8])
    raise ValueError(f"there is no network interface {interface!r}")


def simulated(rate: float, peers: int) -> Callable[[Callable[[Request], Replies]], Callable[[Request], Replies]]:
    """A transport on which each request takes at least as long as its bytes, by its own formula, would on a link.

    Only bytes are modelled: no headers, no queues, no lost packets.

    Args:
        rate: bits per second.
        peers: number of workers.
    """

    def wrap(perform: Callable[[Request], Replies]) -> Callable[[Request], Replies]:
        def delayed(request: Request) -> Replies:
            due = time.perf_counter() + 8 * request.wire_bytes(peers) / rate
            replies = perform(request)
            time.sleep(max(due - time.perf_counter(), 0.0))
            return replies

        return delayed

    return wrap
