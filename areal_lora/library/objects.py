"""Python objects in a configuration: the processes of a run import them by a path.

An object of a module file is named by this file, one of an installed package by its module. One of a script or
notebook is saved as source in the folder ``code`` of the run. What that uses is followed by name: functions and classes
of the same script are copied, imports written down, constants written as literals. Everything else is refused: nothing
is pickled, no statement of the script runs again.
"""

import __future__

import ast
import builtins
import importlib.util
import inspect
import linecache
import re
import symtable
import sys
import sysconfig
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from pydantic import TypeAdapter

from areal_lora.config import models
from areal_lora.config.sections.task import FunctionReward
from areal_lora.errors import ConfigError

FUTURE = "from __future__ import annotations\n\n"
FIX = "put it into a module file and import it"


def saved_source(value: Any, name: str, main: ModuleType) -> str:
    """A module that defines ``value`` of the script or notebook ``main`` as ``name``. Raises ConfigError."""
    parts = _Parts(main)
    parts.add(name, value)
    future = FUTURE if _has_future(main) else ""
    file = vars(main).get("__file__")
    package = vars(main).get("__package__")  # of `python -m package.script`, which searches the folder above it
    levels = len(package.split(".")) if package else 0
    place = Path(file).resolve().parents[levels] if file else Path.cwd()
    head = f"import sys\n\nsys.path.append({str(place)!r})\n\n"
    return f"{future}{head}" + "\n\n".join(parts.texts.values()) + "\n"


class _Parts:
    """Statements by the name that they bind, those that a statement needs before it."""

    def __init__(self, main: ModuleType) -> None:
        self.texts: dict[str, str] = {}
        self._main = main
        self._started: set[str] = set()

    def add(self, name: str, value: Any) -> None:
        if name in self._started:
            return
        self._started.add(name)
        if isinstance(value, ModuleType):
            self.texts[name] = f"import {value.__name__} as {name}"
        elif _is_of(value, self._main):
            self._add_definition(name, value)
        elif imported := _import_of(name, value):
            self.texts[name] = imported
        else:
            self.texts[name] = self._constant(name, value)

    def _add_definition(self, name: str, value: Any) -> None:
        own = value.__name__
        self._started.add(own)
        text = _definition(value, own, self._main)
        needed = _names(FUTURE + text if _has_future(self._main) else text)  # annotations may name what does not exist
        for used in sorted(_names(text) - {own}):
            if used in vars(self._main):
                self.add(used, vars(self._main)[used])
                self._add_submodules(used, text)
            elif used in needed and not hasattr(builtins, used) and used not in ("__name__", "__file__", "__class__"):
                raise ConfigError(own, f"it uses {used!r}, which is not defined", "define it before the call")
        self.texts[own] = text
        if own != name:
            self.texts[name] = f"{name} = {own}"

    def _add_submodules(self, used: str, text: str) -> None:
        """``import a.b`` where ``text`` has ``a.b`` of a package ``a`` that is imported as ``used``."""
        value = vars(self._main)[used]
        if isinstance(value, ModuleType):
            package = f"{value.__name__}."
            below = [full for full in sys.modules if full.startswith(package)]
            inside = [full for full in below if f"{used}.{full.removeprefix(package)}" in text]
            self.texts |= {f"{used}:{full}": f"import {full}" for full in inside}

    def _constant(self, name: str, value: Any) -> str:
        if isinstance(value, re.Pattern):
            self.add("re", re)
            return f"{name} = re.compile({value.pattern!r}, {int(value.flags)})"
        if isinstance(value, Path):
            self.texts["pathlib"] = "import pathlib"
            return f"{name} = pathlib.Path({str(value)!r})"
        text = repr(value)
        try:
            same = ast.literal_eval(text) == value
        except (ValueError, SyntaxError, TypeError):
            same = False
        if not same:
            kind = type(value).__name__
            raise ConfigError(name, f"it is a {kind}, which the run's processes cannot get as text", FIX)
        return f"{name} = {text}"


def _has_future(main: ModuleType) -> bool:
    return vars(main).get("annotations") is __future__.annotations


def _is_of(value: Any, main: ModuleType) -> bool:
    if not callable(value) or getattr(value, "__module__", None) != main.__name__:
        return False
    return isinstance(inspect.unwrap(value), type | FunctionType)


def _import_of(name: str, value: Any) -> str | None:
    """``from module import x as name`` for a function, class or other named object of a module."""
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    module, qualified = (module, qualified) if isinstance(qualified, str) else ("typing", getattr(value, "_name", None))
    if module not in sys.modules or not isinstance(qualified, str) or "." in qualified:
        return None
    if getattr(sys.modules[module], qualified, None) is not value:
        return None
    return f"from {module} import {qualified} as {name}"


def _definition(value: Any, name: str, main: ModuleType) -> str:
    """Source of the statement that defines ``value``, with its decorators."""
    if name == "<lambda>":
        raise ConfigError("lambda", "it has no name by which another process could import it", "write it with def")
    if "<locals>" in value.__qualname__:
        raise ConfigError(name, "it is defined inside a function, whose variables no other process has", FIX)
    code, script = _code(value), vars(main).get("__file__")
    # A class without code of its own is in the script, or in a cell of the notebook, the newest one first.
    for file in [code.co_filename] if code else [script] if script else reversed(linecache.cache):
        lines = linecache.getlines(file)
        try:
            nodes = [*ast.walk(ast.parse("".join(lines)))]
        except SyntaxError:  # a cell with a magic command
            continue
        for node in nodes:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name != name:
                continue
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            last = node.end_lineno or first
            if code is None or first <= code.co_firstlineno <= last:
                return textwrap.dedent("".join(lines[first - 1 : last]))
    raise ConfigError(name, "its source is not to be found: it was typed at a prompt, or its file has changed", FIX)


def _code(value: Any) -> CodeType | None:
    """The code of a function, or of a method that a class defines itself."""
    value = inspect.unwrap(value)
    if isinstance(value, FunctionType):
        return value.__code__
    members = [inspect.unwrap(getattr(m, "__func__", getattr(m, "fget", m))) for m in vars(value).values() if m]
    own = (m.__code__ for m in members if isinstance(m, FunctionType) and m.__module__ == value.__module__)
    return next((code for code in own if linecache.getlines(code.co_filename)), None)


def _names(text: str) -> set[str]:
    """Names of the module that ``text`` reads."""
    names: set[str] = set()
    tables = [symtable.symtable(text, "definition", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        top = table.get_type() == "module"
        names |= {s.get_name() for s in table.get_symbols() if (top or s.is_global()) and s.is_referenced()}
    return names


REWARD, WORKFLOW, ENVIRONMENT, AGENT = "reward", "workflow", "environment", "agent"
LOSS, ADVANTAGE = "loss", "advantage"
_GIVEN = "given:object"
_SECTIONS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    REWARD: ("reward", {"kind": "function", "path": _GIVEN}),
    ENVIRONMENT: ("workflow", {"kind": "multi_turn", "env": _GIVEN}),
    AGENT: ("workflow", {"kind": "agent", "path": _GIVEN}),
    WORKFLOW: ("workflow", {"kind": "custom", "path": _GIVEN}),
}


def given_sections(objects: Mapping[str, object]) -> dict[str, Mapping[str, str]]:
    """What the given ``objects`` stand for in their sections, so that the configuration need not name a path."""
    return dict(_SECTIONS[what] for what, value in objects.items() if value is not None and what in _SECTIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserCode:
    """``paths`` by the name of the argument; one that names a file without folder is in ``files``, texts by name."""

    paths: Mapping[str, str]
    files: Mapping[str, str]

    def write(self, folder: Path) -> None:
        for name, text in self.files.items():
            (folder / name).write_text(text, encoding="utf-8")

    def put_into(self, config: models.Config, folder: Path) -> models.Config:
        """``config`` with the objects in its adapter; ``folder`` is that of ``files``."""
        paths = {
            what: f"{folder / path}" if path.partition(":")[0] in self.files else path
            for what, path in self.paths.items()
        }
        if not paths:
            return config
        [adapter] = config.adapters
        return config.model_copy(update={"adapters": [_with(adapter, paths)]})


def user_code(config: models.Config, objects: Mapping[str, object]) -> UserCode:
    """How the given ``objects`` (None: not given) reach the processes of a run of ``config``. Raises ConfigError."""
    given = {what: value for what, value in objects.items() if value is not None}
    if given and len(config.adapters) > 1:
        names = ", ".join(adapter.name for adapter in config.adapters)
        fix = "name functions and workflows by path in the configuration"
        raise ConfigError("train", f"an object belongs to one adapter, and there are {names}", fix)
    if len(given.keys() - {REWARD, LOSS, ADVANTAGE}) > 1:
        raise ConfigError("train", "workflow, environment and agent exclude each other", "give one of them")
    paths, files = {}, {}
    for what, value in given.items():
        paths[what], text = _travel(what, value)
        if text is not None:
            files[paths[what].partition(":")[0]] = text
    return UserCode(paths=paths, files=files)


def _travel(what: str, value: Any) -> tuple[str, str | None]:
    """The import path of ``value``, and the source of its file if one has to be written."""
    if not callable(value) or not isinstance(getattr(value, "__qualname__", None), str):
        fix = "give the function or the class itself"
        raise ConfigError(what, f"a {type(value).__name__} cannot be imported by another process", fix)
    name, module = value.__name__, sys.modules.get(value.__module__)
    saved = f"areal_lora_{what}.py:{name}"  # its folder is searched: reward.py would hide the user's own module
    if value.__module__ == "__main__":
        return saved, saved_source(value, name, sys.modules["__main__"])
    if module is None or getattr(module, name, None) is not value:
        where = f"{value.__module__}.{value.__qualname__}"
        raise ConfigError(what, f"{where} is not a name of a module", "define it at the top of a module")
    file = Path(str(vars(module).get("__file__")))
    if "." not in value.__module__ and file.suffix == ".py" and file.name != "__init__.py":
        return f"{file.resolve()}:{name}", None
    spec = importlib.util.find_spec(value.__module__.partition(".")[0])
    places = None if spec is None else spec.submodule_search_locations  # None: a compiled one
    root = Path(next(iter(places))).resolve().parent if places else None
    if root is None or root in _SEARCHED:
        return f"{value.__module__}:{name}", None
    head = f"import sys\n\nsys.path.append({str(root)!r})\n\n"
    return saved, f"{head}from {value.__module__} import {name} as {name}\n"


_SEARCHED = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib", "stdlib")}


def _with(adapter: models.AdapterConfig, paths: Mapping[str, str]) -> models.AdapterConfig:
    """A reward replaces all. Keys of the first one remain if it names a function itself."""
    update: dict[str, Any] = {}
    for what, path in paths.items():
        if what == REWARD:
            old = adapter.rewards[0]
            settings = old.model_dump() if isinstance(old, FunctionReward) else {}
            update |= {"reward": FunctionReward.model_validate(settings | {"path": path}), "reward_weights": []}
        elif what in (LOSS, ADVANTAGE):
            update["algorithm"] = update.get("algorithm", adapter.algorithm).model_copy(update={what: path})
        else:
            given = {key: path if value == _GIVEN else value for key, value in _SECTIONS[what][1].items()}
            settings = adapter.workflow.model_dump() if adapter.workflow.kind == given["kind"] else {}
            update["workflow"] = TypeAdapter[models.WorkflowConfig](models.WorkflowConfig).validate_python(
                settings | given
            )
    return adapter.model_copy(update=update)
