"""A user's loop: eight steps on texts, eight steps with sampling and a reward, a save, a resume, a snapshot."""

from __future__ import annotations

import sys
from typing import Any

import tinker
from tinker import types
from words import datum, made, sampled_datum, say

STEPS, GROUP, LENGTH = 8, 24, 8
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


def main() -> None:
    service = tinker.ServiceClient()
    client = made(service.create_lora_training_client(base_model="tiny_model", rank=4, seed=5))
    tokenizer = client.get_tokenizer()
    tokens = [tokenizer.encode(text) for text in TEXTS]
    losses = sft(client, tokens)
    trained = client.save_state("trained").result().path
    liked = {token for digit in "02468" for token in tokenizer.encode(digit, add_special_tokens=False)}
    rewards = rl(client, tokens[0][:4], liked)

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
    say(
        model=client.model_id,
        losses=losses,
        rewards=rewards,
        ways=ways,
        served=served[1:],
        paths=[trained, again, snapshot],
    )


if __name__ == "__main__":
    sys.exit(main())
