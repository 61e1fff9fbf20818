"""Text made token by token says what the tokenizer says of the whole, and stops where it must."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.support.lazy import Lazy

sampling = Lazy("areal_lora.engine.vllm_ext.server.sampling")

SENTENCES = ["plain words, and more", "Grüße aus Köln — 你好 🙂🙂!", "a\n\nb\n\n\nc", "x" * 40, "🙂"]


@pytest.mark.parametrize("text", SENTENCES)
def test_text_is_that_of_the_tokenizer(tiny_model: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ids = tokenizer.encode(text, add_special_tokens=False)
    answer = sampling.AnswerText(tokenizer.decode, tokenizer.encode("Q: é"), ())
    pieces = []
    for i, token in enumerate(ids):
        assert not answer.add(token)
        pieces.append(answer.take(i == len(ids) - 1))
    assert answer.text == text == "".join(pieces)


def test_bytes_that_are_no_character_do_not_hold_up_the_rest(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    good, lonely = tokenizer.encode("ok"), tokenizer.encode("é")[1]  # a continuation byte without its beginning
    answer = sampling.AnswerText(tokenizer.decode, [], ())
    for token in [*[lonely] * 9, *good]:
        answer.add(token)
    assert answer.text.endswith("ok")
    assert set(answer.text[:-2]) == {"\N{REPLACEMENT CHARACTER}"}


@pytest.mark.parametrize("seed", range(20))
def test_stop_strings_end_the_text_and_are_never_given_out(tiny_model: Path, seed: int) -> None:
    rng = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    stop = ["\n\n", "aba", "bb\nb"][rng.randrange(3) :]
    text = "".join(rng.choice("ab\n") for _ in range(60)) + stop[-1]
    first = min((text.find(s) + len(s), text.find(s)) for s in stop if s in text)
    answer, given = sampling.AnswerText(tokenizer.decode, [5, 6], stop), ""
    n = 0
    for token in tokenizer.encode(text, add_special_tokens=False):
        n += 1
        stopped = answer.add(token)
        given += answer.take(stopped)
        assert not any(s in given for s in stop)
        if stopped:
            break
    assert (n, given) == (first[0], text[: first[1]])
