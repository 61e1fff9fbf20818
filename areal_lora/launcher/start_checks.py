"""Before any process starts: whether the packages of its roles are installed, and whether training prompts fit."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from areal_lora.config.models import AdapterConfig, Config
from areal_lora.config.rules.findings import Finding, Severity
from areal_lora.data.formatting import Formatter
from areal_lora.data.tokenizer import load_tokenizer
from areal_lora.errors import EnvironmentError_
from areal_lora.tasks.datasets import hub_sources, load_samples
from areal_lora.types import Sample


def prompt_findings(config: Config, *, online: bool) -> Iterator[Finding]:
    """Warn of prompts that are all longer than the room beside an answer, and of few different ones.

    Hub data sets are read only if ``online``. The tasks must have passed `task_problems`.
    """
    for i, adapter in enumerate(config.adapters):
        if adapter.is_client or (hub_sources(adapter.task) and not online):
            continue
        samples = load_samples(adapter.task, "train")
        different = len({sample.prompt for sample in samples})
        if different <= len(samples) // 2:
            yield Finding(
                path=f"adapters.{i}.task",
                reason=f"{len(samples)} training rows have {different} different prompt{'s' * (different != 1)}",
                fix="check task.columns.prompt and the template",
                severity=Severity.WARNING,
            )
        room = config.rollout.max_model_len - adapter.sampling.max_new_tokens
        if not _one_fits(config, adapter, samples, room):
            yield Finding(
                path="rollout.max_model_len",
                reason=f"all {len(samples)} prompts of {adapter.name} are longer than the {room} tokens left beside "
                "the answer: the run would end at its start",
                fix="raise it, or lower sampling.max_new_tokens",
                severity=Severity.WARNING,
            )


def _one_fits(config: Config, adapter: AdapterConfig, samples: Sequence[Sample], room: int) -> bool:
    """Whether one prompt has at most ``room`` tokens, as far as the files here show.

    A text has no more tokens than bytes, so a tokenizer, whose import takes seconds, is rarely needed.
    """
    shortest = sorted(samples, key=lambda sample: len(sample.prompt.encode()))
    if len(shortest[0].prompt.encode()) < room or not (Path(config.model.folder) / "tokenizer.json").is_file():
        return True
    # The process may be a notebook that uses transformers' models later.
    formatter = Formatter(tokenizer=load_tokenizer(config.model.folder), how=adapter.task.format)
    return any(len(formatter.token_ids(sample)) <= room for sample in shortest)


ENGINES = {"megatron": ("megatron.core", "megatron.bridge"), "fsdp": ("transformers",)}
"""Modules of the trainer role by engine; its other packages are dependencies of these or of areal_lora."""
SERVERS = ("vllm",)


def check_packages(config: Config) -> None:
    """Raise EnvironmentError_ for a missing package of a role that this interpreter runs; imports nothing.

    Roles with an interpreter of their own are examined by `areal-lora doctor`.
    """
    own = {"trainer": config.trainer.python, "rollout": config.rollout.python}
    for role, modules in {"trainer": ENGINES[config.trainer.engine], "rollout": SERVERS}.items():
        if own[role] not in (None, sys.executable):
            continue
        for module in modules:
            if not _is_here(module):
                fix = f"see 'Install' in docs/en/quickstart.md, or set {role}.python to an interpreter that has it"
                raise EnvironmentError_(f"{role}: {sys.executable} has no package {module} (fix: {fix})")


def _is_here(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False
