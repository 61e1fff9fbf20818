"""Load the base model's tokenizer, without torch where nothing else needs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

_QUIET = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


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


def load_tokenizer(folder: str, *, models: bool = False) -> TextTokenizer:
    """The tokenizer that transformers finds in ``folder``.

    Only with ``models`` can this process use transformers' models afterwards. Without it transformers is imported as
    if torch were not installed, which saves most of the CPU time of the import; tokenizers are the same. A process
    that has imported transformers before keeps what it has.
    """
    if models or "transformers" in sys.modules:
        return _load(folder)
    with _torch_hidden():
        return _load(folder)


def _load(folder: str) -> TextTokenizer:
    from transformers import AutoTokenizer

    tokenizer: TextTokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer


@contextmanager
def _torch_hidden() -> Iterator[None]:
    """Let transformers, which looks for torch while it is imported, find none. Other threads must not import torch."""
    torch, quiet = sys.modules.get("torch"), os.environ.get(_QUIET)
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ[_QUIET] = "1"
    try:
        yield
    finally:
        del sys.modules["torch"], os.environ[_QUIET]
        if torch is not None:
            sys.modules["torch"] = torch
        if quiet is not None:
            os.environ[_QUIET] = quiet
