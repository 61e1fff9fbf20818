"""Two hosts on one machine: network namespaces with an ``eth0`` each, joined by a cable, with hosts files of their own.

Each host knows itself as 127.0.1.1, as Debian sets it up, and the other by its address.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    name: str
    ipv4: str
    ipv6: str

    def start(self, *command: str, **options: object) -> subprocess.Popen[str]:
        return subprocess.Popen(["ip", "netns", "exec", self.name, *command], text=True, **options)  # type: ignore[call-overload]


def unavailable() -> str:
    """Why hosts cannot be made here; empty if they can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and iproute2"
    probe = f"al-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"ip netns add: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return ""


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    made = [Host(name=f"al-{os.getpid()}-{i}", ipv4=f"10.77.0.{i}", ipv6=f"fd77::{i}") for i in (1, 2)]
    with ExitStack() as undo:
        for host in made:
            ip("netns", "add", host.name)
            undo.callback(ip, "netns", "del", host.name)
        cable = [f"al{os.getpid()}.{i}" for i in (1, 2)]
        ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for host, other, end in zip(made, reversed(made), cable, strict=True):
            ip("link", "set", end, "netns", host.name, "name", "eth0")
            ip("-n", host.name, "addr", "add", f"{host.ipv4}/24", "dev", "eth0")
            ip("-n", host.name, "addr", "add", f"{host.ipv6}/64", "dev", "eth0", "nodad")
            for device in ("lo", "eth0"):
                ip("-n", host.name, "link", "set", device, "up")
            # `ip netns exec` shows this as /etc/hosts.
            files = Path("/etc/netns") / host.name
            files.mkdir(parents=True)
            undo.callback(shutil.rmtree, files)
            (files / "hosts").write_text(
                f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()} {host.name}\n"
                f"{other.ipv4} {other.name}\n{other.ipv6} {other.name}\n"
            )
        yield made[0], made[1]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
