"""Log-probabilities of a teacher, a model on a server of others: the reference of an adapter.

The controller requests them when a group has ended, beside the event loop's other work, and they travel to the trainer
as a column of the tokens: no step waits for HTTP. While the teacher does not answer, groups that have ended are held.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from areal_lora.config.sections.section import ServedModel
from areal_lora.data.prompts import Prompt, TextTokenizer
from areal_lora.errors import ConfigError, EnvironmentError_
from areal_lora.network.api_client import ApiClient, ApiFault, ApiLimits
from areal_lora.processes.log import get_logger
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.workflow import Episode, Workflow, all_samples, first_fault
from areal_lora.types import AdapterRef, Trajectory

LIMITS = ApiLimits(attempt_s=300.0, attempts=5, backoff_s=1.0, concurrency=32, reply_bytes=1 << 28)
"""A server computes one long sequence in seconds and may have others' requests first."""
KEY = "algorithm.reference"

log = get_logger(__name__)


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]


class _Choice(msgspec.Struct):
    text: str = ""
    logprobs: _Logprobs | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class Teacher:
    """Scores tokens with ``model``; ``report`` gets a line when it stops to answer, and when it answers again.

    Raises ConfigError for a key that is not set.
    """

    def __init__(self, model: ServedModel, report: Callable[[str], None], limits: ApiLimits = LIMITS) -> None:
        self._model, self._report, self._limits = model, report, limits
        self._client = ApiClient(model.url, model.key_env, limits, KEY)
        self._silent = False

    @property
    def name(self) -> str:
        return f"the teacher {self._model.model} at {self._model.url}"

    async def check(self, tokenizer: TextTokenizer, max_model_len: int) -> None:
        """Compare the vocabulary, with one sequence as long as the longest that will be scored.

        Raises ConfigError for another vocabulary, a shorter context or another API, EnvironmentError_ if there is no
        answer.
        """
        size = len(tokenizer)
        ids = [i * size // max_model_len if size > max_model_len else i % size for i in range(max_model_len)]
        try:
            text, _ = await self._request(ids)
        except ApiFault as fault:
            reason = f"{self.name} gives no log-probabilities of {max_model_len} tokens: {fault}"
            if fault.passing:
                raise EnvironmentError_(f"{KEY}: {reason} (fix: start it, or correct url)") from None
            raise ConfigError(KEY, reason, "serve it with vLLM and a context above rollout.max_model_len") from None
        if text not in (tokenizer.decode(ids, skip_special_tokens=skip) for skip in (False, True)):
            reason = f"{self.name} has another vocabulary than model.path: the same token ids are other texts there"
            raise ConfigError(KEY, reason, "choose a teacher with the tokenizer of the model")

    async def scored(self, trajectory: Trajectory, hold_s: float) -> Trajectory:
        """The trajectory with the teacher's log-probabilities; for ``hold_s`` it is held while there is no answer.

        Raises GenerationFault after that, or for a sequence that the teacher refuses.
        """
        deadline = time.monotonic() + hold_s
        while True:
            try:
                _, logprobs = await self._request(trajectory.columns.ids.tolist())
            except ApiFault as fault:
                if not fault.passing:
                    raise GenerationFault(FaultKind.REJECTED, f"{self.name}: {fault}") from None
                self._note(f"{self.name} does not answer, groups are held: {fault}", silent=True)
                if time.monotonic() > deadline:
                    raise GenerationFault(FaultKind.TEACHER, f"{self.name}: {fault}") from None
                continue
            self._note(f"{self.name} answers again", silent=False)
            return replace(trajectory, columns=msgspec.structs.replace(trajectory.columns, teacher=logprobs.tobytes()))

    async def close(self) -> None:
        await self._client.close()

    def _note(self, text: str, *, silent: bool) -> None:
        if silent != self._silent:
            self._silent = silent
            log.warning("%s", text)
            self._report(text if silent else "serving")

    async def _request(self, ids: list[int]) -> tuple[str, np.ndarray]:
        """The text of ``ids``, and their log-probabilities [T] float32, 0 for the first. Raises ApiFault."""
        body: dict[str, Any] = {"model": self._model.model, "prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 0}

        def read(reply: bytes) -> tuple[str, np.ndarray]:
            choice = msgspec.json.decode(reply, type=_Completion).choices[0]
            found = choice.logprobs.token_logprobs if choice.logprobs else []
            if len(found) < len(ids):
                raise ValueError(f"{len(found)} log-probabilities for {len(ids)} tokens")
            logprobs = np.array([0.0, *found[1 : len(ids)]], "<f4")
            if not np.isfinite(logprobs).all():
                raise ValueError("log-probabilities that are not finite")
            return choice.text, logprobs

        return await self._client.post("/completions", msgspec.json.encode(body), read)


@dataclass(frozen=True, slots=True, kw_only=True)
class WithTeacher:
    """``answers`` to a prompt with the teacher's log-probabilities of all their tokens."""

    answers: Workflow
    teacher: Teacher
    hold_s: float

    async def run(self, prompt: Prompt, ref: AdapterRef, seed: int) -> Episode:
        """Raises GenerationFault."""
        episode = await self.answers.run(prompt, ref, seed)
        if first_fault(episode.group) is not None:
            return episode
        scored = await all_samples([self.teacher.scored(each, self.hold_s) for each in episode.group.trajectories])
        return replace(episode, group=replace(episode.group, trajectories=tuple(scored)))
