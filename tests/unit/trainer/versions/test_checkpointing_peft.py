"""The exported file against stock safetensors, on real ranks, in every kind of layout; and what it costs in memory."""

from __future__ import annotations

import json
import queue
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_lora.engine.common.transfer_plan import wire_layout
from areal_lora.errors import CheckpointError
from areal_lora.run_folder.paths import RunFolder
from areal_lora.trainer.versions import checkpointing as peft_module
from areal_lora.trainer.versions.checkpointing import export_adapter
from areal_lora.types import ExpertLayout
from areal_lora.weight_sync.layout import AdapterLayout
from tests.support.distributed.spawn import run_ranks
from tests.support.solo_exchange import SoloExchange
from tests.support.trainer.export_ranks import LARGE, SMALL, export_all, lose_a_rank, model, spec, values, whole

PER_EXPERT, SHARED = ExpertLayout.PER_EXPERT, ExpertLayout.SHARED
SIZES = {
    "dp4": {},
    "tp2_ep2": {"tp": 2, "ep": 2},
    "tp4": {"tp": 4},
    "etp2_ep2": {"etp": 2, "ep": 2},
    "tp2_etp2_pp2": {"tp": 2, "etp": 2, "pp": 2},
    "pp4": {"pp": 4},
    "ep4": {"ep": 4},
    "pp2_ep2": {"pp": 2, "ep": 2},
}
CASES = [
    (f"{name}_{experts.value}", SMALL, {"world_size": 4, **sizes}, 3, experts)
    for name, sizes in SIZES.items()
    for experts in (PER_EXPERT, SHARED)
]
LARGE_CASE = ("large", LARGE, {"world_size": 4, "tp": 2, "ep": 2}, 64, PER_EXPERT)
BEYOND_BYTES = 64 << 20
"""What an export may hold beyond the trained state."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("export")
    return folder, run_ranks(export_all, 4, folder, (folder, [*CASES, LARGE_CASE]), timeout_s=200.0)


def parsed(path: Path) -> tuple[dict[str, Any], bytes]:
    """(header, data)"""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0, "tensors are not aligned"
    return json.loads(content[8 : 8 + length]), content[8 + length :]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_the_file_is_what_stock_safetensors_writes(ranks: Any, tmp_path: Path, case: Any) -> None:
    name, dims, _, rank, experts = case
    written = ranks[0] / name / "adapters" / "a"
    assert sorted(path.name for path in written.parent.iterdir()) == ["a"]
    assert sorted(path.name for path in written.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    header, data = parsed(written / "adapter_model.safetensors")
    save_file(whole(dims, rank, experts), tmp_path / "stock", metadata=header["__metadata__"])
    assert (header, data) == parsed(tmp_path / "stock")
    assert json.loads((written / "adapter_config.json").read_text())["r"] == rank


@pytest.mark.slow
def test_a_large_adapter_takes_little_memory_on_every_rank(ranks: Any) -> None:
    folder, grown = ranks
    name, dims, _, rank, experts = LARGE_CASE
    want = whole(dims, rank, experts)
    nbytes = sum(t.numel() * 4 for t in want.values())
    print(f"file {nbytes / 2**20:.0f} MiB; growth by rank {[round(g[name] / 2**20, 1) for g in grown]} MiB")
    assert nbytes > 256 << 20
    assert max(g[name] for g in grown) < BEYOND_BYTES
    found = load_file(folder / name / "adapters" / "a" / "adapter_model.safetensors")
    assert found.keys() == want.keys()
    assert all(torch.equal(found[key], want[key]) for key in want)


@pytest.mark.slow
def test_a_rank_that_is_gone_is_named_instead_of_waited_for(tmp_path: Path) -> None:
    said = run_ranks(lose_a_rank, 2, tmp_path, (tmp_path,), timeout_s=200.0)[0]
    assert said.startswith("trainer rank 0: a trainer rank has ended or is late (")


class PlainEngine:
    """An engine without tensor parallelism; its weights are those of `values` times ``factor``."""

    def __init__(self, rank: int, sizes: dict[str, int], factor: float = 1.0) -> None:
        self._rank, self._factor, self.ended = rank, factor, False
        self._layout = wire_layout(model(SMALL, sizes), spec(3, SHARED), "float32")

    def adapter_layout(self, adapter: str) -> AdapterLayout:
        return self._layout

    def export_adapter(self, adapter: str) -> Iterator[tuple[str, torch.Tensor]]:
        for t in next((s.tensors for s in self._layout.shards if s.source == self._rank), ()):
            yield t.name, self._factor * values(t.name, t.shape)
        self.ended = True


class Wires:
    """What ranks as threads send each other: `Exchange` without processes."""

    def __init__(self, rank: int, sent: dict[int, queue.Queue[np.ndarray]]) -> None:
        self.rank, self._sent = rank, sent

    def send(self, data: np.ndarray, to: int) -> None:
        assert to == 0
        self._sent[self.rank].put(data.copy())

    def receive(self, room: np.ndarray, source: int) -> None:
        room[:] = self._sent[source].get(timeout=120.0)


@pytest.mark.parametrize("sizes", [{}, {"pp": 4}, {"pp": 2, "ep": 2}], ids=str)
def test_every_rank_sends_its_shard_and_one_without_a_shard_runs_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]
) -> None:
    monkeypatch.setattr(peft_module, "CHUNK_BYTES", 4000)  # several tensors a chunk, several chunks a shard
    sizes = {"world_size": 4, **sizes}
    sent = {rank: queue.Queue[np.ndarray]() for rank in range(4)}
    engines = [PlainEngine(rank, sizes) for rank in range(4)]
    adapter: Any = SimpleNamespace(name="a", spec=spec(3, SHARED), base_commit=None)

    def run(rank: int) -> Path:
        exchange: Any = Wires(rank, sent)
        return export_adapter(engines[rank], adapter, exchange, RunFolder(tmp_path))  # type: ignore[arg-type]

    with ThreadPoolExecutor(4) as pool:
        [folder] = set(pool.map(run, range(4)))
    assert all(engine.ended for engine in engines)
    assert all(wire.empty() for wire in sent.values())
    found, want = load_file(folder / "adapter_model.safetensors"), whole(SMALL, 3, SHARED)
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)


def export(folder: Path, factor: float) -> Path:
    engine: Any = PlainEngine(0, {"world_size": 1}, factor)
    adapter: Any = SimpleNamespace(name="a", spec=spec(3, SHARED), base_commit=None)
    return export_adapter(engine, adapter, SoloExchange(), RunFolder(folder))


def test_a_later_export_replaces_the_earlier_one_and_what_a_crash_left(tmp_path: Path) -> None:
    export(tmp_path, 1.0)
    (tmp_path / "adapters" / ".a.x1y2z3").mkdir()
    folder = export(tmp_path, 2.0)
    found = load_file(folder / "adapter_model.safetensors")
    assert all(torch.equal(found[name], 2.0 * tensor) for name, tensor in whole(SMALL, 3, SHARED).items())
    assert [path.name for path in folder.parent.iterdir()] == ["a"]


def test_a_full_disk_is_one_clear_line_and_leaves_the_earlier_export(tmp_path: Path) -> None:
    folder = export(tmp_path, 1.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"adapters/a: the adapter cannot be written: File too large \(fix: "):
            export(tmp_path, 2.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    found = load_file(folder / "adapter_model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in whole(SMALL, 3, SHARED).items())
    assert [path.name for path in folder.parent.iterdir()] == ["a"]
