"""Load the base model's tokenizer."""

from __future__ import annotations

from typing import Any, Protocol


class TextTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used."""

    chat_template: Any
    eos_token_id: int

    def __call__(self, text: list[str]) -> dict[str, list[list[int]]]: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool, **kwargs: Any
    ) -> Any: ...


def load_tokenizer(folder: str) -> TextTokenizer:
    """The tokenizer that transformers finds in ``folder``."""
    from transformers import AutoTokenizer  # seconds, and much of the command line needs none

    tokenizer: TextTokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer
