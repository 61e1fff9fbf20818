"""Sessions in a process beside this one have the same results, and the router of this one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from areal_lora.config.sections.task import PromptFormat
from areal_lora.data.prompts import Formatter, load_tokenizer
from areal_lora.rollout.agent_api import gateway_process, gateways
from areal_lora.rollout.agent_api.endpoint import agent_gateway
from areal_lora.rollout.agent_api.gateways import Gateways, processes_of_this_machine
from areal_lora.rollout.agents import AgentTask, AgentWorkflow
from areal_lora.rollout.completion_client import LEAVING_HEADER, CompletionClient, FaultKind, GenerationFault
from areal_lora.rollout.conversations import ConversationFile, read_conversations
from areal_lora.rollout.routing import Router, Server
from areal_lora.rollout.workflow import Episode, WorkflowContext
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import create_secret
from areal_lora.tasks.reward_calls import ScoreItem
from areal_lora.types import AdapterRef, RouteShape
from tests.support.engine.vllm_ext.serving import make_tokenizer
from tests.support.rollout.agent_endpoint import FUNCTION, TOOL, asked, find_calls, rewarded
from tests.support.rollout.fake_server import FakeServer, Fault
from tests.support.rollout.texts import SAMPLING, V1, V2, Graded, prompt_of

END = "<eos>"
TEMPLATE = """\
{% for t in tools or () %}[{{ t.function.name }}]{% endfor %}\
{% for m in messages %}\
{% if m.role == 'assistant' %}\
{{ m.content }}{% for c in m.tool_calls or () %}\
{{ '{' }}{{ c.function.name }} {{ c.function.arguments | tojson }}{{ '}' }}{% endfor %}<eos>\
{% else %}<{{ m.role }}:{{ m.content }}>{% endif %}{% endfor %}"""
READY_S = 120.0
Agent = Callable[[AgentTask], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    tokenizer: Any = load_tokenizer(str(folder))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


class World:
    """A router, its servers and the sessions of a run, in ``most`` processes."""

    def __init__(self, folder: Path, tmp: Path, most: int, *servers: FakeServer, **fields: Any) -> None:
        self.folder, self.run_folder, self.most, self.servers = folder, RunFolder(tmp), most, servers
        self.router, self.scorer, self.fields = Router(max_behind=4), Graded(), fields
        self.kept = ConversationFile(self.run_folder)
        tmp.mkdir(exist_ok=True)
        create_secret(self.run_folder)

    def announce(self, ref: AdapterRef) -> None:
        self.router.announce(ref, {f"server-{i}": server.url for i, server in enumerate(self.servers)})

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[WorkflowContext]:
        self.gateways = Gateways(str(self.folder), self.run_folder, self.router, self.most)
        for server in self.servers:
            await server.__aenter__()
        self.announce(V1)
        async with CompletionClient(self.router, "secret") as client, self.gateways, agent_gateway(self.gateways):
            self.gateways.start()
            async with asyncio.timeout(READY_S):
                while len(self.gateways._ready) < self.most:
                    await asyncio.sleep(0.02)
            how = PromptFormat.model_validate({"kind": "chat"})
            yield WorkflowContext(
                client=client,
                scorer=self.scorer,
                sampling=SAMPLING.model_copy(update={"n_samples": 1}),
                formatter=Formatter(tokenizer=load_tokenizer(str(self.folder)), how=how),
                max_model_len=4096,
                streams=all(server.routes is None for server in self.servers),
            )
        for server in self.servers:
            await server.__aexit__()
        assert all(server.outstanding == 0 for server in self.router.servers.values()), "each lease has ended"

    def play(self, agent: Agent, **changes: Any) -> Episode:
        async def main() -> Episode:
            async with self.opened() as context:
                return await self.run(replace(context, **changes), agent)

        return asyncio.run(main())

    async def run(self, context: WorkflowContext, agent: Agent) -> Episode:
        workflow = AgentWorkflow(
            context=context,
            sessions=self.gateways,
            agent=rewarded(agent),
            tool_parser="any",
            kept=self.kept,
            **self.fields,
        )
        return await workflow.run(prompt_of("1+1="), V1, seed=7)

    def record(self) -> Any:
        """What a run leaves beside its episode."""
        requests = sorted(json.dumps(body, sort_keys=True) for server in self.servers for body in server.requests)
        return [[replace_time(record) for record in read_conversations(self.run_folder)], requests, self.scorer.asked]


def replace_time(record: Any) -> Any:
    return {name: getattr(record, name) for name in record.__struct_fields__ if name != "time"}


def answering(folder: Path, **fields: Any) -> FakeServer:
    """Says a call, then what is no call, by the length of the prompt; texts for grammars and all lengths."""
    tokenizer = load_tokenizer(str(folder))

    def answer(prompt: list[int], sample: int) -> tuple[list[int], str]:
        text = f'so{sample}{{add {{"a": {len(prompt)}}}}}' if len(prompt) % 2 else f"é{sample} {len(prompt)}"
        return tokenizer.encode(text + END, add_special_tokens=False), text

    return FakeServer(**{"models": {str(V1)}, "answer": answer, "parse": find_calls} | fields)


async def streamed(task: AgentTask, path: str, **body: Any) -> bytes:
    headers = {"Authorization": f"Bearer {task.api_key}"}
    url, asked_for = task.base_url + path, {"model": task.model, "stream": True} | body
    async with aiohttp.ClientSession() as session, session.post(url, json=asked_for, headers=headers) as response:
        assert response.status == 200
        return await response.read()


def every_api(heard: list[Any]) -> Agent:
    """Conversations of several turns by all APIs, whole and streamed, with tools, several answers and grammars."""

    async def say(task: AgentTask, path: str = "/chat/completions", **body: Any) -> Any:
        status, answered = await asked(task, path, **body)
        assert status == 200, answered
        heard.append({key: value for key, value in answered.items() if key not in ("created", "created_at")})
        return answered

    async def agent(task: AgentTask) -> float | None:
        messages: list[Any] = [{"role": "system", "content": "s"}, {"role": "user", "content": "hé"}]
        for i in range(4):
            made = (await say(task, messages=messages, tools=[TOOL], logprobs=i == 2))["choices"][0]["message"]
            messages.append({key: value for key, value in made.items() if value is not None})
            called = made.get("tool_calls")
            messages.append(
                {"role": "tool", "content": f"r{i}", "tool_call_id": called[0]["id"]}
                if called
                else {"role": "user", "content": f"more {i}"}
            )
        await say(task, messages=messages, tools=[TOOL], n=2, max_tokens=5, seed=3, stop=["x"])
        await say(task, messages=messages[:2], tools=[TOOL], tool_choice="required")
        for path, asked_for in (
            ("/chat/completions", {"messages": [{"role": "user", "content": "stream"}], "tools": [TOOL]}),
            ("/messages", {"messages": [{"role": "user", "content": "anthropic"}], "max_tokens": 6}),
        ):
            events = (await streamed(task, path, **asked_for)).decode()
            heard.append([line for line in events.splitlines() if '"created"' not in line])
        first = await say(
            task, "/responses", input="response", instructions="i", tools=[{"type": "function"} | FUNCTION]
        )
        await say(task, "/responses", input="next", previous_response_id=first["id"])
        await say(task, "/messages", messages=[{"role": "user", "content": "count"}], max_tokens=6)
        heard.append(await asked(task, "/messages/count_tokens", messages=[{"role": "user", "content": "count"}]))
        await say(task, "/completions", prompt="plain text")
        await say(task, "/completions", prompt=[5, 6, 7, 8])
        heard.append(await asked(task, messages=[{"role": "user", "content": "x" * 5000}]))
        heard.append(await asked(task, messages=[{"role": "user", "content": "x"}], temperature=0.125))
        assert heard[-1][0] == heard[-2][0] == 400
        return None

    return agent


@pytest.mark.parametrize("routes", [None, RouteShape(layers=2, per_token=2, experts=8)], ids=["", "routes"])
def test_a_session_has_the_same_results_in_another_process(
    folder: Path, tmp_path: Path, routes: RouteShape | None
) -> None:
    """Trajectories with their log-probabilities, records, score items, seeds, answers and what the server gets."""
    found = list[Any]()
    for most in (0, 1):
        world, heard = World(folder, tmp_path / str(most), most, answering(folder, routes=routes)), list[Any]()
        found.append([world.play(every_api(heard)), world.record(), heard])
        assert not most or not world.gateways._open, "no session was in this process"
    assert found[0] == found[1]
    trajectories = found[0][0].group.trajectories
    assert len(trajectories) > 5
    assert max(sum(t.loss_mask) for t in trajectories) > 20
    assert isinstance(world.scorer.asked[0], ScoreItem)


def test_a_conversation_takes_the_newest_version_and_an_evaluation_its_own(folder: Path, tmp_path: Path) -> None:
    world = World(folder, tmp_path, 1, answering(folder, models={str(V1), str(V2)}))

    async def agent(task: AgentTask) -> float:
        messages = [{"role": "user", "content": "one"}]
        _, first = await asked(task, messages=messages)
        world.announce(V2)
        again = [*messages, first["choices"][0]["message"], {"role": "user", "content": "two"}]
        assert (await asked(task, messages=again))[0] == 200
        return 1.0

    async def main() -> list[list[int]]:
        async with world.opened() as context:
            client: Any = context.client
            pinned = replace(context, client=client.pinned())
            made = [await world.run(each, agent) for each in (context, context, pinned)]
            return [sorted({v for t in each.group.trajectories for v in t.versions if v >= 0}) for each in made]

    assert asyncio.run(main()) == [[1, 2], [2], [1]]
    assert [body["pin_version"] for body in world.servers[0].requests if body.get("pin_version")] == [True] * 2


def test_the_router_hears_of_each_request_how_its_server_fares(folder: Path, tmp_path: Path) -> None:
    """The first has lost the version; the second fails once, cools down, and succeeds."""
    lost = answering(folder, models=set())
    other = answering(folder, fault=lambda k: Fault(status=500) if k == 1 else None)
    world, failed = World(folder, tmp_path, 1, lost, other), list[str]()

    def fail(server: Server) -> None:
        failed.append(server.url)
        Router.failed(world.router, server)

    async def agent(task: AgentTask) -> float:
        for text in ("one", "two"):
            await asked(task, messages=[{"role": "user", "content": text}])
        return 1.0

    async def main() -> None:
        world.router.failed = fail
        async with world.opened() as context:
            await world.run(context, agent)
            assert (failed, world.router.servers["server-1"].failures) == ([other.url], 0)
            assert (len(lost.requests), len(other.requests)) == (1, 4), "it is sampled again"
            other.models.clear()
            with pytest.raises(GenerationFault) as caught:
                await world.run(context, agent)
            assert caught.value.kind is FaultKind.RETIRED

    asyncio.run(main())


def test_a_server_that_leaves_or_is_lost_is_so_in_the_process(folder: Path, tmp_path: Path) -> None:
    """What a leaving one hands back goes to the other, and a lost one's requests end at once."""
    first = answering(folder, fault=lambda _: Fault(status=503, headers={LEAVING_HEADER: "1"}))
    second = answering(folder, delay_s=lambda k: 600.0 if k == 1 else 0.0)
    world, statuses = World(folder, tmp_path, 1, first, second), list[int]()

    async def agent(task: AgentTask) -> float:
        for text in ("one", "two"):
            statuses.append((await asked(task, messages=[{"role": "user", "content": text}]))[0])
        return 1.0

    async def main() -> None:
        async with world.opened() as context:
            leaves = world.router.servers["server-0"]
            running = asyncio.create_task(world.run(context, agent))
            while len(second.requests) < 2 and not running.done():
                await asyncio.sleep(0.01)
            assert leaves.leaving
            second.models.add(str(V2))
            world.router.announce(V2, {"server-1": second.url}, lost=["server-1"])
            await running

    asyncio.run(main())
    assert statuses.count(200) == 3
    assert len(first.requests) == 1
    assert [body["model"] for body in second.requests] == ["math@v1", "math@v1", "math@v2", "math@v2"]


def test_a_request_waits_for_a_server_and_one_that_breaks_off_while_it_leaves_is_no_failure(
    folder: Path, tmp_path: Path
) -> None:
    server = answering(folder, delay_s=lambda k: 600.0 if k == 0 else 0.0)
    world = World(folder, tmp_path, 1, server)

    async def agent(task: AgentTask) -> float:
        assert (await asked(task, messages=[{"role": "user", "content": "one"}]))[0] == 200
        return 1.0

    async def main() -> None:
        async with world.opened() as context:
            on = world.router.servers["server-0"]
            running = asyncio.create_task(world.run(context, agent))
            while not server.requests and not running.done():
                await asyncio.sleep(0.01)
            on.leave()
            async with world.gateways.opened(context, V1, seed=1):
                pass  # its key comes after what the process has heard before
            assert server._runner is not None
            assert server._runner.server is not None
            for connection in server._runner.server.connections:
                assert connection.transport is not None
                connection.transport.abort()
            while not world.gateways._ready[0].waiting and not running.done():
                await asyncio.sleep(0.01)
            assert on.failures == 0
            async with answering(folder) as other:
                world.router.announce(V1, {"server-1": other.url}, left=["server-0"])
                await running

    asyncio.run(main())


def test_a_session_stays_on_its_server_and_starts_on_that_of_its_group(folder: Path, tmp_path: Path) -> None:
    servers = [answering(folder), answering(folder)]
    world, samples = World(folder, tmp_path, 1, *servers), list[AgentTask]()

    async def agent(task: AgentTask) -> float:
        samples.append(task)
        while len(samples) < 2:
            await asyncio.sleep(0.01)
        if task is samples[1]:  # after the first sample's turns
            while len(servers[0].requests) < 2 and not servers[1].requests:
                await asyncio.sleep(0.01)
        for text in ("one", "two"):
            assert (await asked(task, messages=[{"role": "user", "content": text}]))[0] == 200
            world.router.servers["server-0"].outstanding += 1  # the least loaded one is the other
        return 1.0

    async def main() -> None:
        async with world.opened() as context:
            await world.run(replace(context, sampling=context.sampling.model_copy(update={"n_samples": 2})), agent)
            world.router.servers["server-0"].outstanding -= 4

    asyncio.run(main())
    assert [len(server.requests) for server in servers] == [4, 0]


def test_what_a_session_still_asks_ends_with_it(folder: Path, tmp_path: Path) -> None:
    server = answering(folder, delay_s=lambda k: 600.0 if k else 0.0)
    world, late, statuses = World(folder, tmp_path, 1, server), list[Any](), list[int]()

    async def agent(task: AgentTask) -> float:
        await asked(task, messages=[{"role": "user", "content": "one"}])
        late.append(asyncio.create_task(asked(task, messages=[{"role": "user", "content": "late"}])))
        while server.open_requests == 0:
            await asyncio.sleep(0.01)
        late.append(task)
        return 1.0

    async def main() -> None:
        async with world.opened() as context:
            await world.run(context, agent)
            statuses.append((await asked(late[1], messages=[{"role": "user", "content": "late"}]))[0])
            async with asyncio.timeout(READY_S):
                while server.open_requests:
                    await asyncio.sleep(0.01)
            late[0].cancel()
            running = asyncio.create_task(world.run(context, lambda task: asyncio.sleep(600.0)))
            while not world.gateways._ready[0].sessions:
                await asyncio.sleep(0.01)
            running.cancel()
            await asyncio.wait([running])
            assert not world.gateways._ready[0].sessions

    asyncio.run(main())
    assert statuses == [401]


@pytest.mark.parametrize("signal_", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_lost_process_costs_its_sessions_alone_and_is_started_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signal_: signal.Signals
) -> None:
    """Its samples are repeated, with the same seed, in another one or here. So are those of one that hangs."""
    monkeypatch.setattr(gateways, "PAUSE_S", 0.0)
    monkeypatch.setattr(gateways, "SILENT_BEATS", 10)
    server = answering(folder, delay_s=lambda k: 600.0 if k == 1 else 0.0)
    world, killed = World(folder, tmp_path, 1, server), list[int]()

    async def agent(task: AgentTask) -> float:
        await asked(task, messages=[{"role": "user", "content": "one"}])
        if not killed:
            waiting = asyncio.create_task(asked(task, messages=[{"role": "user", "content": "two"}]))
            while len(server.requests) < 2:
                await asyncio.sleep(0.01)
            killed.append(world.gateways._ready[0].process.pid)
            os.kill(killed[0], signal_)
            await asyncio.wait([waiting])
            waiting.exception()
            await asyncio.sleep(600.0)
        await asked(task, messages=[{"role": "user", "content": "two"}])
        return 1.0

    async def main() -> Episode:
        async with world.opened() as context:
            episode = await world.run(context, agent)
            async with asyncio.timeout(READY_S):
                while not world.gateways._ready or world.gateways._ready[0].process.pid == killed[0]:
                    await asyncio.sleep(0.02)
            await world.run(context, agent)
            second = world.gateways._ready[0].process.pid
        with pytest.raises(ProcessLookupError):
            os.kill(second, 0)
        return episode

    episode = asyncio.run(main())
    alone = World(folder, tmp_path / "alone", 0, answering(folder))
    assert alone.play(agent) == episode
    seeds = [body["seed"] for body in server.requests]
    assert seeds[:2] == seeds[2:4] == seeds[4:]


def test_a_process_ends_with_its_socket(folder: Path, tmp_path: Path) -> None:
    """As when its parent is killed."""
    create_secret(RunFolder(tmp_path))
    ours, theirs = socket.socketpair()
    argv = [sys.executable, "-I", "-m", gateway_process.__name__, str(theirs.fileno()), "0", str(folder), str(tmp_path)]
    with ours, subprocess.Popen(argv, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE) as process:
        theirs.close()
        assert int.from_bytes(ours.recv(4), "big") > 0, "it is ready"
        ours.shutdown(socket.SHUT_RDWR)
        _, errors = process.communicate(timeout=READY_S)
    assert process.returncode == 0
    assert b"Traceback" not in errors


def test_the_first_session_starts_them_and_is_here(folder: Path, tmp_path: Path) -> None:
    world = World(folder, tmp_path, 0, answering(folder))

    async def main() -> None:
        async with world.opened() as context, Gateways(str(folder), world.run_folder, world.router, 1) as lazy:
            await asyncio.sleep(0)
            assert not lazy._tasks
            for n_here, n_there in ((1, 0), (0, 1)):
                async with lazy.opened(context, V1, seed=1):
                    assert len(lazy._open) == n_here
                    assert [len(each.sessions) for each in lazy._ready] == [1] * n_there
                    async with asyncio.timeout(READY_S):
                        while not lazy._ready:
                            await asyncio.sleep(0.02)

    asyncio.run(main())


@pytest.mark.parametrize(("cores", "processes"), [(2, 0), (7, 0), (16, 2), (192, 16)])
def test_processes_are_for_machines_with_cores(cores: int, processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert processes_of_this_machine() == processes
