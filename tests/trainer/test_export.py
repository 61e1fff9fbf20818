"""The exported file against stock safetensors, on real ranks, in every kind of layout; and what it costs in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_lora.types import ExpertLayout
from tests.distributed.spawn import run_ranks

from .export_ranks import LARGE, SMALL, export_all, whole

pytestmark = pytest.mark.slow

PER_EXPERT, SHARED = ExpertLayout.PER_EXPERT, ExpertLayout.SHARED
SIZES = {
    "dp4": {}, "tp2_ep2": {"tp": 2, "ep": 2}, "tp4": {"tp": 4}, "etp2_ep2": {"etp": 2, "ep": 2},
    "tp2_etp2_pp2": {"tp": 2, "etp": 2, "pp": 2}, "pp4": {"pp": 4}, "ep4": {"ep": 4}, "pp2_ep2": {"pp": 2, "ep": 2},
}  # fmt: skip
CASES = [
    (f"{name}_{experts.value}", SMALL, {"world_size": 4, **sizes}, 3, experts)
    for name, sizes in SIZES.items() for experts in (PER_EXPERT, SHARED)
]  # fmt: skip
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
