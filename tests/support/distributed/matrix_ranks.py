"""What each of eight ranks does for the layout matrix: every layout of every world size, in one process each.

A model is built without weights, an adapter attached, loaded and packed; the rank compares what
lies in its Megatron modules with slices that are written down here, and its shard with the
adapter. Where a rank sits is asked of Megatron, not of our own arithmetic.
"""

from __future__ import annotations

import gc
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from areal_lora.config.models import ModelConfig, TrainerConfig
from areal_lora.engine.common.adapter_memory import AdapterMemory, checked
from areal_lora.engine.common.arena import ParallelLayout, Range, ShardedModel, check_widths
from areal_lora.engine.megatron_utils.cpu_patches import install_cpu_patches
from areal_lora.errors import ConfigError
from areal_lora.families.shape import ModelShape
from areal_lora.types import AdapterSpec, ExpertLayout

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
CPU = torch.device("cpu")
HEADS, HEAD_DIM, HIDDEN, FFN, EXPERT_FFN, SHARED_FFN, VOCAB = 24, 2, 16, 48, 24, 72, 48
KV_HEADS = {"qwen3_moe": 2, "mixtral": 24, "qwen3": 4, "llama": 8, "qwen2": 6, "qwen2_moe": 4}
EXPERTS = {"qwen3_moe": 8, "mixtral": 12, "qwen2_moe": 8}
FEWER = ("qwen2", "qwen2_moe")  # in fewer layouts and with one rank
RANKS = (8, 12)


@dataclass(frozen=True)
class Sizes:
    world: int
    tp: int
    pp: int
    ep: int
    etp: int
    virtual: int = 1

    def __str__(self) -> str:
        return f"world {self.world}: tp {self.tp} pp {self.pp} x {self.virtual} ep {self.ep} etp {self.etp}"

    @property
    def layers(self) -> int:
        """Never a multiple of the stages, unless there is one."""
        return self.pp * self.virtual + 1 if self.pp > 1 else 2

    @property
    def pp_layers(self) -> list[int] | None:
        return [1] * (self.pp * self.virtual - 1) + [2] if self.virtual > 1 else None


def layouts(world: int) -> Iterator[Sizes]:
    numbers = range(1, world + 1)
    for tp in numbers:
        for pp in numbers:
            if world % (tp * pp):
                continue
            for ep in numbers:
                for etp in numbers:
                    if world // pp % (ep * etp) == 0:
                        yield Sizes(world, tp, pp, ep, etp)
                        if pp == 2:
                            yield Sizes(world, tp, pp, ep, etp, virtual=2)


def hf_config(kind: str, layers: int) -> dict[str, Any]:
    config = {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS[kind],
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "intermediate_size": FFN,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 64,
    }
    if kind in EXPERTS:
        config |= {"num_experts": EXPERTS[kind], "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT_FFN}
    if kind == "mixtral":
        config |= {"intermediate_size": EXPERT_FFN}
    if kind == "qwen2_moe":
        config |= {"shared_expert_intermediate_size": SHARED_FFN, "mlp_only_layers": [1]}
    return config


@lru_cache(maxsize=256)
def peft_adapter(kind: str, layers: int, experts: ExpertLayout, rank: int) -> dict[str, Tensor]:
    """Every name of a PEFT file of the whole model, written down from its sizes; ties are equal tensors."""
    tensors: dict[str, Tensor] = {}

    def add(module: str, n_in: int, n_out: int, *, a_of: str | None = None, b_of: str | None = None) -> None:
        for name, shape, of in ((f"{module}.lora_A", (rank, n_in), a_of), (f"{module}.lora_B", (n_out, rank), b_of)):
            seed = zlib.crc32(f"{of or name}/{rank}".encode())
            tensors[f"{name}.weight"] = torch.from_numpy(
                np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
            )

    def gated(base: str, width: int, names: tuple[str, str, str], outer: str = "", inner: str = "") -> None:
        """``outer`` is what the sides at the hidden state are of, ``inner`` the others."""
        gate, up, down = names
        outer, inner = outer or base, inner or base
        add(f"{base}.{gate}", HIDDEN, width, a_of=f"{outer}.{gate}.lora_A", b_of=f"{inner}.{gate}.lora_B")
        add(f"{base}.{up}", HIDDEN, width, a_of=f"{outer}.{gate}.lora_A", b_of=f"{inner}.{up}.lora_B")
        add(f"{base}.{down}", width, HIDDEN, a_of=f"{inner}.{down}.lora_A", b_of=f"{outer}.{down}.lora_B")

    plain = ("gate_proj", "up_proj", "down_proj")
    for layer in range(layers):
        base = f"model.layers.{layer}"
        q = f"{base}.self_attn.q_proj"
        for name, n_out in (("q", HEADS), ("k", KV_HEADS[kind]), ("v", KV_HEADS[kind])):
            add(f"{base}.self_attn.{name}_proj", HIDDEN, n_out * HEAD_DIM, a_of=f"{q}.lora_A")
        add(f"{base}.self_attn.o_proj", HEADS * HEAD_DIM, HIDDEN)
        if kind not in EXPERTS or (kind == "qwen2_moe" and layer == 1):
            gated(f"{base}.mlp", FFN, plain)
            continue
        if kind == "qwen2_moe":
            gated(f"{base}.mlp.shared_expert", SHARED_FFN, plain)
        where = "block_sparse_moe" if kind == "mixtral" else "mlp"
        for expert in range(EXPERTS[kind]):
            first = f"{base}.{where}.experts.0"
            outer = "" if experts is ExpertLayout.PER_EXPERT else first
            inner = first if experts is ExpertLayout.SHARED else ""
            names = ("w1", "w3", "w2") if kind == "mixtral" else plain
            gated(f"{base}.{where}.experts.{expert}", EXPERT_FFN, names, outer, inner)
    return tensors


def expected_parts(kind: str, adapter: dict[str, Tensor], path: str, layer: int, expert: int) -> tuple[Tensor, Tensor]:
    """This rank's lora_A and lora_B of the module at ``path``, sliced by hand."""
    from megatron.core import parallel_state

    base = f"model.layers.{layer}"
    tp, n = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()

    def get(module: str, which: str) -> Tensor:
        return adapter[f"{module}.lora_{which}.weight"]

    if path.endswith("linear_qkv"):
        q, k, v = (get(f"{base}.self_attn.{x}_proj", "B") for x in "qkv")
        groups = [x.view(KV_HEADS[kind], -1, HEAD_DIM, x.shape[1]) for x in (q, k, v)]
        fused = torch.cat(groups, dim=1).reshape(-1, q.shape[1])
        return get(f"{base}.self_attn.q_proj", "A"), fused.chunk(n)[tp]
    if path.endswith("linear_proj"):
        o = f"{base}.self_attn.o_proj"
        return get(o, "A").chunk(n, 1)[tp], get(o, "B")
    gate, up, down = "gate_proj", "up_proj", "down_proj"
    if ".shared_experts." in path:
        base += ".mlp.shared_expert"
    elif ".experts." not in path:
        base += ".mlp"
    else:
        base += f".mlp.experts.{expert}"
        tp = parallel_state.get_expert_tensor_parallel_rank()
        n = parallel_state.get_expert_tensor_parallel_world_size()
        if kind == "mixtral":
            base = base.replace(".mlp.", ".block_sparse_moe.")
            gate, up, down = "w1", "w3", "w2"
    if path.endswith("linear_fc2"):
        return get(f"{base}.{down}", "A").chunk(n, 1)[tp], get(f"{base}.{down}", "B")
    halves = [get(f"{base}.{x}", "B").chunk(n)[tp] for x in (gate, up)]
    return get(f"{base}.{gate}", "A"), torch.cat(halves)


def check_modules(kind: str, module: nn.Module, adapter: dict[str, Tensor], layout: ExpertLayout) -> int:
    """Every adapted module of this rank against hand-made slices; returns how many there were."""
    from megatron.core import parallel_state

    from areal_lora.engine.megatron_utils.modules import AdaptedLinear, GroupedLinear

    ep = parallel_state.get_expert_model_parallel_rank()
    each = EXPERTS.get(kind, 0) // parallel_state.get_expert_model_parallel_world_size()
    checked_modules = 0
    for path, found in module.named_modules():
        if isinstance(found, AdaptedLinear):
            part = found.residents["a"]
            a, b, weight = part.lora_a, part.lora_b, found.to_wrap.weight
        elif isinstance(found, GroupedLinear):
            lora = found.residents["a"]
            assert lora.a is not None, path
            assert lora.b is not None, path
            a, b, weight = lora.a, lora.b, found.weight
        else:
            continue
        head, _, rest = path.partition("layers.")
        number, _, _ = rest.partition(".")
        layer = module.get_submodule(f"{head}layers.{number}").layer_number - 1  # Megatron's own global number
        assert (weight.shape[-1], weight.shape[-2]) == (a.shape[-1], b.shape[-2]), path
        routed, fc1 = isinstance(found, GroupedLinear), path.endswith("linear_fc1")
        several = layout is ExpertLayout.PER_EXPERT
        stack_a = routed and (several or (layout is ExpertLayout.SHARED_OUTER and not fc1))
        stack_b = routed and (several or (layout is ExpertLayout.SHARED_OUTER and fc1))
        assert (a.dim(), b.dim()) == (3 if stack_a else 2, 3 if stack_b else 2), path
        experts = list(range(ep * each, (ep + 1) * each)) if stack_a or stack_b else [0]
        for i, expert in enumerate(experts):
            wanted_a, wanted_b = expected_parts(kind, adapter, path, layer, expert)
            assert torch.equal(a[i] if stack_a else a, wanted_a), (path, expert)
            assert torch.equal(b[i] if stack_b else b, wanted_b), (path, expert)
        checked_modules += 1
    return checked_modules


def one_adapter(kind: str, module: nn.Module, model: ShardedModel, spec: AdapterSpec, groups: Any, layers: int) -> str:
    """Load, compare, pack, compare; returns the digest of the wire layout."""
    from areal_lora.engine.layers.active import ActiveAdapters
    from areal_lora.engine.megatron_utils import modules

    adapter = peft_adapter(kind, layers, spec.expert_layout, spec.rank)
    memory = AdapterMemory(model, spec, dist.get_rank(), CPU)
    modules.attach(module, memory, ActiveAdapters())
    layout = memory.layout("float32")
    names = {t.name for s in layout.shards for t in s.tensors}
    assert names | layout.aliases.keys() == adapter.keys()
    memory.load(memory.weights, checked(layout, adapter))
    assert check_modules(kind, module, adapter, spec.expert_layout) > 0
    modules.detach(module, "a")
    for dtype, kept in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        if kept is torch.bfloat16 and spec.rank != RANKS[-1]:
            continue
        shard = memory.packer(dtype).shard
        flat = torch.zeros(shard.nbytes if shard else 0, dtype=torch.uint8)
        done = list(memory.packer(dtype).fill(memory.weights, flat, groups))
        if shard is None:
            assert done == []
            continue
        assert done[-1] == len(shard.tensors)
        values = flat.view(kept)
        at = 0
        for t in shard.tensors:
            wanted = adapter[t.name].to(kept)
            assert torch.equal(values[at : at + wanted.numel()].view(wanted.shape), wanted), t.name
            at += wanted.numel()
        assert at == values.numel()
    return layout.digest


def megatron_refuses(config: TrainerConfig, hf: dict[str, Any]) -> str:
    """What Megatron itself says to sizes that our checks refuse. Fails if it accepts them."""
    from areal_lora.engine.megatron_utils import megatron_model

    stages = tuple(config.pp_layers or (2 if stage == 0 and config.pp > 1 else 1 for stage in range(config.pp)))
    layout = ParallelLayout(
        world=config.world_size,
        tp=config.tp,
        pp=config.pp,
        ep=config.ep,
        etp=config.etp,
        stage_layers=stages if config.pp > 1 else (2,),
        experts=hf.get("num_experts", 0),
    )
    try:
        megatron_model.build_model(ModelConfig(path="", dtype="float32"), config, layout, hf, CPU)
    except (ValueError, AssertionError, RuntimeError) as error:
        return f"{type(error).__name__} {str(error).splitlines()[0] if str(error) else ''}".strip()
    raise AssertionError(f"Megatron accepts {config}")


def one_layout(sizes: Sizes, index: int, refused: dict[str, str], digests: dict[str, str]) -> int:
    """All families and adapters in one layout; returns how many combinations were checked."""
    from megatron.core import parallel_state

    from areal_lora.engine.megatron_utils import megatron_model

    count = 0
    config = TrainerConfig(
        world_size=sizes.world, tp=sizes.tp, pp=sizes.pp, ep=sizes.ep, etp=sizes.etp, pp_layers=sizes.pp_layers
    )
    tp_group, etp_group = megatron_model.initialize_parallel(config, CPU)
    groups = {Range.DENSE_SPLIT: tp_group, Range.EXPERT_SPLIT: etp_group}
    try:
        for kind in KV_HEADS:
            if kind not in EXPERTS and (sizes.ep, sizes.etp) != (1, 1):
                continue
            if kind in FEWER and index % 8:
                continue
            hf = hf_config(kind, sizes.layers)
            shape = ModelShape.from_hf(hf)
            try:
                check_widths(config, shape)
                layout = ParallelLayout.of(config, layers=shape.layers, experts=shape.experts)
            except ConfigError as error:
                refused[f"{kind}, {sizes}"] = f"{error.reason}; Megatron: {megatron_refuses(config, hf)}"
                continue
            module, _ = megatron_model.build_model(ModelConfig(path="", dtype="float32"), config, layout, hf, CPU)
            for parameter in module.parameters():
                parameter.requires_grad_(False)
            model = ShardedModel(shape=shape, layout=layout)
            for experts in ExpertLayout if kind in EXPERTS else (ExpertLayout.PER_EXPERT,):
                outer = experts is ExpertLayout.SHARED_OUTER
                if outer and index % 4:
                    continue
                for rank in RANKS[-1:] if kind in FEWER or outer else RANKS:
                    spec = AdapterSpec(
                        name="a", base_model="b", rank=rank, alpha=16.0, target_modules=TARGETS, expert_layout=experts
                    )
                    where = f"{kind}, {sizes}, {experts}, rank {rank}"
                    digests[where] = one_adapter(kind, module, model, spec, groups, sizes.layers)
                    count += 1
    finally:
        parallel_state.destroy_model_parallel()
    return count


def kinds(numbered: tuple[int, Sizes]) -> Iterator[object]:
    """What a sample has a layout of: worlds that are powers of two and one that is none, every way to split, and one
    that all families and adapters are in.
    """
    index, sizes = numbered
    yield sizes.world if sizes.world in (1, 2, 4, 8) else "no power of two"
    split = (sizes.tp > 1, sizes.pp > 1, sizes.ep > 1, sizes.etp > 1, sizes.world > sizes.tp * sizes.pp)
    yield from (name for name, has in zip(("tp", "pp", "ep", "etp", "dp"), split, strict=True) if has)
    if sizes.virtual > 1:
        yield "virtual stages", sizes.tp > 1, sizes.ep > 1, sizes.etp > 1
    yield "all fit" if sizes.world in (2, 4, 8) and not index else "some fit"


def matrix(folder: str, chosen: list[tuple[int, Sizes]]) -> dict[str, Any]:
    """Layouts, with their numbers among those of their world; a rank that a world leaves out is done."""
    install_cpu_patches()
    rank = dist.get_rank()
    found: dict[str, Any] = {"combinations": 0, "refused": {}, "digests": {}, "layouts": 0}
    dist.destroy_process_group()
    gc.freeze()  # what is imported is never garbage; without this each collection takes a second
    for index, sizes in chosen:
        if rank >= sizes.world:
            continue
        # A world of its own: Megatron leaves its groups behind, and every gloo group has threads.
        dist.init_process_group(
            "gloo",
            init_method=f"file://{Path(folder) / f'world-{sizes.world}-{index}'}",
            rank=rank,
            world_size=sizes.world,
            timeout=timedelta(seconds=150),
        )
        found["combinations"] += one_layout(sizes, index, found["refused"], found["digests"])
        found["layouts"] += 1
        dist.barrier()
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for the caller to destroy
    return found
