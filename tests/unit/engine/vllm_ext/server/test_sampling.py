"""Which version a token has under policy ``keep``."""

from __future__ import annotations

import asyncio

from tests.support.lazy import Lazy

late_engine = Lazy("tests.support.engine.vllm_ext.late_engine")


def test_a_request_that_reaches_the_engine_after_a_change_has_the_new_version() -> None:
    part = asyncio.run(late_engine.answer_of_a_late_request())
    assert part.token_ids == [2] * late_engine.TOKENS
    assert part.versions == part.token_ids
