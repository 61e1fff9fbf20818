"""What a start finds after every kind of damage, and what it says about it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_lora.checkpoint.checkpoint_store import versions_in
from areal_lora.checkpoint.recover import check_compatible, check_usable, explain, find, tidy
from areal_lora.checkpoint.state import Disk
from areal_lora.config.load import load_config
from areal_lora.config.models import AdapterConfig
from areal_lora.errors import CheckpointError, ConfigError
from areal_lora.obs.metrics.records import StepRecord
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import ExpertLayout
from tests.support.checkpoint.helpers import SPEC, stores, write, written
from tests.support.paths import EXAMPLES

CONFIG = load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"])
FILE = "rank-0001.safetensors"


def flip(path: Path, seed: int) -> None:
    data = bytearray(path.read_bytes())
    data[random.Random(seed).randrange(len(data))] ^= 0x10
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "torn": (lambda f: (f / FILE).write_bytes((f / FILE).read_bytes()[:-9]), f"{FILE} is torn: "),
    "missing": (lambda f: (f / FILE).unlink(), f"{FILE} is missing"),
    "flipped": (lambda f: flip(f / FILE, 1), f"{FILE} is damaged"),
    "flipped header": (lambda f: (f / FILE).write_bytes(b"\xff" + (f / FILE).read_bytes()[1:]), f"{FILE} is damaged"),
    "deleted": (shutil.rmtree, "its folder is missing"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
    "torn manifest": (lambda f: (f / "manifest.json").write_bytes(b'{"blake2b":"'), "the manifest cannot be read"),
    "flipped manifest": (lambda f: flip(f / "manifest.json", 2), "the manifest "),
    "empty": (lambda f: shutil.rmtree(f) or f.mkdir(), "manifest.json is missing"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_broken_newest_one_is_named_and_the_one_before_is_used(tmp_path: Path, kind: str) -> None:
    written(tmp_path, 0, 1, 2)
    root = RunFolder(tmp_path).adapter_checkpoints(SPEC.name)
    damage, reason = DAMAGE[kind]
    damage(root / "v000002")
    plan = find(RunFolder(tmp_path), SPEC.name)
    assert plan.newest is not None
    assert (plan.ref.version, plan.newest.manifest.ledger) == (1, b"ledger 1")
    assert [(b.path, reason in b.reason) for b in plan.broken] == [(root / "v000002", True)], plan.broken
    assert list(plan.lines()) == [
        f"checkpoint {root / 'v000002'} cannot be used: {plan.broken[0].reason}; {root / 'v000001'} is used instead"
    ]
    tidy([plan], Disk())
    assert versions_in(root) == [0, 1]
    assert (root / "broken-v000002").is_dir() == (kind != "deleted")
    assert write(stores(tmp_path), 2) == [None, None]
    assert (find(RunFolder(tmp_path), SPEC.name).ref.version, find(RunFolder(tmp_path), SPEC.name).broken) == (2, ())


def test_two_broken_ones_in_a_row_are_both_named(tmp_path: Path) -> None:
    written(tmp_path, 0, 1, 2)
    root = RunFolder(tmp_path).adapter_checkpoints(SPEC.name)
    flip(root / "v000001" / FILE, 3)
    shutil.rmtree(root / "v000002")
    plan = find(RunFolder(tmp_path), SPEC.name)
    assert [b.path.name for b in plan.broken] == ["v000002", "v000001"]
    assert plan.ref.version == 0


def test_a_manifest_of_another_version_is_not_believed(tmp_path: Path) -> None:
    written(tmp_path, 0, 1)
    root = RunFolder(tmp_path).adapter_checkpoints(SPEC.name)
    (root / "v000001").rename(root / "v000007")
    plan = find(RunFolder(tmp_path), SPEC.name)
    assert plan.ref.version == 0
    assert "manifest is of math@v1" in plan.broken[0].reason


def test_if_none_is_left_the_start_fails_and_names_them(tmp_path: Path) -> None:
    written(tmp_path, 0, 1)
    root = RunFolder(tmp_path).adapter_checkpoints(SPEC.name)
    for folder in ("v000000", "v000001"):
        (root / folder / FILE).unlink()
    plan = find(RunFolder(tmp_path), SPEC.name)
    with pytest.raises(CheckpointError, match=r"v000001: .* missing; .*v000000: .* missing .*--fresh"):
        check_usable([plan])
    for folder in ("v000000", "v000001"):
        shutil.rmtree(root / folder)
    with pytest.raises(CheckpointError, match="v000001: it was written and its folder is missing"):
        check_usable([find(RunFolder(tmp_path), SPEC.name)])


def test_nothing_was_ever_written(tmp_path: Path) -> None:
    plan = find(RunFolder(tmp_path), SPEC.name)
    check_usable([plan])
    assert (plan.newest, plan.broken) == (None, ())
    assert plan.ref.version == 0


@pytest.mark.parametrize("rest", ["folder deleted", "adapter deleted", "never written"])
def test_steps_without_any_checkpoint_are_never_taken_again_in_silence(tmp_path: Path, rest: str) -> None:
    root = RunFolder(tmp_path).adapter_checkpoints(SPEC.name)
    with MetricsWriter(RunFolder(tmp_path)) as metrics:
        for step in range(3):
            metrics.write(StepRecord(adapter=SPEC.name, step=step, version=step, time_s=1.0))
        metrics.write(StepRecord(adapter="other", step=7, version=7, time_s=1.0))
    if rest != "never written":
        written(tmp_path, 0, 1)
        find(RunFolder(tmp_path), SPEC.name)
        shutil.rmtree(root if rest == "adapter deleted" else root.parent)
    plan = find(RunFolder(tmp_path), SPEC.name)
    text = rf"{root}: metrics.jsonl has 3 steps of it and there is no checkpoint .*--fresh"
    with pytest.raises(CheckpointError, match=text):
        check_usable([plan])
    assert find(RunFolder(tmp_path), "third").broken == (), "an adapter that has made no step begins"


def test_what_a_crash_left_half_written_is_removed(tmp_path: Path) -> None:
    written(tmp_path, 0)
    root = RunFolder(tmp_path).adapter_checkpoints(SPEC.name)
    (root / ".v000001.0a1b2c3d").mkdir()
    (root / ".v000001.0a1b2c3d" / FILE).write_bytes(b"half")
    (root / ".newest.0a1b2c3d").write_text("")
    plan = find(RunFolder(tmp_path), SPEC.name)
    assert (plan.ref.version, len(plan.leftovers), plan.broken) == (0, 2, ())
    tidy([plan], Disk())
    assert sorted(p.name for p in root.iterdir()) == ["newest", "v000000"]


def adapter_like(**changes: object) -> AdapterConfig:
    fields: dict[str, object] = {
        "name": SPEC.name,
        "rank": SPEC.rank,
        "alpha": SPEC.alpha,
        "target_modules": list(SPEC.target_modules),
    }
    return CONFIG.adapters[0].model_copy(update=fields | changes)


@pytest.mark.parametrize(
    ("changes", "path", "reason"),
    [
        ({"rank": 4}, "adapters.0.rank", "it is 4, but"),
        ({"alpha": 8.0}, "adapters.0.alpha", "trained with 4.0"),
        ({"target_modules": ["linear_qkv"]}, "adapters.0.target_modules", "linear_fc1"),
        ({"expert_layout": ExpertLayout.SHARED}, "adapters.0.expert_layout", "it is shared"),
        ({}, "model.path", "another base model"),
    ],
)
def test_another_adapter_or_base_is_refused(tmp_path: Path, changes: dict[str, object], path: str, reason: str) -> None:
    written(tmp_path, 0)
    found = find(RunFolder(tmp_path), SPEC.name).newest
    assert found is not None
    with pytest.raises(ConfigError) as caught:
        check_compatible(found, adapter_like(**changes), 0, "other" if path == "model.path" else "base")
    assert caught.value.path == path
    assert reason in caught.value.reason
    assert "--fresh" in caught.value.fix


def test_other_spellings_and_settings_are_fine(tmp_path: Path) -> None:
    written(tmp_path, 0)
    found = find(RunFolder(tmp_path), SPEC.name).newest
    assert found is not None
    changed = adapter_like(target_modules=list(reversed(SPEC.target_modules)), minibatches=2)
    check_compatible(found, changed, 0, "base")


def test_checkpoints_of_a_name_that_is_gone_are_not_ignored(tmp_path: Path) -> None:
    written(tmp_path, 0)
    renamed = CONFIG.model_copy(update={"adapters": [adapter_like(name="algebra")]})
    with pytest.raises(ConfigError, match="holds checkpoints of 'math'"):
        explain(RunFolder(tmp_path), renamed)
