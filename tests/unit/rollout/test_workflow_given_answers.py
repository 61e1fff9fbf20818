"""Given answers become groups like sampled ones: scored by a server, with its log-probabilities and version."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from areal_lora.config.sections.task import PromptFormat
from areal_lora.data.packed_groups import check_alignment
from areal_lora.data.prompts import Formatter
from areal_lora.rollout.completion_client import GenerationFault
from areal_lora.rollout.controller.groups import ScoredGroup, Ticket
from areal_lora.rollout.workflow import Episode, GivenWorkflow
from areal_lora.rollout.workflow_loading import TrainingWorkflow
from areal_lora.types import AdapterRef, Sample, TrajectoryGroup
from tests.support.rollout.fake_server import FakeServer, Fault
from tests.support.rollout.texts import EOS, MAX_MODEL_LEN, SAMPLING, V1, V2, CharTokenizer, Graded, prompt_of, served

PROMPT = prompt_of("6*7=", answer="42")
ASKED = {"role": "user", "content": "6*7="}


def run(server: FakeServer, scorer: Graded | None = None, answer: str = "42", temperature: float = 1.0) -> Episode:
    async def main() -> Episode:
        sampling = SAMPLING.model_copy(update={"temperature": temperature})
        async with served(server, scorer or Graded(), sampling) as context:
            workflow = GivenWorkflow(context=context, column=None)
            return await workflow.run(prompt_of("6*7=", answer=answer), V1, seed=1)

    return asyncio.run(main())


def test_the_given_answer_is_one_trajectory_with_the_servers_scores() -> None:
    server, scorer = FakeServer(models={str(V1)}), Graded()
    (trajectory,) = run(server, scorer, temperature=0.7).group.trajectories
    check_alignment(trajectory)
    assert trajectory.given
    assert trajectory.token_ids == [*map(ord, "6*7=42"), EOS]
    assert trajectory.loss_mask == [0, 0, 0, 0, 1, 1, 1]
    # The stand-in gives token t of what it scores -t / 100.
    assert trajectory.rollout_logprobs == pytest.approx([0, 0, 0, 0, -0.04, -0.05, -0.06])
    assert trajectory.versions == [-1, -1, -1, -1, 1, 1, 1]
    assert trajectory.reward == len("42"), "the reward judges it as any answer"
    assert [item.completion for item in scorer.asked] == ["42"]
    (request,) = server.requests
    assert (request["echo"], request["temperature"], request["max_tokens"]) == (True, 0.7, 1)


def chat(server: FakeServer, scorer: Graded, said: list[dict[str, str]], tokenizer: CharTokenizer) -> Episode:
    sample = Sample(uid="s", prompt="6*7=", answer=None, messages=(ASKED,), columns={"said": said})

    async def main() -> Episode:
        async with served(server, scorer, SAMPLING) as context:
            formatter = Formatter(tokenizer=tokenizer, how=PromptFormat(kind="chat"))
            workflow = GivenWorkflow(context=replace(context, formatter=formatter), column="said")
            return await workflow.run(formatter.prompt(sample, "0:s", 0), V1, seed=1)

    return asyncio.run(main())


def test_all_answers_of_a_conversation_are_trained_on_and_nothing_else() -> None:
    server, scorer = FakeServer(models={str(V1)}), Graded()
    said = [{"role": "assistant", "content": "42"}, {"role": "user", "content": "ok?"}]
    said.append({"role": "assistant", "content": "yes"})
    episode = chat(server, scorer, said, CharTokenizer())
    (trajectory,) = episode.group.trajectories
    check_alignment(trajectory)
    pieces = [("<user:6*7=>", 0), ("42\2", 1), ("<user:ok?>", 0), ("yes\2", 1)]
    assert trajectory.given
    assert trajectory.token_ids == [ord(c) for text, _ in pieces for c in text]
    assert trajectory.loss_mask == [on for text, on in pieces for _ in text]
    want = [-t / 100 if on else 0 for t, on in enumerate(trajectory.loss_mask)]
    assert trajectory.rollout_logprobs == pytest.approx(want)
    assert trajectory.versions == [1 if on else -1 for on in trajectory.loss_mask]
    assert len(server.requests) == 1, "all turns are scored at once"
    (item,) = scorer.asked
    assert (item.completion, item.n_tokens, item.messages) == ("yes", 4, [ASKED, *said])
    assert episode.texts == ("42\2<user:ok?>yes\2",)


def test_a_conversation_that_is_too_long_or_that_the_template_refuses_costs_its_row_only() -> None:
    class Strict(CharTokenizer):
        def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> str:
            if any(message["role"] == "tool" for message in conversation):
                raise ValueError("no tools")
            return super().apply_chat_template(conversation, **options)

    answer = {"role": "assistant", "content": "42"}
    for between, words in (
        ({"role": "user", "content": "7" * MAX_MODEL_LEN}, "max_model_len = 64"),
        ({"role": "tool", "content": "7"}, "the given answer: .*no tools"),
    ):
        with pytest.raises(GenerationFault, match=words) as fault:
            chat(FakeServer(models={str(V1)}), Graded(), [answer, between, answer], Strict())
        assert not fault.value.retryable


def test_the_version_is_the_one_that_the_server_used() -> None:
    server = FakeServer(models={str(V1), str(V2)}, served_as=lambda _: str(V2))
    (trajectory,) = run(server).group.trajectories
    assert (trajectory.adapter, set(trajectory.versions)) == (V2, {-1, 2})


def test_an_answer_that_does_not_fit_is_refused_and_not_cut() -> None:
    with pytest.raises(GenerationFault, match="max_model_len = 64") as fault:
        run(FakeServer(models={str(V1)}), answer="7" * MAX_MODEL_LEN)
    assert not fault.value.retryable


def test_scores_of_another_length_are_a_fault_of_the_server() -> None:
    def cut(reply: dict) -> None:
        del reply["choices"][0]["logprobs"]["token_logprobs"][-1]

    with pytest.raises(GenerationFault, match="7 log-probabilities for 7"):
        run(FakeServer(models={str(V1)}, fault=lambda _: Fault(edit=cut)))


def test_a_group_of_one_given_answer_is_not_dropped_for_lack_of_variance() -> None:
    episode = run(FakeServer(models={str(V1)}))
    finished = ScoredGroup(ticket=Ticket(seq=0, prompt=PROMPT, issue=0), episode=episode, oldest=1, newest=1)
    assert not finished.uniform
    (trajectory,) = episode.group.trajectories
    group = replace(episode.group, trajectories=(replace(trajectory, given=False),))
    assert replace(finished, episode=replace(episode, group=group)).uniform


def test_the_version_that_a_group_is_issued_with_chooses_the_phase() -> None:
    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        async def run(self, prompt: object, ref: AdapterRef, seed: int) -> Episode:
            return Episode(group=TrajectoryGroup(uid=self.name, trajectories=()), texts=())

    phases = TrainingWorkflow(answers=Named("then"), given=Named("given"), given_steps=2)
    refs = [AdapterRef(name="math", version=v) for v in range(4)]
    assert [asyncio.run(phases.run(PROMPT, ref, 0)).group.uid for ref in refs] == ["given", "given", "then", "then"]
