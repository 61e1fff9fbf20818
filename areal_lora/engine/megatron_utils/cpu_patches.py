"""A table of patches that lets Megatron-core 0.16 and Megatron-Bridge 0.3 run without a GPU.

Megatron takes from `torch.cuda` its device, streams and RNG state even where there is no GPU. Each row states
what is replaced and why. The engine calls `install_cpu_patches` before the first import of Megatron, and only
where the device is cpu.

`TokenExchange` carries tokens to the ranks of their experts and back, in the place of Megatron's dispatcher. Of those
gloo runs the one that gathers all tokens. That one gathers hidden states, probabilities and the routing map one after
the other, and gloo computes its reduce-scatters as all-reduces of all ranks' rows. Here a layer's rows cross once in
each direction::

    out    hidden states and routing weights of all ranks are gathered, both at once
    back   every rank sends each rank its part of that rank's tokens; the receiver adds the parts, in rank order

Each direction is the transpose of the other, so it is the other's backward pass.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import pkgutil
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn

CPU = torch.device("cpu")


class NullStream:
    """Replace a CUDA stream: work on the CPU is already in order."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...


class _TorchOnCpu(types.ModuleType):
    """`torch` for a module that hard-codes ``device="cuda"`` in calls of `zeros` and `ones`."""

    def __init__(self) -> None:
        super().__init__("torch")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, **{**kwargs, "device": CPU})

    def ones(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.ones(*args, **{**kwargs, "device": CPU})


class RmsNorm(torch.nn.Module):  # type: ignore[misc]
    """RMSNorm with a frozen weight, built the way Megatron builds norms; takes part in sequence parallelism.

    Correct under sequence parallelism because the norm is per token and its weight is frozen:
    no gradient has to be summed over the sequence shards. Computed in fp32.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.detach().float()
        wide = x.float()
        # A vector norm sums more accurately than rms_norm: an update of Mixtral is 2.7e-5 instead of 4.6e-5 off.
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        normed: torch.Tensor = wide * torch.rsqrt(norm.square() / wide.shape[-1] + self.eps) * weight
        return normed.to(x.dtype)


def _get_rng_state(*_: object, **__: object) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_: object, **__: object) -> None:
    torch.set_rng_state(state)


@dataclass(frozen=True, slots=True)
class Patch:
    """Replace attribute ``name`` of ``module`` (or ``module:Class``) by ``value``, because of ``why``."""

    module: str
    name: str
    value: Any
    why: str


TORCH_PATCHES = (
    Patch("torch.cuda", "current_device", lambda: CPU, "buffers are allocated on torch.cuda.current_device()"),
    Patch("torch.cuda", "current_stream", lambda *_: NullStream(), "streams are compared and waited for"),
    Patch("torch.cuda", "Stream", NullStream, "a class, because transformers annotates with torch.cuda.Stream | None"),
    Patch("torch.cuda", "synchronize", lambda *_: None, "pipeline communication synchronises the device"),
    Patch("torch.cuda", "get_rng_state", _get_rng_state, "RNG trackers save and restore the device generator"),
    Patch("torch.cuda", "set_rng_state", _set_rng_state, "RNG trackers save and restore the device generator"),
    Patch("torch.cuda", "manual_seed", torch.manual_seed, "RNG trackers seed the device generator"),
)

MEGATRON_PATCHES = (
    Patch(
        "megatron.core.tensor_parallel.random",
        "_get_cuda_rng_state",
        _get_rng_state,
        "activation recomputation saves the device generator",
    ),
    Patch(
        "megatron.core.tensor_parallel.random",
        "_set_cuda_rng_state",
        _set_rng_state,
        "activation recomputation restores the device generator",
    ),
    Patch(
        "megatron.core.transformer.moe.moe_utils",
        "te_general_gemm",
        None,
        "the router reads this name, which exists only with Transformer Engine",
    ),
    Patch(
        "megatron.core.pipeline_parallel.schedules",
        "torch",
        _TorchOnCpu(),
        'the token counter of every schedule is made on device="cuda"',
    ),
    Patch(
        "megatron.core.models.common.language_module.language_module:LanguageModule",
        "_is_in_embd_group",
        lambda _: False,
        "tied embeddings of two stages are copied with .cuda(); both are read from the folder",
    ),
    Patch("megatron.core.models.backends", "WrappedTorchNorm", RmsNorm, "the stock one rejects sequence parallelism"),
    Patch("megatron.core.models.gpt.gpt_layer_specs", "LNImpl", RmsNorm, "final norm of the local layer spec"),
    Patch("megatron.core.transformer.transformer_block", "LayerNormImpl", RmsNorm, "final norm of the block"),
)


BRIDGE_PATCHES = (
    Patch("megatron.bridge.peft.utils", "HAVE_TE", False, "the stand-in's classes are no layers to match"),
)


class _StubModule(types.ModuleType):
    """Return an empty class for `Name` and another stub for `name`, so that class bodies can be executed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StubModule(name) if name.islower() else type(name, (torch.nn.Module,), {})


@contextlib.contextmanager
def _transformer_engine_stub() -> Iterator[None]:
    """Provide Transformer Engine while Bridge's PEFT files import it at module level.

    Megatron-core must have been imported before, without Transformer Engine.
    """
    names = ("transformer_engine", "transformer_engine.pytorch")
    for name in names:
        module = _StubModule(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
        sys.modules[name] = module
    sys.modules[names[0]].pytorch = sys.modules[names[1]]  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def _apply(patches: tuple[Patch, ...]) -> None:
    for patch in patches:
        setattr(pkgutil.resolve_name(patch.module), patch.name, patch.value)


_installed = False


def install_cpu_patches() -> None:
    """Make Megatron-core and Megatron-Bridge importable and runnable on a machine without GPU. Idempotent."""
    global _installed
    if _installed:
        return
    _apply(TORCH_PATCHES)
    _apply(MEGATRON_PATCHES)
    importlib.import_module("megatron.core.extensions.transformer_engine")
    with _transformer_engine_stub():
        importlib.import_module("megatron.bridge.models.gpt_provider")
        importlib.import_module("megatron.bridge.peft.lora_layers")
    _apply(BRIDGE_PATCHES)
    _installed = True


NOT_ROUTED = -1.0  # in place of a routing weight, which is not negative


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that share tokens, t of each: all expert-parallel and expert-tensor-parallel ones."""

    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        return int(dist.get_world_size(self.group))

    def gathered(self, *mine: Tensor) -> list[Tensor]:
        """[ranks * t, ...] of each [t, ...]."""
        if self.size == 1:
            return list(mine)
        whole = [x.new_empty(self.size * x.shape[0], *x.shape[1:]) for x in mine]
        _wait(
            dist.all_gather_into_tensor(out, x.contiguous(), group=self.group, async_op=True)
            for out, x in zip(whole, mine, strict=True)
        )
        return whole

    def summed(self, *parts: Tensor) -> list[Tensor]:
        """[t, ...]: this rank's tokens in the [ranks * t, ...] of all ranks, added up in fp32."""
        if self.size == 1:
            return list(parts)
        received = [torch.empty_like(x) for x in parts]
        _wait(
            dist.all_to_all_single(out, x, group=self.group, async_op=True)
            for out, x in zip(received, parts, strict=True)
        )
        return [x.view(self.size, -1, *x.shape[1:]).sum(0, dtype=torch.float32).to(x.dtype) for x in received]


def _wait(works: Iterable[dist.Work]) -> None:
    for work in list(works):  # all are started first
        work.wait()


@dataclass(frozen=True, slots=True)
class Route:
    """Row k of a rank's experts is token ``tokens[k]`` of all ranks' n, at expert ``experts[k]``, [T] int64 each.

    Rows are sorted by expert, then by token. Experts count from the first of all ranks.
    """

    ranks: Ranks
    tokens: Tensor
    experts: Tensor

    @classmethod
    def of(cls, ranks: Ranks, weights: Tensor, own: range) -> Route:
        """From the routing weights [n, experts] of all ranks' tokens, for a rank with the experts ``own``."""
        experts, tokens = (weights[:, own.start : own.stop].t() >= 0).nonzero().t().contiguous()
        return cls(ranks, tokens, experts + own.start)


class _ToExperts(torch.autograd.Function):  # type: ignore[misc]
    """Hidden states [t, h] and probabilities [t, experts] of this rank's tokens to rows [T, h], [T] of its experts.

    ``gathered`` are both of all ranks' tokens, constants.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, probs: Tensor, gathered: tuple[Tensor, Tensor], route: Route
    ) -> tuple[Tensor, Tensor]:
        whole, weights = gathered
        ctx.route, ctx.shapes = route, (whole.shape, weights.shape)
        return whole.index_select(0, route.tokens), weights[route.tokens, route.experts]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (d_rows, d_weights), route = grads, ctx.route
        hidden, probs = (d.new_zeros(shape) for d, shape in zip(grads, ctx.shapes, strict=True))
        hidden.index_add_(0, route.tokens, d_rows)
        probs[route.tokens, route.experts] = d_weights
        d_hidden, d_probs = route.ranks.summed(hidden, probs)
        return d_hidden, d_probs, None, None


class _FromExperts(torch.autograd.Function):  # type: ignore[misc]
    """Rows [T, h] of this rank's experts to the sums [t, h] of this rank's tokens over all their experts."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route, n_tokens: int) -> Tensor:
        ctx.route = route
        (out,) = route.ranks.summed(rows.new_zeros(n_tokens, rows.shape[1]).index_add_(0, route.tokens, rows))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (whole,) = ctx.route.ranks.gathered(*grads)
        return whole.index_select(0, ctx.route.tokens), None, None


class TokenExchange:
    """The methods of Megatron's ``MoETokenDispatcher``, called in this order in every forward pass of a layer.

    ``own`` are this rank's experts.
    """

    def __init__(self, ranks: Ranks, own: range) -> None:
        self._ranks, self._own = ranks, own
        self._shape = torch.Size()
        self._routing_map: Tensor | None = None
        self._route: Route | None = None

    def dispatch_preprocess(self, hidden: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """``hidden`` [..., h] to [t, h]; ``routing_map`` bool and ``probs`` are [t, experts]."""
        self._shape, self._routing_map = hidden.shape, routing_map
        return hidden.reshape(-1, hidden.shape[-1]), probs

    def token_dispatch(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [T, h] of this rank's experts, and their routing weights [T]."""
        assert self._routing_map is not None
        with torch.no_grad():
            weights = torch.where(self._routing_map, probs, NOT_ROUTED)
            whole, weights = self._ranks.gathered(hidden, weights)
        self._route = Route.of(self._ranks, weights, self._own)
        rows, row_weights = _ToExperts.apply(hidden, probs, (whole, weights), self._route)
        return rows, row_weights

    def dispatch_postprocess(self, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The rows, their number at each expert [experts of this rank] int64, their weights."""
        assert self._route is not None
        counts = torch.bincount(self._route.experts - self._own.start, minlength=len(self._own))
        return rows, counts, weights

    def combine_preprocess(self, rows: Tensor) -> Tensor:
        return rows

    def token_combine(self, rows: Tensor) -> Tensor:
        """[t, h]."""
        n_tokens = self._shape[:-1].numel() * self._ranks.size
        out: Tensor = _FromExperts.apply(rows, self._route, n_tokens)
        return out

    def combine_postprocess(self, out: Tensor) -> Tensor:
        return out.view(self._shape)


def exchange_tokens(model: nn.Module) -> None:
    """Put `TokenExchange` in place of the dispatchers of ``model``."""
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            own = layer.local_expert_indices
            ranks = Ranks(layer.token_dispatcher.tp_ep_group)
            layer.token_dispatcher = TokenExchange(ranks, range(own[0], own[-1] + 1))
