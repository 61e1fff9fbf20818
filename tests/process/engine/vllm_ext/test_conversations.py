"""Conversations on several real servers: their prefix caches are used, says vLLM's own count."""

from __future__ import annotations

import asyncio
import string
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from transformers import AutoTokenizer

from areal_lora.config.models import SamplingConfig
from areal_lora.data.prompts import Formatter, Prompt
from areal_lora.rollout.completion_client import CompletionClient, FaultKind, GenerationFault
from areal_lora.rollout.conversations import MultiTurnWorkflow, Reply
from areal_lora.rollout.routing import Router
from areal_lora.rollout.workflow import WorkflowContext
from areal_lora.types import Sample
from tests.support.clocks import seen
from tests.support.engine.vllm_ext.serving import RunningServer, connect, start
from tests.support.rollout.environments_here import played_here
from tests.support.sizes import size

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SERVERS, TURNS = size(2, 4), 8
GROUPS = 2 * SERVERS  # at once
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
def started(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[int], list[RunningServer]]]:
    """Starts some servers, which run to the end of this module."""

    def servers(n: int) -> list[RunningServer]:
        folders = [tmp_path_factory.mktemp("affinity") / "a run" for _ in range(n)]
        processes = [start(folder, tiny_model, max_model_len=512) for folder in folders]
        for process in processes:
            stack.callback(process.wait, 120)
            stack.callback(process.terminate)
        running = [connect(f, tiny_model, process) for f, process in zip(folders, processes, strict=True)]
        for server in running:
            stack.callback(server.source.close)
        return running

    with ExitStack() as stack:
        yield servers


@pytest.fixture(scope="module")
def servers(started: Callable[[int], list[RunningServer]]) -> list[RunningServer]:
    running = started(SERVERS)
    for server in running:
        server.publish(server.adapter(3))
    return running


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


@dataclass(frozen=True)
class Figures:
    """What some episodes cost their servers."""

    episodes: int
    prompts: int  # tokens
    cached: int
    seconds: float

    @property
    def share(self) -> float:
        return self.cached / self.prompts

    def __str__(self) -> str:
        computed, rate = (self.prompts - self.cached) / self.episodes, self.episodes / self.seconds * 60
        return f"{self.share:.3f} cached, {computed:.0f} tokens computed per episode, {rate:.0f} episodes a minute"


async def play(
    context: WorkflowContext,
    servers: Sequence[RunningServer],
    letter: str,
    tool: type[Tool] = Tool,
    groups: int = GROUPS,
) -> Figures:
    """Episodes of groups, of which ``GROUPS`` run at once; one that loses its server is repeated."""
    before = [server.admin.info(60.0).stats for server in servers]
    workflow = MultiTurnWorkflow(context=context, played=played_here(tool), max_turns=TURNS)
    ref, running, began = servers[0].newest, asyncio.Semaphore(GROUPS), time.monotonic()
    assert ref is not None

    async def group(i: int) -> int:
        text = f"{letter}{i:x}" * (PROMPT // 2)
        sample = Sample(uid=f"{letter}{i}", prompt=text, answer="")
        prompt = Prompt(uid=sample.uid, position=i, sample=sample, text=text, token_ids=context.encode(text))
        async with running:
            while True:
                try:
                    made = (await workflow.run(prompt, ref, seed=i)).group.trajectories
                    break
                except GenerationFault as fault:
                    if fault.kind is not FaultKind.CONNECTION:
                        raise
        assert min(len(t.token_ids) for t in made) > PROMPT + TURNS * 12 + (TURNS - 1) * REPLY
        return len(made)

    episodes = sum(await asyncio.gather(*map(group, range(groups))))
    seconds = time.monotonic() - began
    pairs = list(zip(before, [server.admin.info(60.0).stats for server in servers], strict=True))
    return Figures(
        episodes=episodes,
        prompts=sum(b.prompt_tokens - a.prompt_tokens for a, b in pairs),
        cached=sum(b.cached_tokens - a.cached_tokens for a, b in pairs),
        seconds=seconds,
    )


def addresses(servers: Iterable[RunningServer]) -> dict[str, str]:
    """By name, which is that of the run's folder: no two servers have one."""
    return {str(s.folder): f"http://127.0.0.1:{s.endpoint.ports['data']}" for s in servers}


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

    async def rounds() -> dict[str, Figures]:
        router = Router(max_behind=16)
        ref = servers[0].newest
        assert ref is not None
        router.announce(ref, addresses(servers))
        async with CompletionClient(router, "no secret") as client:
            kept = context_with(client, servers[0])
            anywhere = Anywhere(**{name: getattr(kept, name) for name in WorkflowContext.__dataclass_fields__})
            contexts = {"kept": kept, "anywhere": anywhere}
            return {name: await play(context, servers, next(letters)) for name, context in contexts.items()}

    letters = iter(string.ascii_uppercase)  # prompts that no cache has yet
    more = lambda found: 1 - found["anywhere"].share > 1.2 * (1 - found["kept"].share)  # noqa: E731
    found = seen(lambda: asyncio.run(rounds()), more, tries=4)
    for name, figures in found.items():
        print(f"{SERVERS} servers, {name}: {figures}")
    assert found["kept"].share >= 0.8


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
            return (await play(context_with(client, servers[0]), servers, next(letters), tool)).share

    letters = iter(string.ascii_letters[40:])
    stays, moves = seen(
        lambda: (asyncio.run(round_of(1)), asyncio.run(round_of(0))), lambda found: found[0] > found[1] + 0.03, tries=4
    )
    print("share of prompt tokens that the caches had:", stays, "and where a publish moves conversations:", moves)
    assert stays >= 0.8


def test_conversations_outlive_their_server_and_use_one_that_is_added(
    servers: list[RunningServer], started: Callable[[int], list[RunningServer]]
) -> None:
    """In the middle of the first episode one server is killed; the added one takes its place for later tests, too."""
    (added,), ref = started(1), servers[0].newest
    assert ref is not None
    added.publish(added.adapter(5), version=ref.version)
    router, killed = Router(max_behind=16), servers[-1]
    router.announce(ref, addresses(servers))
    servers[-1] = added

    async def killed_in_an_episode() -> Figures:
        loop, once, done = asyncio.get_running_loop(), threading.Lock(), threading.Event()

        def kill() -> None:
            if once.acquire(blocking=False):
                killed.process.kill()
                loop.call_soon_threadsafe(router.announce, ref, addresses(servers), addresses([killed]))
                done.set()
            assert done.wait(60)

        tool = type("Killing", (Tool,), {"published": staticmethod(kill)})
        async with CompletionClient(router, "no secret") as client:
            return await play(context_with(client, servers[0]), servers, "?", tool, 4 * GROUPS)

    figures = asyncio.run(killed_in_an_episode())
    print(f"{SERVERS} servers, of which one is killed and one is added: {figures}")
    assert figures.episodes == 4 * GROUPS * SAMPLING.n_samples
    assert figures.share >= 0.8
    assert added.admin.info(60.0).stats.prompt_tokens > 0
