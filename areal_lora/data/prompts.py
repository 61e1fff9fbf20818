"""The endless stream of prompts of one adapter's task, and its order without a cursor.

Position ``p`` of the stream belongs to epoch ``p // n`` and to the sample ``permute(p % n)``, where every epoch has its
own keyed permutation of ``(seed, epoch, index)``. Nothing is stored: any process that knows seed and position knows the
prompt, so a resumed run needs only a number.

The permutation is a balanced Feistel network over the smallest even-bit domain that holds ``n``, with cycle walking
(Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): values outside ``range(n)`` are encrypted again
until they fall inside. The domain is less than 4 n, so that takes fewer than four rounds of encryption on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from areal_lora.data.formatting import Formatter
from areal_lora.errors import ConfigError
from areal_lora.types import Sample

_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """The order in which ``n_samples`` samples are visited, epoch after epoch."""

    seed: int
    n_samples: int

    def __post_init__(self) -> None:
        if self.n_samples < 1:
            raise ValueError(f"a prompt order needs at least one sample, got {self.n_samples}")

    def locate(self, position: int) -> tuple[int, int]:
        """``(epoch, sample index)`` of the ``position``-th prompt of the stream (from 0)."""
        epoch, offset = divmod(position, self.n_samples)
        return epoch, permute(offset, self.n_samples, seed=self.seed, epoch=epoch)


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


class PromptStream:
    """Maps a stream position to a prompt; keeps no position itself.

    A prompt is tokenized each time it is located: token ids of a large data set would fill gigabytes, and
    tokenizing it as a whole would hold up the start for minutes. ``max_prompt_tokens`` leaves room for the
    answer; prompts beyond it are still located, and :meth:`refusal` states why they cannot be sampled. Streams
    with the same ``digest`` put the same sample at the same position.
    """

    def __init__(self, samples: Sequence[Sample], formatter: Formatter, *, seed: int, max_prompt_tokens: int) -> None:
        """Raises ConfigError for samples that share a uid, a blank prompt, or none that fits."""
        check_samples(samples)
        self._samples, self._formatter = samples, formatter
        self._order = PromptOrder(seed, len(samples))
        self._max_prompt_tokens = max_prompt_tokens
        self.digest = _digest(seed, samples)
        for sample in samples:
            if not sample.prompt.strip():
                _token_ids([sample], formatter)
        if not any(self.refusal(self.at(position)) is None for position in range(len(samples))):
            raise ConfigError(
                "rollout.max_model_len",
                f"all {len(samples)} prompts are longer than the {max_prompt_tokens} tokens left beside the answer",
                "raise it, or lower sampling.max_new_tokens",
            )

    def at(self, position: int) -> Prompt:
        epoch, index = self._order.locate(position)
        sample = self._samples[index]
        text = self._formatter.text(sample)
        return Prompt(
            uid=f"{epoch}:{sample.uid}",
            position=position,
            sample=sample,
            text=text,
            token_ids=self._formatter.encode(sample, text),
        )

    def refusal(self, prompt: Prompt) -> str | None:
        """The reason for which the prompt cannot be sampled, as dropped groups name it; None if it can."""
        if not prompt.token_ids:
            return "prompt_empty"
        return "prompt_too_long" if len(prompt.token_ids) > self._max_prompt_tokens else None


def check_samples(samples: Sequence[Sample]) -> None:
    """Raises ConfigError for no samples or a repeated uid."""
    if not samples:
        raise ConfigError("adapters.task", "the task has no samples", "check its file and sizes")
    if len({sample.uid for sample in samples}) != len(samples):
        raise ConfigError("adapters.task", "two samples share a uid, exactly-once needs them apart", "make uids unique")


def tokenize(samples: Sequence[Sample], formatter: Formatter) -> list[list[int]]:
    """Token ids of every prompt of a small set; raises as `check_samples` and for a prompt without tokens."""
    check_samples(samples)
    return _token_ids(samples, formatter)


def _token_ids(samples: Sequence[Sample], formatter: Formatter) -> list[list[int]]:
    token_ids = [formatter.token_ids(sample) for sample in samples]
    for sample, ids in zip(samples, token_ids, strict=True):
        if not ids:
            raise ConfigError("adapters.task", f"sample {sample.uid} has a prompt without tokens", "remove it")
    return token_ids


def _digest(seed: int, samples: Sequence[Sample]) -> str:
    digest = blake2b(str(seed).encode(), digest_size=16)
    for sample in samples:
        digest.update(b"\n" + sample.uid.encode())
    return digest.hexdigest()
