"""What a reward gets of one answer."""

from __future__ import annotations

from typing import Any

import msgspec

from areal_lora.types import Sample


class ScoreItem(msgspec.Struct, frozen=True, kw_only=True):
    """One answer with all that a reward may use.

    ``completion`` is what the model wrote, ``answer`` the gold answer. ``messages`` is the conversation with the
    answer as its last message; of a plain prompt, a user message and the answer. ``columns`` has all columns of the
    data set's row. ``n_tokens`` counts the answer's tokens, 0 if unknown; ``finish_reason`` is ``stop`` or ``length``.
    """

    completion: str
    answer: Any = None
    prompt: str = ""
    messages: list[dict[str, Any]] = []
    columns: dict[str, Any] = {}
    n_tokens: int = 0
    finish_reason: str = ""

    @classmethod
    def of(
        cls, sample: Sample, completion: str, *, n_tokens: int = 0, finish_reason: str = "", prefill: str = ""
    ) -> ScoreItem:
        """``completion`` as the answer to ``sample``; ``prefill`` is the text that it starts with."""
        prompt = sample.messages or ({"role": "user", "content": sample.prompt},)
        return cls(
            completion=completion,
            answer=sample.answer,
            prompt=sample.prompt,
            messages=[*prompt, {"role": "assistant", "content": prefill + completion}],
            columns=dict(sample.columns),
            n_tokens=n_tokens,
            finish_reason=finish_reason,
        )
