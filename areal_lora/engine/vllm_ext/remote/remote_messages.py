"""Messages between the gateway of a run and a remote server, which can connect to it and not the other way round.

HTTP with msgpack bodies; every request carries ``Authorization: Bearer <key of the remote plane>``.

======  ==================================  =========================================================================
method  path                                answer
======  ==================================  =========================================================================
GET     ``/remote/settings``                200 ``Settings``
POST    ``/remote/servers/WORKERS``         200 ``Admission``: the server is a member of the run from here on
GET     ``/remote/NAME/work/SEEN``          200 ``Work``: requests after number SEEN, at the latest after ``HOLD_S``
POST    ``/remote/NAME/answer``             200; the body is an ``Answer``
GET     ``/remote/NAME/shard/N/SOURCE``     200, or 206 for a ``Range``: the packed shard of source rank SOURCE that
                                            request N announces, trailer included, as it arrives
DELETE  ``/remote/NAME``                    200; the server has left
======  ==================================  =========================================================================

401 is another token, 404 a server that the gateway does not know (any more), 410 a shard that does not arrive.
"""

import msgspec

from areal_lora.network.tls import Plane

HOLD_S = 10.0
LOST_S = 10.0
"""A server that does not fetch work for so long is lost."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """``config`` is the run's, as JSON, ``shard_keys`` those of ``manifest.shard_key_bytes``."""

    config: bytes
    base_digest: str
    shard_keys: bytes


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    name: str


class Forwarded(msgspec.Struct, frozen=True, kw_only=True):
    """A request to a ``plane`` of the server. With ``cancels`` only: nobody waits for that one's answer any more."""

    number: int
    plane: Plane = Plane.DATA
    method: str = ""
    path: str = ""
    body: bytes = b""
    cancels: int = 0


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """``over``: the run has ended."""

    requests: list[Forwarded]
    over: bool = False


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """``leaving``: the server has not answered, another one may."""

    number: int
    status: int
    body: bytes
    media_type: str = "text/plain"
    leaving: bool = False
