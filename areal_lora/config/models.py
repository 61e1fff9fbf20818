"""The configuration tree. Unknown keys are errors; this package imports no torch, vLLM or Megatron.

Its sections are defined by subject (``run``, ``adapter``, ``task``); those that users make are imported from here, too.
"""

import difflib
import json
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from areal_lora.config.sections import run as sections
from areal_lora.config.sections.adapter import AdapterConfig, OptimizerConfig, SamplingConfig
from areal_lora.config.sections.run import ClusterConfig, ModelConfig, TrainerConfig, WeightSyncConfig
from areal_lora.config.sections.section import Section
from areal_lora.config.sections.task import TAGS, SingleTurnWorkflowConfig, WorkerWorkflowConfig, WorkflowConfig
from areal_lora.run_folder.paths import RunFolder

# fmt: off
__all__ = [
    "AdapterConfig", "ClusterConfig", "Config", "ModelConfig", "OptimizerConfig", "SamplingConfig",
    "SingleTurnWorkflowConfig", "TrainerConfig", "WeightSyncConfig", "WorkerWorkflowConfig", "WorkflowConfig",
]
# fmt: on


class Config(Section):
    """The configuration of one run: YAML files merged in order, then dotted overrides."""

    run: sections.RunConfig
    model: ModelConfig
    service: sections.ServiceConfig | None = None
    """If present, even as `{}`, adapters join and leave while the run works."""
    adapters: list[AdapterConfig] = Field(default_factory=list, validate_default=True)
    trainer: TrainerConfig
    rollout: sections.RolloutConfig = sections.RolloutConfig()
    behaviour: sections.BehaviourConfig = sections.BehaviourConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    checkpoint: sections.CheckpointConfig = sections.CheckpointConfig()
    eval: sections.EvalConfig = sections.EvalConfig()
    cluster: ClusterConfig = ClusterConfig()

    @field_validator("adapters")
    @classmethod
    def _trains_something(cls, adapters: list[AdapterConfig], info: ValidationInfo) -> list[AdapterConfig]:
        if not adapters and info.data.get("service") is None:
            raise ValueError("a run without a service has at least one adapter")
        return adapters

    @property
    def run_folder(self) -> RunFolder:
        return RunFolder(self.run.root / self.run.name)

    @property
    def waits_on_servers(self) -> bool:
        """Whether requests may wait for places: none has a deadline, no client waits, and none comes too late by it.

        At a ``max_staleness`` of 1 prompts with long answers would come too late so often that they are dropped.
        """
        single = all(each.workflow.kind == "single_turn" and not each.sft.steps for each in self.adapters)
        allowed = [
            self.rollout.max_staleness if each.max_staleness is None else each.max_staleness for each in self.adapters
        ]
        return self.service is None and single and min(allowed, default=0) > 1

    @property
    def only_adapter(self) -> str | None:
        """The adapter of a run that has one and gets no other: tags of its curves do not name it."""
        return self.adapters[0].name if len(self.adapters) == 1 and self.service is None else None


Key = str | int
Path = tuple[Key, ...]


def dotted(path: Path) -> str:
    return ".".join(str(key) for key in path)


def variants(field: FieldInfo) -> tuple[type[Section], ...]:
    """The sections a field can hold: none for a scalar, several for a tagged union, list items looked through."""
    found = (o for o in _options(field.annotation) if isinstance(o, type) and issubclass(o, Section))
    return tuple(dict.fromkeys(found))


def _options(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) in (Union, UnionType):
        for option in get_args(annotation):
            yield from _options(option)
    elif get_origin(annotation) in (list, Annotated):
        yield from _options(get_args(annotation)[0])
    else:
        yield annotation


def section_at(path: Path, data: Any) -> type[Section] | None:
    """The section that ``path`` leads to within ``data``; None where it leads to a scalar or nowhere."""
    section: type[Section] | None = Config
    field: FieldInfo | None = None
    for key in path:
        data = value_at(data, (key,))
        if isinstance(key, int):
            section = None if field is None else choose(field, data)
            continue
        if section is None or key not in section.model_fields:
            return None
        field = section.model_fields[key]
        section = choose(field, data)
    return section


def choose(field: FieldInfo, data: Any) -> type[Section] | None:
    """The section that ``data`` selects among those of ``field``."""
    options = variants(field)
    if len(options) <= 1:
        return options[0] if options else None
    kind = data.get("kind") if isinstance(data, Mapping) else None
    return next((option for option in options if kind in get_args(option.model_fields["kind"].annotation)), None)


def leaf_keys(section: type[Section] = Config, prefix: str = "") -> Iterator[str]:
    """Every settable dotted key, ``adapters.0`` standing for any adapter."""
    for name, field in section.model_fields.items():
        options = variants(field)
        below = f"{prefix}{name}.0." if get_origin(field.annotation) is list else f"{prefix}{name}."
        if not options:
            yield f"{prefix}{name}"
        for option in options:
            yield from leaf_keys(option, below)


def value_at(data: Any, path: Path) -> Any:
    """The value at ``path`` of a tree of dicts and lists; None where there is none."""
    for key in path:
        if isinstance(data, dict):
            data = data.get(str(key))
        elif isinstance(data, list) and isinstance(key, int) and key < len(data):
            data = data[key]
        else:
            return None
    return data


def without_tags(loc: Path, data: Any) -> Path:
    """pydantic puts the chosen ``kind`` or spelling into the location; keys have no such part."""
    path: list[Key] = []
    for key in loc:
        here = value_at(data, tuple(path))
        if key not in TAGS and not (isinstance(here, dict) and key not in here and here.get("kind") == key):
            path.append(key)
    return tuple(path)


# fmt: off
PEERS: Mapping[str, str] = {
    key: own
    for own, keys in {
        "rollout.tp": ("tensor_parallel_size", "tensor_model_parallel_size", "inference_engine_tensor_parallel_size"),
        "rollout.servers": ("num_inference_engines", "data_parallel_size"),
        "rollout.max_staleness": ("max_head_offpolicyness", "max_off_policy_steps", "staleness_threshold"),
        "model.path": ("model_name", "model_name_or_path", "hf_checkpoint"),
        "run.steps": ("max_steps", "total_training_steps", "total_train_steps"),
        "run.trackers": ("report_to", "wandb", "logger", "use_wandb"),
        "checkpoint.every_steps": ("save_freq", "save_steps", "save_interval", "ckpt_interval"),
        "eval.every_steps": ("test_freq", "eval_steps", "eval_interval"),
        "trainer.max_tokens_per_microbatch": ("ppo_max_token_len_per_gpu", "max_tokens_per_gpu", "max_tokens_per_mb"),
        "trainer.recompute": ("gradient_checkpointing", "enable_gradient_checkpointing", "activation_checkpointing"),
        "adapters.0.rank": ("lora_rank", "r"),
        "adapters.0.alpha": ("lora_alpha",),
        "adapters.0.minibatches": ("ppo_mini_batch_size", "ppo_n_minibatches", "num_steps_per_rollout"),
        "adapters.0.optimizer.lr": ("learning_rate",),
        "adapters.0.optimizer.schedule": ("lr_scheduler_type", "lr_decay_style"),
        "adapters.0.optimizer.max_grad_norm": ("clip_grad", "gradient_clipping", "grad_clip"),
        "adapters.0.sampling.prompts_per_step": ("train_batch_size", "rollout_batch_size"),
        "adapters.0.sampling.n_samples": ("num_generations", "n_samples_per_prompt", "rollouts_per_example"),
        "adapters.0.sampling.max_new_tokens": ("max_completion_length", "max_response_length", "max_generate_length"),
        "adapters.0.algorithm.kl_coef": ("beta", "kl_loss_coef", "kl_ctl"),
        "adapters.0.algorithm.entropy_coef": ("entropy_coeff", "entropy_loss_coef"),
        "adapters.0.algorithm.eps_clip": ("clip_ratio", "clip_ratio_low", "epsilon"),
        "adapters.0.algorithm.eps_clip_high": ("clip_ratio_high", "epsilon_high", "eps_clip_higher"),
        "adapters.0.algorithm.reduction": ("loss_agg_mode", "loss_reduction", "loss_type"),
        "adapters.0.algorithm.drop_uniform": ("filter_groups", "dynamic_sampling"),
    }.items()
    for key in keys
}
# fmt: on
"""Keys of AReaL, miles, prime-rl, SkyRL, TRL, verl and vLLM by their last word, with this package's."""


def nearest_key(path: Path, data: Any) -> str:
    """The key of this package for one of `PEERS`, else that most like ``path``, among its siblings first."""
    section, own = section_at(path[:-1], data), PEERS.get(str(path[-1]))
    siblings = list(section.model_fields) if section is not None else []
    close = difflib.get_close_matches(str(path[-1]), siblings, n=1, cutoff=0.85 if own else 0.6)
    if own and not close:
        return own.replace("adapters.0", dotted(path[:2]) if path[0] == "adapters" else "adapters.0")
    if close:
        return dotted((*path[:-1], close[0]))
    everywhere: dict[str, str] = {}
    for key in leaf_keys():
        everywhere.setdefault(key.rpartition(".")[2], key)
    close = difflib.get_close_matches(str(path[-1]), list(everywhere), n=1, cutoff=0.8)
    if close and len(close[0]) > 1:  # one letter is a coincidence
        return everywhere[close[0]]
    at = dotted(path[:-1])
    return f"one of {', '.join(siblings)}" + (f" below {at}" if at else "")


def json_schema() -> str:
    """JSON schema of the configuration, for editors: they complete keys, show their meaning and mark wrong ones.

    No key is required and several alternatives may fit: a file may be an overlay, and what it lacks is in another one.
    """
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **_of_overlays(Config.model_json_schema())}
    return json.dumps(schema, indent=1) + "\n"


def _of_overlays(node: Any) -> Any:
    if isinstance(node, list):
        return [_of_overlays(item) for item in node]
    if not isinstance(node, dict):
        return node
    names = {"oneOf": "anyOf"}
    found = {names.get(key, key): _of_overlays(value) for key, value in node.items() if key != "discriminator"}
    if isinstance(text := found.get("description"), str):
        found["description"] = " ".join(text.split())
    if isinstance(found.get("required"), list):
        del found["required"]
    return found
