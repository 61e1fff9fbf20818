from __future__ import annotations

import json
import tracemalloc
from hashlib import blake2b
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from areal_lora.config.sections.task import DatasetTask, PromptFormat
from areal_lora.data.prompts import Formatter, PromptStream, load_tokenizer, prompts_of, vocabulary
from areal_lora.errors import ConfigError
from areal_lora.tasks.datasets import load_samples
from areal_lora.types import Sample
from tests.support.paths import TINY_MODEL
from tests.support.rollout.helpers import CharTokenizer, samples, stream


def test_epochs_hold_every_sample_once_under_their_own_uids() -> None:
    made = stream(10)
    uids = [made.at(p).uid for p in range(20)]
    assert sorted(uids) == sorted(f"{epoch}:s{i}" for epoch in (0, 1) for i in range(10))
    prompt = made.at(13)
    assert prompt.position == 13
    assert "".join(map(chr, prompt.token_ids)) == prompt.sample.prompt


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ([], "no samples"),
        ([*samples(2), samples(1)[0]], "share a uid"),
        ([Sample(uid="a", prompt="", answer="1")], "sample a has a prompt without tokens"),
    ],
)
def test_unusable_samples_are_named(bad: list[Sample], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        prompts_of(bad, Formatter(tokenizer=CharTokenizer()))


def test_prompts_must_leave_room_for_the_answer() -> None:
    made = stream(11, max_prompt_tokens=4)
    refusals = [made.refusal(made.at(p)) for p in range(11)]
    assert (refusals.count("prompt_too_long"), refusals.count(None)) == (1, 10)
    with pytest.raises(ConfigError, match="all 11 prompts are longer than the 3 tokens"):
        PromptStream(samples(11), Formatter(tokenizer=CharTokenizer()), seed=0, max_prompt_tokens=3)


def test_a_model_that_was_moved_away_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.path: .*/moved: no such folder \(fix: restore the model's folder\)"):
        load_tokenizer(str(tmp_path / "moved"))


def test_memory_does_not_grow_with_the_tokens_of_a_data_set(tmp_path: Path) -> None:
    """50,000 prompts of 210 characters with the shipped tokenizer: lists of ids would be 84 MB."""
    n, path = 50_000, tmp_path / "train.jsonl"
    row = {"question": "12+34=" * 33, "answer": "#### 7"}
    path.write_text("".join(json.dumps(row | {"question": f"{row['question']}{i:06d}"}) + "\n" for i in range(n)))
    loaded = load_samples(
        DatasetTask(kind="gsm8k", train=str(path), format=PromptFormat(template="{question}")), "train"
    )
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    tracemalloc.start()
    try:
        made = PromptStream(loaded, Formatter(tokenizer=tokenizer), seed=0, max_prompt_tokens=1000)
        prompts = [made.at(position) for position in (0, 1, n - 1, n)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(loaded) == n
    assert peak < 200 * n, f"{peak / n:.0f} bytes a prompt"
    for prompt in prompts:
        assert tokenizer.decode(prompt.token_ids) == prompt.sample.prompt


def test_streams_keep_the_digest_by_which_an_older_run_is_resumed() -> None:
    """The ledger of a run names its order by this digest."""
    uids = "\n".join(["7", *(f"s{i}" for i in range(5))])
    assert stream(5, seed=7).digest == blake2b(uids.encode(), digest_size=16).hexdigest()


def test_a_prompt_without_tokens_is_found_at_the_start_or_left_out() -> None:
    class Deaf(CharTokenizer):
        """A tokenizer whose normalizer removes zero-width spaces, as some do."""

        def __call__(self, text: list[str]) -> dict[str, list[list[int]]]:
            return super().__call__([t.replace("\u200b", "") for t in text])

    hidden = [*samples(3), Sample(uid="z", prompt="\u200b", answer="1")]
    made = PromptStream(hidden, Formatter(tokenizer=Deaf()), seed=0, max_prompt_tokens=9)
    refusals = {(prompt := made.at(p)).sample.uid: made.refusal(prompt) for p in range(4)}
    assert refusals == {"s0": None, "s1": None, "s2": None, "z": "prompt_empty"}
    with pytest.raises(ConfigError, match="sample b has a prompt without tokens"):
        PromptStream(
            [*samples(3), Sample(uid="b", prompt="", answer="1")],
            Formatter(tokenizer=Deaf()),
            seed=0,
            max_prompt_tokens=9,
        )


def test_messages_that_the_chat_template_refuses_are_left_out_unless_all_are() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    refuses = "{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    tokenizer.chat_template = f"{{% for m in messages %}}{refuses}{{{{ m.content }}}}{{% endfor %}}"
    formatter = Formatter(tokenizer=tokenizer, how=PromptFormat(kind="chat"))
    roles = ["user", "system", "user", "system"]
    chats = [
        Sample(uid=f"s{i}", prompt="1+1=", answer="2", messages=({"role": role, "content": "1+1="},))
        for i, role in enumerate(roles)
    ]
    for seed in range(8):  # any of them is located first
        made = PromptStream(chats, formatter, seed=seed, max_prompt_tokens=9)
        refusals = {(prompt := made.at(p)).sample.uid: made.refusal(prompt) for p in range(4)}
        assert refusals == {"s0": None, "s1": "prompt_refused", "s2": None, "s3": "prompt_refused"}
    with pytest.raises(ConfigError, match=r"chat template refuses these messages: .*no system here"):
        PromptStream(chats[1::2], formatter, seed=0, max_prompt_tokens=9)


def test_the_vocabulary_is_the_text_of_each_token_id() -> None:
    words, tokenizer = vocabulary(str(TINY_MODEL)), AutoTokenizer.from_pretrained(TINY_MODEL)
    ids = tokenizer.encode("Tom has 3 apples.", add_special_tokens=False)
    assert len(words) == len(tokenizer)
    assert "".join(words[token] for token in ids) == "Tom has 3 apples."
