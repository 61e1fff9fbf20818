"""Prompts and replies as tokens, against the tokenizer's own chat template."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast, TokenizersBackend

from areal_lora.config.sections.task import PromptFormat
from areal_lora.data.prompts import Formatter, load_tokenizer
from areal_lora.errors import ConfigError
from areal_lora.types import Sample
from tests.support.engine.vllm_ext.byte_level import byte_level
from tests.support.paths import TINY_MODEL

# As Qwen's and SmolLM2's: a default system message, marks around each turn, an argument of its own.
TEMPLATE = """\
{% if messages[0]['role'] != 'system' %}<|im_start|>system
Be brief.<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>
{% endif %}{% endif %}"""


@pytest.fixture(scope="module")
def chatty() -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def asked(*messages: dict[str, Any]) -> Sample:
    return Sample(uid="s", prompt="1+1?", answer="2", messages=messages or ({"role": "user", "content": "1+1?"},))


def test_a_chat_prompt_has_the_tokens_of_the_chat_template(chatty: Any) -> None:
    kwargs = {"enable_thinking": False}
    formatter = Formatter(tokenizer=chatty, how=PromptFormat(kind="chat", chat_template_kwargs=kwargs))
    turns = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "+3?"},
    ]
    want = chatty.apply_chat_template(turns, tokenize=True, add_generation_prompt=True, return_dict=False, **kwargs)
    assert formatter.token_ids(asked(*turns)) == want
    assert formatter.prompt(asked(*turns), "", 0).text.endswith("<think></think>\n")


def test_a_prefill_is_part_of_the_prompt(chatty: Any) -> None:
    formatter = Formatter(tokenizer=chatty, how=PromptFormat(kind="chat", prefill="Answer:"))
    assert formatter.prompt(asked(), "", 0).text.endswith("<|im_start|>assistant\nAnswer:")
    assert chatty.decode(formatter.token_ids(asked())) == formatter.prompt(asked(), "", 0).text


def test_a_given_answer_ends_as_the_model_has_to_end_it(chatty: Any) -> None:
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "It is 2."}]
    whole = chatty.apply_chat_template(turns, tokenize=False)
    formatter = Formatter(tokenizer=chatty, how=PromptFormat(kind="chat"))
    written = [*formatter.token_ids(asked()), *formatter.answer("It is 2.")]
    assert chatty.decode(written) == whole.removesuffix("\n")
    prefilled = Formatter(tokenizer=chatty, how=PromptFormat(kind="chat", prefill="It is"))
    assert [*prefilled.token_ids(asked()), *prefilled.answer("It is 2.")] == written
    plain = Formatter(tokenizer=chatty, how=PromptFormat())
    assert plain.answer(" 2") == [*chatty.encode(" 2", add_special_tokens=False), chatty.eos_token_id]


TURN = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}END{% endfor %}"


@pytest.mark.parametrize(
    ("end", "want"),
    [
        ("<|im_end|>\n", "<|im_end|>"),
        ("<eos>", "<eos>"),
        (" <|im_end|>", ""),
        ("\n\nQ", ""),
        ("", ""),
        ("{{ raise_exception('no user') if m.role == 'user' }}<|im_end|>", ""),
    ],
)
@pytest.mark.parametrize("kind", ["chat", "template"])
def test_a_special_token_after_an_answer_ends_it(chatty: Any, kind: Any, end: str, want: str) -> None:
    """No blank and no text: these may be anywhere in an answer."""
    chatty = copy.deepcopy(chatty)
    chatty.chat_template = TURN.replace("END", end)
    formatter = Formatter(tokenizer=chatty, how=PromptFormat(kind=kind))
    assert formatter.ends == ([chatty.convert_tokens_to_ids(want)] if want else [])


def test_a_piece_of_a_blank_ends_no_answer(chatty: Any) -> None:
    """Llama 2's tokenizer has a token of the blank before its end of sequence, which alone is decoded to nothing."""

    class Sentencepiece(type(chatty)):  # type: ignore[misc]
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
            text: str = super().decode(token_ids, skip_special_tokens=skip_special_tokens)
            return text.removeprefix(" ")

    chatty = copy.deepcopy(chatty)
    chatty.__class__, chatty.chat_template = Sentencepiece, TURN.replace("END", " <eos>")
    assert not Formatter(tokenizer=chatty, how=PromptFormat(kind="chat")).ends


@pytest.mark.parametrize("ended", [True, False])
def test_a_reply_continues_the_conversation_as_the_chat_template_writes_it(chatty: Any, ended: bool) -> None:
    """With the end of turn sampled by the model, or cut off before it."""
    formatter = Formatter(tokenizer=chatty, how=PromptFormat(kind="chat"))
    answer = chatty.encode("2" + ("<|im_end|>" if ended else ""), add_special_tokens=False)
    ids = formatter.token_ids(asked()) + answer + formatter.reply("Sure?", "user", answer)
    turns = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "Sure?"},
    ]
    assert chatty.decode(ids) == chatty.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)


def test_a_reply_within_the_turn_of_the_assistant_has_no_marks(chatty: Any) -> None:
    formatter = Formatter(tokenizer=chatty, how=PromptFormat(kind="chat", prefill="So:"))
    answer = chatty.encode("1+1", add_special_tokens=False)
    ids = formatter.token_ids(asked()) + answer + formatter.reply("\n=2\n", "assistant", answer)
    assert chatty.decode(ids) == formatter.prompt(asked(), "", 0).text + "1+1\n=2\n"


def test_plain_prompts_and_replies_go_in_as_they_are(chatty: Any) -> None:
    formatter = Formatter(tokenizer=chatty, how=PromptFormat())
    plain = Sample(uid="s", prompt="1+1=", answer="2")
    assert formatter.token_ids(plain) == chatty(["1+1="])["input_ids"][0]
    assert formatter.reply("\n2+2=", "user", [1]) == chatty.encode("\n2+2=", add_special_tokens=False)


def test_chat_needs_a_chat_template_and_messages_that_it_takes(chatty: Any, tmp_path: Path) -> None:
    chatty.chat_template = None
    with pytest.raises(ConfigError, match="has no chat template"):
        Formatter(tokenizer=chatty, how=PromptFormat(kind="chat"))
    chatty.chat_template = "{{ raise_exception('no system') }}"
    with pytest.raises(ConfigError, match=r"refuses these messages: .*no system") as caught:
        Formatter(tokenizer=chatty, how=PromptFormat(kind="chat")).token_ids(asked())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_byte_level_tokenizer_keeps_its_spaces(tmp_path: Path, model_type: str, tokenizer_class: str) -> None:
    """As DeepSeek-R1-Distill-Llama and DeepSeek-R1-0528-Qwen3 declare theirs; the oracle is tokenizers alone."""
    folder = byte_level(tmp_path / "DeepSeek [R1]", model_type, tokenizer_class)
    tokenizer, text = load_tokenizer(str(folder)), "hello  world:\n 12 tests, ünïcode"
    ids = Formatter(tokenizer=tokenizer).token_ids(Sample(uid="s", prompt=text, answer=None))
    assert ids == Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_a_tokenizer_of_another_kind_is_the_one_that_transformers_builds(tmp_path: Path) -> None:
    folder = byte_level(tmp_path / "model", "llama", "LlamaTokenizer")
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"decoder": {"type": "Fuse"}}))
    assert type(load_tokenizer(str(folder))) is type(AutoTokenizer.from_pretrained(folder)) is not TokenizersBackend
