"""Presets: the documented table is the real one, every overlay is loaded and planned, records read back."""

from __future__ import annotations

import json
import re
from typing import get_args

import pytest
import torch
from pydantic import ValidationError

from areal_lora.algorithms.advantages import ADVANTAGES, Samples
from areal_lora.algorithms.losses import LOSSES
from areal_lora.config.load import load_config
from areal_lora.config.rules.algorithm_rules import UNGROUPED
from areal_lora.config.sections.adapter import PRESETS, AlgorithmConfig, Kind, SamplingConfig
from areal_lora.launch import main
from tests.support.paths import EXAMPLES, ROOT

BASE = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]
PAGE = (ROOT / "docs" / "en" / "algorithms.md").read_text(encoding="utf-8")
KINDS = get_args(Kind)


def _rows(title: str) -> dict[str, list[str]]:
    """Cells of the table below a heading, by the name in the first one."""
    below = PAGE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in below.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {row[0].strip("` "): row[1:] for row in cells}


def _value(text: str) -> object:
    return {"true": True, "false": False}.get(text) or (float(text) if re.fullmatch(r"[\d.e-]+", text) else text)


def test_the_documented_presets_are_the_real_ones() -> None:
    documented = {
        kind: {key: _value(value) for key, value in re.findall(r"`(\w+): ([^`]+)`", sets)}
        for kind, (sets, *_) in _rows("Presets").items()
    }
    assert documented == {kind: dict(row) for kind, row in PRESETS.items()}


def test_every_preset_names_its_paper() -> None:
    for kind, cells in _rows("Presets").items():
        assert re.search(r"arXiv \d{4}\.\d{5}|, 20\d\d", cells[-1]), kind


@pytest.mark.parametrize(("title", "table"), [("Advantages", ADVANTAGES), ("Objective", LOSSES)])
def test_every_row_of_a_table_is_documented(title: str, table: dict[str, object]) -> None:
    assert set(_rows(title)) == set(table)


def test_every_function_names_its_source() -> None:
    for function in (*(row.of for row in ADVANTAGES.values()), *LOSSES.values()):
        assert re.search(r"arXiv \d{4}\.\d{5}|Williams", function.__doc__ or ""), function


def test_the_rule_about_groups_knows_which_advantages_compare_answers() -> None:
    """What compares answers gives a group of one 0."""
    rewards, baselines = torch.tensor([1.0, 0.0]).double(), torch.tensor([0.25, 0.5]).double()
    alone = Samples(
        rewards=rewards, group_ids=torch.arange(2), lengths=torch.tensor([3.0, 5.0]).double(), baselines=baselines
    )
    assert {name for name, row in ADVANTAGES.items() if row.of(alone).any()} == UNGROUPED - {"none"}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "grpo"])
def test_the_overlay_of_an_algorithm_is_one_value_apart_and_can_be_planned(kind, capsys, tmp_path) -> None:
    files = [*BASE, EXAMPLES / f"{kind}.yaml"]
    config, base = load_config(files), load_config(BASE)
    own, plain = config.adapters[0], base.adapters[0]
    assert own.algorithm.kind == kind
    same = own.model_copy(
        update={key: getattr(plain, key) for key in ("algorithm", "minibatches", "reward", "reward_weights")}
    )
    assert same == plain, "nothing else differs"
    arguments = [argument for file in files for argument in ("--config", str(file))]
    assert main([*arguments, f"run.root={tmp_path}", "adapters.gsm8k.task.n_train=64", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert f"Algorithm of gsm8k: {kind} sets" in printed
    for key, value in PRESETS[kind].items():
        assert f"{key}={json.dumps(value).strip(chr(34))}" in printed


def test_a_recorded_configuration_reads_back_with_every_value() -> None:
    for kind in KINDS:
        chosen = AlgorithmConfig.model_validate({"kind": kind, "kl_coef": 0.5})
        assert AlgorithmConfig.model_validate_json(chosen.model_dump_json()) == chosen
        assert chosen.changed() == {"kl_coef": 0.5}


def test_what_ends_an_answer_has_the_bounds_of_the_servers() -> None:
    sizes = {"prompts_per_step": 1, "n_samples": 2, "max_new_tokens": 4}
    assert len(SamplingConfig.model_validate(sizes | {"stop": ["a" * 256] * 64}).stop) == 64
    for stop in (["a"] * 65, ["a" * 257]):
        with pytest.raises(ValidationError, match="stop"):
            SamplingConfig.model_validate(sizes | {"stop": stop})
