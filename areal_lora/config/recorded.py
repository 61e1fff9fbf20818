"""The resolved configuration of a run, as its run folder records it; its adapters, those that joined included.

- Adapters of the desired state become entries of ``adapters``.
- A hub model is located in the local cache, without network: ``models--org--name/{blobs,refs,snapshots/<commit>}``.
- `adapter_run`: an adapter's own settings, with the run's in place of those that it leaves out. They are resolved where
  they are used: a resume with ``run.steps=200`` then counts for every adapter that has no ``steps`` of its own.
- `RUN`, `ADAPTER` and `SEED` are the keys that must stay as they are between two starts with one run folder. `conflict`
  compares two configurations, before anything starts; `adapter_conflict` a checkpoint with the configuration.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from areal_lora.config.load import Origin, to_config_errors, tracked
from areal_lora.config.models import AdapterConfig, Config
from areal_lora.errors import ConfigError
from areal_lora.families.safetensors_head import INDEX_FILE, WEIGHT_FILE
from areal_lora.families.shape import longrope_context, read_hf_config
from areal_lora.run_folder.paths import DesiredAdapter, RunFolder, read_desired, write_file
from areal_lora.types import AdapterSpec


def write_config(run_folder: RunFolder, config: Config) -> None:
    """Record ``config``; readers see the previous file or the new one, also after a loss of power."""
    write_file(run_folder.config, config.model_dump_json(indent=2), durable=True)


def read_config(run_folder: RunFolder) -> Config:
    """Inverse of :func:`write_config`. Raises ConfigError for one that is missing, cut short or of another version."""
    try:
        return Config.model_validate(_as_of_now(json.loads(_content(run_folder))))
    except json.JSONDecodeError as error:
        reason = f"it is not JSON ({error}): it was cut short or edited"
        raise ConfigError(str(run_folder.config), reason, "restore the file, or start over with --fresh") from None
    except ValidationError as error:
        reason = f"this version cannot read it ({error.error_count()} keys differ), so the run cannot be resumed"
        raise ConfigError(str(run_folder.config), reason, "set another run.name, or start over with --fresh") from None


def _as_of_now(data: Any) -> Any:
    """What earlier commits recorded, without `workflow.max_turns`, which counted for `multi_turn` alone."""
    for adapter in data.get("adapters", ()) if isinstance(data, dict) else ():
        workflow = adapter.get("workflow", {})
        if "betas" not in adapter.get("optimizer", {}) and workflow.get("kind") != "multi_turn":
            workflow.pop("max_turns", None)
    return data


def read_config_here(run_folder: RunFolder) -> Config:
    """As `read_config`, at the place where the run's folder is now, with the adapters that have joined."""
    return moved_here(with_joined(read_config(run_folder), run_folder), run_folder)


def moved_here(config: Config, run_folder: RunFolder) -> Config:
    """``config`` with the root and name that ``run_folder`` has now."""
    run = config.run.model_copy(update={"root": run_folder.path.parent, "name": run_folder.path.name})
    return config.model_copy(update={"run": run})


def sampled_as(config: Config, adapter: AdapterConfig) -> str:
    """How trajectories are sampled and what they contain: the trainer uses none that are recorded otherwise."""
    sampling, algorithm = adapter.sampling, adapter.algorithm
    figures = [f"{name} {getattr(sampling, name):g}" for name in ("temperature", "top_p", "top_k", "min_p")]
    parts = [("greedy answers", algorithm.has_baseline), ("routes", config.behaviour.router_replay == "rollout")]
    figures += [name for name, kept in parts if kept]
    return ", ".join(figures + ([f"teacher {algorithm.teacher.model}"] if algorithm.teacher else []))


def config_digest(run_folder: RunFolder) -> str:
    """sha256 of the recorded file, in hex. Raises ConfigError for a missing file."""
    return hashlib.sha256(_content(run_folder)).hexdigest()


def _content(run_folder: RunFolder) -> bytes:
    try:
        return run_folder.config.read_bytes()
    except FileNotFoundError:
        reason = "the run folder has no resolved configuration"
        raise ConfigError(str(run_folder.config), reason, "name the folder of a started run") from None


def joined(config: Config, desired: DesiredAdapter) -> AdapterConfig:
    """The entry of ``adapters`` for ``desired``, named by its key. Raises ConfigError whose path is a key of it."""
    data = config.model_dump(mode="json") | {"adapters": [desired.adapter | {"name": desired.key}]}
    try:
        [adapter] = Config.model_validate(data).adapters
    except ValidationError as error:
        label = f"the settings of {desired.key}"
        raise own_path(to_config_errors(error, tracked(data, Origin(label, Path.cwd())), [label])[0]) from None
    return adapter


def own_path(error: ConfigError) -> ConfigError:
    """``error`` about the only entry of ``adapters`` with a path that starts at that entry."""
    return ConfigError(error.path.removeprefix("adapters.0."), error.reason, error.fix.replace("adapters.0.", ""))


def alone(config: Config, adapter: AdapterConfig) -> Config:
    return config.model_copy(update={"adapters": [adapter]})


def with_joined(config: Config, run_folder: RunFolder) -> Config:
    """``config`` with the adapters of the desired state beside its own; invalid settings are skipped."""
    if config.service is None:
        return config
    adapters = list(config.adapters)
    for desired in read_desired(run_folder).adapters:
        with contextlib.suppress(ConfigError):
            adapters.append(joined(config, desired))
    return config.model_copy(update={"adapters": adapters})


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""A tokenizer needs one of these files."""
_WANTED = ("*.json", "*.jinja", "*.txt", "*.model", WEIGHT_FILE, "model-*.safetensors")
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


def cached_snapshot(name: str, revision: str | None) -> Path | None:
    """Return the cached folder of ``revision`` of hub model ``name``, complete or not; None if there is none."""
    from huggingface_hub import try_to_load_from_cache as look  # its HTTP client takes a sixth of a command's start

    return Path(at).absolute().parent if isinstance(at := look(name, "config.json", revision=revision), str) else None


def wanted(names: Iterable[str]) -> list[str]:
    """Select the files of a hub model that a run reads: configuration, tokenizer and safetensors in the top folder."""
    return [name for name in names if "/" not in name and any(fnmatch(name, pattern) for pattern in _WANTED)]


def missing_files(folder: Path) -> list[str]:
    """Return the missing files of a snapshot: shards in its index, weights, or a tokenizer. Empty: complete."""
    lacks = [] if (folder / "config.json").is_file() else ["config.json"]
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError):
            return [*lacks, INDEX_FILE]
        lacks += [shard for shard in shards if not (folder / shard).is_file()]
    elif any(_SHARD.fullmatch(path.name) for path in folder.glob("*.safetensors")):
        lacks.append(INDEX_FILE)
    elif not (folder / WEIGHT_FILE).is_file():
        lacks.append(WEIGHT_FILE)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        lacks.append(TOKENIZER_FILES[0])
    return lacks


ENDLESS = 1 << 53
"""Steps of an adapter that a client drives."""
PROBE_TOLERANCES = {"float32": 1e-4, "bfloat16": 0.15, "float16": 0.1}
"""nats, by type of the base; measured: docs/en/results.md."""
QUANTISED_TOLERANCE = 0.3
"""nats, of servers that round base and activations to fp8: about twice what the tiny model shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRun:
    """``steps`` are training steps, ``seed`` that of prompt order, initial values and sampling.

    ``max_staleness`` is in versions, ``eval_every`` and ``checkpoint_every`` in steps (``eval_every`` 0: first and
    last version only). ``wire_dtype`` is the type in which versions are sent: that in which servers hold them.
    ``weight`` is the adapter's part of the trained tokens relative to other adapters'.
    """

    steps: int
    seed: int
    max_staleness: int
    eval_every: int
    checkpoint_every: int
    wire_dtype: Literal["float32", "bfloat16", "float16"]
    weight: float

    @property
    def endless(self) -> bool:
        """Whether a client decides how many steps there are."""
        return self.steps == ENDLESS

    @property
    def end(self) -> int | None:
        """Training steps; None where no one knows."""
        return None if self.endless else self.steps


def adapter_run(config: Config, adapter: AdapterConfig) -> AdapterRun:
    """The settings that count for ``adapter``, an entry of ``config.adapters``."""
    steps = config.run.steps if adapter.steps is None else adapter.steps
    return AdapterRun(
        steps=ENDLESS if adapter.is_client else steps,
        seed=config.run.seed if adapter.seed is None else adapter.seed,
        max_staleness=config.rollout.max_staleness if adapter.max_staleness is None else adapter.max_staleness,
        eval_every=config.eval.every_steps,
        checkpoint_every=1 if adapter.is_client else config.checkpoint.every_steps,
        wire_dtype=config.model.dtype,
        weight=adapter.weight,
    )


def probe_tolerance(config: Config) -> float:
    """Largest allowed mean difference of a probe, nats: the run's own, else what rounding of the base needs."""
    by_base = QUANTISED_TOLERANCE if config.rollout.quantised else PROBE_TOLERANCES[config.model.dtype]
    return config.weight_sync.probe_tolerance or by_base


def adapter_runs(config: Config) -> dict[str, AdapterRun]:
    return {adapter.name: adapter_run(config, adapter) for adapter in config.adapters}


def steps_of(config: Config) -> dict[str, int]:
    return {name: run.steps for name, run in adapter_runs(config).items()}


def ends_of(config: Config) -> dict[str, int | None]:
    """Training steps of every adapter by name; None where no one knows."""
    return {name: run.end for name, run in adapter_runs(config).items()}


def more_steps(config: Config, made: Mapping[str, int]) -> list[str]:
    """The overrides with which every adapter makes as many steps again as it has ``made``."""
    adapters = [adapter for adapter in config.adapters if not adapter.is_client]
    shared = [made.get(adapter.name, 0) for adapter in adapters if adapter.steps is None]
    own = [adapter.name for adapter in adapters if adapter.steps is not None]
    words = [f"run.steps={2 * max(1, *shared)}"] if shared else []
    return words + [f"adapters.{name}.steps={2 * max(1, made.get(name, 0))}" for name in own]


def adapter_named(config: Config, name: str | None = None) -> AdapterConfig:
    """The adapter called ``name``; without a name the only one. Raises ConfigError where there is none such."""
    names = ", ".join(adapter.name for adapter in config.adapters)
    if name is None and len(config.adapters) > 1:
        raise ConfigError("adapters", f"the run has several: {names}", "name one of them")
    for adapter in config.adapters:
        if name in (None, adapter.name):
            return adapter
    raise ConfigError("adapters", f"the run has no adapter {name!r}; it has {names}", "name one of these")


RUN = {"model.path": "the adapter belongs to its base model", "model.dtype": "the adapter belongs to its base model"}
SEED = "it fixes the order of the prompts"
ADAPTER = {
    "rank": "it is the shape of the trained tensors",
    "alpha": "it scales what was trained",
    "rslora": "it scales what was trained",
    "rank_pattern": "it is the shape of the trained tensors",
    "alpha_pattern": "it scales what was trained",
    "target_modules": "it names the trained tensors",
    "exclude_modules": "it names the trained tensors",
    "expert_layout": "it names the trained tensors",
    "dropout": "it is part of what the adapter is declared as",
    "init_from": "the run has started with it",
    "task": "it fixes which prompt is which",
}
"""Keys that must stay as they are, and what would be wrong otherwise."""
_SIZE_OF_EVAL = {"n_eval", "eval"}
"""Parts of a task that only evaluations see."""


def conflict(before: Config, now: Config) -> ConfigError | None:
    """The first fixed key in which ``now`` differs from the configuration that the run was started with."""
    for key, why in RUN.items():
        if error := _differs(why, key, _at(before, key), _at(now, key)):
            return error
    # A revision of a hub name may be given another way if it is the same commit, or where one is not known.
    commit, revision = before.model.commit, f"{now.model.revision} (commit {now.model.commit})"
    if None not in (commit, now.model.commit) and commit != now.model.commit:
        return _differs(RUN["model.path"], "model.revision", commit, revision)
    with contextlib.suppress(OSError, ValueError):  # of a model that is not here, the start that downloads it
        if original := longrope_context(read_hf_config(Path(now.model.folder))):
            was, longest = before.rollout.max_model_len, now.rollout.max_model_len
            if (was > original) != (longest > original):
                why = f"the base has other rotary factors at every position above its original context of {original}"
                return _differs(why, "rollout.max_model_len", was, longest)
    names, wanted = (sorted(adapter.name for adapter in config.adapters) for config in (before, now))
    if error := _differs("a run keeps its adapters", "adapters", names, wanted):
        return error
    earlier = {adapter.name: adapter for adapter in before.adapters}
    for adapter in now.adapters:
        seeds = adapter_run(before, earlier[adapter.name]).seed, adapter_run(now, adapter).seed
        path = "run.seed" if adapter.seed is None else f"adapters.{adapter.name}.seed"
        if error := _differs(SEED, path, *seeds):
            return error
        for key, why in ADAPTER.items():
            values = [_at(one, key) for one in (earlier[adapter.name], adapter)]
            if key == "task":
                # None where held-out rows are taken from the training rows.
                shared = any(value["kind"] == "dataset" and value["eval"] is None for value in values)
                free = set() if shared else _SIZE_OF_EVAL
                values = [{k: v for k, v in value.items() if k not in free} for value in values]
            if error := _differs(why, f"adapters.{adapter.name}.{key}", *values):
                return error
        then, new = earlier[adapter.name].sampling, adapter.sampling
        key = f"adapters.{adapter.name}.sampling.difficulty"
        if then.staged != new.staged and (error := _differs(SEED, key, then.difficulty, new.difficulty)):
            return error
    return None


def adapter_conflict(trained: AdapterSpec, now: AdapterConfig, index: int, source: str) -> ConfigError | None:
    """The first fixed key in which adapter number ``index`` differs from the one that ``source`` was trained with.

    Only what a spec declares is compared.
    """
    before, want = (
        asdict(spec) | {"target_modules": sorted(spec.target_modules)}  # of patterns the first one counts
        for spec in (trained, now.spec(trained.base_model))
    )
    for key, why in ADAPTER.items():
        if key in before:
            values = before[key], want[key]
            if error := _differs(why, f"adapters.{index}.{key}", *values, source=f"{source} was trained"):
                return error
    return None


def changes(before: Config, now: Config) -> list[str]:
    """``rollout.servers 1 -> 2`` for every key that differs, in the order of the configuration."""
    return [f"{path} {was} -> {value}" for path, was, value in differences(_tree(before), _tree(now))]


def _tree(config: Config) -> dict[str, Any]:
    tree = config.model_dump(mode="json")
    return tree | {"adapters": {adapter["name"]: adapter for adapter in tree["adapters"]}}


def differences(before: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """``(dotted key, value, value)`` of what differs; None where a configuration has no such key."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*before, *now]):
            yield from differences(before.get(key), now.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, pair in enumerate(zip(before, now, strict=True)):
            yield from differences(*pair, f"{path}.{index}")
    elif before != now:
        yield path, before, now


def _at(section: Any, path: str) -> Any:
    """The value at a dotted path as JSON would have it; lists of names in one order."""
    value = section.model_dump(mode="json")
    for key in path.split("."):
        value = value[key]
    return sorted(value) if isinstance(value, list) else value


def _differs(why: str, path: str, before: Any, now: Any, source: str = "the run was started") -> ConfigError | None:
    if before == now:
        return None
    if isinstance(before, dict) and isinstance(now, dict):
        # None of them where a key without a value came or went.
        path, before, now = next(differences(before, now, path), (path, before, now))
    reason = f"it is {now}, but {source} with {before}, and {why}"
    return ConfigError(path, reason, f"set it back to {before}, choose another run.name, or start over with --fresh")
