"""Rewards by models that others serve, ``kind: judge`` and ``kind: model``. They run in scorer processes with network.

A judge is a language model behind an OpenAI-compatible API that scores the answer. A reply is kept by everything in the
request: address, model, messages and all parameters. A reward model is a sequence classifier behind vLLM's
``/classify``, ``/score`` or ``/pooling``. What cannot be answered raises `ApiFault`: the answer is an ``error``, never
reward 0.
"""

import asyncio
import hashlib
import json
import re
import sqlite3
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from areal_lora.network.api_client import ApiClient, ApiLimits
from areal_lora.types import gold_text

FILE = "replies.sqlite"
BUSY_S = 30.0
KEPT, TRIM_EVERY = 250_000, 1000  # replies; 512 tokens of each are 0.6 GB


class JudgeCache:
    """The newest replies' texts by the hash of the whole question. Raises sqlite3.Error if the file cannot be made."""

    def __init__(self, folder: Path) -> None:
        self._file = sqlite3.connect(folder / FILE, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        self._file.execute("PRAGMA journal_mode=WAL")
        self._file.execute("PRAGMA synchronous=NORMAL")
        self._file.execute("CREATE TABLE IF NOT EXISTS replies (question TEXT PRIMARY KEY, text TEXT NOT NULL)")
        if self._file.execute("SELECT 1 FROM sqlite_master WHERE name = 'texts'").fetchone():  # of earlier versions
            self._file.execute("INSERT OR IGNORE INTO replies SELECT question, text FROM texts LIMIT ?", (KEPT,))
            self._file.execute("DROP TABLE IF EXISTS texts")

    def get(self, question: str) -> str | None:
        """The reply, None if there is none or the file cannot be read."""
        try:
            row = self._file.execute("SELECT text FROM replies WHERE question = ?", (question,)).fetchone()
        except sqlite3.Error:
            return None  # the judge is called instead
        return None if row is None else str(row[0])

    def put(self, question: str, reply: str) -> bool:
        """Keep ``reply``; False if the disk does not take it: the score counts all the same."""
        try:
            put = self._file.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (question, reply))
            newest = put.lastrowid or 0
            if newest % TRIM_EVERY == 0:
                self._file.execute("DELETE FROM replies WHERE rowid <= ?", (newest - KEPT,))
        except sqlite3.Error:
            return False
        return True


HIGHEST = 10.0  # of a score, from 0; it becomes reward 1
# As text, JSON, or with marks of Markdown and LaTeX around the colon: **Score:** 9, Score: $\boxed{9}$.
_SCORE = re.compile(r'score[\s"*_`]*[:=：][\s"*_`$\[(]*(?:\\boxed\{)?(-?[0-9]+(?:\.[0-9]+)?)', re.IGNORECASE)
READ_CHARACTERS = 1 << 16  # of a reply's end


class ServedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of ``config.sections.task.ServedReward`` that matter here, and a process's share of open requests."""

    url: str
    model: str
    key_env: str | None
    limits: ApiLimits


class JudgeSettings(ServedSettings, frozen=True, kw_only=True):
    """Those of ``JudgeReward``."""

    prompt: str
    parameters: dict[str, Any]


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class LlmJudge:
    """Call it with an answer; it returns the score between 0 and 1. ``kept`` is the folder of the cache.

    Raises ConfigError if the environment variable of the key is not set.
    """

    def __init__(self, settings: JudgeSettings, kept: Path | None) -> None:
        self._settings = settings
        self.client = ApiClient(settings.url, settings.key_env, settings.limits, "reward")
        self._cache = None if kept is None else JudgeCache(kept)
        self._asked: dict[str, asyncio.Task[tuple[str, float]]] = {}

    async def __call__(
        self, completion: str, prompt: str, answer: Any, messages: list[dict[str, Any]], columns: dict[str, Any]
    ) -> float:
        """The score of ``completion``, scaled to [0, 1]. Raises ApiFault, ValueError for a column that is not there."""
        self.client.costs["answers"] += 1
        body = self._body(fields_of(completion, prompt, answer, messages, columns))
        key = hashlib.sha256(f"{self._settings.url}\n{body}".encode()).hexdigest()
        known = None if self._cache is None else self._cache.get(key)
        if known is not None:
            self.client.costs["cached"] += 1
            return read_score(known) / HIGHEST
        # Equal answers of a batch are sent once; a caller that runs out of time does not end the others' request.
        if (task := self._asked.get(key)) is None:
            request = self.client.post("/chat/completions", body.encode(), self._read)
            task = self._asked[key] = asyncio.create_task(request)
            task.add_done_callback(lambda _: self._asked.pop(key, None))
        else:
            self.client.costs["cached"] += 1
        reply, score = await asyncio.shield(task)
        if self._cache is not None and not self._cache.put(key, reply):
            self.client.costs["cache_faults"] += 1
        return score / HIGHEST

    def _body(self, fields: Mapping[str, Any]) -> str:
        s = self._settings
        body = {
            "model": s.model,
            "messages": [{"role": "user", "content": fill(s.prompt, fields)}],
            "temperature": 0.0,
            "max_tokens": 512,
            **s.parameters,
        }
        return json.dumps({name: value for name, value in body.items() if value is not None}, sort_keys=True)

    def _read(self, reply: bytes) -> tuple[str, float]:
        """The text and its score. Raises ValueError or msgspec's errors for what is no chat completion with a score."""
        made = msgspec.json.decode(reply, type=_Completion)
        content, usage = made.choices[0].message.content, made.usage or _Usage()
        self.client.costs["prompt_tokens"] += usage.prompt_tokens
        self.client.costs["completion_tokens"] += usage.completion_tokens
        if content is None:
            raise ValueError("it has no text")
        return content, read_score(content)


def fields_of(
    completion: str, prompt: str, answer: Any, messages: list[dict[str, Any]], columns: Mapping[str, Any]
) -> dict[str, Any]:
    """What a template may name."""
    parts = ((m["role"], part) for m in messages for part in (m["content"], m.get("tool_calls")) if part)
    lines = "\n".join(f"{role}: {_text(part)}" for role, part in parts)
    given = {"completion": completion, "prompt": prompt, "answer": gold_text(answer), "conversation": lines}
    return {**columns, **given}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def fill(template: str, fields: Mapping[str, Any]) -> str:
    """``template`` with ``{name}`` replaced once: braces in the values stay. Raises ValueError for an unknown name."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in fields:
            raise ValueError(f"the prompt names {match[0]}, the columns are: {', '.join(sorted(fields))}")
        return _text(fields[match[1]])

    names = "|".join([r"\w+", *map(re.escape, filter(None, fields))])  # columns may have blanks or hyphens
    return re.sub(rf"\{{({names})\}}", value, template)


def read_score(text: str) -> float:
    """The last score that ``text`` states, within the scale. Raises ValueError."""
    text = text[-READ_CHARACTERS:]
    stated = _SCORE.findall(text)
    if not stated:
        raise ValueError(f"it states no score: {text[-80:]!r}")
    score = float(stated[-1])
    if not 0 <= score <= HIGHEST:
        raise ValueError(f"the score {score:g} is not between 0 and {HIGHEST:g}")
    return score


class ModelSettings(ServedSettings, frozen=True, kw_only=True):
    """Those of ``ModelReward``."""

    input: str | None
    label: int


class _Verdict(msgspec.Struct):
    """Of ``/classify``, ``/score`` or ``/pooling``; the last has a row of each token from models of tokens."""

    probs: Sequence[float] | None = None
    score: float | None = None
    data: Sequence[float | list[float]] | None = None


class _Reply(msgspec.Struct):
    data: list[_Verdict]


class RewardModel:
    """Call it with an answer; it returns the logit of the class. Raises ConfigError for a key that is not set."""

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        self.client = ApiClient(settings.url, settings.key_env, settings.limits, "reward")

    async def __call__(
        self, completion: str, prompt: str, answer: Any, messages: list[dict[str, Any]], columns: dict[str, Any]
    ) -> float:
        """Raises ApiFault, ValueError for a column that is not there."""
        s = self._settings
        text = None if s.input is None else fill(s.input, fields_of(completion, prompt, answer, messages, columns))
        body: dict[str, Any]
        if s.url.endswith("/score"):
            body = {"text_1": prompt, "text_2": completion if text is None else text}
        else:
            body = {"messages": messages} if text is None else {"input": text}
        self.client.costs["answers"] += 1
        encoded = msgspec.json.encode({"model": s.model, **body, "use_activation": False})
        return await self.client.post("", encoded, partial(class_score, label=s.label))


def class_score(reply: bytes, label: int) -> float:
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
