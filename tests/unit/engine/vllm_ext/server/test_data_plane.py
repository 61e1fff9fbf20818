"""What a chat is for the engine: the template's text, and what ends an answer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from areal_lora.data.prompts import load_tokenizer
from tests.support.lazy import Lazy
from tests.support.paths import TINY_MODEL

data_plane = Lazy("areal_lora.engine.vllm_ext.server.data_plane")

TEMPLATE = """\
{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}\
<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """That of a base model: its end of sequence is not the template's end of turn."""
    made: Any = load_tokenizer(str(TINY_MODEL))
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = TEMPLATE
    return made


def sent(tokenizer: Any, path: str, **body: Any) -> tuple[httpx.Response, list[tuple[list[int], Any]]]:
    """The response without answers, and prompt and parameters that the engine got."""
    asked: list[tuple[list[int], Any]] = []

    async def complete(prompts: list[list[int]], params: Any, *how: Any) -> list[Any]:
        asked.extend((ids, params) for ids in prompts)
        return []

    parts: Any = (
        SimpleNamespace(),
        SimpleNamespace(max_model_len=256, check_prompt=lambda ids, n_new: None),
        tokenizer,
        SimpleNamespace(complete=complete),
        SimpleNamespace(),
    )

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=data_plane.DataPlane(*parts).app())
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post(path, json={"model": "base", "max_tokens": 4, **body})

    return asyncio.run(run()), asked


@pytest.mark.parametrize(
    ("setting", "ends"),
    [({}, ["<|im_end|>"]), ({"stop_token_ids": [7]}, [7, "<|im_end|>"]), ({"ignore_eos": True}, [])],
    ids=str,
)
def test_an_answer_of_a_chat_ends_with_the_templates_end_of_turn(
    tokenizer: Any, setting: dict[str, Any], ends: list[int | str]
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    for _ in range(2):  # a request leaves nothing for the next one
        answer, [(ids, params)] = sent(tokenizer, "/v1/chat/completions", messages=messages, **setting)
        assert answer.status_code == 200
        assert tokenizer.decode(ids) == "<|im_start|>user hi<|im_end|>\n<|im_start|>assistant "
        assert params.stop_token_ids == [e if isinstance(e, int) else tokenizer.convert_tokens_to_ids(e) for e in ends]
    _, [(_, params)] = sent(tokenizer, "/v1/completions", prompt="hi", **setting)
    assert params.stop_token_ids == setting.get("stop_token_ids", []), "a plain text has no turns"


def test_messages_that_the_template_refuses_are_a_400(tokenizer: Any) -> None:
    answer, asked = sent(tokenizer, "/v1/chat/completions", messages=[{"role": "tool", "content": "4"}])
    assert (answer.status_code, asked) == (400, [])
    message = answer.json()["error"]["message"]
    assert message.startswith("messages: the chat template refuses these messages: ")
    assert message.endswith("no tools")
