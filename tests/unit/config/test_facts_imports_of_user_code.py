"""Named user code is found, or its absence named, without running any of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_lora.config.facts import gather_facts
from areal_lora.config.load import load_config
from areal_lora.config.rules.guardrails import check
from tests.support.paths import EXAMPLES

CODE = "raise SystemExit(3)\n\n\ndef reward(completion, answer):\n    return 1.0\n"


def problems(folder: Path, path: str) -> list[str]:
    """What the guardrails say about a reward named ``path`` by a configuration file in ``folder``."""
    overlay = folder / "mine.yaml"
    overlay.write_text(f"adapters:\n  - reward: {{kind: function, path: '{path}'}}\n")
    config = load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml", overlay])
    return [str(f.error()) for f in check(config, gather_facts(config, runs_here=False))]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that must not be run, a file, and folders without ``__init__.py``."""
    for name in ("pack/__init__.py", "pack/mine.py", "outer/inner/mine.py", "mine.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "path",
    ["pack.mine:reward", "pack:reward", "outer.inner.mine:reward", "mine:reward", "mine.py:reward", "./mine.py:reward"],
)
def test_code_that_is_there_passes_and_is_not_run(package: Path, path: str) -> None:
    assert problems(package, path) == []


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("pack.mine:rewrad", "defines no 'rewrad' (fix: did you mean reward)"),
        ("pack.yours:reward", "'pack.yours'"),
        ("nothing.like.it:reward", "there is no module 'nothing'"),
        ("yours.py:reward", "there is no file yours.py"),
        ("pack.mine", "names no object"),
        ("mine.py:a b", "names no object"),
        ("outer.none.mine:reward", "'outer.none'"),
    ],
)
def test_code_that_is_not_there_is_one_line(package: Path, path: str, line: str) -> None:
    [problem] = problems(package, path)
    assert problem.startswith("adapters.0.reward.path: ")
    assert line in problem


def test_a_file_is_looked_for_next_to_the_configuration_first(
    package: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert problems(package, "mine.py:reward") == []


def test_an_overlay_that_changes_the_kind_replaces_the_reward(tmp_path: Path) -> None:
    overlay = tmp_path / "mine.yaml"
    overlay.write_text("adapters:\n  - reward: {kind: math_verify}\n    workflow: {kind: custom, path: 'a:b'}\n")
    base = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml", overlay]
    assert load_config(base).adapters[0].reward.kind == "math_verify"
    again = load_config(base, ["adapters.0.workflow={kind: single_turn}"])
    assert again.adapters[0].workflow.kind == "single_turn"
