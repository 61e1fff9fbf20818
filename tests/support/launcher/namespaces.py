"""Hosts of one machine: network, UTS, PID and mount namespaces on a common Ethernet, which may be slow and lose frames.

Each host has ``eth0`` with its own address, a host name, and an ``/etc/hosts`` in which it knows itself as 127.0.1.1,
as Debian sets machines up. No process sees those of another host, so memory is not shared between hosts. Without
latency and loss a bridge joins the hosts by veth pairs. With them ``eth0`` is a TAP device, and a userspace switch
(``lossy_switch``) takes every frame from one to the other, ``delay_s`` later, or drops it: for kernels without
``sch_netem``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.launcher.lossy_switch import enter
from tests.support.paths import ROOT

NETWORK = "10.78.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    namespace: str
    name: str
    address: str
    hosts: Path  # what /etc/hosts is there

    def command(self, *command: str) -> list[str]:
        """``command`` as it runs in this host, in a PID namespace of its own. Killing what is returned kills it."""
        # Not `ip netns exec`: it hides /sys/fs/cgroup, without which slurmd does not start.
        prepare = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
        spaces = ["--uts", "--pid", "--mount-proc", "--fork", "--kill-child"]
        enter = ["nsenter", f"--net=/run/netns/{self.namespace}", "unshare", *spaces]
        return [*enter, "sh", "-c", prepare, self.name, str(self.hosts), *command]

    def start(self, *command: str, env: Mapping[str, str] | None = None, **options: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self.command(*command), env=env, cwd=ROOT, **options)  # type: ignore[call-overload]

    def listeners(self) -> set[tuple[str, str]]:
        """(program, address) of every TCP socket that listens in this host.

        One whose process ends while ss reads it has no program: such a list is read again.
        """
        for _ in range(10):
            found = self._read_listeners()
            if not any(program == UNKNOWN for program, _ in found):
                break
            time.sleep(0.2)
        return found

    def _read_listeners(self) -> set[tuple[str, str]]:
        # In the PID namespace of the caller, so that the programs are seen.
        command = ["ip", "netns", "exec", self.namespace, "ss", "-Hltnp"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = set()
        for line in done.stdout.splitlines():
            at = line.split()[3].rpartition(":")[0].strip("[]").partition("%")[0]
            programs = re.findall(r'"([^"]*)",pid=', line)
            found |= {(program, at) for program in programs or [UNKNOWN]}
        return found


UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What was measured between two hosts with ``probes`` UDP datagrams: round trips in ms, and the part lost."""

    rtt_ms: float
    worst_ms: float
    lost: float


def unavailable() -> str:
    """Why hosts cannot be made here; empty if they can."""
    if os.geteuid() != 0 or shutil.which("ip") is None or not Path("/dev/net/tun").exists():
        return "network namespaces need root, iproute2 and /dev/net/tun"
    probe = f"al-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"ip netns add: {made.stderr.strip()}"
    ip("netns", "del", probe)
    return ""


@contextmanager
def hosts(n: int, *, delay_s: float = 0.0, loss: float = 0.0, rate: str = "") -> Iterator[list[Host]]:
    """``n`` hosts. Every frame between them takes ``delay_s``; a part ``loss`` of them is lost.

    Each sends at no more than ``rate``, which is one of ``tc``, if given.
    """
    with ExitStack() as undo:
        files = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="hosts-")))
        made = [
            Host(namespace=f"al{os.getpid()}-{i}", name=f"node{i}", address=f"{NETWORK}.{i}", hosts=files / f"node{i}")
            for i in range(1, n + 1)
        ]
        for host in made:
            ip("netns", "add", host.namespace)
            undo.callback(ip, "netns", "del", host.namespace)
            others = "".join(f"{other.address} {other.name}\n" for other in made if other is not host)
            host.hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n{others}")
            ip("-n", host.namespace, "link", "set", "lo", "up")
        _slow(made, delay_s, loss, undo) if delay_s or loss else _bridged(made, undo)
        for host in made if rate else ():
            shaped = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            subprocess.run(["tc", "-n", host.namespace, "qdisc", "add", "dev", "eth0", "root", *shaped], check=True)
        yield made


@contextmanager
def inside(host: Host) -> Iterator[None]:
    """This thread, and those that it starts, are on ``host``; nothing but their network is."""
    namespaces = [os.open(path, os.O_RDONLY) for path in (f"/run/netns/{host.namespace}", "/proc/self/ns/net")]
    try:
        enter(namespaces[0])
        yield
    finally:
        enter(namespaces[1])
        for namespace in namespaces:
            os.close(namespace)


def _bridged(made: Sequence[Host], undo: ExitStack) -> None:
    bridge = f"albr{os.getpid()}"
    ip("link", "add", bridge, "type", "bridge")
    undo.callback(ip, "link", "del", bridge)
    ip("link", "set", bridge, "up")
    for i, host in enumerate(made):
        end = f"al{os.getpid()}v{i}"
        ip("link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
        ip("link", "set", end, "master", bridge, "up")
        _address(host)


def _slow(made: Sequence[Host], delay_s: float, loss: float, undo: ExitStack) -> None:
    module = "tests.support.launcher.lossy_switch"
    command = [sys.executable, "-m", module, str(delay_s), str(loss), *(h.namespace for h in made)]
    switch = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    undo.callback(switch.wait)
    undo.callback(switch.terminate)
    assert switch.stdout is not None
    assert switch.stdout.readline() == b"ready\n"
    for host in made:
        _address(host)


def _address(host: Host) -> None:
    ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
    ip("-n", host.namespace, "link", "set", "eth0", "up")


def measure(one: Host, other: Host, probes: int = 600) -> Link:
    """Send ``probes`` datagrams from ``one`` to an echo at ``other``."""
    echo = other.start(sys.executable, "-c", _ECHO, other.address, stdout=subprocess.PIPE)
    assert echo.stdout is not None
    try:
        port = echo.stdout.readline().decode().strip()
        done = subprocess.run(
            one.command(sys.executable, "-c", _PROBE, other.address, port, str(probes)),
            capture_output=True,
            text=True,
            check=True,
        )
    finally:
        echo.kill()
        echo.wait()
    rtt, worst, lost = re.findall(r"[\d.]+", done.stdout)
    return Link(rtt_ms=float(rtt), worst_ms=float(worst), lost=float(lost))


_ECHO = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind((sys.argv[1], 0)); print(s.getsockname()[1], flush=True)
while True: s.sendto(*s.recvfrom(64))
"""
_PROBE = """
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.setblocking(False); times = {}; got = {}
to, n = (sys.argv[1], int(sys.argv[2])), int(sys.argv[3])
end = None
i = 0
while i < n or time.monotonic() < end or (len(got) < 0.9 * n and time.monotonic() < end + 60):
    if i < n:
        times[i] = time.monotonic(); s.sendto(str(i).encode(), to); i += 1; end = time.monotonic() + 1.0
    until = time.monotonic() + 0.005
    while time.monotonic() < until:
        try: k = int(s.recv(64)); got[k] = time.monotonic() - times[k]
        except BlockingIOError: time.sleep(0.0005)
rtts = sorted(got.values())
print(rtts[len(rtts) // 2] * 1e3, rtts[-1] * 1e3, 1 - len(got) / n)
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
