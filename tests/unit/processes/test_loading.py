"""User code is imported by path, from files as well as from modules."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from areal_lora.errors import ConfigError
from areal_lora.processes.loading import load_import_path


def test_a_file_is_loaded_once_and_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_loading_test.py").write_text("VALUE = 7")
    file = tmp_path / "user_code.py"
    file.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from neighbour_of_loading_test import VALUE\n"
        "@dataclass(slots=True)\n"
        "class Thing:\n"
        "    value: int = VALUE\n"
    )
    thing = load_import_path(f"{file}:Thing")
    assert thing().value == 7
    assert load_import_path(f"{file}:Thing") is thing


def test_two_files_of_one_name_stay_apart(tmp_path: Path) -> None:
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text(f"VALUE = {value}")
    assert [load_import_path(f"{tmp_path}/{folder}/same.py:VALUE") for folder in "ab"] == [1, 2]


def test_a_module_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_of_loading_test.py").write_text("def f(): return 3")
    monkeypatch.chdir(tmp_path)
    assert load_import_path("module_of_loading_test:f")() == 3


def test_a_file_may_import_the_package_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The console script has neither this folder nor the package's in sys.path."""
    package = tmp_path / "package_of_loading_test"
    package.mkdir()
    (package / "helpers.py").write_text("VALUE = 5")
    (package / "own.py").write_text("from package_of_loading_test.helpers import VALUE")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", str(tmp_path))])
    assert load_import_path("package_of_loading_test/own.py:VALUE") == 5
    (package / "relative.py").write_text("from .helpers import VALUE")
    with pytest.raises(ConfigError, match=r"relative import.*fix: .*name it package\.module:name"):
        load_import_path("package_of_loading_test/relative.py:VALUE")
    assert load_import_path("package_of_loading_test.relative:VALUE") == 5


def test_errors_name_the_path_and_what_failed(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise KeyError('nothing here')")
    with pytest.raises(ConfigError, match=r"fails\.py:f: importing it fails: KeyError: 'nothing here'"):
        load_import_path(f"{tmp_path}/fails.py:f")
    (tmp_path / "exits.py").write_text("raise SystemExit(0)")
    with pytest.raises(ConfigError, match=r"exits\.py:f: importing it fails: SystemExit"):
        load_import_path(f"{tmp_path}/exits.py:f")
    with pytest.raises(ConfigError, match="has no 'no_such_name'"):
        load_import_path("json:no_such_name")
