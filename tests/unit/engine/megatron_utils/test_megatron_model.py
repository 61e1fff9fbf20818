"""Token dispatchers: what is not installed is refused, and a flex one computes what the default one does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from areal_lora.config.models import ModelConfig, TrainerConfig
from areal_lora.engine.common.arena import ParallelLayout
from areal_lora.errors import ConfigError
from tests.support.distributed.engine_ranks import Case
from tests.support.distributed.flex_ranks import both
from tests.support.distributed.oracle import make_model, random_adapter
from tests.support.distributed.spawn import run_ranks
from tests.support.lazy import Lazy

megatron_model = Lazy("areal_lora.engine.megatron_utils.megatron_model")


@pytest.mark.usefixtures("cpu_patches")
@pytest.mark.parametrize("dispatcher", ["deepep", "hybridep"])
def test_a_dispatcher_without_its_kernels_is_refused(dispatcher: str) -> None:
    trainer = TrainerConfig(world_size=2, ep=2, moe_dispatcher=dispatcher)
    layout = ParallelLayout.of(trainer, layers=2, experts=8)
    with pytest.raises(ConfigError, match=r"moe_dispatcher.*cannot import deep_ep\..*install DeepEP"):
        megatron_model.build_model(ModelConfig(path=""), trainer, layout, {}, torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("ep2", 2, ep=2),
        Case("ep2_recompute", 2, ep=2, recompute="full"),
        Case("pp2_ep2_virtual", 4, ep=2, pp=2, stages=(1, 1, 1, 1)),
        Case("ep2_etp2_shared", 4, kind="moe+shared", ep=2, etp=2),
    ],
    ids=lambda case: case.name,
)
def test_a_flex_dispatcher_computes_what_the_default_one_does(case: Case, tmp_path: Path) -> None:
    """Over a stand-in for its kernels; float32, 1e-5 of a tensor's norm."""
    adapter = {name: values.numpy() for name, values in random_adapter(case.kind, 9).items()}
    ranks = run_ranks(both, case.world, tmp_path, (make_model(tmp_path, "moe"), case, adapter), timeout_s=200.0)
    for default, flex in ranks:
        assert default.keys() == flex.keys()
        for name, wanted in default.items():
            assert np.linalg.norm(flex[name] - wanted) <= 1e-5 * np.linalg.norm(wanted), name
