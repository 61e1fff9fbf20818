"""A table of patches that lets Megatron-core 0.16 and Megatron-Bridge 0.3 run without a GPU.

Megatron takes from `torch.cuda` its device, streams and RNG state even where there is no GPU. The engine calls
`install_cpu_patches` before the first import of Megatron, and only where the device is cpu.
"""

import contextlib
import importlib
import importlib.machinery
import pkgutil
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

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


class DoneRequest:
    """A message that has been waited for."""

    def wait(self) -> None: ...


def _at_once(exchange: Any) -> Any:
    """``exchange`` of messages with both neighbours, complete when it returns."""

    def exchanged(**messages: Any) -> dict[str, DoneRequest]:
        requests = exchange(**messages)
        for request in requests.values():
            request.wait()
        return {name: DoneRequest() for name in requests}

    return exchanged


def _get_rng_state(*_: object, **__: object) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_: object, **__: object) -> None:
    torch.set_rng_state(state)


# Modules (or ``module:Class``), the attributes of them that are replaced, and by what.
TORCH_PATCHES = (
    ("torch.cuda", "current_device", lambda: CPU),  # buffers are allocated there
    ("torch.cuda", "current_stream", lambda *_: NullStream()),  # streams are compared and waited for
    ("torch.cuda", "Stream", NullStream),  # a class, because transformers annotates with torch.cuda.Stream | None
    ("torch.cuda", "synchronize", lambda *_: None),  # pipeline communication synchronises the device
    # RNG trackers save, restore and seed the device generator.
    ("torch.cuda", "get_rng_state", _get_rng_state),
    ("torch.cuda", "set_rng_state", _set_rng_state),
    ("torch.cuda", "manual_seed", torch.manual_seed),
)
MEGATRON_PATCHES = (
    # Activation recomputation saves and restores the device generator.
    ("megatron.core.tensor_parallel.random", "_get_cuda_rng_state", _get_rng_state),
    ("megatron.core.tensor_parallel.random", "_set_cuda_rng_state", _set_rng_state),
    # The router reads this name, which exists only with Transformer Engine.
    ("megatron.core.transformer.moe.moe_utils", "te_general_gemm", None),
    # The token counter of every schedule is made on device="cuda".
    ("megatron.core.pipeline_parallel.schedules", "torch", _TorchOnCpu()),
    # Tied embeddings of two stages are copied with .cuda(); both are read from the folder.
    (
        "megatron.core.models.common.language_module.language_module:LanguageModule",
        "_is_in_embd_group",
        lambda _: False,
    ),
    ("megatron.core.models.backends", "WrappedTorchNorm", RmsNorm),  # the stock one rejects sequence parallelism
    ("megatron.core.models.gpt.gpt_layer_specs", "LNImpl", RmsNorm),  # final norm of the local layer spec
    ("megatron.core.transformer.transformer_block", "LayerNormImpl", RmsNorm),  # final norm of the block
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


_installed = False


def install_cpu_patches() -> None:
    """Make Megatron-core and Megatron-Bridge importable and runnable on a machine without GPU. Idempotent."""
    global _installed
    if _installed:
        return
    for patches in (TORCH_PATCHES, MEGATRON_PATCHES):
        for module, name, value in patches:
            setattr(pkgutil.resolve_name(module), name, value)
    p2p = importlib.import_module("megatron.core.pipeline_parallel.p2p_communication")
    # With several messages of virtual stages in flight, what arrives over gloo is wrong.
    p2p._p2p_ops = _at_once(p2p._p2p_ops)  # type: ignore[attr-defined]
    importlib.import_module("megatron.core.extensions.transformer_engine")
    with _transformer_engine_stub():
        importlib.import_module("megatron.bridge.models.gpt_provider")
        importlib.import_module("megatron.bridge.peft.lora_layers")
    # The stub's classes are no layers to match.
    sys.modules["megatron.bridge.peft.utils"].HAVE_TE = False  # type: ignore[attr-defined]
    _installed = True
