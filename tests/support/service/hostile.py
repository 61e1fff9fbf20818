"""Requests that no honest client of the service's own API sends: what is sent, and what may come of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec

from tests.support.service.running import section
from tests.support.tinker.tenant_world import World

BODY_KIB, PASS_KIB = 32, 64
"""Quotas of the run under attack."""
ODD = [
    "",
    "\0",
    "ä",
    "\ud83d",
    "a" * 3000,
    "../../etc/passwd",
    "' OR 1=1 --",
    "%s%n",
    "${jndi:x}",
    "null",
    "-1",
    "1e999",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """``statuses`` are those that may come; ``answer`` is the body that must."""

    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict)
    content: bytes = b""
    statuses: frozenset[int] = frozenset({200, 201, 204, 401, 404, 405, 408, 410, 413, 422, 429, 503})
    answer: bytes | None = None

    @property
    def sent(self) -> bytes:
        return self.path.encode() + self.content


REFUSED = frozenset({401, 404, 405, 410, 413, 422, 429})


class ErrorDetail(msgspec.Struct, forbid_unknown_fields=True):
    path: str
    reason: str
    fix: str


class ErrorBody(msgspec.Struct, forbid_unknown_fields=True):
    error: ErrorDetail


def typed(status: int, kind: str, content: bytes, said: str) -> None:
    if status >= 400:
        error = msgspec.json.decode(content, type=ErrorBody).error
        assert error.path, said
        assert error.reason, said
        assert "Traceback" not in error.reason, said
    elif status == 204:
        assert not content, said
    elif kind == "application/json":
        assert isinstance(json.loads(content), dict), said
    else:
        assert (kind, bool(content)) == ("application/x-protobuf", True), said


def of_the_api(draw: Random, me: World, foe: World) -> Shot:
    """Names of the tenant's own adapter are only read, so that another one's changes show."""
    names = [foe.mark, f"{me.tenant}-{me.mark}", "nothing", *map(quoted, ODD)]
    verb = draw.choice(["", "/pause", "/resume", "/logs", "/metrics", "/download", "/nothing"])
    path, bearer = f"/v1/adapters/{draw.choice(names)}{verb}", {"Authorization": f"Bearer {me.key}"}

    def create(content: bytes, **more: Any) -> Shot:
        return Shot(method="POST", path="/v1/adapters", headers=bearer, content=content, **more)

    match draw.randrange(10):
        case 0:  # a foreign or odd name
            return Shot(method=draw.choice(["GET", "DELETE", "POST", "PUT", "PATCH"]), path=path, headers=bearer)
        case 1:  # its own, read
            query = draw.choice(["", "?after=5", "?after=-1", f"?limit={'9' * 30}", "?after=1e3", "?x=%C3%A4"])
            own = f"/v1/adapters/{me.mark}{draw.choice(['', '/logs', '/metrics'])}"
            return Shot(method="GET", path=own + query, headers=bearer)
        case 2:  # wrong keys
            wrong = draw.choice([{}, {"Authorization": "Bearer tml-" + "0" * 64}, {"Authorization": "Basic eA=="}])
            return Shot(method=draw.choice(["GET", "POST"]), path=path, headers=wrong)
        case 3:  # bytes
            return create(draw.randbytes(draw.randrange(300)))
        case 4:  # too long
            return create(b'{"name":"' + b"a" * ((BODY_KIB << 10) + draw.choice([0, 1, 1 << 18])))
        case 5:  # deep
            depth = draw.choice([200, 2000, 15000])
            return create(b'{"name":"deep","task":' + b"[" * depth + b"]" * depth + b"}")
        case 6:  # a section with something wrong in it
            return create(json.dumps(mutated(section(name="mutant"), draw)).encode())
        case 7:  # a repeated key with another request
            again = bearer | {"Idempotency-Key": draw.choice(["one", "two", "x" * 200])}
            return Shot(method=draw.choice(["DELETE", "POST"]), path=path, headers=again)
        case 8:  # inference
            model = draw.choice([foe.mark, "base", "nothing", 3, *ODD[:3], ODD[5]])
            path = draw.choice(["/v1/completions", "/v1/chat/completions"])
            content = json.dumps({"model": model, "prompt": "a"}).encode()
            return Shot(method="POST", path=path, headers=bearer, content=content)
        case _:  # what is the operator's
            target = draw.choice(["/v1/tenants", "/v1/tenants/acme/keys", "/v1/tenants/bolt/keys/default", "/v1", "/"])
            method = draw.choice(["GET", "POST", "DELETE"])
            return Shot(method=method, path=target, headers=bearer, content=b"{}", statuses=REFUSED)


def quoted(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode("utf-8", "surrogatepass"))[:3000]


def mutated(value: dict[str, Any], draw: Random) -> dict[str, Any]:
    """``value`` with something replaced by what is wrong, somewhere; it never becomes an acceptable adapter."""
    spots: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            spots.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(value)
    node, key = draw.choice(spots)
    node[key] = draw.choice([[], {}, {"kind": "nothing"}, {"kind": []}, 10**40, [[[]]], "\ud800", "a\0b"])
    value["unknown key"] = 1
    return value
