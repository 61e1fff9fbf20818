"""Samples: what a client actions for reaches the data plane's body as it is, or is refused by its name."""

from __future__ import annotations

import gc
import json
import random
from typing import Any

import msgspec
import numpy as np
import pytest

from areal_lora.engine.vllm_ext.server.openai_api import CompletionBody
from areal_lora.errors import RequestError
from areal_lora.network.http_server import prompts_of
from areal_lora.service.tinker import passes
from areal_lora.service.tinker.sdk_bodies import EMPTY_TOP, completion, read_sample, sampled_body

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}, {"type": "encoded_text", "tokens": [3]}]}


def asked(**changes: Any) -> bytes:
    known = {"sampling_session_id": "s1:sample:0", "seq_id": 0, "prompt": PROMPT, "sampling_params": {}}
    return json.dumps(known | changes).encode()


def body(**changes: Any) -> CompletionBody:
    """As the server's own type reads it: it refuses fields that it does not know."""
    made = completion(read_sample(asked(**changes)), "acme-m.1@v3", 64, pinned=True)
    return msgspec.convert(made, CompletionBody)


def test_settings_reach_the_server() -> None:
    settings = {"max_tokens": 7, "seed": 1 << 63, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "stop": [4, 5]}
    found = body(num_samples=3, sampling_params=settings)
    assert prompts_of(found.prompt) == [[1, 2, 3]]
    assert (found.model, found.n, found.max_tokens, found.temperature) == ("acme-m.1@v3", 3, 7, 0.5)
    assert (found.top_k, found.top_p, found.stop_token_ids, found.stop) == (3, 0.9, [4, 5], [])
    assert 0 <= (found.seed or 0) < 1 << 63
    assert (found.pin_version, found.return_token_ids, found.logprobs, found.echo) == (True, True, 0, False)


def test_stability_info_is_accepted() -> None:
    assert body(record_stability_info=True) == body()


def test_defaults_are_those_of_the_sdk() -> None:
    found = body()
    assert (found.n, found.max_tokens, found.temperature, found.top_k, found.top_p) == (1, 61, 1.0, 0, 1.0)
    assert (found.seed, found.stop, found.stop_token_ids, found.ignore_eos) == (None, [], [], False)


def test_scores_of_a_whole_context_need_no_answer() -> None:
    """What ``compute_logprobs`` sends; a sample still has to fit."""
    known = asked(prompt_logprobs=True, sampling_params={"max_tokens": 1})
    assert [completion(read_sample(known), "base", n, pinned=False)["max_tokens"] for n in (3, 4)] == [0, 1]
    without = asked(sampling_params={"max_tokens": 1})
    assert completion(read_sample(without), "base", 3, pinned=False)["max_tokens"] == 1


@pytest.mark.parametrize(
    ("stop", "texts", "tokens", "ignore_eos"),
    [
        ("a", ["a"], [], False),
        (["a", "b"], ["a", "b"], [], False),
        ([9], [], [9], False),
        ([], [], [], True),
        (["a" * 256] * 32 + [9] * 32, ["a" * 256] * 32, [9] * 32, False),
    ],
)
def test_forms_of_stop(stop: Any, texts: list[str], tokens: list[int], ignore_eos: bool) -> None:
    found = body(sampling_params={"stop": stop})
    assert (found.stop, found.stop_token_ids, found.ignore_eos) == (texts, tokens, ignore_eos)


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"topk_prompt_logprobs": 21}, "topk_prompt_logprobs"),
        ({"prompt_alt_tokens_k": 1}, "prompt_alt_tokens_k"),
        ({"target_prompt_logprobs": {"data": [1]}}, "target_prompt_logprobs"),
        ({"num_samples": 0}, "num_samples"),
        ({"topk_sample_logprobs": 21}, "topk_sample_logprobs"),
        ({"prompt_logprobs_last_n": 2}, "prompt_logprobs_last_n"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "prompt_logprobs_last_n"),
        ({"prompt": {"chunks": [{"type": "image", "data": "x"}]}}, "prompt"),
        ({"prompt": {"chunks": []}}, "prompt"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": []}]}}, "prompt"),
        ({"sampling_params": {"min_p": 0.1}}, "sampling_params"),
        ({"sampling_params": {"stop": ["a"] * 65}}, "sampling_params.stop"),
        ({"sampling_params": {"stop": [9] * 65}}, "sampling_params.stop"),
        ({"sampling_params": {"stop": "a" * 257}}, "sampling_params.stop"),
        ({"sampling_params": {"stop": [9, "a" * 257]}}, "sampling_params.stop[1]"),
        ({"seq_id": "a"}, "seq_id"),
        ({"seq_id": 1 << 80}, "body"),
        ({f"unused{k}": 0 for k in range(61)}, "sample"),
        ({"sampling_session_id": "\ud800"}, "body"),
        ({"prompt": {"chunks": [{"tokens": [1 << 31]}]}}, "prompt.chunks[0].tokens[0]"),
        ({"prompt": {"chunks": [{"tokens": [-1]}]}}, "prompt.chunks[0].tokens[0]"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(changes: dict[str, Any], path: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_sample(asked(**changes))
    assert (refused.value.status, refused.value.path) == (422, path)


def test_fields_that_ask_for_nothing_are_no_reason_to_refuse() -> None:
    read_sample(asked(**{f"unused{k}": 0 for k in range(60)}))
    read_sample(asked(topk_prompt_logprobs=0, prompt_alt_tokens_k=0, record_stability_info=False, base_model=None))


def test_what_is_not_read_makes_no_objects() -> None:
    """2 million lists of 4 MiB: in fields that nothing reads, and in place of a setting."""
    lists = b"[" + b"[]," * 2_000_000 + b"[]]"
    for field in (b"unknown", b"sampling_params"):
        began = gc.get_stats()[0]["collections"]
        with pytest.raises(RequestError) as refused:
            read_sample(asked()[:-1] + b',"' + field + b'":' + lists + b"}")
        assert refused.value.path == field.decode()
        assert gc.get_stats()[0]["collections"] - began < 10, "a collection comes with every 700 objects"


def test_a_prompt_may_have_a_chunk_for_each_token_and_not_millions() -> None:
    """The cookbook's self-distillation sends each token of an answer as a chunk."""
    each = read_sample(asked(prompt={"chunks": [{"tokens": [k]} for k in range(40_000)]}))
    assert each.token_ids == list(range(40_000))
    began = gc.get_stats()[0]["collections"]
    with pytest.raises(RequestError) as refused:
        read_sample(asked().replace(b'{"chunks": [', b'{"chunks": [' + b"{}," * 2_000_000))
    assert refused.value.path == "prompt"
    assert gc.get_stats()[0]["collections"] - began < 10, "a collection comes with every 700 objects"


def test_a_prompt_longer_than_the_context_is_refused() -> None:
    completion(read_sample(asked()), "base", 3, pinned=False)
    with pytest.raises(RequestError, match="prompt: it has 3 tokens; a sequence has 2 at most"):
        completion(read_sample(asked()), "base", 2, pinned=False)


def test_likeliest_tokens_of_random_answers_are_those_of_a_plain_sort() -> None:
    draw = random.Random(20261130)
    rows = [
        {draw.randrange(9**6): draw.choice([-1.0, -9 * draw.random()]) for _ in range(draw.randrange(7))}
        for _ in range(200)
    ]
    scores = {"token_logprobs": [-1.0] * 200, "top_ids": rows}
    message = passes.SampleResponse()
    wanted = asked(topk_sample_logprobs=4)
    message.ParseFromString(sampled_body(read_sample(wanted), answer(token_ids=[7] * 200, logprobs=scores)))
    top = message.sequences[0].topk
    ids = np.frombuffer(top.token_ids, "<i4").reshape(200, 4)
    values = np.frombuffer(top.logprobs, "<f4").reshape(200, 4)
    for row, found, scored in zip(rows, ids.tolist(), values.tolist(), strict=True):
        plain = sorted(row.items(), key=lambda item: -item[1])[:4]
        plain += [(0, EMPTY_TOP)] * (4 - len(plain))
        assert found == [token for token, _ in plain]
        assert scored == pytest.approx([value for _, value in plain])


def answer(**choice: Any) -> bytes:
    one = {"index": 0, "finish_reason": "stop", "token_ids": [7], "logprobs": {"token_logprobs": [-1.0]}}
    return json.dumps({"choices": [one | choice]}).encode()


def test_prompts_scores_are_those_asked_for() -> None:
    wanted = asked(prompt_logprobs=True, prompt_logprobs_last_n=1)
    scores = {"token_logprobs": [0.0, -2.0, -3.0, -1.0]}
    message = passes.SampleResponse()
    message.ParseFromString(sampled_body(read_sample(wanted), answer(token_ids=[1, 2, 3, 7], logprobs=scores)))
    prompt = np.frombuffer(message.prompt_logprobs, "<f4")
    assert np.isnan(prompt[:2]).all()
    assert prompt[2] == -3.0
    (sequence,) = message.sequences
    assert (sequence.tokens, sequence.logprobs) == (np.array([7], "<i4").tobytes(), np.array([-1.0], "<f4").tobytes())


def test_an_answer_that_a_server_cut_is_no_answer() -> None:
    with pytest.raises(RequestError) as refused:
        sampled_body(read_sample(asked()), answer(finish_reason="abort"))
    assert refused.value.status == 503, "it is sampled again"


def test_the_most_likely_tokens_of_the_prompt_are_asked_for_and_read() -> None:
    wanted = asked(topk_prompt_logprobs=2, topk_sample_logprobs=1)
    made = body(topk_prompt_logprobs=2, topk_sample_logprobs=1)
    assert (made.echo, made.logprobs) == (True, 2), "the larger one of both"
    rows = [{}, {"2": -2.0, "9": -0.5, "4": -3.0}, {"3": -0.25, "1": -1.0}, {"7": -1.0, "8": -1.5}]
    scores = {"token_logprobs": [0.0, -2.0, -0.25, -1.0], "top_ids": rows}
    message = passes.SampleResponse()
    message.ParseFromString(sampled_body(read_sample(wanted), answer(token_ids=[1, 2, 3, 7], logprobs=scores)))
    assert not message.HasField("prompt_logprobs"), "it was not asked for"
    top = message.topk_prompt
    assert (top.k, top.length) == (2, 3)
    ids, values = np.frombuffer(top.token_ids, "<i4"), np.frombuffer(top.logprobs, "<f4")
    assert ids.tolist() == [0, 0, 9, 2, 3, 1]
    assert values[2:].tolist() == [-0.5, -2.0, -0.25, -1.0]
    (sequence,) = message.sequences
    assert (sequence.topk.k, np.frombuffer(sequence.topk.token_ids, "<i4").tolist()) == (1, [7])
