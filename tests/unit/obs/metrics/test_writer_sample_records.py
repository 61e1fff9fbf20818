"""Sample files: cut, rotated, bounded, and whole after a crash at any point."""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from areal_lora.errors import RecordError
from areal_lora.obs.metrics import writer
from areal_lora.obs.metrics.reader import read_metrics
from areal_lora.obs.metrics.records import EvalRecord, ResumeRecord, RolloutSampleRecord, SampleRecord
from areal_lora.obs.metrics.writer import TEXT_CHARS, MetricsWriter, SampleFiles, cut_middle, sample_files, sample_lines
from areal_lora.run_folder.paths import RunFolder
from tests.support.obs.sample_lines import line
from tests.support.sizes import size


def steps_in(folder: Path, adapter: str = "a") -> list[int]:
    found = [json.loads(text) for _, _, text in sample_lines(RunFolder(folder))]
    return [row["step"] for row in found if row["adapter"] == adapter]


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "samples").iterdir())


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "FILE_BYTES", 1000)
    monkeypatch.setattr(writer, "NEWEST_FILES", 3)


def test_a_long_answer_is_recorded_with_both_ends_and_not_beside_the_steps(tmp_path: Path) -> None:
    answer = "begin " + "thinking " * 20_000 + " #### 42"
    sample = SampleRecord(prompt="p", completion=answer, gold="42", reward=1.0)
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        for step in range(5):
            writer.write(RolloutSampleRecord(step=step, prompt=answer, completion=answer, reward=1.0, gold=answer))
        writer.write(EvalRecord(version=0, step=0, accuracy=1.0, n=1, samples=[sample]))
    assert RunFolder(tmp_path).metrics.stat().st_size < 2 * TEXT_CHARS
    run = read_metrics(tmp_path)
    assert [s.step for s in run.samples] == [0, 1, 2, 3, 4]
    short, [scored] = run.samples[0], run.evals[0].samples
    for text in (short.prompt, short.completion, short.gold, scored.completion):
        assert text is not None
        assert text.startswith("begin thinking")
        assert text.endswith("thinking  #### 42")
        assert f"\n[... {len(answer) - TEXT_CHARS} characters left out ...]\n" in text
        assert len(text) < TEXT_CHARS + 100


@pytest.mark.parametrize("limit", [7, 8])
def test_what_is_cut_and_what_is_kept_make_the_whole(limit: int) -> None:
    text = "".join(chr(0x1F600 + i) for i in range(20))
    assert cut_middle(text[:limit], limit) == text[:limit]
    head, mark, tail = cut_middle(text, limit).split("\n")
    assert (len(head) + len(tail), mark) == (limit, f"[... {20 - limit} characters left out ...]")
    assert text.startswith(head)
    assert text.endswith(tail)
    assert abs(len(head) - len(tail)) <= 1


@pytest.mark.usefixtures("small_files")
def test_the_first_and_the_newest_files_stay_within_the_bound(tmp_path: Path) -> None:
    files = SampleFiles(RunFolder(tmp_path))
    for step in range(300):
        files.write(line(step))
        assert folder_bytes(tmp_path) <= 4 * 1000
        assert steps_in(tmp_path)[-1] == step
    files.close()
    names = [path.name for path in sample_files(RunFolder(tmp_path))]
    assert names[0] == "000000.jsonl"
    numbers = [int(name[:6]) for name in names[1:]]
    assert numbers == list(range(numbers[-1] - 2, numbers[-1] + 1))
    kept = steps_in(tmp_path)
    first = kept.index(next(s for i, s in enumerate(kept) if s != i))
    assert first > 10
    assert kept[first:] == list(range(kept[first], 300)), "the newest ones have no hole"


@pytest.mark.usefixtures("small_files")
def test_a_line_longer_than_a_file_has_one_of_its_own(tmp_path: Path) -> None:
    files = SampleFiles(RunFolder(tmp_path))
    for step, chars in enumerate((10, 5000, 10)):
        files.write(line(step, chars=chars))
    files.close()
    assert [len(path.read_bytes().splitlines()) for path in sample_files(RunFolder(tmp_path))] == [1, 1, 1]


@pytest.mark.usefixtures("small_files")
def test_the_total_is_what_the_module_says(tmp_path: Path) -> None:
    assert writer.TOTAL_BYTES == 8 * (8 << 20)
    assert str(writer.TOTAL_BYTES >> 20) in (writer.__doc__ or "")


@pytest.mark.usefixtures("small_files")
def test_a_resume_takes_back_the_samples_of_steps_taken_again(tmp_path: Path) -> None:
    files = SampleFiles(RunFolder(tmp_path))
    for step in range(40):
        files.write(line(step, "a"))
        files.write(line(step, "b"))
    others = steps_in(tmp_path, "b")
    files.drop("a", 35)
    files.write(line(35, "a"))
    files.close()
    assert steps_in(tmp_path, "b") == others
    assert steps_in(tmp_path, "a")[-3:] == [33, 34, 35]
    assert not list((tmp_path / "samples").glob(".*"))


def test_a_resume_record_voids_samples_too(tmp_path: Path) -> None:
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        for step in range(4):
            writer.write(RolloutSampleRecord(step=step, prompt="p", completion="before", reward=0.0, adapter="a"))
        writer.write(ResumeRecord(version=2, time_s=1.0, adapter="a"))
        writer.write(RolloutSampleRecord(step=2, prompt="p", completion="after", reward=0.0, adapter="a"))
    assert [(s.step, s.completion) for s in read_metrics(tmp_path).samples] == [
        (0, "before"),
        (1, "before"),
        (2, "after"),
    ]


def test_a_torn_line_is_not_read_and_cut_when_the_run_is_resumed(tmp_path: Path) -> None:
    files = SampleFiles(RunFolder(tmp_path))
    files.write(line(0))
    files.close()
    [path] = sample_files(RunFolder(tmp_path))
    with path.open("ab") as file:
        file.write(line(1)[:-7])
    assert steps_in(tmp_path) == [0]
    files = SampleFiles(RunFolder(tmp_path))
    files.write(line(1))
    files.close()
    assert steps_in(tmp_path) == [0, 1]


def test_samples_of_older_versions_inside_the_metrics_file_are_read(tmp_path: Path) -> None:
    rows = [
        {"kind": "sample", "step": k, "prompt": "p", "completion": str(k), "reward": 0, "adapter": "a"}
        for k in (0, 1, 2)
    ]
    RunFolder(tmp_path).metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        writer.write(ResumeRecord(version=2, time_s=1.0, adapter="a"))
        writer.write(RolloutSampleRecord(step=2, prompt="p", completion="new", reward=0.0, adapter="a"))
    assert [s.completion for s in read_metrics(tmp_path).samples] == ["0", "1", "new"]


def test_a_full_disk_is_one_clear_line_and_leaves_whole_lines(tmp_path: Path) -> None:
    files, soft_hard = SampleFiles(RunFolder(tmp_path)), resource.getrlimit(resource.RLIMIT_FSIZE)
    files.write(line(0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, soft_hard[1]))
    try:
        with pytest.raises(RecordError, match=r"000000\.jsonl: a record cannot be written: File too large"):
            files.write(line(1, chars=500))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft_hard)
    files.write(line(2))
    files.close()
    assert steps_in(tmp_path) == [0, 2]


CRASHING = """
import itertools, os, signal, sys
from areal_lora.obs.metrics import writer
from areal_lora.run_folder.paths import RunFolder
from tests.support.obs.sample_lines import line
writer.FILE_BYTES, writer.NEWEST_FILES = 1000, 3
folder, kill_at, first = RunFolder.of(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
left = kill_at
def counted(event, arguments):
    global left
    if event in ("open", "os.remove", "os.rename", "os.truncate", "os.mkdir") and str(folder) in str(arguments[0]):
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(counted)
files = writer.SampleFiles(folder)
files.drop("a", first)
for step in range(first, first + 40):
    files.write(line(step))
    print(step, flush=True)
"""


def test_a_kill_at_any_operation_of_rotation_and_resume_loses_no_newest_sample(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print("seed", seed)
    rng, resumed, completed = random.Random(seed), 0, False
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    for kill_at in [*rng.sample(range(1, 30), size(4, 8)), *rng.sample(range(2, 8), size(2, 3)), 10**6]:
        before = [step for step in steps_in(tmp_path) if step < resumed]
        done = subprocess.run(
            [sys.executable, "-c", CRASHING, str(tmp_path), str(kill_at), str(resumed)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode in (0, -9), done.stderr
        completed = done.returncode == 0
        written = [int(text) for text in done.stdout.split()]
        found = steps_in(tmp_path)
        assert found == sorted(set(found)), "nothing twice"
        assert written or set(before[-8:]) <= set(found), f"killed at operation {kill_at}: earlier samples are gone"
        if written:
            # The line that was being written when the kill came may be there as well.
            newest = [step for step in found if step >= written[0]][-20:]
            assert newest[-1] in (written[-1], written[-1] + 1)
            assert newest == list(range(newest[0], newest[-1] + 1))
            resumed = max(0, written[-1] - 3)
    assert completed
    assert len(sample_files(RunFolder(tmp_path))) <= 4
    assert not list((tmp_path / "samples").glob(".*"))
