import asyncio
import contextlib
import gc
import http.server
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from areal_lora.config.sections.task import BuiltInReward, FunctionReward
from areal_lora.errors import ConfigError, EnvironmentError_, RolloutError
from areal_lora.tasks import scorer
from areal_lora.tasks.reward_calls import Score, ScoreItem
from areal_lora.tasks.sandbox.scratch import PREFIX
from areal_lora.tasks.scorer import ScorerPool
from areal_lora.tasks.scorer_setup import MEMORY_BYTES
from areal_lora.types import Cause, Outcome, Sample
from tests.support.clocks import seen, wait_until
from tests.support.docs import section
from tests.support.paths import ROOT, SUPPORT

FAULTY = f"{SUPPORT / 'tasks' / 'faulty_reward.py'}:reward"


def item(completion: str, gold: str = "#### 7") -> ScoreItem:
    return ScoreItem(completion=completion, answer=gold)


def children() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):  # of the lane: other files' processes end meanwhile
        with contextlib.suppress(psutil.NoSuchProcess):
            if "scorer_child" in " ".join(process.cmdline()):
                found.append(process)
    return found


def faulty(**settings) -> FunctionReward:
    return FunctionReward(path=FAULTY, **{"timeout_s": 120.0, **settings})


def score(*batches: list[ScoreItem], reward=None, hidden: Path | None = None):
    """Scores of each batch by one pool, which must leave no process behind."""

    async def run():
        async with ScorerPool(reward or faulty(), hidden=hidden) as pool:
            return [await pool.score(batch) for batch in batches]

    scores = asyncio.run(run())
    assert children() == []
    return scores


def test_a_child_starts_without_numpy():
    code = "import sys, areal_lora.tasks.scorer_child; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-I", "-c", code], check=True)


def test_rewards_come_back_in_order():
    [scores, nothing] = score(
        [item("#### 7"), item("#### 8"), item("7.0"), item("no number")], [], reward=BuiltInReward()
    )
    assert [s.reward for s in scores] == [1.0, 0.0, 1.0, 0.0]
    assert {s.outcome for s in scores} == {Outcome.OK}
    assert nothing == []


FATAL = {
    "exit": "ended with status 3",
    "segfault": "ended with status -11",
    "exit_quietly": "ended with status 0",
    "native_segfault": "ended with status -11",
    "kill_self": "ended with status -9",
    "allocate": "MemoryError",
    "allocate_slowly": "MemoryError",
    "thread": "still running",
    "flood_pipes": "reply pipe",
    "forge": "reply pipe",
    "close": "ended with status 1",
    "close_and_sleep": "closed its pipes",
}
REFUSED = {
    "nan": "nan",
    "inf": "inf",
    "none": "TypeError",
    "raise": "broken on purpose",
    "undecodable": "caf?",
    "raise_nasty": "Nasty",
    "recurse": "RecursionError",
    "fork_bomb": "other processes",
    "subprocess": "other processes",
    "connect": "no network",
    "connect_natively": "no socket",
    "kill_parent": "not permitted",
    "kill_group": "not permitted",
    "limit_parent": "not permitted",
    "raise_limit": "not allowed",
    "read_parent": "ermission",
}
HANGS = ("hang", "sleep", "flood", "stubborn_fork_bomb")


@pytest.fixture(scope="module")
def fatal() -> dict[str, list[Score]]:
    """By fault, scores of a batch with it in the middle and of one after it; one pool for those that end."""
    batches = [[item("pid"), item("7", "7"), item(fault), item("7", "7"), item("pid")] for fault in FATAL]
    *ending, staying = [[batch, [item("pid")]] for batch in batches]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scorer, "END_DEADLINE_S", 120.0)
        found = score(*(each for both in ending for each in both))
    found += score(*staying)
    return {fault: one + after for fault, one, after in zip(FATAL, found[::2], found[1::2], strict=True)}


@pytest.mark.parametrize("fault", FATAL)
def test_a_fault_is_an_error_without_a_reward_and_the_child_is_replaced(fatal, fault):
    *scores, after = fatal[fault]
    assert [s.outcome for s in scores] == [Outcome.OK, Outcome.OK, Outcome.ERROR, Outcome.OK, Outcome.OK]
    assert math.isnan(scores[2].reward)
    assert FATAL[fault] in scores[2].detail
    assert scores[1].reward == scores[3].reward == 1.0
    assert scores[0].reward != scores[4].reward == after.reward
    assert not psutil.pid_exists(int(scores[0].reward))


@pytest.fixture(scope="module")
def refused() -> dict[str, list[Score]]:
    """By fault, scores of it and of the child's number before and after."""
    found = score(*([item("pid"), item(fault, "1"), item("pid")] for fault in REFUSED))
    return dict(zip(REFUSED, found, strict=True))


@pytest.mark.parametrize("fault", REFUSED)
def test_what_is_refused_is_an_error_of_that_answer_and_hurts_nothing(refused, fault):
    scores = refused[fault]
    assert [s.outcome for s in scores] == [Outcome.OK, Outcome.ERROR, Outcome.OK]
    assert REFUSED[fault] in scores[1].detail
    assert scores[0].reward == scores[2].reward


@pytest.fixture(scope="module")
def hung() -> dict[str, list[Score]]:
    def measure() -> list[list[Score]]:
        return score(*([item("7", "7"), item(fault), item("7", "7")] for fault in HANGS), reward=faulty(timeout_s=0.5))

    found = seen(measure, lambda found: all(s.outcome is Outcome.OK for one in found for s in one[::2]))
    return dict(zip(HANGS, found, strict=True))


@pytest.mark.parametrize("fault", HANGS)
def test_a_hang_is_a_timeout_of_that_item_only(hung, fault):
    scores = hung[fault]
    assert [s.outcome for s in scores] == [Outcome.OK, Outcome.TIMEOUT, Outcome.OK]
    assert math.isnan(scores[1].reward)
    assert "0.5 s" in scores[1].detail


@pytest.mark.parametrize("fault", ["hang_deaf", "hang_without_timers"])
def test_a_child_that_hangs_whatever_it_does_about_signals_and_timers_is_killed(fault):
    def measure() -> list[Score]:
        return score([item("7", "7"), item("pid"), item(fault), item("7", "7")], reward=faulty(timeout_s=0.5))[0]

    scores = seen(measure, lambda found: [s.outcome is Outcome.OK for s in found] == [True, True, False, True])
    assert [s.outcome for s in scores] == [Outcome.OK, Outcome.OK, Outcome.TIMEOUT, Outcome.OK]
    assert not psutil.pid_exists(int(scores[1].reward))


def stalled(during: Callable[[], None], *batches: list[ScoreItem]) -> list[list[Score]]:
    """Scores with a time-out of 1 s, while the event loop is blocked by ``during`` once all children have begun."""

    async def run():
        async with ScorerPool(faulty(timeout_s=1.0, workers=len(batches))) as pool:
            await asyncio.gather(*(pool.score([item("nap")]) for _ in batches))  # all children have started
            calls = [asyncio.create_task(pool.score(batch)) for batch in batches]
            await asyncio.sleep(0.1)
            during()
            return await asyncio.gather(*calls)

    scores = asyncio.run(run())
    assert children() == []
    return scores


def test_scoring_that_ends_in_time_survives_a_controller_that_stalls():
    """A user's workflow that blocks, garbage collection: the loop comes back when all time-outs seem to be over."""

    def measure() -> list[list[Score]]:
        return stalled(lambda: time.sleep(2.5), [item("nap", "nap")] * 4, [item("nap", "nap")] * 4)

    both = seen(measure, lambda found: all(s.outcome is Outcome.OK for scores in found for s in scores))
    assert [[s.outcome for s in scores] for scores in both] == [[Outcome.OK] * 4] * 2
    assert all(s.reward == 1.0 for scores in both for s in scores)


def test_a_hang_ends_in_time_although_the_controller_stalls_and_is_a_timeout_of_that_item_only():
    left = []

    def stall() -> None:
        left[:] = [len(children())]
        wait_until(lambda: not children(), what="the end of a child by its own timer")

    def measure() -> list[Score]:
        return stalled(stall, [item("7", "7"), item("nap", "nap"), item("hang"), item("7", "7")])[0]

    scores = seen(measure, lambda found: left == [1] and [found[k].outcome for k in (0, 1, 3)] == [Outcome.OK] * 3)
    assert left == [1]
    assert [s.outcome for s in scores] == [Outcome.OK, Outcome.OK, Outcome.TIMEOUT, Outcome.OK]
    assert "1 s" in scores[2].detail


def test_scoring_that_ends_in_time_survives_a_controller_that_is_stopped(tmp_path):
    code = (
        "import asyncio\n"
        "from pathlib import Path\n"
        "from areal_lora.config.sections.task import FunctionReward\n"
        "from areal_lora.tasks.reward_calls import ScoreItem\n"
        "from areal_lora.tasks.scorer import ScorerPool\n"
        "async def run():\n"
        f"    async with ScorerPool(FunctionReward(path={FAULTY!r}, timeout_s=1)) as pool:\n"
        "        nap = ScoreItem(completion='nap', answer='nap')\n"
        "        await pool.score([nap])\n"
        "        call = asyncio.create_task(pool.score([nap] * 4))\n"
        "        await asyncio.sleep(0.1)\n"
        f"        Path({str(tmp_path / 'begun')!r}).touch()\n"
        "        for score in await call:\n"
        "            print(score.outcome, score.reward)\n"
        "asyncio.run(run())\n"
    )

    def measure() -> list[str]:
        (tmp_path / "begun").unlink(missing_ok=True)
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as controller:
            try:
                wait_until((tmp_path / "begun").exists)
                controller.send_signal(signal.SIGSTOP)
                time.sleep(2.5)
                controller.send_signal(signal.SIGCONT)
                printed, _ = controller.communicate(timeout=120)
            finally:
                controller.kill()
        return printed.splitlines()

    assert seen(measure, lambda found: found == ["ok 1.0"] * 4) == ["ok 1.0"] * 4


def test_a_child_that_no_longer_reads_is_given_up():
    async def run():
        async with ScorerPool(faulty(timeout_s=1.0, workers=1)) as pool, asyncio.timeout(120):
            await pool.score([item("hang_later", "7")])
            await asyncio.sleep(0.3)
            return await pool.score([item("7" * (1 << 20)), item("7", "7")])  # more than the pipe takes

    hung, after = seen(lambda: asyncio.run(run()), lambda found: found[1].outcome is Outcome.OK)
    assert (hung.outcome, after.outcome) == (Outcome.TIMEOUT, Outcome.OK)


def test_several_faults_in_a_row_and_at_both_ends():
    [scores] = score([item(x, "x") for x in ("raise", "exit", "x", "nan", "raise")])
    assert [s.outcome is Outcome.OK for s in scores] == [False, False, True, False, False]


def test_an_unreadable_gold_answer_is_an_error_not_a_wrong_answer():
    [scores] = score([item("7", "#### seven"), item("7")], reward=BuiltInReward())
    assert [s.outcome for s in scores] == [Outcome.ERROR, Outcome.OK]
    assert "states no number" in scores[0].detail


def test_what_a_reward_prints_does_not_reach_the_protocol():
    [scores] = score([item("print", "print"), item("a", "b")])
    assert [s.reward for s in scores] == [1.0, 0.0]


def test_a_reward_that_is_a_thread_or_reads_stdin_is_harmless():
    [scores] = score([item("short_thread"), item("stdin"), item("7", "7"), item("share_memory")])
    assert [s.reward for s in scores] == [1.0, 0.0, 1.0, 0.0]


def test_the_child_is_fenced():
    items = [item("core_limit"), item("environment"), item("sockets"), item("memory_limit"), item("capabilities")]
    [scores] = score(items)
    assert [s.reward for s in scores[:3]] == [0.0, 0.0, 0.0]
    assert MEMORY_BYTES < scores[3].reward < MEMORY_BYTES + (1 << 30)
    assert scores[4].reward in (0.0, 4.0)  # as root: to read what others own


def test_the_run_folder_is_not_readable_and_no_file_is_writable(tmp_path):
    run, data = tmp_path / "runs" / "toy", tmp_path / "data.txt"
    run.mkdir(parents=True)
    (run / "secret").write_text("s")
    (run / "code").mkdir()
    (run / "code" / "reward.py").write_text("r")
    (run.parent / "other").write_text("o")
    data.write_text("d")
    readable = [data, run.parent / "other", run / "code" / "reward.py"]
    forbidden = [("read", run / "secret"), ("read", Path("/proc/self/cwd") / run / "secret"), ("write", data)]
    forbidden += [
        ("write", run / "code" / "new.py"),
        ("write", run / "new"),
        ("write", tmp_path / "new"),
        ("delete", data),
        ("chmod", data),
    ]
    items = [item("read", str(path)) for path in readable] + [item(act, str(path)) for act, path in forbidden]
    before = [(path.stat().st_mode, path.read_text()) for path in readable]
    [scores] = score(items, hidden=run)
    assert [s.outcome for s in scores] == [Outcome.OK] * 3 + [Outcome.ERROR] * 8
    assert all("PermissionError" in s.detail for s in scores[3:])
    assert [(path.stat().st_mode, path.read_text()) for path in readable] == before
    assert not (run / "new").exists()
    assert not (tmp_path / "new").exists()


def test_a_listening_server_is_never_reached(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "s"))
        unix.listen()
        tcp.settimeout(0.2)
        unix.settimeout(0.2)
        port = str(tcp.getsockname()[1])
        items = [
            item("connect", port),
            item("unix_socket", str(tmp_path / "s")),
            item("url", f"http://127.0.0.1:{port}"),
        ]
        [scores] = score(items)
        assert [s.outcome for s in scores] == [Outcome.ERROR] * 3
        for server in (tcp, unix):
            with pytest.raises(TimeoutError):
                server.accept()


DOORS = """
import os, tempfile, urllib.request

def reward(completion, answer):
    if completion == "fetch":
        return float(urllib.request.urlopen(answer, timeout=100).read())
    with tempfile.NamedTemporaryFile(delete=False) as file:
        file.write(b"x" * int(answer))
        file.flush()
        assert os.path.getsize(file.name) == int(answer)
    os.mkdir(file.name + ".d")
    return float(len(os.listdir(os.environ["TMPDIR"])))
"""


def test_a_private_temporary_folder_is_writable_bounded_and_removed(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(DOORS)
    places = tmp_path / "temporary"
    places.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(places))
    (places / f"{PREFIX}of-a-killed-owner").mkdir()
    mine = FunctionReward(path=f"{tmp_path / 'mine.py'}:reward", timeout_s=120)
    [fits, bigger] = score([item("", "1000"), item("", "1000")], [item("", str(17 << 20))], reward=mine)
    assert [s.reward for s in fits] == [2.0, 4.0]
    assert bigger[0].outcome is Outcome.ERROR
    assert list(places.iterdir()) == []


def test_a_reward_with_network_reaches_a_server_and_one_without_does_not(tmp_path):
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"0.75")

        def log_message(self, *_):
            pass

    (tmp_path / "mine.py").write_text(DOORS)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        ask = item("fetch", f"http://127.0.0.1:{server.server_port}")
        mine = FunctionReward(path=f"{tmp_path / 'mine.py'}:reward", timeout_s=120)
        [[closed]] = score([ask], reward=mine)
        [[opened]] = score([ask], reward=mine.model_copy(update={"network": True}))
        server.shutdown()
    assert closed.outcome is Outcome.ERROR
    assert "reward.network=true" in closed.detail
    assert opened.reward == 0.75


ENVIRONMENT = """
import os

def reward(completion, answer):
    same = os.environ.get("HOME") == os.environ["TMPDIR"] != answer
    return {name: float(name in os.environ) for name in completion.split()} | {"private": float(same)}
"""


def test_only_a_reward_with_network_gets_the_environment_and_never_that_of_the_run(tmp_path, monkeypatch):
    """A client in the function needs its key; a Python that needs `LD_LIBRARY_PATH` starts without network, too."""
    given = ["JUDGE_API_KEY", "HTTPS_PROXY", "LD_LIBRARY_PATH", "AREAL_LORA_REMOTE_TOKEN"]
    for name in given:
        monkeypatch.setenv(name, "/of/this/process")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.py").write_text(ENVIRONMENT)
    mine = FunctionReward(path=f"{tmp_path / 'mine.py'}:reward", timeout_s=120)
    names = item(" ".join(given), str(tmp_path))
    found = [
        score([names], reward=mine.model_copy(update={"network": network}))[0][0].components
        for network in (False, True)
    ]
    assert [list(each.values()) for each in found] == [[0.0, 0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0, 1.0]]


def test_python_itself_refuses_where_the_kernel_does_not():
    code = (
        "import os, socket, subprocess\n"
        "from areal_lora.tasks.sandbox.fence import forbid_in_python\n"
        "forbid_in_python()\n"
        "socket.socketpair()\n"
        "for act in (socket.socket, os.fork, lambda: subprocess.run(['true']), lambda: os.system('true')):\n"
        "    try:\n"
        "        act()\n"
        "    except PermissionError:\n"
        "        print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=True)
    assert done.stdout.split() == ["refused"] * 4


def test_a_machine_without_protections_is_warned_of_once(monkeypatch):
    warned = []
    monkeypatch.setattr(scorer.log, "warning", lambda text, *args: warned.append(text % args))
    scorer._warn_of.cache_clear()
    for _ in range(3):
        scorer._warn_of(("Landlock", "seccomp"))
        scorer._warn_of(())
    assert warned == ["scorer processes have fewer protections than they should, this machine lacks: Landlock; seccomp"]
    scorer._warn_of.cache_clear()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="becomes another user")
def test_the_fence_holds_for_an_ordinary_user(tmp_path):
    """The other tests run as root here; of a user's rights this one has all, and more to read (the interpreter)."""
    code = (
        "import asyncio, os\n"
        "from pathlib import Path\n"
        "from areal_lora.config.sections.task import FunctionReward\n"
        "from areal_lora.tasks.reward_calls import ScoreItem\n"
        "from areal_lora.tasks.scorer import ScorerPool\n"
        "assert os.getuid() == 65534\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "(folder / 'own').write_text('x')\n"
        "faults = ['connect', 'fork_bomb', 'kill_parent', 'write', 'read', 'read_parent', 'allocate', '1']\n"
        "async def run():\n"
        f"    reward = FunctionReward(path={FAULTY!r}, timeout_s=120)\n"
        "    async with ScorerPool(reward, hidden=folder) as pool:\n"
        "        for fault in faults:\n"
        "            gold = str(folder / 'own') if fault in ('read', 'write') else '1'\n"
        "            [score] = await pool.score([ScoreItem(completion=fault, answer=gold)])\n"
        "            print(score.outcome)\n"
        "asyncio.run(run())\n"
    )
    tmp_path.chmod(0o777)
    become = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    become += ["--inh-caps=-all,+dac_read_search", "--ambient-caps=+dac_read_search"]
    done = subprocess.run([*become, sys.executable, "-c", code], capture_output=True, text=True, timeout=150)
    assert done.stdout.split() == ["error"] * 7 + ["ok"], done.stderr
    assert (tmp_path / "own").read_text() == "x"
    assert "less fenced" not in done.stderr


def test_concurrent_calls_share_the_workers_and_keep_their_own_results():
    async def run():
        async with ScorerPool(faulty(workers=2)) as pool:
            calls = [pool.score([item(str(k), str(j)) for j in range(20)] + [item("pid")]) for k in range(10)]
            return await asyncio.gather(*calls)

    results = asyncio.run(run())
    assert [[s.reward for s in r[:-1]].index(1.0) for r in results] == list(range(10))
    assert len({r[-1].reward for r in results}) == 2


def test_a_cancelled_call_leaves_no_replies_for_the_next_one():
    async def run():
        async with ScorerPool(faulty()) as pool:
            call = asyncio.create_task(pool.score([item("1", "1")] * 3 + [item("sleep")]))
            await asyncio.sleep(0.7)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            return await pool.score([item("1", "2"), item("2", "2")])

    assert [s.reward for s in asyncio.run(run())] == [0.0, 1.0]
    assert children() == []


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.5])
def test_close_ends_a_call_in_progress_and_refuses_later_ones(after_s):
    """Also while the call starts its child."""

    async def run():
        pool = ScorerPool(faulty(timeout_s=60))
        call = asyncio.create_task(pool.score([item("sleep")]))
        await asyncio.sleep(after_s)
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
        async with ScorerPool(faulty()) as pool:
            [first] = await pool.score([item("pid")])
            os.kill(int(first.reward), signal.SIGKILL)
            return await pool.score([item("1", "1"), item("2", "2")])

    lost, second = asyncio.run(run())
    assert lost.outcome is Outcome.ERROR
    assert second.reward == 1.0


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, "No such file"),
        ("import nothing_like_it", "ModuleNotFoundError"),
        ("reward = 3", "of type int"),
        ("def reward(): ...", "takes no arguments"),
        ("def reward(c, a, b, /): ...", "more than two parameters without a name"),
        ("1/0", "ZeroDivisionError"),
        ("def other(c, a): ...", "has no 'reward'"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_found_at_the_start(tmp_path, source, words):
    path = tmp_path / "mine.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(ConfigError, match=re.escape(words)):
        score([], reward=FunctionReward(path=f"{path}:reward"))
    assert children() == []


RULES = """
RETURNED = {
    "right": True, "wrong": False, "number": 0.5, "whole": 2, "dict": {"reward": -0.25, "correct": True},
    "unsure": {"reward": 0.75}, "none": {"reward": 0.1, "correct": None}, "bool": {"reward": True},
    "zero": {"reward": 0.9, "correct": 0}, "empty": {}, "typo": {"reward": 1.0, "corect": True},
    "maybe": {"reward": 1.0, "correct": 0.5}, "list": [1.0], "text": {"reward": "1.0", "correct": True},
    "nothing": None, "words": "1.0", "part": {"a": None},
    "nan": {"reward": float("nan"), "correct": True},
}

def reward(completion, answer):
    return RETURNED[completion]
"""


def test_a_reward_may_say_what_is_correct(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(RULES)
    good = ["right", "wrong", "number", "whole", "dict", "unsure", "none", "bool", "zero"]
    bad = {
        "empty": "this one has neither",
        "typo": "'corect'",
        "maybe": "neither true nor false",
        "list": "the reward returned a list, not a number",
        "text": "the reward returned a str, not a number",
        "nothing": "the reward returned None, not a number",
        "words": "the reward returned a str, not a number",
        "part": "component 'a' is None, not a number",
        "nan": "not a finite number",
    }
    reward = FunctionReward(path=f"{path}:reward")
    [scores] = score([item(x) for x in (*good, *bad)], reward=reward)
    assert [s.reward for s in scores[:9]] == [1.0, 0.0, 0.5, 2.0, -0.25, 0.75, 0.1, 1.0, 0.9]
    assert [s.correct for s in scores[:9]] == [True, False, None, None, True, None, None, True, False]
    for scored, words in zip(scores[9:], bad.values(), strict=True):
        assert (scored.outcome, scored.correct) == (Outcome.ERROR, None)
        assert words in scored.detail
        assert scored.detail.endswith(f"({path}:11)"), "where the function is defined"
        assert scored.cause is Cause.CODE


CALLS = """
import asyncio

begun = 0

async def judge(completion, answer, level):
    global begun
    begun += 1
    while begun < 30 or completion == "hang":
        await asyncio.sleep(0.01)
    if completion == "raise":
        raise RuntimeError("the judge is away")
    return {"reward": level, "correct": completion == answer}

def batch(completions, answers, level, **rest):
    assert {"prompts", "messages", "n_tokens", "finish_reasons", "columns"} <= rest.keys()
    assert all(m[-1] == {"role": "assistant", "content": c} for m, c in zip(rest["messages"], completions))
    if "raise" in completions:
        raise RuntimeError("no batch")
    return [len(completions) * l for l in level]

def parts(completion, answer, *, n_tokens, finish_reason, level):
    return {"right": float(completion == answer), "short": -0.1 * n_tokens, "level": level, "correct": level > 1}

def missing(completion, colour):
    return 1.0

def anything(text, gold, **columns):
    return float(text == gold) + columns["level"]

def by_place(text, columns):
    return float(text == "8") + columns["level"]

def of_prompt(prompt, response, answer):
    return float(answer in response)

def of_column(level, response, truth=None):
    return float(truth is None)

def of_messages(messages, target):
    return 10 * float(messages[-1]["content"] == "8") + float(target)

def of_tokens(n_tokens, target=None):
    return 10 * float(n_tokens > 0) + float(target)

def of_answer(answer, response=None):
    return float(response is None) + 2 * float(answer == "7")
"""


def rows(*completions: str) -> list[ScoreItem]:
    return [
        ScoreItem.of(
            Sample(uid=c, prompt="Q", answer="7", columns={"level": 2, "answer": "7"}),
            c,
            n_tokens=3,
            finish_reason="stop",
        )
        for c in completions
    ]


def call(tmp_path: Path, name: str, *batches: list[ScoreItem], **settings) -> list[list[Score]]:
    path = tmp_path / "calls.py"
    path.write_text(CALLS)
    return score(*batches, reward=FunctionReward(path=f"{path}:{name}", **{"timeout_s": 120.0, **settings}))


def test_a_reward_takes_columns_and_figures_by_name_and_names_its_parts(tmp_path):
    [[right, wrong]] = call(tmp_path, "parts", rows("7", "8"))
    assert right.components == {"right": 1.0, "short": pytest.approx(-0.3), "level": 2.0}
    assert (right.reward, right.correct) == (pytest.approx(2.7), True)
    assert wrong.reward == pytest.approx(1.7)
    [[absent]] = call(tmp_path, "missing", rows("7"))
    assert absent.outcome is Outcome.ERROR
    assert "requires 'colour', the data set's columns are: level, answer" in absent.detail
    [[named]] = call(tmp_path, "anything", rows("7"))
    assert named.reward == 3.0


def test_a_parameter_behind_the_problem_a_column_or_the_gold_answer_is_never_the_gold_answer(tmp_path):
    for name in ("of_prompt", "of_column"):
        [[refused]] = call(tmp_path, name, rows("8"))
        assert refused.outcome is Outcome.ERROR, name
        assert "requires '" in refused.detail
    assert [call(tmp_path, name, rows("8"))[0][0].reward for name in ("of_answer", "by_place")] == [3.0, 3.0]
    assert [call(tmp_path, name, rows("8"))[0][0].reward for name in ("of_messages", "of_tokens")] == [17.0, 17.0]


def test_an_async_reward_scores_a_batch_concurrently_and_each_answer_has_its_time(tmp_path):
    """An answer of the first batch is ready when all 30 have begun."""
    [first] = call(tmp_path, "judge", rows(*"7" * 30))
    assert [s.reward for s in first] == [2.0] * 30

    def measure() -> list[list[Score]]:
        return call(tmp_path, "judge", rows(*"7" * 30), rows("7", "hang", "raise", "8"), timeout_s=1.0)

    _, second = seen(measure, lambda found: found[1][0].outcome is found[1][3].outcome is Outcome.OK)
    assert [s.outcome for s in second] == [Outcome.OK, Outcome.TIMEOUT, Outcome.ERROR, Outcome.OK]
    assert "the judge is away" in second[2].detail
    assert (second[0].correct, second[3].correct) == (True, False)


def test_a_reward_of_a_batch_gets_lists_as_trl_gives_them(tmp_path):
    first, second, third = call(tmp_path, "batch", rows("7", "8", "9"), rows("7", "raise"), rows("7"))
    assert [s.reward for s in first] == [6.0, 6.0, 6.0]
    assert [s.outcome for s in second] == [Outcome.ERROR] * 2
    assert [s.reward for s in third] == [2.0]


@pytest.mark.parametrize(("example", "ruled"), [(0, False), (1, True)])
def test_the_shaped_rewards_of_the_docs_give_all_right_answers_an_accuracy_of_one(tmp_path, example, ruled):
    page = section(ROOT / "docs" / "en" / "tasks.md", "Rewards")
    path = tmp_path / "rewards.py"
    path.write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[example])
    reward = FunctionReward(path=f"{path}:reward")
    right, wrong = [item(f"it is {k}", f"{k}") for k in range(64)], [item("I do not know", "7")] * 64
    [of_right, of_all] = score(right, right + wrong, reward=reward)
    assert all(0.9 < s.reward < 1.0 for s in of_right)
    correct = [s.correct if ruled else s.reward >= 0.5 for s in of_right + of_all]
    assert correct == [True] * 128 + [False] * 64


@pytest.mark.parametrize("reward", [BuiltInReward(), BuiltInReward(kind="math_verify")])
def test_the_built_in_rewards_say_what_is_correct(reward):
    [scores] = score([item("#### 7"), item("#### 8")], reward=reward)
    assert [(s.reward, s.correct) for s in scores] == [(1.0, True), (0.0, False)]


def test_a_child_that_ends_while_it_loads_is_an_environment_error(tmp_path):
    (tmp_path / "mine.py").write_text("import os; os._exit(5)")
    with pytest.raises(EnvironmentError_, match="ended with status 5 while it loaded"):
        score([], reward=FunctionReward(path=f"{tmp_path / 'mine.py'}:reward"))
    assert children() == []


def test_a_function_of_a_module_is_found_where_this_process_finds_it(tmp_path, monkeypatch):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "mine.py").write_text("from pack.other import two\ndef reward(c, a): return two")
    (tmp_path / "pack" / "other.py").write_text("two = 2")
    monkeypatch.syspath_prepend(str(tmp_path))
    [[scored]] = score([item("x")], reward=FunctionReward(path="pack.mine:reward"))
    assert scored.reward == 2.0


def test_many_faults_leak_no_process_and_no_descriptor():
    hard = ["exit", "allocate", "close", "thread"] * 2
    easy = ["raise", "nan", "connect", "fork_bomb", "kill_parent"] * 40

    async def held():
        """Descriptors and children: the end of a killed child's pipes is read a moment after its own."""
        found, again = None, (len(os.listdir("/proc/self/fd")), len(children()))
        while found != again:
            await asyncio.sleep(0.5)
            found, again = again, (len(os.listdir("/proc/self/fd")), len(children()))
        return found

    async def run():
        async with ScorerPool(faulty(workers=2)) as pool:
            await asyncio.gather(*(pool.score([item("exit"), item("1", "1")]) for _ in range(2)))
            gc.collect()  # what earlier tests left may close its descriptors
            before = await held()
            calls = [
                pool.score([item(x, "1") for x in half] + [item("1", "1")]) for half in (hard + easy[::2], easy[1::2])
            ]
            calls = await asyncio.gather(*calls)
            await asyncio.gather(*(pool.score([item("1", "1")]) for _ in range(2)))
            after = await held()
        return calls, before, after

    calls, before, after = asyncio.run(run())
    assert [len(scores) for scores in calls] == [109, 101]
    assert all(s.outcome is Outcome.ERROR for scores in calls for s in scores[:-1])
    assert all(scores[-1].reward == 1.0 for scores in calls)
    assert after == before
    assert children() == []


def test_children_end_when_their_parent_is_killed_while_they_score():
    code = (
        "import asyncio, os\n"
        "from areal_lora.config.sections.task import FunctionReward\n"
        "from areal_lora.tasks.reward_calls import ScoreItem\n"
        "from areal_lora.tasks.scorer import ScorerPool\n"
        "async def run():\n"
        f"    pool = ScorerPool(FunctionReward(path={FAULTY!r}, timeout_s=600))\n"
        "    [score] = await pool.score([ScoreItem(completion='pid', answer='')])\n"
        "    print(int(score.reward), flush=True)\n"
        "    asyncio.create_task(pool.score([ScoreItem(completion='sleep', answer='')]))\n"
        "    await asyncio.sleep(0.3)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(run())\n"
    )
    parent = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150)
    wait_until(lambda: not psutil.pid_exists(int(parent.stdout)))


def test_512_scores_are_quick():
    """In CPU seconds of this process and the child: machines that run tests are busy."""

    def used_s() -> float:
        times = [process.cpu_times() for process in (psutil.Process(), *children())]
        return sum(each.user + each.system for each in times)

    async def run():
        items = [item(f" 7+8=15 15-5=10 #### {k % 11}", " 5+2=7 7+3=10 #### 10") for k in range(512)]
        async with ScorerPool(BuiltInReward()) as pool:
            await pool.score(items[:1])
            times = []
            for _ in range(5):
                before = used_s()
                scores = await pool.score(items)
                times.append(used_s() - before)
            return min(times), sum(s.reward for s in scores)

    best_s, total = asyncio.run(run())
    assert total == 46
    assert best_s < 0.15, f"{best_s:.3f} s"  # 0.02 s on a core


@pytest.mark.parametrize("lasts", [2, 9])
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_a_start_that_fails_is_tried_again(first: bool, lasts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorer, "START_PAUSES_S", (0.0, 0.0, 0.0))
    spawn, failures = scorer._Child.spawn, iter([BlockingIOError(11, "no more processes"), OSError(12, "memory")] * 5)
    left = lasts

    async def refused(*arguments):
        nonlocal left
        left -= 1
        if left >= 0:
            raise next(failures)
        return await spawn(*arguments)

    async def run() -> list[Score]:
        if first:
            monkeypatch.setattr(scorer._Child, "spawn", refused)
        async with ScorerPool(faulty()) as pool:
            if not first:
                await pool._discard(await pool._idle.get())
                pool._idle.put_nowait(None)
                monkeypatch.setattr(scorer._Child, "spawn", refused)
            return await pool.score([ScoreItem(completion="7", columns={})])

    if lasts == 2:
        assert len(asyncio.run(run())) == 1
    else:
        with pytest.raises(EnvironmentError_, match="no process can be started"):
            asyncio.run(run())


def test_a_first_start_that_no_time_helps_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def absent(*_: object) -> None:
        raise FileNotFoundError(2, "no such program")

    monkeypatch.setattr(scorer._Child, "spawn", absent)
    monkeypatch.setattr(scorer, "START_PAUSES_S", (600.0,))

    async def run() -> None:
        async with asyncio.timeout(60), ScorerPool(faulty()):
            pass

    with pytest.raises(FileNotFoundError):
        asyncio.run(run())


def test_a_reward_file_that_is_edited_during_a_run_is_reported_once(tmp_path, monkeypatch):
    """Children that start later load it: answers of one group may have the rewards of two functions."""
    warned, file = [], tmp_path / "mine.py"
    monkeypatch.setattr(scorer.log, "warning", lambda text, *args: warned.append(text % args))
    text = "import os\ndef reward(completion, answer):\n    return os._exit(3) if completion == 'exit' else {}\n"
    file.write_text(text.format(1))

    async def run():
        async with ScorerPool(FunctionReward(path=f"{file}:reward", timeout_s=120)) as pool:
            found = [(await pool.score([item("exit"), item("a")]))[1].reward]
            told = [len(warned)]
            file.write_text(text.format(0))
            for _ in range(2):
                found.append((await pool.score([item("a"), item("exit"), item("a")]))[2].reward)
                told.append(len(warned))
            return found, told

    assert asyncio.run(run()) == ([1.0, 0.0, 0.0], [0, 1, 1])
    assert warned[0].startswith(f"{file} has changed: processes that start from now on load it")
