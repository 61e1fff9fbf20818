"""A version or a saved state of an adapter as a tar of ``adapter_model.safetensors`` and ``adapter_config.json``.

The files are opened before the first byte is sent: what is removed meanwhile is still sent whole. One file alone may be
encrypted to age recipients (https://age-encryption.org/v1), as their owners decrypt it with ``age -d``. Only native
``age1...`` keys: a header with one X25519 stanza for each recipient, then the payload in chunks of 64 KiB
(ChaCha20-Poly1305, keys by HKDF-SHA256).
"""

import asyncio
import base64
import hmac
import io
import os
import secrets
import shutil
import tarfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from areal_lora.checkpoint.recover import NEWEST, Version, pick_version, saved_version
from areal_lora.config.models import Config
from areal_lora.config.recorded import alone, joined
from areal_lora.errors import AdapterError, CheckpointError, ConfigError, RequestError
from areal_lora.run_folder.paths import DesiredAdapter, RunFolder
from areal_lora.service.http import Stream

FILES = ("adapter_config.json", "adapter_model.safetensors")
COMPLETE = "checkpoint_complete"
"""An empty file at the end of an archive; the SDK's command line requires it."""
READ_BYTES = 1 << 20
MAX_DOWNLOADS = 8
EXPORTS = 2  # versions that are exported at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """Open files by their names in the tar, which the opener closes."""

    files: tuple[tuple[str, BinaryIO], ...]

    def one(self, name: str, keys: Sequence[str]) -> Generator[bytes, None, None]:
        """The bytes of one file alone, encrypted to ``keys`` if there are any."""
        file = dict(self.files)[name]
        if keys:
            yield from encrypted(file, keys)
        yield from iter(partial(file.read, READ_BYTES), b"")

    def chunks(self) -> Generator[bytes, None, None]:
        for name, file in self.files:
            info = tarfile.TarInfo(name)
            info.size, info.mode = file.seek(0, 2), 0o644
            file.seek(0)
            yield info.tobuf()
            yield from iter(partial(file.read, READ_BYTES), b"")
            yield b"\0" * (-info.size % tarfile.BLOCKSIZE)
        yield b"\0" * 2 * tarfile.BLOCKSIZE

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
            raise RequestError("version", "this version is not on the disk", error.fix) from None
        reason = "no version is on the disk yet"
        raise RequestError("version", reason, "try again after the first step", status=404) from None
    except (CheckpointError, AdapterError, OSError):  # another one has taken its place, or the disk is full
        raise RequestError("version", "the version cannot be read now", "try again", status=503) from None


def open_archive(run_folder: RunFolder, config: Config, adapter: str, label: str) -> Download:
    """The saved state ``label`` of ``adapter``, as the SDK expects it. Raises RequestError. Blocks."""
    try:
        files = _exported(run_folder, saved_version(run_folder, config, adapter, label), "")
    except (CheckpointError, AdapterError, OSError):  # it is dropped meanwhile, or the disk is full
        raise RequestError("path", "the saved state cannot be read now", "try again", status=503) from None
    return Download(files=(*files, (COMPLETE, io.BytesIO())))


class Downloads:
    """Downloads in progress by tenant, at most `MAX_DOWNLOADS`: each holds files of an adapter's size open."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()
        self._heavy = asyncio.Semaphore(EXPORTS)

    @asynccontextmanager
    async def opened(self, tenant: str, work: Callable[[], Download]) -> AsyncIterator[tuple[Download, ExitStack]]:
        """What ``work`` opens in another thread; it is closed with the stack, at the latest with the block.

        Raises RequestError (429) where the tenant has too many.
        """
        with self.hold(tenant) as held:
            async with self._heavy:
                opened = await asyncio.to_thread(work)
            held.callback(opened.close)
            yield opened, held

    def hold(self, tenant: str) -> ExitStack:
        """A place of ``tenant`` until the stack closes. Raises RequestError (429) where all are taken."""
        if self._open[tenant] >= MAX_DOWNLOADS:
            reason = f"{MAX_DOWNLOADS} downloads are in progress"
            raise RequestError("download", reason, "wait for one", status=429, retry_s=5)
        held = ExitStack()
        self._open[tenant] += 1
        held.callback(self._open.subtract, [tenant])
        return held


def downloaded(
    chunks: Generator[bytes, None, None], held: ExitStack, media_type: str, headers: Mapping[str, str] | None = None
) -> Stream:
    """``chunks``, read in another thread; closes ``held`` at the end, also where the client does not read in time."""

    async def sent() -> AsyncIterator[bytes]:
        try:
            while chunk := await asyncio.to_thread(next, chunks, b""):
                yield chunk
        finally:
            with suppress(ValueError):  # a thread reads the next one; with it the generator ends
                chunks.close()

    return Stream(sent(), held, media_type, headers)


def _exported(run_folder: RunFolder, version: Version, prefix: str) -> tuple[tuple[str, BinaryIO], ...]:
    """Write the PEFT folder into a scratch folder that has no name once its files are open."""
    scratch = run_folder.service_exports / secrets.token_hex(8)
    scratch.parent.mkdir(exist_ok=True)
    try:
        version.export(scratch)
        return tuple((f"{prefix}{file}", (scratch / file).open("rb")) for file in FILES)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


SUFFIX = ".age"
MAX_RECIPIENTS = 10
CHUNK_BYTES = 64 << 10
_STANZA = b"age-encryption.org/v1/X25519"
_LENGTH = 62
_LETTERS = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"


def recipient_key(text: str) -> X25519PublicKey:
    """The key that ``age1...`` names, in Bech32 (BIP 173). Raises RequestError."""
    wrong = RequestError("age_encryption_recipients", f"{text[:80]!r} is no age key", "give keys that start with age1")
    if not text.startswith("age1") or len(text) != _LENGTH:
        raise wrong
    digits = [_LETTERS.find(letter) for letter in text.removeprefix("age1")]
    if min(digits) < 0 or _checksum(digits) != 1:
        raise wrong
    bits = "".join(f"{digit:05b}" for digit in digits[:-6])
    if "1" in bits[256:]:
        raise wrong
    return X25519PublicKey.from_public_bytes(int(bits[:256], 2).to_bytes(32))


def encrypted(file: BinaryIO, recipients: Sequence[str]) -> Iterator[bytes]:
    """The bytes of ``file``, encrypted; the iterator does not close it."""
    key, nonce = os.urandom(16), os.urandom(16)
    lines = b"age-encryption.org/v1\n" + b"".join(_stanza(key, recipient_key(each)) for each in recipients) + b"---"
    mac = hmac.digest(_derived(key, b"", b"header"), lines, "sha256")
    yield lines + b" " + _text(mac) + b"\n" + nonce
    cipher, chunk, number = ChaCha20Poly1305(_derived(key, nonce, b"payload")), file.read(CHUNK_BYTES), 0
    last = False
    while not last:
        following = file.read(CHUNK_BYTES)
        last = not following
        yield cipher.encrypt(number.to_bytes(11) + bytes([last]), chunk, None)
        chunk, number = following, number + 1


def _stanza(key: bytes, recipient: X25519PublicKey) -> bytes:
    own = X25519PrivateKey.generate()
    share = own.public_key().public_bytes_raw()
    wrapping = _derived(own.exchange(recipient), share + recipient.public_bytes_raw(), _STANZA)
    body = ChaCha20Poly1305(wrapping).encrypt(bytes(12), key, None)
    return b"-> X25519 " + _text(share) + b"\n" + _text(body) + b"\n"


def _derived(secret: bytes, salt: bytes, info: bytes) -> bytes:
    return HKDF(SHA256(), length=32, salt=salt, info=info).derive(secret)


def _text(data: bytes) -> bytes:
    return base64.b64encode(data).rstrip(b"=")


def _checksum(digits: Sequence[int]) -> int:
    """1 if the last six of ``digits`` are the checksum of those before them, and of the prefix ``age``."""
    found = 1
    for value in (*(ord(letter) >> 5 for letter in "age"), 0, *(ord(letter) & 31 for letter in "age"), *digits):
        top = found >> 25
        found = (found & 0x1FFFFFF) << 5 ^ value
        for i, word in enumerate((0x3B6A57B2, 0x26508E6D, 0x1EA119FA, 0x3D4233DD, 0x2A1462B3)):
            found ^= word if top >> i & 1 else 0
    return found
