"""What each of two expert-parallel ranks does: dispatch keys and tokens of one routing by Megatron's all-to-all."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from areal_lora.engine.megatron_utils.cpu_patches import NullStream, install_cpu_patches


def dispatch() -> list[list[np.ndarray]]:
    """Keys and tokens as the experts get them, counts, and tokens that come back; then the same of plain dispatchers.

    Then how often sizes were counted of the former. It does so twice, as a recomputation does.
    """
    install_cpu_patches()
    NullStream.record_event = lambda stream: stream  # type: ignore[attr-defined]
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

    from areal_lora.engine.megatron_utils import modules

    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    rank, plain = torch.distributed.get_rank(), token_dispatcher.MoEAlltoAllTokenDispatcher
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=2,
        use_cpu_initialization=True,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    counted = 0

    class Sized(plain):  # type: ignore[misc, valid-type]
        def preprocess(self, routing_map: torch.Tensor) -> torch.Tensor:
            nonlocal counted
            counted += isinstance(self, modules.CountedDispatcher)
            found: torch.Tensor = super().preprocess(routing_map)
            # As a copy from a device leaves them.
            self.input_splits, self.output_splits = self.input_splits.tolist(), self.output_splits.tolist()
            return found

    def make(kind: Any) -> Any:
        return kind(2, [2 * rank, 2 * rank + 1], config=config, pg_collection=groups)

    modules.CountedDispatcher.__bases__ = (Sized,)
    ours, both = make(modules.CountedDispatcher), []
    for step in range(2):
        draw = torch.Generator().manual_seed(10 * step + rank)
        n = 12 + rank
        x, lanes = torch.randn(n, 1, 8, generator=draw), torch.randn(n, 4, generator=draw)
        probs = torch.rand(n, 4, generator=draw)
        routing = torch.zeros(n, 4, dtype=torch.bool).scatter_(1, probs.topk(2).indices, True)
        for one, other in ((ours, ours), (make(Sized), make(Sized))):
            ours.counts = None
            rows = modules._dispatched(one, lanes, n, probs, routing)
            tokens, weights = other.dispatch_preprocess(x, routing, probs)
            tokens, weights = other.token_dispatch(tokens, weights)
            tokens, counts, weights = other.dispatch_postprocess(tokens, weights)
            back = other.combine_postprocess(other.token_combine(other.combine_preprocess(2 * tokens)))
            both.append([value.numpy() for value in (rows, tokens, counts, weights, back)])
    return [*both, [np.array(counted)]]
