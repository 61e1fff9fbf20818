"""Facts outside the configuration that the guardrails check it against: model, adapters, user code, machine."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_lora.config.config_snapshot import missing_files
from areal_lora.config.imports import check_import_path, parse_import_path
from areal_lora.config.models import (
    AgentWorkflowConfig,
    Config,
    CustomWorkflowConfig,
    ModelConfig,
    MultiTurnWorkflowConfig,
)
from areal_lora.config.sections.cluster import own_place
from areal_lora.config.sections.reward import FunctionReward, JudgeReward, reward_keys
from areal_lora.config.sections.service import CODE_REWARD
from areal_lora.errors import AdapterError, ConfigError
from areal_lora.families.derived import Checkpoint, read_checkpoint
from areal_lora.families.peft_folder import PeftFolder, describe
from areal_lora.families.published import known_config
from areal_lora.families.registry import supported
from areal_lora.families.shape import read_hf_config

SMI_S = 20.0
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The model, the adapters and the machine.

    ``hf_config`` is the model's config.json; if it is None, ``model_problem`` is the reason. ``model_is_local`` is
    False for a hub name with files to download. ``peft_folders`` describes each readable folder of ``init_from``,
    ``peft_problems`` holds the reasons for the others. ``code_problems`` are the faults of named user code,
    ``service_problems`` those of folders and code that a service offers.
    ``address_problem`` is the reason why no address of this machine matches ``cluster``. ``devices`` is the number of
    visible accelerators, None on a CPU or for a cluster. ``memory_bytes`` is this machine's, ``device_bytes`` that of
    its smallest accelerator, ``shared_bytes`` what its shared memory can hold; None if unknown. ``chat_template`` is
    whether the model's tokenizer has one, None if its files are not here. ``checkpoint`` describes the layers of a
    model whose family has no row; None for another one, or without files.
    """

    hf_config: Mapping[str, Any] | None
    model_problem: str = ""
    model_is_local: bool = True
    peft_folders: Mapping[str, PeftFolder] = field(default_factory=dict)
    peft_problems: Mapping[str, str] = field(default_factory=dict)
    code_problems: tuple[ConfigError, ...] = ()
    service_problems: tuple[ConfigError, ...] = ()
    address_problem: ConfigError | None = None
    ports_in_use: frozenset[int] = frozenset()
    devices: int | None = None
    memory_bytes: int | None = None
    device_bytes: int | None = None
    shared_bytes: int | None = None
    chat_template: bool | None = None
    checkpoint: Checkpoint | None = None


def gather_facts(config: Config, *, runs_here: bool) -> Facts:
    """Inspect the model folder, adapters and user code; if ``runs_here``, also this machine's ports and devices.

    Host memory is compared for every run of this machine: a plan needs no free port, but it needs to fit.
    """
    hf_config, problem, is_local = _read_model(config.model)
    peft_folders, peft_problems = _read_adapters(config)
    return Facts(
        hf_config=hf_config,
        model_problem=problem,
        model_is_local=is_local,
        peft_folders=peft_folders,
        peft_problems=peft_problems,
        code_problems=tuple(_code_problems(config)),
        service_problems=tuple(_service_problems(config)),
        chat_template=_chat_template(config.model),
        checkpoint=_checkpoint(config.model, hf_config),
        address_problem=_address_problem(config) if runs_here else None,
        ports_in_use=_ports_in_use(config) if runs_here else frozenset(),
        devices=_visible_devices(config.cluster.device) if runs_here else None,
        memory_bytes=machine_memory() if config.cluster.kind == "local" else None,
        device_bytes=_device_bytes() if runs_here and config.cluster.device == "cuda" else None,
        shared_bytes=_shared_bytes() if runs_here else None,
    )


def machine_memory() -> int:
    """Host memory of this machine, bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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


def _chat_template(model: ModelConfig) -> bool | None:
    folder = Path(model.folder)
    if any(folder.glob("chat_template.*")):
        return True
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return bool(settings.get("chat_template"))


def _checkpoint(model: ModelConfig, hf_config: Mapping[str, Any] | None) -> Checkpoint | None:
    if hf_config is None or hf_config.get("model_type") in supported():
        return None
    try:
        return read_checkpoint(Path(model.folder))
    except (OSError, ValueError):
        return None


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
    """Yield the faults of named user code, which does not run, and keys of judges that are not set."""
    for i, adapter in enumerate(config.adapters):
        workflow, at = adapter.workflow, f"adapters.{i}"
        named: dict[str, str] = {}
        for key, reward in reward_keys(at, adapter.reward):
            if isinstance(reward, FunctionReward):
                named[f"{key}.path"] = reward.path
            elif isinstance(reward, JudgeReward) and reward.key_env and not os.environ.get(reward.key_env):
                fix = f"export {reward.key_env}=... where the run starts"
                yield ConfigError(f"{key}.key_env", f"the environment variable {reward.key_env} is not set", fix)
        if isinstance(workflow, MultiTurnWorkflowConfig):
            named[f"{at}.workflow.environment"] = workflow.environment
        elif isinstance(workflow, CustomWorkflowConfig | AgentWorkflowConfig):
            named[f"{at}.workflow.path"] = workflow.path
        if isinstance(workflow, AgentWorkflowConfig) and workflow.tool_parser and ":" in workflow.tool_parser:
            named[f"{at}.workflow.tool_parser"] = workflow.tool_parser
        for key, text in named.items():
            try:
                # Modules of another interpreter cannot be checked here.
                if config.rollout.python is None or parse_import_path(text, key).file is not None:
                    check_import_path(text, key)
            except ConfigError as error:
                yield error


def _service_problems(config: Config) -> Iterator[ConfigError]:
    if config.service is None or (api := config.service.api) is None:
        return
    if api.data is not None and not api.data.is_dir():
        fix = "make it, or leave the key out: then tenants name no files"
        yield ConfigError("service.api.data", f"there is no folder {str(api.data)!r}", fix)
    for i, text in enumerate(api.code):
        key = f"service.api.code.{i}"
        if text == CODE_REWARD:
            continue
        try:
            file = parse_import_path(text, key).file
            if file is not None and not file.is_absolute():
                raise ConfigError(
                    key, f"{text!r} is a relative path", "give the whole path: tenants spell it like this"
                )
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
            except OverflowError:
                used.add(port)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:  # the address is at fault: see address_problem
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


def _shared_bytes() -> int:
    return shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else 0


def _device_bytes() -> int | None:
    """Memory of the smallest GPU of this machine as nvidia-smi reports it; None where it does not work."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=SMI_S)
        return min(int(line) for line in done.stdout.split()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
