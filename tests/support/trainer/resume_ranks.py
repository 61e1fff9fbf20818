"""What each rank of a resume test does: the real loop, engine and checkpoints, with answers that are a pure function.

A session resumes from whatever the run folder holds. It may be killed at a named point of a step.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from areal_lora.algorithms.fair_queue import FairQueue
from areal_lora.algorithms.registry import build_algorithm
from areal_lora.checkpoint.checkpoint_store import CheckpointStore, Saver
from areal_lora.checkpoint.state import Disk
from areal_lora.config.load import load_config
from areal_lora.config.models import Config, OptimizerConfig
from areal_lora.config.recorded import adapter_run
from areal_lora.config.sections.adapter import AlgorithmConfig
from areal_lora.config.sections.run import CheckpointConfig
from areal_lora.data.collate import scoring_batch
from areal_lora.data.packed_groups import PackedGroups
from areal_lora.data.prompts import locate
from areal_lora.distributed.store import Exchange
from areal_lora.engine.megatron_engine import MegatronEngine
from areal_lora.processes import watched
from areal_lora.run_folder.paths import RunFolder
from areal_lora.trainer import loop
from areal_lora.trainer.adapter import Adapter, ControllerState, Restored, TrainingState
from areal_lora.trainer.controller_link import EvalTracker, evaluation_due
from areal_lora.trainer.learn import LearnReport, learn
from areal_lora.trainer.training_state import Rank0, Trainer
from areal_lora.trainer.versions.checkpointing import Checkpointing, resume
from areal_lora.trainer.work import Finish, TrainOn
from areal_lora.types import AdapterPhase, AdapterRef, TrainBatch
from tests.support.distributed.engine_ranks import TARGETS, forget_layout, make_batch, make_rows
from tests.support.paths import EXAMPLES
from tests.support.sizes import size

STEPS, PROMPTS, LENGTH = size(12, 20), 3, 12
# All that a checkpoint can hold: a critic, a reference that is renewed, a correction that is chosen by step.
ALGORITHM = AlgorithmConfig.model_validate(
    {
        "kind": "ppo",
        "kl_coef": 0.05,
        "reference": "initial",
        "reference_refresh_steps": 3,
        "critic_lr": 0.02,
        "gae_lambda": 0.9,
        "behaviour_correction": "auto",
    }
)
DRIFTS = (0.07, 0.03, 0.007, 0.003, 0.02, 0.2)
"""Mean |log w| of a step, by its version; nothing in the first one, which has no version before it."""
OPTIMIZER = OptimizerConfig(lr=0.01, warmup_steps=4, schedule="linear", max_grad_norm=0.5)


@dataclass(frozen=True)
class Session:
    """``fault``: see `areal_lora.processes.watched`, empty for none."""

    folder: str
    model: str
    fault: str = ""
    sizes: tuple[tuple[str, int], ...] = (("world_size", 2), ("ep", 2))
    rank: int = 4
    steps: int = STEPS
    profile: tuple[int, ...] = ()


def config_of(session: Session) -> Config:
    config = load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"])
    adapter = config.adapters[0].model_copy(
        update={
            "name": "a",
            "rank": session.rank,
            "alpha": 8.0,
            "target_modules": list(TARGETS),
            "optimizer": OPTIMIZER,
            "algorithm": ALGORITHM,
        }
    )
    sizes: dict[str, int] = {"tp": 1, "pp": 1, "ep": 1, "etp": 1, **dict(session.sizes)}
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"steps": session.steps, "profile": session.profile}),
            "adapters": [adapter],
            "model": config.model.model_copy(update={"path": session.model}),
            "trainer": config.trainer.model_copy(update={**sizes, "max_tokens_per_microbatch": 150}),
            "checkpoint": CheckpointConfig(keep_last=STEPS + 1),
            "eval": config.eval.model_copy(update={"every_steps": 3}),
        }
    )


class Publishing:
    """Sends nothing, and joins what it was given as the publisher does."""

    def __init__(self) -> None:
        self._pending = False

    def publish(self, adapter: Adapter, version: int) -> None:
        watched.reached("trainer.publish_begun")
        self._pending = True

    def join(self, adapter: str) -> None:
        if self._pending:
            watched.reached("trainer.published")
        self._pending = False

    def changed(self) -> bool:
        return False  # no servers, so none that come or go

    def close(self) -> None:
        pass


class Controller:
    """All that rank 0 talks to. It decides which prompts are next: a position, kept in the ledger's snapshot."""

    def __init__(self, folder: Path, engine: MegatronEngine, restored: Restored, steps: int) -> None:
        self._journal, self._engine = folder / f"journal-{engine.rank}", engine
        begun, kept = restored
        self._position = int(kept.ledger or b"0")
        self._evals, self._steps = EvalTracker.restored(kept), steps
        self.note(f"session {begun.version}")

    def note(self, line: str) -> None:
        with self._journal.open("a") as file:
            file.write(line + "\n")

    def next_work(self, trainer: Trainer, roll: object) -> TrainOn | Finish | None:
        """No evaluation is awaited: an adapter is done after its last step."""
        (state,) = trainer.states.values()
        if state.phase is AdapterPhase.ACTIVE:
            return TrainOn(adapter=state.name, batch=PackedGroups.of([]))
        return Finish(adapter=state.name) if state.phase is AdapterPhase.DRAINING else None

    def batch_of(self, trainer: Trainer, state: TrainingState, groups: object) -> tuple[TrainBatch, dict[int, int]]:
        """Answers depend on prompt, version and the random numbers of torch; called on every rank."""
        asked = [locate(self._position + i, 13, 3) for i in range(PROMPTS)]
        self._position += PROMPTS
        rows = []
        for epoch, sample in asked:
            for n in range(2):
                draw = torch.Generator().manual_seed(((epoch * 13 + sample) * 50 + state.version) * 2 + n)
                rows.append(torch.randint(0, 320, (LENGTH,), generator=draw).tolist())
        batch, drift = make_batch(rows), DRIFTS[state.version % len(DRIFTS)] if state.version else 0.0
        gap = torch.full((len(rows), LENGTH), drift)
        gap[::2, ::2] *= -1.0  # of every second answer about 0 in the mean
        fields = {f: getattr(batch, f) for f in batch.__dataclass_fields__}
        fields |= {
            "rollout_logprobs": (self._engine.logprobs(batch, adapter="a") + gap.flatten()) * batch.loss_mask,
            "rewards": torch.rand(len(rows)),
            "versions": torch.where(batch.loss_mask, max(state.version - 1, 0), -1),
            "group_ids": torch.arange(PROMPTS).repeat_interleave(2),
            "advantages": None,
        }
        self.note(f"step {state.version} {asked}")
        return TrainBatch(**fields), {}

    def learn(self, *args: Any, **options: Any) -> LearnReport:
        report = learn(*args, **options)
        self.note(f"learned {options['version']}")
        return report

    # As the recorder, the auditor and the link to the controller of rank 0.

    def step(self, ref: AdapterRef, *_: Any) -> None:
        self.note(f"record {ref.version - 1}")

    def state(self, adapter: str) -> ControllerState:
        return ControllerState(ledger=b"%d" % self._position, pending=frozenset(self._evals.pending))

    def evaluate_if_due(self, ref: AdapterRef, *, saved: bool) -> None:
        if evaluation_due(ref.version, self._evals.newest, every_steps=3, last=self._steps, saved=saved):
            self.request_eval(ref)

    def request_eval(self, ref: AdapterRef) -> None:
        """No answer ever arrives."""
        self.note(f"evaluate {ref.version}")
        self._evals.pending.add(ref.version)
        self._evals.newest = max(self._evals.newest, ref.version)

    def ignored(self, *_: Any, **__: Any) -> None:
        pass

    def collect(self, name: str, *, wait: bool = False) -> None:
        """Nothing was audited."""

    def start(self, *_: Any, **__: Any) -> list[int]:
        return [0]  # of the sequences

    checkpointed = finish = shutdown = close = end = phase = ignored


def live(session: Session) -> dict[str, Any]:
    """One session of a trainer, until ``steps`` versions are made. Returns what it resumed from and what it holds."""
    folder, config = Path(session.folder), config_of(session)
    engine = MegatronEngine(config.model, config.trainer, torch.device("cpu"))
    entry = config.adapters[0]
    adapter = Adapter(
        config=entry,
        run=adapter_run(config, entry),
        spec=entry.spec(session.model),
        probe=scoring_batch(make_rows()[:2], "a"),
        algorithm=build_algorithm(entry.algorithm, minibatches=1, max_new_tokens=8),
    )
    engine.add_adapter(adapter.spec, entry.optimizer, seed=1)
    restored = resume(engine, [adapter], config, RunFolder(folder), Exchange(60.0))
    begun = restored.get("a", (TrainingState(adapter=adapter), ControllerState()))
    state, version = begun[0], begun[0].version
    controller: Any = Controller(folder, engine, begun, config.run.steps)
    commit = partial(_commit, controller) if engine.rank == 0 else None
    saver = Saver(
        store=CheckpointStore(RunFolder(folder), Exchange(60.0), Disk()), config=config.checkpoint, committed=commit
    )
    trainer = Trainer(
        config=config,
        run_folder=RunFolder(folder),
        engine=engine,
        states={"a": state},
        checkpointing=Checkpointing(config, engine, saver, {n: r.version for n, (r, _) in restored.items()}),
        publishing=Publishing(),  # type: ignore[arg-type]
        control=Exchange(60.0),
        rank_0=Rank0(controller=controller, recorder=controller, auditor=controller, turns=FairQueue({"a": 1.0}))
        if engine.rank == 0
        else None,
    )
    loop.next_work, loop.batch_of, loop.learn = controller.next_work, controller.batch_of, controller.learn
    if session.fault:
        watched._plan = watched.parse(session.fault)
    loop.train(trainer)
    trainer.close()
    forget_layout()
    random = bytes(torch.get_rng_state().numpy())
    return {"begun": version, "version": state.version, "random": random, "correction": state.correction}


def _commit(controller: Controller, ref: AdapterRef) -> None:
    controller.note(f"commit {ref.version}")
    watched.reached("trainer.committed")


def crash(session: Session) -> None:
    """A session that must not reach its end; the remaining rank fails in a collective."""
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    live(session)
    dist.barrier()
    raise AssertionError("no rank was killed")
