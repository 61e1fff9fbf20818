"""A tenant whose quota is one adapter: what a second session, and a second model of the first one, are told."""

from __future__ import annotations

import logging

import tinker
from words import Warned, made, say, why_not


def main() -> None:
    warned = Warned()
    logging.getLogger("tinker").addHandler(warned)
    first = tinker.ServiceClient()
    model = made(first.create_lora_training_client(base_model="tiny_model", rank=4)).model_id
    error = why_not(lambda: made(first.create_lora_training_client(base_model="tiny_model", rank=4)))
    made(tinker.ServiceClient().create_sampling_client(base_model="tiny_model"))  # 0.38 opens a session when it has to
    say(model=model, error=error, warned=warned.texts[1:])


main()
