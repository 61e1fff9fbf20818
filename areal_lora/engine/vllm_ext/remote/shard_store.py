"""Packed shards in an object store or a shared folder, from the gateway to remote servers: ``rollout.remote.store``.

A shard's name ends in its seal, so equal names are equal bytes. The store is not trusted: workers compare fingerprints.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import numpy as np
from fsspec.core import url_to_fs

from areal_lora.errors import ConfigError, PublishError
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.manifest import SEAL_BYTES

PART_BYTES = 64 << 20
KEPT = 2
"""Versions of an adapter that remain: a late server may still fetch the one before the newest."""


class ShardStore:
    """Files under ``url``, whose scheme is one of fsspec's. Raises ConfigError where its package is not installed.

    Methods raise PublishError for every error of the file system.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        try:
            self._files, self._root = url_to_fs(self._url)
        except (ImportError, ValueError) as error:
            fix = "install the fsspec package of this scheme here, such as areal_lora[s3]"
            raise ConfigError("rollout.remote.store", f"{url} cannot be opened: {error}", fix) from None
        self._uploads: dict[tuple[AdapterRef, str], asyncio.Task[None]] = {}

    async def put(self, run: str, ref: AdapterRef, source: int, memory: np.ndarray) -> str:
        """Store a shard (uint8 [nbytes], trailer included) once, whatever the servers, and return its name.

        Removes versions older than the last ``KEPT`` of this adapter.
        """
        name = f"{run}/{ref}-{source}-{memory[-SEAL_BYTES:].tobytes().hex()}"
        if (ref, name) not in self._uploads:
            self._uploads[ref, name] = asyncio.create_task(self._write(name, memory))
        try:
            await asyncio.shield(self._uploads[ref, name])
        except PublishError:
            self._uploads.pop((ref, name), None)
            raise
        latest = [*dict.fromkeys(each for each, _ in reversed(self._uploads) if each.name == ref.name)]
        await self._remove([key for key in self._uploads if key[0] in latest[KEPT:]])
        return name

    async def read(self, name: str, at: int, nbytes: int) -> AsyncIterator[bytes]:
        """Yield the bytes of a shard of ``nbytes`` from ``at`` on."""
        for start in range(at, nbytes, PART_BYTES):
            yield await self._call("cat_file", name, start=start, end=min(start + PART_BYTES, nbytes))

    async def clear(self) -> None:
        """Remove what this process has stored."""
        await self._remove([*self._uploads])

    async def _write(self, name: str, memory: np.ndarray) -> None:
        await self._call("makedirs", name.rpartition("/")[0], exist_ok=True)
        await self._call("pipe_file", name, memory.tobytes())

    async def _remove(self, keys: Iterable[tuple[AdapterRef, str]]) -> None:
        for key in keys:
            del self._uploads[key]
            await self._call("rm_file", key[1])

    async def _call(self, method: str, name: str, *arguments: Any, **how: Any) -> Any:
        call = asyncio.to_thread(getattr(self._files, method), f"{self._root}/{name}", *arguments, **how)
        found: Any
        [found] = await asyncio.gather(call, return_exceptions=True)  # fault boundary: schemes have errors of their own
        if isinstance(found, BaseException):
            raise PublishError(f"{self._url}/{name}: {method}: {found!r}")
        return found


def open_store(url: str | None) -> ShardStore | None:
    return None if url is None else ShardStore(url)
