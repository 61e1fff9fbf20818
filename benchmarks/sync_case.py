"""What a weight-sync benchmark publishes: a model's sizes, an adapter of it, and its tensors in flat memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from areal_lora.config.models import Config
from areal_lora.engine.common.arena import ParallelLayout, ShardedModel
from areal_lora.engine.common.transfer_plan import pack_plan, wire_layout
from areal_lora.families.shape import ModelShape
from areal_lora.types import AdapterSpec
from areal_lora.weight_sync.link.backends import gloo, register_backend

TINY_MODEL = Path(__file__).resolve().parents[1] / "examples" / "math" / "tiny_model"
SOCKETS = "gloo-sockets"
"""gloo as it is between machines."""
register_backend(SOCKETS, lambda seat: replace(gloo(seat), same_host=False))
TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A Qwen3-MoE of some sizes and one kind of adapter on attention and every expert."""

    name: str
    layers: int
    hidden: int
    experts: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    rank: int = 8
    dtype: str = "float32"  # of the served model, its adapter slots and the wire
    adapters: int = 1
    sequences: int = 64

    @property
    def names(self) -> int:
        """Hugging Face tensors of the adapter."""
        return self.layers * (8 + 6 * self.experts)

    def hf(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "vocab_size": 512,
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": 4 * self.hidden,
            "moe_intermediate_size": self.ffn,
            "num_experts": self.experts,
            "num_experts_per_tok": min(8, self.experts),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": 4096,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "attention_bias": False,
            "torch_dtype": self.dtype,
            "use_sliding_window": False,
        }

    def write_model(self, folder: Path) -> Path:
        """A model folder whose weights the server makes up (``load_format=dummy``)."""
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.hf()))
        save_file({"unused": torch.zeros(1)}, folder / "model.safetensors")
        for file in TINY_MODEL.glob("*token*"):
            shutil.copy(file, folder)
        return folder

    def spec(self, adapter: int, model_path: Path) -> AdapterSpec:
        return AdapterSpec(
            name=f"a{adapter}",
            base_model=str(model_path),
            rank=self.rank,
            alpha=2.0 * self.rank,
            target_modules=TARGETS,
        )

    def config(self, run_root: Path, model_path: Path, bind: str) -> Config:
        adapter = {
            "rank": self.rank,
            "alpha": 2.0 * self.rank,
            "target_modules": list(TARGETS),
            "task": {"kind": "word_problems"},
            "algorithm": {"kind": "grpo"},
            "optimizer": {"lr": 1e-4},
            "sampling": {"prompts_per_step": 1, "n_samples": 2, "max_new_tokens": 8},
        }
        return Config.model_validate(
            {
                "run": {"name": self.name, "root": str(run_root), "steps": 1},
                "model": {"path": str(model_path), "dtype": self.dtype},
                "adapters": [{"name": f"a{i}", **adapter} for i in range(self.adapters)],
                "trainer": {"world_size": 1},
                "rollout": {
                    "max_staleness": 1,
                    "max_lora_rank": self.rank,
                    "max_model_len": 2048,
                    "max_num_seqs": self.sequences,
                    "kv_cache_gib": 1,
                },
                "weight_sync": {"timeout_s": 60},
                "cluster": {"device": "cpu", "bind": bind},
            }
        )


class Tensors:
    """An adapter's values as the trainer has them: flat fp32 memory, and the plan that packs it."""

    def __init__(self, case: Case, spec: AdapterSpec, seed: int) -> None:
        hf = case.hf()
        layout = ParallelLayout(world=1, tp=1, pp=1, ep=1, etp=1, stage_layers=(case.layers,), experts=case.experts)
        model = ShardedModel(shape=ModelShape.from_hf(hf), layout=layout)
        self.layout = wire_layout(model, spec, case.dtype)
        self._plan = pack_plan(model, spec, 0, self.layout)
        generator = np.random.default_rng(seed)
        self._memory = generator.standard_normal(self._plan.space, dtype=np.float32) * np.float32(0.01)

    @property
    def nbytes(self) -> int:
        """Unique bytes on the wire."""
        return self.layout.nbytes

    def pack(self, flat: torch.Tensor) -> Iterator[int]:
        """``packed_shard.Pack``."""
        done = 0
        for end in self._plan.ends:
            self._plan.blocks.copy(self._memory.ctypes.data, flat.data_ptr(), tensors=(done, end))
            done = end
            yield done

    def whole(self) -> dict[str, torch.Tensor]:
        """Every Hugging Face tensor in the wire's dtype, shared ones repeated: what other systems send and save."""
        flat = torch.empty(self.nbytes, dtype=torch.uint8)
        for _ in self.pack(flat):
            pass
        data = flat.view({"float32": torch.float32, "bfloat16": torch.bfloat16}[self.layout.dtype])
        item = data.element_size()
        tensors: dict[str, torch.Tensor] = {}
        for shard in self.layout.shards:
            for t in shard.tensors:
                begin = t.offset // item
                tensors[t.name] = data[begin : begin + t.shape[0] * t.shape[1]].view(t.shape).clone()
        tensors |= {name: tensors[wire].clone() for name, wire in self.layout.aliases.items()}
        return dict(sorted(tensors.items()))
