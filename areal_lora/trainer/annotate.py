"""What a batch must carry before it is learnt from, and nothing the algorithm does not ask for."""

from __future__ import annotations

from dataclasses import replace

from areal_lora.algorithms.advantages import per_sample, to_tokens
from areal_lora.engine.base import TrainEngine
from areal_lora.trainer.tenant import Tenant
from areal_lora.types import TrainBatch


def annotate(engine: TrainEngine, tenant: Tenant, batch: TrainBatch) -> TrainBatch:
    """Add proximal and reference log-probabilities [T] where the algorithm needs them, and advantages [T].

    The reference is the base with the adapter off (contract C11). Collective over all ranks.
    """
    temperature = tenant.config.sampling.temperature
    if tenant.algorithm.needs_prox:
        batch = replace(batch, prox_logprobs=engine.logprobs(batch, adapter=tenant.name, temperature=temperature))
    if tenant.algorithm.needs_ref:
        batch = replace(batch, ref_logprobs=engine.logprobs(batch, adapter=None, temperature=temperature))
    per_sequence = per_sample(tenant.algorithm.advantage, batch.rewards, batch.group_ids, batch.sample_ids)
    return replace(batch, advantages=to_tokens(per_sequence, batch.cu_seqlens, batch.loss_mask))
