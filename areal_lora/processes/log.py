"""Log to stderr, which the launcher redirects to the ``logs`` folder of the run."""

import logging
import sys

ROOT = "areal_lora"
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def printable(text: str) -> str:
    """``text`` with control characters as ``\\x1b``: texts of models, rows and tenants may not steer a terminal."""
    return text.translate(_CONTROLS)


class _Formatter(logging.Formatter):
    """``12:04:31.208 trainer-0 INFO name: message``; line breaks and control characters in a message are escaped.

    Messages can hold model output; escaping prevents forged records. Traceback lines follow the record, indented.
    """

    def __init__(self, process: str) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        text = printable(record.getMessage().replace("\r", "\\r").replace("\n", "\\n"))
        name = record.name.removeprefix(f"{ROOT}.")
        when = f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d}"
        line = f"{when} {self._process} {record.levelname} {name}: {text}"
        if record.exc_info:
            line += "".join(f"\n    {printable(row)}" for row in self.formatException(record.exc_info).splitlines())
        return line


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; pass ``__name__``. Names outside the package become its children."""
    inside = name == ROOT or name.startswith(f"{ROOT}.")
    return logging.getLogger(name if inside else f"{ROOT}.{name.strip('_')}")


def setup_logging(role: str, index: int | None = None, level: int = logging.INFO) -> None:
    """Log the package's records to stderr with the tag ``role-index``. A second call replaces the first."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(role if index is None else f"{role}-{index}"))
    logger = logging.getLogger(ROOT)
    for old in list(logger.handlers):
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
