import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from areal_lora.config.models import NumericMatchReward
from areal_lora.errors import EnvironmentError_, RolloutError
from areal_lora.tasks.scorer import ScoreItem, ScorerPool
from areal_lora.types import Outcome

FAULTY = f"{Path(__file__).parent / 'faulty_reward.py'}:reward"


def item(completion: str, gold: str = "#### 7") -> ScoreItem:
    return ScoreItem(completion=completion, gold=gold)


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if "scorer_child" in " ".join(p.cmdline())]


def score(*batches: list[ScoreItem], function: str | None = None, timeout_s: float = 20.0, workers: int = 1):
    """Scores of each batch by one pool, which must leave no process behind."""

    async def run():
        async with ScorerPool(NumericMatchReward(timeout_s=timeout_s, workers=workers), function=function) as pool:
            return [await pool.score(batch) for batch in batches]

    scores = asyncio.run(run())
    assert children() == []
    return scores


def test_rewards_come_back_in_order():
    [scores, nothing] = score([item("#### 7"), item("#### 8"), item("7.0"), item("no number")], [])
    assert [s.reward for s in scores] == [1.0, 0.0, 1.0, 0.0]
    assert {s.outcome for s in scores} == {Outcome.OK}
    assert nothing == []


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("exit", "ended with status 3"), ("segfault", "ended with status -11"), ("exit_quietly", "ended with status 0"),
        ("nan", "nan"), ("inf", "inf"), ("none", "TypeError"), ("raise", "broken on purpose"),
        ("allocate", "MemoryError"),
    ],
)  # fmt: skip
def test_a_fault_is_an_error_without_a_reward_and_the_child_is_replaced(fault, words):
    batch = [item("pid"), item("7", "7"), item(fault), item("7", "7"), item("pid")]
    [scores, after] = score(batch, [item("pid")], function=FAULTY)
    assert [s.outcome for s in scores] == [Outcome.OK, Outcome.OK, Outcome.ERROR, Outcome.OK, Outcome.OK]
    assert math.isnan(scores[2].reward)
    assert words in scores[2].detail
    assert scores[1].reward == scores[3].reward == 1.0
    assert scores[0].reward != scores[4].reward == after[0].reward
    assert not psutil.pid_exists(int(scores[0].reward))


@pytest.mark.parametrize("fault", ["hang", "sleep"])
def test_a_hang_is_a_timeout_of_that_item_only(fault):
    began = time.monotonic()
    [scores] = score([item("7", "7"), item(fault), item("7", "7")], function=FAULTY, timeout_s=0.5)
    assert [s.outcome for s in scores] == [Outcome.OK, Outcome.TIMEOUT, Outcome.OK]
    assert math.isnan(scores[1].reward)
    assert "0.5 s" in scores[1].detail
    assert time.monotonic() - began < 15


def test_several_faults_in_a_row_and_at_both_ends():
    [scores] = score([item(x, "x") for x in ("raise", "exit", "x", "nan", "raise")], function=FAULTY)
    assert [s.outcome is Outcome.OK for s in scores] == [False, False, True, False, False]


def test_an_unreadable_gold_answer_is_an_error_not_a_wrong_answer():
    [scores] = score([item("7", "#### seven"), item("7")])
    assert [s.outcome for s in scores] == [Outcome.ERROR, Outcome.OK]
    assert "states no number" in scores[0].detail


def test_what_a_reward_prints_does_not_reach_the_protocol():
    [scores] = score([item("print", "print"), item("a", "b")], function=FAULTY)
    assert [s.reward for s in scores] == [1.0, 0.0]


def test_the_child_is_fenced():
    [scores] = score([item("core_limit"), item("memory_limit"), item("environment"), item("sockets")], function=FAULTY)
    assert [s.reward for s in scores] == [0.0, float(1 << 30), 0.0, 0.0]


def test_concurrent_calls_share_the_workers_and_keep_their_own_results():
    async def run():
        async with ScorerPool(NumericMatchReward(timeout_s=20, workers=2), function=FAULTY) as pool:
            calls = [pool.score([item(str(k), str(j)) for j in range(20)] + [item("pid")]) for k in range(10)]
            return await asyncio.gather(*calls)

    results = asyncio.run(run())
    assert [[s.reward for s in r[:-1]].index(1.0) for r in results] == list(range(10))
    assert len({r[-1].reward for r in results}) == 2


def test_a_cancelled_call_leaves_no_replies_for_the_next_one():
    async def run():
        async with ScorerPool(NumericMatchReward(timeout_s=20), function=FAULTY) as pool:
            call = asyncio.create_task(pool.score([item("1", "1")] * 3 + [item("sleep")]))
            await asyncio.sleep(0.7)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            return await pool.score([item("1", "2"), item("2", "2")])

    assert [s.reward for s in asyncio.run(run())] == [0.0, 1.0]
    assert children() == []


def test_close_ends_a_call_in_progress_and_refuses_later_ones():
    async def run():
        pool = ScorerPool(NumericMatchReward(timeout_s=60), function=FAULTY)
        call = asyncio.create_task(pool.score([item("sleep")]))
        await asyncio.sleep(0.5)
        await pool.close()
        with pytest.raises(RolloutError, match="closed"):
            await call
        with pytest.raises(RolloutError, match="closed"):
            await pool.score([item("1")])
        await pool.close()

    asyncio.run(run())
    assert children() == []


def test_a_child_that_was_killed_from_outside_is_replaced():
    async def run():
        async with ScorerPool(NumericMatchReward(timeout_s=20), function=FAULTY) as pool:
            [first] = await pool.score([item("pid")])
            os.kill(int(first.reward), signal.SIGKILL)
            return await pool.score([item("1", "1"), item("2", "2")])

    lost, second = asyncio.run(run())
    assert lost.outcome is Outcome.ERROR
    assert second.reward == 1.0


def test_a_reward_that_cannot_be_loaded_is_an_environment_error(tmp_path):
    with pytest.raises(EnvironmentError_, match="did not start"):
        score([item("1")], function=f"{tmp_path / 'missing.py'}:reward")
    assert children() == []


def test_children_end_when_their_parent_is_killed():
    code = (
        "import asyncio, os\n"
        "from areal_lora.config.models import NumericMatchReward\n"
        "from areal_lora.tasks.scorer import ScoreItem, ScorerPool\n"
        "async def run():\n"
        f"    pool = ScorerPool(NumericMatchReward(timeout_s=9), function={FAULTY!r})\n"
        "    [score] = await pool.score([ScoreItem(completion='pid', gold='')])\n"
        "    print(int(score.reward), flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(run())\n"
    )
    parent = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    pid, deadline = int(parent.stdout), time.monotonic() + 10
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)


def test_512_scores_are_quick():
    async def run():
        items = [item(f" 7+8=15 15-5=10 #### {k % 11}", " 5+2=7 7+3=10 #### 10") for k in range(512)]
        async with ScorerPool(NumericMatchReward()) as pool:
            await pool.score(items[:1])
            times = []
            for _ in range(5):
                began = time.monotonic()
                scores = await pool.score(items)
                times.append(time.monotonic() - began)
            return min(times), sum(s.reward for s in scores)

    best_s, total = asyncio.run(run())
    assert total == 46
    assert best_s < 0.15, f"{best_s:.3f} s"  # 0.02 s on an idle core; machines that run tests are busy
