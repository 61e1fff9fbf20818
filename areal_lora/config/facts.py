"""Facts outside the configuration that the guardrails check it against: model, adapters, user code, machine.

User code named in a configuration (``package.module:name`` or ``file.py:name``) is located and parsed, never imported:
a misspelt name is reported before any process starts, also on a machine that lacks the imports of the user code.
`areal_lora.processes.loading` imports the code later, in the process that uses it.
"""

import difflib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import symtable
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

import msgspec

from areal_lora.config import models
from areal_lora.config.recorded import missing_files
from areal_lora.config.sections.run import CODE_REWARD, own_place
from areal_lora.config.sections.task import FunctionReward, reward_keys
from areal_lora.errors import AdapterError, ConfigError
from areal_lora.families.peft_folder import PeftFolder, describe
from areal_lora.families.registry import Checkpoint, known_config, read_checkpoint, supported
from areal_lora.families.shape import ModelShape, read_hf_config
from areal_lora.processes.startup import VISIBLE

SPELLING = "write package.module:name or file.py:name"
LOOKED = "correct the path; a relative one starts at the configuration's folder or the working folder"


def parse_import_path(text: str, config_key: str) -> tuple[Path | str, str]:
    """The file or module, and the name in it. Raises ConfigError if ``text`` has neither of the two spellings."""
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise ConfigError(config_key, f"{text!r} names no object of a module or file", SPELLING)
    if place.endswith(".py"):
        return Path(os.path.expanduser(place)), name
    if not all(part.isidentifier() for part in place.split(".")):
        raise ConfigError(config_key, f"{place!r} is neither a module nor a .py file", SPELLING)
    return place, name


def check_import_path(text: str, config_key: str) -> None:
    """Find the module or file and the name in it without an import. Raises ConfigError.

    A name that only exists at run time (``from x import *``, ``__getattr__``, a compiled module) counts as found.
    """
    place, name = parse_import_path(text, config_key)
    if isinstance(place, Path) and not place.is_file():
        raise ConfigError(config_key, f"there is no file {place}", LOOKED)
    source = place if isinstance(place, Path) else _module_file(place, config_key)
    if source is None:
        return
    try:
        content = importlib.util.decode_source(source.read_bytes())
        symbols = symtable.symtable(content, str(source), "exec").get_symbols()
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(config_key, f"{source} is not readable Python: {error}", "correct the file") from None
    names = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    if name not in names and "__getattr__" not in names and not re.search(r"\bimport\s*\*", content):
        close = difflib.get_close_matches(name, sorted(names), n=1)
        fix = f"did you mean {close[0]}" if close else "define it there, or correct the name"
        raise ConfigError(config_key, f"{source} defines no {name!r}", fix)


def _module_file(module: str, config_key: str) -> Path | None:
    """Find the module's source without importing parent packages; None for a compiled or frozen module."""
    found: ModuleSpec | None = None
    locations: list[str] | None = None
    parts = module.split(".")
    for depth, part in enumerate(parts, start=1):
        # A finder that gets the last part alone does not look for the parent package, which is not imported.
        found = _find_top(part) if locations is None else PathFinder.find_spec(part, locations)
        if found is None:
            fix = "install it, put its folder on PYTHONPATH, start in its folder, or give file.py:name"
            raise ConfigError(config_key, f"there is no module {'.'.join(parts[:depth])!r}", fix)
        if found.submodule_search_locations is None and depth < len(parts):
            reason = f"{'.'.join(parts[:depth])!r} is a module, not a package with modules in it"
            raise ConfigError(config_key, reason, SPELLING)
        locations = list(found.submodule_search_locations or ())
    assert found is not None
    if found.origin is None:
        raise ConfigError(config_key, f"{module!r} is a folder without __init__.py", f"name a module in it: {SPELLING}")
    return Path(found.origin) if found.origin.endswith(".py") else None


def _find_top(name: str) -> ModuleSpec | None:
    """Use all finders, including those of editable installs; none of them imports the module."""
    if name in sys.modules and sys.modules[name].__spec__ is None:
        return PathFinder.find_spec(name)
    return importlib.util.find_spec(name) or PathFinder.find_spec(name, [str(Path.cwd())])


SMI_S = 20.0
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The model, the adapters and the machine.

    ``hf_config`` is the model's config.json; if it is None, ``model_problem`` is the reason. ``model_is_local`` is
    False for a hub name with files to download. ``peft_folders`` describes each folder of ``init_from``, or has the
    reason why it is not readable. ``code_problems`` are the faults of user code that is named, and of folders and code
    that a service offers. ``address_problem`` is the reason why no address of this machine matches ``cluster``.
    ``devices`` is the number of visible accelerators, None on a CPU or for a cluster. ``memory_bytes`` is this
    machine's, ``device_bytes`` that of its smallest accelerator, ``shared_bytes`` what its shared memory can hold; None
    if unknown. ``chat_template`` is whether the model's tokenizer has one, None if its files are not here.
    ``checkpoint`` describes the layers of a model whose family has no row; None for another one, or without files.
    """

    hf_config: Mapping[str, Any] | None
    model_problem: str = ""
    model_is_local: bool = True
    peft_folders: Mapping[str, PeftFolder | AdapterError] = field(default_factory=dict)
    code_problems: tuple[ConfigError, ...] = ()
    address_problem: ConfigError | None = None
    devices: int | None = None
    memory_bytes: int | None = None
    device_bytes: int | None = None
    shared_bytes: int | None = None
    chat_template: bool | None = None
    checkpoint: Checkpoint | None = None

    @property
    def shape(self) -> ModelShape | None:
        """Sizes of the model; None where the model rule complains."""
        if self.hf_config is not None:
            with suppress(KeyError, TypeError, ConfigError):  # a list has a size for each layer
                return ModelShape.from_hf(self.hf_config, self.checkpoint)
        return None


def gather_facts(config: models.Config, *, runs_here: bool) -> Facts:
    """Inspect the model folder, adapters and user code; if ``runs_here``, also this machine's address and devices.

    Host memory is compared for every run of this machine: a plan needs no address, but it needs to fit.
    """
    hf_config, problem, is_local = _read_model(config.model)
    model = Facts(hf_config=hf_config, checkpoint=_checkpoint(config.model, hf_config))
    peft_folders: dict[str, PeftFolder | AdapterError] = {}
    for path in {a.init_from for a in config.adapters if a.init_from is not None}:
        try:
            peft_folders[path] = describe(Path(os.path.expanduser(path)), lambda _: model.shape)
        except AdapterError as error:
            peft_folders[path] = error
    shared = shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else 0
    gpus = probe_gpus() if runs_here and config.cluster.device == "cuda" else []
    return replace(
        model,
        model_problem=problem,
        model_is_local=is_local,
        peft_folders=peft_folders,
        code_problems=(*_code_problems(config), *_service_problems(config)),
        chat_template=_chat_template(config.model),
        address_problem=_address_problem(config) if runs_here else None,
        devices=_visible_devices(config.cluster.device) if runs_here else None,
        memory_bytes=machine_memory() if runs_here or config.cluster.kind == "local" else None,
        device_bytes=min((gpu.memory_mib for gpu in gpus), default=0) * 2**20 or None,
        shared_bytes=shared if runs_here else None,
    )


def machine_memory() -> int:
    """Host memory of this machine, bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read_model(model: models.ModelConfig) -> tuple[dict[str, Any] | None, str, bool]:
    """Return (config.json, problem, is local). ``launcher.run`` has resolved a hub name before."""
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


def _chat_template(model: models.ModelConfig) -> bool | None:
    folder = Path(model.folder)
    if any(folder.glob("chat_template.*")):
        return True
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return bool(settings.get("chat_template"))


def _checkpoint(model: models.ModelConfig, hf_config: Mapping[str, Any] | None) -> Checkpoint | None:
    if hf_config is not None and hf_config.get("model_type") not in supported():
        with suppress(OSError, ValueError, KeyError, TypeError, ConfigError):
            return read_checkpoint(Path(model.folder), hf_config)
    return None


def named_code(adapter: models.AdapterConfig, at: str = "") -> Iterator[tuple[str, str]]:
    """User code of algorithm, rewards and workflow, with keys below ``at``, which ends with a dot; no task's filter."""
    for name in ("advantage", "loss"):
        if ":" in (function := getattr(adapter.algorithm, name)):
            yield f"{at}algorithm.{name}", function
    for key, reward in reward_keys(at, adapter.reward):
        if isinstance(reward, FunctionReward):
            yield f"{key}.path", reward.path
    match adapter.workflow:
        case models.WorkerWorkflowConfig() as chosen:
            settings = json.dumps(chosen.args) if chosen.kind == "verifiers" and chosen.args else None  # may name code
            parser = None if chosen.tool_parser and chosen.tool_parser.isidentifier() else chosen.tool_parser
            texts = {"path": chosen.path, "args": settings, "python": chosen.python, "tool_parser": parser}
            if isinstance(chosen.env, list):
                texts |= {f"env.{i}": server for i, server in enumerate(chosen.env)}
            else:
                texts["env"] = chosen.env
            yield from ((f"{at}workflow.{key}", text) for key, text in texts.items() if text)


def _code_problems(config: models.Config) -> Iterator[ConfigError]:
    """Yield the faults of named user code, which does not run, and keys of served models that are not set."""
    for i, adapter in enumerate(config.adapters):
        at = f"adapters.{i}."
        for key, served in adapter.served_models(at):
            if served.key_env and not os.environ.get(served.key_env):
                fix = f"export {served.key_env}=... where the run starts"
                yield ConfigError(f"{key}.key_env", f"the environment variable {served.key_env} is not set", fix)
        for key, text in named_code(adapter, at):
            if key.endswith(".tool_parser") and ":" not in text:
                continue  # one of vLLM's
            if isinstance(adapter.workflow, models.WorkerWorkflowConfig) and ".py:" not in text and ".workflow." in key:
                named = (".path", ".env") if adapter.workflow.kind in ("gym", "multi_turn") else (".path",)
                checked = (".tool_parser", *(() if adapter.workflow.python else named))
                if not key.endswith(checked):
                    continue  # of another interpreter, or no code
            try:
                # Modules of another interpreter cannot be checked here.
                if config.rollout.python is None or isinstance(parse_import_path(text, key)[0], Path):
                    check_import_path(text, key)
            except ConfigError as error:
                yield error


def _service_problems(config: models.Config) -> Iterator[ConfigError]:
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
            place, _ = parse_import_path(text, key)
            if isinstance(place, Path) and not place.is_absolute():
                reason = f"{text!r} is a relative path"
                raise ConfigError(key, reason, "give the whole path: tenants spell it like this")
            check_import_path(text, key)
        except ConfigError as error:
            yield error


def _address_problem(config: models.Config) -> ConfigError | None:
    try:
        own_place(config.cluster, config.run_folder)
    except ConfigError as error:
        return error
    return None


def _visible_devices(device: str) -> int | None:
    if device not in VISIBLE:
        return None
    chosen = os.environ.get(VISIBLE[device])
    if chosen is not None:
        return len([part for part in chosen.split(",") if part.strip()])
    return len(list(Path("/dev").glob({"cuda": "nvidia[0-9]*", "npu": "davinci[0-9]*"}[device])))


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """``memory_mib`` is 0 where it is not known."""

    name: str
    memory_mib: int
    driver: str


def probe_gpus() -> list[GpuFacts]:
    """The GPUs that nvidia-smi lists; none where it is missing or fails."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=SMI_S)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rsplit(", ", 2) for line in done.stdout.splitlines() if line.count(", ") >= 2]
    return [GpuFacts(name=n, memory_mib=int(m) if m.isdecimal() else 0, driver=driver) for n, m, driver in rows]
