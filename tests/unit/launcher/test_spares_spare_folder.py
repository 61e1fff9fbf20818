"""Indices of spare servers are used once; starts are known until they are over."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

from areal_lora.launcher.spares import note_process, starts
from areal_lora.launcher.start import Owner
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import claim_indices


def test_an_index_is_claimed_once(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "7-0")
    assert claim_indices(folder, 2, first=3) == [3, 4]
    assert claim_indices(folder, 1, first=3) == [5]
    assert claim_indices(RunFolder(tmp_path, "7-1"), 2, first=3) == [6, 7], "another session, other indices"
    assert claim_indices(folder, 1, first=20) == [20], "a resumed run with more servers of its own"


def test_claims_at_the_same_time_differ(tmp_path: Path) -> None:
    folder, found = RunFolder(tmp_path), list[int]()

    def claim() -> None:
        found.extend(claim_indices(folder, 25, first=1))

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(set(found)) == sorted(found)
    assert len(found) == 200


def test_starts_are_those_noted(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert not [*starts(folder)]
    folder.spares.mkdir()
    (folder.spares / "job-4711").touch()
    code = (
        "import sys; from pathlib import Path; from areal_lora.launcher.spares import note_process; "
        "from areal_lora.run_folder.paths import RunFolder; note_process(RunFolder(Path(sys.argv[1])))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    mine = note_process(folder)
    (_, job), *local = starts(folder)
    assert job == "4711"
    processes = [(path, owner) for path, owner in local if isinstance(owner, Owner)]
    assert sorted((path == mine, owner.is_over()) for path, owner in processes) == [(False, True), (True, False)]
    assert all(owner.host == socket.gethostname() for _, owner in processes)
