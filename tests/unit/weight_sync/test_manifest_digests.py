from __future__ import annotations

import json
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


RECORDED = {
    "one": "5228aa3b0b06661d1fbd953b5a61b2b4",
    "shards": "a95ef39990ab673d63dc677c78817ba3",
    "others": "0eb0fbf7b794d30a0368955fa06f8dd4",
}


@pytest.mark.parametrize("kind", RECORDED)
def test_only_files_of_weights_count_and_digests_of_checkpoints_stay(tmp_path, kind):
    """``RECORDED`` are digests from before an index was read; checkpoints on disk have such."""
    (tmp_path / "config.json").write_text("{}")
    names = {"one": ["model"], "shards": ["model-1-of-2", "model-2-of-2"], "others": ["b", "a"]}[kind]
    for i, name in enumerate(names):
        (tmp_path / f"{name}.safetensors").write_bytes(bytes([i]) * 1000)
    if kind == "shards":
        index = {"weight_map": {f"w{i}": f"{name}.safetensors" for i, name in enumerate(names)}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert base_digest(tmp_path) == RECORDED[kind]
    (tmp_path / "consolidated.safetensors").write_bytes(b"the same again")
    assert (base_digest(tmp_path) == RECORDED[kind]) == (kind != "others")


def test_a_folder_without_weights_is_an_error(tmp_path):
    with pytest.raises(AdapterError, match="safetensors"):
        base_digest(tmp_path)
