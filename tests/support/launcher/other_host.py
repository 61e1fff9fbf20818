"""See run folders as another host of their shared file system does."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_lora.launcher import start


def look_from_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From now on this process has another host's name, boot and table of locks."""
    (tmp_path / "locks").write_text("")
    (tmp_path / "boot").write_text("another\n")
    monkeypatch.setattr(start, "LOCKS", tmp_path / "locks")
    monkeypatch.setattr(start, "BOOT_ID", tmp_path / "boot")
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
