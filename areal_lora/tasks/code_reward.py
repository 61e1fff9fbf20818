"""The reward ``kind: code``: run the program of an answer on tests, fenced.

The program is a fenced code block of the answer (`extract_program`). Each test is a process of its own with a new
interpreter: it has the standard library, an empty temporary folder, limits, and no network; it can start and signal no
process, write nothing outside of its folder, and read nothing but the interpreter, its libraries and its folder. What
it does wrong is a `Verdict`, which costs credit.
"""

import contextlib
import math
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from areal_lora.errors import EnvironmentError_
from areal_lora.tasks.sandbox.fence import Doors, count_threads, limit_processes, raise_fence
from areal_lora.tasks.sandbox.seccomp import ProcessPolicy

UNFENCED = 97  # exit status of a process that could not be fenced
START_S = 30.0
TEST_S = 4.0  # CPU seconds of one test
WALL_FACTOR = 2.5  # seconds of a test over its CPU seconds: several run on a busy machine
OUTPUT_BYTES = 256 << 10  # largest output of a test, unless more is expected, and file in its temporary folder
FOLDER_BYTES, FOLDER_ENTRIES, OPEN_FILES = 16 << 20, 1000, 64  # open ones may have no name in the folder
LOOK_S = 0.1  # between looks at the folder
TEST_BYTES = 1 << 30  # address space of the program in a test: recursive ones reserve stacks of 512 MiB
_SYSTEM = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache"),
    *("/usr/share/zoneinfo", "/etc/localtime", "/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"),
)
_BLOCK = re.compile(r"^[ \t]*+```[ \t]*+([\w+#.-]*+)[^\n]*+\n(.*?)^[ \t]*+```", re.DOTALL | re.MULTILINE)
_PYTHON = ("python", "python3", "py")
_MODULES = ("typing", "bisect", "collections", "functools", "heapq", "itertools", "math")
_IMPORTS = "".join(f"import {m}; from {m} import *; " for m in _MODULES) + "from builtins import *\n"  # pow


class Verdict(StrEnum):
    """How a test ended."""

    PASSED = "passed"
    WRONG = "wrong"  # another output, or an assertion that failed
    CRASHED = "crashed"
    TIME = "time"  # CPU seconds, seconds of the test, or seconds of the answer
    MEMORY = "memory"
    OUTPUT = "output"  # more than it may write
    NO_CODE = "no_code"


class CodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of ``config.sections.task.CodeReward`` that matter here, and the CPU seconds of one test."""

    inputs: str | None
    outputs: str | None
    asserts: str | None
    credit: str
    timeout_s: float
    test_s: float = TEST_S


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTest:
    """One test: with ``code`` the program continues with it, else its output to ``stdin`` must be ``expected``."""

    stdin: str = ""
    expected: str = ""
    code: str | None = None


class CodeRunner:
    """Call it with an answer and its row. ``scratch`` is a folder that this process may write.

    It must run in a process with one thread that may start others (`ProcessPolicy.MANY`).
    Raises EnvironmentError_ if an empty program fails here.
    """

    def __init__(self, settings: CodeSettings, scratch: Path) -> None:
        self._settings, self._scratch, self._threads = settings, scratch, count_threads()
        verdict = self._run("", CodeTest(), START_S)
        if verdict is not Verdict.PASSED:
            reason = f"an empty program ends with {verdict} where it may read nothing but the interpreter and libraries"
            fix = "use a Python whose shared libraries are below its prefix or the system's"
            raise EnvironmentError_(f"reward code: {reason} (fix: {fix})")

    def __call__(self, completion: str, columns: dict[str, Any]) -> dict[str, float | bool]:
        """The reward, whether all tests pass, and the share of tests by verdict.

        Raises ValueError for a row without tests, EnvironmentError_ if a program cannot be fenced.
        """
        tests = row_tests(columns, self._settings)
        self._threads = count_threads()  # not in each program, whose CPU time it would take
        verdicts = self._verdicts(extract_program(completion), tests)
        counts = Counter(verdicts)
        shares: dict[str, float | bool] = {verdict.value: n / len(tests) for verdict, n in counts.items()}
        passed = counts[Verdict.PASSED]
        whole = passed == len(tests)
        reward = passed / len(tests) if self._settings.credit == "partial" else float(whole)
        return {"passed": 0.0} | shares | {"reward": reward, "correct": whole}

    def _verdicts(self, program: str | None, tests: Sequence[CodeTest]) -> Iterator[Verdict]:
        """One verdict per test; without partial credit the first failure stands for the rest."""
        s = self._settings
        ends_s = time.monotonic() + s.timeout_s - min(2.0, s.timeout_s / 4)  # before the process itself is ended
        failed: Verdict | None = None if program is not None else Verdict.NO_CODE
        for test in tests:
            if failed is None or (s.credit == "partial" and program is not None):
                left_s = min(WALL_FACTOR * s.test_s, ends_s - time.monotonic())
                verdict = Verdict.TIME if left_s <= 0 else self._run(program or "", test, left_s)
                failed = failed or (None if verdict is Verdict.PASSED else verdict)
                yield verdict
            else:
                yield failed

    def _run(self, program: str, test: CodeTest, limit_s: float) -> Verdict:
        folder = tempfile.mkdtemp(dir=self._scratch)
        try:
            return self._run_in(Path(folder), program, test, limit_s)
        finally:  # Python's own removal fails on folders in folders, a thousand deep
            subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL, check=False)

    def _run_in(self, folder: Path, program: str, test: CodeTest, limit_s: float) -> Verdict:
        seal = secrets.token_hex(16)
        if test.code is not None:
            # The start code of such problems names what LeetCode imports: List, deque, inf.
            head = "" if "from __future__" in program else _IMPORTS
            program = f"{head}{program}\n\n{test.code}\n\nimport os as _os\n_os.write(1, b'\\n{seal}')\n"
        expected_bytes = len(test.expected.encode(errors="replace"))
        most_bytes = min(max(OUTPUT_BYTES, 2 * expected_bytes), FOLDER_BYTES)  # which is this process's own limit
        (folder / "main.py").write_text(program, encoding="utf-8", errors="replace")
        (folder / "stdin").write_text(test.stdin, encoding="utf-8", errors="replace")
        work = folder / "work"
        work.mkdir()
        with (
            (folder / "stdin").open("rb") as given,
            (folder / "stdout").open("wb") as out,
            (folder / "stderr").open("wb") as errors,
        ):
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-X", "utf8", str(folder / "main.py")],
                stdin=given,
                stdout=out,
                stderr=errors,
                cwd=work,
                env=os.environ | {"HOME": str(work), "TMPDIR": str(work), "OMP_NUM_THREADS": "1"},
                preexec_fn=lambda: self._fence(folder, most_bytes),  # this process has one thread
            )
            try:
                status = _ended(process, work, limit_s)
            finally:
                process.kill()
                process.wait()
        if status == UNFENCED:
            raise EnvironmentError_("reward code: this machine cannot fence a program (Landlock, seccomp)")
        if isinstance(status, Verdict):
            return status
        written = (folder / "stdout").read_bytes()
        if status != 0 or len(written) >= most_bytes:
            return _failure(status, len(written) >= most_bytes, folder / "stderr")
        text = written.decode("utf-8", errors="replace")
        if test.code is not None:
            return Verdict.PASSED if text.endswith(f"\n{seal}") else Verdict.WRONG
        return Verdict.PASSED if _plain(text) == _plain(test.expected) else Verdict.WRONG

    def _fence(self, folder: Path, most_bytes: int) -> None:
        """In the new process, before it becomes the interpreter."""
        s = self._settings
        _lower(resource.RLIMIT_AS, TEST_BYTES)
        _lower(resource.RLIMIT_CPU, math.ceil(s.test_s))
        _lower(resource.RLIMIT_NOFILE, OPEN_FILES)
        limit_processes(self._threads, for_good=True)
        doors = Doors(
            scratch=str(folder / "work"),
            scratch_bytes=most_bytes,
            processes=ProcessPolicy.EXEC,
            readable=(*_interpreter(), str(folder / "main.py"), str(folder / "stdin")),
        )
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        if raise_fence(doors, os.getppid()):
            os._exit(UNFENCED)


@cache
def _interpreter() -> tuple[str, ...]:
    """What an interpreter without site-packages reads: itself, its standard library, shared libraries, time zones."""
    own = [sys.executable, f"{sys.prefix}/pyvenv.cfg", f"{sys.base_prefix}/lib"]
    own += [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib")]
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    loaded = {words[5] for line in maps if len(words := line.split(maxsplit=5)) == 6 and ".so" in words[5]}
    return (*own, *_SYSTEM, *sorted(loaded))


def _lower(kind: int, wanted: int) -> None:
    hard = resource.getrlimit(kind)[1]
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(kind, (limit, limit))


def _ended(process: subprocess.Popen[bytes], work: Path, limit_s: float) -> int | Verdict:
    """The exit status of a test; a verdict if it writes too much into ``work``, or runs longer than ``limit_s``."""
    ends_s = time.monotonic() + limit_s
    while (left_s := ends_s - time.monotonic()) > 0:
        try:
            status: int | Verdict = process.wait(min(LOOK_S, left_s))
        except subprocess.TimeoutExpired:
            status = Verdict.TIME
        if _overfull(work):
            return Verdict.OUTPUT
        if status is not Verdict.TIME:
            return status
    return Verdict.TIME


def _overfull(work: Path) -> bool:
    """Whether the files in ``work`` are too large or too many, or a folder's path is too long to look into."""
    n_bytes, n_entries, folders = 0, 0, [str(work)]
    while folders and n_bytes <= FOLDER_BYTES and n_entries <= FOLDER_ENTRIES:
        try:
            for entry in os.scandir(folders.pop()):
                n_entries += 1
                folders += [entry.path] if entry.is_dir(follow_symlinks=False) else []
                with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                    n_bytes += 512 * entry.stat(follow_symlinks=False).st_blocks
        except FileNotFoundError:
            continue
        except OSError:
            return True
    return n_bytes > FOLDER_BYTES or n_entries > FOLDER_ENTRIES


def _failure(status: int, too_much: bool, errors: Path) -> Verdict:
    last = errors.read_bytes()[-4096:]
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        return Verdict.TIME
    if b"MemoryError" in last:
        return Verdict.MEMORY
    if too_much or status == -signal.SIGXFSZ or b"File too large" in last:
        return Verdict.OUTPUT
    return Verdict.WRONG if b"AssertionError" in last else Verdict.CRASHED


def extract_program(completion: str) -> str | None:
    """The last fenced block of Python, else the last without a language; None if there is none."""
    found = [(language.lower(), body) for language, body in _BLOCK.findall(completion)]
    tagged = [body for language, body in found if language in _PYTHON]
    return next(reversed(tagged or [body for language, body in found if not language]), None)


def row_tests(row: Mapping[str, Any], settings: CodeSettings) -> list[CodeTest]:
    """The tests of a row. Raises ValueError if it has none, or another number of inputs than outputs."""
    tests = []
    if settings.outputs is not None:
        outputs = _texts(row, settings.outputs)
        inputs = [""] * len(outputs) if settings.inputs is None else _texts(row, settings.inputs)
        if len(inputs) != len(outputs):
            raise ValueError(
                f"{len(inputs)} inputs in {settings.inputs!r}, {len(outputs)} outputs in {settings.outputs!r}"
            )
        tests += [CodeTest(stdin=stdin, expected=expected) for stdin, expected in zip(inputs, outputs, strict=True)]
    if settings.asserts is not None:
        tests += [CodeTest(code=code) for code in _texts(row, settings.asserts)]
    if not tests:
        raise ValueError("the row has no tests")
    return tests


def _texts(row: Mapping[str, Any], column: str) -> list[str]:
    value: Any = row
    for part in [column] if column in row else column.split("."):
        fields = _from_json(value, dict[str, Any])
        value = fields.get(part) if isinstance(fields, Mapping) else None
    value = _from_json(value, list[str])
    values = [] if value is None else value if isinstance(value, list) else [value]
    if others := [v for v in values if not isinstance(v, str | int | float)]:
        raise ValueError(f"a test in column {column!r} is of type {type(others[0]).__name__}, not a text")
    return [str(v) for v in values]


def _from_json(value: Any, form: Any) -> Any:
    """What a text states in JSON of this ``form``, as in TACO and CSV files; anything else as it is."""
    try:
        return msgspec.json.decode(value, type=form) if isinstance(value, str) else value
    except msgspec.DecodeError:
        return value


def _plain(text: str) -> list[str]:
    """Lines without white space at their ends; empty lines at the end do not count."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
