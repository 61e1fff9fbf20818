"""Write prompts and replies as the tokens that the model continues. All workflows and evaluations use this code.

A plain prompt is tokenized with the tokenizer's own start of sequence. A chat prompt is written by the tokenizer's
chat template, which contains all special tokens, so none are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from areal_lora.config.sections.task import PromptFormat
from areal_lora.errors import ConfigError
from areal_lora.types import Sample


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


_QUESTION, _ANSWER, _REPLY = "areal question", "areal answer", "areal reply"


@dataclass(frozen=True, slots=True, kw_only=True)
class Formatter:
    """The format of one adapter's prompts. Raises ConfigError for chat without a chat template."""

    tokenizer: TextTokenizer
    how: PromptFormat = field(default_factory=PromptFormat)

    def __post_init__(self) -> None:
        if self.how.is_chat and not self.tokenizer.chat_template:
            raise ConfigError(
                "task.format.kind", "the model's tokenizer has no chat template", "set task.format.kind=template"
            )

    @property
    def prefill(self) -> str:
        """Text with which each answer starts; part of the prompt's tokens."""
        return self.how.prefill

    def text(self, sample: Sample) -> str:
        """The whole prompt as text."""
        if not self.how.is_chat or sample.messages is None:
            return sample.prompt
        return self.chat(list(sample.messages), last=True) + self.how.prefill

    def token_ids(self, sample: Sample) -> list[int]:
        """The prompt's tokens [P]."""
        return self.encode(sample, self.text(sample))

    def encode(self, sample: Sample, text: str) -> list[int]:
        """Tokens [P] of ``text``, which is the prompt of ``sample``."""
        if sample.messages is not None:
            return self.tokenizer.encode(text, add_special_tokens=False)
        return self.tokenizer([text])["input_ids"][0]

    def reply(self, text: str, role: str, answer_ids: list[int]) -> list[int]:
        """Tokens of an environment's reply [R], which continue a sequence that ends with ``answer_ids`` [A].

        Plain text goes in as it is. In a chat it is a message of ``role``: the end of the assistant's turn, if the
        model has not sampled it, the message, and the beginning of the next turn.
        """
        if not self.how.is_chat:
            return self.tokenizer.encode(text, add_special_tokens=False)
        turns = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
        whole = self.chat([*turns, {"role": role, "content": _REPLY}], last=True)
        after = whole.partition(_ANSWER)[2].replace(_REPLY, text) + self.how.prefill
        return self.without_end(self.tokenizer.encode(after, add_special_tokens=False), answer_ids)

    def answer(self, text: str) -> list[int]:
        """Tokens [A] of a whole answer of the assistant after its prompt, with the end that the model has to sample."""
        ids = self.tokenizer.encode(text.removeprefix(self.prefill), add_special_tokens=False)
        if not self.how.is_chat:
            return [*ids, self.tokenizer.eos_token_id]
        turns = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
        after = self.tokenizer.encode(self.chat(turns, last=False).partition(_ANSWER)[2], add_special_tokens=False)
        return [*ids, *(after[:1] or [self.tokenizer.eos_token_id])]

    def without_end(self, ids: list[int], answer_ids: list[int]) -> list[int]:
        """Drop the end of turn with which ``ids`` starts where the model has sampled it."""
        return ids[1:] if answer_ids and ids and ids[0] == answer_ids[-1] else ids

    def chat(self, messages: list[dict[str, Any]], *, tools: Sequence[dict[str, Any]] = (), last: bool) -> str:
        """The chat template's text of ``messages``, with the start of the assistant's turn if they are ``last``.

        Raises ConfigError for messages that the template refuses.
        """
        arguments = dict(self.how.chat_template_kwargs)
        if tools:
            arguments["tools"] = list(tools)
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=last, **arguments
            )
        except Exception as error:  # fault boundary: a chat template is a program of the model's authors
            reason = f"the chat template refuses these messages: {type(error).__name__}: {error}"
            raise ConfigError("task.format", " ".join(reason.split()), "check roles and contents") from error
        return text
