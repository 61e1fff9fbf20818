"""A greedy answer beside each group, for algorithms that compare a prompt's answers with it (ReMax).

It is sampled with the group, by the same version where that is still served, and scored by the same reward. Only its
reward is kept, as the group's ``baseline``: it is never trained on.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from areal_lora.config.models import SamplingConfig
from areal_lora.data.prompts import Prompt
from areal_lora.rollout.workflow import Episode, Workflow, all_samples, first_fault
from areal_lora.types import AdapterRef


def greedy(sampling: SamplingConfig) -> SamplingConfig:
    """One answer of the likeliest tokens; length, stop texts and time limit as in training."""
    changes = {"n_samples": 1, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    return sampling.model_copy(update=changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class WithBaseline:
    """``answers`` to a prompt with the mean reward of ``greedy``, a workflow of one greedy sample."""

    answers: Workflow
    greedy: Workflow

    async def run(self, prompt: Prompt, ref: AdapterRef, seed: int) -> Episode:
        """Raises GenerationFault. Where the greedy answer could not be scored, returns that: a fault of the group."""
        episode, greedy = await all_samples([w.run(prompt, ref, seed) for w in (self.answers, self.greedy)])
        if first_fault(greedy.group) is not None:
            return greedy
        rewards = {trajectory.sample: trajectory.reward for trajectory in greedy.group.trajectories}
        return replace(episode, group=replace(episode.group, baseline=statistics.fmean(rewards.values())))
