"""Requests that no honest client of the SDK sends, and with the API's own all that a storm is made of."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from random import Random
from typing import Any

from tests.support.service.hostile import BODY_KIB, ODD, PASS_KIB, REFUSED, Shot, of_the_api, quoted
from tests.support.tinker.tenant_world import API, PROTOBUF, World, pass_body, sample_body

NEVER = "s000000000000"
NUMBERS: list[Any] = [-1, 0, 2**31, 2**53, 2**63, 10**40, 1.5, -1e308, "1", None, [], {}, True]
_POSTS = """
client/config client/dynamic_config telemetry cancel_future create_session session_heartbeat create_model unload_model
get_info forward_backward optim_step save_weights save_weights_for_sampler save_weights_external load_weights
retrieve_future create_sampling_session asample weights_info copy_weights sessions/search forward create_custom_loss
join_sampling_session retrieve_futures auth/token
"""
POSTS = _POSTS.split()
HARMLESS = [path for path in POSTS if path != "unload_model"]
"""Of its own, a tenant may keep these as they are: the storm needs its models."""
Draw = Callable[[Random, World, World], Shot]


def shot(draw: Random, me: World, foe: World) -> Shot:
    return draw.choices(list(KINDS), weights=list(KINDS.values()))[0](draw, me, foe)


# ------------------------------------------------------------ the SDK's routes


def bodies(draw: Random, me: World, names: list[World | None]) -> dict[str, dict[str, Any]]:
    """A body for each route that is right but for whose names it has; None: names that never were."""

    def of(pick: Callable[[World], str], never: str) -> str:
        return never if (whose := draw.choice(names)) is None else pick(whose)

    model, session = of(lambda w: w.model, f"{NEVER}:train:0"), of(lambda w: w.session, NEVER)
    sampler = of(lambda w: w.sampler, f"{NEVER}:sample:0")
    path = of(lambda w: draw.choice(w.states), f"tinker://{NEVER}:train:0/weights/x")
    future = of(lambda w: draw.choice(list(w.answers)), f"{NEVER}:train:0:1")
    of_model = {"model_id": model, "seq_id": me.seq + 1}
    lora = {"rank": draw.choice([1, 4]), "train_attn": draw.random() < 0.5}
    return {
        "client/config": {"sdk_version": "0.38.0"},
        "client/dynamic_config": {"sdk_version": "0.38.0"},
        "telemetry": {"events": [], "session_id": session},
        "cancel_future": {"request_id": future},
        "create_session": {"tags": ["a"], "user_metadata": {"n": 1}, "sdk_version": "0"},
        "session_heartbeat": {"session_id": session},
        "create_model": {
            "session_id": session,
            "model_seq_id": draw.randrange(1, 9),
            "base_model": "tiny_model",
            "lora_config": lora,
        },
        "unload_model": {"model_id": model},
        "get_info": {"model_id": model},
        "optim_step": of_model | {"adam_params": {"learning_rate": 1e-3}},
        "save_weights": of_model | {"path": draw.choice(["mine", "no/name", me.mark]), "user_metadata": {"n": 1}},
        "save_weights_for_sampler": of_model | {"path": draw.choice(["mine", "", me.mark])},
        "save_weights_external": dict(of_model),
        "load_weights": of_model | {"path": path, "optimizer": True},
        "retrieve_future": {"request_id": future},
        "create_sampling_session": {
            "session_id": session,
            "sampling_session_seq_id": draw.randrange(1, 99),
            "model_path": path,
        },
        "asample": sample_body(sampler, draw.randrange(1, 10**6), num_samples=draw.randrange(1, 3)),
        "weights_info": {"tinker_path": path},
        "forward_backward": dict(of_model),
    }


def posted(path: str, body: Any, me: World, **more: Any) -> Shot:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | more.pop("headers", {}) | more.pop("key", me.keyed)
    return Shot(method="POST", path=f"{API}/{path}", headers=headers, content=content, **more)


def mistaken(draw: Random, me: World, foe: World) -> Shot:
    """A right body with something wrong in it, or nothing."""
    path = draw.choice(HARMLESS)
    body = bodies(draw, me, [me, me, me, foe, None]).get(path, {})
    for _ in range(draw.randrange(4)):
        spot = draw.choice([*body, "unknown key"])
        match draw.randrange(4):
            case 0:
                body.pop(spot, None)
            case 1:
                body[spot] = draw.choice(ODD)
            case 2:
                body[spot] = draw.choice(NUMBERS)
            case _:
                body[spot] = {"kind": [draw.choice(ODD)] * draw.randrange(3)}
    return posted(path, body, me)


def nested(draw: Random, me: World, foe: World) -> Shot:
    """Deep, not finite, huge, cut, no JSON at all."""
    path, depth = draw.choice(HARMLESS), draw.choice([200, 5000, 15000])
    odd = [
        b'{"model_id":' + b"[" * depth + b"]" * depth + b"}",
        b'{"user_metadata":' + b'{"a":' * depth + b"1" + b"}" * depth + b',"sdk_version":"0"}',
        f'{{"model_id":"{me.model}","seq_id":NaN}}'.encode(),
        f'{{"model_id":"{me.model}","seq_id":{me.seq + 1},"adam_params":{{"learning_rate":1e999}}}}'.encode(),
        f'{{"model_id":"{me.model}","seq_id":{10**300}}}'.encode(),
        json.dumps(bodies(draw, me, [me]).get(path, {})).encode()[: draw.randrange(40)],
        draw.randbytes(draw.randrange(200)),
        b"\xff\xfe{}",
        b"[]",
        b"",
    ]
    return posted(path, draw.choice(odd), me)


def foreign(draw: Random, me: World, foe: World) -> Shot:
    """What is another tenant's, in a body that is right otherwise: nothing of it is ever granted."""
    named = "session_heartbeat create_model unload_model get_info optim_step save_weights save_weights_for_sampler"
    path = draw.choice(
        [*named.split(), "retrieve_future", "create_sampling_session", "asample", "weights_info", "pass"]
    )
    if path == "pass":
        return posted("forward_backward", pass_body(foe.model, foe.seq + 1), me, headers=PROTOBUF, statuses=REFUSED)
    return posted(path, bodies(draw, me, [foe])[path], me, statuses=REFUSED)


def passes(draw: Random, me: World, foe: World) -> Shot:
    """Protobuf: damaged, cut, of other content, compressed, under another type."""
    tokens = draw.choice([[1, 2, 3], [5, 6, 7, 8], [1], [2**31 - 1, 5], [0] * 300])
    loss = draw.choice(["cross_entropy", "cross_entropy", "ppo", "nothing", ""])
    model = draw.choice([me.model] * 4 + [foe.model, f"{NEVER}:train:0", draw.choice(ODD).replace("\ud83d", "?")])
    body = bytearray(pass_body(model, draw.choice([me.seq + 1] * 5 + [0, 1, 2**31 - 1, -(2**31)]), tokens, loss))
    headers = dict(PROTOBUF)
    match draw.randrange(6):
        case 0:
            for _ in range(draw.randrange(1, 6)):
                body[draw.randrange(len(body))] = draw.randrange(256)
        case 1:
            del body[draw.randrange(len(body)) :]
        case 2:
            headers["Content-Type"] = draw.choice(["application/json", "text/plain", "a" * 500, "multipart/form-data"])
        case 3:
            body, headers["Content-Encoding"] = packed(draw, bytes(body)), draw.choice(["zstd", "gzip", "br", "x"])
        case 4:
            body = bytearray(draw.randbytes(draw.randrange(300)))
    return posted("forward_backward", bytes(body), me, headers=headers)


def packed(draw: Random, body: bytes) -> bytearray:
    """Compressed, and then perhaps damaged; a few KiB may claim to be gigabytes."""
    found = bytearray(draw.choice([zlib.compress, gzip.compress])(draw.choice([body, b"\0" * (1 << 20)])))
    for _ in range(draw.randrange(3)):
        found[draw.randrange(len(found))] ^= 1 << draw.randrange(8)
    return found


def repeated(draw: Random, me: World, foe: World) -> Shot:
    """What was acknowledged before, word for word: the same answer; under its number with other content: refused."""
    path, headers, content, answer = draw.choice(me.sent)
    if draw.random() < 0.5:
        return posted(path, content, me, headers=headers, statuses=frozenset({200}), answer=answer)
    if path == "forward_backward":
        other = pass_body(me.model, 1, draw.choice([[1, 2], [7, 7, 7]]))
    else:
        other = json.dumps(json.loads(content) | {"another": draw.randrange(10**9)}).encode()
    return posted(path, other, me, headers=headers, statuses=frozenset({422}))


def too_long(draw: Random, me: World, foe: World) -> Shot:
    path = draw.choice(POSTS)
    most = (PASS_KIB if path in ("forward_backward", "asample", "telemetry") else BODY_KIB) << 10
    content = b'{"model_id":"' + b"a" * (most + draw.choice([1, 1000, 1 << 18]))
    headers = PROTOBUF if path == "forward_backward" else {}
    long = {"forward", "create_custom_loss", "copy_weights", "sessions/search", "auth/token", "join_sampling_session"}
    statuses = REFUSED if path in long or path == "retrieve_futures" else frozenset({413})
    return posted(path, content, me, headers=headers, statuses=statuses)


def keyless(draw: Random, me: World, foe: World) -> Shot:
    wrong: list[dict[str, str]] = [
        {},
        {"X-API-Key": "tml-" + "0" * 64},
        {"X-API-Key": me.key[:-1]},
        {"Authorization": f"Basic {me.key}"},
        {"Authorization": "Bearer " + "x" * 5000},
        {"Authorization": f"Bearer {me.key}x", "X-API-Key": me.key},
        {"Cookie": f"key={me.key}"},
    ]
    path = draw.choice(POSTS)
    return posted(path, bodies(draw, me, [me]).get(path, {}), me, key=draw.choice(wrong), statuses=frozenset({401}))


def wrong_method(draw: Random, me: World, foe: World) -> Shot:
    path, method = draw.choice(POSTS), draw.choice(["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
    statuses = frozenset({404, 405}) if path.startswith("sessions/") else frozenset({405})
    return Shot(method=method, path=f"{API}/{path}", headers=me.keyed, statuses=statuses)


def looked_up(draw: Random, me: World, foe: World) -> Shot:
    """Lists and single things, of anyone; deletions of what is not its own."""
    whose, runs = draw.choice([me, foe]), f"{API}/training_runs"
    odd = quoted(draw.choice(ODD))
    model = draw.choice([whose.model, f"{NEVER}:train:0", odd])
    session = draw.choice([whose.session, NEVER, odd])
    name = (
        f"{runs}/{draw.choice([foe.model, NEVER, odd])}/checkpoints/{draw.choice(['weights', 'sampler_weights', odd])}"
    )
    name = f"{name}/{draw.choice([foe.mark, me.mark, odd])}"
    query = draw.choice(["", "?limit=1&offset=0", "?limit=-1", "?offset=1e3", f"?limit={'9' * 30}", f"?x={'a' * 3000}"])
    gets = [
        "checkpoints",
        "sessions",
        "training_runs",
        "healthz",
        "get_server_capabilities",
        "audit",
        "billing/usage/events",
        "auth/apikey/me",
        f"sessions/{session}",
        f"sessions/{session}/trace_export",
        f"samplers/{draw.choice([whose.sampler, odd])}",
        f"archives/{draw.choice([odd, 'A' * 86, 'x'])}",
        "nothing",
    ]
    paths = [*(f"{API}/{get}{query}" for get in gets), f"{runs}/{model}", f"{runs}/{model}/checkpoints"]
    return draw.choice(
        [
            *(Shot(method="GET", path=path, headers=me.keyed) for path in paths),
            Shot(method="GET", path=f"{name}/archive", headers=me.keyed, statuses=REFUSED),
            Shot(method="DELETE", path=name, headers=me.keyed, statuses=REFUSED),
            Shot(method="PUT", path=f"{name}/ttl", headers=me.keyed, content=b'{"ttl_seconds":5}', statuses=REFUSED),
            Shot(method="POST", path=f"{name}/publish", headers=me.keyed, statuses=REFUSED),
            Shot(method="PUT", path=f"{API}/sessions/{session}/project", headers=me.keyed, statuses=REFUSED),
            posted(f"sessions/{draw.choice([foe.session, NEVER])}/finish", b"", me, statuses=REFUSED),
        ]
    )


KINDS: dict[Draw, int] = {
    mistaken: 22,
    nested: 8,
    foreign: 12,
    passes: 12,
    repeated: 8,
    too_long: 4,
    keyless: 6,
    wrong_method: 4,
    looked_up: 12,
    of_the_api: 12,
}
"""With how often each is drawn."""
