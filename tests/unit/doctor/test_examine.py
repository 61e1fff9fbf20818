"""What the doctor's canary and measurements run with."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_lora.config.load import load_config
from areal_lora.doctor import examine
from tests.support.paths import EXAMPLES


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_the_canary_has_the_engine_of_the_run(engine: str, tmp_path: Path) -> None:
    files = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]
    like = load_config(files, [f"trainer.engine={engine}"])
    assert examine.canary_config(tmp_path, like).trainer.engine == engine
    assert examine.TINY_MODEL.is_dir()


@pytest.mark.parametrize(("listed", "ranks"), [("4,6", ["0", "1"]), ("GPU-a", []), (None, ["0", "1"])])
def test_members_of_a_measurement_on_one_machine_have_a_device_each(
    listed: str | None, ranks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL refuses two members on one device."""
    config = load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe_one_node.yaml"], [f"run.root={tmp_path}"])
    started: list[str] = []

    def answer(command: list[str], timeout_s: float, **_: str) -> str:
        if "nccl" in command:
            started.extend(word.partition("=")[2] for word in command if word.startswith("AREAL_LORA_DEVICES="))
            return ""
        raise examine.probes.NoAnswer("none")

    monkeypatch.setattr(examine.probes, "answer_of", answer)
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    if listed is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    examine.examine(config, lambda line: None)
    assert sorted(started) == ranks
