"""Start ``python -m MODULE`` as a fork of a process that has imported what it needs.

Importing vLLM takes as long as all that most tests do with a server. How a server starts in a new interpreter is
seen by every test of a whole run.
"""

from __future__ import annotations

import atexit
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

from tests.support.paths import ROOT


class Fork:
    """A process, with what ``subprocess.Popen`` has for it; it is killed when nothing refers to this any more."""

    def __init__(self, link: socket.socket, args: Sequence[str]) -> None:
        self.args, self.pid = args, int(link.recv(64))
        self.returncode: int | None = None
        link.setblocking(False)
        self._link = link

    def __enter__(self) -> Fork:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.wait()

    def poll(self) -> int | None:
        if self.returncode is None:
            with suppress(BlockingIOError):
                self.returncode = int(self._link.recv(64) or -signal.SIGKILL)  # with its parent
                self._link.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


FOLDER = "AREAL_LORA_TEST_FORKS"
"""Variable: the folder with the parents' sockets, and the pipe that they end with. All lanes of a session have one."""


@cache
def session() -> Path:
    """The folder; made where no one has, and removed at this process's end, with which the parents end, too."""
    if FOLDER not in os.environ:
        folder = Path(tempfile.mkdtemp(prefix="forks-"))
        os.mkfifo(folder / "pipe")
        held = os.open(folder / "pipe", os.O_RDWR)
        os.environ[FOLDER] = str(folder)
        atexit.register(_end, folder, held)
    return Path(os.environ[FOLDER])


def _end(folder: Path, held: int) -> None:
    os.close(held)
    for address in folder.iterdir():
        while address.is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
                try:
                    link.connect(str(address))
                except ConnectionRefusedError:  # its parent has ended
                    break
            time.sleep(0.02)
    shutil.rmtree(folder)


class Starter:
    """The process with the imports of the module ``preload``, which have been made. All of a session share it."""

    def __init__(self, preload: str) -> None:
        self.address = str(session() / preload)
        with suppress(FileExistsError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(own := f"{self.address}.{os.getpid()}")
            listener.listen(64)
            try:
                os.link(own, self.address)  # of two lanes the first one
            finally:
                os.unlink(own)
            number = listener.fileno()
            subprocess.run(  # it forks the parent
                [sys.executable, "-m", "tests.support.forks.parent", preload, str(number), str(session() / "pipe")],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                check=True,
            )
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            link.connect(self.address)
            link.send(b"ready?")
            link.recv(1)  # its end: no test's patience is for imports

    def start(self, module: str, arguments: Sequence[str], env: Mapping[str, str], output: BinaryIO) -> Fork:
        """``python -m module *arguments`` with both outputs in a file, and no input."""
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.connect(self.address)
        request = json.dumps([module, list(arguments), dict(env), os.getcwd()]).encode()
        with open(os.devnull, "rb") as nothing:
            socket.send_fds(link, [request], [nothing.fileno(), output.fileno(), output.fileno()])
        return Fork(link, [sys.executable, "-m", module, *arguments])

    def output(self, module: str, arguments: Sequence[str], timeout_s: float) -> str:
        """Both outputs of ``python -m module *arguments``. Raises AssertionError if it does not end well."""
        with tempfile.TemporaryFile() as file:
            code = self.start(module, arguments, os.environ | {"OMP_NUM_THREADS": "1"}, file).wait(timeout_s)
            file.seek(0)
            said = file.read().decode(errors="replace")
        assert code == 0, said[-4000:]
        return said

    def interpreter(self, path: Path, module: str = "", environment: Mapping[str, str] | None = None) -> Path:
        """Write an executable that does what ``python -m MODULE ...`` does, with a fork; for ``trainer.python``.

        With ``module`` it runs that one whatever it is asked for. ``environment`` is added.
        """
        shim = Path(__file__).with_name("interpreter.py")
        # Isolated and without site-packages: it starts in a hundredth of a second.
        command = [sys.executable, "-I", "-S", str(shim), self.address]
        if environment:
            command = ["env", *(f"{name}={value}" for name, value in environment.items()), *command]
        other = f'shift 2\nset -- -m {module} "$@"\n' if module else ""
        path.write_text(f'#!/bin/sh\n{other}exec {shlex.join(command)} "$@"\n', encoding="utf-8")
        path.chmod(0o755)
        return path


@cache
def starter_of(preload: str) -> Starter:
    return Starter(preload)
