"""What a terminal shows of a process that failed, as text; what fails while the file system does."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.families.registry import known_config
from areal_lora.launcher import restarts, watch
from areal_lora.launcher.plan import CONTROLLER, SERVER, TRAINER, ProcessSpec, make_plan
from areal_lora.launcher.restarts import ProcessExit
from areal_lora.launcher.watch import print_failure
from areal_lora.obs.console import LiveConsole
from areal_lora.obs.metrics.records import AdapterStateRecord
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterPhase
from tests.support.clocks import Clock
from tests.support.paths import EXAMPLES

TEXT, SHOWN = "\x1b]52;c;Yg==\x07 \x9b2J", r"\x1b]52;c;Yg==\x07 \x9b2J"


def test_the_end_of_a_log_does_not_steer_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(f"[bold] {TEXT}\n")
    out, spec = io.StringIO(), ProcessSpec(role="trainer", index=0, argv=("x",), env={})
    console = Console(file=out, force_terminal=True, color_system=None, highlight=False)
    print_failure(ProcessExit(spec=spec, code=1, log=tmp_path / "log"), console)
    assert out.getvalue().splitlines()[-1] == f"  [bold] {SHOWN}"


def test_the_reason_of_a_failed_adapter_does_not_steer_the_terminal(tmp_path: Path) -> None:
    """In the panel of a terminal and in the lines of a log."""
    record = AdapterStateRecord(adapter="toy", state=AdapterPhase.FAILED, version=1, reason=TEXT)
    for terminal in (True, False):
        out = io.StringIO()
        console = Console(file=out, force_terminal=terminal, color_system=None, width=120)
        view = LiveConsole(RunFolder(tmp_path), {"toy": 9}, console=console)
        view.start()
        with MetricsWriter(RunFolder(tmp_path)) as writer:
            writer.write(record)
        view.stop()
        assert SHOWN in out.getvalue()
        assert TEXT not in out.getvalue()


class Outage:
    """Processes in virtual time whose run folder fails with ESTALE from 100 s to 300 s.

    In it a server and all ranks of the trainer end, a server is lost with its node, and the controller hangs.
    """

    def __init__(self, folder: Path, specs: Sequence[ProcessSpec], patch: pytest.MonkeyPatch) -> None:
        self.clock, self._root, self._running = Clock(), str(folder), list(specs)
        self.started, self.ended, self.refused, self._beats = list[str](), list[str](), 0, dict[str, int]()
        self._due: dict[str, tuple[float, dict[str, Any]]] = {
            "server-0": (110.0, {"code": 75}),
            "trainer-0": (120.0, {"code": 75}),
            "server-1": (130.0, {"code": -9, "lost": True, "node": "n1"}),
        }
        for name in ("stat", "unlink", "mkdir", "open", "listdir", "scandir", "utime", "replace"):
            patch.setattr(os, name, self._failing(getattr(os, name)))
        patch.setattr(io, "open", self._failing(io.open))

    def _failing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            path = args[0] if args else "."
            if isinstance(path, str | Path) and str(path).startswith(self._root) and 100 <= self.clock.now < 300:
                self.refused += 1
                raise OSError(errno.ESTALE, "Stale file handle", str(path))
            return real(*args, **options)

        return call

    def beats(self, _: object, names: Collection[str] | None = None) -> dict[str, int]:
        for spec in self._running:
            if spec.name != "controller-0" or self.clock.now < 100 or spec.name in self.started:
                self._beats[spec.name] = int(self.clock.now * 1e9)
        return dict(self._beats)

    def sleep(self, seconds: float) -> None:
        self.clock.now += seconds

    def start(self, specs: Sequence[ProcessSpec]) -> None:
        self.started += [spec.name for spec in specs]
        self._running += specs

    def poll(self) -> list[ProcessExit]:
        over = [spec for spec in self._running if spec.name in self._due and self._due[spec.name][0] <= self.clock.now]
        self._running = [spec for spec in self._running if spec not in over]
        return [ProcessExit(spec=s, log=Path(self._root, "log"), **self._due.pop(s.name)[1]) for s in over]

    def end(self, specs: Collection[ProcessSpec], grace_s: float = 0.0, why: str = "") -> list[ProcessExit]:
        there = [spec for spec in self._running if spec in specs]
        self._running = [spec for spec in self._running if spec not in specs]
        self.ended += [spec.name for spec in there]
        return [ProcessExit(spec=spec, code=-9, log=Path(self._root, "log"), why=why) for spec in there]

    def running(self) -> list[ProcessSpec]:
        return list(self._running)

    def ask_stacks(self) -> None: ...


def test_a_file_system_that_fails_for_minutes_ends_neither_the_run_nor_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ((CONTROLLER, 0), (SERVER, 0), (SERVER, 1), (TRAINER, 0))
    specs = tuple(ProcessSpec(role=role, index=i, argv=("x",), env={}) for role, i in names)
    config = load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"])
    plan = make_plan(config, Facts(hf_config=known_config("Qwen/Qwen3-30B-A3B")))
    folder, out = RunFolder(tmp_path / "run"), io.StringIO()
    folder.path.mkdir()
    folder.page.write_text("http://127.0.0.1:1/x")
    it = Outage(folder.path, specs, monkeypatch)
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=it.clock, sleep=it.sleep))
    monkeypatch.setattr(watch, "last_beats", it.beats)
    monkeypatch.setattr(restarts, "revalidated_beats", it.beats)
    monkeypatch.setattr(restarts, "WRITE_S", 0.0)
    view = LiveConsole(folder, {}, Console(file=out, width=200))
    run = watch.Watch(config, replace(plan, run_folder=folder, processes=specs), it, view, poll_s=0.25)
    assert run.until_end(lambda: it.clock.now >= 400.0) is None
    assert it.refused > 100
    assert it.started == ["server-0", "trainer-0", "controller-0"], out.getvalue()
    assert it.ended == ["controller-0"]
    assert "the stacks of all processes are in no file: " in out.getvalue()
    assert "the other servers continue" in out.getvalue()
