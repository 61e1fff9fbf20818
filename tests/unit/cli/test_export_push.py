"""``areal-lora push`` against a stub of the hub."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load

from areal_lora.checkpoint.adapter_io import load_peft
from areal_lora.checkpoint.recover import pick_version
from areal_lora.cli.app import main
from areal_lora.obs.metrics.records import EvalRecord
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.run_folder.paths import RunFolder
from tests.support.checkpoint.trained_run import SPEC, make_run
from tests.support.cli.command import forked_python
from tests.support.cli.hub_stub import HubStub

FILES = ["README.md", "adapter_config.json", "adapter_model.safetensors"]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder, _ = make_run(tmp_path)
    writer = MetricsWriter(folder)
    writer.write(EvalRecord(version=3, step=3, accuracy=0.75, n=100, adapter=SPEC.name, name="held-out"))
    writer.write(EvalRecord(version=2, step=2, accuracy=0.5, n=100, adapter=SPEC.name, name="held-out"))
    writer.close()
    return folder


def push(hub: HubStub, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: huggingface_hub reads the address of the hub when it is imported."""
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_secret", "HF_HUB_DISABLE_XET": "1"}
    argv = [forked_python(), "-m", "areal_lora", "push", *arguments]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=150, check=False)


def test_the_adapter_and_a_card_are_sent_and_nothing_else(run: RunFolder, tmp_path: Path) -> None:
    with HubStub() as hub:
        done = push(hub, str(run), "me/math")
    assert done.returncode == 0, done.stderr
    assert sorted(hub.files) == FILES
    assert "gsm8k@v3 in http://" in done.stdout
    assert "private" in (hub.made[0].get("visibility"), *hub.made[0]), hub.made
    assert hub.messages == ["Adapter gsm8k@v3"]
    assert hub.tokens == {"Bearer hf_secret"}
    assert "hf_secret" not in done.stdout + done.stderr
    sent = tmp_path / "sent"
    sent.mkdir()
    for name, data in hub.files.items():
        (sent / name).write_bytes(data)
    spec, tensors = load_peft(sent)
    assert (spec.rank, spec.base_model, len(tensors)) == (SPEC.rank, "org/base", len(load(hub.files[FILES[2]])))
    card = hub.files["README.md"].decode()
    assert "base_model: org/base" in card
    assert "accuracy 0.750" in card
    assert "0.500" not in card, "that is of another version"
    assert str(tmp_path) not in b"".join(hub.files.values()).decode(errors="replace")


def test_what_the_hub_refuses_is_one_line(run: RunFolder) -> None:
    with HubStub(refuses=403) as hub:
        done = push(hub, str(run), "me/math")
    assert (done.returncode, hub.files) == (69, {})
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "did not take me/math" in line
    assert "hf_secret" not in done.stderr


def test_a_dry_run_lists_the_files(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(run), "me/math", "--version", "2", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[:3]] == FILES
    assert "accuracy 0.500" in printed
    assert "gsm8k@v2 would go to me/math; nothing was sent" in printed


def test_a_base_that_is_a_folder_needs_a_name(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(run), "math"]) == 64
    assert main(["push", str(run), "me/math", "--base", str(run.path)]) == 64
    assert "which other machines lack" in capsys.readouterr().err
    assert main(["push", str(run), "me/math", "--base", "org/other", "--dry-run"]) == 0
    assert "base_model: org/other" in capsys.readouterr().out


@pytest.mark.parametrize(("base", "revision"), [(None, "abc"), ("org/base", "abc"), ("org/other", None)])
def test_the_commit_of_the_runs_base_goes_with_that_base_alone(
    tmp_path: Path, base: str | None, revision: str | None
) -> None:
    chosen = replace(pick_version(*make_run(tmp_path), "2"), revision="abc")
    chosen.export(tmp_path / "out", base=base)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (base or "org/base", revision)
