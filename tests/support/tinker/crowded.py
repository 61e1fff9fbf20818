"""A tenant whose quota is one adapter and one request that waits: a pass in two chunks, then what a second session, and
a second model of the first one, are told.
"""

from __future__ import annotations

import logging

import tinker
from words import Warned, datum, made, say, why_not


def main() -> None:
    warned = Warned()
    logging.getLogger("tinker").addHandler(warned)
    first = tinker.ServiceClient()
    client = made(first.create_lora_training_client(base_model="tiny_model", rank=4))
    scored = client.forward_backward([datum([5, 6], [1.0])] * 1025, "cross_entropy").result()
    error = why_not(lambda: made(first.create_lora_training_client(base_model="tiny_model", rank=4)))
    made(tinker.ServiceClient().create_sampling_client(base_model="tiny_model"))  # 0.38 opens a session when it has to
    say(model=client.model_id, error=error, warned=warned.texts[1:], scored=len(scored.loss_fn_outputs))


main()
