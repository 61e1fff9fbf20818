"""Steps of one model, a line for each: a service that ends and starts again in between is not seen."""

from __future__ import annotations

import sys

import tinker
from tinker import types
from words import datum, made, say

TOKENS = [5, 6, 7, 8, 9]


def main() -> None:
    service = tinker.ServiceClient()
    client = made(service.create_lora_training_client(base_model="tiny_model", rank=4))
    losses, steps = [], []
    for k in range(int(sys.argv[1])):
        one = datum(TOKENS, [1.0, float(k), 0.0, 1.0])
        found, step = client.forward_backward([one], "cross_entropy"), client.optim_step(types.AdamParams())
        losses.append(found.result().metrics["loss:sum"])
        steps.append(step.result().metrics["step"])
        print(k, flush=True)
        sys.stdin.readline()
    say(model=client.model_id, losses=losses, steps=steps)


if __name__ == "__main__":
    main()
