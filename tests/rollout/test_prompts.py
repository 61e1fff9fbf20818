from __future__ import annotations

import pytest

from areal_lora.errors import ConfigError
from areal_lora.rollout.prompts import PromptStream, tokenize
from areal_lora.types import Sample
from tests.rollout.helpers import CharTokenizer, samples, stream


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
        tokenize(bad, CharTokenizer())


def test_prompts_must_leave_room_for_the_answer() -> None:
    made = stream(11, max_prompt_tokens=4)
    assert sorted(made.fits(made.at(p)) for p in range(11)) == [False, *[True] * 10]
    with pytest.raises(ConfigError, match="all 11 prompts are longer than the 3 tokens"):
        PromptStream(samples(11), CharTokenizer(), seed=0, max_prompt_tokens=3)
