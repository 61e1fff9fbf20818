"""Breaks a publish or a batch on purpose and prints who noticed: RUN_FOLDER (a test's helper).

One real Megatron rank publishes to one real server. Each fault is put in between, on the
trainer's side, where a bug of that kind would sit.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer

from areal_lora.config.models import Config
from areal_lora.config.recorded import PROBE_TOLERANCES
from areal_lora.data.collate import scoring_batch
from areal_lora.engine.megatron_engine import MegatronEngine
from areal_lora.errors import ArealLoraError
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import read_secret, wait_endpoint
from areal_lora.trainer.adapter import Adapter, build_adapter, probe_rows
from areal_lora.trainer.learn import annotate, learn
from areal_lora.trainer.main import join_world
from areal_lora.trainer.versions.publishing import AdapterPublishing
from areal_lora.types import AdapterStructure
from areal_lora.weight_sync.layout import AdapterLayout, make_layout
from areal_lora.weight_sync.trainer.leader import Leader
from areal_lora.weight_sync.trainer.membership import RendezvousWatch
from areal_lora.weight_sync.trainer.publish_job import Pack
from areal_lora.weight_sync.trainer.publisher import Publisher
from tests.support.solo_exchange import SoloExchange
from tests.support.weight_sync.adapters import pack_of

Owned = list[tuple[str, Tensor]]
EXPERT = "model.layers.1.mlp.experts.3"


class Tampering:
    """A publisher whose view of the adapter goes through ``change`` first."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self.change: Callable[[Owned, AdapterStructure], tuple[Owned, AdapterStructure]] = lambda owned, spec: (
            owned,
            spec,
        )

    def publish(self, *, layout: AdapterLayout, pack: Pack, **rest: object):
        [shard] = layout.shards
        flat = torch.empty(shard.nbytes, dtype=torch.uint8)
        for _ in pack(flat):
            pass
        words = flat.view(torch.float32)
        owned = [(t.name, words[t.offset // 4 :][: math.prod(t.shape)].view(t.shape)) for t in shard.tensors]
        owned, spec = self.change(owned, layout.structure)
        tensors = dict(owned)
        aliases = {name: target for name, target in layout.aliases.items() if target in tensors}
        changed = make_layout(spec, layout.dtype, {0: [(n, tuple(t.shape)) for n, t in owned]}, aliases)
        return self._publisher.publish(layout=changed, pack=pack_of(changed, 0, tensors), **rest)

    def close(self) -> None:
        self._publisher.close()


def flip_expert(owned: Owned, spec: AdapterStructure) -> tuple[Owned, AdapterStructure]:
    return [(n, -t if n == f"{EXPERT}.down_proj.lora_B.weight" else t) for n, t in owned], spec


def swap_gate_and_up(owned: Owned, spec: AdapterStructure) -> tuple[Owned, AdapterStructure]:
    tensors = dict(owned)
    gate, up = f"{EXPERT}.gate_proj.lora_B.weight", f"{EXPERT}.up_proj.lora_B.weight"
    return list((tensors | {gate: tensors[up], up: tensors[gate]}).items()), spec


def drop_layer(owned: Owned, spec: AdapterStructure) -> tuple[Owned, AdapterStructure]:
    return [(n, t) for n, t in owned if not n.startswith("model.layers.2.")], spec


def wrong_alpha(owned: Owned, spec: AdapterStructure) -> tuple[Owned, AdapterStructure]:
    return owned, replace(spec, alpha=2 * spec.alpha)


def poison(owned: Owned, spec: AdapterStructure) -> tuple[Owned, AdapterStructure]:
    name, tensor = owned[0]
    broken = tensor.clone()
    broken.view(-1)[5] = float("nan")
    return [(name, broken), *owned[1:]], spec


FAULTS = {
    "none": lambda owned, spec: (owned, spec),
    "flip one expert's lora_B": flip_expert,
    "swap gate and up": swap_gate_and_up,
    "drop a layer": drop_layer,
    "wrong alpha": wrong_alpha,
    "nan": poison,
}


def verdict(action: Callable[[], object]) -> str:
    try:
        action()
    except ArealLoraError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def publish(publishing: AdapterPublishing, adapter: Adapter, version: int) -> None:
    publishing.publish(adapter, version)
    publishing.join(adapter.name)


def shifted_mask(engine: MegatronEngine, adapter: Adapter, rows: list[list[int]], shift: bool) -> None:
    """One learning step on logprobs of the same policy, the mask moved by one token if ``shift``."""
    batch = scoring_batch(rows, adapter.name)
    logprobs = engine.logprobs(batch, adapter=adapter.name)
    if shift:
        logprobs = torch.cat([logprobs[1:], logprobs[:1]])
    batch = replace(batch, rollout_logprobs=logprobs, versions=torch.where(batch.loss_mask, 0, -1))
    lr = adapter.config.optimizer.lr
    learn(engine, adapter, annotate(engine, adapter, batch), version=0, base_dtype="float32", lr=lr)


def small_effects(
    config: Config, engine: MegatronEngine, adapter: Adapter, version: int, random: dict[str, Tensor]
) -> dict[str, str]:
    """An adapter far below the tolerance of a bf16 run: what is right, then what never reaches the sampler."""
    leader = Leader(
        run=config.run.name,
        secret=read_secret(config.run_folder),
        servers=RendezvousWatch(config.run_folder, 1).present(),
        config=config.weight_sync,
        tolerance=PROBE_TOLERANCES["bfloat16"],
    )
    publisher = Tampering(
        Publisher(
            run=config.run.name,
            config=config.weight_sync,
            exchange=SoloExchange(),
            leader=leader,
            secret=read_secret(config.run_folder),
        )
    )
    publishing = AdapterPublishing(engine, publisher, config.rollout.adapter_mode, None)

    def scaled(scale: float) -> dict[str, Tensor]:
        return {n: t * scale if ".lora_B." in n else t for n, t in random.items()}

    def older(owned: Owned, spec: AdapterStructure) -> tuple[Owned, AdapterStructure]:
        return [(n, scaled(0.0012)[n]) for n, _ in owned], spec

    def nothing(owned: Owned, spec: AdapterStructure) -> tuple[Owned, AdapterStructure]:
        return [(n, t * 0.0 if ".lora_B." in n else t) for n, t in owned], spec

    verdicts = {}
    for name, scale, change in (
        ("small adapter", 0.001, FAULTS["none"]),
        ("small step", 0.0012, FAULTS["none"]),
        ("small step, the version before serves", 0.0016, older),
        ("small adapter, the base serves", 0.002, nothing),
    ):
        engine.load_adapter(adapter.name, scaled(scale))
        version += 1
        publisher.change = change
        verdicts[name] = verdict(partial(publish, publishing, adapter, version))
    publishing.close()
    return verdicts


def main(run_folder: Path) -> None:
    config = Config.model_validate_json((run_folder / "config.json").read_text())
    join_world(config, RunFolder(run_folder), 0, 1)
    engine = MegatronEngine(config.model, config.trainer, torch.device("cpu"))
    tokenizer = AutoTokenizer.from_pretrained(config.model.folder)
    adapter = build_adapter(config, config.adapters[0], probe_rows(config, config.adapters[0], tokenizer))
    engine.add_adapter(adapter.spec, adapter.config.optimizer, 1)
    wait_endpoint(RunFolder(run_folder), "server", 0, 120)
    leader = Leader(
        run=config.run.name,
        secret=read_secret(RunFolder(run_folder)),
        servers=RendezvousWatch(RunFolder(run_folder), 1).present(),
        config=config.weight_sync,
    )
    publisher = Tampering(
        Publisher(
            run=config.run.name,
            config=config.weight_sync,
            exchange=SoloExchange(),
            leader=leader,
            secret=read_secret(RunFolder(run_folder)),
        )
    )
    publishing = AdapterPublishing(engine, publisher, config.rollout.adapter_mode, None)
    version = 0
    verdicts = {"version 0": verdict(partial(publish, publishing, adapter, version))}
    generator = torch.Generator().manual_seed(3)
    shards = engine.adapter_layout(adapter.name).shards
    random = {t.name: torch.randn(t.shape, generator=generator) * 0.1 for s in shards for t in s.tensors}
    engine.load_adapter(adapter.name, random)
    for name, change in FAULTS.items():
        version += 1
        publisher.change = change
        verdicts[name] = verdict(partial(publish, publishing, adapter, version))
    publishing.close()
    verdicts |= small_effects(config, engine, adapter, version, random)
    rows = [tokenizer.encode(f"Q: {i} + {i + 1}\nA: {2 * i + 1}", add_special_tokens=False) for i in range(8)]
    verdicts["aligned"] = verdict(lambda: shifted_mask(engine, adapter, rows, shift=False))
    verdicts["shift the loss mask by one"] = verdict(lambda: shifted_mask(engine, adapter, rows, shift=True))
    print(json.dumps(verdicts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
