"""Bare names of shipped examples; what YAML's values and keys are, in files and overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_lora.config.load import configuration_file, examples, load_config
from areal_lora.config.models import WorkerWorkflowConfig
from areal_lora.errors import ConfigError
from tests.support.paths import TINY_MODEL

NAMES = ["gsm8k_grpo_megatron_lora_moe.yaml", "embedded.yaml"]


def test_a_bare_name_is_a_shipped_example_with_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(NAMES)
    assert (config.run.name, config.model.folder) == ("embedded", str(TINY_MODEL))


def test_a_file_of_the_working_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAMES[1]).write_text("run: {name: mine}\n")
    assert load_config(NAMES).run.name == "mine"


def test_a_path_is_no_bare_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("x/embedded.yaml", "./../embedded.yaml", "nowhere.yaml"):
        with pytest.raises(ConfigError, match="no such configuration file"):
            load_config([path])
    assert configuration_file(Path("embedded.yaml")).parent.parent == examples()


NUMBERS = ["1e-3", "1E5", "-2.5e3", "+.5e+1", "3.", "-.5", "1.0e-2", "6e0"]
TEXTS = ["e3", "1e", "1e-3x", "1.2.3", "08", "--1e3", ".", "1_0e3", "'1e-3'"]


def test_a_number_is_one_with_any_exponent(tmp_path: Path) -> None:
    """Under keys without a type of their own; Python's `float` is the oracle."""
    values = "{" + ", ".join(f"k{i}: {text}" for i, text in enumerate(NUMBERS + TEXTS)) + "}"
    (tmp_path / "own.yaml").write_text(f"rollout: {{engine_args: {values}}}\n")
    by_file = load_config([*NAMES, tmp_path / "own.yaml"]).rollout.engine_args
    by_override = load_config(NAMES, [f"rollout.engine_args={values}"]).rollout.engine_args
    expected = [*map(float, NUMBERS), *(text.strip("'") for text in TEXTS)]
    for found in (by_file, by_override):
        assert [found[f"k{i}"] for i in range(len(expected))] == expected
    assert load_config(NAMES, ["rollout.engine_args.x=12"]).rollout.engine_args["x"] == 12


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("{n_samples: 4, n_samples: 8}", r"^n_samples: given twice in the command line"),
        ("!!timestamp soon", "not valid YAML"),
        ("!!int ''", "not valid YAML"),
        ("{[1]: 2}", "not valid YAML"),
    ],
)
def test_an_override_is_read_as_a_file_is(value: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config(NAMES, [f"adapters.0.sampling={value}"])


def test_numbers_as_keys_are_those_of_an_override(tmp_path: Path) -> None:
    """A stage that a file and an override set is one."""
    stages = "{level: {0: {1: 1, 2: 2}, 10: {1: 5}}}"
    (tmp_path / "own.yaml").write_text(f"adapters: [{{sampling: {{difficulty: {stages}}}}}]\n")
    config = load_config([*NAMES, tmp_path / "own.yaml"], ["adapters.0.sampling.difficulty.level.0.2=7"])
    assert config.adapters[0].sampling.difficulty == {"level": {0: {"1": 1, "2": 7}, 10: {"1": 5}}}


@pytest.mark.parametrize("key", ["true", "null", "~", "1.5"])
def test_other_keys_than_texts_and_integers_are_refused(tmp_path: Path, key: str) -> None:
    (tmp_path / "own.yaml").write_text(f"rollout: {{engine_args: {{{key}: 1}}}}\n")
    with pytest.raises(ConfigError, match=r"^rollout\.engine_args"):
        load_config([*NAMES, tmp_path / "own.yaml"])


def test_a_parser_in_a_file_is_found_beside_the_configuration(tmp_path: Path) -> None:
    for parser, found in (("own.py:Own", f"{tmp_path}/own.py:Own"), ("hermes", "hermes")):
        (tmp_path / "own.py").write_text("")
        workflow = f"{{kind: agent, path: 'own.py:agent', tool_parser: '{parser}'}}"
        (tmp_path / "own.yaml").write_text(f"adapters: [{{workflow: {workflow}}}]\n")
        chosen = load_config([*NAMES, tmp_path / "own.yaml"]).adapters[0].workflow
        assert isinstance(chosen, WorkerWorkflowConfig)
        assert (chosen.path, chosen.tool_parser) == (f"{tmp_path}/own.py:agent", found)


@pytest.mark.parametrize(
    "override",
    [
        "model.path=''",
        "adapters.0.init_from=''",
        "adapters.0.task={kind: dataset, train: ''}",
        "adapters.0.task={kind: dataset, train: rows.jsonl, eval: ''}",
        "adapters.0.evals=[{name: hard, task: {kind: dataset, eval: ''}}]",
    ],
)
def test_an_empty_path_is_not_the_working_folder(override: str) -> None:
    with pytest.raises(ConfigError, match=r"(path|init_from|train|eval): is empty \(fix: name a file or folder"):
        load_config(NAMES, [override])


def test_a_recorded_set_still_trains_on_nothing() -> None:
    sets = "adapters.0.evals=[{name: hard, task: {kind: dataset, eval: rows.jsonl}}]"
    config = load_config(NAMES, [sets])
    assert load_config([config.model_dump(mode="json")]) == config
