from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import save_file

from areal_lora.errors import AdapterError
from areal_lora.weight_sync import manifest
from areal_lora.weight_sync.manifest import base_digest


def make_base(folder, seed=0, config="{}"):
    folder.mkdir()
    (folder / "config.json").write_text(config)
    g = torch.Generator().manual_seed(seed)
    save_file({"w": torch.randn(3000, 400, generator=g)}, folder / "model.safetensors")
    return folder


def test_equal_folders_agree_and_different_ones_do_not(tmp_path):
    one = base_digest(make_base(tmp_path / "one"))
    assert one == base_digest(make_base(tmp_path / "two words"))
    assert one != base_digest(make_base(tmp_path / "three", seed=1))
    assert one != base_digest(make_base(tmp_path / "four", config='{"x": 1}'))


@pytest.mark.parametrize("limit", [1 << 30, 0])
def test_a_changed_weight_is_seen(tmp_path, monkeypatch, limit):
    """``limit`` 0 takes the sampling path of big checkpoints; blocks of 1 KiB leave most of the file unsampled."""
    monkeypatch.setattr(manifest, "FULL_HASH_LIMIT_BYTES", limit)
    monkeypatch.setattr(manifest, "SAMPLE_BYTES", 1024)
    folder = make_base(tmp_path / "m")
    before = base_digest(folder)
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(1, 1))
    assert base_digest(folder) != before


def test_a_folder_without_weights_is_an_error(tmp_path):
    with pytest.raises(AdapterError, match="safetensors"):
        base_digest(tmp_path)
