"""The digest of a conversation: equal for equal turns alone, however they are written into it."""

from __future__ import annotations

from itertools import product
from typing import NoReturn

import pytest

from areal_lora.rollout.agent_api import replies
from areal_lora.rollout.agent_api.replies import Call, Turn


def test_turns_that_differ_in_anything_compared_have_different_digests() -> None:
    texts = ("", "a", "aa", "\0", "1", ", ", "\ud800", '["tool", "a"]')
    fields = list(product(("tool", "user"), texts, texts, texts))
    turns = [Turn(role=role, name=name, call_id=call_id, content=content) for role, name, call_id, content in fields]
    turns += [Turn(role="tool", name=name, calls=(Call(id="c", name="", arguments="{}"),)) for name in texts]
    digests = [turn.digest(before) for before in (b"", b"x" * 16) for turn in turns]
    assert len(set(digests)) == len(digests) == 2 * (2 * len(texts) ** 3 + len(texts))
    assert {len(digest) for digest in digests} == {16}


def test_an_assistants_thought_does_not_count() -> None:
    said = [
        Turn(role="assistant", content=content).digest(b"") for content in ("<think>so</think>\n\nyes", "yes", "no")
    ]
    assert said[0] == said[1] != said[2]


def test_turns_without_calls_are_compared_without_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of an agent has all earlier turns: theirs were a third of the time of the controller."""

    def slow(*_: object, **__: object) -> NoReturn:
        raise AssertionError

    monkeypatch.setattr(replies.json, "dumps", slow)
    assert Turn(role="user", content="hi").digest(b"") != Turn(role="user", content="ho").digest(b"")
