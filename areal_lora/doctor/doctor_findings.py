"""The result of a check."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Works, but not as well as it could; or was not examined."""
    FAIL = "fail"


class DoctorFinding(msgspec.Struct, frozen=True, kw_only=True):
    """``path`` is what was examined: a key, a file, an interpreter or a node. ``fix`` is empty where all is well."""

    check: str
    level: Level
    path: str
    reason: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.level:<4}  {self.check:<13} {self.path}: {self.reason}"
        return f"{text} (fix: {self.fix})" if self.fix else text


def ok(check: str, path: str, reason: str) -> DoctorFinding:
    return DoctorFinding(check=check, level=Level.OK, path=path, reason=reason)


def note(check: str, path: str, reason: str, fix: str = "") -> DoctorFinding:
    return DoctorFinding(check=check, level=Level.NOTE, path=path, reason=reason, fix=fix)


def fail(check: str, path: str, reason: str, fix: str) -> DoctorFinding:
    return DoctorFinding(check=check, level=Level.FAIL, path=path, reason=reason, fix=fix)
