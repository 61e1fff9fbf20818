"""Answers of long-tailed length that are still worth learning from: the workflow of ``async_overlap.py``.

The tiny model's answers are all short. Here every prompt has a length of its own, from a Pareto law,
and the server goes on after an answer's end until that length is reached. Servers and
trainer do the work of the whole sequence; reward and loss see the answer alone, so it learns as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from areal_lora.data.prompts import Prompt
from areal_lora.rollout.completion_client import CompletionRequest
from areal_lora.rollout.workflow import Episode, WorkflowContext, single_turn
from areal_lora.tasks.reward_calls import ScoreItem
from areal_lora.types import AdapterRef, TokenColumns, Trajectory, TrajectoryGroup

SHAPE = 1.2
"""Of the Pareto law: finite mean, infinite variance were it not cut."""
EOS = 1


def answer_tokens(position: int, prompts_per_step: int, shortest: int, longest: int) -> int:
    """Length of the answers to the prompt at ``position``: Pareto from ``shortest``, cut at ``longest``.

    Every step's prompts get the same lengths, quantiles of the law, in an order of their own.
    """
    step, place = divmod(position, prompts_per_step)
    order = sorted(range(prompts_per_step), key=lambda i: blake2b(f"{step}:{i}".encode(), digest_size=8).digest())
    u = (order.index(place) + 0.5) / prompts_per_step
    return min(longest, int(shortest * (1.0 - u) ** (-1.0 / SHAPE)))


class LongTail:
    """Single turn. ``ladder`` are longest lengths, taken in turn by training step: several for calibration."""

    def __init__(self, context: WorkflowContext, *, shortest: int, ladder: str) -> None:
        self._context, self._shortest, self._ladder = context, shortest, [int(x) for x in ladder.split()]

    async def run(self, prompt: Prompt, ref: AdapterRef, seed: int) -> Episode:
        s = self._context.sampling
        longest = self._ladder[prompt.position // s.prompts_per_step % len(self._ladder)]
        request = CompletionRequest(
            prompt=prompt.token_ids,
            n=s.n_samples,
            temperature=s.temperature,
            top_p=s.top_p,
            seed=seed,
            max_tokens=answer_tokens(prompt.position, s.prompts_per_step, self._shortest, longest),
            ignore_eos=True,
        )
        answers = await self._context.client.sample(ref, request, timeout_s=s.timeout_s)
        ends = [answer_end(answer.token_ids) for answer in answers]
        # A token is a character, and special tokens have no text.
        texts = tuple(answer.text[: end - 1] for answer, end in zip(answers, ends, strict=True))
        scores = await self._context.score([ScoreItem.of(prompt.sample, t) for t in texts])
        trajectories = tuple(
            masked_after(single_turn(prompt, i, ref.name, answer, score), end)
            for i, (answer, end, score) in enumerate(zip(answers, ends, scores, strict=True))
        )
        return Episode(group=TrajectoryGroup(uid=prompt.uid, trajectories=trajectories), texts=texts)


def answer_end(token_ids: Sequence[int]) -> int:
    """Tokens up to and with the first end of sequence; all of them where there is none."""
    return token_ids.index(EOS) + 1 if EOS in token_ids else len(token_ids)


def masked_after(trajectory: Trajectory, end: int) -> Trajectory:
    """The trajectory with nothing to learn beyond the first ``end`` tokens of the answer."""
    first = trajectory.loss_mask.index(1) + end
    of_tokens = trajectory.token_ids, trajectory.rollout_logprobs, trajectory.versions
    learned = TokenColumns.of(*(values[:first] for values in of_tokens))
    rest = TokenColumns.unsampled(trajectory.token_ids[first:])
    return replace(trajectory, columns=TokenColumns.joined([learned, rest]))
