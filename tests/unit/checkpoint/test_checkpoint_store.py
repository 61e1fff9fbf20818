"""Writing: every operation of a checkpoint fails once, and the newest whole one is always found and named."""

from __future__ import annotations

import errno
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from areal_lora.checkpoint.checkpoint_store import newest_in, plan_deletions, version_folder, versions_in
from areal_lora.checkpoint.recover import find, tidy
from areal_lora.checkpoint.state import PARTS, AdapterState, Disk, Evaluation, files_of, read_files
from areal_lora.config.sections.run import CheckpointConfig
from areal_lora.errors import CheckpointError
from areal_lora.run_folder.paths import RunFolder
from tests.support.checkpoint.faulty_disk import FaultyDisk
from tests.support.checkpoint.helpers import (
    COMPANION,
    SPEC,
    on_ranks,
    snapshot_of,
    state_of,
    stores,
    tensors_of,
    write,
    written,
)


def read_back(run_folder: Path) -> tuple[int, bytes]:
    """(version, ledger) of the newest whole checkpoint, after comparing every number in it."""
    found = find(RunFolder(run_folder), SPEC.name).newest
    assert found is not None
    version = found.manifest.version
    for role, begin in (("", 0), ("critic", COMPANION)):
        tensors = read_files([found.path / entry.name for entry in files_of(found.manifest, role)])
        want = [tensors_of(state_of(version, begin + rank)) for rank in range(2)]
        for part in PARTS:
            whole = want[0][part] | want[1][part]
            assert tensors[part].keys() == whole.keys()
            assert all(np.array_equal(tensors[part][name], whole[name]) for name in whole)
    return version, found.manifest.ledger


def test_a_checkpoint_holds_what_all_ranks_gave(tmp_path: Path) -> None:
    written(tmp_path, 0, 1)
    assert read_back(tmp_path) == (1, b"ledger 1")
    plan = find(RunFolder(tmp_path), SPEC.name)
    assert (plan.broken, plan.leftovers) == ((), ())
    assert plan.newest is not None
    assert [r.host for r in plan.newest.manifest.random] == [b"random 0", b"random 1"]
    names = sorted(path.name for path in plan.newest.path.iterdir())
    own = ["rank-0000.safetensors", "rank-0001.safetensors"]
    assert names == [*(f"critic-{name}" for name in own), "manifest.json", *own]


def test_a_rank_that_owns_nothing_writes_no_file(tmp_path: Path) -> None:
    """A data-parallel copy, for example; its random numbers are kept all the same."""
    made = stores(tmp_path)
    empty = AdapterState(step=3, shapes={}, parts={part: np.zeros(0, dtype=np.float32) for part in PARTS})

    def save(rank: int) -> int:
        snapshot = snapshot_of(1, rank)
        return made[rank].write(replace(snapshot, state=empty, companions={"critic": empty}) if rank else snapshot)

    sizes = on_ranks(save)
    found = find(RunFolder(tmp_path), SPEC.name).newest
    assert found is not None
    names = ["rank-0000.safetensors", "critic-rank-0000.safetensors"]
    assert [entry.name for entry in found.manifest.files] == names
    assert [r.host for r in found.manifest.random] == [b"random 0", b"random 1"]
    assert sizes == [found.nbytes] * 2


def operations(rank: int, folder: Path) -> int:
    """How many operations of ``rank`` there are in the first and second checkpoint of a run."""
    folder.mkdir()
    disks = [FaultyDisk(), FaultyDisk()]
    made = stores(folder, disks)
    for version in (0, 1):
        assert write(made, version) == [None, None]
    return len(disks[rank].log)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_every_operation_fails_once(tmp_path: Path, rank: int, code: int) -> None:
    """The failure is told on all ranks with path and reason, older checkpoints stay, the next one is written."""
    total = operations(rank, tmp_path / "count")
    assert total >= (16 if rank == 0 else 6)
    for n in range(1, total + 1):
        folder = tmp_path / f"fails-{n}"
        folder.mkdir()
        disks = [FaultyDisk(n if r == rank else 0, code) for r in range(2)]
        made = stores(folder, disks)
        failures = []
        for version in (0, 1):
            outcome = write(made, version)
            assert outcome[0] is None or (isinstance(outcome[0], CheckpointError) and isinstance(outcome[1], Exception))
            assert str(outcome[0]) == str(outcome[1]), "ranks disagree"
            if outcome[0] is not None:
                failures.append(version)
                operation, path = disks[rank].log[n - 1]
                assert path.name in str(outcome[0]), (operation, str(outcome[0]))
                assert "injected" in str(outcome[0])
            newest = find(RunFolder(folder), SPEC.name)
            assert newest.broken == ()
            assert all(path.name.startswith(".newest") for path in newest.leftovers)
            if newest.newest is not None:
                assert read_back(folder)[0] in ({version} if version not in failures else {version - 1, version})
        assert len(failures) == 1, f"operation {n} did not fail: {disks[rank].log[n - 1]}"
        assert write(made, 2) == [None, None]
        assert read_back(folder) == (2, b"ledger 2")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_version_whose_write_failed_is_written_again(tmp_path: Path, rank: int) -> None:
    """Whatever failed, after its folder had its name, too: the last version of a run has no later one."""
    for n in range(1, operations(rank, tmp_path / "count") + 1):
        folder = tmp_path / f"fails-{n}"
        folder.mkdir()
        made = stores(folder, [FaultyDisk(n if r == rank else 0, errno.ENOSPC) for r in range(2)])
        for version in (0, 1):
            if write(made, version)[0] is not None:
                assert write(made, version) == [None, None], n
            assert read_back(folder) == (version, f"ledger {version}".encode())
        assert find(RunFolder(folder), SPEC.name).broken == ()


@pytest.mark.parametrize("rank", [0, 1])
def test_every_write_is_torn_once_and_the_checkpoint_before_is_used(tmp_path: Path, rank: int) -> None:
    torn = 0
    for n in range(1, operations(rank, tmp_path / "count") + 1):
        folder = tmp_path / f"torn-{n}"
        folder.mkdir()
        disks = [FaultyDisk(n if r == rank else 0, torn=True) for r in range(2)]
        made = stores(folder, disks)
        for version in (0, 1):
            assert write(made, version) == [None, None]
        operation, path = disks[rank].log[n - 1]
        plan = find(RunFolder(folder), SPEC.name)
        if operation == "write" and "v000001" in str(path.parent):
            torn += 1
            assert read_back(folder)[0] == 0
            assert [b.path.name for b in plan.broken] == ["v000001"]
            assert any(word in plan.broken[0].reason for word in ("torn", "manifest"))
            line = next(iter(plan.lines()))
            assert "v000001" in line
            assert "v000000 is used instead" in line
            tidy([plan], Disk())
            assert write(stores(folder), 1) == [None, None]
            assert read_back(folder)[0] == 1
        else:
            assert read_back(folder)[0] == 1
    assert torn >= (5 if rank == 0 else 4)


def test_old_checkpoints_are_deleted_as_planned(tmp_path: Path) -> None:
    made = stores(tmp_path)
    config = CheckpointConfig(keep_last=2)
    for version in range(11):
        accuracies = {v: a for v, a in {1: 0.4, 3: 0.9, 6: 0.8}.items() if v < version}
        evaluations = {v: Evaluation(accuracy=a, reward_mean=-a) for v, a in accuracies.items()}
        assert write(made, version, evaluations) == [None, None]
        made[0].delete_old(snapshot_of(version, 0, evaluations), config)
    assert versions_in(RunFolder(tmp_path).adapter_checkpoints(SPEC.name)) == [3, 9, 10]


def test_the_newest_checkpoints_are_by_adapter(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert newest_in(folder.checkpoints) == {}
    for name, versions in {"math": (9, 10), "code.2": (0,), "bare": ()}.items():
        for version in versions:
            version_folder(folder.adapter_checkpoints(name), version).mkdir(parents=True)
        folder.adapter_checkpoints(name).mkdir(parents=True, exist_ok=True)
    assert newest_in(folder.checkpoints) == {"math": 10, "code.2": 0}


def test_a_damaged_newest_one_does_not_count_as_kept(tmp_path: Path) -> None:
    made = stores(tmp_path)
    written(tmp_path, 0, 1, 2, 3)
    (RunFolder(tmp_path).adapter_checkpoints(SPEC.name) / "v000002" / "manifest.json").unlink()
    made[0].delete_old(snapshot_of(3, 0), CheckpointConfig())
    assert versions_in(RunFolder(tmp_path).adapter_checkpoints(SPEC.name)) == [1, 2, 3]


def test_deletions_on_random_histories() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(3000):
        present = sorted(draw.sample(range(60), draw.randint(0, 12)))
        keep_last = draw.randint(2, 4)
        whole = [v for v in present if draw.random() < 0.8]
        sound = whole[-keep_last:]
        accuracies = {v: draw.random() for v in draw.sample(range(60), 8)}
        awaited = set(draw.sample(range(60), 3))
        evaluations = {v: Evaluation(accuracy=a, reward_mean=draw.random()) for v, a in accuracies.items()}
        gone = set(plan_deletions(present, sound, evaluations, awaited))
        left = set(present) - gone
        assert gone <= set(present)
        assert set(whole[-2:]) <= left, "one of the newest two whole ones went"
        if len(whole) < 2:
            assert not gone
            continue
        scored = [v for v in present if v in accuracies]
        best = {max(scored, key=accuracies.__getitem__)} if scored else set()
        newer = {v for v in present if v > whole[-2]}
        assert left == set(present) & (set(sound) | best | awaited | newer)
