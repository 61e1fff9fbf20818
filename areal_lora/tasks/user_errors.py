"""Exceptions of user code: their text, the line of the user's file, and whether another try may help."""

from __future__ import annotations

import errno
import inspect
import logging
import socket
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_lora.types import Cause

TRACE_CHARACTERS, MOST_TRACES = 4000, 20
_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = tuple(
    {*(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")), _PACKAGE}
)
# Not KeyError or AssertionError: they also follow from the answer of an overloaded service.
_MISTAKES = (ArithmeticError, AttributeError, ImportError, NameError, NotImplementedError, SyntaxError, TypeError)
_UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH)

log = logging.getLogger(__name__)


def describe(error: BaseException, function: Any = None) -> str:
    """One line: what was raised, and the innermost line of the user's own files, else where ``function`` is defined."""
    try:
        text = f"{type(error).__name__}: {error}"[:400]
    except Exception:  # fault boundary: even the message of a user's exception is user code  # noqa: BLE001
        text = type(error).__name__
    place = _place(error) or _defined(function)
    return f"{text} ({place})" if place else text


def trace(error: BaseException) -> str:
    """The traceback as Python prints it, without the frames of this package; its end where it is long."""
    try:
        shown = traceback.TracebackException.from_exception(error)
        shown.stack[:] = [frame for frame in shown.stack if not frame.filename.startswith(_PACKAGE)]
        return "".join(shown.format())[-TRACE_CHARACTERS:]
    except Exception:  # fault boundary: even the message of a user's exception is user code  # noqa: BLE001
        return type(error).__name__


def cause_of(error: BaseException, *, alone: bool) -> Cause:
    """Why user code failed. ``alone``: it uses nothing outside, so what it raises, it raises again."""
    if any(map(_lost_connection, _chain(error))):
        return Cause.UNREACHABLE
    if isinstance(error, MemoryError):
        return Cause.OTHER
    return Cause.CODE if alone or isinstance(error, _MISTAKES) else Cause.OTHER


@dataclass(slots=True)
class Traces:
    """Logs tracebacks of user code, once for each type and line."""

    _logged: set[tuple[str, str]] = field(default_factory=set)

    def log(self, what: str, detail: str, text: str) -> None:
        """``detail`` is what `describe` returned for ``what``, ``text`` its traceback."""
        where = (detail.partition(":")[0], detail.rpartition("(")[2])
        if where not in self._logged and len(self._logged) < MOST_TRACES:
            self._logged.add(where)
            log.info("%s failed: %s", what, detail)
            for line in text.splitlines():  # a record has one line
                log.info("    %s", line)


def _lost_connection(error: BaseException) -> bool:
    known = isinstance(error, ConnectionError | socket.gaierror)
    return known or (isinstance(error, OSError) and error.errno in _UNREACHABLE)


def _chain(error: BaseException | None, depth: int = 8) -> Iterator[BaseException]:
    """``error`` and what it was raised from: libraries wrap the errors of their connections."""
    if error is None or depth == 0:
        return
    yield error
    yield from _chain(error.__cause__ or error.__context__, depth - 1)
    for part in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        yield from _chain(part, depth - 1)


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<"))]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def _defined(function: Any) -> str:
    try:
        return f"{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}"
    except (OSError, TypeError):  # compiled, an object that is called, or the file has changed
        return ""
