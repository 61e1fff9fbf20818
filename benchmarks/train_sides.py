"""The two sides of ``train_speed.py``: one process each, one thread, the same steps on the same numbers.

``ours`` is the Megatron engine. ``peft`` is what one writes with transformers and PEFT: grouped experts
(``grouped_mm``), LoRA on attention and on the fused expert weights, fused Adam. Both cut the batch into the same
micro-batches, compute the same loss and hold the same adapter; before anything is timed, their log-probabilities are
compared.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from train_case import ADAPTER_STD, CASES, Case, make_batch

from areal_lora.algorithms.losses import policy_loss
from areal_lora.algorithms.registry import build_algorithm
from areal_lora.config.models import AdapterConfig, Config
from areal_lora.data.collate import select
from areal_lora.engine.base import EPS, LossFn, LossSums, MicroBatch
from areal_lora.families.shape import ModelShape, read_hf_config
from areal_lora.families.targets import resolve
from areal_lora.types import TrainBatch

SIDES = ("ours", "peft")


def adapter_values(shape: tuple[int, ...], name: str) -> Tensor:
    """Fixed values [rank, in] or [out, rank] of the tensor with this Hugging Face name."""
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    return torch.randn(shape, generator=generator) * ADAPTER_STD


def make_loss(config: AdapterConfig) -> LossFn:
    terms = build_algorithm(config.algorithm, minibatches=1, max_new_tokens=config.sampling.max_new_tokens).terms

    def loss(micro: MicroBatch, logprobs: Tensor, entropy: Tensor | None) -> LossSums:
        assert micro.advantages is not None
        sums = policy_loss(
            terms,
            logprobs=logprobs,
            prox_logprobs=None,
            rollout_logprobs=micro.rollout_logprobs,
            advantages=micro.advantages,
            weights=micro.loss_mask.float(),
            cu_seqlens=micro.cu_seqlens,
            given=micro.given,
        )
        return LossSums(loss=sums.loss)

    return loss


class Side(Protocol):
    def logprobs(self, batch: TrainBatch) -> Tensor: ...

    def step(self, batch: TrainBatch) -> None: ...


class Ours:
    def __init__(self, config: Config) -> None:
        import torch.distributed as dist

        from areal_lora.engine.megatron_engine import MegatronEngine

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self._config = config.adapters[0]
        self._engine = MegatronEngine(config.model, config.trainer, torch.device("cpu"))
        shape = ModelShape.from_hf(read_hf_config(Path(config.model.folder)))
        targets = resolve(self._config.target_modules, self._config.exclude_modules, shape)
        spec = replace(self._config.spec(config.model.folder), target_modules=targets)
        self._engine.add_adapter(spec, self._config.optimizer, seed=1)
        layout = self._engine.adapter_layout(spec.name)
        tensors = [tensor for shard in layout.shards for tensor in shard.tensors]
        self._engine.load_adapter(spec.name, {t.name: adapter_values(t.shape, t.name) for t in tensors})
        self._loss = make_loss(self._config)

    def logprobs(self, batch: TrainBatch) -> Tensor:
        return self._engine.logprobs(batch, adapter=self._config.name)

    def step(self, batch: TrainBatch) -> None:
        self._engine.forward_backward(batch, self._loss)
        self._engine.optim_step(self._config.name, float(batch.loss_mask.sum()), self._config.optimizer.lr)


class Peft:
    def __init__(self, config: Config) -> None:
        from peft import LoraConfig, get_peft_model
        from peft.tuners.lora import LoraLayer
        from transformers import AutoModelForCausalLM

        adapter, optimizer = config.adapters[0], config.adapters[0].optimizer
        model = AutoModelForCausalLM.from_pretrained(
            config.model.folder, dtype=config.model.dtype, experts_implementation="grouped_mm"
        )
        lora = LoraConfig(
            r=adapter.rank,
            lora_alpha=adapter.alpha,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        )
        self._model = get_peft_model(model, lora).train()
        for name, module in self._model.named_modules():
            if isinstance(module, LoraLayer):
                set_adapter(module, name, adapter.rank)
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        betas, self._max_norm = (optimizer.betas[0], optimizer.betas[1]), optimizer.max_grad_norm or math.inf
        self._adam = torch.optim.Adam(self._parameters, lr=optimizer.lr, betas=betas, eps=EPS, fused=True)
        self._budget = config.trainer.max_tokens_per_microbatch
        self._loss = make_loss(adapter)

    def logprobs(self, batch: TrainBatch) -> Tensor:
        packed, bounds = torch.zeros(batch.n_tokens), batch.cu_seqlens.tolist()
        with torch.no_grad():
            for sequences, micro, values in self._run(batch):
                parts = values.split((micro.cu_seqlens[1:] - micro.cu_seqlens[:-1]).tolist())
                for sequence, part in zip(sequences, parts, strict=True):
                    packed[bounds[sequence] : bounds[sequence + 1]] = part
        return packed

    def step(self, batch: TrainBatch) -> None:
        tokens = float(batch.loss_mask.sum())
        for _, micro, logprobs in self._run(batch):
            (self._loss(micro, logprobs, None).loss / tokens).backward()
        nn.utils.clip_grad_norm_(self._parameters, self._max_norm)
        self._adam.step()
        self._adam.zero_grad()

    def _run(self, batch: TrainBatch) -> Iterator[tuple[tuple[int, ...], TrainBatch, Tensor]]:
        """Sequence numbers, micro-batch and its log-probabilities [t], with grad. Rows are padded at their end, so
        no token attends to padding and no mask is needed."""
        for sequences in self._micro_batches(batch):
            micro = select(batch, sequences)
            bounds = micro.cu_seqlens.tolist()
            rows = [micro.token_ids[a:b].long() for a, b in pairwise(bounds)]
            token_ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)  # [b, s]
            logits = self._model(input_ids=token_ids, use_cache=False).logits[:, :-1]  # [b, s - 1, vocabulary]
            values = nn.functional.pad(
                -cross_entropy(logits.transpose(1, 2), token_ids[:, 1:], reduction="none"), (1, 0)
            )
            yield sequences, micro, torch.cat([row[: len(ids)] for row, ids in zip(values, rows, strict=True)])

    def _micro_batches(self, batch: TrainBatch) -> Iterator[tuple[int, ...]]:
        """Sequences by length, as many as the budget of padded tokens holds."""
        lengths = (batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).tolist()
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        while order:
            n = max(self._budget // lengths[order[0]], 1)
            yield tuple(order[:n])
            order = order[n:]


def set_adapter(module: Any, name: str, rank: int) -> None:
    """Give a PEFT layer the values that `Ours` has. PEFT keeps a stack of experts as one matrix: rows of lora_A are
    [expert, rank], columns of lora_B are [rank, expert]."""
    path = name.removeprefix("base_model.model.")
    a, b = module.lora_A["default"].weight.data, module.lora_B["default"].weight.data
    if not hasattr(module, "parameter_name"):
        first = path.replace("k_proj", "q_proj").replace("v_proj", "q_proj")  # q, k, v share one lora_A
        a.copy_(adapter_values(tuple(a.shape), f"{first}.lora_A.weight"))
        b.copy_(adapter_values(tuple(b.shape), f"{path}.lora_B.weight"))
        return
    stem = path[: path.index(".experts") + len(".experts")]
    parts = ("gate_proj", "up_proj") if module.parameter_name == "gate_up_proj" else ("down_proj",)
    rows, out = b.shape[0] // len(parts), b.view(b.shape[0], rank, -1)
    for expert in range(module.num_experts):
        at = f"{stem}.{expert}"
        shape = (rank, a.shape[1])
        a.view(-1, *shape)[expert] = adapter_values(shape, f"{at}.{parts[0]}.lora_A.weight")
        for i, part in enumerate(parts):
            values = adapter_values((rows, rank), f"{at}.{part}.lora_B.weight")
            out[i * rows : (i + 1) * rows, :, expert] = values


def profile(side: Side, batch: TrainBatch, lines: int = 16) -> str:
    """The operators that one step spends its time in."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        started = time.perf_counter()
        side.step(batch)
        total_s = time.perf_counter() - started
    events = sorted(recorded.key_averages(), key=lambda e: -e.self_cpu_time_total)
    table = [f"{'operator':44}{'calls':>8}{'self ms':>10}{'share':>8}"]
    for e in events[:lines]:
        own_s = e.self_cpu_time_total / 1e6
        table.append(f"{e.key[:43]:44}{e.count:8}{own_s * 1e3:10.1f}{own_s / total_s:8.1%}")
    inside_s = sum(e.self_cpu_time_total for e in events) / 1e6
    table.append(f"{total_s:.2f} s while profiled; {1 - inside_s / total_s:.0%} outside of operators (Python)")
    return "\n".join(table)


def main(name: str, case: Case, folder: Path) -> None:
    """Answer commands on stdin with a line of JSON each: ``logprobs``, ``step``, ``profile``."""
    torch.set_num_threads(1)
    config = case.config(folder)
    side: Side = Ours(config) if name == "ours" else Peft(config)
    vocabulary = read_hf_config(folder)["vocab_size"]
    batch = make_batch(case, vocabulary, config.adapters[0].name)
    scored = side.logprobs(batch)
    batch = replace(batch, rollout_logprobs=torch.where(batch.loss_mask, scored, 0.0))
    answers = sys.stdout
    sys.stdout = sys.stderr  # libraries print
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        answer: Any
        match line.strip():
            case "logprobs":
                answer = scored[batch.loss_mask].tolist()
            case "step":
                cpu, wall = time.process_time(), time.perf_counter()
                side.step(batch)
                answer = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
            case _:
                answer = profile(side, batch)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    side_name, case_name, groups, model_folder = sys.argv[1:]
    main(side_name, replace(CASES[case_name], groups=int(groups)), Path(model_folder))
