"""Which version a token has under policy ``keep``; the bounds of what ends an answer."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from areal_lora.engine.vllm_ext.server.openai_api import ChatBody, CompletionBody
from tests.support.lazy import Lazy

data_plane = Lazy("areal_lora.engine.vllm_ext.server.data_plane")
engine = Lazy("areal_lora.engine.vllm_ext.compat.engine")
logprobs = Lazy("vllm.logprobs")
scored_engine = Lazy("tests.support.engine.vllm_ext.scored_engine")
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


@pytest.mark.parametrize("n_likeliest", [0, 3])
@pytest.mark.parametrize(
    ("policy", "stop", "stream", "cut"),
    [
        *(("finish", None, stream, False) for stream in (False, True)),
        *(
            (policy, stop, stream, cut)
            for policy in ("interrupt", "keep")
            for stop in (None, "<1035>")
            for stream in (False, True)
            for cut in (False, True)
        ),
    ],
)
def test_columns_have_the_log_probabilities_of_rows(
    monkeypatch: pytest.MonkeyPatch, policy: str, stop: str | None, stream: bool, cut: bool, n_likeliest: int
) -> None:
    """In flat arrays or as objects: of every token those of a formula, also across versions and up to a stop text."""
    flat = logprobs.FlatLogprobs
    monkeypatch.setattr(flat, "append_fast", engine.append_kept)
    monkeypatch.setattr(flat, "extend", engine.extend_kept)
    how = {"logprobs": n_likeliest, "stop": stop, "stream": stream, "cut": cut}
    n = 3 if stop else scored_engine.TOKENS
    for form in (True, False):
        made = asyncio.run(scored_engine.answers(policy, flat=form, **how))
        assert sorted(made) == [0, 1]
        for parts in made.values():
            assert {type(part.logprobs) for part in parts} == ({flat} if form else {list})
            rows = [row for part in parts for row in part.rows()]
            want = [scored_engine.row(3 + t, n_likeliest) for t in range(n)]
            assert [each for part in parts for each in part.token_ids] == [
                scored_engine.token_id(3 + t) for t in range(n)
            ]
            assert [value for part in parts for value in part.values()] == [-(2.0 ** -(4 + t)) for t in range(n)]
            assert rows == want
            versions = [version for part in parts for version in part.versions]
            assert versions == [1] * (scored_engine.AT_CUT if cut else n) + [2] * (n - scored_engine.AT_CUT) * cut


@pytest.mark.parametrize("columns", [False, True])
def test_answers_as_columns_have_flat_log_probabilities(columns: bool) -> None:
    body = CompletionBody(model="m", prompt=[1], logprobs=0, return_columns=columns)
    assert data_plane._sampling(body, 4).flat_logprobs is columns
