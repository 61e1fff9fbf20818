"""One adapter in training: everything that is not shared with the others hangs here.

The trainer keeps a list of tenants; a run with one adapter is a list of one (contract C1).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from transformers import PreTrainedTokenizerBase

from areal_lora.algorithms.registry import Algorithm, build_algorithm
from areal_lora.checkpoint.state import Evaluation
from areal_lora.config.models import AdapterConfig, Config
from areal_lora.data.collate import HOST
from areal_lora.obs.trace import Spans
from areal_lora.tasks.datasets import load_samples
from areal_lora.types import AdapterRef, AdapterSpec, TrainBatch


@dataclass(slots=True, kw_only=True)
class Tenant:
    """``version`` counts published versions and equals the number of batches learnt from.

    ``base_commit`` is the revision of a base from the hub. ``spans`` are the phases since the version before
    was made, which ends a step. ``stored`` is the newest version with a checkpoint, written or under way.
    ``skipped`` counts the training steps in a row whose gradients were not finite. On rank 0 only: ``ledger``,
    the controller's snapshot that belongs to ``version``; held-out ``evaluations`` by version, the versions
    whose evaluation is ``awaited``, and the newest one that was ``asked`` for (-1: none).
    """

    config: AdapterConfig
    spec: AdapterSpec
    algorithm: Algorithm
    probe: TrainBatch
    base_commit: str | None = None
    version: int = 0
    stored: int | None = None
    resumed: bool = False
    ledger: bytes = b""
    evaluations: dict[int, Evaluation] = field(default_factory=dict)
    awaited: set[int] = field(default_factory=set)
    skipped: int = 0
    asked: int = -1
    spans: Spans = field(default_factory=Spans)

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def ref(self) -> AdapterRef:
        return AdapterRef(name=self.name, version=self.version)


def build_tenant(config: Config, adapter: AdapterConfig, tokenizer: PreTrainedTokenizerBase) -> Tenant:
    return Tenant(
        config=adapter,
        spec=adapter.spec(config.model.path),
        algorithm=build_algorithm(adapter.algorithm, minibatches=adapter.minibatches),
        probe=probe_batch(config, adapter, tokenizer),
        base_commit=config.model.commit,
    )


def probe_batch(config: Config, adapter: AdapterConfig, tokenizer: PreTrainedTokenizerBase) -> TrainBatch:
    """The fixed sequences of the truth check (contract C6): held-out problems with their gold answers."""
    sync = config.weight_sync
    samples = load_samples(adapter.task, "eval")[: sync.probe_sequences]
    rows = [tokenizer.encode(s.prompt + s.answer, add_special_tokens=False)[: sync.probe_tokens] for s in samples]
    return scoring_batch(rows, adapter.name)


def scoring_batch(rows: list[list[int]], adapter: str) -> TrainBatch:
    """Plain sequences as a batch that is only scored: every token but each first one is on the mask."""
    lengths = torch.tensor([0, *(len(r) for r in rows)], device=HOST)
    tokens = torch.tensor([x for r in rows for x in r], dtype=torch.int64, device=HOST)
    cu_seqlens = lengths.cumsum(0)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[cu_seqlens[:-1]] = False
    return TrainBatch(
        token_ids=tokens,
        cu_seqlens=cu_seqlens,
        loss_mask=mask,
        rollout_logprobs=torch.zeros(tokens.numel(), device=HOST),
        versions=torch.where(mask, 0, -1),
        rewards=torch.zeros(len(rows), device=HOST),
        group_ids=torch.zeros(len(rows), dtype=torch.int64, device=HOST),
        sample_ids=torch.arange(len(rows), device=HOST),
        adapters=(adapter,) * len(rows),
    )


def split_rows(values: torch.Tensor, cu_seqlens: torch.Tensor) -> list[list[float]]:
    """A packed [T] tensor as one list per sequence."""
    bounds = cu_seqlens.tolist()
    flat = values.tolist()
    return [flat[a:b] for a, b in pairwise(bounds)]
