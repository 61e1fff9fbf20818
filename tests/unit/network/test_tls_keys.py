"""Keys of the planes: HKDF-SHA256, one label each."""

from __future__ import annotations

import hashlib
import hmac

import pytest

from areal_lora.network.tls import Plane, authorization, authorized, bearer_key, derived_key

SECRET, OTHER = "5e" * 32, "5e" * 31 + "5f"


def hkdf(secret: bytes, info: bytes, length: int) -> bytes:
    """RFC 5869 with an empty salt, in the standard library."""
    pseudorandom = hmac.new(bytes(32), secret, hashlib.sha256).digest()
    out, block, i = b"", b"", 1
    while len(out) < length:
        block = hmac.new(pseudorandom, block + info + bytes([i]), hashlib.sha256).digest()
        out, i = out + block, i + 1
    return out[:length]


def test_derivation_is_hkdf_sha256() -> None:
    for label, length in (("bearer admin", 32), ("certificate data", 48)):
        assert derived_key(SECRET, label, length) == hkdf(SECRET.encode(), b"areal_lora 1 " + label.encode(), length)


def test_every_plane_and_run_has_its_own_key_and_none_is_the_secret() -> None:
    keys = {bearer_key(secret, plane) for secret in (SECRET, OTHER) for plane in Plane}
    assert len(keys) == 6
    assert all(len(bytes.fromhex(key)) == 32 for key in keys)
    assert not keys & {SECRET, OTHER}


@pytest.mark.parametrize("plane", Plane)
def test_only_the_planes_own_key_opens_it(plane: Plane) -> None:
    key = bearer_key(SECRET, plane)
    assert authorized(authorization(SECRET, plane)["Authorization"], SECRET, plane)
    other_planes = [f"Bearer {bearer_key(SECRET, other)}" for other in Plane if other != plane]
    wrong = [None, "", key, f"Basic {key}", "Bearer ", f"Bearer {key}0", f"Bearer {key[:-1]}", f"Bearer {SECRET}"]
    for header in [*wrong, *other_planes, f"Bearer {bearer_key(OTHER, plane)}", "Bearer \udcff\xff"]:
        assert not authorized(header, SECRET, plane), header
