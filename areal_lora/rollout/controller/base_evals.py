"""Evaluations of the base model: a set is asked once for all adapters whose version 0 equals the base.

``base_key`` says which evaluations have one result (pure), `BaseEvals` asks for each once and keeps it in the run
folder: for adapters that join later, and for a resumed run.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import msgspec

from areal_lora.config.models import AdapterConfig, Config, MultiTurnWorkflowConfig
from areal_lora.config.recorded import adapter_run
from areal_lora.data.prompts import Prompt
from areal_lora.processes.startup import get_logger
from areal_lora.rollout.channel.channel_messages import EvalSample, EvalSetResult
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.controller.eval_sets import N_NAMED, EvalSet
from areal_lora.rollout.workflow import Episode
from areal_lora.run_folder.atomic import write_file
from areal_lora.run_folder.paths import RunFolder
from areal_lora.tasks.check import Answer, estimate
from areal_lora.tasks.scorer import Score
from areal_lora.tasks.tally import tally
from areal_lora.tasks.votes import vote_of
from areal_lora.types import AdapterRef, Outcome, Trajectory

log = get_logger(__name__)


def base_key(config: Config, adapter: AdapterConfig, chosen: EvalSet) -> str | None:
    """Digest of all that version 0's result on ``chosen`` depends on; None where version 0 is not the base.

    Adapters with equal keys have one result. Not part of it are the adapter's name, rank, targets and training
    settings: lora_B is 0. Where answers are drawn at random, or the workflow is given a seed, the seed and the name of
    the set count.
    """
    if adapter.init_from is not None:
        return None
    model, held_out = config.model, chosen.held_out
    problems = [
        (sample.uid, sample.prompt, sample.messages, sample.answer, dict(sample.columns), ids)
        for sample, ids in zip(held_out.samples, held_out.token_ids, strict=True)
    ]
    parts: dict[str, Any] = {
        "base": [model.path, model.commit, model.dtype],
        "max_model_len": config.rollout.max_model_len,
        "problems": problems,
        "left_out": held_out.left_out,
        "set": chosen.config.model_dump(mode="json", exclude={"name", "task"}),
        "sampling": chosen.sampling.model_dump(mode="json", exclude={"prompts_per_step"}),
        "workflow": chosen.workflow.model_dump(mode="json"),
        "format": chosen.formatter.how.model_dump(mode="json"),
        "rewards": [reward.model_dump(mode="json") for reward in adapter.rewards],
        "random": None if chosen.single_greedy else [chosen.name, adapter_run(config, adapter).seed],
    }
    text = json.dumps(parts, sort_keys=True, default=repr)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    """``result`` was measured with version 0 of ``adapter``."""

    adapter: str
    result: EvalSetResult


class BaseEvals:
    """The results of a run by key, in memory and in ``folder``, if there is one."""

    def __init__(self, folder: RunFolder | None = None) -> None:
        self._folder = folder
        self._kept: dict[str, _Kept] = {}
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def once(self, key: str, ref: AdapterRef, measure: Callable[[], Awaitable[EvalSetResult]]) -> EvalSetResult:
        """The result of ``key``: what ``measure`` returns for ``ref``, or what another adapter has been asked before.

        Callers of one key wait for each other. A result with an error, or a ``measure`` that is cancelled, is not kept:
        the next caller asks. A result of another adapter says so, and has taken no time.
        """
        async with self._turns[key]:
            kept = self._kept.get(key) or self._read(key)
            if kept is None:
                result = await measure()
                if not result.error:
                    self._keep(key, _Kept(adapter=ref.name, result=result))
                return result
        self._kept[key] = kept
        if kept.adapter == ref.name:
            return kept.result
        return msgspec.structs.replace(kept.result, measured_with=kept.adapter, wall_s=0.0)

    def _keep(self, key: str, kept: _Kept) -> None:
        self._kept[key] = kept
        if self._folder is None:
            return
        path = self._folder.base_eval(key)
        try:
            path.parent.mkdir(exist_ok=True)
            write_file(path, msgspec.json.encode(kept))
        except OSError as error:
            log.warning("%s: %s; after a restart the base is evaluated again", path, error.strerror)

    def _read(self, key: str) -> _Kept | None:
        if self._folder is None:
            return None
        path = self._folder.base_eval(key)
        try:
            return msgspec.json.decode(path.read_bytes(), type=_Kept)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            log.warning("%s cannot be read, so the base is evaluated again: %s", path, error)
            return None


N_SAMPLES = 4  # examples in a result


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredAnswer:
    """One answer with its score; ``n_tokens`` were sampled for it."""

    text: str
    score: Score
    n_tokens: int = 0
    finish_reason: str = ""


def given_answers(chosen: EvalSet, prompt: Prompt, ref: AdapterRef, episode: Episode) -> list[ScoredAnswer]:
    """One answer per sample of the episode; the trajectories of a sample have its one score.

    Raises GenerationFault if another version than ``ref`` has sampled a token.
    """
    samples: dict[int, list[tuple[Trajectory, str]]] = defaultdict(list)
    for trajectory, text in zip(episode.group.trajectories, episode.texts, strict=True):
        samples[trajectory.sample].append((trajectory, text))
        if others := {version for version in trajectory.versions if version >= 0} - {ref.version}:
            detail = f"{prompt.uid}: asked for {ref}, sampled by {sorted(others)} (ask with context.answer)"
            raise GenerationFault(FaultKind.PROTOCOL, detail)
    return [_given(chosen, rows) for _, rows in sorted(samples.items())]


def _given(chosen: EvalSet, rows: Sequence[tuple[Trajectory, str]]) -> ScoredAnswer:
    last, text = rows[-1]
    if isinstance(chosen.workflow, MultiTurnWorkflowConfig):
        text = _last_answer(chosen, chosen.workflow, last)
    score = Score(reward=last.reward, outcome=last.outcome, detail=last.detail, correct=last.correct)
    return ScoredAnswer(
        text=text,
        score=judged(score, chosen.config.correct_threshold),
        n_tokens=sum(sum(trajectory.loss_mask) for trajectory, _ in rows),
        finish_reason=last.finish_reason,
    )


def judged(score: Score, threshold: float | None) -> Score:
    """``score``, correct if it reaches ``threshold`` where nothing else says what is correct."""
    if score.outcome is not Outcome.OK or score.correct is not None or threshold is None:
        return score
    return replace(score, correct=score.reward >= threshold)


def _last_answer(chosen: EvalSet, workflow: MultiTurnWorkflowConfig, trajectory: Trajectory) -> str:
    """Text of the last turn, without the text that stopped it."""
    ids = list[int]()
    for token, sampled in zip(reversed(trajectory.token_ids), reversed(trajectory.loss_mask), strict=True):
        if sampled:
            ids.append(token)
        elif ids:
            break
    text = chosen.formatter.tokenizer.decode(ids[::-1], skip_special_tokens=True)
    for stop in (*chosen.sampling.stop, *workflow.stop):
        text = text.partition(stop)[0]
    return text


def result_of(
    chosen: EvalSet, ref: AdapterRef, answers: Sequence[Sequence[ScoredAnswer]], reward_kind: str, wall_s: float
) -> EvalSetResult:
    """Summarize the ``answers`` to each problem of the set."""
    flat = [given.score for problem in answers for given in problem]
    figures = tally(flat)
    if figures.reward_mean is None:
        return failed(chosen, f"no answer could be scored: {flat[0].detail}", wall_s)
    scored = figures.n - figures.unscored
    if 0 < figures.ungraded < scored:
        log.warning(
            "evaluation %s of %s has no accuracy: the reward does not grade %d of %d answers (fix: return "
            "'correct' for every answer, or set reward.correct_threshold)",
            chosen.name,
            ref,
            figures.ungraded,
            scored,
        )
    found = estimate(
        [[_counted(given, reward_kind) for given in problem] for problem in answers], ruled=figures.accuracy is not None
    )
    return EvalSetResult(
        name=chosen.name,
        accuracy=figures.accuracy,
        reward_mean=figures.reward_mean,
        n=len(answers),
        n_samples=chosen.config.n_samples,
        temperature=chosen.config.temperature,
        unscored=figures.unscored,
        left_out=len(chosen.held_out.left_out),
        left_out_first=chosen.held_out.left_out[:N_NAMED],
        accuracy_95=found.accuracy_95,
        reward_95=found.reward_95,
        interval=found.interval,
        pass_at=found.pass_at,
        majority=found.majority,
        answer_tokens=found.answer_tokens,
        truncated=found.truncated,
        wall_s=wall_s,
        samples=_examples(chosen, ref, answers),
    )


def failed(chosen: EvalSet, error: str, wall_s: float) -> EvalSetResult:
    return EvalSetResult(name=chosen.name, accuracy=None, reward_mean=None, n=0, wall_s=wall_s, error=error)


def _counted(given: ScoredAnswer, reward_kind: str) -> Answer:
    scored = given.score.outcome is Outcome.OK
    return Answer(
        reward=given.score.reward if scored else None,
        correct=given.score.correct,
        vote=vote_of(reward_kind, given.text) if scored else None,
        n_tokens=given.n_tokens,
        truncated=given.finish_reason == "length",
    )


def _examples(chosen: EvalSet, ref: AdapterRef, answers: Sequence[Sequence[ScoredAnswer]]) -> tuple[EvalSample, ...]:
    """The first answer to each of the first problems."""
    return tuple(
        EvalSample(
            uid=sample.uid,
            prompt=sample.prompt,
            completion=problem[0].text,
            answer=sample.gold,
            reward=None if math.isnan(problem[0].score.reward) else problem[0].score.reward,
            correct=problem[0].score.correct,
            version=ref.version,
        )
        for sample, problem in list(zip(chosen.held_out.samples, answers, strict=True))[:N_SAMPLES]
    )
