"""Shards in stores of two schemes."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest

from areal_lora.engine.vllm_ext.remote import shards
from areal_lora.engine.vllm_ext.remote.shards import ShardStore
from areal_lora.errors import ConfigError, PublishError
from areal_lora.types import AdapterRef

SHARD = np.arange(1000, dtype=np.uint16).view(np.uint8)


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_a_shard_is_stored_once_and_read_from_any_byte_on(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "READ_BYTES", 300)
    url = f"{scheme}://{tmp_path}"

    async def check() -> None:
        store, other = ShardStore(url), ShardStore(url)
        names = await asyncio.gather(
            *(store.put("run", AdapterRef(name="math", version=1), 0, SHARD) for _ in range(3))
        )
        assert len(set(names)) == 1
        for at in (0, 1, 299, 1900):
            parts = [part async for part in other.read(names[0], at, SHARD.nbytes)]
            assert b"".join(parts) == SHARD.tobytes()[at:]
            assert max(map(len, parts)) <= 300
        await store.clear()
        with pytest.raises(PublishError, match=rf"{names[0]}: cat_file: FileNotFoundError"):
            await anext(other.read(names[0], 0, SHARD.nbytes))

    asyncio.run(check())


def test_several_servers_at_once_and_missing_files_disturb_no_version(tmp_path: Path) -> None:
    async def check() -> None:
        store = ShardStore(tmp_path.as_uri())

        async def received(version: int) -> None:
            for source in range(3):
                await store.put("run", AdapterRef(name="math", version=version), source, SHARD)

        for version in range(6):
            await asyncio.gather(*(received(version) for _ in range(4)))
            next(tmp_path.glob(f"*v{version}-1-*")).unlink()
        assert sorted(file.name.split("-")[1] for file in tmp_path.iterdir()) == ["math@v4"] * 2 + ["math@v5"] * 2
        await store.clear()
        assert not [*tmp_path.iterdir()]

    asyncio.run(check())


def test_a_version_that_is_trained_again_replaces_newer_ones(tmp_path: Path) -> None:
    """After a resume: it is one of the last versions, whatever its number, and its bytes have another name."""

    async def check() -> None:
        store = ShardStore(tmp_path.as_uri(), adapters=2)
        for version, shard in ((8, SHARD), (9, SHARD), (5, SHARD[::-1].copy()), (6, SHARD)):
            for name in ("math", "code"):
                await store.put("run", AdapterRef(name=name, version=version), 0, shard)
        files = sorted(file.name.split("-")[1] for file in tmp_path.iterdir())
        assert files == ["code@v5", "code@v6", "math@v5", "math@v6"]
        name = await store.put("run", AdapterRef(name="math", version=6), 0, SHARD[::-1].copy())
        assert await anext(store.read(name, 0, SHARD.nbytes)) == SHARD[::-1].tobytes()

    asyncio.run(check())


def test_shards_of_adapters_that_have_left_do_not_remain(tmp_path: Path) -> None:
    async def check() -> None:
        store = ShardStore(tmp_path.as_uri(), adapters=2)
        for name in ("first", "second", "first", "third", "fourth"):
            for version in range(3):
                await store.put("run", AdapterRef(name=name, version=version), 0, SHARD)
        files = sorted(file.name.split("-")[1] for file in tmp_path.iterdir())
        assert files == ["fourth@v1", "fourth@v2", "third@v1", "third@v2"]

    asyncio.run(check())


@pytest.mark.parametrize(("url", "reason"), [("nowhere://x", "Protocol not known"), ("s3://bucket/x", "s3fs")])
def test_a_scheme_without_its_package_is_wrong_input(url: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match=rf"rollout.remote.store: {url} cannot be opened: .*{reason}"):
        ShardStore(url)
