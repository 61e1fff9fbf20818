"""The answers to one problem of an evaluation, and from all of them to a set's result."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from areal_lora.config.models import MultiTurnWorkflowConfig
from areal_lora.data.prompts import Prompt
from areal_lora.processes.log import get_logger
from areal_lora.rollout.channel.channel_messages import EvalSample, EvalSetResult
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.controller.eval_sets import N_NAMED, EvalSet
from areal_lora.rollout.workflow import Episode
from areal_lora.tasks.estimates import Answer, estimate
from areal_lora.tasks.scorer import Score
from areal_lora.tasks.tally import tally
from areal_lora.tasks.votes import vote_of
from areal_lora.types import AdapterRef, Outcome, Trajectory

N_SAMPLES = 4  # examples in a result

log = get_logger(__name__)


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
