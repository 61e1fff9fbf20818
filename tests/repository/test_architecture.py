"""docs/en/architecture.md: the pictures name functions that exist, the tables list the rooms that exist."""

import ast
import re
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGE = ROOT / "areal_lora"
PAGE = ROOT / "docs" / "en" / "architecture.md"
PICTURES = ("tensor_walk.svg", "batch_walk.svg", "prompt_walk.svg", "optim_step_walk.svg")
SVG = "{http://www.w3.org/2000/svg}"


def steps(picture: str) -> list[tuple[str, str]]:
    """(module, function or Class.method) of each box."""
    texts = list(ET.parse(PAGE.parent / "img" / picture).iter(f"{SVG}text"))
    modules = [t.text or "" for t in texts if t.get("class") == "module"]
    names = [t.text or "" for t in texts if t.get("class") == "name"]
    return list(zip(modules, names, strict=True))


def defined(body: list[ast.stmt], name: str) -> bool:
    """Whether ``body`` defines the function ``name``, or the class and method of ``Class.method``."""
    first, _, rest = name.partition(".")
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == first:
            return not rest or defined(node.body, rest)
    return False


def rooms() -> list[str]:
    """First column of the table of rooms."""
    table = PAGE.read_text(encoding="utf-8").split("## Rooms")[1].split("## Layers")[0]
    return re.findall(r"^\| `([\w/]+)` \|", table, re.MULTILINE)


def layers() -> list[str]:
    """The import layers that `make check` verifies, from top to bottom, without the package's name."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    contract = next(c for c in contracts if c["name"] == "Imports point downwards")
    return [layer.replace("areal_lora.", "") for layer in contract["layers"]]


@pytest.mark.parametrize("picture", PICTURES)
def test_a_picture_names_functions_that_exist(picture: str) -> None:
    assert f"img/{picture}" in PAGE.read_text(encoding="utf-8")
    found = steps(picture)
    assert len(found) > 15, "the picture has no steps any more"
    for module, name in found:
        path = PACKAGE / f"{module.replace('.', '/')}.py"
        assert path.is_file(), f"{picture}: {module} does not exist"
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert defined(tree.body, name), f"{picture}: {module} has no {name}"


def test_every_folder_of_the_package_is_a_room_in_the_table() -> None:
    folders = {str(p.parent.relative_to(PACKAGE)) + "/" for p in PACKAGE.rglob("__init__.py")} - {"./"}
    listed = rooms()
    assert len(listed) == len(set(listed))
    assert {room for room in listed if room.endswith("/")} == folders
    assert all((PACKAGE / f"{room}.py").is_file() for room in listed if not room.endswith("/"))


def test_the_rooms_and_the_page_follow_the_checked_layers() -> None:
    order = [name.strip() for layer in layers() for name in layer.split("|")]
    top = list(dict.fromkeys(room.split("/")[0] for room in rooms()))
    assert top == order
    assert "```text\n" + "\n".join(layers()) + "\n```" in PAGE.read_text(encoding="utf-8")


def test_paths_in_the_page_exist() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:\w+/)+\w+\.py)`", text):
        assert any((base / path).is_file() for base in (ROOT, PACKAGE, Path(PAGE.parent))), path
