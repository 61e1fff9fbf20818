"""Hub names, from the command line: a cache as huggingface_hub lays it out, and a hub on loopback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_lora.config.load import load_config
from areal_lora.config.recorded import missing_files, wanted
from areal_lora.errors import ConfigError
from areal_lora.launcher.run import resolve
from areal_lora.weight_sync.manifest import base_digest
from tests.support.cli.command import forked_python
from tests.support.launcher.fake_hub import FakeHub, HubModel
from tests.support.launcher.hub_cache import FIRST, NAME, SECOND, fill_cache, sharded, tiny_files
from tests.support.paths import EXAMPLES, ROOT, TINY_MODEL

HF = quote(str(Path(sys.executable).with_name("hf")))
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as running:
        yield running


def arguments(tmp_path: Path, *more: str, model: str = NAME) -> list[str]:
    """The roles' interpreters end at once, so a start is over as soon as the run folder is complete (code 70)."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    files = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]
    return [
        forked_python(),
        "-m",
        "areal_lora.launch",
        "--config",
        str(files[0]),
        "--config",
        str(files[1]),
        f"run.root={tmp_path / 'runs'}",
        f"rollout.python={program}",
        f"trainer.python={program}",
        f"model.path={model}",
        "adapters.gsm8k.task.n_train=64",
        *more,
    ]


def environment(cache: Path, hub: FakeHub | None, **more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    return {**kept, "HF_HUB_CACHE": str(cache), "HF_ENDPOINT": hub.url if hub else NOWHERE, **more}


def launch(
    tmp_path: Path, hub: FakeHub | None, *more: str, model: str = NAME, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments(tmp_path, *more, model=model),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env=environment(tmp_path / "cache", hub, **variables),
    )


def model_of(tmp_path: Path) -> dict[str, Any]:
    model: dict[str, Any] = json.loads((tmp_path / "runs" / "embedded" / "config.json").read_text())["model"]
    return model


def refused(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1), done
    assert all(word in done.stderr for word in words), done.stderr


# --- the cache ---------------------------------------------------------------------------


def test_a_cached_name_becomes_its_snapshot_folder_without_a_hub(tmp_path: Path) -> None:
    snapshot = fill_cache(tmp_path / "cache", tiny_files())
    done = launch(tmp_path, None)
    assert done.returncode == 70, done.stderr
    model = model_of(tmp_path)
    assert model == {
        "path": NAME,
        "revision": None,
        "dtype": "float32",
        "shared_memory": False,
        "commit": FIRST,
        "snapshot": str(snapshot),
    }
    assert f"Base model: {NAME} at {FIRST}, in {snapshot}" in done.stdout
    assert base_digest(model["snapshot"]) == base_digest(TINY_MODEL)


def test_hf_home_and_tags(tmp_path: Path) -> None:
    home = tmp_path / "home"
    fill_cache(home / "hub", tiny_files())
    tagged = fill_cache(home / "hub", tiny_files(), commit=SECOND, ref="v2")
    environment_ = environment(tmp_path, None, HF_HOME=str(home), HF_HUB_OFFLINE="1")
    del environment_["HF_HUB_CACHE"]
    command = arguments(tmp_path, "model.revision=v2")
    done = subprocess.run(command, env=environment_, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 70, done.stderr
    assert model_of(tmp_path)["snapshot"] == str(tagged)


def test_a_folder_wins_over_a_hub_name(tmp_path: Path) -> None:
    fill_cache(tmp_path / "cache", tiny_files())
    folder = tmp_path / "work" / NAME
    folder.mkdir(parents=True)
    for name, content in tiny_files().items():
        (folder / name).write_bytes(content)
    command = arguments(tmp_path)
    environment_ = environment(tmp_path / "cache", None)
    done = subprocess.run(
        command, env=environment_, cwd=tmp_path / "work", capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 70, done.stderr
    assert model_of(tmp_path) == {
        "path": str(folder),
        "revision": None,
        "dtype": "float32",
        "shared_memory": False,
        "commit": None,
        "snapshot": None,
    }
    with_revision = launch(tmp_path, None, "model.revision=v2", "run.name=other", model=str(folder))
    refused(with_revision, 64, "model.revision", "is a folder")


def test_a_folder_below_the_home_folder(tmp_path: Path) -> None:
    (tmp_path / "m").symlink_to(TINY_MODEL)
    done = launch(tmp_path, None, model="~/m", HOME=str(tmp_path))
    assert done.returncode == 70, done.stderr
    assert model_of(tmp_path)["path"] == str(tmp_path / "m")


@pytest.mark.parametrize("model", ["no/such/folder", "./tiny", "tiny", "/no/where"])
def test_what_is_neither_folder_nor_name_is_refused(model: str) -> None:
    config = load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_dense.yaml"], [f"model.path={model}"])
    with pytest.raises(ConfigError, match="it is not a hub name") as raised:
        resolve(config, None, online=True)
    assert raised.value.path == "model.path"
    assert repr(model) in raised.value.reason


def without_shard() -> dict[str, bytes]:
    return {name: content for name, content in sharded(tiny_files()).items() if "00002-of" not in name}


def test_a_partial_snapshot_is_not_taken_for_the_model(tmp_path: Path) -> None:
    fill_cache(tmp_path / "cache", without_shard())
    refused(launch(tmp_path, None), 69, NAME, "model-00002-of-00002.safetensors", NOWHERE)
    offline = launch(tmp_path, None, HF_HUB_OFFLINE="1")
    refused(offline, 69, "HF_HUB_OFFLINE is set")
    assert not (tmp_path / "runs" / "embedded").exists()


@pytest.mark.parametrize(
    ("left_out", "lacks"),
    [
        ("model-00001-of-00002.safetensors", "model-00001-of-00002.safetensors"),
        ("model.safetensors.index.json", "model.safetensors.index.json"),
        ("tokenizer.json", "tokenizer.json"),
        ("config.json", "config.json"),
        ("", ""),
    ],
)
def test_what_a_snapshot_lacks(tmp_path: Path, left_out: str, lacks: str) -> None:
    files = {name: content for name, content in sharded(tiny_files()).items() if name != left_out}
    snapshot = fill_cache(tmp_path, files)
    assert missing_files(snapshot) == [lacks] * bool(lacks)
    (snapshot / "tokenizer_config.json").unlink()
    for blob in (tmp_path / "models--some-lab--tiny-moe" / "blobs").iterdir():
        blob.unlink()
    assert "config.json" in missing_files(snapshot), "a link to a blob that is gone is no file"


# --- the hub -----------------------------------------------------------------------------

EXTRA = {
    "pytorch_model.bin": b"x" * 1000,
    "consolidated.00.pth": b"x",
    "consolidated.safetensors": b"x",
    "original/params.json": b"{}",
    "README.md": b"#",
    "modeling.py": b"",
}


def test_the_needed_files_are_downloaded_and_nothing_else(tmp_path: Path, hub: FakeHub) -> None:
    hub.models[NAME] = HubModel(commits={FIRST: {**sharded(tiny_files()), **EXTRA}}, refs={"main": FIRST})
    done = launch(tmp_path, hub)
    assert done.returncode == 70, done.stderr
    snapshot = Path(model_of(tmp_path)["snapshot"])
    assert sorted(hub.downloaded()) == sorted(wanted(sharded(tiny_files())))
    assert f"Downloading {NAME} (" in done.stdout
    assert "MB) from http://127.0.0.1" in done.stdout
    assert "Downloaded" in done.stdout
    assert AutoTokenizer.from_pretrained(snapshot).vocab_size == AutoTokenizer.from_pretrained(TINY_MODEL).vocab_size
    ours, theirs = (AutoModelForCausalLM.from_pretrained(p).state_dict() for p in (snapshot, TINY_MODEL))
    assert all((ours[key] == value).all() for key, value in theirs.items())
    hub.requests.clear()
    again = launch(tmp_path, hub)
    assert "Downloading" not in again.stdout
    assert hub.downloaded() == []


def test_a_partial_snapshot_is_completed(tmp_path: Path, hub: FakeHub) -> None:
    fill_cache(tmp_path / "cache", without_shard())
    hub.models[NAME] = HubModel(commits={FIRST: sharded(tiny_files())}, refs={"main": FIRST})
    done = launch(tmp_path, hub)
    assert done.returncode == 70, done.stderr
    assert hub.downloaded() == ["model-00002-of-00002.safetensors"]


@pytest.mark.parametrize(
    ("models", "more", "words"),
    [
        ({}, [], ["model.path", "no folder", "no model of this name", f"{HF} auth login"]),
        (
            {NAME: HubModel(commits={FIRST: tiny_files()}, refs={"main": FIRST}, gated=True)},
            [],
            ["is gated", "accept its terms", f"/{NAME}", "HF_TOKEN"],
        ),
        (
            {NAME: HubModel(commits={FIRST: tiny_files()}, refs={"main": FIRST})},
            ["model.revision=v9"],
            ["model.revision", "no revision 'v9'"],
        ),
        ({NAME: HubModel(commits={FIRST: {"README.md": b""}}, refs={"main": FIRST})}, [], ["no config.json"]),
        (
            {
                NAME: HubModel(
                    commits={FIRST: {k: v for k, v in tiny_files().items() if "safet" not in k} | EXTRA},
                    refs={"main": FIRST},
                )
            },
            [],
            ["no model.safetensors"],
        ),
    ],
    ids=["unknown", "gated", "revision", "config", "weights"],
)
def test_what_the_hub_refuses_is_one_line(
    tmp_path: Path, hub: FakeHub, models: dict[str, HubModel], more: list[str], words: list[str]
) -> None:
    hub.models = models
    refused(launch(tmp_path, hub, *more), 64, *words)
    assert not (tmp_path / "runs").exists()


def test_no_hub_at_all_is_one_line(tmp_path: Path) -> None:
    refused(launch(tmp_path, None), 69, NAME, NOWHERE, "no folder", "where a hub is reachable")


def test_a_gated_model_in_the_cache_is_used(tmp_path: Path, hub: FakeHub) -> None:
    fill_cache(tmp_path / "cache", tiny_files())
    hub.models[NAME] = HubModel(commits={}, refs={}, gated=True)
    assert launch(tmp_path, hub).returncode == 70


def test_ctrl_c_ends_a_download_and_the_same_command_takes_it_up(tmp_path: Path, hub: FakeHub) -> None:
    hub.models[NAME] = HubModel(commits={FIRST: tiny_files()}, refs={"main": FIRST})
    hub.stalled.add("model.safetensors")
    command = [sys.executable, *arguments(tmp_path)[1:]]  # no fork: the signal is for this process
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(tmp_path / "cache", hub), stdout=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 120
        while "model.safetensors" not in hub.downloaded():
            assert time.monotonic() < deadline, "the download has not begun"
            time.sleep(0.05)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert "the same command downloads the rest" in output
    hub.stalled.clear()
    done = launch(tmp_path, hub)
    assert done.returncode == 70, done.stderr
    assert missing_files(Path(model_of(tmp_path)["snapshot"])) == []


# --- resume ------------------------------------------------------------------------------


def two_commits() -> HubModel:
    changed = {**tiny_files(), "generation_config.json": b'{"max_length": 77}'}
    return HubModel(commits={FIRST: tiny_files(), SECOND: changed}, refs={"main": FIRST, "v1": FIRST})


def test_a_moved_branch_does_not_change_a_run(tmp_path: Path, hub: FakeHub) -> None:
    model = hub.models[NAME] = two_commits()
    assert launch(tmp_path, hub).returncode == 70
    model.refs["main"] = SECOND
    resumed = launch(tmp_path, hub)
    assert resumed.returncode == 70, resumed.stderr
    assert model_of(tmp_path)["commit"] == FIRST
    assert launch(tmp_path, hub, "model.revision=v1").returncode == 70, "another name of the same commit"
    moved = launch(tmp_path, hub, f"model.revision={SECOND}")
    assert moved.returncode == 64, moved
    assert all(word in moved.stderr for word in ("model.revision", FIRST, SECOND, "--fresh")), moved.stderr
    assert model_of(tmp_path)["commit"] == FIRST
    assert "model-" not in moved.stdout
    assert launch(tmp_path, hub, "run.name=other").returncode == 70
    other = json.loads((tmp_path / "runs" / "other" / "config.json").read_text())["model"]
    assert other["commit"] == SECOND, "a new run begins with what the branch is now"
    assert launch(tmp_path, hub, "--fresh").returncode == 70
    assert model_of(tmp_path)["commit"] == SECOND


def test_another_cache_folder_is_no_other_model(tmp_path: Path, hub: FakeHub) -> None:
    hub.models[NAME] = two_commits()
    assert launch(tmp_path, hub).returncode == 70
    elsewhere = str(tmp_path / "elsewhere")
    done = launch(tmp_path, hub, HF_HUB_CACHE=elsewhere)
    assert done.returncode == 70, done.stderr
    assert model_of(tmp_path)["snapshot"].startswith(elsewhere)


@pytest.mark.parametrize("mode", ["--dry-run", "--explain-resume"])
def test_looking_asks_no_hub(tmp_path: Path, hub: FakeHub, mode: str) -> None:
    hub.models["Qwen/Qwen3-30B-A3B"] = HubModel(commits={FIRST: tiny_files()}, refs={"main": FIRST})
    done = launch(tmp_path, hub, mode, model="Qwen/Qwen3-30B-A3B")
    assert done.returncode == 0, done.stderr
    assert "is downloaded when the run starts" in done.stderr
    assert hub.requests == []
    unknown = launch(tmp_path, hub, mode)
    refused(unknown, 64, "model.path", repr(NAME))
    fill_cache(tmp_path / "cache", without_shard())
    partial = launch(tmp_path, hub, mode)
    assert partial.returncode == 0, partial.stderr
    assert "is downloaded when the run starts" in partial.stderr
    assert hub.requests == []
