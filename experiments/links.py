"""A slow link between workers of one machine.

Each worker gets a network namespace of its own, joined to a bridge by a veth pair with a token bucket at both
ends: what it sends is held to the rate, and so is what it receives.

    [worker 0: eth0] ══ [port0 ┐
    [worker 1: eth0] ══ [port1 ┤ switch]

The namespaces have no names. The kernel takes each away, with its interfaces, when the last process in it ends,
and the processes that keep them open end with the pipe to the one that made them: nothing can be left behind, even
by SIGKILL, and two runs cannot meet. Root is not needed where the system lets users have namespaces.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from compress.requests import Replies, Request

RATES: dict[str, float | None] = {"100mbit": 100e6, "1gbit": 1e9, "10gbit": 10e9, "none": None}
"""Name of a link -> bits per second, None for unlimited."""

MTU = 9000
"""Bytes of an IP packet, as in the jumbo frames of compute clusters: headers then cost 1 % instead of 7 %."""

HEADER_BYTES = 14 + 20 + 20 + 12
"""What the interface counts for each packet beside its payload: Ethernet, IPv4, TCP and TCP's time stamps."""

BURST_SECONDS = 0.002
"""Depth of the token bucket in time. A deeper one would let small payloads pass at full speed."""

QUEUE_SECONDS = 0.05
"""How long a packet may wait for tokens before it is dropped."""

COMMAND_SECONDS = 20.0
"""Time-out of each command that sets up the network."""

INTERFACE = "eth0"


class LinkUnavailable(RuntimeError):
    """This system does not let us make a shaped link; the message says what was refused."""


@dataclass(frozen=True)
class Counters:
    """What an interface has sent: bytes (link-layer headers included) and packets."""

    sent_bytes: int = 0
    sent_packets: int = 0


def read_counters(interface: str = INTERFACE, table: str | None = None) -> Counters:
    """The counters of an interface in this process's own namespace.

    Args:
        table: the text of /proc/net/dev, by default that of now.

    Raises:
        LookupError: there is no such interface.
    """
    table = Path("/proc/self/net/dev").read_text() if table is None else table
    for line in table.splitlines():
        name, colon, numbers = line.partition(":")
        if colon and name.strip() == interface:
            fields = numbers.split()
            return Counters(int(fields[8]), int(fields[9]))
    raise LookupError(f"no interface {interface!r} in this network namespace")


class Namespace:
    """An anonymous network namespace, kept open by a process that ends when this one does.

    Args:
        parent: make it with the rights of this namespace, whose user namespace it shares.
        as_user: also make a user namespace, in which this user is root.

    Raises:
        LinkUnavailable: not allowed here.
    """

    def __init__(self, parent: "Namespace | None" = None, as_user: bool = False) -> None:
        self._as_user = parent._as_user if parent else as_user
        flags = ["--user", "--map-root-user"] if as_user else []
        command = ["unshare", *flags, "--net", "cat"]
        # cat lives as long as its standard input, whose other end nobody but this process holds.
        self._holder = subprocess.Popen(
            parent.command(*command) if parent else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=_environment(),
        )
        assert self._holder.stdin
        assert self._holder.stdout
        with suppress(BrokenPipeError):
            self._holder.stdin.write(b"\n")
            self._holder.stdin.flush()
        if not self._holder.stdout.readline():  # cat's echo: from here on it is inside
            _, complaint = self._holder.communicate(timeout=COMMAND_SECONDS)
            raise LinkUnavailable(complaint.decode(errors="replace").strip())

    @property
    def pid(self) -> int:
        """A process inside."""
        return self._holder.pid

    def command(self, *words: str) -> list[str]:
        """The command line that runs `words` inside, in the process that is started itself (no child)."""
        user = ["--user", "--preserve-credentials"] if self._as_user else []
        return ["nsenter", f"--target={self.pid}", *user, "--net", "--", *words]

    def run(self, program: str, *lines: str) -> None:
        """Run `ip` or `tc` inside on a batch of commands.

        Raises:
            LinkUnavailable: one failed; says which.
        """
        done = subprocess.run(
            self.command(program, "-batch", "-"),
            input="\n".join(lines),
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            env=_environment(),
        )
        if done.returncode:
            raise LinkUnavailable(f"{program}: {' '.join(done.stderr.split())} (in: {'; '.join(lines)})")

    def close(self) -> None:
        """Let the namespace go; it lasts while other processes are in it."""
        assert self._holder.stdin
        self._holder.stdin.close()
        try:
            self._holder.wait(COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            self._holder.kill()
            self._holder.wait()
        for stream in (self._holder.stdout, self._holder.stderr):
            if stream:
                stream.close()


class Network:
    """Workers' namespaces on one switch.

    Args:
        workers: how many.
        rate: bits per second of each worker's link, both ways; None for unlimited.

    Raises:
        LinkUnavailable: not allowed here, or a program is missing.
    """

    def __init__(self, workers: int, rate: float | None) -> None:
        missing = [each for each in ("ip", "tc", "unshare", "nsenter") if not shutil.which(each, path=_search_path())]
        if missing:
            raise LinkUnavailable(f"{', '.join(missing)} not found (packages iproute2 and util-linux)")
        self._open = ExitStack()
        self._hosts: list[Namespace] = []
        with self._open:
            switch = self._made(as_user=os.geteuid() != 0)
            switch.run("ip", f"link add switch mtu {MTU} type bridge", "link set switch addrgenmode none up")
            for index in range(workers):
                host = self._made(switch)
                self._plug(switch, host, index, rate)
                self._hosts.append(host)
            self._open = self._open.pop_all()

    def _made(self, parent: Namespace | None = None, as_user: bool = False) -> Namespace:
        namespace = Namespace(parent, as_user)
        self._open.callback(namespace.close)
        return namespace

    def _plug(self, switch: Namespace, host: Namespace, index: int, rate: float | None) -> None:
        """Join a host to the switch by a shaped cable."""
        port = f"port{index}"
        # No automatic addresses: their announcements would be counted. One segment a packet (no segmentation
        # offload) on a shaped link, so that the bucket sees what a wire would carry.
        options = f"addrgenmode none{'' if rate is None else ' gso_max_segs 1'} up"
        switch.run(
            "ip",
            f"link add {port} mtu {MTU} type veth peer name {INTERFACE} mtu {MTU} netns {host.pid}",
            f"link set {port} master switch",
            f"link set {port} {options}",
        )
        host.run(
            "ip",
            "link set lo up",
            f"address add {self.address(index)}/16 dev {INTERFACE}",
            f"link set {INTERFACE} {options}",
        )
        if rate is not None:
            for namespace, interface in ((switch, port), (host, INTERFACE)):
                namespace.run("tc", f"qdisc add dev {interface} root {token_bucket(rate)}")

    @staticmethod
    def address(index: int) -> str:
        """The IPv4 address of a worker; private to the network, so any will do."""
        return f"10.77.{index // 250}.{1 + index % 250}"

    def command(self, index: int, *words: str) -> list[str]:
        """The command line that runs `words` on worker `index`'s host."""
        return self._hosts[index].command(*words)

    def close(self) -> None:
        """Take the network away. Processes inside should have ended."""
        self._open.close()

    def __enter__(self) -> "Network":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def token_bucket(rate: float) -> str:
    """tc's words for a link of `rate` bits per second."""
    burst = max(rate / 8 * BURST_SECONDS, 2 * MTU)
    return f"tbf rate {rate:.0f}bit burst {burst:.0f} latency {QUEUE_SECONDS * 1e3:.0f}ms"


class SimulatedLink:
    """Wraps a transport: each request takes at least as long as its bytes would on a link.

    For systems without namespaces. Only bytes are modelled: no headers, no queues, no lost packets.

    Args:
        rate: bits per second.
        peers: number of workers.
    """

    def __init__(self, rate: float, peers: int) -> None:
        self.rate, self.peers = rate, peers

    def __call__(self, perform: Callable[[Request], Replies]) -> Callable[[Request], Replies]:
        def perform_slowly(request: Request) -> Replies:
            arrival = time.perf_counter() + 8 * request.wire_bytes(self.peers) / self.rate
            replies = perform(request)
            time.sleep(max(0.0, arrival - time.perf_counter()))
            return replies

        return perform_slowly


def _search_path() -> str:
    """Where programs are looked for: a user's path often lacks the administrator's folders."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PATH": _search_path(), **extra}


def describe(rate: float | None) -> str:
    """A rate in words."""
    if rate is None:
        return "unlimited"
    return f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"


__all__: Sequence[str] = ["RATES", "Counters", "LinkUnavailable", "Network", "SimulatedLink", "read_counters"]
