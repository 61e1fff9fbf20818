"""What agents said stays in the run folder, within its bound."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from areal_lora.errors import RecordError
from areal_lora.rollout.agents import AgentTask
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.conversations import ConversationFile, ConversationRecord, read_conversations
from areal_lora.run_folder.paths import RunFolder
from tests.support.rollout.agent_endpoint import MESSAGES, asked, episode, saying


def said(uid: str, text: str = "") -> ConversationRecord:
    return ConversationRecord(
        time=0.0, adapter="math", uid=uid, sample=0, evaluation=False, reward=1.0, detail=text, requests=[], tokens=[]
    )


def test_the_newest_ones_are_kept_within_the_bound(tmp_path: Path) -> None:
    folder, bound = RunFolder(tmp_path), 4000
    kept = ConversationFile(folder, bound)
    for i in range(200):
        kept.write(said(str(i)))
        size = sum(p.stat().st_size for p in tmp_path.iterdir())
        assert size <= bound
    found = [int(c.uid) for c in read_conversations(folder)]
    assert found == list(range(found[0], 200))
    assert len(found) > 10
    kept.write(said("too long", "x" * bound))
    assert [int(c.uid) for c in read_conversations(folder)] == found


def test_writers_in_several_threads_keep_the_bound_too(tmp_path: Path) -> None:
    folder, bound = RunFolder(tmp_path), 1000

    def write(writer: int) -> None:
        for i in range(500):
            ConversationFile(folder, bound).write(said(f"{writer}:{i}"))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= bound
    assert list(read_conversations(folder))


def test_the_loop_runs_on_while_a_conversation_is_written(tmp_path: Path) -> None:
    answered = threading.Event()

    class SlowDisk(ConversationFile):
        def write(self, conversation: ConversationRecord) -> None:
            loops[0].call_soon_threadsafe(answered.set)
            assert answered.wait(60.0)

    loops = list[asyncio.AbstractEventLoop]()

    async def agent(task: AgentTask) -> float:
        loops.append(asyncio.get_running_loop())
        await asked(task, messages=MESSAGES)
        return 1.0

    episode(agent, saying(["hey"]), kept=SlowDisk(RunFolder(tmp_path)))
    assert answered.is_set()


def test_a_conversation_that_was_cut_off_by_a_crash_is_not_glued_to_the_next(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    ConversationFile(folder).write(said("1"))
    with folder.conversations.open("ab") as file:
        file.write(folder.conversations.read_bytes()[:20])
    ConversationFile(folder).write(said("2"))
    assert [c.uid for c in read_conversations(folder)] == ["1", "2"]


def test_nothing_is_written_with_a_bound_of_zero(tmp_path: Path) -> None:
    ConversationFile(RunFolder(tmp_path), 0).write(said("a"))
    assert list(tmp_path.iterdir()) == []


def test_a_line_in_progress_is_left_out_and_a_broken_one_is_an_error(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    ConversationFile(folder, 1000).write(said("a"))
    with folder.conversations.open("ab") as file:
        file.write(b'{"time"')
    assert [c.uid for c in read_conversations(folder)] == ["a"]
    folder.conversations.write_text("{}\n")
    with pytest.raises(RecordError, match="line 1: Object missing required field"):
        list(read_conversations(folder))


def test_a_run_of_an_agent_that_fails_is_kept_with_its_reason(tmp_path: Path) -> None:
    async def agent(task: AgentTask) -> float:
        await asked(task, messages=MESSAGES, n=2)
        await asked(task, "/completions", prompt="ab")
        raise GenerationFault(FaultKind.AGENT, "ValueError: no idea")

    kept = ConversationFile(RunFolder(tmp_path), 1 << 20)
    with pytest.raises(GenerationFault):
        episode(agent, saying(["hey", "you", "so"]), kept=kept)
    (found,) = read_conversations(kept.folder)
    assert (found.reward, found.uid) == (None, "0:s")
    assert "ValueError: no idea" in found.detail
    chat, text = found.requests
    assert [(a.turn.content, a.conversation) for a in chat.answers] == [("hey", 0), ("you", 1)]
    assert (text.prompt, text.answers[0].conversation) == ("ab", 2)
    for answer in (*chat.answers, *text.answers):
        tokens = found.tokens[answer.conversation]
        assert bytes(tokens.token_ids[answer.begin : answer.end - 1]).decode() == answer.turn.content
        assert set(tokens.versions[answer.begin : answer.end]) == {1}
        assert set(tokens.versions[: answer.begin]) == {-1}
