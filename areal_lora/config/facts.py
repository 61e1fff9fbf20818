"""Facts outside the configuration that the guardrails check it against: model, adapters, user code, machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_lora.config.imports import check_import_path, parse_import_path
from areal_lora.config.models import (
    AgentWorkflowConfig,
    Config,
    CustomWorkflowConfig,
    FunctionReward,
    ModelConfig,
    MultiTurnWorkflowConfig,
)
from areal_lora.config.place import own_place
from areal_lora.config.snapshot import missing_files
from areal_lora.errors import AdapterError, ConfigError
from areal_lora.families.peft_folder import PeftFolder, describe
from areal_lora.families.published import known_config
from areal_lora.families.shape import read_hf_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The model, the adapters and the machine.

    ``hf_config`` is the model's config.json; if it is None, ``model_problem`` is the reason. ``model_is_local`` is
    False for a hub name with files to download. ``peft_folders`` describes each readable folder of ``init_from``,
    ``peft_problems`` holds the reasons for the others. ``code_problems`` are the faults of named user code.
    ``address_problem`` is the reason why no address of this machine matches ``cluster``. ``devices`` is the number of
    visible accelerators, None on a CPU or for a cluster. ``memory_bytes`` is None if unknown.
    """

    hf_config: Mapping[str, Any] | None
    model_problem: str = ""
    model_is_local: bool = True
    peft_folders: Mapping[str, PeftFolder] = field(default_factory=dict)
    peft_problems: Mapping[str, str] = field(default_factory=dict)
    code_problems: tuple[ConfigError, ...] = ()
    address_problem: ConfigError | None = None
    ports_in_use: frozenset[int] = frozenset()
    devices: int | None = None
    memory_bytes: int | None = None


def gather_facts(config: Config, *, runs_here: bool) -> Facts:
    """Inspect the model folder, adapters and user code; if ``runs_here``, also this machine's ports and devices."""
    hf_config, problem, is_local = _read_model(config.model)
    peft_folders, peft_problems = _read_adapters(config)
    return Facts(
        hf_config=hf_config,
        model_problem=problem,
        model_is_local=is_local,
        peft_folders=peft_folders,
        peft_problems=peft_problems,
        code_problems=tuple(_code_problems(config)),
        address_problem=_address_problem(config) if runs_here else None,
        ports_in_use=_ports_in_use(config) if runs_here else frozenset(),
        devices=_visible_devices(config.cluster.device) if runs_here else None,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if runs_here else None,
    )


def server_ports(config: Config) -> list[int]:
    """Return the data-plane port of each server, consecutive from ``rollout.port``; empty if the system chooses."""
    return [config.rollout.port + i for i in range(config.rollout.servers)] if config.rollout.port else []


def _read_model(model: ModelConfig) -> tuple[dict[str, Any] | None, str, bool]:
    """Return (config.json, problem, is local). ``launcher.hub`` has resolved a hub name before."""
    folder = Path(model.folder)
    if not folder.is_dir():
        known = known_config(model.path)
        return known, "" if known else f"there is no folder {model.path!r}, and it is not a model known here", False
    try:
        return read_hf_config(folder), "", model.snapshot is None or not missing_files(folder)
    except FileNotFoundError:
        return None, f"the folder {str(folder)!r} has no config.json", True
    except (OSError, ValueError) as error:
        return None, f"config.json in {str(folder)!r} cannot be read: {error}", True


def _read_adapters(config: Config) -> tuple[dict[str, PeftFolder], dict[str, str]]:
    folders: dict[str, PeftFolder] = {}
    problems: dict[str, str] = {}
    for path in {a.init_from for a in config.adapters if a.init_from is not None}:
        try:
            folders[path] = describe(Path(path).expanduser())
        except AdapterError as error:
            problems[path] = " ".join(str(error).split())
    return folders, problems


def _code_problems(config: Config) -> Iterator[ConfigError]:
    """Yield the faults of named user code: missing, or not callable as a reward. No user code runs."""
    for i, adapter in enumerate(config.adapters):
        reward, workflow, at = adapter.reward, adapter.workflow, f"adapters.{i}"
        named: dict[str, str] = {}
        if isinstance(reward, FunctionReward):
            named[f"{at}.reward.path"] = reward.path
        if isinstance(workflow, MultiTurnWorkflowConfig):
            named[f"{at}.workflow.environment"] = workflow.environment
        elif isinstance(workflow, CustomWorkflowConfig | AgentWorkflowConfig):
            named[f"{at}.workflow.path"] = workflow.path
        for key, text in named.items():
            try:
                # Modules of another interpreter cannot be checked here.
                if config.rollout.python is None or parse_import_path(text, key).file is not None:
                    check_import_path(text, key)
            except ConfigError as error:
                yield error


def _address_problem(config: Config) -> ConfigError | None:
    try:
        own_place(config.cluster, config.run_folder)
    except ConfigError as error:
        return error
    return None


def _ports_in_use(config: Config) -> frozenset[int]:
    used = set()
    for port in server_ports(config):
        with socket.socket(socket.AF_INET6 if ":" in config.cluster.bind else socket.AF_INET) as probe:
            # The server can bind a port in TIME_WAIT, so such a port must not count as used.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((config.cluster.bind, port))
            except (OSError, OverflowError):
                used.add(port)
    return frozenset(used)


def _visible_devices(device: str) -> int | None:
    if device == "cpu":
        return None
    variable, pattern = {
        "cuda": ("CUDA_VISIBLE_DEVICES", "nvidia[0-9]*"),
        "npu": ("ASCEND_RT_VISIBLE_DEVICES", "davinci[0-9]*"),
    }[device]
    chosen = os.environ.get(variable)
    if chosen is not None:
        return len([part for part in chosen.split(",") if part.strip()])
    return len(list(Path("/dev").glob(pattern)))
