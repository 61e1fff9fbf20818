"""Bodies in progress: what a tenant may have of them at once, and from when to when they count."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from starlette.requests import Request
from starlette.types import Message

from areal_lora.errors import RequestError
from areal_lora.service.http import Bodies, Caller, body_of, guard
from areal_lora.service.queue.queue_rows import Key, Quota, Tables, digest_of

QUOTA = Quota(queued_mib=1, body_kib=600, pass_kib=800)
HALF = 1 << 19


def test_bytes_in_progress_are_a_quota_of_each_tenant() -> None:
    bodies = Bodies()
    for _ in range(2):
        bodies.start("acme", HALF, QUOTA)
    with pytest.raises(RequestError) as refused:
        bodies.start("acme", 1, QUOTA)
    assert (refused.value.status, refused.value.retry_s) == (429, 1)
    bodies.start("bolt", HALF, QUOTA)
    bodies.end("acme", HALF)
    bodies.start("acme", HALF, QUOTA)
    for tenant in ("acme", "acme", "bolt"):
        bodies.end(tenant, HALF)
    assert bodies._bytes == {}


def test_one_body_always_may_come() -> None:
    Bodies().start("acme", 3 << 20, QUOTA)


def arriving(receive: Callable[[], Message], *headers: tuple[bytes, bytes]) -> Request:
    async def one() -> Message:
        return receive()

    known = [(b"authorization", b"Bearer key"), *headers]
    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": known}
    return Request(scope, one)


@pytest.mark.parametrize(
    ("headers", "kept", "counted"),
    [
        ([(b"content-length", b"5")], True, 5),
        ([(b"transfer-encoding", b"chunked")], True, 600 << 10),
        ([], True, 0),
        ([(b"content-length", b"5")], False, 0),
    ],
)
def test_a_body_counts_until_its_request_is_answered(
    headers: list[tuple[bytes, bytes]], kept: bool, counted: int
) -> None:
    key, seen = Key(digest=digest_of("key"), tenant="acme", label="test"), list[int]()
    tables = Tables(quotas={"acme": QUOTA}, keys={key.digest: key})

    async def handler(request: Request, caller: Caller) -> dict[str, object]:
        assert await body_of(request, caller, kept=kept) == (b"abcde" if kept else b"")
        seen.append(caller.bodies._bytes["acme"])
        bodies.append(caller.bodies)
        raise RequestError("body", "refused")

    bodies: list[Bodies] = []
    route = guard(lambda: tables, lambda tenant, quota: None)("POST", "/", handler)
    sent = list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    def body() -> Message:
        seen.append(len(bodies))
        return {"type": "http.request", "body": b"abcde"}

    request = arriving(body, *headers)
    asyncio.run(route.app(request.scope, request.receive, send))
    assert seen == [0, counted]
    assert sent[0]["status"] == 422
    assert bodies[0]._bytes == {}
