"""The FSDP engine's routers against formulas in float64, in one process; `test_layouts` has both engines on several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from areal_lora.config.models import ModelConfig, OptimizerConfig, TrainerConfig
from areal_lora.config.sections.run import Recompute
from areal_lora.data.collate import scoring_batch
from areal_lora.engine.base import LossSums
from areal_lora.engine.fsdp_engine import FsdpEngine
from areal_lora.engine.layers.active import ActiveAdapters, PackedTokens
from areal_lora.engine.layers.router_replay import follow_routes
from areal_lora.errors import AlignmentError, ConfigError
from areal_lora.families.shape import read_shape
from areal_lora.types import AdapterSpec, TrainBatch
from tests.support.families.rowless import save_rowless
from tests.support.families.tiny_families import TINY, save

CPU = torch.device("cpu")
MIXTURES = ("qwen3_moe", "mixtral", "qwen2_moe", "olmoe", "flex_olmo", "glm4_moe")
ROWS = [list(range(3, 40)), list(range(3, 20)) + list(range(50, 60)), [5, 9, 5]]
SPEC = AdapterSpec(name="a", base_model="m", rank=2, alpha=4.0, target_modules=("linear_qkv", "linear_fc1"))
TOKENS = sum(map(len, ROWS))


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def folder_of(kind: str, tmp_path: Path) -> Path:
    return save(kind, tmp_path) if kind in TINY else save_rowless(kind, tmp_path / kind)


def engine_of(folder: Path, recompute: Recompute = "none") -> FsdpEngine:
    trainer = TrainerConfig(engine="fsdp", world_size=1, max_tokens_per_microbatch=50, recompute=recompute)
    return FsdpEngine(ModelConfig(path=str(folder), dtype="float32"), trainer, CPU)


def score(folder: Path, routes: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """transformers in float64, a sequence at a time: [T] log-probabilities, and the choices [T, L, K] of all layers.

    ``routes`` replace the choices; what is made of the scores is written here once more. Last the routers' own choices.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()
    gates: list[Any] = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    chosen: list[Tensor] = []
    its_own: list[Tensor] = []

    def weigh(gate: Any, its: Tensor | None, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.double().t()
        sigmoid = "e_score_correction_bias" in dict(gate.named_buffers())
        scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
        own = (scores + gate.e_score_correction_bias if sigmoid else scores).topk(gate.top_k).indices
        found = own if its is None else torch.where(its < 0, own, its.long())
        chosen.append(found)
        its_own.append(own)
        weights = scores.gather(1, found)
        if vars(gate).get("norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights * vars(gate).get("routed_scaling_factor", 1.0), found

    scores, choices, owns = [], [], []
    parts = [None] * len(ROWS) if routes is None else routes.split([len(row) for row in ROWS])
    for row, own in zip(ROWS, parts, strict=True):
        chosen.clear(), its_own.clear()
        for layer, gate in enumerate(gates):
            gate.forward = partial(weigh, gate, None if own is None else own[:, layer])
        with torch.no_grad():
            logp = model(torch.tensor([row])).logits[0].log_softmax(-1)[:-1]
        scores += [torch.zeros(1), logp.gather(1, torch.tensor(row)[1:, None])[:, 0]]
        choices.append(torch.stack(chosen, 1))
        owns.append(torch.stack(its_own, 1))
    return torch.cat(scores).float(), torch.cat(choices).to(torch.int16), torch.cat(owns).to(torch.int16)


def batch_of(routes: Tensor) -> TrainBatch:
    """The first two sequences are one tree."""
    return replace(scoring_batch(ROWS, "a"), group_ids=torch.tensor([0, 0, 1]), routes=routes)


@pytest.mark.parametrize("kind", MIXTURES)
def test_routes_decide_and_a_routers_own_change_nothing(kind: str, tmp_path: Path) -> None:
    """A third of the tokens, and those of the shared start, have routes of their own or none."""
    folder = folder_of(kind, tmp_path)
    engine, experts = engine_of(folder), read_shape(folder).experts
    plain, own, _ = score(folder, None)
    found = engine.logprobs(replace(batch_of(own), routes=None), adapter=None)
    torch.testing.assert_close(found, plain, atol=2e-5, rtol=0)
    torch.testing.assert_close(engine.logprobs(batch_of(own), adapter=None), found, atol=1e-6, rtol=0)
    nowhere = torch.full_like(own, -1)
    assert torch.equal(engine.logprobs(batch_of(nowhere), adapter=None), found)
    planted = torch.where((torch.arange(TOKENS) % 3 == 1)[:, None, None], nowhere, (own + 1) % experts)
    planted[37:54] = planted[:17]
    wanted, taken, _ = score(folder, planted)
    assert not torch.equal(taken, own)
    torch.testing.assert_close(engine.logprobs(batch_of(planted), adapter=None), wanted, atol=2e-5, rtol=0)
    assert (wanted - plain).abs().max() > 0.02


def test_choices_that_differ_are_counted_whatever_their_order(tmp_path: Path) -> None:
    folder = save("qwen3_moe", tmp_path)
    engine, experts = engine_of(folder), read_shape(folder).experts
    engine.add_adapter(SPEC, OptimizerConfig(lr=0.1), seed=1)
    planted = score(folder, None)[1].flip(-1)
    planted[2] = -1
    planted[40, 1] = (planted[40, 1] + 1) % experts
    planted[50:53, 0] = torch.tensor([0, experts - 1])
    alone = replace(scoring_batch(ROWS, "a"), group_ids=torch.arange(3), routes=planted)  # no tree: every token counts
    plain = engine.logprobs(replace(alone, routes=None), adapter="a")
    found, flips = engine.own_choice(alone, adapter="a")
    assert torch.equal(found, plain), "its own routers choose"
    assert not torch.equal(engine.logprobs(alone, adapter="a"), plain), "and no longer"
    own, known = score(folder, None)[1].flatten(0, 1), (planted >= 0).flatten(0, 1)[:, 0]
    pairs = zip(own[known].tolist(), planted.flatten(0, 1)[known].tolist(), strict=True)
    differing = sum(set(mine) != set(its) for mine, its in pairs)
    assert flips == differing / ((TOKENS - 1) * planted.shape[1])
    assert differing >= 2


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_pass_records_what_its_routers_choose(kind: str, tmp_path: Path) -> None:
    """And replays nothing: another one, of a batch with routes, does not change the next pass."""
    folder = folder_of(kind, tmp_path)
    engine = engine_of(folder)
    engine.add_adapter(replace(SPEC, target_modules=("linear_fc1",)), OptimizerConfig(lr=0.1), seed=1)
    alone = replace(batch_of(torch.empty(0)), routes=None)
    wanted, own, _ = score(folder, None)
    found, routes = engine.recorded(alone, 2, adapter="a")
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)
    assert routes.dtype == torch.int16
    assert torch.equal(routes.sort(-1).values, own.sort(-1).values)
    assert torch.equal(engine.logprobs(alone, adapter="a"), found)


@pytest.mark.parametrize("recompute", ["selective", "full", "offload"])
def test_a_recomputed_layer_replays_its_micro_batch(recompute: Recompute, tmp_path: Path) -> None:
    folder, gradients = save("qwen3_moe", tmp_path), []
    draw = np.random.default_rng(5)
    routes = torch.tensor(draw.permuted(np.tile(np.arange(4), (TOKENS, 2, 1)), axis=2)[..., :2].astype(np.int16))
    for kind in ("none", recompute):
        engine = engine_of(folder, kind)
        engine.add_adapter(SPEC, OptimizerConfig(lr=0.1), seed=1)
        engine.forward_backward(batch_of(routes), lambda _, logprobs, __: LossSums(loss=logprobs.square().sum()))
        gradients.append(engine.resident("a").memory.grads.clone())
    assert gradients[0].any()
    assert torch.equal(*gradients)


def test_routes_of_another_model_are_refused(tmp_path: Path) -> None:
    engine = engine_of(save("qwen3_moe", tmp_path))
    right = torch.zeros(TOKENS, 2, 2, dtype=torch.int16)
    for wrong in (right[:, :1], right.repeat(1, 1, 2), right + 4, right - 2):
        with pytest.raises(AlignmentError, match=r"the model has \[2, 2\] of 4 experts"):
            engine.logprobs(batch_of(wrong), adapter=None)


class Elsewhere(nn.Module):  # type: ignore[misc]
    """Chooses among groups of experts, with `topk`, and then by an order of all."""

    def forward(self, scores: Tensor) -> Tensor:
        assert scores.topk(2, dim=-1).indices.shape == (5, 2)
        scores.view(5, 2, 3).topk(2, dim=-1)
        scores[:, :3].topk(2, dim=-1)
        return scores.argsort(-1)[:, :2]


def test_a_router_that_chooses_in_another_way_is_refused_by_name() -> None:
    active, routes = ActiveAdapters(), torch.zeros(5, 1, 2, dtype=torch.int16)
    router = Elsewhere()
    follow_routes(router, active, 0, 7)
    scores = torch.randn(5, 6)
    assert router(scores).shape == (5, 2), "without routes"
    active.tokens = PackedTokens(keys=torch.zeros(5), routes=routes)
    with pytest.raises(ConfigError, match="Elsewhere does not choose experts in a way that replays"):
        router(scores)
