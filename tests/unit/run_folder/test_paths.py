"""The run folder's names are spelled in one module."""

import ast
import re
from pathlib import Path

import pytest

from areal_lora.run_folder.paths import FolderEntry, RunFolder
from tests.support.paths import ROOT
from tests.support.sources import trees

FOLDER = RunFolder(Path("runs/x"))
PACKAGE = ROOT / "areal_lora"
MODEL_FOLDER = {
    "families/shape.py",
    "config/recorded.py",
    "launcher/run.py",
    "weight_sync/manifest.py",
    "checkpoint/merged_folder.py",
}
"""These read or write the config.json of a model."""
NAMES = sorted(
    {
        name
        for attribute, value in vars(RunFolder).items()
        if isinstance(value, FolderEntry)
        for name in [getattr(FOLDER, attribute).name]
        if "." in name or name in ("rendezvous", "heartbeats", "checkpoints", "tensorboard", "stacks")
    }
)


SDK_ROUTES = {"service/tinker/checkpoints.py"}
"""The word is part of addresses there, which the SDK has chosen."""
TRACKER_NAMES = {"config/sections/run.py"}
"""The word is the name of a tracker there."""


def strings(tree: ast.Module) -> list[str]:
    """Every string of the code that is no docstring."""
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docs]
    return [node.value for node in constants if isinstance(node.value, str)]


def test_a_name_of_the_run_folder_is_spelled_once() -> None:
    patterns = {name: re.compile(rf"(^|/){re.escape(name)}($|/)") for name in NAMES}
    found: dict[str, set[str]] = {name: set() for name in NAMES}
    for module, tree in trees(PACKAGE, NAMES):
        for text in strings(tree):
            for name, pattern in patterns.items():
                if pattern.search(text):
                    found[name].add(module.relative_to(PACKAGE).as_posix())
    found[FOLDER.config.name] -= MODEL_FOLDER
    found["checkpoints"] -= SDK_ROUTES
    found["tensorboard"] -= TRACKER_NAMES
    assert found == {name: {"run_folder/paths.py"} for name in NAMES}


def test_paths_of_processes_and_of_files_beside_the_folder() -> None:
    assert FOLDER.endpoint("server-0") == Path("runs/x/rendezvous/server-0.json")
    assert FOLDER.log("trainer-1") == Path("runs/x/logs/trainer-1.log")
    assert FOLDER.lock == Path("runs/.x.lock").absolute()
    assert FOLDER.owner == Path("runs/.x.owner").absolute()


def test_a_link_to_a_run_folder_has_its_lock_and_owner(tmp_path: Path) -> None:
    there, link = RunFolder(tmp_path / "scratch" / "r"), RunFolder(tmp_path / "runs")
    there.path.mkdir(parents=True)
    link.path.symlink_to(there.path)
    assert (link.lock, link.owner) == (there.lock, there.owner)
    assert there.lock == tmp_path / "scratch" / ".r.lock"


@pytest.mark.parametrize("given", ["runs/x", Path("runs/x"), FOLDER])
def test_readers_take_a_plain_path_too(given: RunFolder | Path | str) -> None:
    assert RunFolder.of(given) == FOLDER
    assert str(RunFolder.of(given)) == "runs/x"
