"""What listens in a running run, what it speaks, and whom it answers.

A script, so that it can be started inside the network namespace of the run::

    python -m tests.support.e2e.listeners MARK RUN_FOLDER     # one line of JSON: a list of Listener

``MARK`` is the value of ``AREAL_LORA_TEST`` in the environment of its launcher.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import os
import socket
import ssl
import stat
import struct
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
import zmq
from zmq.utils.monitor import recv_monitor_message

from areal_lora.network.rpc import HANDSHAKE_REFUSED, connect_curve
from areal_lora.network.tls import Plane, authorization, bearer_key, client_context
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import read_secret
from tests.support.launcher.stops import marked

FOREIGN = "5f" * 32  # the secret of another run
SILENCE_S, PATIENT = 1.0, 20
"""What is not as it should be is looked at again, with so many times the patience: its process may be stalled."""
PROCESSES = {
    "areal_lora.trainer.main": "trainer rank",
    "areal_lora.rollout.main": "controller",
    "areal_lora.rollout.agent_api.gateway_process": "controller",
    "areal_lora.engine.vllm_ext.server.main": "rollout server",
    "tests.support.engine.vllm_ext.stand_in": "rollout server",
    "areal_lora.launcher.guardian": "guardian",
    "areal_lora.tasks.scorer_child": "scorer",
    "areal_lora.launch": "launcher",
}
ROLES = {
    "control": ("trainer", "controller"),
    "worker channel": ("server-worker", "server-channel"),
    "store": ("torch-store-client", "torch-store"),
}
PATHS = {
    "admin": [("GET", "/admin/info"), ("GET", "/admin/ping"), ("POST", "/admin/drop"), ("POST", "/admin/score")],
    "data": [("GET", "/v1/models"), ("GET", "/metrics"), ("POST", "/v1/completions")],
    "agents": [("POST", "/v1/chat/completions"), ("POST", "/v1/completions")],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """``faults`` are answers to someone who should get none, or none to someone who should."""

    process: str
    pid: int
    plane: str
    address: str
    port: int
    transport: str = ""
    faults: tuple[str, ...] = ()


def main(mark: str, run_folder: Path) -> list[Listener]:
    secret = read_secret(RunFolder(run_folder))
    of_the_run = marked({"AREAL_LORA_TEST": mark})
    family = list({each.pid: each for p in of_the_run for each in (p, *p.children(recursive=True))}.values())
    found = list(listening(family, planes(run_folder)))
    with ThreadPoolExecutor(16) as pool:
        judged = list(pool.map(lambda listener: looked_at(listener, secret), found))
    for process in family:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            raise SystemExit(f"{process} has died of being asked")
    return judged


def looked_at(listener: Listener, secret: str) -> Listener:
    once = judge(identified(listener, 1), secret, 1)
    silent = bool(listener.plane) and once.transport in ("gloo", "silent")
    return judge(identified(listener, PATIENT), secret, PATIENT) if once.faults or silent else once


def planes(run_folder: Path) -> dict[tuple[int, int], str]:
    """Plane by (process id, port), of what is published."""
    endpoints = [json.loads(path.read_text()) for path in (run_folder / "rendezvous").glob("*.json")]
    return {(e["pid"], port): plane for e in endpoints for plane, port in e["ports"].items()}


def listening(family: list[psutil.Process], published: dict[tuple[int, int], str]) -> Iterator[Listener]:
    """TCP, UDP and Unix sockets, whatever they are for."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    accepting = {int(line[6]): line[7] if len(line) > 7 else "" for line in lines if int(line[3], 16) & 0x10000}
    for process in family:
        name = name_of(process)
        for c in process.net_connections("inet"):
            if c.status == psutil.CONN_LISTEN or (c.type == socket.SOCK_DGRAM and not c.raddr):
                plane = published.get((process.pid, c.laddr.port), "")
                transport = "UDP" if c.type == socket.SOCK_DGRAM else ""
                yield Listener(
                    process=name,
                    pid=process.pid,
                    plane=plane,
                    address=c.laddr.ip,
                    port=c.laddr.port,
                    transport=transport,
                )
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inode = os.readlink(link).removeprefix("socket:[").removesuffix("]")
                if inode.isdigit() and int(inode) in accepting:
                    path = accepting[int(inode)]
                    yield Listener(
                        process=name, pid=process.pid, plane="engine queue", address=path, port=0, transport="Unix"
                    )


def name_of(process: psutil.Process) -> str:
    # Its parent first: an engine is forked, and has the server's command line where its title cannot be set.
    parent = process.parent()
    if parent is not None and name_of(parent) in ("rollout server", "vLLM engine"):
        return "vLLM engine"
    words = process.cmdline()
    return next((PROCESSES[word] for word in words if word in PROCESSES), " ".join(words)[:60])


def identified(listener: Listener, patience: int) -> Listener:
    if listener.transport:
        return listener
    host = "127.0.0.1" if ipaddress.ip_address(listener.address).is_unspecified else listener.address
    transport = speaks(host, listener.port, SILENCE_S * patience)
    plane = listener.plane
    if transport == "silent" and listener.process in ("trainer rank", "vLLM engine", "rollout server"):
        transport, plane = "gloo", plane or "collectives"
    elif transport == "zmq CURVE" and listener.process == "rollout server":
        plane = plane or "worker channel"
    elif transport == "HTTP" and listener.process == "controller":
        plane = plane or "agents"
    elif transport in ("TCPStore", "zmq CURVE"):
        plane = plane or "store"
    return replace(listener, transport=transport, plane=plane)


def speaks(host: str, port: int, silence_s: float) -> str:
    if said(host, port, b"", silence_s)[:1] == b"\xff":
        # It names its mechanism only to who has named the same.
        named = [m for m in ("CURVE", "NULL", "PLAIN") if m.encode() in said(host, port, greeting(m), silence_s)[12:32]]
        return f"zmq {' '.join(named)}"
    anyone = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    with contextlib.suppress(OSError), socket.create_connection((host, port), silence_s) as raw:
        with anyone.wrap_socket(raw):
            return "HTTPS"
    if said(host, port, b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n", silence_s).startswith(b"HTTP/"):
        return "HTTP"
    # torch's store answers its ping to anyone: query 0 with the magic number, query 13 with a nonce.
    nonce = struct.pack("<I", 12345)
    if nonce in said(host, port, b"\x00" + struct.pack("<I", 0x3C85F7CE) + b"\x0d" + nonce, silence_s):
        return "TCPStore"
    return "silent"


def said(host: str, port: int, what: bytes, silence_s: float = SILENCE_S) -> bytes:
    """What the listener answers to ``what``, until it closes or is silent."""
    answer = b""
    with contextlib.suppress(OSError), socket.create_connection((host, port), silence_s) as raw:
        raw.sendall(what)
        while part := raw.recv(4096):
            answer += part
    return answer


def greeting(mechanism: str) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.encode().ljust(20, b"\0") + bytes(32)


def judge(listener: Listener, secret: str, patience: int) -> Listener:
    host = listener.address
    if listener.port and ipaddress.ip_address(host).is_unspecified:
        host = "127.0.0.1"
    match listener.transport:
        case "HTTPS" | "HTTP":
            faults = http_faults(host, listener, secret)
        case "zmq CURVE":
            faults = zmq_faults(host, listener, secret, patience)
        case "gloo":
            faults = [] if not said(host, listener.port, b"anybody there?\n" * 1000) else ["it answers"]
        case "Unix":
            faults = unix_faults(Path(listener.address))
        case "TCPStore":
            faults = []  # open to whoever reaches it, which the table must say
        case other:
            faults = [f"{other} is not known"]
    return replace(listener, faults=tuple(faults))


def http_faults(host: str, listener: Listener, secret: str) -> list[str]:
    plane, port = listener.plane, listener.port
    right = {} if plane == "agents" else authorization(secret, Plane(plane))
    shown = {"no key": None, "a wrong key": "0" * 64, "the run secret": secret}
    shown |= {f"the {p} key of another run": bearer_key(FOREIGN, p) for p in Plane}
    shown |= {f"the {p} key": bearer_key(secret, p) for p in Plane if p != plane}
    tls = client_context(secret, Plane(plane)) if listener.transport == "HTTPS" else None
    faults = []
    is_open = listener.transport == "HTTP" and plane == "data"  # on loopback, as the table says
    for method, path in PATHS[plane]:
        for who, key in shown.items():
            status = ask(host, port, tls, method, path, {"Authorization": f"Bearer {key}"} if key else {})
            if (status == 401) == is_open:
                faults.append(f"{method} {path} with {who}: {status}")
    if right:
        if (status := ask(host, port, tls, *PATHS[plane][0], right)) == 401:
            faults.append(f"with its key: {status}")
        if (status := ask(host, port, tls, *PATHS[plane][-1], right | {"Content-Length": str(1 << 40)})) != 413:
            faults.append(f"a body of a TiB: {status}")
    if listener.transport == "HTTPS":
        foreign = client_context(FOREIGN, Plane(plane))
        with contextlib.suppress(ssl.SSLCertVerificationError):
            ask(host, port, foreign, *PATHS[plane][0], {})
            faults.append("a client of another run takes it for its own")
        if said(host, port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").startswith(b"HTTP/"):
            faults.append("it answers without TLS")
    return faults


def ask(host: str, port: int, tls: ssl.SSLContext | None, method: str, path: str, headers: dict[str, str]) -> int:
    kind = http.client.HTTPConnection(host, port, timeout=150)
    if tls is not None:
        kind = http.client.HTTPSConnection(host, port, timeout=150, context=tls)
    with contextlib.closing(kind) as connection:
        connection.request(method, path, b"{}" if method == "POST" else None, headers)
        return connection.getresponse().status


def zmq_faults(host: str, listener: Listener, secret: str, patience: int) -> list[str]:
    client, server = ROLES[listener.plane]
    attempts: dict[str, tuple[str, str, str] | None] = {
        "no key": None,
        "a key of another run": (FOREIGN, client, server),
        "the key of another role": (secret, "somebody", server),
        "its own key": (secret, server, server),
    }
    faults = [f"admits {who}" for who, keys in attempts.items() if admitted(host, listener.port, keys, patience)]
    if not admitted(host, listener.port, (secret, client, server), patience):
        faults.append("refuses its client")
    huge = greeting("CURVE") + b"\x06" + struct.pack(">Q", 1 << 32) + bytes(4096)
    if not closes_after(host, listener.port, huge, 3.0 * patience):
        faults.append("takes in a message of 4 GiB before the handshake")
    return faults


def admitted(host: str, port: int, keys: tuple[str, str, str] | None, patience: int) -> bool:
    """Whether the handshake succeeds, with a kind of socket that fits."""
    return any(shakes_hands(host, port, keys, kind, patience) for kind in (zmq.DEALER, zmq.PUSH))


def shakes_hands(host: str, port: int, keys: tuple[str, str, str] | None, kind: int, patience: int) -> bool:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = context.socket(kind)
    peer.linger = 0
    if keys is not None:
        connect_curve(peer, *keys, max_bytes=1 << 20)
    monitor = peer.get_monitor_socket(HANDSHAKE_REFUSED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
    peer.connect(f"tcp://{host}:{port}")
    try:
        if not monitor.poll(5000 * patience):
            return False
        return bool(recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)
    finally:
        peer.disable_monitor()
        monitor.close(linger=0)
        peer.close(linger=0)
        context.term()


def closes_after(host: str, port: int, what: bytes, patience_s: float) -> bool:
    with socket.create_connection((host, port), patience_s) as raw:
        try:
            raw.sendall(what)
            deadline = time.monotonic() + patience_s
            while time.monotonic() < deadline:
                if not raw.recv(4096):
                    return True
        except TimeoutError:
            return False
        except OSError:
            return True
    return False


def unix_faults(path: Path) -> list[str]:
    status = path.stat()
    faults = [] if status.st_uid == os.getuid() else ["it belongs to another user"]
    return faults + (["others may connect"] if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else [])


if __name__ == "__main__":
    print(json.dumps([asdict(listener) for listener in main(sys.argv[1], Path(sys.argv[2]))]))
