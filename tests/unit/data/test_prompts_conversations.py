"""Given conversations as tokens, against the chat template's own rendering of the whole conversation and its mask."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from areal_lora.config.sections.task import PromptFormat
from areal_lora.data.prompts import Formatter
from areal_lora.errors import ConfigError
from areal_lora.types import Sample
from tests.support.paths import TINY_MODEL

# As Qwen2.5's: earlier turns stay as they are, results of calls are a user's message. The mask is transformers' own.
TOOLS = r"""{% if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant
{% generation %}{{ m.content }}{% for call in m.tool_calls %}{% if m.content or not loop.first %}
{% endif %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>{% endgeneration %}{{ '\n' }}{% elif m.role == 'tool' %}
{% set before = messages[loop.index0 - 1] %}
{% if not before.tool_calls and before.role != 'tool' %}{{ raise_exception('a result without a call') }}{% endif %}
{% if before.role != 'tool' %}<|im_start|>user
{% endif %}<tool_response>{{ m.content }}</tool_response>{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}
<|im_end|>
{% endif %}{% else %}<|im_start|>{{ m.role }}
{{ m.content | trim }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# As Qwen3's: thoughts of answers before the last user's message are lost.
THOUGHTS = """\
{% set ns = namespace(last=0) %}
{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% set said = m.content.split('</think>')[-1] %}
{% set thought = m.reasoning_content or m.content.split('</think>')[0].split('<think>')[-1] %}
{% if loop.index0 > ns.last %}<think>
{% if m.reasoning_content or '</think>' in m.content %}{{ thought }}{% endif %}</think>
{% endif %}{{ said }}{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


PLAIN = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.tool_calls | tojson if m.tool_calls else m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": "c" * 9, "type": "function", "function": {"name": name, "arguments": arguments}}


PROMPT = [{"role": "system", "content": "Calculate."}, {"role": "user", "content": "3*4+5*6?"}]
CALLS = [
    {"role": "assistant", "content": "", "tool_calls": [call("mul", a=3, b=4), call("mul", a=5, b=6)]},
    {"role": "tool", "content": "12", "tool_call_id": "c" * 9},
    {"role": "tool", "content": "30", "tool_call_id": "c" * 9},
    {"role": "assistant", "content": "Now the sum.", "tool_calls": [call("add", a=12, b=30)]},
    {"role": "tool", "content": "42", "tool_call_id": "c" * 9},
    {"role": "assistant", "content": "It is 42."},
    {"role": "user", "content": "  Sure?  "},
    {"role": "assistant", "content": "Yes."},
]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def chatty(template: str) -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return tokenizer


def given(
    formatter: Formatter, prompt: list[dict[str, Any]], said: list[dict[str, Any]]
) -> tuple[list[int], list[int]]:
    """Tokens and mask of the prompt and what follows."""
    ids = formatter.token_ids(Sample(uid="s", prompt="p", answer=None, messages=tuple(prompt)))
    parts = formatter.given(said)
    mask = [0] * len(ids) + list(chain.from_iterable([1 - i % 2] * len(part) for i, part in enumerate(parts)))
    return ids + list(chain.from_iterable(parts)), mask


@pytest.mark.parametrize("kind", ["chat", "chat_append"])
@pytest.mark.parametrize("tools", [[], [ADD]])
def test_all_answers_of_a_conversation_are_what_the_chat_template_marks_as_the_assistants(
    kind: str, tools: list[Any]
) -> None:
    tokenizer = chatty(TOOLS)
    how = PromptFormat.model_validate({"kind": kind, "chat_template_kwargs": {"tools": tools} if tools else {}})
    ids, mask = given(Formatter(tokenizer=tokenizer, how=how), PROMPT, CALLS)
    whole = tokenizer.apply_chat_template(
        PROMPT + CALLS, tools=tools or None, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    n = len(ids)
    assert (ids, mask) == (whole["input_ids"][:n], whole["assistant_masks"][:n])
    assert tokenizer.decode(whole["input_ids"][n:]) == "\n", "no answer lacks"
    assert sum(mask) == sum(whole["assistant_masks"])


def test_a_conversation_has_the_tokens_of_a_rollout_with_the_same_answers() -> None:
    """The template removes earlier thoughts; a rollout, which appends, does not, and nor does a given conversation."""
    tokenizer = chatty(THOUGHTS)
    formatter = Formatter(tokenizer=tokenizer, how=PromptFormat(kind="chat_append"))
    said = ["<think>\nsix</think>\n6", "<think>\nyes</think>\nYes."]
    ids = formatter.token_ids(Sample(uid="s", prompt="p", answer=None, messages=tuple(PROMPT[1:])))
    mask = [0] * len(ids)
    for i, text in enumerate(said):
        answer = tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)
        ids, mask = ids + answer, mask + [1] * len(answer)
        if i == 0:
            reply = formatter.reply("Sure?", "user", answer)
            ids, mask = ids + reply, mask + [0] * len(reply)
    turns = [{"role": "assistant", "content": text} for text in said]
    turns.insert(1, {"role": "user", "content": "Sure?"})
    assert given(formatter, PROMPT[1:], turns) == (ids, mask)
    whole = tokenizer.apply_chat_template(PROMPT[1:] + turns, tokenize=False)
    assert "six" in tokenizer.decode(ids)
    assert "six" not in whole
    apart = [{"role": "assistant", "content": text.split("\n")[-1], "reasoning_content": text[8:11]} for text in said]
    assert given(formatter, PROMPT[1:], [apart[0], turns[1], apart[1]]) == (ids, mask), "thoughts of their own key"


def test_a_prefill_starts_each_answer() -> None:
    formatter = Formatter(tokenizer=chatty(PLAIN), how=PromptFormat(kind="chat", prefill="So:"))
    said = [{"role": "assistant", "content": "So: 42"}, PROMPT[1], {"role": "assistant", "content": "So: 43"}]
    ids, mask = given(formatter, PROMPT, said)
    pieces = formatter.tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on], skip_special_tokens=False)
    assert pieces.split() == ["42<|im_end|>", "43<|im_end|>"]
    assert formatter.tokenizer.decode(ids, skip_special_tokens=False).count("So:") == 2


@pytest.mark.parametrize("lost", [{"tool_calls": [call("add")], "content": "Wait."}, {"reasoning_content": "why"}])
def test_what_the_template_does_not_write_is_an_error(lost: dict[str, Any]) -> None:
    message = {"role": "assistant", "content": "4"} | lost
    with pytest.raises(ConfigError, match=f"does not write all of a message with .*{next(iter(lost))}") as caught:
        Formatter(tokenizer=chatty(PLAIN), how=PromptFormat(kind="chat")).given([message])
    assert "\n" not in str(caught.value)
