"""Rollouts of a step as the trainer hands them over, and a run folder that keeps some."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from areal_lora.obs.metrics.records import DroppedGroup, GroupText
from areal_lora.obs.metrics.rollout_store import RolloutWriter, StepRollouts
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterRef, TokenColumns, Trajectory, TrajectoryGroup

VOCABULARY = [f"w{i} " for i in range(1000)]
PROMPT, PROBLEMS = 3, 7
"""Tokens of a prompt; problems in all, so that a problem comes again after some steps."""


def step_rollouts(
    step: int,
    *,
    adapter: str = "toy",
    groups: int = 2,
    n: int = 4,
    tokens: int = 6,
    texts: Sequence[str] = (),
    scored: bool = True,
    dropped: Sequence[str] = (),
) -> StepRollouts:
    """``groups`` of ``n`` answers of ``tokens`` tokens; the first half of the tokens is of the version before.

    Answer i has reward i % 2, answer 0 is truncated, group 0 needed two tries. ``texts`` are answers in order of the
    rollouts. ``scored``: the trainer's log-probabilities are known, 0.25 from the server's, and entropies of 1.5.
    ``dropped`` are reasons of further groups of ``n`` answers, which were dropped.
    """
    rng, made, said = np.random.default_rng(step), [], list(texts)
    versions = [-1] * PROMPT + [max(0, step - 1)] * (tokens // 2) + [step] * (tokens - tokens // 2)
    sampled = np.array(versions) >= 0
    for group in range(groups):
        found = []
        for i in range(n):
            ids, logprobs = rng.integers(0, len(VOCABULARY), len(versions)), np.where(sampled, -rng.random(), 0.0)
            trajectory = Trajectory(
                uid=f"{group}:{i}",
                sample=i,
                adapter=AdapterRef(name=adapter, version=step),
                columns=TokenColumns.of(ids, logprobs, versions),
                reward=float(i % 2),
                components={"right": float(i % 2)},
                correct=bool(i % 2),
                finish_reason="stop" if i else "length",
            )
            found.append(trajectory)
        uid = f"{step}:problem {(step * groups + group) % PROBLEMS}"
        made.append(TrajectoryGroup(uid=uid, trajectories=tuple(found)))
    answers = [said.pop(0) if said else f"answer {i} of step {step}" for _ in range(groups) for i in range(n)]
    every = [t for group in made for t in group.trajectories]
    logprobs = np.concatenate([t.columns.scores for t in every])
    mask = np.concatenate([t.columns.each_version for t in every]) >= 0
    lost = step_rollouts(step + 1000, adapter=adapter, groups=len(dropped), n=n, tokens=tokens) if dropped else None
    return StepRollouts(
        dropped=tuple(
            DroppedGroup(reason=reason, group=group, text=text)
            for reason, group, text in zip(
                dropped, lost.groups if lost else (), lost.texts if lost else (), strict=True
            )
        ),
        adapter=adapter,
        step=step,
        groups=tuple(made),
        texts=tuple(
            GroupText(
                prompt=f"Problem {group} of step {step}?",
                answers=tuple(answers[group * n : (group + 1) * n]),
                turns=tuple(f'[{{"role": "assistant", "content": "turn of {i}"}}]' for i in range(n)),
                messages='[{"role": "user", "content": "Why?"}]',
                gold=str(group),
                tries=2 - bool(group),
            )
            for group in range(groups)
        ),
        advantages=np.where(mask, [t.reward - 0.5 for t in every for _ in t.token_ids], 0).astype(np.float32),
        trainer_logprobs=np.where(mask, logprobs - 0.25, 0).astype(np.float32) if scored else None,
        entropies=np.where(mask, 1.5, 0).astype(np.float32) if scored else None,
    )


def keep(folder: RunFolder, steps: Iterable[StepRollouts], vocabulary: Sequence[str] = VOCABULARY) -> None:
    writer = RolloutWriter(folder, 64 << 20, lambda: vocabulary)
    for step in steps:
        writer.write(step)
    writer.close()
