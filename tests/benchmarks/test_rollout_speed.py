"""What ``benchmarks/rollout_speed.py`` makes of its figures; engines and servers are numbers written by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import rollout_speed
from rollout_speed import BASE, MERGED, NO_LORA, UNMERGED, VARIANTS

from areal_lora.checkpoint.adapter_io import load_peft
from tests.support.paths import TINY_MODEL

SPEEDS = {NO_LORA: [100.0, 200.0, 400.0], MERGED: [100.0, 220.0, 360.0], BASE: [80.0, 50.0, 100.0]}
SPEEDS[UNMERGED] = [40.0, 40.0, 40.0]


def test_smallest_middle_and_nearly_largest() -> None:
    assert rollout_speed.spread([3.0, 1.0, 2.0]) == (1.0, 2.0, 3.0)
    assert rollout_speed.spread([float(n) for n in range(200, -1, -1)]) == (0.0, 100.0, 198.0)
    assert rollout_speed.spread([7.0]) == (7.0, 7.0, 7.0)


def test_claims_are_medians_of_ratios_of_one_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Medians of the sides would give 220 / 200 = 1.1; a round that is slow for both sides counts like any other."""
    phases = [{"pack": 1.0, "ack": 5.0}, {"pack": 3.0, "ack": 4.0}, {"pack": 2.0, "ack": 9.0, "hold": 0.5}]
    published = {mode: {"nbytes": n, "phases": phases} for mode, n in (("unmerged", 2**20), ("merged", 3 * 2**20))}
    asked: list[int] = []

    def decode(adapter: Path, rounds: int) -> dict[str, list[float]]:
        assert load_peft(adapter)[1], "the adapter that engines get is a PEFT folder"
        asked.append(rounds)
        return SPEEDS

    def publishes(root: Path, rounds: int) -> dict[str, dict[str, Any]]:
        asked.append(rounds)
        return published

    monkeypatch.setattr(rollout_speed, "decode", decode)
    monkeypatch.setattr(rollout_speed, "publishes", publishes)
    monkeypatch.setattr(sys, "argv", ["rollout_speed.py", "--quick", "--json", str(tmp_path / "out.json")])
    rollout_speed.main()
    assert asked == [3, 3]
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["speeds"] == SPEEDS
    assert found["claims"] == pytest.approx(
        {
            "merged_vs_no_lora": 1.0,  # of 1.0, 1.1 and 0.9
            "merged_vs_unmerged": 5.5,  # of 2.5, 5.5 and 9.0
            "adapter_vs_no_lora_engine": 0.2,  # of 0.4, 0.2 and 0.1
            "adapter_vs_base_request": 0.5,  # of 0.5, 0.8 and 0.4
            **{f"{mode}_publish_pack_ms": 2.0 for mode in published},
            **{f"{mode}_publish_ack_ms": 5.0 for mode in published},
            **{f"{mode}_publish_hold_ms": 0.0 for mode in published},  # of 0.5 and two publishes without
            **{f"{mode}_publish_commit_ms": 0.0 for mode in published},
            "unmerged_publish_bytes": 2**20,
            "merged_publish_bytes": 3 * 2**20,
        }
    )
    printed = capsys.readouterr().out
    assert all(variant in printed for variant in VARIANTS)
    assert "merged publish: 3.00 MiB" in printed


def test_the_adapter_covers_every_linear_layer_of_the_tiny_model(tmp_path: Path) -> None:
    spec, tensors = load_peft(rollout_speed.make_adapter(tmp_path / "adapter"))
    assert spec.rank == rollout_speed.configuration().adapters[0].rank
    assert Path(rollout_speed.configuration().model.path) == TINY_MODEL
    modules = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors}
    assert modules == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
