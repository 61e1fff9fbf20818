"""Replicas of a layer: one of them reads the base and the others take what it broadcasts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from areal_lora.config.models import ModelConfig, TrainerConfig
from areal_lora.engine.common.arena import ParallelLayout, ShardedModel
from areal_lora.engine.common.model_folder import ModelFolder
from areal_lora.engine.megatron_utils import base_weights
from areal_lora.errors import UnknownTensorError
from areal_lora.families.registry import PUBLISHED, unsupported
from areal_lora.families.shape import longrope_context, read_shape
from tests.support.families.tiny_families import save

DENSE, EXPERTS = "dense replicas", "replicas of experts"


class Rank(nn.Module):
    """Some parameters of a rank, by Megatron's names. ``firsts`` are the groups whose first rank it is."""

    def __init__(self, folder: Path, firsts: set[str], sent: dict[str, list[Tensor]]) -> None:
        super().__init__()
        self.folder, self.firsts, self.sent, self.read = folder, firsts, sent, list[str]()
        self.events: list[str | torch.device] = []
        shape = read_shape(folder)
        layout = ParallelLayout.of(TrainerConfig(world_size=2), layers=shape.layers, experts=shape.experts)
        self.model = ShardedModel(shape=shape, layout=layout)
        h, f, n = shape.hidden, shape.expert_ffn, shape.experts
        self.values = {
            "0.embedding.word_embeddings.weight": torch.zeros(shape.vocab, h),
            "0.decoder.layers.0.mlp.experts.linear_fc1.weight": torch.zeros(n, 2 * f, h),
            "0.decoder.layers.0.self_attention.linear_proj.weight": torch.zeros(h, shape.heads * shape.head_dim),
            "0.decoder.layers.0.mlp.experts.linear_fc2.weight": torch.zeros(n, h, f),
        }

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[Any]:
        yield from self.values.items()

    def load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broadcast(tensor: Tensor, *, group: str, group_src: int) -> None:
            assert group_src == 0
            self.events.append("queued")
            if group in self.firsts:
                self.sent[group].append(tensor.clone())
            else:
                tensor.copy_(self.sent[group].pop(0))

        world = SimpleNamespace(
            get_rank=lambda group: int(group not in self.firsts), get_world_size=lambda _: 2, broadcast=broadcast
        )
        monkeypatch.setattr(base_weights, "dist", world)
        groups: Any = (DENSE, EXPERTS)
        base_weights.load_base(self, Counted(self), self.model, 0, *groups)


class Counted(ModelFolder):
    """Notes which tensors are read."""

    def __init__(self, rank: Rank) -> None:
        found = ModelFolder.of(ModelConfig(path=str(rank.folder)))
        self.path, self._files, self._rank = found.path, found._files, rank

    def _slice(self, name: str) -> Any:
        self._rank.read.append(name)
        return super()._slice(name)


def test_only_the_first_rank_of_the_replicas_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank is also the first one with its experts."""
    folder, sent = save("qwen3_moe", tmp_path), {DENSE: list[Tensor](), EXPERTS: list[Tensor]()}
    first, second, third = (Rank(folder, firsts, sent) for firsts in ({DENSE, EXPERTS}, {EXPERTS}, set[str]()))
    first.load(monkeypatch)
    assert all(values.any() for values in first.values.values())
    dense, experts = list(sent[DENSE]), list(sent[EXPERTS])
    assert (len(dense), len(experts)) == (2, 2)
    second.load(monkeypatch)
    assert second.read
    assert all(".experts." in name for name in second.read)
    sent |= {DENSE: dense, EXPERTS: experts}
    third.load(monkeypatch)
    assert third.read == []
    for rank in (second, third):
        assert all(torch.equal(rank.values[name], values) for name, values in first.values.items())


@pytest.mark.parametrize("firsts", [set[str](), {DENSE, EXPERTS}], ids=["reads nothing", "reads all"])
def test_on_a_device_a_rank_waits_for_each_broadcast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, firsts: set[str]
) -> None:
    """A limit of NCCL counts from when a broadcast is queued: it must not be that of the whole model."""
    sent = {group: [] if firsts else [torch.zeros(1)] * 2 for group in (DENSE, EXPERTS)}
    rank, device = Rank(save("qwen3_moe", tmp_path), firsts, sent), torch.device("meta")
    rank.values = {name: values.to(device) for name, values in rank.values.items()}
    module = SimpleNamespace(synchronize=rank.events.append)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    rank.load(monkeypatch)
    assert rank.events == ["queued", device] * len(rank.values)


def test_every_rank_finds_out_what_the_folder_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(save("qwen3_moe", tmp_path), set(), {DENSE: [torch.zeros(1)] * 2, EXPERTS: []})
    monkeypatch.setattr(ModelFolder, "_slice", lambda *_: (_ for _ in ()).throw(UnknownTensorError("no such tensor")))
    with pytest.raises(UnknownTensorError, match="no such tensor"):
        rank.load(monkeypatch)


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_positions_are_scaled_as_the_file_states(key: str) -> None:
    """Older files call it ``type``, as transformers still reads it."""
    rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    hf = {**PUBLISHED["meta-llama/Llama-3.1-8B"], "rms_norm_eps": 1e-5, "rope_scaling": {key: "llama3", **rope}}
    assert not unsupported(hf)
    made = base_weights.architecture(hf)
    assert (made["rope_scaling"], made["rope_scaling_factor"]) == (True, 8.0)
    assert longrope_context(hf) is None
