"""Rollout speed with the adapter merged, beside it and without one: ``python benchmarks/rollout_speed.py``.

Four engines of the embedded example run side by side, idle unless it is their turn: one started without LoRA, one
without LoRA whose weights were replaced by merged ones, one with LoRA and asked for the base, one with LoRA and an
adapter on attention and all experts. Rounds are interleaved; ratios are of the same round. Then two real servers get
versions of that adapter in turn, one merged and one not: bytes and milliseconds of a publish.
``--json FILE`` writes the claims, ``--quick`` takes 3 rounds.
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
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "math"
SEQUENCES, NEW_TOKENS, ROUNDS, QUICK_ROUNDS = 64, 64, 15, 3
NO_LORA, MERGED, BASE, UNMERGED = VARIANTS = ("engine without LoRA", "merged", "base request", "adapter request")
RATIOS = {
    "merged_vs_no_lora": (MERGED, NO_LORA),
    "merged_vs_unmerged": (MERGED, UNMERGED),
    "adapter_vs_no_lora_engine": (UNMERGED, NO_LORA),
    "adapter_vs_base_request": (UNMERGED, BASE),
}
SERVER_S = 300.0


def configuration(*overrides: str) -> Any:
    from areal_lora.config.load import load_config

    return load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"], list(overrides))


def child(variant: str, adapter: str) -> None:
    """Answer every line on stdin with the tokens per second of one round."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    from dataclasses import fields, replace

    from vllm import LLM, EngineArgs, SamplingParams
    from vllm.lora.request import LoRARequest

    from areal_lora.engine.vllm_ext.server.assemble import engine_args

    lora = variant in (BASE, UNMERGED)
    args = engine_args(configuration(f"rollout.adapter_mode={'unmerged' if lora else 'merged'}"))
    args = replace(args, worker_extension_cls="")
    engine = LLM.from_engine_args(EngineArgs(**{f.name: getattr(args, f.name) for f in fields(EngineArgs)}))
    if variant == MERGED:
        engine.collective_rpc(merge_into, args=(adapter,))
    request = LoRARequest("adapter", 1, adapter) if variant == UNMERGED else None
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, ignore_eos=True, logprobs=0, seed=1)
    prompts = [{"prompt_token_ids": [5 + (7 * i + j) % 90 for j in range(40)]} for i in range(SEQUENCES)]

    def round_() -> float:
        started = time.perf_counter()
        engine.generate(prompts, sampling, lora_request=request, use_tqdm=False)
        return SEQUENCES * NEW_TOKENS / (time.perf_counter() - started)

    round_()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(round_(), flush=True)


def merge_into(worker: Any, adapter: str) -> None:
    """Write base + alpha / rank * B @ A into a worker's weights as a publish does."""
    from areal_lora.checkpoint.adapter_io import load_peft
    from areal_lora.engine.common.model_folder import ModelFolder
    from areal_lora.engine.vllm_ext.compat.weights import fused_weights

    spec, tensors = load_peft(Path(adapter))
    base = ModelFolder.at(configuration().model.folder)
    for fused in fused_weights(worker):
        for part in fused.parts:
            module = part.name.removesuffix(".weight")
            a, b = (tensors[f"{module}.lora_{side}.weight"] for side in "AB")
            part.place.copy_(base.whole(part.name) + spec.scale_of(module) * b @ a)
        fused.apply()


def make_adapter(folder: Path) -> Path:
    """A random rank-8 adapter on everything; the values do not matter for speed."""
    import torch

    from areal_lora.checkpoint.adapter_io import save_peft
    from areal_lora.families.shape import ModelShape, read_hf_config
    from areal_lora.families.sites import pieces_of, sites_of, wire_names

    config = configuration()
    hf = read_hf_config(Path(config.model.path))
    shape, spec = ModelShape.from_hf(hf), config.adapters[0].spec(config.model.path)
    tensors, aliases = {}, {}
    for key in sites_of(shape, spec.expert_layout):
        shapes, shared = wire_names(pieces_of(shape, key))
        tensors |= {n: torch.randn([spec.rank if d < 0 else d for d in s]) * 0.02 for n, s in shapes.items()}
        aliases |= shared
    save_peft(folder, spec, tensors, config.model.path, aliases)
    return folder


class Publishing:
    """A real server of one mode, and a trainer rank by hand that publishes to it with the product's own packing."""

    def __init__(self, root: Path, mode: str, stack: ExitStack) -> None:
        import torch

        from areal_lora.engine.common.adapter_memory import AdapterMemory
        from areal_lora.engine.common.arena import ParallelLayout, ShardedModel
        from areal_lora.engine.common.model_folder import ModelFolder
        from areal_lora.engine.common.transfer_plan import MergedShard, merged_layout
        from areal_lora.families.shape import ModelShape, read_hf_config
        from areal_lora.run_folder.paths import RunFolder
        from areal_lora.run_folder.rendezvous import create_secret, read_secret, wait_endpoint
        from areal_lora.weight_sync.trainer.leader import Leader
        from areal_lora.weight_sync.trainer.membership import RendezvousWatch
        from areal_lora.weight_sync.trainer.publisher import Publisher
        from tests.support.solo_exchange import SoloExchange

        self.mode = mode
        self.config = configuration(f"rollout.adapter_mode={mode}", f"run.root={root}", f"run.name={mode}")
        folder = root / mode
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(self.config.model_dump_json(), encoding="utf-8")
        run_folder = RunFolder(folder)
        create_secret(run_folder)
        module = "areal_lora.engine.vllm_ext.server.main"
        command = [sys.executable, "-m", module, "--run-folder", str(folder), "--index", "0"]
        with open(folder / "log", "wb") as log:
            server = subprocess.Popen(command, stdout=log, stderr=log)
        stack.callback(server.wait, 30)
        stack.callback(server.terminate)
        wait_endpoint(run_folder, "server", 0, SERVER_S, still_alive=lambda: server.poll() is None)
        shape = ModelShape.from_hf(read_hf_config(Path(self.config.model.folder)))
        one = ParallelLayout(world=1, tp=1, pp=1, ep=1, etp=1, stage_layers=(shape.layers,), experts=shape.experts)
        spec = self.config.adapters[0].spec(self.config.model.path)
        self._name = spec.name
        self._memory = AdapterMemory(ShardedModel(shape=shape, layout=one), spec, 0, torch.device("cpu"))
        plain, base = self._memory.layout("float32"), ModelFolder.at(self.config.model.folder)
        self._shard = MergedShard(base, plain, 0, torch.float32)
        self.layout = merged_layout(plain, "float32") if mode == "merged" else plain
        watch, secret = RendezvousWatch(run_folder, 1), read_secret(run_folder)
        sync = self.config.weight_sync
        leader = Leader(run=mode, secret=secret, servers=watch.present(), config=sync)
        self._publisher = Publisher(run=mode, config=sync, exchange=SoloExchange(), leader=leader, secret=secret)
        stack.callback(self._publisher.close)
        self._version = 0

    def round(self) -> dict[str, float]:
        """Phases of one publish in milliseconds."""

        import torch

        from areal_lora.algorithms.merging import CastLoss
        from areal_lora.types import AdapterRef
        from areal_lora.weight_sync.manifest import base_digest

        self._memory.weights.normal_(std=0.02)
        packer, weights = self._memory.packer("float32"), self._memory.weights
        pack: Callable[..., Any] = lambda flat: packer.fill(weights, flat, {})  # noqa: E731
        if self.mode == "merged":
            tensors = dict(packer.tensors(weights, {}))
            loss = CastLoss(dtype=torch.float32, rows=64)
            pack = lambda flat: self._shard.fill(tensors, flat, loss)  # noqa: E731
        ref = AdapterRef(name=self._name, version=self._version)
        self._version += 1
        digest = base_digest(self.config.model.folder)
        return self._publisher.publish(ref, None, self.layout, pack, digest, None).wait().phases


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """min, p50, p99."""
    ordered = sorted(values)
    return ordered[0], statistics.median(ordered), ordered[round(0.99 * (len(ordered) - 1))]


def decode(adapter: Path, rounds: int) -> dict[str, list[float]]:
    """Tokens per second of every round, by variant."""
    command = [sys.executable, __file__, "--child"]
    engines = [
        subprocess.Popen([*command, v, str(adapter)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for v in VARIANTS
    ]
    for engine in engines:
        while (line := engine.stdout.readline()).strip() != "ready":
            if not line:
                sys.exit("an engine ended before it was ready; its error is above")
    print(f"load {os.getloadavg()[0]:.2f}; {SEQUENCES} sequences x {NEW_TOKENS} tokens, {rounds} rounds, 1 thread")
    speeds: dict[str, list[float]] = {v: [] for v in VARIANTS}
    for _ in range(rounds):
        for variant, engine in zip(VARIANTS, engines, strict=True):
            engine.stdin.write("go\n")
            engine.stdin.flush()
            speeds[variant].append(float(engine.stdout.readline()))
    for engine in engines:
        engine.stdin.close()
        engine.wait()
    return speeds


def publishes(root: Path, rounds: int) -> dict[str, dict[str, Any]]:
    """Bytes, and milliseconds of every phase of every publish, by mode. The first version of each is not counted."""
    with ExitStack() as stack:
        sides = [Publishing(root, mode, stack) for mode in ("unmerged", "merged")]
        for side in sides:
            side.round()
        found: dict[str, dict[str, Any]] = {side.mode: {"nbytes": side.layout.nbytes, "phases": []} for side in sides}
        for _ in range(rounds):
            for side in sides:
                found[side.mode]["phases"].append(side.round())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds instead of {ROUNDS}")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    with tempfile.TemporaryDirectory() as scratch:
        speeds = decode(make_adapter(Path(scratch) / "adapter"), rounds)
        published = publishes(Path(scratch) / "runs", rounds)
    for variant, values in speeds.items():
        print(f"{variant:22} tokens/s   min {{:8.0f}}  p50 {{:8.0f}}  p99 {{:8.0f}}".format(*spread(values)))
    claims: dict[str, float] = {}
    for key, (one, other) in RATIOS.items():
        ratios = spread([a / b for a, b in zip(speeds[one], speeds[other], strict=True)])
        claims[key] = ratios[1]
        print(f"{key:28} min {{:.3f}}  p50 {{:.3f}}  p99 {{:.3f}}".format(*ratios))
    for mode, found in published.items():
        claims[f"{mode}_publish_bytes"] = found["nbytes"]
        print(f"{mode} publish: {found['nbytes'] / 2**20:.2f} MiB")
        for phase in ("pack", "ack", "hold", "commit"):
            times = spread([phases.get(phase, 0.0) for phases in found["phases"]])
            claims[f"{mode}_publish_{phase}_ms"] = times[1]
            print(f"  {phase:8} ms  min {{:7.2f}}  p50 {{:7.2f}}  p99 {{:7.2f}}".format(*times))
    if options.json:
        options.json.write_text(json.dumps({"claims": claims, "speeds": speeds}, indent=1))


if __name__ == "__main__":
    main()
