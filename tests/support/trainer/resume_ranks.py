"""What each rank of a resume test does: the real loop, engine and checkpoints, with answers that are a pure function.

A life goes on from whatever the run folder holds. It may be killed at a named point of a step.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from areal_lora.algorithms.registry import build_algorithm
from areal_lora.checkpoint.files import Disk
from areal_lora.checkpoint.recover import find
from areal_lora.checkpoint.saver import Save, Saver
from areal_lora.checkpoint.store import Store
from areal_lora.config.load import load_config
from areal_lora.config.models import CheckpointConfig, Config, OptimizerConfig
from areal_lora.data.order import PromptOrder
from areal_lora.distributed.exchange import GroupExchange
from areal_lora.engine.megatron_engine import MegatronEngine
from areal_lora.processes import faults
from areal_lora.run_folder.paths import RunFolder
from areal_lora.trainer import loop
from areal_lora.trainer.checkpointing import Checkpointing, resume
from areal_lora.trainer.learn import LearnReport, learn
from areal_lora.trainer.recording import evaluation_due
from areal_lora.trainer.tenant import Tenant, scoring_batch
from areal_lora.types import AdapterRef, TrainBatch
from tests.support.distributed.engine_ranks import TARGETS, forget_layout, make_batch, make_rows
from tests.support.paths import EXAMPLES

STEPS, PROMPTS, LENGTH = 20, 3, 12
OPTIMIZER = OptimizerConfig(lr=0.01, warmup_steps=4, schedule="linear", max_grad_norm=0.5)


@dataclass(frozen=True)
class Life:
    """``fault``: see `areal_lora.processes.faults`, empty for none."""

    folder: str
    model: str
    fault: str = ""
    sizes: tuple[tuple[str, int], ...] = (("world_size", 2), ("ep", 2))
    rank: int = 4
    steps: int = STEPS


def config_of(life: Life) -> Config:
    config = load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"])
    adapter = config.adapters[0].model_copy(
        update={"name": "a", "rank": life.rank, "alpha": 8.0, "target_modules": list(TARGETS), "optimizer": OPTIMIZER}
    )
    sizes: dict[str, int] = {"tp": 1, "pp": 1, "ep": 1, "etp": 1, **dict(life.sizes)}
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"steps": life.steps}),
            "adapters": [adapter],
            "model": config.model.model_copy(update={"path": life.model}),
            "trainer": config.trainer.model_copy(update={**sizes, "max_tokens_per_microbatch": 150}),
            "checkpoint": CheckpointConfig(keep_last=STEPS + 1),
            "eval": config.eval.model_copy(update={"every_steps": 3}),
        }
    )


class Publishing:
    """Sends nothing, and joins what it was given as the publisher does. No version may pass before its checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._pending = folder, list[tuple[AdapterRef, Save | None]]()

    def publish(self, tenant: Tenant, save: Save | None) -> None:
        self._pending.append((tenant.ref, save))

    def join(self, tenant: Tenant) -> None:
        while self._pending:
            ref, save = self._pending.pop()
            if save is not None:
                save.wait_settled()
            faults.reached("trainer.publish_begun")
            newest = find(RunFolder(self._folder), ref.name).newest
            assert newest is not None
            assert newest.manifest.version >= ref.version, "published before its checkpoint was durable"
            faults.reached("trainer.published")

    def changed(self) -> bool:
        return False  # no servers, so none that come or go

    def close(self) -> None:
        pass


class Controller:
    """The part of the controller that decides what comes next: a position, kept in the ledger's snapshot."""

    def __init__(self, folder: Path, engine: MegatronEngine, tenant: Tenant, steps: int) -> None:
        self._journal, self._engine = folder / f"journal-{engine.rank}", engine
        self._position = int(tenant.ledger or b"0")
        self._tenant, self._steps = tenant, steps
        self._order = PromptOrder(3, 13)
        self.note(f"life {tenant.version}")

    def note(self, line: str) -> None:
        with self._journal.open("a") as file:
            file.write(line + "\n")

    def next_batch(self, trainer: Any, tenant: Tenant) -> tuple[TrainBatch, dict[int, int]]:
        """Answers depend on prompt, version and the random numbers of torch; called on every rank."""
        asked = [self._order.locate(self._position + i) for i in range(PROMPTS)]
        self._position += PROMPTS
        tenant.ledger = b"%d" % self._position
        rows = []
        for epoch, sample in asked:
            for n in range(2):
                draw = torch.Generator().manual_seed(((epoch * 13 + sample) * 50 + tenant.version) * 2 + n)
                rows.append(torch.randint(0, 320, (LENGTH,), generator=draw).tolist())
        batch = make_batch(rows)
        fields = {f: getattr(batch, f) for f in batch.__dataclass_fields__}
        fields |= {
            "rollout_logprobs": self._engine.logprobs(batch, adapter="a") * batch.loss_mask,
            "rewards": torch.rand(len(rows)),
            "versions": torch.where(batch.loss_mask, tenant.version, -1),
            "group_ids": torch.arange(PROMPTS).repeat_interleave(2),
            "advantages": None,
        }
        self.note(f"step {tenant.version} {asked}")
        return TrainBatch(**fields), {}

    def learn(self, *args: Any, **options: Any) -> LearnReport:
        report = learn(*args, **options)
        self.note(f"learned {args[1].version}")
        return report

    # What rank 0's recorder is asked beside.

    def step(self, tenant: Tenant, *_: Any) -> None:
        self.note(f"record {tenant.version - 1}")

    def evaluate(self, tenant: Tenant) -> None:
        if evaluation_due(tenant.version, tenant.asked, every_steps=3, last=self._steps):
            self.request_eval(tenant.ref)

    def request_eval(self, ref: AdapterRef) -> None:
        """No answer ever comes."""
        self.note(f"evaluate {ref.version}")
        self._tenant.awaited.add(ref.version)
        self._tenant.asked = max(self._tenant.asked, ref.version)

    def ignored(self, *_: Any) -> None:
        pass

    def wait_evals(self, *_: Any) -> bool:
        return True

    checkpointed = finish = close = ignored


def live(life: Life) -> dict[str, Any]:
    """One life of a trainer, until ``steps`` versions are made. Returns what it went on from and what it holds."""
    folder, config = Path(life.folder), config_of(life)
    engine = MegatronEngine(config.model, config.trainer, torch.device("cpu"))
    adapter = config.adapters[0]
    tenant = Tenant(
        config=adapter,
        spec=adapter.spec(life.model),
        probe=scoring_batch(make_rows()[:2], "a"),
        algorithm=build_algorithm(adapter.algorithm, minibatches=1),
    )
    engine.add_adapter(tenant.spec, adapter.optimizer, seed=1)
    resume(engine, [tenant], config, RunFolder(folder), GroupExchange(60.0))
    begun = tenant.version
    controller = Controller(folder, engine, tenant, config.run.steps)
    commit = partial(_commit, controller) if engine.rank == 0 else None
    saver = Saver(
        store=Store(RunFolder(folder), GroupExchange(60.0), Disk()), config=config.checkpoint, committed=commit
    )
    trainer: Any = loop.Trainer(
        config=config,
        run_folder=RunFolder(folder),
        engine=engine,
        tenants=[tenant],
        recorder=controller if engine.rank == 0 else None,  # type: ignore[arg-type]
        checkpointing=Checkpointing(config, engine, saver),
        publishing=Publishing(folder),  # type: ignore[arg-type]
        control=GroupExchange(60.0),
    )
    loop.next_batch, loop.learn = controller.next_batch, controller.learn
    if life.fault:
        faults._plan = faults.parse(life.fault)
    loop.train(trainer)
    trainer.close()
    forget_layout()
    return {"begun": begun, "version": tenant.version, "random": bytes(torch.get_rng_state().numpy())}


def _commit(controller: Controller, ref: AdapterRef) -> None:
    controller.note(f"commit {ref.version}")
    faults.reached("trainer.committed")


def crash(life: Life) -> None:
    """A life that must not come to its end; the rank that is left alone fails in a collective."""
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    live(life)
    dist.barrier()
    raise AssertionError("nobody was killed")
