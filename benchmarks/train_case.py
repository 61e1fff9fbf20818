"""What ``train_speed.py`` trains: models, batches, the share of a machine's peak. Pure, without Megatron and PEFT."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from cpu_moe_lora import MODEL

from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.data.packed_groups import shared_starts
from areal_lora.families.family import TARGETS
from areal_lora.families.shape import ModelShape
from areal_lora.families.sites import PassSizes
from areal_lora.types import AdapterStructure, TrainBatch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "math"
CONFIGS = (EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml")
ADAPTER_STD = 0.1  # of lora_A and lora_B: log-probabilities move by 0.1 and more, and no gradient is zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model and the batch of one step. ``groups`` prompts have ``samples`` answers each.

    ``tokens`` are the shortest and the longest sequence. ``name`` is a model of `CASES`.
    """

    name: str
    groups: int
    samples: int
    tokens: tuple[int, int]

    def config(self, folder: Path) -> Config:
        """The demo's configuration with one rank; ``folder`` is the model."""
        return load_config(CONFIGS, ["trainer.world_size=1", "trainer.ep=1", f"model.path={json.dumps(str(folder))}"])


TINY = Case(name="tiny, 8 experts", groups=64, samples=8, tokens=(46, 60))
WIDE = Case(name="154 M, 128 experts", groups=4, samples=8, tokens=(64, 192))
CASES = {case.name: case for case in (TINY, WIDE)}


def make_model(case: Case, folder: Path) -> Path:
    """The folder of the case's model, written into ``folder`` with random weights where none is checked in."""
    if case.name == TINY.name:
        return EXAMPLES / "tiny_model"
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**{k: v for k, v in MODEL.items() if k != "architectures"})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "wide")
    return folder / "wide"


def make_batch(case: Case, vocabulary: int, adapter: str) -> TrainBatch:
    """Random tokens: a group's prompt, then answers, which are trained on with an advantage of 1 or -1.

    A prompt is half as long as the shortest sequence. ``rollout_logprobs`` are 0 until a side has scored the batch.
    """
    random = Random(0)
    words = range(2, vocabulary)
    prompt = case.tokens[0] // 2
    lengths = [random.randint(*case.tokens) for _ in range(case.groups * case.samples)]
    prompts = [random.choices(words, k=prompt) for _ in range(case.groups)]
    rows = [prompts[i // case.samples] + random.choices(words, k=n - prompt) for i, n in enumerate(lengths)]
    total = sum(lengths)
    mask = torch.cat([torch.arange(n) >= prompt for n in lengths])
    signs = torch.tensor([random.choice((-1.0, 1.0)) for _ in lengths])
    return TrainBatch(
        token_ids=torch.tensor([t for row in rows for t in row], dtype=torch.int32),
        cu_seqlens=torch.tensor([0, *accumulate(lengths)]),
        loss_mask=mask,
        rollout_logprobs=torch.zeros(total),
        versions=torch.where(mask, 0, -1),
        shared_starts=torch.tensor(shared_starts([np.array(row) for row in rows])),
        rewards=signs,
        group_ids=torch.arange(len(lengths)) // case.samples,
        sample_ids=torch.arange(len(lengths)),
        given=torch.zeros(len(lengths), dtype=torch.bool),
        adapters=(adapter,) * len(lengths),
        advantages=torch.repeat_interleave(signs, torch.tensor(lengths)) * mask,
    )


def step_flops(model: Mapping[str, Any], rank: int, lengths: Sequence[int]) -> float:
    """Floating point operations of a training step that computes every sequence by itself (`PassSizes.training`).

    ``model`` is a Hugging Face configuration; an adapter of ``rank`` is on every linear layer.
    """
    adapter = AdapterStructure(rank=rank, alpha=1.0, target_modules=TARGETS)
    sizes = PassSizes.of(ModelShape.from_hf(model), adapter)
    return float(sizes.training(sum(lengths), sum(n * (n + 1) // 2 for n in lengths)))
