"""The sets of an evaluation: what is refused before anything starts, and what is read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.config.models import AdapterConfig, Config
from areal_lora.config.rules.guardrails import check
from areal_lora.config.sections.task import DEFAULT_SET, PromptFormat
from areal_lora.errors import ConfigError
from areal_lora.tasks.check import task_problems
from areal_lora.tasks.datasets import load_samples
from tests.support.paths import ROOT

SHIPPED = [ROOT / "examples" / "math" / name for name in ("gsm8k_grpo_megatron_lora_moe.yaml", "embedded.yaml")]


def loaded(folder: Path, *sets: dict[str, object]) -> Config:
    overlay = folder / "own.yaml"
    overlay.write_text(json.dumps({"adapters": [{"name": "gsm8k", "evals": list(sets)}]}))
    return load_config([*SHIPPED, overlay])


def found(folder: Path, *sets: dict[str, object]) -> dict[str, str]:
    config = loaded(folder, *sets)
    return {f.path: f.reason for f in check(config, Facts(hf_config=None))}


def test_without_sets_there_is_one_of_single_greedy_answers(tmp_path: Path) -> None:
    (only,) = loaded(tmp_path).adapters[0].eval_sets
    assert (only.name, only.workflow, only.n_samples, only.temperature, only.task) == (
        DEFAULT_SET,
        "single_turn",
        1,
        0.0,
        None,
    )


@pytest.mark.parametrize(
    ("key", "sets", "words"),
    [
        ("evals", [{"name": "a"}, {"name": "a"}], "2 sets are named 'a'"),
        ("evals.0.temperature", [{"name": "a", "n_samples": 4}], "all 4 answers to a problem are the same"),
        ("evals.0.temperature", [{"name": "a", "temperature": 0.001}], "minimum above 0 is 0.01"),
        ("evals.1.max_new_tokens", [{"name": "a"}, {"name": "b", "max_new_tokens": 4096}], "no room for a prompt"),
        (
            "evals.0.task.columns.messages",
            [{"name": "a", "task": {"kind": "dataset", "eval": "x.jsonl", "columns": {"messages": "m"}}}],
            "task.format.kind is template",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    tmp_path: Path, key: str, sets: list[dict[str, object]], words: str
) -> None:
    assert words in found(tmp_path, *sets)[f"adapters.0.{key}"]


def test_a_set_of_its_own_rows_needs_no_training_rows(tmp_path: Path) -> None:
    (tmp_path / "hard.jsonl").write_text('{"q": "1+1?", "a": "#### 2"}\n')
    columns = {"prompt": "q", "answer": "a"}
    sets = {"name": "hard", "task": {"kind": "dataset", "eval": "hard.jsonl", "columns": columns}}
    config = loaded(tmp_path, {"name": "own"}, sets)
    task = config.adapters[0].evals[1].task
    assert task is not None
    assert [s.prompt for s in load_samples(task, "eval")] == ["1+1?"]
    assert list(task_problems(config, online=False)) == []
    assert Config.model_validate_json(config.model_dump_json()) == config


def test_a_missing_file_is_one_line_with_its_key(tmp_path: Path) -> None:
    config = loaded(tmp_path, {"name": "hard", "task": {"kind": "dataset", "eval": "nowhere.jsonl"}})
    (problem,) = task_problems(config, online=False)
    assert isinstance(problem, ConfigError)
    assert problem.path == "adapters.0.evals.0.task.eval"
    assert "nowhere.jsonl" in str(problem)


@pytest.mark.parametrize(
    ("column", "weights", "key", "words"),
    [
        ("lvl", {"easy": 1}, "", r"no column 'lvl' \(fix: name one of: problem, level, answer\)"),
        ("level", {"esay": 1}, ".level.0", "no row has 'esay' .*give weights to: easy, hard"),
    ],
)
def test_a_curriculum_is_refused_before_anything_starts(
    tmp_path: Path, column: str, weights: dict[str, float], key: str, words: str
) -> None:
    rows = [{"problem": str(i), "level": ["easy", "hard"][i % 2], "answer": "1"} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"kind": "dataset", "train": "rows.jsonl", "eval": "rows.jsonl", "columns": {"prompt": "problem"}}
    difficulty = {column: {0: weights}}
    overlay = tmp_path / "own.yaml"
    changes = {"name": "gsm8k", "task": task, "sampling": {"difficulty": difficulty}}
    overlay.write_text(json.dumps({"adapters": [changes]}))
    (problem,) = task_problems(load_config([*SHIPPED, overlay]), online=False)
    assert problem.path == f"adapters.0.sampling.difficulty{key}"
    assert re.search(words, str(problem))


def test_a_set_without_a_format_has_the_adapters_and_one_with_a_format_keeps_it(tmp_path: Path) -> None:
    fields = loaded(tmp_path).adapters[0].model_dump()
    chat = {"kind": "chat", "system_prompt": "Think."}
    task = {"kind": "dataset", "eval": "x.jsonl"}
    own = {"kind": "template", "template": "Q: {prompt}\nA:"}
    evals = [{"name": "a"}, {"name": "b", "task": task}, {"name": "c", "task": task | {"format": own}}]
    adapter = AdapterConfig.model_validate(
        fields | {"task": task | {"train": "x.jsonl", "format": chat}, "evals": evals}
    )
    assert [each.task and each.task.format for each in adapter.evals] == [
        None,
        PromptFormat.model_validate(chat),
        PromptFormat.model_validate(own),
    ]
    assert AdapterConfig.model_validate_json(adapter.model_dump_json()) == adapter, "as a run folder records it"


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        ([], False),
        (["checkpoint.every_steps=10"], False),
        (["checkpoint.every_steps=50"], False),  # 100 is a multiple of both
        (["checkpoint.every_steps=50", "run.steps=100"], True),  # 100 is the last one, of which there is always one
        (["checkpoint.every_steps=50", "run.steps=100", "adapters.0.steps=101"], False),
        (["checkpoint.every_steps=50", "run.steps=20"], False),  # nothing is measured between first and last
        (["checkpoint.every_steps=50", "run.steps=100", "eval.every_steps=0"], False),
    ],
)
def test_measured_versions_that_never_have_a_checkpoint_are_a_warning(overrides: list[str], warned: bool) -> None:
    config = load_config(SHIPPED, ["run.steps=400", "eval.every_steps=20", *overrides])
    found = [f for f in check(config, Facts(hf_config=None)) if f.path == "eval.every_steps"]
    assert [f.severity for f in found] == ["warning"] * warned
    assert all("no multiple of 20 before step 100" in f.reason for f in found)
