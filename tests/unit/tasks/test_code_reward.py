"""Programs of answers, right and hostile, in their fences: inside bubblewrap where it works, and without it."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import msgspec
import psutil
import pytest
from hypothesis import given, settings, strategies as st

from areal_lora.config.sections.task import CodeReward
from areal_lora.tasks import scorer_setup
from areal_lora.tasks.code_reward import CodeSettings, CodeTest, extract_program, row_tests
from areal_lora.tasks.reward_calls import Score, ScoreItem
from areal_lora.tasks.scorer import ScorerPool
from areal_lora.types import Outcome
from tests.support.clocks import seen

WORKERS = 5  # the programs that last are each of another one
ADD = "print(sum(map(int, input().split())))"
PAIRS = {"inputs": ["1 2", "3 4"], "outputs": ["3", "7\n"]}


def code(**keys) -> CodeReward:
    return CodeReward(**{"inputs": "inputs", "outputs": "outputs", "timeout_s": 60, **keys})


def answer(program: str, **columns) -> ScoreItem:
    return ScoreItem(completion=f"Here:\n```python\n{program}\n```\nDone.", columns=columns or PAIRS)


def score(reward: CodeReward, *items: ScoreItem, hidden: Path | None = None) -> list[Score]:
    [scores] = score_all(reward, items, hidden=hidden)
    return scores


def score_all(reward: CodeReward, *batches: Sequence[ScoreItem], hidden: Path | None = None) -> list[list[Score]]:
    """Scores of batches, of as many at a time as the reward has workers."""

    async def run() -> list[list[Score]]:
        async with ScorerPool(reward, hidden=hidden) as pool:
            return await asyncio.gather(*map(pool.score, batches))

    before = set(psutil.Process().children(recursive=True))  # servers of other tests
    found = asyncio.run(run())
    more = set(psutil.Process().children(recursive=True)) - before
    assert [p for p in more if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
    return found


def test_a_right_and_a_wrong_program(fence):
    wrong = "a, b = map(int, input().split())\nprint(a + b if a < 2 else 0)"
    right, half, none = score(code(), answer(ADD), answer(wrong), ScoreItem(completion="7", columns=PAIRS))
    assert (right.reward, right.correct, dict(right.components)) == (1.0, True, {"passed": 1.0})
    assert (half.reward, half.correct, dict(half.components)) == (0.0, False, {"passed": 0.5, "wrong": 0.5})
    assert (none.reward, dict(none.components)) == (0.0, {"passed": 0.0, "no_code": 1.0})
    [partly] = score(code(credit="partial"), answer(wrong))
    assert (partly.reward, partly.correct) == (0.5, False)


def test_asserts_continue_the_program_and_cannot_be_left_out(fence):
    reward = CodeReward(asserts="checks", credit="partial")
    checks = ["assert f(2) == 4", "assert f(-1) == 1\nassert f(0) == 0"]
    programs = ["def f(x): return x * x", "def f(x): return 2 * x", "import os\nos._exit(0)", "raise SystemExit", "f("]
    scores = score(reward, *(answer(program, checks=checks) for program in programs))
    assert [s.reward for s in scores] == [1.0, 0.5, 0.0, 0.0, 0.0]
    assert [set(s.components) - {"passed"} for s in scores[1:]] == [{"wrong"}, {"wrong"}, {"wrong"}, {"crashed"}]


@pytest.mark.parametrize(
    ("program", "row"),
    [
        (
            "class Solution:\n    def f(self, x: List[int]) -> int:\n"
            "        return pow(sum(deque(x)), 2, 5) + heapq.nsmallest(1, x)[0]",
            {"checks": ["assert Solution().f([2, 1]) == 5"]},
        ),
        ("from __future__ import annotations\ndef f(x: List[int]): return x[0]", {"checks": ["assert f([2, 1]) == 2"]}),
        (
            "import threading\nthreading.stack_size(1 << 29)\n"
            "t = threading.Thread(target=lambda: print(int(input()) + 1))\nt.start(); t.join()",
            {"inputs": ["1"], "outputs": ["2"]},
        ),
        (
            "n = int(input())\ntable = [[1000 * j for j in range(2600)] for i in range(2600)]\nprint(table[0][n])",
            {"inputs": ["1"], "outputs": ["1000"]},
        ),
        ("print('1\\n' * 200_000)", {"inputs": [""], "outputs": ["\n".join(["1"] * 200_000)]}),
        (ADD, {"inputs": '["1 2", "3 4"]', "outputs": '["3", "7"]'}),
    ],
    ids=("no_imports", "future", "large_stack", "large_table", "long_output", "lists_as_text"),
)
def test_right_programs_of_public_sets_pass(program, row):
    [scored] = score(CodeReward(inputs="inputs", outputs="outputs", asserts="checks"), answer(program, **row))
    assert (scored.reward, dict(scored.components)) == (1.0, {"passed": 1.0})


def test_more_output_than_twice_what_is_expected_is_too_much():
    row = {"inputs": [""] * 2, "outputs": ["1" * 400_000, "1"]}
    [scored] = score(code(credit="partial"), answer("print('1' * 790_000)", **row))
    assert dict(scored.components) == {"passed": 0.0, "wrong": 0.5, "output": 0.5}


FILES = "import os, time\nfor i in range({n}): open(str(i), 'wb').write(b'x' * {size})\n"
HOSTILE = {
    # At most 300 processes, should the fence not hold.
    "fork_bomb": ("import os, time\nfor _ in range(300):\n if not os.fork(): time.sleep(5); os._exit(0)", "crashed"),
    "thread_bomb": (
        "import threading, time\nfor _ in range(9999): threading.Thread(target=time.sleep, args=(9,)).start()",
        "crashed memory time",
    ),
    "subprocess": ("import subprocess\nsubprocess.run(['/bin/true'], check=True)", "crashed"),
    "write_outside": ("open(OUTSIDE, 'w').write('x')", "crashed"),
    "delete_outside": ("import os\nos.remove(PRECIOUS)", "crashed"),
    "endless_output": ("while True: print('x' * 1000)", "output"),
    "endless_file": ("f = open('f', 'wb')\nwhile True: f.write(b'x' * 65536)", "output"),
    "many_bytes": (FILES.format(n=100, size=250_000) + "time.sleep(600)", "output"),
    "many_bytes_and_an_end": (FILES.format(n=100, size=250_000), "output"),
    "many_bytes_where_paths_end": (
        "import os\nfor _ in range(17): os.mkdir('a' * 255); os.chdir('a' * 255)\n"
        + FILES.format(n=100, size=250_000)
        + "time.sleep(600)",
        "output",
    ),
    "many_empty_files": (FILES.format(n=1500, size=0) + "time.sleep(600)", "output"),
    "deep_folders": ("import os\nfor _ in range(3000): os.mkdir('a'); os.chdir('a')", "output"),
    "files_without_names": (
        "import os, time\nk = []\nfor i in range(90): k.append(open('f', 'wb')); os.unlink('f')",
        "crashed",
    ),
    "read_the_secret": ("print(open(SECRET).read())", "crashed"),
    "read_the_secret_by_exec": ("import os\nos.execv('/bin/cat', ['cat', SECRET])", "crashed"),
    "kill_the_parent": ("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)", "crashed"),
    "kill_the_controller": ("import os, signal\nos.kill(CONTROLLER, signal.SIGKILL)", "crashed"),
    "kill_all": ("import os, signal\nos.kill(-1, signal.SIGKILL)", "crashed"),
    "read_the_parent": ("import os\nopen(f'/proc/{os.getppid()}/mem', 'rb').read(1)", "crashed"),
    "sleep": ("import time\ntime.sleep(600)", "time"),
    "spin": ("while True: pass", "time"),
    "deaf": ("import signal\nfor s in (2, 15, 24): signal.signal(s, signal.SIG_IGN)\nwhile True: pass", "time"),
    "memory": ("x = []\nwhile True: x.append(bytes(1 << 20))", "memory"),
    "connect": ("import socket\nsocket.create_connection(('127.0.0.1', 9))", "crashed"),
    "raise_limits": ("import resource\nresource.setrlimit(resource.RLIMIT_CPU, (99, 99))", "crashed"),
}


def test_hostile_programs_end_with_a_verdict_and_harm_nothing(fence, tmp_path, monkeypatch):
    monkeypatch.setattr(scorer_setup, "TEST_S", 1.6)
    run, precious = tmp_path / "run", tmp_path / "precious"
    run.mkdir()
    (run / "secret").write_text("the secret")
    precious.write_text("p")
    before = set(tmp_path.iterdir())
    names = {"OUTSIDE": tmp_path / "new", "PRECIOUS": precious, "SECRET": run / "secret"}
    head = "".join(f"{name} = {str(path)!r}\n" for name, path in names.items()) + f"CONTROLLER = {os.getpid()}\n"
    row = {"inputs": [""], "outputs": ["the secret"]}
    items = [answer(head + program, **row) for program, _ in HOSTILE.values()]
    parts = [[*items[k::WORKERS], answer(ADD)] for k in range(WORKERS)]  # most of what they take is waited for
    reward, scores = code(timeout_s=60, workers=WORKERS), dict[str, Score]()
    for k, (*of_part, after) in enumerate(score_all(reward, *parts, hidden=run)):
        scores |= zip(list(HOSTILE)[k::WORKERS], of_part, strict=True)
        assert after.reward == 1.0, "the scorer process works on"
    found = {name: "".join(set(scores[name].components) - {"passed"}) for name in HOSTILE}
    assert {n: v for n, v in found.items() if v not in HOSTILE[n][1].split()} == {}
    assert {s.outcome for s in scores.values()} == {Outcome.OK}
    assert {s.reward for s in scores.values()} == {0.0}
    assert set(tmp_path.iterdir()) == before
    assert precious.read_text() == "p"


def test_tests_of_one_tenant_read_no_file_of_another(fence, tmp_path):
    """Bit by bit through rewards. A test is a program too, from the tenant's own rows."""
    secret = tmp_path / "bolt" / "secret.txt"
    secret.parent.mkdir(mode=0o700)
    secret.write_text("key")
    secret.chmod(0o600)
    bits = [f"assert (open({str(secret)!r}, 'rb').read()[{i // 8}] >> {i % 8}) & 1" for i in range(8)]
    others = [f"open({name!r}).read(1)" for name in (__file__, "/etc/passwd", "/proc/1/status", "/proc/self/environ")]
    others += [f"__import__('os').listdir({str(tmp_path)!r})"]
    reward = CodeReward(asserts="checks", credit="partial", timeout_s=120)
    for run in (None, tmp_path / "run"):  # the run folder hides nothing of others
        [found] = score(reward, answer("pass", checks=bits + others), hidden=run)
        assert dict(found.components) == {"passed": 0.0, "crashed": 1.0}


def test_a_program_has_the_standard_library_and_its_input_by_name(fence):
    """Modules with shared libraries of their own among them."""
    program = (
        "import ctypes, decimal, hashlib, json, os, random, sqlite3, ssl, unicodedata, zlib, zoneinfo\n"
        "zoneinfo.ZoneInfo('UTC'), os.urandom(1), sqlite3.connect(':memory:'), ctypes.CDLL(None)\n"
        "print(sum(map(int, open('/dev/stdin').read().split())))"
    )
    assert score(code(), answer(program))[0].reward == 1.0


def test_an_interpreter_that_cannot_start_is_no_wrong_answer(tmp_path):
    program = (
        "import pathlib, sys, msgspec\n"
        "from areal_lora.tasks import code_reward\n"
        "sys.executable = '/bin/false'\n"
        "settings = msgspec.json.decode(sys.argv[1], type=code_reward.CodeSettings)\n"
        "code_reward.CodeRunner(settings, pathlib.Path(sys.argv[2]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, code().model_dump_json(), str(tmp_path)], capture_output=True, text=True
    )
    assert "EnvironmentError_: reward code: an empty program ends with" in done.stderr


def test_processes_are_counted_once_per_answer(tmp_path):
    """In the process of the reward and in those of programs: a hook outlives a fork."""
    program = (
        "import os, pathlib, sys, msgspec\n"
        "from areal_lora.tasks import code_reward\n"
        "file = os.open(sys.argv[3], os.O_WRONLY | os.O_CREAT | os.O_APPEND)\n"
        "listed = lambda event, given: event in ('os.listdir', 'os.scandir') and str(given[0]) == '/proc'\n"
        "sys.addaudithook(lambda event, given: listed(event, given) and os.write(file, b'.'))\n"
        "settings = msgspec.json.decode(sys.argv[1], type=code_reward.CodeSettings)\n"
        "runner = code_reward.CodeRunner(settings, pathlib.Path(sys.argv[2]))\n"
        "row = {'inputs': ['1', '2', '3'], 'outputs': ['1', '2', '3']}\n"
        "print([runner('```python\\nprint(input())\\n```', row)['reward'] for _ in range(2)])\n"
    )
    argv = [sys.executable, "-c", program, code().model_dump_json(), str(tmp_path), str(tmp_path / "listed")]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.stdout == "[1.0, 1.0]\n", done.stderr
    assert (tmp_path / "listed").read_bytes() == b"..."  # the start, and two answers


def test_a_programs_folder_is_empty_and_its_own(fence):
    program = (
        "import os\nopen('f', 'w').write('x')\nprint(sorted(os.listdir('.')), os.environ['TMPDIR'] == os.getcwd())"
    )
    row = {"inputs": ["", ""], "outputs": ["['f'] True"] * 2}
    assert score(code(), answer(program, **row))[0].reward == 1.0


def test_a_program_may_write_what_the_folder_holds(fence):
    program = FILES.format(n=60, size=250_000) + "os.mkdir('d'); print(len(os.listdir()))"
    assert score(code(), answer(program, inputs=[""], outputs=["61"]))[0].reward == 1.0


def test_the_time_of_an_answer_bounds_all_its_tests(monkeypatch):
    monkeypatch.setattr(scorer_setup, "TEST_S", 1.0)
    row = {"inputs": [""] * 20, "outputs": ["x"] * 20}
    reward = code(credit="partial", timeout_s=4.0)
    asked = answer("import time\ntime.sleep(9)", **row)
    [scored] = seen(lambda: score(reward, asked), lambda found: found[0].outcome is Outcome.OK)
    assert (scored.outcome, dict(scored.components)) == (Outcome.OK, {"passed": 0.0, "time": 1.0})


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```\n```py\nb\n```", "b\n"),
        ("```\na\n```\n```sh\nls\n```", "a\n"),
        ("```python\na", None),
        ("```python\na\n```\nExample output:\n```\n2\n```", "a\n"),
        ("x", None),
        ("```Python title\n  a\n  ```", "  a\n"),
    ],
)
def test_the_last_block_of_python(text, program):
    assert extract_program(text) == program


def by_lines(text: str) -> str | None:
    """The last program of ``text``, one without a language if no other, found line by line."""
    found, language, body = dict[bool, str](), None, list[str]()
    for line in text.splitlines(keepends=True):
        fence = line.strip(" \t").startswith("```")
        if language is not None and fence:
            if language in ("", "python", "python3", "py"):
                found[language == ""] = "".join(body)
            language = None
        elif language is not None:
            body.append(line)
        elif fence and line.endswith("\n"):
            head = line.strip(" \t").removeprefix("```").lstrip(" \t")
            language, body = "".join(takewhile(lambda c: c.isalnum() or c in "_+#.-", head)).lower(), []
    return found.get(False, found.get(True))


@settings(deadline=None, max_examples=500)
@given(st.lists(st.sampled_from(["```", "```", "\n", "\n", " ", "\t", "py", "Python", "sh", "+", "`", "x y", "é"])))
def test_programs_are_those_that_a_scan_by_lines_finds(parts):
    assert extract_program("".join(parts)) == by_lines("".join(parts))


@pytest.mark.parametrize("run", [" ", "\t", "a", "#", " a"])
def test_time_is_linear_in_a_last_line_without_an_end(run):
    text = "```python\na\n```\n```" + run * (400_000 // len(run))
    began = time.process_time()
    assert extract_program(text) == "a\n"
    assert time.process_time() - began < 3.0  # a quadratic scan takes 40 s


def test_rows_without_tests_are_refused():
    settings = msgspec.convert(code(asserts="checks").model_dump(), CodeSettings)
    assert len(row_tests({"inputs": [1, 2.5], "outputs": ["1", "2"], "checks": "assert f()"}, settings)) == 3
    for row, words in [
        ({}, "no tests"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs in 'inputs', 0 outputs"),
        ({"inputs": [], "outputs": [], "checks": [{}]}, "of type dict"),
        ({"inputs": '["1", "2"]', "outputs": "1"}, "2 inputs in 'inputs', 1 outputs"),
    ]:
        with pytest.raises(ValueError, match=words):
            row_tests(row, settings)


def test_tests_may_be_fields_of_json_text():
    """As in TACO and in the ground truths of verl's sets."""
    settings = CodeSettings(inputs="io.inputs", outputs="io.outputs", asserts=None, credit="all", timeout_s=9)
    fields = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
    want = [CodeTest(stdin=given, expected=made) for given, made in zip(*fields.values(), strict=True)]
    assert row_tests({"io": fields}, settings) == row_tests({"io": json.dumps(fields)}, settings) == want
    assert row_tests({"io.inputs": "[1, 2]", "io.outputs": "3"}, settings) == [CodeTest(stdin="[1, 2]", expected="3")]
    with pytest.raises(ValueError, match="of type list"):  # arguments of a function
        row_tests({"io": json.dumps({"inputs": [[1]], "outputs": [[2]]})}, settings)
    for text in ("", "x", "[1]", '{"inputs": 1', "{" * 100_000):
        with pytest.raises(ValueError, match="no tests"):
            row_tests({"io": text}, settings)
