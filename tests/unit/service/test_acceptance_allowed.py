"""What a tenant may name: no code, file or address that the operator does not offer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal_lora.config.models import AdapterConfig
from areal_lora.config.sections.run import ApiConfig
from areal_lora.errors import RequestError
from areal_lora.service.acceptance import allowed
from areal_lora.service.queue.queue_rows import Quota
from tests.support.service.running import section

CODE, FILTER = "my_rewards:exact", "/srv/filters.py:short"
JUDGE = "https://judge.example/v1"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Folders of two tenants and a shared one, and a file of the operator beside them."""
    for name in ("acme/own.jsonl", "acme/peft/adapter_config.json", "bolt/own.jsonl", "shared/all.jsonl", "secret"):
        path = tmp_path / "the data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    (tmp_path / "the data" / "acme" / "link.jsonl").symlink_to(tmp_path / "the data" / "secret")
    for folder, name, target in (
        ("acme/links", "rows.jsonl", "bolt/own.jsonl"),
        ("acme/stolen", "adapter_model.safetensors", "bolt/own.jsonl"),
        ("acme/dangling", "adapter_model.safetensors", "bolt/later"),
        ("acme/linked", "adapter_model.safetensors", "shared/all.jsonl"),
        ("acme/twice", "adapter_model.safetensors", "acme/own.jsonl"),
        ("acme/acme/twice", "adapter_model.safetensors", "bolt/own.jsonl"),
    ):
        path = tmp_path / "the data" / folder / name
        path.parent.mkdir(parents=True)
        path.symlink_to(tmp_path / "the data" / target)
    (tmp_path / "the data" / "shared" / "rows").mkdir()
    return tmp_path / "the data"


def judged(changes: dict[str, Any], data: Path | None) -> AdapterConfig:
    offered = ApiConfig(data=data, data_sets=["org/rows"], code=[CODE, FILTER], judges={JUDGE: "JUDGE_KEY"})
    adapter = AdapterConfig.model_validate(section(**changes))
    return allowed(adapter, offered, Quota(), "acme")


def rows(train: str, **more: Any) -> dict[str, Any]:
    return {"task": {"kind": "dataset", "train": train, **more}}


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"reward": {"kind": "function", "path": "os:system"}}, "reward.path"),
        ({"reward": {"kind": "function", "path": "/tmp/mine.py:reward"}}, "reward.path"),
        ({"reward": [{"kind": "numeric_match"}, {"kind": "function", "path": "a:b"}]}, "reward.1.path"),
        ({"reward": {"kind": "code", "asserts": "checks"}}, "reward.kind"),
        ({"reward": [{"kind": "numeric_match"}, {"kind": "code", "asserts": "checks"}]}, "reward.1.kind"),
        ({"algorithm": {"kind": "grpo", "loss": "a:b"}}, "algorithm.loss"),
        ({"algorithm": {"kind": "grpo", "advantage": "/x.py:b"}}, "algorithm.advantage"),
        ({"workflow": {"kind": "custom", "path": "a:b"}}, "workflow.path"),
        ({"workflow": {"kind": "agent", "path": "a:b"}}, "workflow.path"),
        ({"workflow": {"kind": "agent", "path": CODE, "tool_parser": "a:b"}}, "workflow.tool_parser"),
        ({"workflow": {"kind": "agent", "path": CODE, "tool_parser": "/x.py:b"}}, "workflow.tool_parser"),
        ({"workflow": {"kind": "multi_turn", "env": "a:b"}}, "workflow.env"),
        ({"workflow": {"kind": "gym", "env": "a:b"}}, "workflow.env"),
        ({"workflow": {"kind": "gym", "env": CODE, "python": "/bin/sh"}}, "workflow.python"),
        ({"workflow": {"kind": "verifiers", "env": CODE, "args": {"taskset": {"id": "x"}}}}, "workflow.args"),
        ({"workflow": {"kind": "agent", "path": CODE, "python": "/bin/sh"}}, "workflow.python"),
        ({"workflow": {"kind": "openenv", "env": "http://169.254.169.254/"}}, "workflow.env"),
        ({"workflow": {"kind": "mcp", "env": ["sh -c true"]}}, "workflow.env.0"),
        (rows("own.jsonl", keep="a:b"), "task.keep"),
        (
            {"evals": [{"name": "x", "task": {"kind": "dataset", "eval": "own.jsonl", "keep": "a:b"}}]},
            "evals.0.task.keep",
        ),
        ({"reward": {"kind": "judge", "url": "http://169.254.169.254/", "model": "m", "prompt": "p"}}, "reward.url"),
        (
            {
                "reward": {
                    "kind": "judge",
                    "url": JUDGE,
                    "model": "m",
                    "prompt": "p",
                    "key_env": "AWS_SECRET_ACCESS_KEY",
                }
            },
            "reward.key_env",
        ),
        (
            {"algorithm": {"kind": "distill", "reference": {"url": "http://1.2.3.4", "model": "m"}}},
            "algorithm.reference.url",
        ),
        ({"reward": {"kind": "model", "url": "http://169.254.169.254/score", "model": "m"}}, "reward.url"),
        (rows("/etc/passwd"), "task.train"),
        (rows("../bolt/own.jsonl"), "task.train"),
        (rows("../secret"), "task.train"),
        (rows("bolt/own.jsonl"), "task.train"),
        (rows("link.jsonl"), "task.train"),
        (rows("links"), "task.train"),
        (rows("own.jsonl", eval="links"), "task.eval"),
        ({"evals": [{"name": "x", "task": {"kind": "dataset", "eval": "links"}}]}, "evals.0.task.eval"),
        ({"init_from": "stolen"}, "init_from"),
        ({"init_from": "dangling"}, "init_from"),
        (rows("."), "task.train"),
        (rows("shared"), "task.train"),
        (rows("~/x"), "task.train"),
        (rows("nothing.jsonl"), "task.train"),
        (rows("other/rows"), "task.train"),
        (rows("a\0b"), "task.train"),
        (rows("x" * 5000), "task.train"),
        (rows("own.jsonl", eval="../secret"), "task.eval"),
        ({"task": {"kind": "gsm8k"}}, "task.train"),
        ({"evals": [{"name": "x", "task": {"kind": "dataset", "eval": "../secret"}}]}, "evals.0.task.eval"),
        ({"init_from": "../bolt"}, "init_from"),
        ({"init_from": "/"}, "init_from"),
        ({"task": {"kind": "word_problems", "n_train": 10**9}}, "task"),
        ({"sampling": {"prompts_per_step": 10**6, "n_samples": 8, "max_new_tokens": 4}}, "sampling"),
        ({"reward": {"kind": "function", "path": CODE, "workers": 1000}}, "reward"),
        ({"workflow": {"kind": "gym", "env": CODE, "workers": 1000}}, "workflow"),
        ({"rank_pattern": {"(a+)+$": 4}}, "rank_pattern"),
        ({"alpha_pattern": {".*.*.*x": 4}}, "alpha_pattern"),
        ({"target_modules": ["*a" * 200]}, "target_modules"),
    ],
)
def test_what_is_not_offered_is_refused_with_its_key(changes: dict[str, Any], path: str, data: Path) -> None:
    with pytest.raises(RequestError) as refused:
        judged(changes, data)
    assert (refused.value.status, refused.value.path) == (422, path)
    assert refused.value.reason
    assert refused.value.fix
    assert str(data) not in str(refused.value), "the operator's folders are not shown"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reward": {"kind": "function", "path": CODE}},
        {"reward": {"kind": "judge", "url": JUDGE, "model": "m", "prompt": "p", "key_env": "JUDGE_KEY"}},
        {"workflow": {"kind": "agent", "path": CODE, "tool_parser": "hermes"}},
        rows("org/rows"),
        {"rank_pattern": {"layers.0.self_attn.q_proj": 2}},
    ],
)
def test_what_is_offered_or_built_in_is_as_it_was(changes: dict[str, Any], data: Path) -> None:
    assert judged(changes, data) == AdapterConfig.model_validate(section(**changes))


def test_files_of_the_tenant_and_shared_ones_get_whole_paths(data: Path) -> None:
    task = judged(rows("own.jsonl", eval="shared/all.jsonl", keep=FILTER), data).task
    assert (task.train, task.eval) == (str(data / "acme" / "own.jsonl"), str(data / "shared" / "all.jsonl"))  # type: ignore[union-attr]
    assert judged(rows(str(data / "acme" / "own.jsonl")), data).task.train == str(data / "acme" / "own.jsonl")  # type: ignore[union-attr]
    assert judged(rows("shared/rows"), data).task.train == str(data / "shared" / "rows")  # type: ignore[union-attr]
    for name in ("peft", "linked", "twice"):
        assert judged({"init_from": name}, data).init_from == str(data / "acme" / name)
    assert judged({"init_from": "acme/twice"}, data).init_from == str(data / "acme" / "twice"), "not acme/acme/twice"


def test_without_a_folder_no_file_can_be_named() -> None:
    with pytest.raises(RequestError, match=r"task\.train"):
        judged(rows("own.jsonl"), None)
