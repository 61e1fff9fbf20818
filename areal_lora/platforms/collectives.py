"""torch's collectives on single tensors by torch 2.13's names; vLLM 0.24 pins torch 2.11, which has older ones."""

try:
    from torch.distributed import all_gather_single, reduce_scatter_single
except ImportError:
    from torch.distributed import (
        all_gather_into_tensor as all_gather_single,
        reduce_scatter_tensor as reduce_scatter_single,
    )

__all__ = ["all_gather_single", "reduce_scatter_single"]
