"""The groups that share the gradients of an adapter in Megatron's layouts."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state

from areal_lora.engine.common.adapter_memory import AdapterMemory
from areal_lora.engine.common.arena import Range
from areal_lora.engine.common.optimizer import GradientClass
from areal_lora.types import ExpertLayout


def classify(memory: AdapterMemory) -> list[GradientClass]:
    """The groups over which the gradients of each range of a rank's memory must be summed.

    Split tensors are whole after the sum over their replicas, replicated ones need their tensor-parallel
    ranks' parts as well (see `lora`). The gradient of what all experts share covers this rank's experts only: its
    replicas include the expert-parallel ranks. With ``shared_outer`` these are the whole matrices, and the split ones
    are each expert's own. Each element counts once in the norm.
    """
    layout, rank = memory.model.layout, memory.rank
    dense = [parallel_state.get_data_parallel_group(with_context_parallel=True)]
    experts = [parallel_state.get_expert_data_parallel_group()]
    first_dense, first_expert = layout.dp_rank(rank) == 0, layout.edp_rank(rank) == 0
    every = [*experts, parallel_state.get_expert_model_parallel_group()]
    first_of_all = first_expert and layout.ep_rank(rank) == 0
    shared = memory.spec.expert_layout
    split, first_split = (every, first_of_all) if shared is ExpertLayout.SHARED else (experts, first_expert)
    whole, first_whole = (experts, first_expert) if shared is ExpertLayout.PER_EXPERT else (every, first_of_all)
    tp, etp = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_expert_tensor_parallel_group()
    rows = (
        (Range.DENSE_SPLIT, dense, first_dense),
        (Range.DENSE_WHOLE, [tp, *dense], first_dense and layout.tp_rank(rank) == 0),
        (Range.EXPERT_SPLIT, split, first_split),
        (Range.EXPERT_WHOLE, [etp, *whole], first_whole and layout.etp_rank(rank) == 0),
    )
    classes = []
    for part, groups, counted in rows:
        start, end = memory.arena.extent(part)
        if end > start:
            needed = [group for group in groups if dist.get_world_size(group) > 1]
            classes.append(GradientClass(start=start, end=end, groups=needed, counted=counted))
    return classes
