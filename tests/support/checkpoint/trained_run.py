"""A run folder with checkpoints of three versions, written by two ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from areal_lora.checkpoint.checkpoint_store import Snapshot
from areal_lora.checkpoint.state import PARTS, AdapterState, Evaluation
from areal_lora.config.load import load_config
from areal_lora.config.models import Config, TrainerConfig
from areal_lora.config.recorded import write_config
from areal_lora.engine.common.arena import ParallelLayout, ShardedModel
from areal_lora.engine.common.transfer_plan import wire_layout
from areal_lora.families.shape import ModelShape, read_hf_config
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterRef, AdapterSpec, ExpertLayout
from areal_lora.weight_sync.layout import AdapterLayout
from tests.support.checkpoint.helpers import on_ranks, snapshot_of, stores
from tests.support.paths import EXAMPLES, TINY_MODEL

SPEC = AdapterSpec(
    name="gsm8k",
    base_model="org/base",
    rank=2,
    alpha=4.0,
    target_modules=("linear_qkv", "linear_fc1"),
    expert_layout=ExpertLayout.SHARED,
)
EVALUATIONS = {1: Evaluation(accuracy=0.5, reward_mean=0.5), 2: Evaluation(accuracy=0.25, reward_mean=0.9)}


def adapter_layout() -> AdapterLayout:
    """Of two ranks, as the engine makes it."""
    shape = ModelShape.from_hf(read_hf_config(TINY_MODEL))
    sizes = TrainerConfig(world_size=2, pp=2)
    parallel = ParallelLayout.of(sizes, layers=shape.layers, experts=shape.experts)
    return wire_layout(ShardedModel(shape=shape, layout=parallel), SPEC, "float32")


def state_of(version: int, rank: int) -> AdapterState:
    shapes = {t.name: t.shape for shard in adapter_layout().shards if shard.source == rank for t in shard.tensors}
    size = sum(int(np.prod(shape)) for shape in shapes.values())
    random = np.random.default_rng([version, rank])
    parts = {part: random.standard_normal(size).astype(np.float32) for part in PARTS}
    return AdapterState(step=version, shapes=shapes, parts=parts)


def make_run(tmp_path: Path, name: str = SPEC.name) -> tuple[RunFolder, Config]:
    """``a run`` below ``tmp_path``; v1 has the best evaluation, v3 is the newest. The adapter is called ``name``."""
    folder = RunFolder(tmp_path / "a run")
    folder.path.mkdir()
    config = load_config(
        [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"], [f"run.root={tmp_path}"]
    )
    write_config(folder, config)
    made = stores(folder.path)
    for version in (1, 2, 3):

        def write(rank: int, version: int = version) -> None:
            plain = snapshot_of(version, rank, EVALUATIONS)
            made[rank].write(
                Snapshot(
                    ref=AdapterRef(name=name, version=version),
                    state=state_of(version, rank),
                    # With tensors of the same names, as a frozen reference has.
                    companions={"reference": state_of(version + 100, rank)},
                    random=plain.random,
                    manifest=msgspec.structs.replace(plain.manifest, spec=replace(SPEC, name=name)),
                )
            )

        assert on_ranks(write) == [None, None]
    return folder, config
