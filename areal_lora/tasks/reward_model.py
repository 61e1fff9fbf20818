"""The reward ``kind: model``: a sequence classifier behind vLLM's ``/classify``, ``/score`` or ``/pooling``.

It runs in a scorer process with network. What cannot be answered raises `ApiFault`: the answer is an ``error``, never
reward 0.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from areal_lora.network.api_client import ApiClient, ApiLimits
from areal_lora.tasks.judge import fill
from areal_lora.types import gold_text


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of ``config.sections.task.ModelReward`` that matter here, and a process's share of open requests."""

    url: str
    model: str
    key_env: str | None
    input: str | None
    label: int
    limits: ApiLimits


class _Scored(msgspec.Struct):
    """Of ``/classify``, ``/score`` or ``/pooling``; the last has a row of each token from models of tokens."""

    probs: Sequence[float] | None = None
    score: float | None = None
    data: Sequence[float | list[float]] | None = None


class _Reply(msgspec.Struct):
    data: list[_Scored]


class RewardModel:
    """Call it with an answer; it returns the logit of the class. Raises ConfigError for a key that is not set."""

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        self._client = ApiClient(settings.url, settings.key_env, settings.limits, "reward")

    async def __call__(
        self, completion: str, prompt: str, answer: Any, messages: list[dict[str, Any]], columns: dict[str, Any]
    ) -> float:
        """Raises ApiFault, ValueError for a column that is not there."""
        s, fields = self._settings, {**columns, "completion": completion, "prompt": prompt, "answer": gold_text(answer)}
        text = None if s.input is None else fill(s.input, fields)
        body: dict[str, Any]
        if s.url.endswith("/score"):
            body = {"text_1": prompt, "text_2": completion if text is None else text}
        else:
            body = {"messages": messages} if text is None else {"input": text}
        self._client.costs["answers"] += 1
        encoded = msgspec.json.encode({"model": s.model, **body, "use_activation": False})
        return await self._client.post("", encoded, partial(read_score, label=s.label))

    def take_costs(self) -> dict[str, float]:
        """What was spent since the last call: answers, calls, milliseconds."""
        return self._client.take_costs()


def read_score(reply: bytes, label: int) -> float:
    """The score of class ``label`` of one answer. Raises msgspec's errors, ValueError, IndexError."""
    [made] = msgspec.json.decode(reply, type=_Reply).data
    if made.score is not None:
        return made.score
    row = made.data if made.probs is None else made.probs
    if not row:
        raise ValueError("it states no score")
    score = (row[-1] if isinstance(row[-1], list) else row)[label]
    if isinstance(score, list):
        raise ValueError("rows and numbers are mixed")
    return score
