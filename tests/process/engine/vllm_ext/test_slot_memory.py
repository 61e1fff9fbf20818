"""What a slot costs: the resident memory of servers with room for few and for many adapters, against the plan."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

from areal_lora.config.sizing.memory import job_memory
from areal_lora.config.sizing.slots import slot_count, slot_parameters
from areal_lora.families.shape import ModelShape
from areal_lora.types import AdapterRef, AdapterSpec
from areal_lora.weight_sync.manifest import base_digest
from tests.support.engine.vllm_ext.serving import (
    ALPHA,
    RANK,
    TARGETS,
    VOCAB,
    RunningServer,
    adapter,
    make_tokenizer,
    running_server,
)
from tests.support.sizes import NIGHTLY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
FEW, MANY = 2, 10
TOLERANCE = 0.10
MIB = 2**20


@pytest.mark.skipif(not NIGHTLY, reason="two servers of half a minute: only with AREAL_LORA_NIGHTLY=1")
def test_the_memory_of_a_slot_is_within_a_tenth_of_the_plan(tmp_path: Path) -> None:
    model = wide_model(tmp_path / "model")
    shape = ModelShape.from_hf(AutoConfig.from_pretrained(model).to_dict())
    few, many = (filled(tmp_path / str(n), model, n) for n in (FEW, MANY))
    slots = slot_count(many.server.config) - slot_count(few.server.config)
    assert slots == MANY - FEW
    slot = slot_parameters(many.server.config, shape) * 4
    measured = (many.resident - few.resident) / slots
    print(f"a slot: predicted {slot / MIB:.1f} MiB, measured {measured / MIB:.1f} MiB")
    for each in (few, many):
        [replica] = [m for m in job_memory(each.server.config, shape) if m.role == "rollout"]
        print(
            f"{slot_count(each.server.config)} slots: server predicted {replica.host / MIB:.0f} MiB, measured ", end=""
        )
        print(f"{each.empty / MIB:.0f} MiB before the first publish and {each.resident / MIB:.0f} MiB after the last")
    assert measured == pytest.approx(slot, rel=TOLERANCE)


def wide_model(folder: Path) -> Path:
    """A slot of it is large compared with what else differs between two servers, some MiB."""
    torch.manual_seed(0)
    make_tokenizer(folder)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        intermediate_size=512,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder


class Filled:
    """A server after two versions of each adapter: every slot has been written, or can be."""

    def __init__(self, server: RunningServer) -> None:
        self.server, self.empty, self.resident = server, 0, 0

    def measure(self) -> int:
        process = psutil.Process(self.server.process.pid)
        return sum(p.memory_info().rss for p in (process, *process.children(recursive=True)))


def filled(folder: Path, model: Path, adapters: int) -> Filled:
    how = {"in_flight": "interrupt", "max_staleness": 0, "max_adapters": adapters}
    with running_server(folder, model, **how) as server:
        made = Filled(server)
        made.empty = made.measure()
        base = base_digest(model)
        for version in range(2):
            for i in range(adapters):
                publish(made.server, AdapterRef(name=f"a{i}", version=version), base)
        made.resident = made.measure()
        return made


def publish(server: RunningServer, ref: AdapterRef, base: str) -> None:
    tensors = adapter(server.model, seed=ref.version)
    spec = AdapterSpec(name=ref.name, base_model="m", rank=RANK, alpha=ALPHA, target_modules=tuple(TARGETS))
    parent = AdapterRef(name=ref.name, version=0) if ref.version else None
    server.source.publish(ref, server.layout(tensors, spec), tensors, parent=parent, base=base, timeout_s=200.0)
