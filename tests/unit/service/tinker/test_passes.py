"""Bodies of passes and samples against the SDK's own classes, in both versions: what it writes is read, and back."""

from __future__ import annotations

import base64
import contextlib
import json
import subprocess
from typing import Any

import numpy as np
import pytest

from areal_lora.errors import RequestError
from areal_lora.operations.protocol import Loss, LossSettings, Pass, PassResult
from areal_lora.service.tinker.passes import (
    INT64,
    MAX_CHUNKS,
    MAX_DATA,
    ForwardBackwardRequest,
    PassRequest,
    read_pass,
    scored_body,
)
from areal_lora.service.tinker.sdk_bodies import read_sample, sampled_body
from tests.support.paths import ROOT
from tests.support.tinker.sdk import VERSIONS, environment, sdk_program

PROGRAM = ROOT / "tests" / "support" / "tinker" / "both_ways.py"
SAMPLE: dict[str, Any] = {
    "sampling_session_id": "s1:sample:0",
    "seq_id": 1,
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
    "sampling_params": {"temperature": 1.0},
    "num_samples": 2,
    "prompt_logprobs": True,
    "topk_prompt_logprobs": 3,
    "topk_sample_logprobs": 2,
    "prompt_alt_tokens_k": 0,
    "type": "sample",
}
PROMPT_TOP = [{}, {"2": -1.0, "8": -0.25}, {"3": -2.0, "1": -4.0, "6": -0.5, "5": -1.0}]
ANSWER = {
    "choices": [
        {
            "index": 1,
            "finish_reason": "length",
            "token_ids": [1, 2, 3, 9],
            "logprobs": {"token_logprobs": [0, -1, -2, -0.5], "top_ids": [*PROMPT_TOP, {"9": -0.5}]},
        },
        {
            "index": 0,
            "finish_reason": "stop",
            "token_ids": [1, 2, 3, 7],
            "logprobs": {
                "token_logprobs": [0, -1, -2, -0.125],
                "top_ids": [*PROMPT_TOP, {"4": -3, "7": -0.125, "5": -1}],
            },
        },
    ]
}


def floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def ids(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


@pytest.fixture(scope="module", params=VERSIONS)
def both_ways(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any], dict[str, PassRequest]]:
    """Version, what the SDK read of our answers, and what we read of its requests."""
    scored = scored_body(PassResult(logprobs=(floats(-0.5, -0.25), floats(-3.0)), loss=1.5))
    sampled = sampled_body(read_sample(json.dumps(SAMPLE).encode()), json.dumps(ANSWER).encode())
    answers = {"scored": base64.b64encode(scored).decode(), "sampled": base64.b64encode(sampled).decode()}
    done = subprocess.run(
        sdk_program(PROGRAM),
        input=json.dumps(answers),
        env=environment(request.param),
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    return (
        request.param,
        said["read"],
        {name: read_pass(base64.b64decode(body)) for name, body in said["written"].items()},
    )


def test_the_sdk_reads_our_answers(both_ways: Any) -> None:
    version, read, _ = both_ways
    assert read["metrics"] == {"loss:sum": 1.5}
    assert read["logprobs"] == [[-0.5, -0.25], [-3.0]]
    assert read["shapes"] == [[2], [1]]
    assert read["sequences"] == [["stop", [7], [-0.125]], ["length", [9], [-0.5]]], "in the order of their indices"
    assert read["prompt_logprobs"] == [None, -1.0, -2.0]
    assert read["prompt_top"] == [None, [[8, -0.25], [2, -1.0]], [[6, -0.5], [5, -1.0], [3, -2.0]]]
    if version != VERSIONS[0]:
        assert read["top"] == [[[[7, -0.125], [5, -1.0]]], [[[9, -0.5]]]]


def test_we_read_the_passes_of_the_sdk(both_ways: Any) -> None:
    _, _, written = both_ways
    assert {request.model for request in written.values()} == {"s1:train:0"}
    assert (written["cross_entropy"].seq, written["ppo"].seq) == (7, 3)
    found = written["cross_entropy"].wanted
    assert isinstance(found, Pass)
    assert (found.loss, found.backward) == (Loss.CROSS_ENTROPY, True)
    first, second = found.data
    assert (first.tokens, first.weights) == (ids(1, 2, 3, 4), floats(0.0, 1.0, 0.5)), "two chunks are one sequence"
    assert (second.tokens, second.weights) == (ids(9, 8), floats(-1.0)), "a custom loss has any weight"
    forward = written["forward"].wanted
    assert isinstance(forward, Pass)
    assert (forward.backward, forward.data[0].weights) == (False, floats(1.0, 1.0))
    ppo = written["ppo"].wanted
    assert isinstance(ppo, Pass)
    assert ppo.settings == LossSettings(clip_low=0.7, clip_high=1.3)
    assert (ppo.data[0].logprobs, ppo.data[0].advantages) == (floats(-0.5, -1.25), floats(0.0, 2.0))
    importance, dro = written["importance_sampling"].wanted, written["dro"].wanted
    assert isinstance(importance, Pass)
    assert isinstance(dro, Pass)
    assert (importance.loss, importance.settings) == (Loss.IMPORTANCE_SAMPLING, LossSettings())
    assert (dro.loss, dro.settings) == (Loss.DRO, LossSettings(beta=0.1))
    sparse = written["sparse"].wanted
    assert isinstance(sparse, Pass)
    weights = np.zeros(16, "<f4")
    weights[3], weights[9] = 1.5, -2.0
    assert sparse.data[0].weights == weights.tobytes()


def test_targets_that_do_not_count_may_be_anything(both_ways: Any) -> None:
    """``[0] * k + sampled``, in every loss that a target without weight or advantage does not change."""
    version, _, written = both_ways
    weighted = written["padded, weights"].wanted
    assert isinstance(weighted, Pass)
    assert (weighted.data[0].tokens, weighted.data[0].weights) == (ids(1, 2, 3, 4), floats(0.0, 1.0, 1.0))
    losses = {"padded": (Loss.IMPORTANCE_SAMPLING, LossSettings())}
    if version != VERSIONS[0]:
        losses |= {
            "gspo": (Loss.GSPO, LossSettings(clip_high=1.5)),
            "gspo, mask": (Loss.GSPO, LossSettings()),
            "stable_reinforce": (Loss.STABLE_REINFORCE, LossSettings(beta=0.01)),
        }
        outside = written["gspo, outside"].wanted
        assert isinstance(outside, RequestError)
        assert outside.path == "data[0].loss_fn_inputs.advantages"
    for name, (loss, settings) in losses.items():
        wanted = written[name].wanted
        assert isinstance(wanted, Pass), f"{name}: {wanted}"
        assert (wanted.loss, wanted.settings) == (loss, settings)
        (found,) = wanted.data
        assert (found.tokens, found.weights) == (ids(1, 2, 3, 4, 5), floats(0.0, 0.0, 1.0, 1.0)), name
        assert (found.logprobs, found.advantages) == (floats(0.0, 0.0, -0.5, -1.25), floats(0.0, 0.0, 2.0, 2.0))


@pytest.mark.parametrize(
    ("case", "path"),
    [
        ("mask", "data[0].loss_fn_inputs.mask"),
        ("not shifted", "data[0].loss_fn_inputs.target_tokens"),
        ("padded, no weights", "data[0].loss_fn_inputs.target_tokens"),
        ("padded, dro", "data[0].loss_fn_inputs.target_tokens"),
        ("not finite", "data[0].loss_fn_inputs.weights"),
        ("too few", "data[0].loss_fn_inputs.weights"),
        ("setting", "loss_fn_config.epsilon"),
        ("two targets", "data[0].loss_fn_inputs.target_tokens"),
        ("image", "data[0].model_input[0]"),
    ],
)
def test_what_is_not_served_is_named_and_keeps_its_place(both_ways: Any, case: str, path: str) -> None:
    _, _, written = both_ways
    assert written[case].seq == 3
    refused = written[case].wanted
    assert isinstance(refused, RequestError)
    assert (refused.status, refused.path) == (422, path), str(refused)
    assert refused.fix


def test_random_bytes_are_refused_or_read_and_never_an_error() -> None:
    seed = 20261123
    random = np.random.default_rng(seed)
    whole = _request([ids(1, 2)], {"target_tokens": (2, np.array([2, 3], "<i8").tobytes())})
    for i in range(3000):
        body = bytearray(whole)
        for _ in range(random.integers(1, 6)):
            body[random.integers(len(body))] = random.integers(256)
        body = body[: random.integers(len(body) + 1)] if i % 3 == 0 else body
        with contextlib.suppress(RequestError):
            assert isinstance(read_pass(bytes(body)).wanted, Pass | RequestError), seed


def _request(chunks: list[bytes], inputs: dict[str, tuple[int, bytes]]) -> bytes:
    message = ForwardBackwardRequest(model_id=b"s1:train:0", seq_id=1, loss_fn=b"cross_entropy")
    datum = message.data.add()
    for chunk in chunks:
        datum.model_input.add().encoded_text.tokens = chunk
    for key, (dtype, data) in inputs.items():
        entry = datum.loss_fn_inputs.add(key=key.encode())
        entry.value.dense, entry.value.dtype = data, dtype
    encoded: bytes = message.SerializeToString()
    return encoded


def test_data_of_a_pass_are_limited_and_chunks_are_one_sequence() -> None:
    message = ForwardBackwardRequest()
    message.ParseFromString(_request([ids(1), ids(2)], {"target_tokens": (INT64, np.array([2, 3], "<i8").tobytes())}))
    message.data.extend([message.data[0]] * (MAX_DATA - 1))
    found = read_pass(message.SerializeToString()).wanted
    assert isinstance(found, Pass)
    assert {datum.tokens for datum in found.data} == {ids(1, 2, 3)}
    message.data.append(message.data[0])
    refused = read_pass(message.SerializeToString()).wanted
    assert isinstance(refused, RequestError)
    assert (refused.path, refused.reason) == ("data", "there are 1025; one pass has 1024 at most")


def test_a_long_sequence_may_have_a_chunk_for_each_token() -> None:
    n = MAX_CHUNKS
    wanted = read_pass(_request([ids(1)] * n, {"target_tokens": (INT64, np.ones(n, "<i8").tobytes())})).wanted
    assert isinstance(wanted, Pass)
    assert len(wanted.data[0].tokens) == 4 * (n + 1)


CHUNK, INPUT, NUMBER, NAMED = b"\x0a\x02\x0a\x00", b"\x12\x00", b"\x2a\x00", b"\x3a\x02\x12\x00"
"""Empty ones: of a datum chunk and input, of a pass a number and a named setting."""


@pytest.mark.parametrize(
    ("in_datum", "beside", "path"),
    [
        (CHUNK * (MAX_CHUNKS + 1), b"", "data.model_input"),
        (INPUT * 9, b"", "data[0].loss_fn_inputs"),
        (b"", NUMBER * 17, "loss_fn_config"),
        (b"", NAMED * 17, "loss_fn_config"),
    ],
    ids=["chunks", "inputs", "numbers", "named settings"],
)
def test_so_many_parts_that_a_loop_would_block_the_service_are_refused(
    in_datum: bytes, beside: bytes, path: str
) -> None:
    message = ForwardBackwardRequest()
    message.ParseFromString(_request([ids(1)], {"target_tokens": (INT64, np.array([2], "<i8").tobytes())}))
    message.data[0].MergeFromString(in_datum)
    message.MergeFromString(beside)
    wanted = read_pass(message.SerializeToString()).wanted
    assert isinstance(wanted, RequestError)
    assert (wanted.status, wanted.path) == (422, path)
    assert " at most" in wanted.reason


def test_chunks_of_all_data_count() -> None:
    message = ForwardBackwardRequest()
    message.ParseFromString(_request([ids(1)], {"target_tokens": (INT64, np.array([2], "<i8").tobytes())}))
    message.data[0].MergeFromString(CHUNK * (MAX_CHUNKS // 2))
    message.data.append(message.data[0])
    wanted = read_pass(message.SerializeToString()).wanted
    assert isinstance(wanted, RequestError)
    assert (wanted.path, wanted.reason) == ("data.model_input", "it has 131074 parts; there are 131072 at most")


def test_a_forward_pass_scores_no_other_token_than_its_target() -> None:
    """A custom loss gives its own forward pass no weights, and may fill up the targets of a prompt."""

    def read(targets: list[int], weights: list[float], forward_only: bool) -> Pass | RequestError:
        inputs = {"target_tokens": (INT64, np.array(targets, "<i8").tobytes()), "weights": (1, floats(*weights))}
        message = ForwardBackwardRequest.FromString(_request([ids(10, 11, 12)], inputs))
        message.forward_only = forward_only
        return read_pass(message.SerializeToString()).wanted

    refused = read([11, 78, 79], [0, 0, 0], forward_only=True)
    assert isinstance(refused, RequestError)
    assert (refused.path, "target 1 counts" in refused.reason) == ("data[0].loss_fn_inputs.target_tokens", True)
    for targets, forward_only in (([11, 78, 79], False), ([0, 0, 79], True), ([11, 12, 79], True)):
        found = read(targets, [0, 0, 0], forward_only)
        assert isinstance(found, Pass)
        assert found.data[0].tokens == ids(10, 11, 12, 79)


@pytest.mark.parametrize("chunks", [[b"\1\0", b"\0\0"], [ids(-1)]])
def test_chunks_that_are_no_tokens_are_refused(chunks: list[bytes]) -> None:
    wanted = read_pass(_request(chunks, {"target_tokens": (INT64, np.array([2], "<i8").tobytes())})).wanted
    assert isinstance(wanted, RequestError)
    assert wanted.path == "data[0].model_input"


def test_a_sparse_tensor_may_not_claim_more_than_it_is() -> None:
    message = ForwardBackwardRequest(model_id=b"s1:train:0", seq_id=1, loss_fn=b"cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = ids(1, 2)
    value = datum.loss_fn_inputs.add(key=b"target_tokens").value
    value.dtype = INT64
    value.shape.extend([1 << 60, 1])
    value.sparse_csr.values = value.sparse_csr.col_indices = b""
    value.sparse_csr.crow_indices = np.zeros(3, "<i8").tobytes()
    wanted = read_pass(message.SerializeToString()).wanted
    assert isinstance(wanted, RequestError)
    value.shape[0] = 2
    value.sparse_csr.crow_indices = np.array([0, 2, 1], "<i8").tobytes()
    assert isinstance(read_pass(message.SerializeToString()).wanted, RequestError)
