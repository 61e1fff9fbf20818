"""What a worker of a pretended tensor or expert parallel group writes, against vLLM's own slicing.

vLLM's LoRA layers for GPUs are built around base layers that have sizes only. The same numbered adapter is given to
``set_lora`` and written by us; all stacks must agree bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from areal_lora.errors import AdapterError, ManifestError
from areal_lora.types import AdapterSpec, ExpertLayout
from tests.support.engine.vllm_ext.lora_layers import (
    MOE,
    TARGETS,
    LayerSizes,
    dense_modules,
    expert_module,
    made,
    packed_modules,
    stacks,
    worker_with,
)
from tests.support.engine.vllm_ext.slots import install, layout_of
from tests.support.lazy import Lazy

lora_install = Lazy("areal_lora.engine.vllm_ext.worker.lora_install")

pytestmark = pytest.mark.slow  # importing vLLM

SIZES, RANK, SLOT = LayerSizes(), 3, 1
PACKED = packed_modules(SIZES.experts)


def set_as_vllm(modules: dict[str, Any], full: dict[str, np.ndarray], ep: int, ep_rank: int) -> None:
    """What vLLM's manager does with a loaded adapter: pack, keep the experts of this worker, ``set_lora``."""
    for name, module in modules.items():
        parts = PACKED.get(name, [name])
        a, b = ([torch.from_numpy(full[f"{p}.lora_{x}.weight"]) for p in parts] for x in "AB")
        if name == MOE:
            held = slice(ep_rank * SIZES.experts // ep, (ep_rank + 1) * SIZES.experts // ep)
            a, b = ([torch.stack(x[i::3])[held] for i in range(3)] for x in (a, b))
            module.set_lora(SLOT, a, b)
        elif len(parts) == 1:
            module.set_lora(SLOT, a[0], b[0])
        else:
            module.set_lora(SLOT, a, b)


def numbered(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """No two elements of an adapter are equal."""
    found, at = {}, 1
    for name, shape in shapes.items():
        n = int(np.prod(shape))
        found[name] = np.arange(at, at + n, dtype=np.float32).reshape(shape)
        at += n
    assert at < 2**24
    return found


def all_modules(tp: int, ep: int, rank: int) -> dict[str, Any]:
    return {
        **dense_modules(SIZES, tp, rank),
        MOE: expert_module(SIZES, "FusedMoEWithLoRA", 1 if ep > 1 else tp, ep, rank),
    }


def common(names: Iterable[str]) -> dict[str, str]:
    """What the experts of a ``shared_outer`` adapter have in common, by name, with its name on the wire."""
    outer = [n for n in names if ".experts." in n and n.endswith("lora_A.weight") != (".down_proj." in n)]
    return {n: first for n in outer if (first := re.sub(r"experts\.\d+", "experts.0", n)) != n}


@pytest.mark.parametrize("layout", [ExpertLayout.PER_EXPERT, ExpertLayout.SHARED_OUTER])
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 4), (8, 8)])
def test_every_worker_holds_what_vllm_would_slice(tp: int, ep: int, layout: ExpertLayout) -> None:
    from areal_lora.engine.vllm_ext.compat.weights import bound_matrices

    shared = layout is ExpertLayout.SHARED_OUTER
    sizes = replace(SIZES, shared_outer=shared)
    spec = AdapterSpec(name="a", base_model="m", rank=RANK, alpha=RANK, target_modules=TARGETS, expert_layout=layout)
    for rank in range(tp):
        ours, theirs = (made(sizes, all_modules(tp, ep, rank)) for _ in range(2))
        writer = lora_install.StackedSlotWriter(bound_matrices(worker_with(ours, PACKED)), SIZES.max_rank)
        full = numbered(writer.expected(spec))
        assert len(full) == 2 * (8 + 3 * SIZES.experts), "q k v o, gate up down, one plain column, the experts"
        aliases = common(full) if shared else {}
        wire = {name: tensor for name, tensor in full.items() if name not in aliases}
        full = wire | {name: wire[first] for name, first in aliases.items()}
        install(writer, SLOT, layout_of(wire, spec, aliases=aliases), wire)
        each = SIZES.experts // ep
        once = 1 if shared else each
        assert [s.shape[1] for s in stacks(ours[MOE])] == [once, once, each, each, each, once], "gate, up; down last"
        set_as_vllm(theirs, full, ep, rank if ep > 1 else 0)
        for name in ours:
            for mine, reference in zip(stacks(ours[name]), stacks(theirs[name]), strict=True):
                assert torch.equal(mine, reference), f"{name} on worker {rank} of {tp}"
                assert mine[SLOT].abs().max() > 0
                assert mine[[0, 2]].abs().max() == 0


def test_slots_that_experts_share_take_no_adapter_whose_experts_differ() -> None:
    """Else the last of them would be served as all."""
    from areal_lora.engine.vllm_ext.compat.weights import bound_matrices

    modules = made(replace(SIZES, shared_outer=True), all_modules(1, 1, 0))
    writer = lora_install.StackedSlotWriter(bound_matrices(worker_with(modules, PACKED)), SIZES.max_rank)
    spec = AdapterSpec(name="a", base_model="m", rank=RANK, alpha=RANK, target_modules=TARGETS)
    full = numbered(writer.expected(spec))
    aliases = common(full)
    for apart in ("experts.3.gate_proj.lora_A", "experts.3.down_proj.lora_B"):
        of_others = {name: first for name, first in aliases.items() if apart not in name}
        wire = {name: tensor for name, tensor in full.items() if name not in of_others}
        with pytest.raises(ManifestError, match=f"{apart}.weight differs from .* for all experts"):
            writer.plan(layout_of(wire, spec, aliases=of_others))
    scaled = replace(spec, alpha_pattern=((r"experts\.3\.down_proj", 9.0),))
    wire = {name: tensor for name, tensor in full.items() if name not in aliases}
    assert writer.plan(layout_of(wire, spec, aliases=aliases))
    with pytest.raises(ManifestError, match=r"experts.3.down_proj.lora_B.weight differs"):
        writer.plan(layout_of(wire, scaled, aliases=aliases))


def test_fused_experts_in_one_tensor_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """``FusedMoE3DWithLoRA`` holds gate and up in one matrix per expert, in an order that depends on the model."""
    from areal_lora.engine.vllm_ext.compat.weights import bound_matrices

    module = made(SIZES, {MOE: expert_module(SIZES, "FusedMoE3DWithLoRA", 2, 1, 0)})
    assert list(bound_matrices(worker_with(module, PACKED))) == []
    with pytest.raises(AdapterError):
        lora_install.StackedSlotWriter(bound_matrices(worker_with(module, PACKED)), SIZES.max_rank)
