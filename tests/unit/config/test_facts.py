"""What the guardrails are told about this machine and the model folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_lora.config.facts import Facts, gather_facts, probe_gpus
from areal_lora.config.load import load_config
from tests.support.launcher.hub_cache import FIRST, NAME, SECOND, fill_cache, tiny_files
from tests.support.paths import EXAMPLES

EMBEDDED = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]
DENSE = [EXAMPLES / "gsm8k_grpo_megatron_lora_dense.yaml"]


def test_model_folder_facts(tmp_path: Path) -> None:
    def facts(path: str, **found: str) -> Facts:
        config = load_config(EMBEDDED, [f"model.path={path}"])
        model = config.model.model_copy(update=found)
        return gather_facts(config.model_copy(update={"model": model}), runs_here=False)

    assert "no folder" in facts("some/where").model_problem
    (tmp_path / "m").mkdir()
    assert "no config.json" in facts(str(tmp_path / "m")).model_problem
    (tmp_path / "m" / "config.json").write_text("{")
    assert "cannot be read" in facts(str(tmp_path / "m")).model_problem
    known = facts("Qwen/Qwen3-8B")
    assert known.hf_config is not None
    assert not known.model_is_local
    whole = fill_cache(tmp_path, tiny_files())
    partial = fill_cache(tmp_path, {"config.json": b'{"model_type": "qwen3"}'}, commit=SECOND)
    cached = facts(NAME, snapshot=str(whole), commit=FIRST)
    assert cached.hf_config is not None
    assert (cached.hf_config["model_type"], cached.model_is_local) == ("qwen3_moe", True)
    begun = facts(NAME, snapshot=str(partial), commit=SECOND)
    assert (begun.hf_config, begun.model_is_local) == ({"model_type": "qwen3"}, False)


def test_visible_devices_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert gather_facts(load_config(DENSE), runs_here=True).devices == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gather_facts(load_config(DENSE), runs_here=True).devices == 0
    assert gather_facts(load_config(EMBEDDED), runs_here=True).devices is None


def test_an_address_that_this_machine_does_not_have_is_found() -> None:
    config = load_config(EMBEDDED, ["cluster.bind=192.0.2.77"])
    problem = gather_facts(config, runs_here=True).address_problem
    assert problem is not None
    assert "no address 192.0.2.77" in str(problem)
    assert gather_facts(config, runs_here=False).address_problem is None
    assert gather_facts(load_config(EMBEDDED), runs_here=True).address_problem is None


def test_gpus_are_those_that_nvidia_smi_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    config = load_config(EMBEDDED, ["cluster.device=cuda"])
    assert (probe_gpus(), gather_facts(config, runs_here=True).device_bytes) == ([], None)
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "NVIDIA H100, 80GB, 81559, 570.1"\necho "NVIDIA T4, 15360, 570.1"\n')
    program.chmod(0o755)
    assert [(gpu.name, gpu.memory_mib, gpu.driver) for gpu in probe_gpus()] == [
        ("NVIDIA H100, 80GB", 81559, "570.1"),
        ("NVIDIA T4", 15360, "570.1"),
    ]
    assert gather_facts(config, runs_here=True).device_bytes == 15360 * 2**20
    program.write_text('#!/bin/sh\necho "GRID, [N/A], 570.1"\n')
    assert probe_gpus()[0].memory_mib == 0
    assert gather_facts(config, runs_here=True).device_bytes is None, "its memory is not known"
