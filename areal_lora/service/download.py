"""A version or a saved state of an adapter as a tar of ``adapter_model.safetensors`` and ``adapter_config.json``.

The files are opened before the first byte is sent: what is removed meanwhile is still sent whole.
"""

from __future__ import annotations

import asyncio
import io
import secrets
import shutil
import tarfile
from collections import Counter
from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import BinaryIO

from areal_lora.checkpoint.recover import NEWEST, Version, pick_version, saved_version
from areal_lora.config.models import Config
from areal_lora.config.recorded import alone, joined
from areal_lora.errors import AdapterError, CheckpointError, ConfigError
from areal_lora.run_folder.desired import DesiredAdapter
from areal_lora.run_folder.paths import RunFolder
from areal_lora.service.http import Stream
from areal_lora.service.observed import encrypted
from areal_lora.service.refused import RequestError

FILES = ("adapter_config.json", "adapter_model.safetensors")
COMPLETE = "checkpoint_complete"
"""An empty file at the end of an archive; the SDK's command line requires it."""
CHUNK_BYTES = 1 << 20
MAX_DOWNLOADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """Open files by their names in the tar. ``chunks`` closes them."""

    files: tuple[tuple[str, BinaryIO], ...]

    def one(self, name: str, keys: Sequence[str]) -> Generator[bytes, None, None]:
        """The bytes of one file alone, encrypted to ``keys`` if there are any; all are closed."""
        try:
            file = dict(self.files)[name]
            if keys:
                yield from encrypted(file, keys)
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
        finally:
            self.close()

    def chunks(self) -> Generator[bytes, None, None]:
        try:
            for name, file in self.files:
                info = tarfile.TarInfo(name)
                info.size, info.mode = file.seek(0, 2), 0o644
                file.seek(0)
                yield info.tobuf()
                while chunk := file.read(CHUNK_BYTES):
                    yield chunk
                yield b"\0" * (-info.size % tarfile.BLOCKSIZE)
            yield b"\0" * 2 * tarfile.BLOCKSIZE
        finally:
            self.close()

    def close(self) -> None:
        for _, file in self.files:
            file.close()


def open_download(run_folder: RunFolder, config: Config, desired: DesiredAdapter, name: str, version: str) -> Download:
    """A version of the adapter, in a folder called ``name``. Raises RequestError. Blocks."""
    adapter = joined(config, desired)
    try:
        picked = pick_version(run_folder, alone(config, adapter), version or NEWEST, desired.key)
        return Download(files=_exported(run_folder, picked, f"{name}/"))
    except ConfigError as error:
        if error.path.startswith("--version"):
            raise RequestError(422, "version", "this version is not on the disk", error.fix) from None
        raise RequestError(404, "version", "no version is on the disk yet", "try again after the first step") from None
    except (CheckpointError, AdapterError, FileNotFoundError):  # another one has taken its place meanwhile
        raise RequestError(503, "version", "the version cannot be read now", "try again") from None


def open_archive(run_folder: RunFolder, config: Config, adapter: str, label: str) -> Download:
    """The saved state ``label`` of ``adapter``, as the SDK expects it. Raises RequestError. Blocks."""
    try:
        files = _exported(run_folder, saved_version(run_folder, config, adapter, label), "")
    except (CheckpointError, AdapterError, OSError):  # it is dropped meanwhile, or the disk is full
        raise RequestError(503, "path", "the saved state cannot be read now", "try again") from None
    return Download(files=(*files, (COMPLETE, io.BytesIO())))


class Downloads:
    """Downloads in progress by tenant, at most `MAX_DOWNLOADS`: each holds files of an adapter's size open."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()

    def hold(self, tenant: str) -> ExitStack:
        """A place of ``tenant`` until the stack closes. Raises RequestError (429) where all are taken."""
        if self._open[tenant] >= MAX_DOWNLOADS:
            raise RequestError(429, "download", f"{MAX_DOWNLOADS} downloads are in progress", "wait for one", retry_s=5)
        self._open[tenant] += 1
        held = ExitStack()
        held.callback(self._leave, tenant)
        return held

    def _leave(self, tenant: str) -> None:
        self._open[tenant] -= 1
        if not self._open[tenant]:
            del self._open[tenant]


def downloaded(
    chunks: Generator[bytes, None, None], held: ExitStack, media_type: str, headers: Mapping[str, str] | None = None
) -> Stream:
    """``chunks``; closes ``held`` at the end, also where the client does not read them in time."""
    return Stream(_sent(chunks), held, media_type, headers)


async def _sent(chunks: Generator[bytes, None, None]) -> AsyncIterator[bytes]:
    """``chunks``, read in another thread."""
    try:
        while chunk := await asyncio.to_thread(next, chunks, b""):
            yield chunk
    finally:
        with suppress(ValueError):  # a thread reads the next one; with it the generator ends
            chunks.close()


def _exported(run_folder: RunFolder, version: Version, prefix: str) -> tuple[tuple[str, BinaryIO], ...]:
    """Write the PEFT folder into a scratch folder that has no name once its files are open."""
    scratch = run_folder.service_exports / secrets.token_hex(8)
    scratch.parent.mkdir(exist_ok=True)
    try:
        version.export(scratch)
        return tuple((f"{prefix}{file}", (scratch / file).open("rb")) for file in FILES)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def forget_exports(run_folder: RunFolder) -> None:
    """Remove what downloads of an earlier process have put down."""
    shutil.rmtree(run_folder.service_exports, ignore_errors=True)
