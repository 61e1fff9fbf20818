"""The processes of a crash run: the package's own ``main`` functions, and a diary of what a trainer did."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path
from typing import Any

DIARY = "diary.jsonl"
ALLOWED = "allowed"
"""File with the number of steps that a trainer may take while servers start; without it there is no limit."""
SLOW_DISK_S = "SLOW_DISK_S"
"""Variable: seconds that each file of a checkpoint takes longer."""


def run(role: str, argv: tuple[str, ...], env: dict[str, str], fault: str, folder: Path, life: int) -> None:
    """Become ``role`` of the run in ``folder``; ends this process."""
    os.setsid()
    log = os.open(
        folder / "logs" / f"{role}-{env.get('RANK', argv[-1] if role == 'server' else '0')}.log",
        os.O_WRONLY | os.O_CREAT | os.O_APPEND,
        0o600,
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(env)
    from areal_lora.processes import watched

    if fault:
        watched._plan = watched.parse(fault)
    main = {"trainer": _trainer, "controller": _controller, "server": _server}[role]
    code = main(list(argv), folder, life)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _controller(argv: list[str], folder: Path, life: int) -> int:
    from areal_lora.rollout.main import main

    return main(argv)


def _server(argv: list[str], folder: Path, life: int) -> int:
    from tests.support.engine.vllm_ext.stand_in import main

    return main(argv)


def _trainer(argv: list[str], folder: Path, life: int) -> int:
    from areal_lora.checkpoint.state import Disk
    from areal_lora.rollout.channel.client import ControllerClient
    from areal_lora.trainer import loop, main
    from areal_lora.trainer.collective import next_work
    from tests.support.e2e.lenient_trainer import lift_checks

    lift_checks()
    diary = Diary(folder, life)
    collate, learn, announce = next_work.collate, loop.learn, ControllerClient.announce
    write = Disk.write
    trained: dict[str, list[int]] = {}  # versions of the tokens of each group
    taken = count()

    def held(n: int) -> bool:
        try:
            return n >= int((folder / ALLOWED).read_text())
        except FileNotFoundError:
            return False

    def collated(packed: Any, *held: Any) -> Any:
        batch = collate(packed, *held)
        every = packed.runs[:, 0].repeat(packed.runs[:, 1])
        trained.clear()
        for row, (a, b) in zip(packed.rows, pairwise(batch.cu_seqlens.tolist()), strict=True):
            versions = trained.setdefault(row.uid.rpartition(":")[0], [])
            versions += [version for version in every[a:b].tolist() if version >= 0]
        return batch

    def learned(*args: Any, version: int, **kwargs: Any) -> Any:
        n = next(taken)
        while held(n):
            time.sleep(0.02)
        report = learn(*args, version=version, **kwargs)
        diary.write(
            what="learnt", adapter=args[1].name, version=version, uids=list(trained), tokens=list(trained.values())
        )
        return report

    def written(self: Any, *args: Any) -> Any:
        time.sleep(float(os.environ[SLOW_DISK_S]))
        return write(self, *args)

    def announced(self: Any, ref: Any, *args: Any) -> None:
        diary.write(what="announced", adapter=ref.name, version=ref.version)
        announce(self, ref, *args)

    _replace(next_work, "collate", collated)
    _replace(loop, "learn", learned)
    _replace(ControllerClient, "announce", announced)
    _replace(Disk, "write", written)
    return main.main(argv)


def _replace(place: Any, name: str, by: Callable[..., Any]) -> None:
    setattr(place, name, by)


class Diary:
    """Appends lines that survive a SIGKILL right after ``write``. One per trainer rank."""

    def __init__(self, folder: Path, life: int) -> None:
        self._file = os.open(folder / DIARY, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._who = {"life": life, "rank": int(os.environ["RANK"])}

    def write(self, **entry: Any) -> None:
        os.write(self._file, (json.dumps(self._who | entry | {"at": time.time()}) + "\n").encode())
