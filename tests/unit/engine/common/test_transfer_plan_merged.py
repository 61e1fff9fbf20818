"""The layout of merged weights, and one rank's share of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from areal_lora.algorithms.merging import CastLoss
from areal_lora.config.models import ModelConfig
from areal_lora.engine.base import DTYPES
from areal_lora.engine.common.adapter_engine import AdapterEngine
from areal_lora.engine.common.model_folder import ModelFolder
from areal_lora.engine.common.transfer_plan import MergedShard, merged_layout
from areal_lora.errors import UnknownTensorError
from areal_lora.types import AdapterSpec
from areal_lora.weight_sync.layout import Payload, make_layout

SPEC = AdapterSpec(name="a", base_model="b", rank=2, alpha=6.0, target_modules=("linear_fc1",))
M = "model.layers.0.mlp"
SHAPES = {f"{M}.gate_proj.weight": (5, 4), f"{M}.up_proj.weight": (5, 4), f"{M}.down_proj.weight": (4, 5)}
OWNED = {
    0: [(f"{M}.gate_proj.lora_A.weight", (2, 4)), (f"{M}.gate_proj.lora_B.weight", (5, 2))],
    1: [(f"{M}.down_proj.lora_A.weight", (2, 5)), (f"{M}.down_proj.lora_B.weight", (4, 2))],
}
SHARED = {
    f"{M}.up_proj.lora_A.weight": f"{M}.gate_proj.lora_A.weight",
    f"{M}.up_proj.lora_B.weight": f"{M}.gate_proj.lora_B.weight",
}
ADAPTER = make_layout(SPEC, "float32", OWNED, SHARED)


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randn(shape, generator=generator) for owned in OWNED.values() for n, shape in owned}


@pytest.fixture
def base(tmp_path: Path) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    made = {n: torch.randn(shape, generator=generator) for n, shape in SHAPES.items()}
    save_file(made, tmp_path / "model.safetensors")
    return made


def test_a_weight_goes_where_its_lora_b_goes_once_per_module() -> None:
    layout = merged_layout(ADAPTER, "bfloat16")
    assert layout.payload is Payload.MERGED
    assert {s.source: [(t.name, t.shape) for t in s.tensors] for s in layout.shards} == {
        0: list(SHAPES.items())[:2],
        1: list(SHAPES.items())[2:],
    }
    assert layout.nbytes == 2 * 60
    assert layout.aliases == {}
    assert layout.digest != merged_layout(ADAPTER, "float32").digest


def test_a_weight_whose_lora_b_experts_share_goes_where_its_lora_a_goes() -> None:
    experts = [f"{M}.experts.{e}" for e in range(2)]
    outer = make_layout(
        SPEC,
        "float32",
        {
            0: [
                (f"{experts[0]}.gate_proj.lora_A.weight", (2, 4)),
                (f"{experts[0]}.gate_proj.lora_B.weight", (5, 2)),
                (f"{experts[0]}.down_proj.lora_A.weight", (2, 5)),
                (f"{experts[0]}.down_proj.lora_B.weight", (4, 2)),
            ],
            1: [(f"{experts[1]}.gate_proj.lora_B.weight", (5, 2)), (f"{experts[1]}.down_proj.lora_A.weight", (2, 5))],
        },
        {
            f"{experts[1]}.gate_proj.lora_A.weight": f"{experts[0]}.gate_proj.lora_A.weight",
            f"{experts[1]}.down_proj.lora_B.weight": f"{experts[0]}.down_proj.lora_B.weight",
        },
    )
    assert {s.source: [(t.name, t.shape) for t in s.tensors] for s in merged_layout(outer, "float32").shards} == {
        e: [(f"{experts[e]}.gate_proj.weight", (5, 4)), (f"{experts[e]}.down_proj.weight", (4, 5))] for e in range(2)
    }


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_share_of_a_rank(tmp_path: Path, base: dict[str, torch.Tensor], held: torch.dtype, dtype: str) -> None:
    layout, given = merged_layout(ADAPTER, dtype), tensors()
    wire = DTYPES[dtype]
    for rank in (0, 1, 2):
        shard = MergedShard(ModelFolder.at(str(tmp_path)), ADAPTER, rank, held)
        mine = next((s for s in layout.shards if s.source == rank), None)
        flat, loss = torch.zeros(mine.nbytes if mine else 0, dtype=torch.uint8), CastLoss(dtype=wire)
        assert list(shard.fill(given, flat, loss)) == list(range(1, 1 + len(mine.tensors if mine else ())))
        for t in mine.tensors if mine else ():
            got = flat[t.offset :][: 20 * wire.itemsize].view(wire).view(t.shape)
            name = t.name.replace("up_proj", "gate_proj").removesuffix(".weight")
            a, b = given[f"{name}.lora_A.weight"], given[f"{name}.lora_B.weight"]
            want = base[t.name].to(held).double() + SPEC.scale_of(name) * b.double() @ a.double()
            error = 1e-5 if wire is torch.float32 else 2**-8 * float(want.abs().max())
            assert float((got.double() - want).abs().max()) < error
        assert (loss.elements > 0) == (mine is not None)


class OnMeta(CastLoss):
    """Keeps where the weights and deltas of a rank on an accelerator are; meta tensors have no numbers to count."""

    def add(self, base: torch.Tensor, delta: torch.Tensor) -> None:
        self.elements += 1
        assert (base.device.type, base.dtype) == ("meta", torch.bfloat16)
        assert (delta.device.type, delta.dtype, delta.shape) == ("meta", torch.float32, base.shape)


@pytest.mark.usefixtures("base")
def test_weights_are_merged_on_the_device_of_the_rank(tmp_path: Path) -> None:
    """Only what is complete returns to the host, which has no numbers of a meta tensor."""
    packer = SimpleNamespace(tensors=lambda weights, groups: tensors().items())
    memory = SimpleNamespace(
        weights=None,
        shared_tensors=dict,
        layout=lambda dtype, *, spread: ADAPTER,
        packer=lambda dtype, *, spread: packer,
    )
    engine: Any = SimpleNamespace(
        rank=0,
        device=torch.device("meta"),
        _merged={},
        _base=ModelConfig(path=str(tmp_path), dtype="bfloat16"),
        _model=SimpleNamespace(groups={}),
        resident=lambda name: SimpleNamespace(memory=memory),
    )
    loss = OnMeta(dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        next(AdapterEngine.pack_merged(engine, "a", loss, torch.zeros(80, dtype=torch.uint8)))
    assert loss.elements == 1


def test_another_base_is_refused_by_name(tmp_path: Path) -> None:
    save_file({n: torch.zeros(shape) for n, shape in list(SHAPES.items())[:1]}, tmp_path / "model.safetensors")
    shard = MergedShard(ModelFolder.at(str(tmp_path)), ADAPTER, 0, torch.float32)
    with pytest.raises(UnknownTensorError, match=r"up_proj\.weight is in no safetensors file"):
        list(shard.fill(tensors(), torch.zeros(160, dtype=torch.uint8), CastLoss(dtype=torch.float32)))
