"""Bodies in progress: what a tenant may have of them at once, and from when to when they count."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest
from starlette.requests import Request
from starlette.types import Message

from areal_lora.errors import RequestError
from areal_lora.service.http import Caller, body_of, guard
from areal_lora.service.queue.queue_rows import Key, Quota, Tables, digest_of

QUOTA = Quota(queued_mib=1, body_kib=600, pass_kib=800)
HALF = 1 << 19


def arriving(receive: Callable[[], Message], *headers: tuple[bytes, bytes]) -> Request:
    async def one() -> Message:
        return receive()

    known = [(b"authorization", b"Bearer key"), *headers]
    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": known}
    return Request(scope, one)


def arrived(bodies: Counter[str], tenant: str, n_bytes: int, quota: Quota = QUOTA) -> Caller:
    """The caller whose request has announced so many bytes, and is not answered yet."""
    caller = Caller(key=Key(digest="", tenant=tenant, label="test"), quota=quota, bodies=bodies)
    announced = (b"content-length", str(n_bytes).encode())
    asyncio.run(body_of(arriving(lambda: {"type": "http.request"}, announced), caller, long=True))
    return caller


def test_bytes_in_progress_are_a_quota_of_each_tenant() -> None:
    bodies = Counter[str]()
    callers = [arrived(bodies, "acme", HALF) for _ in range(2)]
    with pytest.raises(RequestError) as refused:
        arrived(bodies, "acme", 1)
    assert (refused.value.status, refused.value.retry_s) == (429, 1)
    callers.append(arrived(bodies, "bolt", HALF))
    callers.pop(0).held.close()
    callers.append(arrived(bodies, "acme", HALF))
    for caller in callers:
        caller.held.close()
    assert not +bodies


def test_one_body_always_may_come() -> None:
    arrived(Counter[str](), "acme", 3 << 20, Quota(queued_mib=1, pass_kib=4096))


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
        seen.append(caller.bodies["acme"])
        bodies.append(caller.bodies)
        raise RequestError("body", "refused")

    bodies: list[Counter[str]] = []
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
    assert not +bodies[0]
