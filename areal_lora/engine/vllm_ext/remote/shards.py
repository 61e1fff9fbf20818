"""Packed shards on their way to remote servers: over HTTP, or through an object store or shared folder.

    frame = uint32 bytes of a part | uint32 bytes of what follows | zstd(planes(part xor base))

Over HTTP a shard is a stream of frames, sent as its parts arrive. ``base`` is an earlier version that both sides hold,
else zeros. Planes hold the first byte of all numbers, then the second, and so on: exponents, which seldom change, meet.
Neither way is trusted: workers compare fingerprints of what results.
"""

import asyncio
import contextlib
import struct
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary

import aiohttp
import numpy as np
import pyarrow as pa
from fsspec.core import url_to_fs

from areal_lora.errors import ConfigError, PublishError
from areal_lora.processes.log import get_logger
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.manifest import SEAL_BYTES
from areal_lora.weight_sync.trainer.publish_job import PackedShard

HEAD = struct.Struct("<II")
PART_BYTES = 1 << 20
FRAME_BYTES = 2 * PART_BYTES
"""No body is longer: zstd adds less than 1 % to bytes that it cannot compress."""
_CODEC = pa.Codec("zstd", compression_level=1)
READ_BYTES = 64 << 20
STORED = 2
"""Versions of an adapter that remain: a late server may still fetch the one before the newest."""
RETRY_S = 0.5

log = get_logger(__name__)


def frame(part: np.ndarray, base: np.ndarray | None, item_bytes: int) -> bytes:
    """Of a part and the same bytes of its base (uint8 [n]); numbers have ``item_bytes``."""
    body: bytes = _CODEC.compress(_planes(part if base is None else part ^ base, item_bytes), asbytes=True)
    return HEAD.pack(len(part), len(body)) + body


def part_of(body: bytes, nbytes: int, base: np.ndarray | None, item_bytes: int) -> np.ndarray:
    """The part (uint8 [nbytes]) of a frame; zeros, which workers refuse, where the body is damaged."""
    try:
        planes = np.frombuffer(_CODEC.decompress(body, nbytes), dtype=np.uint8)
    except (OSError, ValueError):
        return np.zeros(nbytes, dtype=np.uint8)
    whole = nbytes // item_bytes * item_bytes
    part: np.ndarray = np.concatenate([planes[:whole].reshape(item_bytes, -1).T.ravel(), planes[whole:]])
    return part if base is None else part ^ base


def _planes(part: np.ndarray, item_bytes: int) -> np.ndarray:
    whole = len(part) // item_bytes * item_bytes
    return np.concatenate([part[:whole].reshape(-1, item_bytes).T.ravel(), part[whole:]])


def seal_of(shard: np.ndarray) -> str:
    """What names a packed shard (uint8 [nbytes], trailer included): equal seals are equal bytes."""
    return shard[-SEAL_BYTES:].tobytes().hex()


class ArrivingShard:
    """``memory`` (uint8 [nbytes]) of a packed shard that several groups deliver: each byte is written once."""

    def __init__(self, nbytes: int) -> None:
        self.memory, self._written, self._lock = np.zeros(nbytes, dtype=np.uint8), 0, threading.Lock()

    def place(self, start: int, part: np.ndarray) -> bool:
        """Store ``part`` (uint8 [n]), after all that lies before it; False if it differs from what is there."""
        with self._lock:
            known = min(max(0, self._written - start), len(part))
            self.memory[start + known : start + len(part)] = part[known:]
            self._written += len(part) - known
        blocks = (slice(at, min(at + PART_BYTES, known)) for at in range(0, known, PART_BYTES))
        return all(np.array_equal(self.memory[start:][block], part[block]) for block in blocks)


class ShardBases:
    """The last ``versions`` shards of each source, of the last ``adapters`` adapters, and those that arrive."""

    def __init__(self, adapters: int, versions: int = 1) -> None:
        self._adapters, self._versions = adapters, versions
        self._kept = dict[str, defaultdict[int, dict[str, np.ndarray]]]()
        self._arriving = WeakValueDictionary[tuple[AdapterRef, int, int], ArrivingShard]()

    def arriving(self, ref: AdapterRef, source: int, nbytes: int) -> ArrivingShard:
        """That of all servers which receive it at this time."""
        return self._arriving.setdefault((ref, source, nbytes), ArrivingShard(nbytes))

    def keep(self, adapter: str, source: int, shard: np.ndarray) -> None:
        """``shard`` (uint8 [nbytes]) is complete and does not change any more."""
        sources = self._kept[adapter] = self._kept.pop(adapter, defaultdict(dict))
        sources[source].setdefault(seal_of(shard), shard)
        if len(sources[source]) > self._versions:
            del sources[source][next(iter(sources[source]))]
        if len(self._kept) > self._adapters:
            del self._kept[next(iter(self._kept))]

    def newest(self, adapter: str, source: int, nbytes: int) -> np.ndarray | None:
        """The last shard, if it is one of ``nbytes``."""
        shards = [*self._of(adapter, source).values()][-1:]
        return next((shard for shard in shards if len(shard) == nbytes), None)

    def find(self, adapter: str, source: int, nbytes: int, seal: str) -> np.ndarray | None:
        """The shard with this ``seal``, if it is kept and one of ``nbytes``."""
        shard = self._of(adapter, source).get(seal)
        return shard if shard is not None and len(shard) == nbytes else None

    def _of(self, adapter: str, source: int) -> dict[str, np.ndarray]:
        sources = self._kept.get(adapter)
        return {} if sources is None else sources.get(source, {})


class ShardStore:
    """Shards in files of the folder ``url``, which exists; its scheme is one of fsspec's.

    It holds those of the last ``adapters`` adapters, ``STORED`` versions of each.

    Raises ConfigError where the package of the scheme is not installed. Methods raise PublishError for every error
    of the file system.
    """

    def __init__(self, url: str, adapters: int = 1) -> None:
        self._url, self._adapters = url.rstrip("/"), adapters
        try:
            self._files, self._root = url_to_fs(self._url)
        except (ImportError, ValueError) as error:
            fix = "install the fsspec package of this scheme here, such as areal_lora[s3]"
            raise ConfigError("rollout.remote.store", f"{url} cannot be opened: {error}", fix) from None
        self._uploads: dict[tuple[AdapterRef, str], asyncio.Task[None]] = {}

    async def put(self, run: str, ref: AdapterRef, source: int, memory: np.ndarray) -> str:
        """Store a shard (uint8 [nbytes], trailer included) once, whatever the servers, and return its name.

        Removes versions that it holds no more.
        """
        name = f"{run}-{ref}-{source}-{seal_of(memory)}"
        if (ref, name) not in self._uploads:
            upload = self._call("pipe_file", name, memory.tobytes())
            self._uploads[ref, name] = asyncio.create_task(upload)
        try:
            await asyncio.shield(self._uploads[ref, name])
        except PublishError:
            self._uploads.pop((ref, name), None)
            raise
        held = defaultdict[str, dict[AdapterRef, None]](dict)
        for each, _ in reversed(self._uploads):
            held[each.name][each] = None
        latest = {each for versions in [*held.values()][: self._adapters] for each in [*versions][:STORED]}
        await self._remove([key for key in self._uploads if key[0] not in latest])
        return name

    async def read(self, name: str, at: int, nbytes: int) -> AsyncIterator[bytes]:
        """Yield the bytes of a shard of ``nbytes`` from ``at`` on."""
        for start in range(at, nbytes, READ_BYTES):
            yield await self._call("cat_file", name, start=start, end=min(start + READ_BYTES, nbytes))

    async def clear(self) -> None:
        """Remove what this process has stored."""
        await self._remove([*self._uploads])

    async def _remove(self, keys: Iterable[tuple[AdapterRef, str]]) -> None:
        """Without errors: what cannot be removed remains."""
        for key in keys:
            if self._uploads.pop(key, None) is not None:  # else another server's transfer removes it
                try:
                    await self._call("rm_file", key[1])
                except PublishError as error:
                    log.warning("%s", error)

    async def _call(self, method: str, name: str, *arguments: Any, **how: Any) -> Any:
        call = asyncio.to_thread(getattr(self._files, method), f"{self._root}/{name}", *arguments, **how)
        found: Any
        [found] = await asyncio.gather(call, return_exceptions=True)  # fault boundary: schemes have errors of their own
        if isinstance(found, BaseException):
            raise PublishError(f"{self._url}/{name}: {method}: {found!r}")
        return found


def open_store(url: str | None, adapters: int = 1) -> ShardStore | None:
    return None if url is None else ShardStore(url, adapters)


class IncomingShard:
    """``memory`` (uint8 [nbytes]) and ``shard`` have received bytes up to ``at``; ``base`` is an earlier shard."""

    def __init__(self, shard: PackedShard, nbytes: int, item_bytes: int, base: np.ndarray | None) -> None:
        self.shard, self.nbytes, self.item_bytes, self.base = shard, nbytes, item_bytes, base
        self.memory, self.at = np.empty(nbytes, dtype=np.uint8), 0

    def place(self, part: bytes) -> None:
        end = self.at + len(part)
        self.memory[self.at : end] = np.frombuffer(part, dtype=np.uint8)
        self.shard.place(self.at, part)
        self.at = end


async def fetch(
    opened: Callable[..., Any], path: str, coming: IncomingShard, deadline: float, store: ShardStore | None
) -> None:
    """Fetch the shard at ``path`` of the gateway, or ``store``; a broken connection continues where it ended.

    Raises PublishError at the ``deadline``, or for a shard that does not arrive at the gateway or in the store.
    """
    base = "" if coming.base is None else seal_of(coming.base)
    broken = (aiohttp.ClientError, asyncio.IncompleteReadError, TimeoutError)
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            while coming.at < coming.nbytes:
                with contextlib.suppress(*broken):
                    async with opened("GET", path, params={"at": coming.at, "base": base}) as response:
                        if store is None:
                            await _receive(response.content, coming, differs=response.status == 226)
                        else:
                            name = await response.text()
                            async for part in store.read(name, coming.at, coming.nbytes):
                                coming.place(part)
                if coming.at < coming.nbytes:
                    await asyncio.sleep(RETRY_S)
    except TimeoutError:
        raise PublishError(f"{coming.at} of {coming.nbytes} bytes of a shard have arrived in time") from None


async def _receive(content: aiohttp.StreamReader, coming: IncomingShard, *, differs: bool) -> None:
    """Frames until the shard is complete; of its difference to ``coming.base``, or of its own bytes."""
    while coming.at < coming.nbytes:
        size, length = HEAD.unpack(await content.readexactly(HEAD.size))
        if not 0 < size <= min(PART_BYTES, coming.nbytes - coming.at) or length > FRAME_BYTES:
            raise aiohttp.ClientPayloadError("a frame with a wrong head")
        base = coming.base[coming.at : coming.at + size] if differs and coming.base is not None else None
        coming.place(part_of(await content.readexactly(length), size, base, coming.item_bytes).tobytes())
