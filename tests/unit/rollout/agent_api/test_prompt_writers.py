"""Prompts of long conversations come from other processes, with the same tokens as from this one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal_lora.config.sections.task import PromptFormat
from areal_lora.data.prompts import Formatter, load_tokenizer
from areal_lora.rollout import agents
from areal_lora.rollout.agent_api import prompt_writers
from areal_lora.rollout.agent_api.prompt_writers import LONG, PromptJob, PromptStart, PromptText, PromptWriters
from areal_lora.rollout.agent_api.refusals import AgentRequestError
from areal_lora.rollout.agent_api.replies import Call, Turn
from areal_lora.rollout.agents import AgentTask
from tests.support.engine.vllm_ext.serving import make_tokenizer
from tests.support.rollout.agent_endpoint import TOOL, asked, episode, find_calls
from tests.support.rollout.fake_server import FakeServer
from tests.support.rollout.texts import V1

END = "<eos>"
TEMPLATE = """\
{% for t in tools or () %}[{{ t.function.name }}]{% endfor %}\
{% set ns = namespace(last=0) %}\
{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}\
{% for m in messages %}{% if m.role == 'odd' %}{{ raise_exception('no such role') }}{% endif %}\
{% if m.role == 'assistant' %}\
A:{{ m.content if loop.index0 > ns.last else m.content.split('~')[-1] }}\
{% for c in m.tool_calls or () %}\
{{ '{' }}{{ c.function.name }} {{ c.function.arguments | tojson }}{{ '}' }}{% endfor %}\
<eos>{% else %}<{{ m.role }}:{{ m.content }}>{% endif %}{% endfor %}\
{% if add_generation_prompt %}A:{% endif %}"""
"""As Qwen3's: answers before the last user's message lose their thoughts, ``~thought~``."""
READY_S = 120.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    tokenizer: Any = load_tokenizer(str(folder))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def formatter_of(folder: Path, kind: str = "chat") -> Formatter:
    return Formatter(tokenizer=load_tokenizer(str(folder)), how=PromptFormat.model_validate({"kind": kind}))


def process_of(writers: PromptWriters) -> int:
    (writer,) = writers._ready
    return writer.process.pid


async def ready(writers: PromptWriters) -> None:
    async with asyncio.timeout(READY_S):
        while not writers._ready:
            writers._start()
            await asyncio.sleep(0.02)


def long_job(formatter: Formatter, **fields: Any) -> PromptJob:
    turns = tuple(Turn(role=("user", "assistant")[i % 2], content=f"text {i}") for i in range(LONG + 1))
    return PromptJob(how=formatter.how.model_dump_json(), turns=turns, **fields)


def jobs(formatter: Formatter, n: int) -> list[PromptJob]:
    """Of ``n`` requests of an agent: calls and their results, from time to time a message of the user."""
    found, turns, start = list[PromptJob](), (Turn(role="user", content="hé?"),), None
    for i in range(n):
        job = PromptJob(how=formatter.how.model_dump_json(), turns=turns, tools=[TOOL], check_tools=not i, start=start)
        found.append(job)
        written = prompt_writers.write_whole(formatter, job).written
        call = Call(id=str(i), name="add", arguments=f'{{"a":{i}}}')
        spelt = f"~why {i}~" + (f'{{add {{"a":{i}}}}}' if i % 4 else "so")
        turns += (Turn(role="assistant", content=f"~why {i}~" + ("" if i % 4 else "so"), calls=(call,) * bool(i % 4)),)
        start = PromptStart(
            n=len(turns),
            sampled=formatter.tokenizer.encode(spelt + END, add_special_tokens=False),
            written=written if i % 3 else None,
        )
        turns += (Turn(role="tool" if i % 4 else "user", content=f"result {i}", call_id=str(i)),)
    return found


@pytest.mark.parametrize("kind", ["chat", "chat_append"])
def test_another_process_writes_what_this_one_does(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    formatter, here = formatter_of(folder, kind), PromptWriters()

    async def main() -> None:
        every = jobs(formatter, LONG)
        expected = [await here.write(formatter, job) for job in every]
        async with PromptWriters(str(folder), 1) as writers:
            await ready(writers)
            monkeypatch.setattr(prompt_writers, "write_whole", _not_here(LONG))
            assert [await writers.write(formatter, job) for job in every] == expected
        assert {text.continues for text in expected} == {True, False}, "otherwise a half of the cases is missing"

    asyncio.run(main())


def _not_here(longest: int) -> Callable[[Formatter, PromptJob], PromptText]:
    whole = prompt_writers.write_whole

    def write(formatter: Formatter, job: PromptJob) -> PromptText:
        assert len(job.turns) < longest
        return whole(formatter, job)

    return write


def test_refusals_are_those_of_this_process(folder: Path) -> None:
    formatter = formatter_of(folder)
    odd = (*long_job(formatter).turns, Turn(role="odd"))
    refused = PromptJob(how=formatter.how.model_dump_json(), turns=odd)
    silent: Any = load_tokenizer(str(folder))

    async def refusal(writers: PromptWriters, formatter: Formatter, job: PromptJob) -> tuple[int, str, str | None]:
        with pytest.raises(AgentRequestError) as error:
            await writers.write(formatter, job)
        return error.value.status, str(error.value), error.value.param

    async def main() -> None:
        async with PromptWriters(str(folder), 1) as writers:
            await ready(writers)
            found = await refusal(writers, formatter, refused)
            assert found == await refusal(PromptWriters(), formatter, refused)
            assert found[0] == 400
            assert "no such role" in found[1]
            assert writers._ready, "a refusal is no fault of the process"

    silent.chat_template = TEMPLATE.replace("tools or ()", "()")
    asyncio.run(main())
    job = long_job(formatter, tools=[TOOL], check_tools=True)
    with pytest.raises(AgentRequestError, match="does not write tools"):
        asyncio.run(PromptWriters().write(Formatter(tokenizer=silent, how=formatter.how), job))


def test_what_a_lost_process_has_not_written_is_written_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    formatter = formatter_of(folder)
    job = long_job(formatter)

    async def main() -> None:
        expected = await PromptWriters().write(formatter, job)
        async with PromptWriters(str(folder), 1) as writers:
            await ready(writers)
            first = process_of(writers)
            os.kill(first, signal.SIGSTOP)  # so that it ends with the request
            waiting = asyncio.create_task(writers.write(formatter, job))
            while not writers._ready[0].waiting:
                await asyncio.sleep(0)
            os.kill(first, signal.SIGKILL)
            assert await waiting == expected
            assert await writers.write(formatter, job) == expected
            assert not writers._ready, "the next process starts after a pause only"
            monkeypatch.setattr(writers, "_next_start_s", 0.0)
            await ready(writers)
            second = process_of(writers)
            assert second != first
            assert await writers.write(formatter, job) == expected
        with pytest.raises(ProcessLookupError):
            os.kill(second, 0)

    asyncio.run(main())


def test_the_process_ends_with_its_input(folder: Path) -> None:
    """As when its parent is killed."""
    argv = [sys.executable, "-I", "-m", prompt_writers.__name__, str(folder)]
    done = subprocess.run(argv, input=b"", capture_output=True, check=True, timeout=READY_S)
    assert done.stdout == b"\0\0\0\1\xc0", "one frame, which says that it is ready"


def test_an_agent_gets_the_same_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its conversation is written here until the process is ready."""
    made, used, tokenizer = list[PromptWriters](), list[int](), load_tokenizer(str(folder))
    passed_on = prompt_writers._Writer.write

    def of_this_machine(folder: str) -> PromptWriters:
        made.append(PromptWriters(folder, 1))
        return made[-1]

    async def counted(writer: Any, job: PromptJob) -> bytes:
        used.append(len(job.turns))
        return await passed_on(writer, job)

    async def agent(task: AgentTask) -> float:
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        for i in range(LONG):
            status, body = await asked(task, messages=messages)
            assert status == 200, body
            messages += [body["choices"][0]["message"], {"role": "tool", "content": f"{i}"}]
            if made and len(messages) > LONG:
                await ready(made[0])
        return 1.0

    def answer(prompt: list[int], sample: int) -> tuple[list[int], str]:
        text = f"~so~{len(prompt)}"
        return tokenizer.encode(text + END, add_special_tokens=False), text

    def trajectory(folder: str | None) -> Any:
        server = FakeServer(models={str(V1)}, answer=answer, parse=find_calls)
        (one,) = episode(
            agent, server, formatter=formatter_of(Path(folder or tokenizer_folder)), folder=folder
        ).group.trajectories
        return one.token_ids, one.loss_mask

    tokenizer_folder = str(folder)
    monkeypatch.setattr(agents.PromptWriters, "of_this_machine", of_this_machine)
    monkeypatch.setattr(prompt_writers._Writer, "write", counted)
    alone = trajectory(None)
    assert not used
    assert trajectory(tokenizer_folder) == alone
    assert used == [*range(max(LONG + 1, used[0]), 2 * LONG, 2)]


@pytest.mark.parametrize(("cores", "processes"), [(2, 0), (16, 2), (192, 4)])
def test_processes_are_for_machines_with_cores(cores: int, processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert PromptWriters.of_this_machine("folder")._most == processes
