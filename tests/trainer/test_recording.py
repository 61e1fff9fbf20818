"""Records of steps, read back from the disk."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from areal_lora.data.collate import collate
from areal_lora.obs.metrics import read_metrics
from areal_lora.obs.trace import Spans
from areal_lora.trainer.learn import LearnReport
from areal_lora.trainer.recording import Recorder
from areal_lora.types import TrajectoryGroup
from tests.rollout.helpers import NAME, config, stream, trajectory


class Tenant:
    name, version, resumed = NAME, 1, False


def test_rewards_are_averaged_over_samples_and_not_over_their_trajectories(tmp_path: Path) -> None:
    """An agent's sample of three conversations and reward 0 beside one of one conversation and reward 1."""
    prompt = stream().at(0)
    many = tuple(replace(trajectory(prompt, 0, reward=0.0), uid=f"a{i}", sample=0) for i in range(3))
    group = TrajectoryGroup(uid=prompt.uid, trajectories=(*many, trajectory(prompt, 0, index=1, reward=1.0)))
    tenant: Any = Tenant()
    recorder = Recorder(config("m"), tmp_path, object(), [tenant], time.monotonic())  # type: ignore[arg-type]
    report = LearnReport(sums=defaultdict(float, tokens=8.0), grad_norm=1.0, lr=1e-3, skipped=0.0)
    spans = Spans()
    phases = "wait_batch annotate train checkpoint_join checkpoint_copy publish_join publish_pack"
    spans.seconds.update(dict.fromkeys(phases.split(), 0.0))
    recorder.step(tenant, collate([group]), report, {0: 8}, spans)
    [step] = read_metrics(tmp_path).steps
    assert (step.reward_mean, step.reward_std, step.n_sequences) == (0.5, 0.5, 4)
