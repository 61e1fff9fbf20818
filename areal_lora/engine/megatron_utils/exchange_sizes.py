"""How many rows expert-parallel ranks exchange in each layer, of all layers of a micro-batch at once.

Megatron's all-to-all dispatcher counts a routing on the device, and the host waits for the numbers in every layer. With
router replay all experts are known before the forward pass, so the host waits once a micro-batch.
"""

from dataclasses import dataclass, replace

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from areal_lora.engine.layers.active import PackedTokens
from areal_lora.engine.layers.attention import PackedMicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedTokens(PackedTokens):
    """Tokens whose ``routes`` name an expert everywhere, and the rows that go to experts in each of L layers.

    ``sent`` and ``received`` [L, ep] are those to and from each expert-parallel rank, ``gathered`` [L, etp] int64 those
    of each expert-tensor-parallel rank, all on the host. ``here`` [L, etp * ep, n] int64, on the device, are those from
    every rank to the n experts of this one.
    """

    sent: list[list[int]]
    received: list[list[int]]
    gathered: Tensor
    here: Tensor


class CountedDispatcher(MoEAlltoAllTokenDispatcher):  # type: ignore[misc]
    """Megatron's, which waits once where a routing is dispatched twice, and never where all experts are on this rank or
    its sizes are known.

    ``counts`` are those of the first dispatch, which keeps all sizes, or of `expect`; None before.
    """

    counts: Tensor | None = None

    def expect(self, tokens: SizedTokens, layer: int) -> None:
        """Let the sizes of ``layer`` be those of the next routing."""
        self.input_splits, self.output_splits = tokens.sent[layer], tokens.received[layer]
        self.output_splits_tp, self.num_out_tokens = tokens.gathered[layer], sum(tokens.sent[layer])
        self.num_global_tokens_per_local_expert = tokens.here[layer]
        self.counts = tokens.here[layer].sum(0)

    def preprocess(self, routing_map: Tensor) -> Tensor:
        return super().preprocess(routing_map) if self.counts is None else self.counts

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
        if self.counts is not None or (not self.exchanges and self.config.moe_permute_fusion):
            return tokens_per_expert
        found: Tensor | None = super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)
        return found

    @property
    def exchanges(self) -> bool:
        """Whether some experts, or parts of them, are on other ranks."""
        return bool(self.ep_size * self.tp_size > 1)


def with_sizes(packed: PackedMicroBatch, dispatcher: CountedDispatcher) -> PackedTokens:
    """The tokens of ``packed``, which has routes, with the sizes of their exchange. Collective; the host waits once.

    Of tokens that nothing reads, the last ones of sequences and padding, a server has no routes: they get experts in
    turn. Where a route of another token is missing, on any rank, the tokens are as they were.
    """
    tokens, routes, ep, tp = packed.tokens, packed.tokens.routes, dispatcher.ep_size, dispatcher.tp_size
    assert routes is not None
    assert packed.followed is not None
    (t, layers, k), first, n = routes.shape, dispatcher.local_expert_indices[0], dispatcher.num_local_experts
    experts = ep * n
    unread = routes.new_ones((t, 1, 1), dtype=torch.bool).index_fill_(0, packed.followed, False)
    routes = torch.where(unread, _in_turn(t, k, experts, routes.device), routes)
    own = own_part(routes, t // parallel_state.get_tensor_model_parallel_world_size())
    chosen = own.transpose(0, 1).flatten(1).long() + 1  # [L, rows]; 0 is none
    counts = chosen.new_zeros(layers, 1 + experts).scatter_add_(1, chosen, chosen.new_ones(1, 1).expand_as(chosen))
    counts = counts[:, 1:].contiguous()
    every = gather_from_sequence_parallel_region(counts, group=dispatcher.tp_ep_group)
    every = every.view(ep, tp, layers, experts).permute(2, 1, 0, 3)
    here = every[..., first : first + n].flatten(1, 2).contiguous()
    sizes = (counts.view(layers, ep, n).sum(2), here.sum(2), every.flatten(1).sum(1, keepdim=True))
    sent, found, total = on_host(torch.cat(sizes, 1)).split([ep, tp * ep, 1], 1)
    if (total < tp * ep * chosen.shape[1]).any():
        return tokens
    found = found.view(layers, tp, ep)
    return SizedTokens(
        keys=tokens.keys,
        ends=tokens.ends,
        owners=tokens.owners,
        routes=routes,
        sent=sent.tolist(),
        received=found[:, dispatcher.tp_rank].tolist(),
        gathered=found.sum(2),
        here=here,
    )


def padding_in_turn(packed: PackedMicroBatch, layers: int, k: int, experts: int) -> PackedTokens:
    """The tokens of ``packed``, whose padding gets ``k`` of the ``experts`` in turn in each layer.

    Padding is equal tokens: a router would send all of them to the same experts, on few expert-parallel ranks.
    """
    tokens, t, n = packed.tokens, len(packed.tokens.keys), packed.attention.n
    if n == t:
        return tokens
    turns, every = _in_turn(t, k, experts, tokens.keys.device), layers if tokens.routes is None else -1
    routes = torch.full_like(turns, -1) if tokens.routes is None else tokens.routes
    routes = torch.cat([routes[:n], turns[n:].expand(-1, routes.shape[1], -1)])
    return replace(tokens, routes=routes.expand(-1, every, -1))


def _in_turn(t: int, k: int, experts: int, device: torch.device) -> Tensor:
    """[t, 1, k] int16."""
    return torch.arange(t * k, device=device).remainder(experts).to(torch.int16).view(t, 1, k)


def on_host(numbers: Tensor) -> Tensor:
    """The wait of a micro-batch."""
    return numbers.cpu()


def own_part(rows: Tensor, own: int) -> Tensor:
    """Of the micro-batch's ``rows`` [t, ...] those of a rank that has ``own`` of its tokens, all or a part of them."""
    first = parallel_state.get_tensor_model_parallel_rank() * own if own < len(rows) else 0
    return rows[first : first + own]
