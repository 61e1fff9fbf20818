"""What the run has: the records of ``metrics.jsonl`` by adapter, read as they come.

Files encrypted to age recipients (https://age-encryption.org/v1), as their owners decrypt them with ``age -d``.

Only what a sender needs, and only native ``age1...`` keys: header with one X25519 stanza for each recipient, then the
payload in chunks of 64 KiB (ChaCha20-Poly1305, keys by HKDF-SHA256).
"""

from __future__ import annotations

import base64
import hmac
import os
from array import array
from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import msgspec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from areal_lora.obs.metrics.records import AdapterStateRecord, CheckpointRecord, PublishRecord, ResumeRecord, StepRecord
from areal_lora.run_folder.paths import RunFolder
from areal_lora.service.refused import RequestError
from areal_lora.types import AdapterPhase

READ_BYTES = 4 << 20
PAGE = 1000
"""Most records of one answer."""


class _Head(msgspec.Struct, frozen=True):
    kind: str
    adapter: str = ""


_head = msgspec.json.Decoder(_Head).decode
_state = msgspec.json.Decoder(AdapterStateRecord | StepRecord | PublishRecord | CheckpointRecord | ResumeRecord).decode
_KINDS = ("state", "step", "publish", "checkpoint", "resume")


@dataclass(slots=True)
class ObservedAdapter:
    """One adapter of the run. ``places`` are the offsets of its lines, ``states`` those of its newest state records.

    ``version`` is the newest one that servers hold, ``checkpoint`` the newest one written since the last resume.
    """

    phase: AdapterPhase | None = None
    reason: str = ""
    step: StepRecord | None = None
    version: int | None = None
    checkpoint: int | None = None
    places: array[int] = field(default_factory=lambda: array("Q"))
    states: deque[int] = field(default_factory=lambda: deque(maxlen=PAGE))


class RunObserver:
    """Follows one file. ``look`` reads what has come; the rest answers from memory and, for lines, from the file."""

    def __init__(self, run_folder: RunFolder) -> None:
        self._path, self._at = run_folder.metrics, 0
        self._seen: dict[str, ObservedAdapter] = {}

    def look(self) -> bool:
        """Read new records, at most about ``READ_BYTES``; True while there are more. A torn line stays."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return False
        with file:
            start = self._at
            file.seek(start)
            for line in file:
                if not line.endswith(b"\n"):
                    return False
                if self._at - start > READ_BYTES:
                    return True
                self._take(line, self._at)
                self._at += len(line)
        return False

    def of(self, key: str) -> ObservedAdapter:
        return self._seen.get(key) or ObservedAdapter()

    def phases(self) -> dict[str, AdapterPhase]:
        return {key: seen.phase for key, seen in list(self._seen.items()) if seen.phase is not None}

    def records(self, key: str, after: int, limit: int = PAGE) -> list[dict[str, Any]]:
        """The adapter's records from number ``after`` on, without the run's names of adapters."""
        return self._lines(self.of(key).places[after : after + limit])

    def states(self, key: str) -> list[dict[str, Any]]:
        """The newest state records and failures of the adapter, oldest first."""
        return self._lines(self.of(key).states)

    def forget(self, but: Container[str]) -> None:
        """Forget every adapter that is not in ``but``."""
        self._seen = {key: seen for key, seen in self._seen.items() if key in but}

    def _lines(self, places: Iterable[int]) -> list[dict[str, Any]]:
        if not (offsets := list(places)):
            return []
        found = []
        with self._path.open("rb") as file:
            for offset in offsets:
                file.seek(offset)
                record = msgspec.json.decode(file.readline(), type=dict[str, Any])
                for name_of_the_run in ("adapter", "measured_with"):
                    record.pop(name_of_the_run, None)
                found.append(record)
        return found

    def _take(self, line: bytes, offset: int) -> None:
        head = _head(line)
        if not head.adapter:
            return
        seen = self._seen.setdefault(head.adapter, ObservedAdapter())
        seen.places.append(offset)
        if head.kind not in _KINDS:
            return
        match _state(line):
            case AdapterStateRecord(state=phase, reason=reason):
                seen.phase, seen.reason = phase, reason
                seen.states.append(offset)
            case StepRecord() as step:
                seen.step = step
            case PublishRecord(version=version):
                seen.version = version
            case CheckpointRecord(version=version, failed=failed):
                seen.checkpoint = seen.checkpoint if failed else version
            case ResumeRecord(version=version):
                seen.checkpoint = version
                if seen.step is not None and seen.step.version >= version:
                    seen.step = None  # it will come again


SUFFIX = ".age"
MAX_RECIPIENTS = 10
CHUNK_BYTES = 64 << 10
_STANZA = b"age-encryption.org/v1/X25519"
_LENGTH = 62
_LETTERS = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"


def recipient_key(text: str) -> X25519PublicKey:
    """The key that ``age1...`` names, in Bech32 (BIP 173). Raises RequestError."""
    wrong = RequestError(
        422, "age_encryption_recipients", f"{text[:80]!r} is no age key", "give keys that start with age1"
    )
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
