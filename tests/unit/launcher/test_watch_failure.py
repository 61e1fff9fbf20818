"""What a terminal shows of a process that failed: the end of its log, as text."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from areal_lora.launcher.plan import ProcessSpec
from areal_lora.launcher.restarts import ProcessExit
from areal_lora.launcher.watch import print_failure
from areal_lora.obs.console import LiveConsole
from areal_lora.obs.metrics.records import AdapterStateRecord
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterPhase

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
