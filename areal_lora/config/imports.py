"""Check user code named in a configuration (``package.module:name`` or ``file.py:name``) without running it.

The module's source is located and parsed, never imported. A misspelt name is thus reported before any process starts,
also on a machine that lacks the imports of the user code. `areal_lora.tasks.loading` imports the code later, in the
process that uses it.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from areal_lora.errors import ConfigError

SPELLING = "write package.module:name or file.py:name"
LOOKED = "correct the path; a relative one starts at the configuration's folder or the working folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportPath:
    """A parsed import path. ``file`` is set for ``file.py:name``, else ``module``."""

    name: str
    module: str = ""
    file: Path | None = None


def parse_import_path(text: str, config_key: str) -> ImportPath:
    """Parse ``text``. Raises ConfigError if it has neither of the two spellings."""
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise ConfigError(config_key, f"{text!r} names no object of a module or file", SPELLING)
    if place.endswith(".py"):
        return ImportPath(name=name, file=Path(place).expanduser())
    if not all(part.isidentifier() for part in place.split(".")):
        raise ConfigError(config_key, f"{place!r} is neither a module nor a .py file", SPELLING)
    return ImportPath(name=name, module=place)


def check_import_path(text: str, config_key: str) -> None:
    """Find the module or file and the name in it without an import. Raises ConfigError.

    A name that only exists at run time (``from x import *``, ``__getattr__``, a compiled module) counts as found.
    """
    path = parse_import_path(text, config_key)
    source = _file(path.file, config_key) if path.file is not None else _module_file(path.module, config_key)
    if source is None:
        return
    try:
        tree = ast.parse(source.read_bytes(), filename=str(source))
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(config_key, f"{source} is not readable Python: {error}", "correct the file") from None
    names = set(_bound_names(tree.body))
    if path.name not in names and not names & {"*", "__getattr__"}:
        close = difflib.get_close_matches(path.name, sorted(names), n=1)
        fix = f"did you mean {close[0]}" if close else "define it there, or correct the name"
        raise ConfigError(config_key, f"{source} defines no {path.name!r}", fix)


def _file(path: Path, config_key: str) -> Path:
    if not path.is_file():
        raise ConfigError(config_key, f"there is no file {path}", LOOKED)
    return path


def _module_file(module: str, config_key: str) -> Path | None:
    """Find the module's source without importing parent packages; None for a compiled or frozen module."""
    found: ModuleSpec | None = None
    locations: Sequence[str] | None = None
    parts = module.split(".")
    for depth in range(len(parts)):
        name = ".".join(parts[: depth + 1])
        found = _find(name, locations)
        if found is None:
            raise ConfigError(
                config_key,
                f"there is no module {name!r}",
                "install it, put its folder on PYTHONPATH, start in its folder, or give file.py:name",
            )
        if found.submodule_search_locations is None and depth + 1 < len(parts):
            raise ConfigError(config_key, f"{name!r} is a module, not a package with modules in it", SPELLING)
        locations = found.submodule_search_locations
    assert found is not None
    if found.origin is None:
        raise ConfigError(config_key, f"{module!r} is a folder without __init__.py", f"name a module in it: {SPELLING}")
    return Path(found.origin) if found.origin.endswith(".py") else None


def _find(name: str, locations: Sequence[str] | None) -> ModuleSpec | None:
    if locations is not None:
        return _find_below(name, locations)
    # For a top-level name use all finders, including those of editable installs; none of them imports the module.
    if name in sys.modules and sys.modules[name].__spec__ is None:
        return PathFinder.find_spec(name)
    return importlib.util.find_spec(name) or PathFinder.find_spec(name, [str(Path.cwd())])


def _find_below(name: str, locations: Sequence[str]) -> ModuleSpec | None:
    """Like ``PathFinder.find_spec``, but also find namespace packages inside a package that is not imported."""
    folders: list[str] = []
    for location in locations:
        finder = pkgutil.get_importer(location)
        spec = None if finder is None else finder.find_spec(name)
        if spec is not None and spec.loader is not None:
            return spec
        folders += [] if spec is None else spec.submodule_search_locations or []
    if not folders:
        return None
    found = ModuleSpec(name, None, is_package=True)
    found.submodule_search_locations = folders
    return found


def _bound_names(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the names that a module's statements bind, including those in branches, ``try`` and ``with``."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
                continue
            case ast.Import() | ast.ImportFrom():
                yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
                continue
        for child in ast.walk(node):
            if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                yield child.id
        for below in ("body", "orelse", "finalbody"):
            yield from _bound_names(vars(node).get(below, ()))
        for handler in vars(node).get("handlers", ()):
            yield from _bound_names(handler.body)
