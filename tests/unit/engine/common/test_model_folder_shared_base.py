"""One copy of the base per node, with real processes: read once, whole or not at all, and gone when it is not used."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from areal_lora.config.models import ModelConfig
from areal_lora.engine.common import model_folder
from areal_lora.engine.common.model_folder import PREFIX, share
from tests.support.launcher.driven import Run, beginning

SIZE = 300_000
HOLD = """
import sys
from pathlib import Path
from areal_lora.engine.common import model_folder
{before}
files = [Path(name) for name in sys.argv[3].split('|')]
copies = model_folder.share(files, int(sys.argv[2]), Path(sys.argv[1]))
print([copy.read_bytes() == file.read_bytes() for copy, file in zip(copies, files)], flush=True)
sys.stdin.read()
"""
STALL = """
import os, time
real = os.sendfile
def stall(out, source, offset, count):
    real(out, source, offset, 100_000)
    print("half", flush=True)
    time.sleep(600)
os.sendfile = stall
"""
NO_ROOM = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))"


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    (tmp_path / "shared memory").mkdir()
    return tmp_path / "shared memory"


@pytest.fixture
def base(tmp_path: Path) -> list[Path]:
    files = [tmp_path / name for name in ("a.safetensors", "b.safetensors")]
    for i, file in enumerate(files):
        file.write_bytes(bytes([i + 1]) * SIZE)
    return files


Starter = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(memory: Path) -> Iterator[Starter]:
    """A rank of the node that holds ``files`` until its standard input is closed."""
    started: list[subprocess.Popen[str]] = []

    def begin(files: list[Path], first: int = 0, before: str = "") -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", HOLD.format(before=before), str(memory), str(first), "|".join(map(str, files))]
        started.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def names(memory: Path) -> list[str]:
    return sorted(path.name for path in memory.iterdir())


def test_ranks_that_come_together_and_late_read_one_copy(base: list[Path], memory: Path, start: Starter) -> None:
    ranks = [start(base, first) for first in (0, 1, 0)]
    assert [line(rank) for rank in ranks] == ["[True, True]"] * 3
    made = names(memory)
    assert len(made) == 2
    assert all(name.startswith(PREFIX) for name in made)
    # The disk now holds other bytes under the same size and time: who still reads it would see them.
    for file in base:
        when = file.stat().st_mtime_ns
        file.write_bytes(bytes(SIZE))
        os.utime(file, ns=(when, when))
    assert line(start(base)) == "[False, False]"
    assert names(memory) == made


def test_the_last_process_removes_the_copies(base: list[Path], memory: Path, start: Starter) -> None:
    first, second = start(base), start(base)
    assert (line(first), line(second)) == ("[True, True]", "[True, True]")
    first.communicate()
    assert len(names(memory)) == 2, "the second one holds them"
    second.communicate()
    assert names(memory) == []


def test_a_restarted_rank_attaches_to_what_killed_ones_left(base: list[Path], memory: Path, start: Starter) -> None:
    ranks = [start(base), start(base, 1)]
    assert [line(rank) for rank in ranks] == ["[True, True]"] * 2
    for rank in ranks:
        rank.kill()
        rank.wait()
    kept = {path: path.stat().st_ino for path in memory.iterdir()}
    assert len(kept) == 2
    again = start(base)
    assert line(again) == "[True, True]"
    assert {path: path.stat().st_ino for path in memory.iterdir()} == kept
    again.communicate()
    assert names(memory) == []


def test_a_copy_whose_reader_was_killed_half_way_is_read_again(base: list[Path], memory: Path, start: Starter) -> None:
    killed = start(base, before=STALL)
    assert line(killed) == "half"
    waiting = start(base)
    time.sleep(0.2)
    assert [path.stat().st_size for path in memory.iterdir()] == [100_000]
    killed.kill()
    assert line(waiting) == "[True, True]", "it fills what the killed one began"


def test_another_base_removes_what_is_not_used(base: list[Path], memory: Path, start: Starter) -> None:
    held, killed = start(base[:1]), start(base[1:])
    assert (line(held), line(killed)) == ("[True]", "[True]")
    killed.kill()
    killed.wait()
    before = set(names(memory))
    base[1].write_bytes(b"another base")
    assert line(start(base[1:])) == "[True]"
    assert len(set(names(memory)) & before) == 1, "the held copy stays, the unused one is removed"


def test_too_little_shared_memory_is_one_line_and_leaves_nothing(
    base: list[Path], memory: Path, start: Starter
) -> None:
    rank = start(base, before=f"{NO_ROOM}\nsys.stderr = sys.stdout")
    output, _ = rank.communicate()
    assert "EnvironmentError_" in output
    assert "a.safetensors cannot be copied to" in output
    assert "model.shared_memory=false" in output
    assert names(memory) == []


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    with beginning(tmp_path / "run") as start:
        yield start


def test_the_launcher_removes_what_its_killed_ranks_shared(base: list[Path], begin: Callable[..., Run]) -> None:
    """Ranks killed at once, while the launcher looks after another one."""
    hold = (
        f"from areal_lora.engine.common.model_folder import share; from pathlib import Path; import time; "
        f"print(share([Path({str(base[0])!r})])[0].name, flush=True); time.sleep(600)"
    )
    run = begin(("server", 0, hold), ("trainer", 0, hold), overrides=["run.max_restarts=0"])
    run.wait_for(lambda: run.log("trainer-0").strip() != "" and run.log("server-0").strip() != "")
    copy = Path("/dev/shm") / run.log("trainer-0").strip()
    assert copy.exists()
    time.sleep(5.0)  # the launcher looks several times a second at what its processes share
    for process in run.alive():
        if process.pid != run.process.pid and hold in process.cmdline():
            process.kill()
    run.end()
    assert not copy.exists()


def test_files_beside_those_of_the_model_are_neither_read_nor_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: list[Path] = []

    def record(files: list[Path], first: int) -> list[Path]:
        shared.extend(files)
        return files

    monkeypatch.setattr(model_folder, "share", record)
    save_file({"model.x": torch.ones(1)}, tmp_path / "model.safetensors")
    save_file({"x": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    folder = model_folder.ModelFolder.of(ModelConfig(path=str(tmp_path), shared_memory=True))
    assert shared == [tmp_path / "model.safetensors"]
    assert "model.x" in folder
    assert "x" not in folder


def test_share_returns_the_copies_in_the_order_of_the_files(base: list[Path], memory: Path) -> None:
    copies = share(base, first=1, memory=memory)
    assert [copy.read_bytes() for copy in copies] == [file.read_bytes() for file in base]
    for copy in copies:
        copy.unlink()
