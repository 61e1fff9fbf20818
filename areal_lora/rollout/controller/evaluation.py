"""Evaluate one version of an adapter on all its sets, in the background of training rollouts.

A set runs a workflow per problem, as training does, with a client that requests this version only. Sets follow each
other; the result has all of them, so that an evaluation that is cut off is repeated whole, and no set is lost or
counted twice.

Half of what the servers take belongs to training rollouts, and seven eighths while the trainer waits for a batch. The
rest is for the evaluation in progress, which may always have one request, however large: between two requests it would
lose its version.
"""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import msgspec

from areal_lora.data.prompts import Prompt
from areal_lora.errors import ArealLoraError, RolloutError
from areal_lora.obs.metrics.records import EvalRecord, SampleRecord
from areal_lora.processes.log import get_logger
from areal_lora.rollout.channel.channel_messages import EvalResult
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.controller.eval_sets import N_NAMED, BaseEvals, EvalSet
from areal_lora.rollout.controller.groups import USER_CODE
from areal_lora.rollout.workflow import Episode, Workflow, all_samples, derived_seed
from areal_lora.tasks.reward_calls import Score
from areal_lora.tasks.tally import Answer, estimate
from areal_lora.types import AdapterRef, Outcome, Trajectory

MAX_TRIES = 5
BACK_OFF_S = 0.2
USER_TRIES = 2
USER_FAULTS = (*USER_CODE, FaultKind.TIMEOUT, FaultKind.REJECTED)
"""What a workflow does wrong with one problem: its answers stay unscored, after ``USER_TRIES``."""
GIVES_WAY = 4
"""The part of their places that evaluations keep while the trainer waits: one in so many. Not none: a trainer that is
faster than its servers waits at every step."""
N_SAMPLES = 4  # examples in a result

log = get_logger(__name__)


class Changes:
    """Something that callers wait for has changed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def next(self) -> None:
        await self._event.wait()

    async def wait(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Return when ``ready()``, checked at every change, or after ``timeout_s``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not ready():
                    await self._event.wait()


class EvalPlaces:
    """``sequences`` that the evaluation in progress may have at once.

    Its requests are admitted in the order in which they were made, and never cut off.
    """

    def __init__(self, sequences: int) -> None:
        self._sequences = sequences
        self._trainer_waits = False
        self._taken = 0
        self._turn = asyncio.Lock()
        self.changes = Changes()

    def trainer_waits(self, waits: bool) -> None:
        self._trainer_waits = waits
        self.changes.notify()

    def resize(self, sequences: int) -> None:
        self._sequences = sequences
        self.changes.notify()

    def _full(self, sequences: int) -> bool:
        most = self._sequences // GIVES_WAY if self._trainer_waits else self._sequences
        return self._taken > 0 and self._taken + sequences > most

    @asynccontextmanager
    async def take(self, sequences: int) -> AsyncIterator[None]:
        async with self._turn:
            while self._full(sequences):
                await self.changes.next()
            self._taken += sequences
        try:
            yield
        finally:
            self._taken -= sequences
            self.changes.notify()


@dataclass(slots=True, kw_only=True)
class Evaluator:
    """Evaluates one adapter; its requests take ``places``, those of all adapters.

    ``workflows`` are by the name of a set; their client is pinned, so all answers are of the version that is evaluated.
    ``seed`` is the run's: a problem is sampled with the same seed at every version. ``base`` has the results of
    versions 0 that equal the base.
    """

    reward_kind: str
    sets: Sequence[EvalSet]
    workflows: dict[str, Workflow]
    places: EvalPlaces
    seed: int = 0
    base: BaseEvals = field(default_factory=BaseEvals)

    async def run(
        self, ref: AdapterRef, tag: str, newer: Callable[[AdapterRef], AdapterRef] = lambda ref: ref
    ) -> EvalResult:
        """Never raises for faults of servers, scorers or workflows: ``failed`` states the reason.

        If no server holds ``ref`` any more, the records are of ``newer(ref)``, in the result of ``ref``.
        """
        sets, failed, retired = list[EvalRecord](), dict[str, str](), False
        for order, chosen in enumerate(self.sets):
            measure = partial(self._set, chosen, ref)
            try:
                if ref.version == 0 and chosen.base_key is not None:
                    found = await self.base.once(chosen.base_key, ref, measure)
                else:
                    found = await measure()
                own = {"name": chosen.name, "measure": chosen.measure, "order": order, "tag": tag}
                sets.append(msgspec.structs.replace(found, **own))
            except ArealLoraError as error:
                lost = isinstance(error, GenerationFault) and error.kind is FaultKind.RETIRED
                retired |= lost
                if lost and not sets and (other := newer(ref)) != ref:
                    log.info("evaluation %s of %s is of %s: no server holds it any more", tag, ref, other)
                    return msgspec.structs.replace(await self.run(other, tag), version=ref.version)
                failed[chosen.name] = str(error)
            except Exception as error:  # fault boundary: a user's workflow or reward; other adapters train on
                log.exception("evaluation of %s on %s", ref, chosen.name)
                failed[chosen.name] = f"{type(error).__name__}: {error}"
        return EvalResult(
            adapter=ref.name, version=ref.version, tag=tag, sets=tuple(sets), failed=failed, retired=retired
        )

    async def _set(self, chosen: EvalSet, ref: AdapterRef) -> EvalRecord:
        start = time.monotonic()
        answers = await all_samples(self._problem(chosen, ref, prompt) for prompt in chosen.held_out.prompts)
        # In a thread: the bootstrap of a large set takes a second.
        return await asyncio.to_thread(
            record_of, chosen, ref, answers, self.reward_kind, wall_s=time.monotonic() - start
        )

    async def _problem(self, chosen: EvalSet, ref: AdapterRef, prompt: Prompt) -> list[Answer]:
        """Repeats what may succeed later. Raises the last GenerationFault, but for what the workflow does wrong."""
        workflow, n_samples = self.workflows[chosen.name], chosen.config.n_samples
        seed = derived_seed(self.seed, chosen.name, prompt.uid)
        failures = user_failures = 0
        while True:
            try:
                async with self.places.take(n_samples):
                    return given_answers(chosen, prompt, ref, await workflow.run(prompt, ref, seed))
            except GenerationFault as fault:
                # A dead server is restarted; a retired version is not restored.
                failures += fault.kind is not FaultKind.CONNECTION
                user_failures += fault.kind in USER_FAULTS and fault.kind is not FaultKind.TIMEOUT
                final = fault.kind is FaultKind.RETIRED or not fault.retryable
                if failures == MAX_TRIES or user_failures == USER_TRIES or final:
                    if fault.kind not in USER_FAULTS:
                        raise
                    return [Answer(text="", score=Score.fault(fault.outcome, str(fault)))] * n_samples
                await asyncio.sleep(BACK_OFF_S * 2**failures)


def given_answers(chosen: EvalSet, prompt: Prompt, ref: AdapterRef, episode: Episode) -> list[Answer]:
    """One answer per sample of the episode; the trajectories of a sample have its one score.

    Where nothing else decides what is correct, it is a reward that reaches the set's ``correct_threshold``.

    Raises GenerationFault if another version than ``ref`` has sampled a token.
    """
    samples: dict[int, list[tuple[Trajectory, str]]] = defaultdict(list)
    for trajectory, text in zip(episode.group.trajectories, episode.texts, strict=True):
        samples[trajectory.sample].append((trajectory, text))
        if others := {version for version, _ in trajectory.columns.sampled} - {ref.version}:
            detail = f"{prompt.uid}: requested {ref}, sampled by {sorted(others)} (fix: sample with context.answer)"
            raise GenerationFault(FaultKind.PROTOCOL, detail)
    answers = []
    for _, rows in sorted(samples.items()):
        last, text = rows[-1]
        if chosen.workflow.kind == "multi_turn":
            text = _last_turn(chosen, last)
        correct, threshold = last.correct, chosen.config.correct_threshold
        if correct is None and threshold is not None and last.outcome is Outcome.OK:
            correct = last.reward >= threshold
        answers.append(
            Answer(
                text=text,
                score=Score(reward=last.reward, outcome=last.outcome, detail=last.detail, correct=correct),
                n_tokens=sum(trajectory.columns.n_sampled for trajectory, _ in rows),
                finish_reason=last.finish_reason,
            )
        )
    return answers


def _last_turn(chosen: EvalSet, trajectory: Trajectory) -> str:
    """Text of the model's last turn, without the text that stopped it."""
    backwards = trajectory.loss_mask[::-1]
    last = backwards.index(1)
    first = backwards.index(0, last)  # a prompt comes before the first turn
    ids = trajectory.token_ids[len(backwards) - first : len(backwards) - last]
    text = chosen.formatter.tokenizer.decode(ids, skip_special_tokens=True)
    for stop in chosen.sampling.stop:
        text = text.partition(stop)[0]
    return text


def record_of(
    chosen: EvalSet, ref: AdapterRef, answers: Sequence[Sequence[Answer]], reward_kind: str, wall_s: float
) -> EvalRecord:
    """Raises RolloutError where no answer could be scored."""
    found = estimate(answers, reward_kind)
    if found.reward_mean is None:
        raise RolloutError(f"no answer could be scored: {answers[0][0].score.detail}")
    figures = msgspec.structs.asdict(found)
    ungraded, scored = figures.pop("ungraded"), sum(map(len, answers)) - found.unscored
    if 0 < ungraded < scored:
        log.warning(
            "evaluation %s of %s has no accuracy: the reward does not grade %d of %d answers (fix: return "
            "'correct' for every answer, or set evals.correct_threshold)",
            chosen.name,
            ref,
            ungraded,
            scored,
        )
    return EvalRecord(
        adapter=ref.name,
        version=ref.version,
        step=ref.version,
        name=chosen.name,
        n=len(answers),
        n_samples=chosen.config.n_samples,
        temperature=chosen.config.temperature,
        left_out=len(chosen.held_out.left_out),
        left_out_first=list(chosen.held_out.left_out[:N_NAMED]),
        wall_s=wall_s,
        samples=[
            SampleRecord(
                prompt=prompt.sample.prompt,
                completion=problem[0].text,
                gold=prompt.sample.gold,
                reward=None if math.isnan(problem[0].score.reward) else problem[0].score.reward,
                correct=problem[0].score.correct,
            )
            for prompt, problem in islice(zip(chosen.held_out.prompts, answers, strict=True), N_SAMPLES)
        ],
        **figures,
    )
