"""Import paths are judged without running what they name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from areal_lora.config.facts import check_import_path, parse_import_path
from areal_lora.errors import ConfigError

SOURCE = """
raise RuntimeError("this module must not be imported")

import os as system
from math import sqrt

constant: int = 1
one, (two, *rest) = 1, (2, 3)

class Environment:
    inner = 1

async def agent(task): ...

try:
    import missing_package
except ImportError:
    fallback = None
if system:
    def branch():
        local = 1
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "user_package" / "sub"
    package.mkdir(parents=True)
    (tmp_path / "user_package" / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "__init__.py").write_text("from .code import *")
    (package / "code.py").write_text(SOURCE)
    (tmp_path / "user_bare").mkdir()
    (tmp_path / "broken.py").write_text("def f(:")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "Environment",
        "agent",
        "system",
        "sqrt",
        "constant",
        "one",
        "two",
        "rest",
        "missing_package",
        "fallback",
        "branch",
    ],
)
def test_every_way_to_bind_a_name_is_seen(folder: Path, name: str) -> None:
    check_import_path(f"user_package.sub.code:{name}", "key")
    check_import_path(f"{folder}/user_package/sub/code.py:{name}", "key")
    assert "user_package" not in sys.modules


def test_names_that_only_running_tells_are_accepted(folder: Path) -> None:
    check_import_path("user_package.sub:whatever", "key")
    check_import_path("_json:scanstring", "key")


def test_the_working_folder_is_searched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(folder))])
    monkeypatch.chdir(folder)
    check_import_path("user_package.sub.code:agent", "key")


@pytest.mark.parametrize(
    ("text", "reason", "fix"),
    [
        ("agent", "names no object", "package.module:name"),
        ("a.b:", "names no object", "package.module:name"),
        ("a.b:c.d", "names no object", "package.module:name"),
        ("a-b:c", "neither a module nor a .py file", "package.module:name"),
        ("no_such_package_here:f", "no module 'no_such_package_here'", "PYTHONPATH"),
        ("user_package.other:f", "no module 'user_package.other'", "PYTHONPATH"),
        ("user_package.sub.code.deeper:f", "not a package", "package.module:name"),
        ("user_bare:f", "without __init__.py", "name a module in it"),
        ("user_package.sub.code:Enviroment", "defines no 'Enviroment'", "did you mean Environment"),
        ("user_package.sub.code:inner", "defines no 'inner'", "define it there"),
        ("nowhere.py:f", "there is no file", "correct the path"),
        ("broken:f", "not readable Python", "correct the file"),
    ],
)
def test_what_is_wrong_is_named(folder: Path, text: str, reason: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_import_path(text, "adapters.0.workflow.path")
    assert caught.value.path == "adapters.0.workflow.path"
    assert reason in caught.value.reason
    assert fix in caught.value.fix
    assert "user_package" not in sys.modules


def test_a_file_path_may_hold_colons() -> None:
    assert parse_import_path("/a:b/c.py:f", "key") == (Path("/a:b/c.py"), "f")
