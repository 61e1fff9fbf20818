"""Which version a token has under policy ``keep``; the bounds of what ends an answer."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from areal_lora.engine.vllm_ext.server.openai_api import ChatBody, CompletionBody
from tests.support.lazy import Lazy

late_engine = Lazy("tests.support.engine.vllm_ext.late_engine")


def test_a_request_that_reaches_the_engine_after_a_change_has_the_new_version() -> None:
    part = asyncio.run(late_engine.answer_of_a_late_request())
    assert part.token_ids == [2] * late_engine.TOKENS
    assert part.versions == part.token_ids


@pytest.mark.parametrize(("kind", "more"), [(CompletionBody, {"prompt": [1]}), (ChatBody, {"messages": []})])
def test_what_ends_an_answer_is_bounded(kind: type[CompletionBody | ChatBody], more: dict[str, Any]) -> None:
    """The server compares every stop with every token, in the process that serves training."""
    for taken in ({"stop": ["a" * 256] * 64}, {"stop": "a" * 256}, {"stop_token_ids": [1] * 64}):
        msgspec.convert({"model": "m", **more, **taken}, kind)
    for refused in (
        *({"stop": ["a"] * 65}, {"stop": ["b", "a" * 257]}, {"stop": "a" * 257}),
        *({"stop_token_ids": [1] * 65}, {"stop_token_ids": [1 << 63]}),
    ):
        with pytest.raises(msgspec.ValidationError, match=r"\$\.stop"):
            msgspec.convert({"model": "m", **more, **refused}, kind)
