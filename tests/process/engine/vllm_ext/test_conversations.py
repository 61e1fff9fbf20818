"""Conversations on several real servers: their prefix caches are used, says vLLM's own count."""

from __future__ import annotations

import asyncio
import string
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
from transformers import AutoTokenizer

from areal_lora.config.models import SamplingConfig
from areal_lora.data.prompts import Formatter, Prompt
from areal_lora.rollout.completion_client import CompletionClient
from areal_lora.rollout.conversations import MultiTurnWorkflow, Reply
from areal_lora.rollout.routing import Router
from areal_lora.rollout.workflow import WorkflowContext
from areal_lora.types import Sample
from tests.support.clocks import seen
from tests.support.engine.vllm_ext.serving import RunningServer, connect, start
from tests.support.rollout.environments_here import played_here

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SERVERS, GROUPS, TURNS = 2, 4, 8
SAMPLING = SamplingConfig(
    prompts_per_step=1,
    n_samples=4,
    max_new_tokens=64,
    min_tokens=12,
    stop=list(string.ascii_letters),  # an answer that is cut off would end its episode
    timeout_s=200.0,
)
PROMPT, REPLY = 128, 16  # tokens


@pytest.fixture(scope="module")
def servers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RunningServer]]:
    with ExitStack() as stack:
        folders = [tmp_path_factory.mktemp("affinity") / f"run {i}" for i in range(SERVERS)]
        processes = [start(folder, tiny_model, max_model_len=512) for folder in folders]
        for process in processes:
            stack.callback(process.wait, 120)
            stack.callback(process.terminate)
        running = [connect(f, tiny_model, process) for f, process in zip(folders, processes, strict=True)]
        for server in running:
            stack.callback(server.source.close)
            server.publish(server.adapter(3))
        yield running


class Anywhere(WorkflowContext):
    """Each request of a conversation goes to the least loaded server, as if it were alone."""

    def conversation(self) -> WorkflowContext:
        return self


class Tool:
    """Seven replies. In the middle of an episode the others may wait for ``published``."""

    turns = 0
    published: Callable[[], None] = staticmethod(lambda: None)

    def reset(self, sample: Sample) -> None:
        return None

    def step(self, text: str) -> Reply:
        self.turns += 1
        if self.turns == TURNS // 2:
            self.published()
        return Reply(text=("abcdefgh"[self.turns - 1] * REPLY), reward=0.0, done=self.turns == TURNS)


async def play(
    context: WorkflowContext, servers: list[RunningServer], letter: str, tool: type[Tool] = Tool
) -> tuple[int, int]:
    """Prompt tokens of ``GROUPS`` groups of episodes, and those of them that the prefix caches had."""
    before = [server.admin.info(60.0).stats for server in servers]
    workflow = MultiTurnWorkflow(context=context, played=played_here(tool), max_turns=TURNS)
    ref = servers[0].newest
    assert ref is not None

    async def group(i: int) -> None:
        text = f"{letter}{i}" * (PROMPT // 2)
        sample = Sample(uid=f"{letter}{i}", prompt=text, answer="")
        prompt = Prompt(uid=sample.uid, position=i, sample=sample, text=text, token_ids=context.encode(text))
        episode = await workflow.run(prompt, ref, seed=i)
        assert min(len(t.token_ids) for t in episode.group.trajectories) > PROMPT + TURNS * 12 + (TURNS - 1) * REPLY

    async with asyncio.TaskGroup() as groups:
        for i in range(GROUPS):
            groups.create_task(group(i))
    after = [server.admin.info(60.0).stats for server in servers]
    pairs = list(zip(before, after, strict=True))
    return (
        sum(b.prompt_tokens - a.prompt_tokens for a, b in pairs),
        sum(b.cached_tokens - a.cached_tokens for a, b in pairs),
    )


def addresses(servers: list[RunningServer]) -> dict[str, str]:
    return {f"server-{i}": f"http://127.0.0.1:{s.endpoint.ports['data']}" for i, s in enumerate(servers)}


def context_with(client: CompletionClient, server: RunningServer) -> WorkflowContext:
    return WorkflowContext(
        client=client,
        scorer=cast(Any, None),  # every reply has a reward
        sampling=SAMPLING,
        formatter=Formatter(tokenizer=AutoTokenizer.from_pretrained(server.model)),
        max_model_len=512,
    )


def test_conversations_find_their_tokens_cached(servers: list[RunningServer]) -> None:
    """About a tenth of a request's tokens are new, and a block of 32 is cached only when it is full."""

    async def rounds() -> dict[str, float]:
        router = Router(max_behind=16)
        ref = servers[0].newest
        assert ref is not None
        router.announce(ref, addresses(servers))
        async with CompletionClient(router, "no secret") as client:
            kept = context_with(client, servers[0])
            anywhere = Anywhere(**{name: getattr(kept, name) for name in WorkflowContext.__dataclass_fields__})
            contexts = {"kept": kept, "anywhere": anywhere}
            found = {name: await play(context, servers, next(letters)) for name, context in contexts.items()}
        return {name: cached / prompts for name, (prompts, cached) in found.items()}

    letters = iter(string.ascii_uppercase)  # prompts that no cache has yet
    more = lambda share: 1 - share["anywhere"] > 1.2 * (1 - share["kept"])  # noqa: E731
    share = seen(lambda: asyncio.run(rounds()), more, tries=4)
    print("share of prompt tokens that the caches had:", share)
    assert share["kept"] >= 0.8


def test_a_publish_cools_no_prefix_of_a_conversation_that_stays_on_its_version(servers: list[RunningServer]) -> None:
    async def round_of(max_lag: int) -> float:
        router, loop = Router(max_behind=16, max_lag=max_lag), asyncio.get_running_loop()
        ref = servers[0].newest
        assert ref is not None
        router.announce(ref, addresses(servers))
        once, done = threading.Lock(), threading.Event()

        def publish() -> None:
            """The first conversation that is in its middle publishes; the others wait."""
            if once.acquire(blocking=False):
                *_, newer = [server.publish(server.adapter(4)) for server in servers]
                loop.call_soon_threadsafe(router.announce, newer, addresses(servers))
                done.set()
            assert done.wait(60)

        tool = type("Publishing", (Tool,), {"published": staticmethod(publish)})
        async with CompletionClient(router, "no secret") as client:
            prompts, cached = await play(context_with(client, servers[0]), servers, next(letters), tool)
        return cached / prompts

    letters = iter(string.ascii_letters[40:])
    stays, moves = seen(
        lambda: (asyncio.run(round_of(1)), asyncio.run(round_of(0))), lambda found: found[0] > found[1] + 0.03, tries=4
    )
    print("share of prompt tokens that the caches had:", stays, "and where a publish moves conversations:", moves)
    assert stays >= 0.8
