"""The examples that come with the package: beside it in a checkout, inside it where a wheel is installed."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def examples() -> Path:
    """Folder of the shipped examples."""
    installed = _PACKAGE / "examples"
    return installed if installed.is_dir() else _PACKAGE.parent / "examples"


def configuration_file(path: Path) -> Path:
    """``path``, or the shipped example of this name if ``path`` is a bare name of no file of the working folder."""
    if path.exists() or path.name != str(path):
        return path
    return next(iter(sorted(examples().glob(f"*/{path.name}"))), path) if path.suffix in (".yaml", ".yml") else path
