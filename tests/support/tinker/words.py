"""What both SDK versions spell differently, for the programs of this folder."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from tinker import types


class Warned(logging.Handler):
    """Keeps what a program's user reads."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def made(found: Any) -> Any:
    """A client: 0.24 returns it, later versions a future of it."""
    return found.result() if hasattr(found, "result") else found


def datum(tokens: list[int], weights: list[float]) -> Any:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


def sampled_datum(prompt: list[int], sequence: Any, advantage: float) -> Any:
    """Of an answer: tokens of the prompt have the advantage 0."""
    tokens, n = prompt + list(sequence.tokens), len(prompt) - 1
    inputs = {
        "target_tokens": tokens[1:],
        "logprobs": [0.0] * n + list(sequence.logprobs),
        "advantages": [0.0] * n + [advantage] * len(sequence.tokens),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def why(future: Any) -> list[str]:
    """Class and text of the error that a future ends with."""
    return why_not(future.result)


def why_not(call: Callable[[], Any]) -> list[str]:
    """Class and text of the error that a call ends with."""
    try:
        found = call()
    except Exception as error:  # fault boundary: whatever the SDK raises is what is asked for  # noqa: BLE001
        return [type(error).__name__, str(error)]
    raise AssertionError(f"it ended with {found}")


def say(**found: Any) -> None:
    print(json.dumps(found), flush=True)
