"""Answers of a data set that are trained on, the check of all rows before a start, and results in the form of verl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from areal_lora.config.load import load_config
from areal_lora.tasks import check
from areal_lora.tasks.check import task_problems
from areal_lora.tasks.datasets import load_samples
from areal_lora.tasks.rewards import grade, numeric_match, states_several
from tests.support.paths import EXAMPLES

FILES = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]


def test_all_rows_are_checked_before_a_start(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1?", "answer": str(n + 1), "worked": "" if n == 5 else "so"} for n in range(20)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [f"adapters.0.{key}" for key in ("task.kind=dataset", f"task.train={data}", "sft.column=worked")]
    assert list(task_problems(load_config(FILES, keys), online=False)) == [], "only where they are trained on"
    (problem,) = task_problems(load_config(FILES, [*keys, "adapters.0.sft.steps=3"]), online=False)
    assert (problem.path, "worked" in problem.reason) == ("adapters.0.sft.column", True)


def test_adapters_of_one_task_have_it_read_once_and_others_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, read = tmp_path / "rows.jsonl", list[Any]()
    data.write_text("".join(json.dumps({"prompt": f"{n}+1?", "answer": str(n + 1)}) + "\n" for n in range(20)))

    def load(task: Any, split: Any) -> Any:
        read.append(split)
        return load_samples(task, split)

    monkeypatch.setattr(check, "load_samples", load)
    keys = [f"adapters.0.{key}" for key in ("task.kind=dataset", f"task.train={data}")]
    config = load_config(FILES, keys)
    own = config.adapters[0]

    def problems(**changed: Any) -> list[str]:
        read.clear()
        entries = [own, own.model_copy(update={"name": "b"}), own.model_copy(update={"name": "c", **changed})]
        return [p.path for p in task_problems(config.model_copy(update={"adapters": entries}), online=False)]

    assert (problems(), read) == ([], ["train", "eval"])
    sft = own.sft.model_copy(update={"steps": 3, "column": "worked"})
    assert (problems(sft=sft), read) == (["adapters.2.sft.column"], ["train", "eval"] * 2 + ["train"])
    data.write_text(data.read_text().replace('"5"', '"B"'))
    assert problems() == [f"adapters.{i}.reward.kind" for i in range(3)]


def test_gold_answers_that_state_no_number_are_refused_where_numbers_are_compared(tmp_path: Path) -> None:
    """Sampling them is lost: each answer to them is an error, three times."""
    rows = [{"prompt": f"{n}+1?", "answer": "B" if n == 5 else "3, 5" if n == 6 else str(n + 1)} for n in range(20)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [f"adapters.0.{key}" for key in ("task.kind=dataset", f"task.train={data}", f"task.eval={data}")]
    (problem,) = task_problems(load_config(FILES, keys), online=False)
    assert problem.path == "adapters.0.reward.kind"
    assert problem.reason == "4 of 40 gold answers state no number, or several, the first is 'B'"
    assert "math_verify" in problem.fix
    assert not list(task_problems(load_config(FILES, keys), online=False, resumed=True)), "its rows stay"
    for reward in ("math_verify", "none"):
        assert not list(task_problems(load_config(FILES, [*keys, f"adapters.0.reward.kind={reward}"]), online=False))


@pytest.mark.parametrize(
    ("gold", "several"),
    [
        (r"3 \times 10^8", True),
        (r"2\sqrt{3}", True),
        ("3, 5", True),
        (r"12\text{ cm}^2", True),
        (r"12\text{ cm}", False),
        ("2x+3", True),
        ("1 000 000", True),
        ("3+4=7", False),
        ("x_1 = 5", False),
        (r"1\frac{1}{2}", False),
        (r"\$1,234.50", False),
        (r"50\%", False),
        ("She has 3 and buys 4, so 7", False),
        ("3+4=7\n#### 7", False),
        (r"so 3 \boxed{-7}", False),
    ],
)
def test_a_formula_that_is_read_as_one_of_its_numbers(gold: str, several: bool) -> None:
    """Its own text in a box would score 0, and one of its numbers 1."""
    assert states_several(gold) == several
    if several:
        assert not numeric_match(rf"\boxed{{{gold}}}", gold)


def verl_reward(result: float | dict[str, object]) -> float:
    """As `NaiveRewardManager.__call__` of verl reads a result; it logs everything else."""
    return float(result["score"]) if isinstance(result, dict) else float(result)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("result", "correct", "logged"),
    [
        ({"score": 1.0, "acc": 1.0}, True, {}),
        ({"score": -1, "acc": 0, "len": 812}, False, {"len": 812.0}),
        ({"score": 1.0, "acc": True, "pred": "18"}, True, {}),
        ({"score": -1.0, "acc": False, "pred": None, "boxed": True}, False, {"boxed": 1.0}),
        ({"score": 0.25, "acc": 0.5}, None, {"acc": 0.5}),
        ({"score": 0.25, "format": 0.1, "correct": True}, True, {"format": 0.1}),
        ({"score": True}, True, {}),
    ],
)
def test_a_result_of_verl_has_its_score_as_reward(
    result: dict[str, object], correct: bool | None, logged: dict[str, float]
) -> None:
    graded = grade(result)
    assert graded.reward == verl_reward(result)
    assert (graded.correct, dict(graded.components)) == (correct, logged)


def test_a_score_without_a_number_is_an_error_and_a_reward_has_precedence() -> None:
    for result, words in (
        ({"score": None}, "None"),
        ({"score": "1"}, "a str"),
        ({"score": 1, "x": []}, "'x' is a list"),
    ):
        with pytest.raises(TypeError, match=words):
            grade(result)
    assert (grade({"reward": 0.5, "score": 2}).reward, grade({"reward": 0.5, "score": 2}).components) == (
        0.5,
        {"score": 2},
    )
