"""Statuses: what each process does or waits for, one line in ``status/<role>-<index>.txt``.

The console shows them, and a stall report quotes them.
"""

from __future__ import annotations

import contextlib
import os
import threading

from areal_lora.processes.log import get_logger
from areal_lora.run_folder.paths import RunFolder

log = get_logger(__name__)


def set_status(run_folder: RunFolder, role: str, index: int, text: str) -> None:
    """Replace the status line of ``role-index``: what it does or waits for, in a few words.

    A disk error is logged as a warning: no process fails for want of a status.
    """
    target = run_folder.status(f"{role}-{index}")
    # Threads of one process may report at the same time: the id keeps their temporary files apart.
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident():x}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(" ".join(text.split()) + "\n", encoding="utf-8")
        temporary.replace(target)
    except OSError as error:
        log.warning("%s cannot be written: %s", target, error.strerror)
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def read_statuses(run_folder: RunFolder) -> dict[str, str]:
    """``{"trainer-0": "loading the base model", ...}`` in name order; empty before the first report.

    Unreadable files are omitted: callers read statuses again, and no process depends on one.
    """
    statuses = {}
    with contextlib.suppress(OSError):
        for path in sorted(run_folder.statuses.glob("[!.]*.txt")):
            with contextlib.suppress(OSError):
                statuses[path.stem] = path.read_text(encoding="utf-8").strip()
    return statuses
