"""A version of a run as a PEFT folder, from checkpoints of two ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from areal_lora.checkpoint.adapter_io import load_peft
from areal_lora.checkpoint.recover import aliases_of, pick_version
from areal_lora.checkpoint.state import Disk
from areal_lora.config.models import Config, TrainerConfig
from areal_lora.engine.common.arena import ParallelLayout, ShardedModel
from areal_lora.engine.common.transfer_plan import wire_layout
from areal_lora.errors import CheckpointError, ConfigError
from areal_lora.families.shape import ModelShape, read_hf_config
from areal_lora.obs.metrics.records import EvalRecord, ResumeRecord
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import ExpertLayout
from tests.support.checkpoint.helpers import tensors_of
from tests.support.checkpoint.trained_run import SPEC, adapter_layout, make_run, state_of
from tests.support.paths import TINY_MODEL


@pytest.fixture
def run(tmp_path: Path) -> tuple[RunFolder, Config]:
    return make_run(tmp_path)


def test_the_folder_has_every_tensor_of_all_ranks_under_all_its_names(
    run: tuple[RunFolder, Config], tmp_path: Path
) -> None:
    chosen = pick_version(*run, "v2")
    chosen.export(tmp_path / "out")
    spec, tensors = load_peft(tmp_path / "out")
    assert (spec, str(chosen.ref)) == (SPEC, "gsm8k@v2")
    want = {n: torch.from_numpy(t) for rank in (0, 1) for n, t in tensors_of(state_of(2, rank))["weight"].items()}
    aliases = adapter_layout().aliases
    assert len(aliases) > 10, "shared tensors are what this is about"
    assert tensors.keys() == want.keys() | aliases.keys()
    assert all(torch.equal(tensor, want[aliases.get(name, name)]) for name, tensor in tensors.items())
    assert len(load_file(tmp_path / "out" / "adapter_model.safetensors")) == len(tensors)


@pytest.mark.parametrize("experts", list(ExpertLayout))
def test_shared_names_are_those_of_the_engine(experts: ExpertLayout) -> None:
    shape = ModelShape.from_hf(read_hf_config(TINY_MODEL))
    spec = replace(SPEC, expert_layout=experts)
    parallel = ParallelLayout.of(TrainerConfig(world_size=1), layers=shape.layers, experts=shape.experts)
    engine = wire_layout(ShardedModel(shape=shape, layout=parallel), spec, "float32")
    assert aliases_of(shape, spec) == engine.aliases


def test_a_version_has_a_number_or_a_word(run: tuple[RunFolder, Config]) -> None:
    assert [pick_version(*run, text).ref.version for text in ("newest", "best", "2", "v1")] == [3, 1, 2, 1]
    with pytest.raises(ConfigError, match="kept versions: v1, v2, v3"):
        pick_version(*run, "7")
    with pytest.raises(ConfigError, match="--version base: the base has no adapter"):
        pick_version(*run, "base")
    with pytest.raises(ConfigError, match="names no version"):
        pick_version(*run, "last")


def test_the_best_version_is_found_among_the_recorded_evaluations_too(run: tuple[RunFolder, Config]) -> None:
    """The newest checkpoint has none of its own version: that is evaluated after it is written."""
    writer = MetricsWriter(run[0])

    def recorded(version: int, accuracy: float, adapter: str = SPEC.name, order: int = 0) -> int:
        figures = {"accuracy": accuracy, "n": 8, "name": f"set {order}", "order": order}
        writer.write(EvalRecord(adapter=adapter, version=version, step=version, **figures))  # type: ignore[arg-type]
        return pick_version(*run, "best").ref.version

    assert recorded(2, 0.9, adapter="other") == 1
    assert recorded(2, 0.9, order=1) == 1, "a set that is not the first"
    assert recorded(9, 0.9) == 1, "a version beyond the newest checkpoint"
    assert recorded(3, 0.75) == 3
    writer.write(ResumeRecord(adapter=SPEC.name, version=2, time_s=1.0))
    assert recorded(0, 0.9) == 1, "v3 is another one since the resume, and v0 is not kept"
    assert recorded(3, 0.6) == 3


def test_a_damaged_checkpoint_is_refused_and_the_newest_whole_one_is_used(run: tuple[RunFolder, Config]) -> None:
    folder, config = run
    file = folder.adapter_checkpoints("gsm8k") / "v000003" / "rank-0000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    Disk().remove(file)
    file.write_bytes(content)
    assert pick_version(folder, config).ref.version == 2
    with pytest.raises(CheckpointError, match="damaged"):
        pick_version(folder, config, "3")


def test_one_of_several_adapters_is_named(run: tuple[RunFolder, Config]) -> None:
    folder, config = run
    [gsm8k] = config.adapters
    several = config.model_copy(update={"adapters": [gsm8k.model_copy(update={"name": "other"}), gsm8k]})
    assert str(pick_version(folder, several, "best", "gsm8k").ref) == "gsm8k@v1"
    with pytest.raises(ConfigError, match="the run has several: other, gsm8k"):
        pick_version(folder, several)
    with pytest.raises(ConfigError, match="no adapter 'none'; it has other, gsm8k"):
        pick_version(folder, several, "newest", "none")
    with pytest.raises(ConfigError, match="holds no whole checkpoint"):
        pick_version(folder, several, "newest", "other")
