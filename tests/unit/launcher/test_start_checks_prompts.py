"""What a plan and a start warn of after reading the rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from areal_lora.cli.app import main
from areal_lora.config.load import load_config
from areal_lora.launcher import start
from areal_lora.launcher.start import prompt_findings
from areal_lora.tasks.datasets import load_samples
from tests.support.paths import EXAMPLES

FILES = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]
TASK = "adapters.0.task={{kind: dataset, train: {path}}}"


def rows(path: Path, prompts: list[str]) -> str:
    path.write_text("".join(json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in prompts))
    return TASK.format(path=path)


@pytest.mark.parametrize(
    ("prompts", "paths"),
    [
        ([f"{n} + 1 =" for n in range(40)], []),
        (["1 + 1 ="] * 40, ["adapters.0.task"]),
        ([f"{n} + 1 = " * 200 for n in range(40)], ["rollout.max_model_len"]),
        ([f"{n} + 1 = " * 200 for n in range(39)] + ["1 + 1 ="], []),
    ],
    ids=["good", "identical", "all too long", "one fits"],
)
def test_prompts_that_teach_little_are_warned_of(tmp_path: Path, prompts: list[str], paths: list[str]) -> None:
    config = load_config(FILES, [rows(tmp_path / "rows.jsonl", prompts)])
    assert [finding.path for finding in prompt_findings(config, online=False)] == paths


def test_prompts_of_several_adapters_are_read_once_unless_they_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[str]()

    def load(task: Any, split: Any) -> Any:
        read.append(split)
        return load_samples(task, split)

    monkeypatch.setattr(start, "load_samples", load)

    def paths(prompts: list[str], room: int = 1) -> list[str]:
        read.clear()
        config = load_config(FILES, [rows(tmp_path / "rows.jsonl", prompts)])
        (own,) = config.adapters
        sampling = own.sampling.model_copy(update={"max_new_tokens": config.rollout.max_model_len - room})
        entries = [own, own.model_copy(update={"name": "b"}), own.model_copy(update={"sampling": sampling})]
        made = config.model_copy(update={"adapters": entries})
        return [finding.path for finding in prompt_findings(made, online=False)]

    assert paths([f"{n} + 1 =" for n in range(40)]) == ["rollout.max_model_len"], (
        "of the third, with room for no prompt"
    )
    assert len(read) == 2
    assert paths(["1 + 1 ="] * 40, room=100) == ["adapters.0.task", "adapters.1.task", "adapters.2.task"]


def test_a_plan_refuses_a_missing_file_and_prints_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = ["plan", *(word for file in FILES for word in ("--config", str(file)))]
    for kind in ("gsm8k", "dataset"):
        # The path has the form of a hub name.
        words = [f"adapters.0.task={{kind: {kind}, train: data/missing.jsonl, eval: data/missing.jsonl}}"]
        assert main([*plan, *words]) == 64
        assert "data/missing.jsonl: no such file or folder" in capsys.readouterr().err
    assert main([*plan, rows(tmp_path / "rows.jsonl", ["1 + 1 ="] * 40), "adapters.0.sampling.min_tokens=2"]) == 0
    out, err = capsys.readouterr()
    assert "32 training rows have 1 different prompt " in err
    assert "warning: adapters.0.sampling.min_tokens: 2 restricts sampling" in err
    assert "Memory, estimated, in MiB of one device" in out
    assert "memory of this machine: " in out
