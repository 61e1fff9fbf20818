"""A stand-in for a process of a run, held in one phase: ``python stage.py ROLE INDEX PHASE FOLDER``.

It holds what the real one holds there: listening ports, connections, shared memory, children that
do not listen, threads that write; and it ends as well or badly as the real one would. Prints
``ready PORT`` once it is in the phase.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

PHASES = (
    "servers starting",
    "loading the base",
    "first publish",
    "waiting for rollouts",
    "learning",
    "checkpoint being written",
    "publish under way",
    "closing",
)
STARTING = PHASES[:2]
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
KEEPS_SHARED_MEMORY = (
    DEAF + "import mmap, sys; f = open(sys.argv[1], 'wb+'); f.truncate(4096); m = mmap.mmap(f.fileno(), 4096); "
    "print('up', flush=True); time.sleep(600)"
)


def main() -> None:
    role, index, phase, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    (folder / f"{role}-{index}.port").write_text(str(port))
    {"server": server, "controller": controller, "trainer": trainer}[role](index, phase, folder, listener)


def ready(listener: socket.socket) -> None:
    print("ready", listener.getsockname()[1], flush=True)


def child(*argv: str, new_session: bool = False, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", *argv], stdout=subprocess.PIPE, start_new_session=new_session, env=env
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def server(index: int, phase: str, folder: Path, listener: socket.socket) -> None:
    """vLLM's engine is a child with shared memory that does not listen to SIGTERM."""
    engine = child(KEEPS_SHARED_MEMORY, f"/dev/shm/{os.environ['SHARED']}_{index}")
    if phase not in STARTING:

        def stop(*_: object) -> None:
            time.sleep(0.4)  # running requests
            engine.kill()
            sys.exit(0)

        signal.signal(signal.SIGTERM, stop)
    ready(listener)
    if "publish" in phase:
        connection, _ = listener.accept()
        threading.Thread(target=connection.recv, args=(1 << 20, socket.MSG_WAITALL), daemon=True).start()
    while True:
        time.sleep(1)


def controller(index: int, phase: str, folder: Path, listener: socket.socket) -> None:
    """Its scorers have an environment of their own; one is busy and deaf."""
    if phase == "closing":
        ready(listener)
        sys.exit(0)
    if phase not in STARTING:
        child(DEAF + "print('up', flush=True); time.sleep(600)", env={"PATH": os.defpath})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ready(listener)
    while True:
        time.sleep(1)


def trainer(index: int, phase: str, folder: Path, listener: socket.socket) -> None:
    if phase in ("learning", "closing") or (phase == "first publish" and index):
        # Inside a kernel or a collective no signal is heard.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if phase == "checkpoint being written":
        threading.Thread(target=write_for_ever, args=(folder / f"rank-{index}",), daemon=True).start()
    if "publish" in phase and index == 0:
        connection = socket.create_connection(("127.0.0.1", port_of(folder, "server-0")))
        threading.Thread(target=send_for_ever, args=(connection,), daemon=True).start()
    if phase == "waiting for rollouts" and index == 0:
        socket.create_connection(("127.0.0.1", port_of(folder, "controller-0")))
    ready(listener)
    if phase in ("loading the base", "learning"):
        area = mmap.mmap(-1, 1 << 22)
        while True:
            bytes(area).count(b"x")
            time.sleep(0.05)
    threading.Event().wait()


def port_of(folder: Path, name: str) -> int:
    while not (path := folder / f"{name}.port").exists() or not path.read_text():
        time.sleep(0.02)
    return int(path.read_text())


def write_for_ever(path: Path) -> None:
    n = 0
    while True:
        with path.with_name(f".{path.name}.{n % 4}").open("wb") as file:
            file.write(b"x" * (1 << 20))
            os.fsync(file.fileno())
        n += 1
        time.sleep(0.01)


def send_for_ever(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"x" * 1024)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
