"""Keys derived from the run secret, one for each purpose; the secret itself is never sent over a socket.

Each key is HKDF-SHA256 of the secret (RFC 5869) under a label, so that no key reveals anything about the secret
or about another key.

========================  =====================================================================================
label                     key
========================  =====================================================================================
``bearer <plane>``        bearer token of a client of an HTTP plane, inside TLS
``certificate <plane>``   private key of the certificate authority of an HTTP plane (``network.tls``)
``curve <role>``          private CURVE key of one end of a zmq connection (``network.curve.zmq_curve_keys``)
========================  =====================================================================================
"""

from __future__ import annotations

import hmac
from enum import StrEnum

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

_CONTEXT = "areal_lora 1 "  # separates these keys from whatever else the secret might be used for


class Plane(StrEnum):
    """The HTTP planes of a rollout server."""

    ADMIN = "admin"
    DATA = "data"


def derived_key(secret: str, label: str, length: int = 32) -> bytes:
    """The key of this run under ``label``."""
    return HKDF(SHA256(), length, salt=None, info=(_CONTEXT + label).encode()).derive(secret.encode())


def bearer_key(secret: str, plane: Plane) -> str:
    """Return the bearer key that admits clients to ``plane`` only."""
    return derived_key(secret, f"bearer {plane}").hex()


def authorization(secret: str, plane: Plane) -> dict[str, str]:
    """The header that a client of ``plane`` sends. Only inside TLS: whoever reads it can use it."""
    return {"Authorization": f"Bearer {bearer_key(secret, plane)}"}


def authorized(header: str | None, secret: str, plane: Plane) -> bool:
    """Whether an ``Authorization`` header carries the key of ``plane``, compared in constant time."""
    expected = authorization(secret, plane)["Authorization"]
    return hmac.compare_digest((header or "").encode(errors="surrogateescape"), expected.encode())
