"""A program with the SDK: requests that it writes, answers that it reads. Reads JSON, writes JSON, bytes in base64."""

from __future__ import annotations

import base64
import json
import sys
from typing import Any, get_args

import torch
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response


def request(data: list[Any], loss: str, *, config: Any = None, forward_only: bool = False, seq: int = 3) -> str:
    asked = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=config),
        model_id="s1:train:0",
        seq_id=seq,
    )
    message = forward_backward_request_to_proto(asked)
    message.forward_only = forward_only
    return base64.b64encode(message.SerializeToString()).decode()


def datum(chunks: list[list[int]], **inputs: Any) -> Any:
    parts = [types.EncodedTextChunk(tokens=tokens) for tokens in chunks]
    return types.Datum(model_input=types.ModelInput(chunks=parts), loss_fn_inputs=inputs)


def main() -> None:
    answers = json.load(sys.stdin)
    rl = {"target_tokens": [2, 3], "logprobs": [-0.5, -1.25], "advantages": [0.0, 2.0]}
    padded = {  # as in the cookbook's own loop
        "target_tokens": [0, 0, 4, 5],
        "logprobs": [0.0, 0.0, -0.5, -1.25],
        "advantages": [0.0, 0.0, 2.0, 2.0],
    }
    column = torch.zeros(16, 1)
    column[3], column[9] = 1.5, -2.0
    long = list(range(1, 18))
    written = {
        "cross_entropy": request(
            [
                datum([[1], [2, 3]], target_tokens=[2, 3, 4], weights=[0.0, 1.0, 0.5]),
                datum([[9]], target_tokens=torch.tensor([8]), weights=torch.tensor([-1.0])),
            ],
            "cross_entropy",
            seq=7,
        ),
        "forward": request([datum([[1, 2]], target_tokens=[2, 5])], "cross_entropy", forward_only=True),
        "ppo": request([datum([[1, 2]], **rl)], "ppo", config={"clip_low_threshold": 0.7, "clip_high_threshold": 1.3}),
        "importance_sampling": request([datum([[1, 2]], **rl)], "importance_sampling"),
        "dro": request([datum([[1, 2]], **rl)], "dro", config={"beta": 0.1}),
        "padded": request([datum([[1, 2, 3, 4]], **padded)], "importance_sampling"),
        "padded, no weights": request([datum([[1, 2, 3]], target_tokens=[0, 3, 4])], "cross_entropy"),
        "padded, weights": request(
            [datum([[1, 2, 3]], target_tokens=[0, 3, 4], weights=[0.0, 1.0, 1.0])], "cross_entropy"
        ),
        "padded, dro": request([datum([[1, 2, 3, 4]], **padded)], "dro"),
        "sparse": request([datum([long[:-1]], target_tokens=long[1:], weights=column)], "cross_entropy"),
        "mask": request(
            [datum([[1, 2]], mask=types.TensorData(data=[1.0, 1.0], dtype="float32", shape=[2]), **rl)], "ppo"
        ),
        "not shifted": request([datum([[1, 2]], target_tokens=[7, 3], weights=[1.0, 1.0])], "cross_entropy"),
        "not finite": request([datum([[1, 2]], target_tokens=[2, 3], weights=[1.0, float("nan")])], "cross_entropy"),
        "too few": request([datum([[1, 2]], target_tokens=[2, 3], weights=[1.0])], "cross_entropy"),
        "setting": request([datum([[1, 2]], **rl)], "ppo", config={"epsilon": 0.2}),
        "two targets": request(
            [datum([[1, 2]], target_tokens=torch.tensor([[2, 4], [3, 5]]), weights=torch.ones(2, 2))], "cross_entropy"
        ),
        "image": request(
            [
                types.Datum(
                    model_input=types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png")]), loss_fn_inputs={}
                )
            ],
            "cross_entropy",
        ),
    }
    if "stable_reinforce" in get_args(types.LossFnType):
        mask = {"sequence_ratio_mask": [0.0, 0.0, 1.0, 1.0]}
        prompt, sampled = {"sequence_id": "s1:sample:0:1:0", "length": 3}, {"sequence_id": "s1:sample:0:1:0"}
        spans = datum([[1, 2, 3, 4]], **padded).with_provenance(
            model_input=[types.PromptProvenanceSpan(**prompt), types.SampledProvenanceSpan(**sampled, length=1)],
            loss_fn_inputs=[
                types.PromptProvenanceSpan(**prompt | {"offset": 1, "length": 2}),
                types.SampledProvenanceSpan(**sampled, length=2),
            ],
        )
        written |= {
            "gspo": request([datum([[1, 2, 3, 4]], **padded)], "gspo", config={"clip_high_threshold": 1.5}),
            "gspo, mask": request([datum([[1, 2, 3, 4]], **padded | mask)], "gspo"),
            "gspo, outside": request(
                [datum([[1, 2, 3, 4]], **padded | {"sequence_ratio_mask": [0.0, 0.0, 0.0, 1.0]})], "gspo"
            ),
            "stable_reinforce": request([spans], "stable_reinforce", config={"kl_coeff": 0.01}),
        }
    scored = deserialize_forward_backward_output(base64.b64decode(answers["scored"]))
    sampled = deserialize_sample_response(base64.b64decode(answers["sampled"]))
    top = (
        [sequence.topk_logprobs for sequence in sampled.sequences]
        if hasattr(sampled.sequences[0], "topk_logprobs")
        else []
    )
    read = {
        "metrics": scored.metrics,
        "logprobs": [output["logprobs"].to_numpy().tolist() for output in scored.loss_fn_outputs],
        "shapes": [output["logprobs"].shape for output in scored.loss_fn_outputs],
        "sequences": [[s.stop_reason, list(s.tokens), list(s.logprobs)] for s in sampled.sequences],
        "prompt_logprobs": sampled.prompt_logprobs,
        "prompt_top": [None if row is None else list(map(list, row)) for row in sampled.topk_prompt_logprobs],
        "top": [[list(map(list, rows)) for rows in row] for row in top],
    }
    json.dump({"written": written, "read": read}, sys.stdout)


if __name__ == "__main__":
    main()
