"""5,000 malformed, oversized, repeated and foreign requests: typed answers, and no tenant learns of another."""

from __future__ import annotations

import asyncio
import json
import os
import random
from pathlib import Path
from typing import Any

import httpx
import msgspec

from areal_lora.run_folder.desired import read_desired
from areal_lora.service import bodies
from areal_lora.service.refused import ErrorBody
from tests.support.service.running import Running, running, section, service_config

REQUESTS = 5000
MARKS = {"acme": "acmesownword", "bolt": "boltsownword"}
"""In the name of each tenant's adapter, and nowhere else. Others may guess it."""
SECRETS = {"acme": "acmesecretword", "bolt": "boltsecretword"}
"""In the settings and reasons of each tenant. No request has it."""
STATUSES = {200, 201, 401, 404, 405, 413, 422, 429, 503}
TYPES = (bodies.Adapter, bodies.Accepted, bodies.Adapters, bodies.Records, bodies.Logs, bodies.Models)
ODD = [
    "",
    "\0",
    "ä",
    "\ud83d",
    "a" * 5000,
    "../../etc/passwd",
    "' OR 1=1 --",
    "%s%n",
    "${jndi:x}",
    "null",
    "-1",
    "1e999",
]


def test_every_answer_is_typed_and_nothing_leaks(tmp_path: Path) -> None:
    seed = int(os.environ.get("AREAL_LORA_SEED", random.randrange(10**6)))
    print(f"AREAL_LORA_SEED={seed}")

    async def run() -> None:
        async with running(service_config(tmp_path / "the runs")) as it:  # an unforeseen error is raised
            await storm(it, random.Random(seed))

    asyncio.run(run())


async def storm(it: Running, draw: random.Random) -> None:
    for tenant, mark in MARKS.items():
        assert (
            await it.ask(tenant, "POST", "/v1/adapters", json=section(name=mark, evals=own(tenant)))
        ).status_code == 201
        it.record("state", f"{tenant}-{mark}.1", state="active", version=0, reason=SECRETS[tenant])
    before = read_desired(it.folder).adapters
    seen: dict[int, int] = {}
    for _ in range(REQUESTS):
        who = draw.choice(list(MARKS))
        answer = await asked(it, draw, who)
        seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
        assert answer.status_code in STATUSES, answer.text
        other = MARKS["bolt" if who == "acme" else "acme"]
        sent = answer.request.content.decode(errors="replace") + str(answer.request.url)
        assert other not in answer.text or other in sent, "a tenant learns what it has not sent"
        assert SECRETS["bolt" if who == "acme" else "acme"] not in answer.text
        if answer.status_code >= 400:
            error = msgspec.json.decode(answer.content, type=ErrorBody).error
            assert error.path
            assert error.reason
            assert str(it.folder) not in answer.text
            assert "Traceback" not in answer.text
        else:
            assert any(is_of(answer.content, kind) for kind in TYPES), answer.text
    after = {adapter.key: adapter for adapter in read_desired(it.folder).adapters}
    assert all(after.get(adapter.key) == adapter for adapter in before), "no one changed what is another's"
    print(dict(sorted(seen.items())))
    assert {200, 401, 404, 405, 413, 422} <= seen.keys(), "the storm is as varied as it says"


def own(tenant: str) -> list[dict[str, str]]:
    return [{"name": SECRETS[tenant]}]


def is_of(content: bytes, kind: Any) -> bool:
    try:
        msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError:
        return False
    return True


async def asked(it: Running, draw: random.Random, who: str) -> httpx.Response:
    """One request. Names of the tenant's own adapter are only read, so that the foreign one's changes show."""
    foreign = MARKS["bolt" if who == "acme" else "acme"]
    names = [foreign, f"{who}-{MARKS[who]}", "nothing", *map(quoted, ODD)]
    verb = draw.choice(["", "/pause", "/resume", "/logs", "/metrics", "/download", "/nothing"])
    path = f"/v1/adapters/{draw.choice(names)}{verb}"
    headers = {"Authorization": f"Bearer {it.keys[who]}"}
    match draw.randrange(10):
        case 0:  # a foreign or odd name
            return await it.http.request(draw.choice(["GET", "DELETE", "POST", "PUT", "PATCH"]), path, headers=headers)
        case 1:  # its own, read
            own = f"/v1/adapters/{MARKS[who]}{draw.choice(['', '/logs', '/metrics'])}"
            return await it.http.get(own, headers=headers, params=odd_query(draw))
        case 2:  # wrong keys
            wrong = draw.choice([{}, {"Authorization": "Bearer tml-" + "0" * 64}, {"Authorization": "Basic eA=="}])
            return await it.http.request(draw.choice(["GET", "POST"]), path, headers=wrong)
        case 3:  # bytes
            return await it.http.post("/v1/adapters", headers=headers, content=draw.randbytes(draw.randrange(300)))
        case 4:  # too long
            content = b'{"name":"' + b"a" * draw.choice([256 << 10, (256 << 10) + 1, 1 << 20])
            return await it.http.post("/v1/adapters", headers=headers, content=content)
        case 5:  # deep
            depth = draw.choice([200, 2000, 50000])
            content = b'{"name":"deep","task":' + b"[" * depth + b"]" * depth + b"}"
            return await it.http.post("/v1/adapters", headers=headers, content=content)
        case 6:  # a section with something wrong in it
            body = json.dumps(mutated(section(name="mutant"), draw)).encode()
            return await it.http.post("/v1/adapters", headers=headers, content=body)
        case 7:  # a repeated key with another request
            again = headers | {"Idempotency-Key": draw.choice(["one", "two", "x" * 200])}
            return await it.http.request(draw.choice(["DELETE", "POST"]), path, headers=again)
        case 8:  # inference
            body = {
                "model": draw.choice([foreign, "base", "nothing", 3, *ODD[:3], ODD[5]]),
                "prompt": draw.choice(ODD[2:3]),
            }
            return await it.http.post(
                draw.choice(["/v1/completions", "/v1/chat/completions"]), headers=headers, json=body
            )
        case _:  # what is the operator's
            target = draw.choice(["/v1/tenants", "/v1/tenants/acme/keys", "/v1/tenants/bolt/keys/test", "/v1", "/"])
            return await it.http.request(draw.choice(["GET", "POST", "DELETE"]), target, headers=headers, json={})


def quoted(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode("utf-8", "surrogatepass"))[:3000]


def odd_query(draw: random.Random) -> dict[str, str]:
    return {draw.choice(["after", "limit", "x"]): draw.choice(["0", "5", "-1", "ä", "9" * 30, "", "1e3"])}


def mutated(value: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """A copy with one value replaced by a wrong one, somewhere; it never becomes an acceptable adapter."""
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
