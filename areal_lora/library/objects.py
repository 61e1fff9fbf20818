"""Python objects in a configuration: the processes of a run import them by a path.

An object of a module file is named by this file, one of an installed package by its module. One of a script or
notebook is saved as source (`source`) in the folder ``code`` of the run.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_lora.config.models import (
    AdapterConfig,
    AgentWorkflowConfig,
    Config,
    CustomWorkflowConfig,
    MultiTurnWorkflowConfig,
)
from areal_lora.config.sections.reward import FunctionReward, RewardSection
from areal_lora.errors import ConfigError
from areal_lora.library.source import saved_source, stub_source

REWARD, WORKFLOW, ENVIRONMENT, AGENT = "reward", "workflow", "environment", "agent"


_GIVEN = "given:object"
_SECTIONS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    REWARD: ("reward", {"kind": "function", "path": _GIVEN}),
    ENVIRONMENT: ("workflow", {"kind": "multi_turn", "environment": _GIVEN}),
    AGENT: ("workflow", {"kind": "agent", "path": _GIVEN}),
    WORKFLOW: ("workflow", {"kind": "custom", "path": _GIVEN}),
}


def given_sections(objects: Mapping[str, object]) -> dict[str, Mapping[str, str]]:
    """What the given ``objects`` stand for in their sections, so that the configuration need not name a path."""
    return dict(_SECTIONS[what] for what, value in objects.items() if value is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserCode:
    """``paths`` by the name of the argument; one that names a file without folder is in ``files``, texts by name."""

    paths: Mapping[str, str]
    files: Mapping[str, str]

    def write(self, folder: Path) -> None:
        for name, text in self.files.items():
            (folder / name).write_text(text, encoding="utf-8")

    def put_into(self, config: Config, folder: Path) -> Config:
        """``config`` with the objects in its adapter; ``folder`` is that of ``files``."""
        paths = {
            what: f"{folder / path}" if path.partition(":")[0] in self.files else path
            for what, path in self.paths.items()
        }
        if not paths:
            return config
        [adapter] = config.adapters
        return config.model_copy(update={"adapters": [_with(adapter, paths)]})


def user_code(config: Config, objects: Mapping[str, object]) -> UserCode:
    """How the given ``objects`` (None: not given) reach the processes of a run of ``config``. Raises ConfigError."""
    given = {what: value for what, value in objects.items() if value is not None}
    if given and len(config.adapters) > 1:
        names = ", ".join(adapter.name for adapter in config.adapters)
        fix = "name rewards and workflows by path in the configuration"
        raise ConfigError("train", f"an object belongs to one adapter, and there are {names}", fix)
    if len(given.keys() - {REWARD}) > 1:
        raise ConfigError("train", "workflow, environment and agent exclude each other", "give one of them")
    paths, files = {}, {}
    for what, value in given.items():
        paths[what], text = _travel(what, value)
        if text is not None:
            files[f"{what}.py"] = text
    return UserCode(paths=paths, files=files)


def _travel(what: str, value: Any) -> tuple[str, str | None]:
    """The import path of ``value``, and the source of its file if one has to be written."""
    if not callable(value) or not isinstance(getattr(value, "__qualname__", None), str):
        fix = "give the function or the class itself"
        raise ConfigError(what, f"a {type(value).__name__} cannot be imported by another process", fix)
    name, module = value.__name__, sys.modules.get(value.__module__)
    if value.__module__ == "__main__":
        return f"{what}.py:{name}", saved_source(value, name, sys.modules["__main__"])
    if module is None or getattr(module, name, None) is not value:
        where = f"{value.__module__}.{value.__qualname__}"
        raise ConfigError(what, f"{where} is not a name of a module", "define it at the top of a module")
    file = Path(str(vars(module).get("__file__")))
    if "." not in value.__module__ and file.suffix == ".py" and file.name != "__init__.py":
        return f"{file.resolve()}:{name}", None
    root = _root(value.__module__)
    if root is None or root in _SEARCHED:
        return f"{value.__module__}:{name}", None
    return f"{what}.py:{name}", stub_source(value, name, root)


_SEARCHED = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib", "stdlib")}


def _root(module: str) -> Path | None:
    """Folder in which the top package of ``module`` is; None for a compiled one."""
    spec = importlib.util.find_spec(module.partition(".")[0])
    places = None if spec is None else spec.submodule_search_locations
    return Path(next(iter(places))).resolve().parent if places else None


def _with(adapter: AdapterConfig, paths: Mapping[str, str]) -> AdapterConfig:
    update: dict[str, object] = {}
    for what, path in paths.items():
        if what == REWARD:
            update["reward"] = _reward(adapter, path)
        else:
            update["workflow"] = _workflow(adapter, what, path)
    return adapter.model_copy(update=update)


def _reward(adapter: AdapterConfig, path: str) -> FunctionReward:
    """It replaces all rewards. Limits of the first one remain; its other keys too, if it names a function itself."""
    old = adapter.rewards[0]
    kept = set(type(old).model_fields) if isinstance(old, FunctionReward) else set(RewardSection.model_fields)
    return FunctionReward.model_validate(old.model_dump(include=kept - {"kind", "path"}) | {"path": path})


def _workflow(
    adapter: AdapterConfig, what: str, path: str
) -> MultiTurnWorkflowConfig | CustomWorkflowConfig | AgentWorkflowConfig:
    old = adapter.workflow.model_dump()
    match what:
        case "environment":
            kept = old if isinstance(adapter.workflow, MultiTurnWorkflowConfig) else {}
            return MultiTurnWorkflowConfig.model_validate(kept | {"environment": path})
        case "workflow":
            kept = old if isinstance(adapter.workflow, CustomWorkflowConfig) else {}
            return CustomWorkflowConfig.model_validate(kept | {"path": path})
        case _:
            kept = old if isinstance(adapter.workflow, AgentWorkflowConfig) else {}
            return AgentWorkflowConfig.model_validate(kept | {"path": path})
