"""The sets of an evaluation: their problems, how they are sampled, and the results of the base that they share."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from areal_lora.config.models import AdapterConfig, Config, SamplingConfig, SingleTurnWorkflowConfig, WorkflowConfig
from areal_lora.config.recorded import adapter_run
from areal_lora.config.sections.task import EvalSetConfig
from areal_lora.data.prompts import Formatter, Prompt, TextTokenizer, prompts_of
from areal_lora.errors import ConfigError
from areal_lora.obs.metrics.records import EvalRecord
from areal_lora.processes.log import get_logger
from areal_lora.rollout.workflow import greedy
from areal_lora.run_folder.paths import RunFolder, write_file
from areal_lora.tasks.datasets import load_samples
from areal_lora.types import AdapterRef

N_NAMED = 5  # prompts left out that are named
PLACES = {"python", "workers", "memory_gib", "timeout_s", "url", "key_env"}
"""Keys of workflows and rewards that are not what is measured: another job has other hosts."""
ANSWERS = {"n_samples", "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "min_tokens", "stop"}

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Held-out problems; ``left_out`` are the uids of omitted ones."""

    prompts: Sequence[Prompt]
    left_out: tuple[str, ...] = ()

    def note(self) -> str:
        """Return one line about the omitted problems; empty if there are none."""
        if not self.left_out:
            return ""
        named = ", ".join(self.left_out[:N_NAMED]) + (", ..." if len(self.left_out) > N_NAMED else "")
        total = len(self.left_out) + len(self.prompts)
        return f"{len(self.left_out)} of {total} held-out prompts are too long and left out: {named}"


def fitting(prompts: Sequence[Prompt], max_prompt_tokens: int) -> HeldOut:
    """The problems whose prompts leave room for an answer, as in training. Raises ConfigError if none does."""
    fit = [prompt for prompt in prompts if len(prompt.token_ids) <= max_prompt_tokens]
    if not fit:
        raise ConfigError(
            "rollout.max_model_len",
            f"all {len(prompts)} held-out prompts are longer than the {max_prompt_tokens} tokens left beside an answer",
            "raise it, or lower sampling.max_new_tokens",
        )
    left_out = tuple(prompt.uid for prompt in prompts if len(prompt.token_ids) > max_prompt_tokens)
    return HeldOut(prompts=fit, left_out=left_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """One set. ``sampling`` is the adapter's with the set's own values; ``workflow`` gives its answers.

    ``measure``: `measure_of` it. ``base_key`` is that of version 0, where it equals the base (`base_key`).
    """

    config: EvalSetConfig
    sampling: SamplingConfig
    workflow: WorkflowConfig
    formatter: Formatter
    held_out: HeldOut
    measure: str = ""
    base_key: str | None = None

    @property
    def name(self) -> str:
        return self.config.name


def load_sets(config: Config, adapter: AdapterConfig, tokenizer: TextTokenizer) -> tuple[EvalSet, ...]:
    """Read the adapter's sets. Raises ConfigError, also for a set without a prompt that fits."""
    sets = []
    for chosen in adapter.eval_sets:
        task = chosen.task or adapter.task
        formatter = Formatter(tokenizer=tokenizer, how=task.format)
        samples = load_samples(task, "eval")[: chosen.n]
        sampling = sampling_of(adapter.sampling, chosen)
        room = config.rollout.max_model_len - sampling.max_new_tokens
        held_out = fitting(prompts_of(samples, formatter), room)
        if held_out.left_out:
            log.warning("%s: %s: %s; %d tokens are room for a prompt", adapter.name, chosen.name, held_out.note(), room)
        loaded = EvalSet(
            config=chosen,
            sampling=sampling,
            workflow=adapter.workflow if chosen.workflow == "trained" else SingleTurnWorkflowConfig(),
            formatter=formatter,
            held_out=held_out,
        )
        loaded = replace(loaded, measure=measure_of(adapter, loaded))
        sets.append(replace(loaded, base_key=base_key(config, adapter, loaded)))
    return tuple(sets)


def ranks_of(sets: Sequence[EvalSet]) -> dict[str, int]:
    """The place of each held-out sample in its set, by uid; of the sets that the adapter's workflow answers."""
    played = [chosen.held_out.prompts for chosen in sets if chosen.config.workflow == "trained"]
    return {prompt.sample.uid: rank for prompts in reversed(played) for rank, prompt in enumerate(prompts)}


def sampling_of(trained: SamplingConfig, chosen: EvalSetConfig) -> SamplingConfig:
    """The sampling of a set: stop texts and time limit as in training."""
    longest = chosen.max_new_tokens or trained.max_new_tokens
    own = {"n_samples": chosen.n_samples, "temperature": chosen.temperature, "top_p": chosen.top_p}
    return greedy(trained).model_copy(update=own | {"max_new_tokens": longest, "min_tokens": 0})


def measure_of(adapter: AdapterConfig, chosen: EvalSet) -> str:
    """Digest of what is measured: problems, sampling, workflow and reward. Figures of one measure can be compared."""
    problems = [
        (s.uid, s.prompt, s.messages, s.answer, dict(s.columns), prompt.token_ids)
        for prompt in chosen.held_out.prompts
        for s in [prompt.sample]
    ]
    return _digest(
        problems=problems,
        threshold=chosen.config.correct_threshold,
        sampling=chosen.sampling.model_dump(mode="json", include=ANSWERS, exclude_defaults=True),
        workflow=_kept(chosen.workflow),
        format=_kept(chosen.formatter.how),
        rewards=[adapter.reward_weights, *map(_kept, adapter.rewards)],
    )


def _kept(section: Any) -> dict[str, Any]:
    """The keys of ``section`` that are set, without ``PLACES``; of files their names."""
    found: dict[str, Any] = section.model_dump(mode="json", exclude=PLACES, exclude_defaults=True)
    for key in ("path", "env"):
        if isinstance(place := found.get(key), str):
            found[key] = "" if "://" in place else Path(place).name
    return found | {"kind": section.kind}


def base_key(config: Config, adapter: AdapterConfig, chosen: EvalSet) -> str | None:
    """Digest of all that version 0's result on ``chosen`` depends on; None where version 0 is not the base.

    Adapters with equal keys have one result. Not part of it are the adapter's name, rank, targets and training
    settings: lora_B is 0. Where answers are drawn at random, or the workflow is given a seed, the seed and the name of
    the set count.
    """
    if adapter.init_from is not None:
        return None
    model = config.model
    single_turn = isinstance(chosen.workflow, SingleTurnWorkflowConfig)
    at_random = not single_turn or (chosen.config.temperature, chosen.config.n_samples) != (0, 1)
    return _digest(
        measure=chosen.measure,
        base=[model.path, model.commit, model.dtype],
        limits=[config.rollout.max_model_len, chosen.held_out.left_out, chosen.sampling.timeout_s],
        places=[chosen.workflow.model_dump(mode="json"), *(r.model_dump(mode="json") for r in adapter.rewards)],
        random=[chosen.name, adapter_run(config, adapter).seed] if at_random else None,
    )


def _digest(**parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, default=repr)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class BaseEvals:
    """The records of a run by key, in memory and in ``folder``, if there is one."""

    def __init__(self, folder: RunFolder | None = None) -> None:
        self._folder = folder
        self._kept: dict[str, EvalRecord] = {}
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def once(self, key: str, ref: AdapterRef, measure: Callable[[], Awaitable[EvalRecord]]) -> EvalRecord:
        """The record of ``key``: what ``measure`` returns for ``ref``, or that of another adapter.

        Callers of one key wait for each other. Where ``measure`` raises or is cancelled, the next caller measures
        again. A record that was another adapter's names it, and has taken no time.
        """
        async with self._turns[key]:
            kept = self._kept.get(key) or self._read(key)
            if kept is None:
                self._keep(key, made := await measure())
                return made
        self._kept[key] = kept
        if kept.adapter == ref.name:
            return kept
        return msgspec.structs.replace(kept, adapter=ref.name, measured_with=kept.adapter, wall_s=0.0)

    def _keep(self, key: str, kept: EvalRecord) -> None:
        self._kept[key] = kept
        if self._folder is None:
            return
        path = self._folder.base_evals / f"{key}.json"
        try:
            path.parent.mkdir(exist_ok=True)
            write_file(path, msgspec.json.encode(kept))
        except OSError as error:
            log.warning("%s: %s; after a restart the base is evaluated again", path, error.strerror)

    def _read(self, key: str) -> EvalRecord | None:
        if self._folder is None:
            return None
        path = self._folder.base_evals / f"{key}.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=EvalRecord)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            log.warning("%s cannot be read, so the base is evaluated again: %s", path, error)
            return None
