"""A user's loop: eight steps on texts, eight of other losses from there, eight steps with sampling and a reward beside
a session that samples the newest weights; saves, resumes, a snapshot, an archive.
"""

from __future__ import annotations

import inspect
import sys
import urllib.request
from typing import Any

import tinker
from offline import LOSS_RATE, LOSSES, advantages, sampler_scores
from tinker import types
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType
from words import datum, made, sampled_datum, say

STEPS, GROUP, LENGTH = 8, 16, 8
TEXTS = ("1 + 1 = 2", "2 + 3 = 5", "4 + 4 = 8")


def sft(client: Any, tokens: list[list[int]]) -> list[float]:
    """Losses of the steps."""
    data, losses = [datum(row, [1.0] * (len(row) - 1)) for row in tokens], []
    for _ in range(STEPS):
        found = client.forward_backward(data, "cross_entropy")
        step = client.optim_step(types.AdamParams(learning_rate=4e-3))
        losses.append(found.result().metrics["loss:sum"])
        step.result()
    return losses


def rl(client: Any, prompt: list[int], liked: set[int]) -> list[float]:
    """Mean rewards: the share of an answer's tokens that are ``liked``."""
    rewards = []
    for k in range(STEPS):
        sampler = made(client.save_weights_and_get_sampling_client())
        settings = types.SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=1000 * k, stop=[])
        answers = sampler.sample(types.ModelInput.from_ints(prompt), GROUP, settings).result().sequences
        found = [sum(token in liked for token in answer.tokens) / len(answer.tokens) for answer in answers]
        mean = sum(found) / len(found)
        data = [sampled_datum(prompt, a, reward - mean) for a, reward in zip(answers, found, strict=True)]
        trained = client.forward_backward(data, "importance_sampling")
        client.optim_step(types.AdamParams(learning_rate=1e-2, grad_clip_norm=0.0)).result()
        trained.result()
        rewards.append(mean)
    return rewards


def other_losses(client: Any, tokens: list[list[int]]) -> list[list[Any]]:
    """Of each step the loss, and the log-probabilities that it is of."""
    data, found = [], []
    for row in tokens:
        n = len(row) - 1
        inputs = {"target_tokens": row[1:], "logprobs": sampler_scores(n), "advantages": advantages(n)}
        data.append(types.Datum(model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs=inputs))
    for name, settings in LOSSES:
        trained = client.forward_backward(data, name, loss_fn_config=settings or None)
        client.optim_step(types.AdamParams(learning_rate=LOSS_RATE)).result()
        said = trained.result()
        found.append([said.metrics["loss:sum"], [out["logprobs"].tolist() for out in said.loss_fn_outputs]])
    return found


def unload(client: Any) -> str:
    """Only the SDK's low level has the call; its place is free for the next model."""

    async def ask() -> Any:
        with client.holder.aclient(ClientConnectionPoolType.TRAIN) as http:
            body = {"model_id": client.model_id, "type": "unload_model"}
            future = await http.post("/api/v1/unload_model", body=body, cast_to=types.UntypedAPIFuture)
            body = {"request_id": future.request_id}
            return await http.post("/api/v1/retrieve_future", body=body, cast_to=types.UnloadModelResponse)

    return str(client.holder.run_coroutine_threadsafe(ask()).result().model_id)


def newest_and_trained(sampler: Any, client: Any, tokens: list[int]) -> list[list[float]]:
    """What a sampling session and the trainer give the same text."""
    scores = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()[1:]
    one = datum(tokens, [1.0] * (len(tokens) - 1))
    return [scores, client.forward([one], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()]


def samples(sampler: Any, prompt: list[int]) -> dict[str, Any]:
    """A greedy answer, one that ends at a token of it, and scores of the prompt."""
    asked = types.ModelInput.from_ints(prompt)

    def answer(**settings: Any) -> Any:
        return sampler.sample(asked, 1, types.SamplingParams(temperature=0.0, **settings)).result().sequences[0]

    whole = list(answer(max_tokens=LENGTH, stop=[]).tokens)
    cut = answer(max_tokens=LENGTH, stop=[whole[LENGTH // 2]])
    one = types.SamplingParams(max_tokens=1)
    scored = sampler.sample(asked, 1, one, include_prompt_logprobs=True, topk_prompt_logprobs=3).result()
    return {
        "whole": whole,
        "cut": [list(cut.tokens), cut.stop_reason],
        "prompt": [scored.prompt_logprobs, scored.topk_prompt_logprobs],
    }


def main() -> None:
    service = tinker.ServiceClient()
    client = made(service.create_lora_training_client(base_model="tiny_model", rank=4, seed=5))
    tokenizer = client.get_tokenizer()
    tokens = [tokenizer.encode(text) for text in TEXTS]
    losses = sft(client, tokens)
    trained = client.save_state("trained").result().path
    branch = made(service.create_training_client_from_state(trained))
    branched = other_losses(branch, tokens)
    branched_at = branch.save_state("branched").result().path
    unloaded = unload(branch) == branch.model_id

    in_flight, served_newest, long = None, [], None
    if "kind" in inspect.signature(client.save_weights_and_get_sampling_client).parameters:  # since 0.38
        in_flight = made(client.save_weights_and_get_sampling_client(kind="inflight"))
        served_newest.append(newest_and_trained(in_flight, client, tokens[1]))
        many = types.SamplingParams(max_tokens=150, temperature=1.0, seed=1, stop=[])
        long = in_flight.sample(types.ModelInput.from_ints(tokens[0]), 4, many)  # while the steps are made

    liked = {token for digit in "02468" for token in tokenizer.encode(digit, add_special_tokens=False)}
    rewards = rl(client, tokens[0][:4], liked)
    newest = made(client.save_weights_and_get_sampling_client())
    sampled = samples(newest, tokens[0])
    if in_flight is not None:
        served_newest.append(newest_and_trained(in_flight, client, tokens[1]))
        served_newest.append([len(answer.tokens) for answer in long.result().sequences])

    # A model resumed with its optimizer makes the same next step, to the last bit.
    again, one = client.save_state("again").result().path, [datum(tokens[1], [1.0] * (len(tokens[1]) - 1))]
    resumed = made(service.create_training_client_from_state_with_optimizer(again))
    ways = []
    for each in (client, resumed):
        each.forward_backward(one, "cross_entropy").result()
        figures = each.optim_step(types.AdamParams(learning_rate=1e-2)).result().metrics
        scores = each.forward(one, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
        ways.append([figures["step"], figures["grad_norm"], scores])

    snapshot = client.save_weights_for_sampler("snapshot").result().path
    sampler = made(service.create_sampling_client(model_path=snapshot))
    prompt = types.ModelInput.from_ints(tokens[1])
    served = sampler.compute_logprobs(prompt).result()
    archive = None
    rest = service.create_rest_client()
    if hasattr(rest, "get_checkpoint_archive_url_from_tinker_path"):  # until 0.24
        url = rest.get_checkpoint_archive_url_from_tinker_path(trained).result().url
        archive, _ = urllib.request.urlretrieve(url)  # without the key
    say(
        model=client.model_id,
        branched=branched,
        branched_at=branched_at,
        unloaded=unloaded,
        in_flight=served_newest,
        sampled=sampled,
        archive=archive,
        losses=losses,
        rewards=rewards,
        ways=ways,
        served=served[1:],
        paths=[trained, again, snapshot],
    )


if __name__ == "__main__":
    sys.exit(main())
