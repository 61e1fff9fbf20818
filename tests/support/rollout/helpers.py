"""Small parts that several rollout tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from areal_lora.config.models import Config, SamplingConfig, SingleTurnWorkflowConfig, WorkflowConfig
from areal_lora.config.sections.task import EvalSetConfig
from areal_lora.data.prompts import Formatter, Prompt, PromptStream
from areal_lora.rollout.completion_client import CompletionClient
from areal_lora.rollout.controller.eval_sets import EvalSet, HeldOut, sampling_of
from areal_lora.rollout.controller.feed import AdapterFeed
from areal_lora.rollout.controller.groups import Ticket
from areal_lora.rollout.controller.pacing import Pacing, StalenessBudget
from areal_lora.rollout.ledger.curricula import SolvedShares
from areal_lora.rollout.ledger.ledger import Ledger, LedgerFile
from areal_lora.rollout.ledger.reconcile import LedgerSnapshot
from areal_lora.rollout.workflow import Episode, Scorer, SingleTurnWorkflow, Workflow, WorkflowContext
from areal_lora.types import AdapterRef, Sample, TokenColumns, Trajectory, TrajectoryGroup
from tests.support.clocks import Clock
from tests.support.rollout.texts import CharTokenizer

NAME = "math"


def samples(n: int) -> list[Sample]:
    return [Sample(uid=f"s{i}", prompt=f"{i}+1=", answer=str(i + 1)) for i in range(n)]


def stream(n: int = 100, seed: int = 0, max_prompt_tokens: int = 64) -> PromptStream:
    return PromptStream(
        samples(n), Formatter(tokenizer=CharTokenizer()), seed=seed, max_prompt_tokens=max_prompt_tokens
    )


@cache
def _answer(version: int, tokens: int) -> TokenColumns:
    logprobs = [-0.5] * (tokens - 1) + [-1.0]
    return TokenColumns.of([7] * (tokens - 1) + [2], logprobs, [version] * tokens)


def trajectory(prompt: Prompt, version: int, index: int = 0, reward: float = 1.0, tokens: int = 2) -> Trajectory:
    """An answer of ``tokens`` tokens."""
    prompts = TokenColumns.unsampled(prompt.token_ids)
    return Trajectory(
        uid=f"{prompt.uid}:{index}",
        sample=index,
        adapter=AdapterRef(name=NAME, version=version),
        columns=TokenColumns.joined([prompts, _answer(version, tokens)]),
        reward=reward,
    )


def episode(prompt: Prompt, version: int, n: int = 2) -> Episode:
    trajectories = tuple(trajectory(prompt, version, i) for i in range(n))
    return Episode(group=TrajectoryGroup(uid=prompt.uid, trajectories=trajectories), texts=("x",) * n)


def feed(
    *,
    eta: int = 1,
    b: int = 2,
    steps: int = 100,
    n: int = 100,
    max_running: int = 1000,
    clock: Clock | None = None,
    prompts: PromptStream | None = None,
    version: int | None = 0,
    file: LedgerFile | None = None,
    pacing: Pacing = "full",
    drop_uniform: bool = False,
    lease_s: float = 3600.0,
    on_expire: Callable[[Ticket], None] | None = None,
    by_difficulty: bool = False,
    sampled: str = "",
) -> tuple[AdapterFeed, Ledger, list[Ticket]]:
    """A feed that a trainer at ``version`` has greeted, its ledger, and the list that expired tickets go to."""
    expired = list[Ticket]()
    prompts = prompts or stream(n)
    file = file or LedgerFile(":memory:", "t")
    ledger = Ledger(file, NAME, prompts.digest, sampled)
    made = AdapterFeed(
        NAME,
        budget=StalenessBudget(max_staleness=eta, prompts_per_step=b, last_version=steps - 1),
        pacing=pacing,
        prompts=prompts,
        ledger=ledger,
        max_running=max_running,
        on_expire=on_expire or expired.append,
        clock=clock or Clock(),
        lease_s=lease_s,
        drop_uniform=drop_uniform,
        solved=SolvedShares(file, NAME, prompts, seed=0) if by_difficulty else None,
    )
    if version is not None:
        made.hello(version, trainer="first", snapshot=snapshot(ledger, version) if version else b"")
    return made, ledger, expired


def open_ledger(path: Path | str = ":memory:", run: str = "r", order: str = "o") -> tuple[LedgerFile, Ledger]:
    file = LedgerFile(path, run)
    return file, Ledger(file, NAME, order)


def snapshot(ledger: Ledger, version: int) -> bytes:
    """Of a run that has consumed nothing but stands at ``version``."""
    return msgspec.msgpack.encode(
        LedgerSnapshot(
            adapter=NAME,
            order=ledger.head.order,
            version=version,
            next_position=0,
            issued=0,
            consumed=0,
            dropped={},
            open=[],
        )
    )


def admit_all(made: AdapterFeed) -> list[Ticket]:
    tickets = []
    while (ticket := made.admit()) is not None:
        made.begin(ticket)
        tickets.append(ticket)
    return tickets


SAMPLING = SamplingConfig(prompts_per_step=4, n_samples=2, max_new_tokens=8, timeout_s=120.0)


def eval_set(
    held_out: HeldOut, sampling: SamplingConfig = SAMPLING, workflow: WorkflowConfig | None = None, **settings: Any
) -> EvalSet:
    chosen = EvalSetConfig(**{"name": "held-out", **settings})
    return EvalSet(
        config=chosen,
        sampling=sampling_of(sampling, chosen),
        workflow=workflow or SingleTurnWorkflowConfig(),
        formatter=Formatter(tokenizer=CharTokenizer()),
        held_out=held_out,
    )


def single_turn_workflows(sets: Sequence[EvalSet], client: CompletionClient, scorer: Scorer) -> dict[str, Workflow]:
    contexts = {
        each.name: WorkflowContext(
            client=client, scorer=scorer, sampling=each.sampling, formatter=each.formatter, max_model_len=64
        )
        for each in sets
    }
    return {name: SingleTurnWorkflow(context=context) for name, context in contexts.items()}


def config(model: str, *, servers: int = 1, steps: int = 6, eta: int = 1, b: int = 4, keep_mib: int = 1) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "t", "steps": steps, "seed": 3, "keep_rollouts_mib": keep_mib},
            "model": {"path": model},
            "adapters": [
                {
                    "name": NAME,
                    "rank": 4,
                    "alpha": 4,
                    "target_modules": ["linear_qkv"],
                    "task": {"kind": "word_problems", "n_train": 64, "n_eval": 40},
                    "algorithm": {"kind": "grpo"},
                    "optimizer": {"lr": 1e-3},
                    "sampling": {"prompts_per_step": b, "n_samples": 2, "max_new_tokens": 8, "timeout_s": 120.0},
                }
            ],
            "trainer": {"world_size": 1},
            "rollout": {"servers": servers, "max_staleness": eta, "max_num_seqs": 32},
            "cluster": {"device": "cpu"},
        }
    )
