"""Prompts of one adapter's task: as the tokens that the model continues, and as an endless stream without a cursor.

All workflows and evaluations write prompts and replies with `Formatter`. A plain prompt is tokenized with the
tokenizer's own start of sequence. A chat prompt is written by the tokenizer's chat template, which contains all special
tokens, so none are added.

Position ``p`` of the stream belongs to epoch ``p // n`` and to the sample ``permute(p % n)``, where every epoch has its
own keyed permutation of ``(seed, epoch, index)``. Nothing is stored: any process that knows seed and position knows the
prompt, so a resumed run needs only a number.

The permutation is a balanced Feistel network over the smallest even-bit domain that holds ``n``, with cycle walking
(Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): values outside ``range(n)`` are encrypted again
until they fall inside. The domain is less than 4 n, so that takes fewer than four rounds of encryption on average.
"""

import contextlib
import glob
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from areal_lora.config.sections.task import PromptFormat
from areal_lora.errors import ConfigError
from areal_lora.processes.log import get_logger
from areal_lora.types import Sample

log = get_logger(__name__)


class TextTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used."""

    chat_template: Any
    eos_token_id: int

    def __len__(self) -> int: ...

    def __call__(self, text: list[str]) -> dict[str, list[list[int]]]: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool, **kwargs: Any
    ) -> Any: ...


def load_tokenizer(folder: str) -> TextTokenizer:
    """The tokenizer that transformers finds in ``folder``. Raises ConfigError if that is no longer there."""
    from transformers import AutoTokenizer  # seconds, and much of the command line needs none

    if not Path(folder).is_dir():  # transformers would take it for a name on the hub
        raise ConfigError("model.path", f"{folder}: no such folder", "restore the model's folder")
    keep_byte_level(folder)
    tokenizer: TextTokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer


def keep_byte_level(folder: str) -> None:
    """Have transformers, and vLLM with it, take a byte-level tokenizer.json as it is, in this process and its forks.

    If tokenizer_config.json declares LlamaTokenizer, as DeepSeek's do, transformers 5 builds that class's own steps
    around the vocabulary, which lose each space. It knows such models by their names on the hub, not by a folder.
    """
    config, file = Path(folder, "tokenizer_config.json"), Path(folder, "tokenizer.json")
    if not config.is_file() or not file.is_file():
        return
    declared = json.loads(config.read_bytes()).get("tokenizer_class")
    if declared not in ("LlamaTokenizer", "LlamaTokenizerFast"):
        return
    if (json.loads(file.read_bytes()).get("decoder") or {}).get("type") == "ByteLevel":
        from transformers.models.auto.tokenization_auto import MODEL_IDS_TO_TOKENIZERS_BACKEND

        MODEL_IDS_TO_TOKENIZERS_BACKEND.append(glob.escape(folder.lower()))  # patterns of lower-case names


def vocabulary(folder: str) -> list[str]:
    """The text of each token id; a part of a character is U+FFFD."""
    tokenizer = load_tokenizer(folder)
    return [tokenizer.decode([token], skip_special_tokens=False) for token in range(len(tokenizer))]


_ROUNDS = 6  # of the Feistel network
_QUESTION, _ANSWER, _REPLY = "areal question", "areal answer", "areal reply"


@dataclass(frozen=True, kw_only=True)
class Formatter:
    """The format of one adapter's prompts. Raises ConfigError for chat without a chat template."""

    tokenizer: TextTokenizer
    how: PromptFormat = field(default_factory=PromptFormat)

    def __post_init__(self) -> None:
        if self.how.is_chat and not self.tokenizer.chat_template:
            raise ConfigError(
                "task.format.kind", "the model's tokenizer has no chat template", "set task.format.kind=template"
            )

    @cached_property
    def ends(self) -> list[int]:
        """The special token that ends the assistant's turn, if any.

        The tokenizer of a model without instruction tuning often names another end of sequence, which alone servers
        stop at.
        """
        if self.tokenizer.chat_template:
            with contextlib.suppress(ConfigError):  # a template may refuse the example and take the rows
                after = self.tokenizer.encode(self.after_answer([], last=False), add_special_tokens=False)[:1]
                shown, plain = (self.tokenizer.decode(after, skip_special_tokens=s).strip() for s in (False, True))
                return after if shown and not plain else []  # no blank
        return []

    def token_ids(self, sample: Sample) -> list[int]:
        """The prompt's tokens [P]."""
        return self.prompt(sample, sample.uid, 0).token_ids

    def prompt(self, sample: Sample, uid: str, position: int) -> "Prompt":
        text = sample.prompt
        if sample.messages is None:
            ids = self.tokenizer([text])["input_ids"][0]
        else:
            if self.how.is_chat:
                text = self.chat(list(sample.messages), last=True) + self.how.prefill
            ids = self.tokenizer.encode(text, add_special_tokens=False)
        return Prompt(uid=uid, position=position, sample=sample, text=text, token_ids=ids)

    def reply(self, text: str, role: str, answer_ids: list[int]) -> list[int]:
        """Tokens of an environment's reply [R], which continue a sequence that ends with ``answer_ids`` [A].

        Plain text goes in as it is, as does what continues the assistant's own turn. Else it is in a chat a message of
        ``role``: the end of the assistant's turn, if the model has not sampled it, the message, and the beginning of
        the next turn.
        """
        if not self.how.is_chat or role == "assistant":
            return self.tokenizer.encode(text, add_special_tokens=False)
        after = self.after_answer([{"role": role, "content": _REPLY}], last=True).replace(_REPLY, text)
        after += self.how.prefill
        return self.without_end(self.tokenizer.encode(after, add_special_tokens=False), answer_ids)

    def answer(self, text: str) -> list[int]:
        """Tokens [A] of a whole answer of the assistant after its prompt, with the end that the model has to sample."""
        ids = self.tokenizer.encode(text.removeprefix(self.how.prefill), add_special_tokens=False)
        if not self.how.is_chat:
            return [*ids, self.tokenizer.eos_token_id]
        after = self.tokenizer.encode(self.after_answer([], last=False), add_special_tokens=False)
        return [*ids, *(after[:1] or [self.tokenizer.eos_token_id])]

    def given(self, messages: Sequence[dict[str, Any]]) -> list[list[int]]:
        """Tokens of ``messages``, from the assistant's first to its last: in turn of an answer and of what follows it.

        As in a rollout with these answers earlier tokens stay, also where the template would write them differently
        by then. Raises ConfigError for messages that it refuses or does not write.
        """
        parts, between, answered = list[list[int]](), list[dict[str, Any]](), messages[0]
        for message in messages:
            if message["role"] != "assistant":
                between.append(message)
                continue
            if parts:
                after = self._after(answered, between) + self.how.prefill
                parts.append(self.without_end(self.tokenizer.encode(after, add_special_tokens=False), parts[-1]))
            parts.append(self.answer(self._said(message)))
            between, answered = [], message
        return parts

    def _after(self, answer: dict[str, Any], messages: list[dict[str, Any]]) -> str:
        """As `after_answer`, after this answer: a template may name the call of a tool's message."""
        given = [{"role": "user", "content": _QUESTION}, answer]
        head, end = self.chat(given, last=False), self.after_answer([], last=False)
        text = self.chat([*given, *messages], last=True)
        if text.startswith(head) and head.endswith(end):
            return end + text[len(head) :]
        return self.after_answer(messages, last=True)

    def _said(self, answer: dict[str, Any]) -> str:
        """What the model has to sample for ``answer``: its content as it is, calls and thoughts as the template writes
        them around it."""
        content: str = answer["content"]
        if answer.keys() <= {"role", "content"}:
            return content
        question = [{"role": "user", "content": _QUESTION}]
        head, _, end = self.chat([*question, {"role": "assistant", "content": _ANSWER}], last=False).partition(_ANSWER)
        text = self.chat([*question, answer | {"content": content and _ANSWER}], last=False)
        start = head if text.startswith(head) else self.chat(question, last=True)
        thought = str(answer.get("reasoning_content", "")).strip()
        whole = (content and _ANSWER) in text and thought in text
        if not (whole and text.startswith(start) and text.endswith(end)):
            reason = f"the chat template does not write all of a message with {', '.join(answer)} as an answer"
            raise ConfigError("task.format", reason, "put what it leaves out into content, or change the template")
        return text[len(start) : len(text) - len(end)].replace(_ANSWER, content)

    def after_answer(self, messages: list[dict[str, Any]], *, last: bool) -> str:
        """What the chat template writes after an answer that ``messages`` follow; raises as `chat`."""
        turns = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
        return self.chat([*turns, *messages], last=last).partition(_ANSWER)[2]

    def without_end(self, ids: list[int], answer_ids: Sequence[int]) -> list[int]:
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


def locate(position: int, n_samples: int, seed: int) -> tuple[int, int]:
    """``(epoch, sample index)`` of the ``position``-th prompt (from 0) of a stream of ``n_samples`` an epoch."""
    epoch, offset = divmod(position, n_samples)
    return epoch, permute(offset, n_samples, seed=seed, epoch=epoch)


def permute(index: int, n: int, *, seed: int, epoch: int) -> int:
    """Image of ``index`` under the permutation of ``range(n)`` keyed by ``(seed, epoch)``."""
    if not 0 <= index < n:
        raise ValueError(f"index {index} is outside range({n})")
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    key = f"{seed}:{epoch}".encode()
    value = _encrypt(index, half_bits, key)
    while value >= n:
        value = _encrypt(value, half_bits, key)
    return value


def _encrypt(value: int, half_bits: int, key: bytes) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for round_number in range(_ROUNDS):
        message = b"%s:%d:%d" % (key, round_number, right)
        digest = int.from_bytes(blake2b(message, digest_size=8).digest(), "little")
        left, right = right, left ^ (digest & mask)
    return (left << half_bits) | right


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One (epoch, sample): ``uid`` is ``"<epoch>:<sample uid>"``, ``position`` its place in the stream.

    ``text`` is what ``token_ids`` write: the sample's prompt, or its messages by the chat template.
    """

    uid: str
    position: int
    sample: Sample
    text: str
    token_ids: list[int]  # [P]


class Order(Protocol):
    """What puts samples at positions, in place of a shuffled order of all; ``key`` is what it depends on.

    One of each of the ``sets`` of indices has to fit. ``starts`` are the positions at which it changes, its state,
    which the ledger has.
    """

    key: str
    sets: Sequence[Sequence[int]]
    starts: list[int]

    def place(self, position: int) -> tuple[int, int]: ...  # epoch and index, which no two positions share

    def issue(self, position: int, step: int) -> None: ...


class PromptStream:
    """Maps a stream position to a prompt; keeps no position itself.

    A prompt is tokenized each time it is located: token ids of a large data set would fill gigabytes, and
    tokenizing it as a whole would hold up the start for minutes. ``max_prompt_tokens`` leaves room for the
    answer; prompts beyond it, and those that the chat template refuses, are still located, and :meth:`refusal` states
    why they cannot be sampled. Streams with the same ``digest`` put the same sample at the same position.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        formatter: Formatter,
        *,
        seed: int,
        max_prompt_tokens: int,
        order: Order | None = None,
    ) -> None:
        """Raises ConfigError for samples that share a uid, a blank prompt, or none that fits."""
        self._samples, self._formatter, self._refused = samples, formatter, list[ConfigError]()
        self._seed, self._max_prompt_tokens, self.order = seed, max_prompt_tokens, order
        digest, blank = blake2b(str(seed).encode(), digest_size=16), list[Sample]()

        def uids() -> Iterator[str]:  # in one pass: samples may be decoded at each access
            for sample in samples:
                digest.update(b"\n" + sample.uid.encode())
                if not sample.prompt.strip():
                    blank.append(sample)
                yield sample.uid

        check_uids(uids(), len(samples))
        if order is not None:
            digest.update(order.key.encode())
        self.digest = digest.hexdigest()
        if blank:
            prompts_of(blank, formatter)
        for members in [range(len(samples))] if order is None else order.sets:
            shuffled = (members[permute(i, len(members), seed=seed, epoch=0)] for i in range(len(members)))
            if not any(self.refusal(self._prompt(0, 0, index)) is None for index in shuffled):
                raise next(iter(self._refused), None) or ConfigError(
                    "rollout.max_model_len",
                    f"all {len(members)} prompts are longer than the {max_prompt_tokens} tokens left beside the answer",
                    "raise it, or lower sampling.max_new_tokens",
                )

    def index(self, position: int) -> int:
        """That of the position's sample in the data set."""
        return locate(position, len(self._samples), self._seed)[1]

    def at(self, position: int) -> Prompt:
        if self.order is not None:
            return self._prompt(position, *self.order.place(position))
        return self._prompt(position, *locate(position, len(self._samples), self._seed))

    def _prompt(self, position: int, epoch: int, index: int) -> Prompt:
        sample = self._samples[index]
        uid = f"{epoch}:{sample.uid}"
        try:
            return self._formatter.prompt(sample, uid, position)
        except ConfigError as error:  # one row must not end a run that has trained for days
            log.warning("%s is omitted: %s", uid, error)
            self._refused[:] = [error]
            return Prompt(uid=uid, position=position, sample=sample, text="", token_ids=[])

    def refusal(self, prompt: Prompt) -> str | None:
        """The reason for which the prompt cannot be sampled, as dropped groups name it; None if it can."""
        if not prompt.token_ids:
            return "prompt_empty" if prompt.text else "prompt_refused"
        return "prompt_too_long" if len(prompt.token_ids) > self._max_prompt_tokens else None


def check_uids(uids: Iterable[str], n: int) -> None:
    """Raises ConfigError for no samples or a repeated uid."""
    if not n:
        raise ConfigError("adapters.task", "the task has no samples", "check its file and sizes")
    # Of digests: a set of a million texts is 100 MB.
    digests = np.fromiter((blake2b(uid.encode(), digest_size=16).digest() for uid in uids), "S16", n)
    if len(np.unique(digests)) != n:
        raise ConfigError("adapters.task", "two samples share a uid, exactly-once needs them apart", "make uids unique")


def prompts_of(samples: Sequence[Sample], formatter: Formatter) -> list[Prompt]:
    """The prompts of a small set; raises as `check_uids` and for a prompt without tokens."""
    check_uids((sample.uid for sample in samples), len(samples))
    prompts = [formatter.prompt(sample, sample.uid, i) for i, sample in enumerate(samples)]
    for prompt in prompts:
        if not prompt.token_ids:
            raise ConfigError("adapters.task", f"sample {prompt.uid} has a prompt without tokens", "remove it")
    return prompts
