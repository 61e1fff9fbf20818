"""``areal-lora logs RUN [ROLE[-INDEX]]``: the logs of a run's processes, merged."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from areal_lora.cli.status import Run, find_run
from areal_lora.errors import ConfigError

POLL_S = 0.3
BLOCK_BYTES = 1 << 16


def logs(
    run: Run,
    role: Annotated[
        str | None,
        typer.Argument(metavar="[ROLE[-INDEX]]", help="trainer, controller, server, service, job, or one of them"),
    ] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="show new lines until Ctrl-C")] = False,
    count: Annotated[int, typer.Option("-n", "--lines", min=0, help="last lines of each log")] = 20,
) -> None:
    """Show the last lines of the logs; a prefix names the process where there are several."""
    folder = find_run(run).logs
    tails = [Tail(path) for path in chosen(folder, role)]
    if not tails and not follow:
        names = sorted(path.stem for path in folder.glob("*.log"))
        what = f"no log of {role!r}" if role else "no log yet"
        fix = f"name one of {', '.join(names)}" if names else "start the run"
        raise ConfigError(str(folder), what, fix)
    for tail in tails:
        tail.start(count)
    _show(tails)
    while follow:
        time.sleep(POLL_S)
        known = {tail.path for tail in tails}
        tails += [Tail(path) for path in chosen(folder, role) if path not in known]
        _show(tails)


def chosen(folder: Path, role: str | None) -> list[Path]:
    """Logs whose name is ``role`` or starts with ``role-``, by name; all without one."""
    paths = sorted(folder.glob("*.log"), key=lambda path: (len(path.stem), path.stem))
    return [path for path in paths if role is None or path.stem == role or path.stem.startswith(f"{role}-")]


@dataclass(slots=True)
class Tail:
    """A log that is read from ``at`` on; a line that is not whole yet stays for the next call."""

    path: Path
    at: int = 0

    def start(self, count: int) -> None:
        """Move to the beginning of the last ``count`` lines. Reads backwards, block by block."""
        with self.path.open("rb") as file:
            size = at = file.seek(0, 2)
            found = b""
            while at and found.count(b"\n") <= count:
                start = max(0, at - BLOCK_BYTES)
                file.seek(start)
                found, at = file.read(at - start) + found, start
            lines = found.splitlines(keepends=True)
            self.at = size - sum(map(len, lines[len(lines) - min(count, len(lines)) :]))

    def read_new(self, *, whole: bool) -> Iterator[str]:
        """Lines since the last call; with ``whole`` only those that end. A file that was cut starts again."""
        with self.path.open("rb") as file:
            if self.path.stat().st_size < self.at:
                self.at = 0
            file.seek(self.at)
            for line in file:
                if whole and not line.endswith(b"\n"):
                    return
                self.at += len(line)
                yield line.decode("utf-8", "replace").rstrip("\r\n")


def _show(tails: list[Tail]) -> None:
    width = max((len(tail.path.stem) for tail in tails), default=0)
    for tail in tails:
        prefix = f"{tail.path.stem:<{width}} | " if len(tails) > 1 else ""
        for line in tail.read_new(whole=False):
            print(prefix + line)
    sys.stdout.flush()
