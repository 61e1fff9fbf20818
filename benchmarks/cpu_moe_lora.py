"""Measure tokens per second of a mixture-of-experts LoRA on one CPU core.

Usage: ``python benchmarks/cpu_moe_lora.py [--json FILE]``.

Four vLLM engines serve the same 154 M Qwen3-MoE with random weights and the same rank-16 adapter
on attention and all experts. They run side by side, idle unless it is their turn; rounds are
interleaved, and the claims are ratios of medians of one run.

merged   the adapter is merged into the weights and LoRA is off: the limit
ours     the classes this package installs in vLLM
loop     ours, but the experts are a loop: per expert and adapter, index tokens, multiply, add
naive    vLLM with that loop and nothing else of ours: its own LoRA of linear layers
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import IO, Any

import numpy as np
from machine import environment, require_idle

MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 320,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1024,
    "moe_intermediate_size": 192,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "eos_token_id": 1,
    "bos_token_id": 0,
}  # experts per token and their normalisation as in Qwen3-30B-A3B
RANK, ALPHA = 16, 32
VARIANTS = ("merged", "ours", "loop", "naive")
TOLERANCE = {"bfloat16": 0.1, "float32": 1e-4}  # largest difference of a prompt's logprobs between variants
MAX_BUSY = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """``sequences`` prompts of ``prompt`` tokens; ``new`` tokens each, 1 for prefill."""

    sequences: int
    prompt: int
    new: int

    @property
    def kind(self) -> str:
        return "prefill" if self.new == 1 else "decode"

    @property
    def name(self) -> str:
        return f"{self.kind} {self.sequences}" + (f" x {self.prompt}" if self.new == 1 else "")


FULL = (
    Work(sequences=8, prompt=32, new=65),
    Work(sequences=32, prompt=32, new=65),
    Work(sequences=1, prompt=256, new=1),
    Work(sequences=1, prompt=1000, new=1),
    Work(sequences=8, prompt=256, new=1),
)
QUICK = (
    Work(sequences=8, prompt=32, new=17),
    Work(sequences=32, prompt=32, new=17),
    Work(sequences=1, prompt=256, new=1),
    Work(sequences=8, prompt=256, new=1),
)


def make_files(folder: Path, dtype_name: str) -> None:
    """Write ``base`` and ``merged`` checkpoints and the ``adapter`` between them into ``folder``."""
    import torch
    from safetensors.torch import save_file

    dtype = getattr(torch, dtype_name)
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=random) * 0.02).to(dtype)

    base, adapter, merged = {}, {}, {}
    for name, shape in linear_layers():
        base[name], prefix = normal(*shape), f"base_model.model.{name.removesuffix('.weight')}"
        a, b = normal(RANK, shape[1]), normal(shape[0], RANK)
        adapter |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
        merged[name] = (base[name].float() + ALPHA / RANK * b.float() @ a.float()).to(dtype)
    rest = {"model.embed_tokens.weight": normal(320, 512) * 50, "lm_head.weight": normal(320, 512)}
    for i in range(MODEL["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        rest[f"{layer}.mlp.gate.weight"] = normal(128, 512)
        rest |= {f"{layer}.{n}_layernorm.weight": torch.ones(512, dtype=dtype) for n in ("input", "post_attention")}
        rest |= {f"{layer}.self_attn.{n}_norm.weight": torch.ones(64, dtype=dtype) for n in "qk"}
    rest["model.norm.weight"] = torch.ones(512, dtype=dtype)
    for part, tensors, config in (
        ("base", base | rest, {**MODEL, "torch_dtype": dtype_name}),
        ("merged", merged | rest, {**MODEL, "torch_dtype": dtype_name}),
        (
            "adapter",
            adapter,
            {
                "peft_type": "LORA",
                "r": RANK,
                "lora_alpha": ALPHA,
                "bias": "none",
                "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            },
        ),
    ):
        (folder / part).mkdir()
        stem = "adapter_model" if part == "adapter" else "model"
        save_file(tensors, folder / part / f"{stem}.safetensors", metadata={"format": "pt"})
        (folder / part / ("adapter_config.json" if part == "adapter" else "config.json")).write_text(json.dumps(config))
    print(
        f"model: {sum(t.numel() for t in (base | rest).values()) / 1e6:.1f} M parameters, "
        f"adapter {sum(t.numel() for t in adapter.values()) / 1e6:.1f} M in {len(adapter)} tensors, {dtype_name}"
    )


def linear_layers() -> Iterator[tuple[str, tuple[int, int]]]:
    """Names and shapes [out, in] of everything the adapter acts on."""
    hidden, inter, heads = MODEL["hidden_size"], MODEL["moe_intermediate_size"], MODEL["head_dim"]
    q, kv = heads * MODEL["num_attention_heads"], heads * MODEL["num_key_value_heads"]
    for i in range(MODEL["num_hidden_layers"]):
        for n, shape in (("q", (q, hidden)), ("k", (kv, hidden)), ("v", (kv, hidden)), ("o", (hidden, q))):
            yield f"model.layers.{i}.self_attn.{n}_proj.weight", shape
        for e in range(MODEL["num_experts"]):
            for n, shape in (("gate", (inter, hidden)), ("up", (inter, hidden)), ("down", (hidden, inter))):
                yield f"model.layers.{i}.mlp.experts.{e}.{n}_proj.weight", shape


def use_expert_loop(vllm_linear: bool) -> None:
    """Put the loop in place of the package's experts, and with ``vllm_linear`` undo its linear LoRA, too."""
    import torch
    import torch.nn.functional as F
    from vllm.platforms.cpu import CpuPlatform

    from areal_lora.engine.vllm_ext.compat import cpu_kernels

    class ExpertLoop(cpu_kernels.CpuLoraExperts):
        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            """Plain weights."""

        def apply(
            self,
            output: torch.Tensor,
            hidden_states: torch.Tensor,
            w1: torch.Tensor,
            w2: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            slots = self._lora_context.punica_wrapper.token_lora_indices[: topk_ids.shape[0]]
            inter, lora = w2.shape[2], self._adapters
            output.zero_()
            for e in range(w1.shape[0]):
                tokens, choice = (topk_ids == e).nonzero(as_tuple=True)
                if len(tokens) == 0:
                    continue
                x, slot_of = hidden_states[tokens], slots[tokens]
                rows = [(s, slot_of == s) for s in slot_of.unique().tolist() if s >= 0]
                h = x @ w1[e].t()
                for s, mine in rows:
                    h[mine, :inter] += (x[mine] @ lora.gate_a[s, e].t()) @ lora.gate_b[s, e].t()
                    h[mine, inter:] += (x[mine] @ lora.up_a[s, e].t()) @ lora.up_b[s, e].t()
                a = F.silu(h[:, :inter]) * h[:, inter:]
                y = a @ w2[e].t()
                for s, mine in rows:
                    y[mine] += (a[mine] @ lora.down_a[s, e].t()) @ lora.down_b[s, e].t()
                output.index_add_(0, tokens, y * topk_weights[tokens, choice, None].to(y.dtype))

    stock = CpuPlatform.get_punica_wrapper
    cpu_kernels.install_cpu_lora()
    cpu_kernels.CpuLoraExperts = ExpertLoop
    if vllm_linear:
        CpuPlatform.get_punica_wrapper = stock


def child(variant: str, folder: Path, dtype: str) -> None:
    """Answer every ``Work`` on stdin with tokens per second, and an empty line with the logprobs of a prompt."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # one engine is active at a time
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    merged = variant == "merged"
    if variant in ("loop", "naive"):
        use_expert_loop(vllm_linear=variant == "naive")
    llm = LLM(
        model=str(folder / ("merged" if merged else "base")),
        dtype=dtype,
        skip_tokenizer_init=True,
        seed=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        block_size=32,
        max_model_len=1024,
        max_num_seqs=64,
        max_num_batched_tokens=4096,
        enable_lora=not merged,
        max_lora_rank=RANK,
        max_loras=2,
        max_cpu_loras=2,
    )
    lora = None if merged else LoRARequest("adapter", 1, str(folder / "adapter"))
    engine = llm.llm_engine

    def run(work: Work, first_id: int) -> float:
        for i in range(work.sequences):
            # Sequences differ, or all would ask for the same experts. Every round repeats them.
            sampling = SamplingParams(max_tokens=work.new, temperature=1.0, ignore_eos=True, seed=i, detokenize=False)
            prompt = {"prompt_token_ids": Random(i).choices(range(2, MODEL["vocab_size"]), k=work.prompt)}
            engine.add_request(str(first_id + i), prompt, sampling, lora_request=lora)
        if work.kind == "decode":
            engine.step()  # all prompts fit into one step
        started = time.perf_counter()
        while engine.has_unfinished_requests():
            engine.step()
        tokens = work.sequences * (work.prompt if work.kind == "prefill" else work.new - 1)
        return tokens / (time.perf_counter() - started)

    ids = Random(0).choices(range(2, MODEL["vocab_size"]), k=200)
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    scored = llm.generate({"prompt_token_ids": ids}, sampling, lora_request=lora, use_tqdm=False)[0].prompt_logprobs
    print("ready", flush=True)
    next_id = 1000
    for line in sys.stdin:
        if line.strip():
            answer: Any = run(Work(**json.loads(line)), next_id)
            next_id += 100
        else:
            answer = [entry[token].logprob for token, entry in zip(ids[1:], scored[1:], strict=True)]
        print(json.dumps(answer), flush=True)


class Engine:
    def __init__(self, variant: str, folder: Path, dtype: str) -> None:
        command = [sys.executable, __file__, "--child", variant, str(folder), dtype]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def wait(self) -> None:
        while (line := self._output.readline()).strip() != "ready":
            if not line:
                sys.exit("an engine ended before it was ready; its error is above")

    def ask(self, work: Work | None) -> Any:
        assert self._process.stdin
        self._process.stdin.write((json.dumps(asdict(work)) if work else "") + "\n")
        self._process.stdin.flush()
        if not (line := self._output.readline()):
            sys.exit("an engine ended; its error is above")
        return json.loads(line)

    @property
    def _output(self) -> IO[str]:
        assert self._process.stdout
        return self._process.stdout

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def measure(dtype: str, works: tuple[Work, ...], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Measure tokens per second, ``[work][variant]``, one figure per round; the first round of each is dropped."""
    with tempfile.TemporaryDirectory() as scratch:
        make_files(Path(scratch), dtype)
        engines = {v: Engine(v, Path(scratch), dtype) for v in VARIANTS}
        try:
            for engine in engines.values():
                engine.wait()
            check({v: e.ask(None) for v, e in engines.items()}, TOLERANCE[dtype])
            speeds: dict[str, dict[str, list[float]]] = {w.name: {v: [] for v in VARIANTS} for w in works}
            for n in range(rounds + 1):
                for work in works:
                    for variant in VARIANTS if n % 2 else reversed(VARIANTS):
                        speed = engines[variant].ask(work)
                        if n:
                            speeds[work.name][variant].append(speed)
        finally:
            for engine in engines.values():
                engine.close()
    return speeds


def check(logprobs: dict[str, list[float]], tolerance: float) -> None:
    """Check that all variants compute the same: otherwise their speeds cannot be compared."""
    for variant in VARIANTS[1:]:
        worst = max(abs(a - b) for a, b in zip(logprobs[variant], logprobs["merged"], strict=True))
        print(f"logprobs, {variant} against merged: largest difference {worst:.1e}")
        if worst > tolerance:
            sys.exit(f"{variant} is wrong: more than {tolerance}")


def claims(speeds: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    """Ratios of medians; of several sizes the smallest ratio."""
    found = {}
    for kind in ("decode", "prefill"):
        for other in ("naive", "loop", "merged"):
            ratios = [
                statistics.median(by["ours"]) / statistics.median(by[other])
                for name, by in speeds.items()
                if name.startswith(kind)
            ]
            found[f"{kind}_vs_{other}"] = round(min(ratios), 3)
    return found


def report(speeds: dict[str, dict[str, list[float]]]) -> None:
    print(f"{'tokens/s':18}{'':8}{'min':>8}{'p50':>8}{'p99':>8}{'ours / it':>12}")
    for name, by in speeds.items():
        ours = statistics.median(by["ours"])
        for variant, values in by.items():
            low, p50, p99 = np.percentile(values, [0, 50, 99])
            print(f"{name:18}{variant:8}{low:8.0f}{p50:8.0f}{p99:8.0f}{ours / p50:12.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write claims, environment and all figures here")
    parser.add_argument("--quick", action="store_true", help="about a minute")
    parser.add_argument("--force", action="store_true", help="run on a busy machine, too")
    parser.add_argument("--dtype", choices=sorted(TOLERANCE), default="bfloat16")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child[0], Path(options.child[1]), options.child[2])
        return
    require_idle(MAX_BUSY, options.force)
    where = environment()
    works, rounds = (QUICK, 3) if options.quick else (FULL, 11)
    speeds = measure(options.dtype, works, rounds)
    print(f"{rounds} rounds, one thread per engine, 8 of 128 experts per token, rank {RANK}")
    report(speeds)
    found = claims(speeds)
    for claim, ratio in found.items():
        print(f"{claim}: {ratio:.2f}")
    if options.json:
        settings = {"dtype": options.dtype, "rounds": rounds, "rank": RANK, "model": MODEL}
        result = {"claims": found, "environment": where, "settings": settings, "tokens_per_s": speeds}
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
