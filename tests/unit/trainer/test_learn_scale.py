"""The power of two by which losses with weights 1 / length are multiplied, and the denominator with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from areal_lora.algorithms.losses import gradient_scale
from areal_lora.config.models import ModelConfig, OptimizerConfig, TrainerConfig
from areal_lora.data.collate import scoring_batch
from areal_lora.engine.fsdp_engine import FsdpEngine
from areal_lora.engine.layers.output import Readout, predictions
from areal_lora.trainer import companions, learn as module
from areal_lora.trainer.learn import annotate, learn, make_loss
from areal_lora.types import AdapterSpec, TrainBatch
from tests.support.families.tiny_families import save
from tests.support.trainer.recorded import make_adapter

CPU, SEED = torch.device("cpu"), 11
ROWS = [list(range(3, 60)), list(range(3, 9)), [*range(3, 60), *range(3, 16)], [40, 41, 42]]
"""Of 56, 5, 69 and 2 trained tokens: midway is 11.7."""


def sampled(lengths: list[int], vocabulary: int) -> TrainBatch:
    draw = torch.Generator().manual_seed(SEED)
    rows = [torch.randint(0, vocabulary, (n + 1,), generator=draw).tolist() for n in lengths]
    batch = scoring_batch(rows, "gsm8k")
    return replace(batch, versions=torch.where(batch.loss_mask, 4, -1))


@pytest.mark.parametrize(
    ("lengths", "scale"),
    [([32768], 2.0**15), ([32768, 1], 2.0**8), ([1], 1.0), ([32768, 30000], 2.0**15), ([10, 20, 40], 16.0)],
)
def test_weights_are_about_one_or_as_far_above_as_below(lengths: list[int], scale: float) -> None:
    batch = sampled(lengths, 9)
    assert gradient_scale(batch.loss_mask, batch.cu_seqlens, "sequence") == scale
    assert gradient_scale(batch.loss_mask, batch.cu_seqlens, "token") == 1.0
    assert gradient_scale(batch.loss_mask & False, batch.cu_seqlens, "sequence") == 1.0


def test_long_answers_have_as_good_gradients_in_float16_as_tokens_of_weight_1() -> None:
    """Through the output layer, against float64: 32,768 tokens, half of them likely. Unscaled the error is 0.9 %."""
    print(f"seed {SEED}")
    n, width, vocabulary, draw = 32768, 32, 256, torch.Generator().manual_seed(SEED)
    hidden = torch.randn(n + 1, width, generator=draw).half()
    weight = (0.3 * torch.randn(vocabulary, width, generator=draw)).half()
    batch = sampled([n], vocabulary)
    likely = (hidden.float() @ weight.float().T).argmax(-1)
    targets = torch.where(torch.arange(n) % 2 == 0, likely[:n], batch.token_ids[1:].long())
    leaf, rows = hidden.clone().requires_grad_(), torch.arange(n)
    logprobs = predictions(leaf, weight, None, rows, targets, Readout())[:, 0]
    logprobs = torch.cat([torch.zeros(1), logprobs])
    micro = replace(batch, rollout_logprobs=logprobs.detach(), advantages=batch.loss_mask.float())
    scale = gradient_scale(micro.loss_mask, micro.cu_seqlens, "sequence")
    make_loss(make_adapter(kind="gspo"), 4, scale=scale)(micro, logprobs, None).loss.backward()
    exact = hidden.double().requires_grad_()
    scores = (exact[:n] @ weight.double().T).log_softmax(-1).gather(1, targets[:, None])
    (-scores.sum() / n).backward()
    assert leaf.grad is not None
    assert exact.grad is not None
    error = float((leaf.grad.double() / scale - exact.grad).norm() / exact.grad.norm())
    print(f"relative error of the gradient {error}")
    assert error < 0.002


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_of_policy_and_critic_have_the_bits_of_unscaled_ones(
    dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole step of the FSDP engine, in several micro-batches, beside one whose factor is 1."""
    print(f"seed {SEED}")
    folder, found, scales = save("qwen3_moe", tmp_path), [], []
    adapter = make_adapter(kind="ppo", reduction="sequence", entropy_coef=0.01)
    spec = AdapterSpec(name="gsm8k", base_model="m", rank=2, alpha=4.0, target_modules=("linear_qkv", "linear_fc1"))
    adapter = replace(adapter, spec=spec)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for factor in (None, 1.0):
            if factor is not None:
                for each in (module, companions):
                    monkeypatch.setattr(each, "gradient_scale", lambda *_: 1.0)
            trainer = TrainerConfig(engine="fsdp", world_size=1, max_tokens_per_microbatch=80)
            engine = FsdpEngine(ModelConfig(path=str(folder), dtype=dtype), trainer, CPU)
            engine.add_adapter(spec, OptimizerConfig(lr=0.1), seed=1)
            companions.start(engine, adapter, seed=2)
            draw = torch.Generator().manual_seed(SEED)
            memory = engine.resident("gsm8k").memory
            memory.weights.copy_(torch.randn(len(memory.weights), generator=draw) / 8)
            batch = scoring_batch(ROWS, "gsm8k")
            batch = replace(
                batch,
                rollout_logprobs=engine.logprobs(batch, adapter="gsm8k"),
                versions=torch.where(batch.loss_mask, 3, -1),
                rewards=torch.tensor([1.0, 0.0, 0.5, 1.0]),
                group_ids=torch.tensor([0, 0, 1, 1]),
            )
            scales.append(module.gradient_scale(batch.loss_mask, batch.cu_seqlens, "sequence"))
            report = learn(engine, adapter, annotate(engine, adapter, batch), version=4, base_dtype=dtype, lr=0.1)
            critic = engine.resident("gsm8k/critic").memory
            found.append((memory.weights.clone(), critic.weights.clone(), report.sums, report.grad_norm))
    finally:
        dist.destroy_process_group()
    (policy, critic, sums, norm), (wanted_policy, wanted_critic, wanted_sums, wanted_norm) = found
    assert scales == [16.0, 1.0]
    assert torch.equal(policy, wanted_policy)
    assert torch.equal(critic, wanted_critic)
    assert (sums, norm) == (wanted_sums, wanted_norm)
