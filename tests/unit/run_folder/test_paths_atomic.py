"""Readers see the previous content or the new one; every other module leaves replacing files to this one."""

from __future__ import annotations

import ast
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_lora.run_folder import paths as atomic
from areal_lora.run_folder.paths import replacing, write_file
from tests.support.paths import ROOT
from tests.support.sources import trees


def test_a_reader_of_the_old_file_keeps_it_and_the_name_leads_to_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_file(path, "öld")
    with path.open(encoding="utf-8") as reader:
        write_file(path, b"new")
        assert (reader.read(), path.read_bytes()) == ("öld", b"new")
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize(("mode", "expected"), [(0o600, 0o600), (0o666, 0o644)])
def test_the_mode_is_that_of_the_new_file(tmp_path: Path, mode: int, expected: int) -> None:
    before = os.umask(0o022)
    try:
        (tmp_path / "key").write_text("old")
        (tmp_path / "key").chmod(0o444)
        write_file(tmp_path / "key", "new", mode=mode)
    finally:
        os.umask(before)
    assert (tmp_path / "key").stat().st_mode & 0o777 == expected


def test_a_block_that_fails_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_file(path, "old")

    def fails() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["a"])


def test_errors_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "no folder" / "a"
    with pytest.raises(FileNotFoundError) as caught:
        write_file(missing, "x")
    assert caught.value.filename == str(missing)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=f"No space left.*{tmp_path / 'a'}"):
        write_file(tmp_path / "a", "x", durable=True)
    assert os.listdir(tmp_path) == []


def test_durable_content_is_on_the_disk_before_its_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, bool]] = []
    path, fsync = tmp_path / "a", os.fsync

    def recorded(descriptor: int) -> None:
        calls.append((os.readlink(f"/proc/self/fd/{descriptor}"), path.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    write_file(path, "x")
    assert calls == []
    path.unlink()
    write_file(path, "x", durable=True)
    [(of_file, named), (of_folder, _)] = calls
    assert (Path(of_file).name.startswith(".a."), named, of_folder) == (True, False, str(tmp_path))


def test_threads_that_write_one_file_leave_one_whole_content(tmp_path: Path) -> None:
    contents = [letter * 100_000 for letter in "abcd"]
    threads = [threading.Thread(target=write_file, args=(tmp_path / "a", content)) for content in contents * 5]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "a").read_text() in contents
    assert os.listdir(tmp_path) == ["a"]


def replacements(tree: ast.Module) -> Iterator[int]:
    """Lines that call ``os.replace``, or ``replace`` with one argument, which no text and no record has."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "replace":
            of_os = isinstance(node.func.value, ast.Name) and node.func.value.id == "os"
            if of_os or (len(node.args) == 1 and not node.keywords):
                yield node.lineno


def test_files_are_replaced_here_and_by_checkpoints_alone() -> None:
    package = ROOT / "areal_lora"
    found = {
        path.relative_to(package).as_posix()
        for path, tree in trees(package, [".replace("])
        if path.relative_to(package).parts[0] != "checkpoint" and any(replacements(tree))
    }
    assert found == {Path(atomic.__file__).relative_to(package).as_posix()}
