"""Read requests of the SDK: who asks, bodies that are not compressed, JSON of the right form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from areal_lora.service.refused import Refused
from areal_lora.service.requests import Caller, read_body

T = TypeVar("T")
MOST_NOTES = 16 << 10


async def body_of(request: Request, who: Caller, *, long: bool = False) -> bytes:
    """The body; with ``long`` as long as one pass may be. Raises Refused.

    ``client/config`` says that bodies are not to be compressed: the service is on this machine.
    """
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refused(422, "Content-Encoding", "compressed bodies are not read", "send it as it is")
    return await read_body(request, who.quota.pass_bytes if long else who.quota.body_bytes)


def notes_of(given: Mapping[str, Any] | None) -> dict[str, str]:
    """``user_metadata`` as texts, which is what the SDK reads. Raises Refused for more than `MOST_NOTES` bytes."""
    texts = {
        key: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for key, value in (given or {}).items()
    }
    if len(msgspec.json.encode(texts)) > MOST_NOTES:
        raise Refused(422, "user_metadata", f"it is longer than {MOST_NOTES} bytes", "keep it elsewhere")
    return texts


def decoded(body: bytes | Mapping[str, Any], kind: type[T]) -> T:
    """``body`` as ``kind``. Raises Refused."""
    try:
        return msgspec.json.decode(body, type=kind) if isinstance(body, bytes) else msgspec.convert(body, kind)
    except (msgspec.MsgspecError, UnicodeError) as error:
        reason = f"it has not the form that the SDK sends: {str(error)[:200]}"
        raise Refused(422, "body", reason, "use an SDK version that the service page names") from None
    except RecursionError:
        raise Refused(422, "body", "it is nested too deeply", "flatten it") from None
