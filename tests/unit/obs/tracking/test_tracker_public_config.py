"""No secret that a user may have written into a configuration reaches a tracker."""

from __future__ import annotations

import json
from html import escape
from typing import Any

import pytest

from areal_lora.config.models import Config
from areal_lora.obs.tracking.tracker import LEFT_OUT, flat, masked_text, public_config, public_json
from tests.support.obs.fake_run import make_config

KEY = "sk-0123456789abcdef"


def planted() -> Config:
    """Keys at every place where a user may write free text."""
    values = make_config().model_dump(mode="json")
    values["cluster"]["slurm"] |= {
        "setup": [f"export WANDB_API_KEY={KEY}-1"],
        "extra": [f"--export=ALL,KEY={KEY}-2"],
        "wrapper": {"trainer": ["env", f"TOKEN={KEY}-3"]},
        "components": [{"roles": ["trainer", "rollout", "controller"], "extra": [f"--comment={KEY}-4"]}],
    }
    values["adapters"][0]["reward"] = {
        "kind": "judge",
        "url": f"https://me:{KEY}-5@judge.example/v1",
        "model": "m",
        "prompt": "{completion}",
        "key_env": "JUDGE_KEY",
        "parameters": {"extra_body": {"api_key": f"{KEY}-6", "tier": "flex"}},
    }
    values["adapters"][0]["workflow"] = {"kind": "custom", "path": "a:b", "args": {"auth": "from-the-variable"}}
    return Config.model_validate(values)


def test_planted_keys_are_left_out_and_all_else_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "from-the-variable")
    config = planted()
    shown = public_config(config)
    for text in (json.dumps(shown), public_json(config), escape(public_json(config))):
        assert KEY not in text
        assert "from-the-variable" not in text
    before, after = flat(config.model_dump(mode="json")), flat(shown)
    changed = {key for key in before if after.get(key) != before[key]}
    slurm = "cluster.slurm."
    assert changed == {
        f"{slurm}setup.0",
        f"{slurm}extra.0",
        f"{slurm}wrapper.trainer.0",
        f"{slurm}wrapper.trainer.1",
        f"{slurm}components.0.extra.0",
        "adapters.0.reward.url",
        "adapters.0.reward.parameters.extra_body.api_key",
        "adapters.0.workflow.args.auth",
    }
    assert after["adapters.0.reward.url"] == "https://judge.example/v1"
    assert after["adapters.0.reward.key_env"] == "JUDGE_KEY"
    assert after[f"{slurm}setup"] == LEFT_OUT


@pytest.mark.parametrize(
    "given",
    [
        {"kind": "mcp", "env": [f"https://mcp.example/mcp/?a=b&tavilyApiKey={KEY}&c=d"], "tool_parser": "hermes"},
        {"kind": "mcp", "env": [f"npx -y --quiet --brave-api-key {KEY} --port 1"], "tool_parser": "hermes"},
        {"kind": "mcp", "env": [f"env GITHUB_TOKEN={KEY} npx gh --api-key='{KEY}'"], "tool_parser": "hermes"},
        {"kind": "mcp", "env": [f'npx remote --header "Authorization: Bearer {KEY}"'], "tool_parser": "hermes"},
        {"kind": "agent", "path": "a:f", "args": {"apiKey": KEY, "accessToken": KEY, "OPENAI_APIKEY": KEY}},
        {"kind": "agent", "path": "a:f", "args": {"api_keys": [KEY, KEY], "headers": {"Cookie": KEY, "X-Auth": KEY}}},
    ],
)
def test_keys_in_addresses_commands_and_arguments_are_left_out(given: dict[str, Any]) -> None:
    values = make_config().model_dump(mode="json")
    values["adapters"][0]["workflow"] = given
    shown = public_config(Config.model_validate(values))
    assert KEY not in json.dumps(shown)
    assert shown["adapters"][0]["workflow"]["kind"] == given["kind"]
    assert shown["adapters"][1:] == values["adapters"][1:]


def test_names_and_texts_that_only_resemble_those_of_secrets_are_sent() -> None:
    values = make_config().model_dump(mode="json")
    args = {
        "monkey": "see",
        "stop_tokens": ["<end>"],
        "command": "run --keyboard us --tokens 9 turkey=1 https://a/?k=v",
    }
    values["adapters"][0]["workflow"] = {"kind": "agent", "path": "a:f", "args": args}
    assert public_config(Config.model_validate(values))["adapters"][0]["workflow"]["args"] == args


def test_a_configuration_without_secrets_is_sent_as_it_is() -> None:
    config = make_config()
    assert public_config(config) == config.model_dump(mode="json")


def test_short_values_of_variables_are_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "1")
    assert masked_text("rank 1") == "rank 1"


def test_an_address_that_ends_with_its_text_masks_nothing_of_the_next_one() -> None:
    text = '{"tokens":["http","://","me",":","pw","@","db"],"answer":"https://a","next":"b@c"}'
    assert masked_text(text) == text
    assert masked_text('{"a":"https://me:pw@db/x"}') == '{"a":"https://db/x"}'


def test_flat_names() -> None:
    assert flat({"a": [{"b": 1}, 2], "c": {}, "d": {"e": None}}) == {"a.0.b": 1, "a.1": 2, "d.e": None}
