"""Names under which clients find the base of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_lora.errors import RequestError
from areal_lora.service.tinker.sample_tasks import Base
from tests.support.service.running import service_config


def base_in(tmp_path: Path, folder: Path) -> Base:
    folder.mkdir(parents=True, exist_ok=True)
    config = service_config(tmp_path / "run", port=0)
    return Base.of(config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})}))


def test_a_folder_of_the_hubs_name_has_that_name_too(tmp_path: Path) -> None:
    """Recipes look up renderers and tokenizers by it."""
    linked = tmp_path / "Qwen" / "Qwen3-8B-Base"
    (tmp_path / "real").mkdir()
    linked.parent.mkdir()
    linked.symlink_to(tmp_path / "real")
    base = base_in(tmp_path, linked)
    assert (base.name, base.tokenizer) == ("real", str(tmp_path / "real"))
    for name in (None, "real", "Qwen3-8B-Base", "Qwen/Qwen3-8B-Base", str(linked), str(tmp_path / "real")):
        base.check(name)
    with pytest.raises(RequestError):
        base.check("Qwen/Qwen3-8B")


def test_a_snapshot_of_the_hubs_cache_has_the_hubs_name(tmp_path: Path) -> None:
    base = base_in(tmp_path, tmp_path / "hub" / "models--Qwen--Qwen3-8B" / "snapshots" / "0123abcd")
    assert base.name == "Qwen/Qwen3-8B"
    base.check("Qwen/Qwen3-8B")
