"""``areal-lora merge`` of a run and of an adapter folder."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal_lora.checkpoint.recover import pick_version
from areal_lora.cli.app import main
from tests.support.checkpoint.trained_run import make_run
from tests.support.families.tiny_families import save
from tests.support.lazy import Lazy
from tests.support.paths import TINY_MODEL

peft = Lazy("peft")


def test_a_run_and_its_export_merge_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, config = make_run(tmp_path)
    assert main(["merge", str(run), str(tmp_path / "of run"), "--version", "v2"]) == 0
    printed = capsys.readouterr().out
    assert "gsm8k@v2 and the base " in printed
    assert "; the base is not changed" in printed
    assert "% of the adapter survives" in printed
    chosen = pick_version(run, config, "2")
    chosen.export(tmp_path / "adapter")
    arguments = ["merge", str(tmp_path / "adapter"), str(tmp_path / "of adapter")]
    assert main(arguments) == 64
    assert "org/base: its base model is not on this machine" in capsys.readouterr().err
    assert main([*arguments, "--base", str(TINY_MODEL), "--dtype", "float32"]) == 0
    base, first, second = (
        load_file(folder / "model.safetensors") for folder in (TINY_MODEL, tmp_path / "of run", tmp_path / "of adapter")
    )
    assert base.keys() == first.keys() == second.keys()
    scaling, tensors = 2.0, chosen.tensors()
    for name, weight in second.items():
        module = name.removesuffix(".weight")
        want = base[name].double()
        if f"{module}.lora_A.weight" in tensors:
            a, b = (tensors[f"{module}.lora_{side}.weight"].double() for side in "AB")
            want = want + scaling * b @ a
        assert torch.allclose(weight.double(), want, atol=1e-4)
        assert torch.equal(first[name], weight.to(base[name].dtype))
    assert (tmp_path / "of run" / "tokenizer.json").read_bytes() == (TINY_MODEL / "tokenizer.json").read_bytes()


def test_an_adapter_is_merged_into_the_revision_of_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two commits of the base are in the cache; main is the other one."""
    runs, cache = make_run(tmp_path), tmp_path / "cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    for commit in ("a" * 40, "b" * 40):
        shutil.copytree(TINY_MODEL, cache / "models--org--base" / "snapshots" / commit)
    refs = cache / "models--org--base" / "refs"
    refs.mkdir()
    (refs / "main").write_text("b" * 40)
    for name, revision, at in (("1", "a" * 40, "a"), ("2", None, "b"), ("3", "c" * 40, "")):
        replace(pick_version(*runs, "2"), revision=revision).export(tmp_path / name)
        code = main(["merge", str(tmp_path / name), str(tmp_path / f"out {name}")])
        said = capsys.readouterr()
        assert code == (0 if at else 64)
        assert f"snapshots/{at * 40} are merged" in said.out if at else f"org/base at revision {revision}" in said.err


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge", str(tmp_path / "x"), str(tmp_path / "out")]) == 64
    assert main(["merge", str(tmp_path), str(tmp_path / "out"), "--dtype", "int4"]) == 64
    assert "it is no type of weights" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")
def test_experts_that_peft_holds_as_one_parameter(tmp_path: Path) -> None:
    base, adapter = save("qwen3_moe", tmp_path / "base"), tmp_path / "adapter"
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=names, init_lora_weights=False)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(adapter)
    assert main(["merge", str(adapter), str(tmp_path / "out")]) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "out"))
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        name for name in before if ".experts." in name
    }
