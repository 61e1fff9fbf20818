"""Files encrypted to age recipients (https://age-encryption.org/v1), as their owners decrypt them with ``age -d``.

Only what a sender needs, and only native ``age1...`` keys: header with one X25519 stanza for each recipient, then the
payload in chunks of 64 KiB (ChaCha20-Poly1305, keys by HKDF-SHA256).
"""

from __future__ import annotations

import base64
import hmac
import os
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from areal_lora.service.refused import RequestError

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
