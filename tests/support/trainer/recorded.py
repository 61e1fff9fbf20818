"""An adapter, a batch, and an engine that answers with fixed log-probabilities."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import torch

from areal_lora.algorithms.registry import build_algorithm
from areal_lora.config.load import load_config
from areal_lora.config.recorded import adapter_run
from areal_lora.config.sections.adapter import AlgorithmConfig
from areal_lora.data.collate import scoring_batch
from areal_lora.engine.base import LossFn
from areal_lora.obs.trace import Spans
from areal_lora.trainer.adapter import Adapter
from areal_lora.types import StepStats, TrainBatch
from tests.support.paths import EXAMPLES


def make_adapter(*, kind: str = "grpo", minibatches: int = 1, **algorithm: object) -> Adapter:
    """The embedded job's adapter with the algorithm ``kind`` and the given keys of it."""
    config = load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"], [])
    chosen = AlgorithmConfig.model_validate({"kind": kind, **algorithm})
    adapter = config.adapters[0].model_copy(update={"algorithm": chosen, "minibatches": minibatches})
    return Adapter(
        config=adapter,
        run=adapter_run(config, adapter),
        spec=adapter.spec("x"),
        probe=scoring_batch([[1, 2]], adapter.name),
        algorithm=build_algorithm(chosen, minibatches=minibatches, max_new_tokens=adapter.sampling.max_new_tokens),
    )


def make_batch() -> TrainBatch:
    batch = scoring_batch([[5, 6, 7], [8, 9], [3, 4, 5, 6], [2, 1]], "gsm8k")
    logprobs = -torch.rand(batch.n_tokens, generator=torch.Generator().manual_seed(7)) * batch.loss_mask
    return replace(
        batch,
        rollout_logprobs=logprobs,
        versions=torch.where(batch.loss_mask, 4, -1),
        rewards=torch.tensor([1.0, 0.0, 1.0, 1.0]),
        group_ids=torch.tensor([0, 0, 1, 1]),
        baselines=torch.tensor([1.0, 1.0, 0.0, 0.0]),
    )


class RecordedEngine:
    """Answers with fixed log-probabilities, so that the glue is tested and nothing else."""

    def __init__(self, logprobs: torch.Tensor, batch: TrainBatch | None = None) -> None:
        """``logprobs`` are those of ``batch``, `make_batch` if none is given."""
        self.whole = batch or make_batch()
        self.answer, self.asked, self.denominators, self.rates = logprobs, [], [], []
        self.value, self.resident = torch.full_like(logprobs, 0.25).detach(), list[tuple[str, str]]()
        self.updates: list[TrainBatch] = []
        self.only: list[torch.Tensor | None] = []  # of passes that score
        self.discarded: list[str] = []
        self.broken: tuple[int, ...] = ()  # optimizer steps, from 1, with a gradient that is not finite
        self.dropped: torch.Tensor | None = None  # what a training pass says in place of ``answer``: dropout
        self.base: torch.Tensor | None = None  # what the adapter's absence says
        self.spans = Spans()

    def memory(self) -> None:
        return None

    def logprobs(self, batch: TrainBatch, *, adapter: str | None, temperature: float = 1.0) -> torch.Tensor:
        self.asked.append(adapter)
        self.only.append(batch.only)
        return self._of(batch) if adapter or self.base is None else self.base

    def own_choice(self, batch: TrainBatch, *, adapter: str, temperature: float = 1.0) -> tuple[torch.Tensor, float]:
        return self.logprobs(batch, adapter=adapter, temperature=temperature), 0.125

    def recorded(
        self, batch: TrainBatch, minibatches: int, *, adapter: str, temperature: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each token's routes are its id."""
        assert minibatches > 1
        routes = batch.token_ids.short()[:, None, None].repeat(1, 2, 2)
        return self.logprobs(batch, adapter=adapter, temperature=temperature), routes

    def served(self, batch: TrainBatch, kind: str, *, adapter: str | None, temperature: float = 1.0) -> torch.Tensor:
        return self.logprobs(batch, adapter=f"{kind} {adapter}", temperature=temperature)

    def values(self, batch: TrainBatch, *, adapter: str) -> torch.Tensor:
        """0.25 everywhere."""
        self.asked.append(adapter)
        return self.value

    def freeze_copy(self, adapter: str, name: str) -> None:
        self.resident.append((adapter, name))

    def _of(self, batch: TrainBatch) -> torch.Tensor:
        """The answers for the sequences of a minibatch, which are told by their tokens."""
        if batch.n_tokens == self.answer.numel():
            return self.answer
        whole = self.whole
        bounds = whole.cu_seqlens.tolist()
        rows = {tuple(whole.token_ids[a:b].tolist()): self.answer[a:b] for a, b in pairwise(bounds)}
        mine = batch.cu_seqlens.tolist()
        return torch.cat([rows[tuple(batch.token_ids[a:b].tolist())] for a, b in pairwise(mine)])

    def forward_backward(
        self,
        batch: TrainBatch,
        loss_fn: LossFn,
        *,
        temperature: float = 1.0,
        need_entropy: bool = False,
        scores: torch.Tensor | None = None,
    ) -> dict[str, float]:
        """Entropies are minus twice the log-probabilities."""
        self.updates.append(batch)
        logprobs = (self._of(batch) if self.dropped is None else self.dropped).detach().clone().requires_grad_()
        entropies = -2 * logprobs.detach() if need_entropy else None
        if scores is not None:
            known = logprobs.detach()
            scores.copy_(known if entropies is None else torch.stack([known, entropies], 1))
        sums = loss_fn(batch, logprobs, entropies)
        sums.loss.backward()
        self.gradient = logprobs.grad
        return {"loss": float(sums.loss.detach()), **{k: float(v) for k, v in sums.stats.items()}}

    def discard_gradients(self, adapter: str) -> None:
        self.discarded.append(adapter)

    def optim_step(self, adapter: str, denominator: float, lr: float) -> StepStats:
        self.denominators.append(denominator)
        self.rates.append(lr)
        finite = bool((self.gradient / denominator).isfinite().all())
        skipped = float(len(self.rates) in self.broken or not finite)
        return StepStats(values={"grad_norm": math.nan if skipped else 1.0, "lr": lr, "skipped": skipped})
