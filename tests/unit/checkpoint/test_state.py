"""Manifests and rank files: what was written is read, and any flipped bit of a manifest is noticed."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from areal_lora.checkpoint import state
from areal_lora.checkpoint.state import (
    FORMAT,
    PARTS,
    AdapterState,
    Disk,
    Evaluation,
    best_version,
    decode_manifest,
    encode_manifest,
    file_parts,
    read_files,
)
from areal_lora.errors import CheckpointError
from tests.support.checkpoint.helpers import manifest_of, state_of, tensors_of


def test_a_manifest_comes_back() -> None:
    manifest = manifest_of(3, {1: Evaluation(accuracy=0.5, reward_mean=0.25)})
    assert decode_manifest(encode_manifest(manifest)) == manifest


def test_no_flipped_bit_of_a_manifest_goes_unnoticed() -> None:
    data = encode_manifest(manifest_of(3, {1: Evaluation(accuracy=0.5, reward_mean=0.25)}))
    for at in range(len(data)):
        for bit in (0x01, 0x20, 0x80):
            damaged = bytearray(data)
            damaged[at] ^= bit
            with pytest.raises(CheckpointError):
                decode_manifest(bytes(damaged))


def test_half_a_manifest_and_another_format_are_refused() -> None:
    data = encode_manifest(manifest_of(3))
    for part in (b"", data[: len(data) // 2], b"null", b"\xff\xfe"):
        with pytest.raises(CheckpointError):
            decode_manifest(part)
    other = encode_manifest(msgspec.structs.replace(manifest_of(3), format=FORMAT + 1))
    with pytest.raises(CheckpointError, match=f"format {FORMAT + 1}, this version reads {FORMAT}"):
        decode_manifest(other)


@pytest.mark.parametrize(
    ("figures", "best"),
    [
        ({}, None),
        ({0: (0.2, 0.9), 5: (0.6, 0.1), 10: (0.4, 0.8)}, 5),  # accuracy, whatever the rewards are
        ({0: (0.5, 0.1), 5: (0.5, 0.3), 10: (0.5, 0.2)}, 5),  # of equals the reward
        ({0: (0.5, 0.3), 5: (0.5, 0.3), 10: (0.4, 0.9)}, 5),  # of equals the newest
        ({0: (None, -0.7), 5: (None, -0.2), 10: (None, -0.5)}, 5),  # no rule: the reward, negative or not
        ({0: (None, 0.9), 5: (0.0, 0.1), 10: (0.0, 0.0)}, 5),  # the rule is new
        ({0: (0.9, 0.1), 5: (None, 0.3), 10: (None, 0.2)}, 5),  # the rule is gone
    ],
)
def test_the_best_version_is_that_of_the_highest_accuracy_or_else_reward(
    figures: dict[int, tuple[float | None, float]], best: int | None
) -> None:
    evaluations = {v: Evaluation(accuracy=a, reward_mean=r) for v, (a, r) in figures.items()}
    assert best_version(evaluations) == best


def test_figures_of_another_measure_than_the_newest_do_not_count() -> None:
    figures = {20: (0.9, "easy"), 40: (0.3, "hard"), 60: (0.55, "hard"), 80: (0.35, "hard")}
    evaluations = {v: Evaluation(accuracy=a, reward_mean=a, measure=m) for v, (a, m) in figures.items()}
    assert best_version(evaluations) == 60
    assert best_version({v: evaluations[v] for v in (20, 40)}) == 40
    unknown = evaluations | {20: Evaluation(accuracy=0.9, reward_mean=0.9)}
    assert best_version(unknown) == 20, "of a manifest without measures"


def test_stock_safetensors_reads_a_rank_file_and_so_do_we(tmp_path: Path) -> None:
    paths = []
    for rank in range(2):
        paths.append(tmp_path / f"{rank}.safetensors")
        Disk().write(paths[-1], file_parts(state_of(1, rank)))
    stock = load_file(paths[0]) | load_file(paths[1])
    ours = read_files(paths)
    want = {part: tensors_of(state_of(1, 0))[part] | tensors_of(state_of(1, 1))[part] for part in PARTS}
    assert {f"{p}/{n}" for p in PARTS for n in want[p]} == stock.keys()
    for part in PARTS:
        assert ours[part].keys() == want[part].keys()
        for name, tensor in want[part].items():
            assert np.array_equal(stock[f"{part}/{name}"], tensor)
            assert np.array_equal(ours[part][name], tensor)


def test_a_tensor_in_two_files_and_garbage_are_errors(tmp_path: Path) -> None:
    one, two, garbage = (tmp_path / name for name in ("one", "two", "garbage"))
    for path in (one, two):
        Disk().write(path, file_parts(state_of(1, 0)))
    garbage.write_bytes(b"\x10" + bytes(7) + b"no json here....")
    with pytest.raises(CheckpointError, match="is in another file"):
        read_files([one, two])
    with pytest.raises(CheckpointError, match="not a file of a checkpoint"):
        read_files([garbage])


def test_views_lie_where_the_shapes_say() -> None:
    flat = np.arange(6, dtype=np.float32)
    state = AdapterState(step=0, shapes={"a": (2, 2), "b": (1, 2)}, parts=dict.fromkeys(PARTS, flat))
    assert tensors_of(state)["weight"]["a"].tolist() == [[0, 1], [2, 3]]
    assert tensors_of(state)["exp_avg"]["b"].tolist() == [[4, 5]]


def test_a_file_is_synced_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no sync has much to write, whatever the size of the file."""
    monkeypatch.setattr(state, "CHUNK_BYTES", 10)
    sizes: list[int] = []
    monkeypatch.setattr(state.os, "fdatasync", lambda fd: sizes.append(os.fstat(fd).st_size))
    entry = Disk().write(tmp_path / "file", [b"x" * 205])
    assert entry.nbytes == 205
    assert sizes == [40 * n for n in range(1, 6)]
