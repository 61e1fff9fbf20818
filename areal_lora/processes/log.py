"""Logging to stderr and one-line process statuses.

Every process logs to stderr; the launcher redirects that to ``<run_folder>/logs/``. What a
process is doing or waiting for right now is one line in ``<run_folder>/status/``, so that a
person and the console see why nothing moves yet.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from pathlib import Path

ROOT = "areal_lora"
STATUS_FOLDER = "status"


class _Formatter(logging.Formatter):
    """``12:04:31.208 trainer-0 INFO name: message``; line breaks in a message are escaped.

    Messages can hold text a model wrote; escaping keeps it from forging a record. Lines of a
    traceback follow the record, indented.
    """

    def __init__(self, who: str) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        name = record.name.removeprefix(f"{ROOT}.")
        when = f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d}"
        line = f"{when} {self._who} {record.levelname} {name}: {text}"
        if record.exc_info:
            line += "".join(f"\n    {row}" for row in self.formatException(record.exc_info).splitlines())
        return line


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; pass ``__name__``. Names outside the package are put below it."""
    inside = name == ROOT or name.startswith(f"{ROOT}.")
    return logging.getLogger(name if inside else f"{ROOT}.{name.strip('_')}")


def setup_logging(role: str, index: int | None = None, level: int = logging.INFO) -> None:
    """Send the package's records to stderr, tagged ``role-index``. A second call replaces the first."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(role if index is None else f"{role}-{index}"))
    logger = logging.getLogger(ROOT)
    for old in list(logger.handlers):
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False


def set_status(run_folder: Path | str, role: str, index: int, text: str) -> None:
    """Replace the status line of ``role-index``: what it does or waits for, in a few words.

    A disk that fails is a warning: nobody ends for want of a status.
    """
    folder = Path(run_folder) / STATUS_FOLDER
    target = folder / f"{role}-{index}.txt"
    # Threads of one process may report at the same time: the id keeps their temporary files apart.
    temporary = folder / f".{target.name}.{os.getpid()}.{threading.get_ident():x}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(" ".join(text.split()) + "\n", encoding="utf-8")
        temporary.replace(target)
    except OSError as error:
        get_logger(__name__).warning("%s cannot be written: %s", target, error.strerror)
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def read_statuses(run_folder: Path | str) -> dict[str, str]:
    """``{"trainer-0": "loading the base model", ...}`` in name order; empty before the first report.

    What cannot be read now is left out: statuses are looked at again, and nobody ends for want of one.
    """
    folder, statuses = Path(run_folder) / STATUS_FOLDER, {}
    with contextlib.suppress(OSError):
        for path in sorted(folder.glob("[!.]*.txt")):
            with contextlib.suppress(OSError):
                statuses[path.stem] = path.read_text(encoding="utf-8").strip()
    return statuses
