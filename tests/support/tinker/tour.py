"""Every call of the SDK that the service page names, once; what came of them as JSON."""

from __future__ import annotations

import logging
from typing import Any

import tinker
from tinker import types
from words import Warned, datum, made, sampled_datum, say, why

TOKENS = [5, 6, 7, 8, 9]


def squares(data: list[Any], scores: list[Any]) -> Any:
    loss = sum((each**2).sum() for each in scores)
    return loss, {"squares": float(loss.detach())}


def lists(rest: Any, model: str) -> dict[str, Any]:
    """Pages, and what belongs to what."""
    session = model.partition(":")[0]
    pages = [rest.list_user_checkpoints(limit=1, offset=k).result() for k in range(3)]
    one, run = rest.get_session(session).result(), rest.get_training_run(model).result()
    return {
        "pages": [[each.tinker_path for each in page.checkpoints] for page in pages],
        "total": pages[0].cursor.total_count,
        "runs": [run.training_run_id for run in rest.list_training_runs(limit=1, offset=1).result().training_runs],
        "run": [run.lora_rank, run.user_metadata, run.last_checkpoint.tinker_path],
        "sessions": [rest.list_sessions().result().sessions, rest.list_sessions(limit=1, offset=1).result().sessions],
        "session": [one.training_run_ids, len(one.sampler_ids)],
        "sampler": rest.get_sampler(one.sampler_ids[0]).result().model_path,
    }


def unsupported(rest: Any, path: str) -> list[list[str]]:
    calls = [rest.publish_checkpoint_from_tinker_path, rest.unpublish_checkpoint_from_tinker_path]
    said = [why(call(path)) for call in calls]
    return [*said, why(rest.get_training_run("s000000000000:train:0"))]


def main() -> None:
    warned = Warned()
    logging.getLogger("tinker").addHandler(warned)
    service = tinker.ServiceClient(user_metadata={"who": "a test"})
    notes = {"purpose": "a tour"}
    client = made(service.create_lora_training_client(base_model="tiny_model", rank=4, seed=7, user_metadata=notes))
    info = client.get_info()
    one = datum(TOKENS, [1.0, 1.0, 0.0, 1.0])
    said: dict[str, Any] = {
        "warned": list(warned.texts),
        "model": client.model_id,
        "info": [info.model_data.model_name, info.is_lora, info.lora_rank],
        "text": client.get_tokenizer().decode(client.get_tokenizer().encode("1 + 1")),
    }

    # More data than one chunk holds, sent in their order; the step is queued behind them.
    many, step = client.forward_backward([one] * 1030, "cross_entropy"), None
    step = client.optim_step(types.AdamParams(learning_rate=1e-3))
    found = many.result()
    said["many"] = [
        len(found.loss_fn_outputs),
        found.metrics["loss:sum"],
        found.loss_fn_outputs[-1]["logprobs"].tolist(),
    ]
    said["step"] = step.result().metrics
    said["forward"] = client.forward([one], "cross_entropy").result().metrics
    custom = client.forward_backward_custom([one], squares).result().metrics
    said["custom"] = {name: custom[name] for name in ("squares", "loss:sum")}

    # A pass that cannot be carried out fails its window, and only that.
    wrong = types.Datum(
        model_input=one.model_input, loss_fn_inputs={"target_tokens": [1, 2, 3, 4], "weights": [1.0] * 4}
    )
    bad, step = client.forward_backward([wrong], "cross_entropy"), client.optim_step(types.AdamParams())
    said["poisoned"] = [why(bad), why(step)]

    # A step that cannot be taken ends its window.
    client.forward_backward([one], "cross_entropy").result()
    said["refused step"] = why(client.optim_step(types.AdamParams(learning_rate=-1.0)))
    client.forward_backward([one], "cross_entropy").result()
    said["after"] = client.optim_step(types.AdamParams(grad_clip_norm=0.0)).result().metrics

    # A save that cannot be fails alone; the program continues.
    said["unnamed"] = why(client.save_state("no name/at all"))
    path = client.save_state("one").result().path
    said["taken"] = why(client.save_state("one"))
    resumed = made(service.create_training_client_from_state_with_optimizer(path))
    resumed.forward_backward([one], "cross_entropy").result()
    said["saved"] = [path, resumed.model_id, resumed.optim_step(types.AdamParams()).result().metrics["step"]]

    snapshot = client.save_weights_for_sampler("sampler").result().path
    prompt, settings = types.ModelInput.from_ints([3, 4]), types.SamplingParams(max_tokens=3, temperature=0.5, seed=1)
    sampler = made(service.create_sampling_client(model_path=snapshot))
    answer = sampler.sample(prompt, 2, settings).result()
    said["sampled"] = [snapshot, [[list(s.tokens), list(s.logprobs), s.stop_reason] for s in answer.sequences]]
    said["scores"] = sampler.compute_logprobs(prompt).result()
    newest = made(client.save_weights_and_get_sampling_client())
    sequence = newest.sample(prompt, 1, settings).result().sequences[0]
    said["newest"] = list(sequence.tokens)
    base = made(service.create_sampling_client(base_model="tiny_model"))
    said["base"] = list(base.sample(prompt, 1, settings).result().sequences[0].tokens)
    rl = client.forward_backward([sampled_datum([3, 4], sequence, 1.5)], "importance_sampling").result()
    said["rl"] = rl.loss_fn_outputs[0]["logprobs"].tolist()
    image = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png")])
    said["refused"] = why(newest.sample(image, 1, settings))
    scored = newest.sample(prompt, 1, settings, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
    said["top"] = [scored.prompt_logprobs, scored.topk_prompt_logprobs, list(scored.sequences[0].tokens)]
    for stop in (["one", "two"], [5, 6], "three", []):
        newest.sample(prompt, 1, types.SamplingParams(max_tokens=1, stop=stop)).result()

    rest = service.create_rest_client()
    said["runs"] = sorted(run.training_run_id for run in rest.list_training_runs().result().training_runs)
    said["listed"] = sorted(each.tinker_path for each in rest.list_checkpoints(client.model_id).result().checkpoints)
    said["lists"] = lists(rest, client.model_id)
    said["unsupported"] = unsupported(rest, path)
    rest.delete_checkpoint_from_tinker_path(path).result()
    said["deleted"] = sorted(each.tinker_path for each in rest.list_user_checkpoints().result().checkpoints)
    said["weights"] = rest.get_weights_info_by_tinker_path(snapshot).result().lora_rank
    said["models"] = [model.model_name for model in service.get_server_capabilities().supported_models]
    say(**said)


if __name__ == "__main__":
    main()
