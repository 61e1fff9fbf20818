"""Bodies by the schemas of the service's routes, with values at and beyond their edges, on a real service."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st

from areal_lora.config.models import AdapterConfig
from areal_lora.engine.vllm_ext.server.openai_api import ChatBody, CompletionBody
from areal_lora.service import http as api
from areal_lora.service.tinker import passes, sdk_bodies
from areal_lora.service.tinker.sdk_bodies import SampleRequest
from tests.support.edges import CHANGES, MESSAGE_CHANGES, RAW, change_message, changed, written
from tests.support.service.hostile import typed
from tests.support.service.running import section
from tests.support.sizes import size
from tests.support.tinker.hostile import NEVER, bodies as right_bodies
from tests.support.tinker.scripted import ScriptedRun
from tests.support.tinker.tenant_world import API, PROTOBUF, TOKENS, World, check, pass_body, settle

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

N_REQUESTS = size(400, 20_000)
PASS = f"{API}/forward_backward"
SDK: dict[str, type[msgspec.Struct]] = {
    "create_session": sdk_bodies.CreateSession,
    "session_heartbeat": sdk_bodies.OfSession,
    "create_model": sdk_bodies.CreateModelBody,
    "get_info": sdk_bodies.OfModel,
    "unload_model": sdk_bodies.OfModel,
    "optim_step": sdk_bodies.OptimStepBody,
    "save_weights": sdk_bodies.SaveWeights,
    "save_weights_for_sampler": sdk_bodies.SaveForSamplerBody,
    "save_weights_external": sdk_bodies.SaveExternal,
    "load_weights": sdk_bodies.LoadWeights,
    "create_sampling_session": sdk_bodies.CreateSampler,
    "asample": SampleRequest,
    "retrieve_future": sdk_bodies.Retrieve,
    "weights_info": sdk_bodies.Path,
    "cancel_future": sdk_bodies.Retrieve,
    "client/config": sdk_bodies.CreateSession,
    "telemetry": sdk_bodies.OfSession,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    **{f"{API}/{path}": msgspec.json.schema(body) for path, body in SDK.items()},
    "/v1/adapters": AdapterConfig.model_json_schema(),
    "/v1/completions": msgspec.json.schema(CompletionBody),
    "/v1/chat/completions": msgspec.json.schema(ChatBody),
    "/v1/tenants": msgspec.json.schema(api.TenantRequest),
    "/v1/tenants/spare/keys": msgspec.json.schema(api.KeyRequest),
    "ttl": msgspec.json.schema(sdk_bodies.Ttl),
}
NEVER_GRANTED = {f"{API}/unload_model", "/v1/chat/completions"}
"""The model is needed, and the scripted server has no chats."""
LOSSES = ["cross_entropy", "ppo", "gspo", "stable_reinforce"]


def right(path: str, me: World, draw: random.Random) -> Any:
    """What the route accepts, with the names that ``me`` has."""
    model = {"model": me.mark, "max_tokens": 2}
    own: dict[str, Any] = {
        "/v1/adapters": section(name=f"a{draw.randrange(10**6)}"),
        "/v1/completions": model | {"prompt": [5, 6], "n": 1, "echo": False, "logprobs": 0},
        "/v1/chat/completions": model | {"messages": [{"role": "user", "content": "a"}]},
        "/v1/tenants": {"tenant": "spare", "quota": {"adapters": 4, "weight": 1.0}},
        "/v1/tenants/spare/keys": {"label": "more"},
        "ttl": {"ttl_seconds": 1e6},
        f"{API}/unload_model": {"model_id": f"{NEVER}:train:0"},
    }
    return own[path] if path in own else right_bodies(draw, me, [me])[path.removeprefix(f"{API}/")]


Make = Callable[[World, random.Random], tuple[str, bytes]]


def of_json(path: str, changes: list[tuple[int, Any]]) -> Make:
    return lambda me, draw: (path, written(changed(right(path, me, draw), SCHEMAS[path], changes)))


def of_a_pass(loss: str, changes: list[tuple[int, int]]) -> Make:
    def make(me: World, draw: random.Random) -> tuple[str, bytes]:
        message = passes.ForwardBackwardRequest()
        message.ParseFromString(pass_body(me.model, me.seq + 1, TOKENS, loss))
        change_message(message, changes)
        return PASS, message.SerializeToString()

    return make


SHOTS: st.SearchStrategy[Make] = st.one_of(
    *(st.builds(of_json, st.just(path), CHANGES) for path in sorted(SCHEMAS)),
    *(st.builds(of_a_pass, st.just(loss), MESSAGE_CHANGES) for loss in LOSSES),
    st.tuples(st.sampled_from([*sorted(SCHEMAS), PASS]), st.sampled_from(RAW)).map(lambda sent: lambda *_: sent),
)


def test_no_body_ends_the_service_or_has_an_untyped_answer(tmp_path: Path) -> None:
    seed = int(os.environ.get("AREAL_LORA_SEED", random.randrange(10**6)))
    print(f"AREAL_LORA_SEED={seed}")
    draw, statuses, wrong = random.Random(seed), Counter[tuple[str, int]](), dict[str, str]()
    with ScriptedRun(tmp_path / "a run", limits={"tokens": 4096, "queued": 10_000, "adapters": 16}) as run:
        run.tenant("spare")
        me, other = settle(run, "acme", "own", "secret"), settle(run, "bolt", "others", "hidden")
        operator = run.folder.service_key.read_text().strip()

        def send(path: str, raw: bytes) -> httpx.Response:
            headers = PROTOBUF if path == PASS else {"Content-Type": "application/json"}
            headers = headers | {"X-API-Key": operator if path.startswith("/v1/tenants") else me.key}
            url = f"{API}/training_runs/{me.model}/checkpoints/weights/own/ttl" if path == "ttl" else path
            answer = http.request("PUT" if path == "ttl" else "POST", url, content=raw, headers=headers)
            statuses[path, answer.status_code] += 1
            sent = f"{path} {raw[:600]!r}: {answer.status_code} {answer.text[:600]}"
            if answer.status_code >= 500:
                wrong.setdefault(path, sent)
            typed(answer.status_code, answer.headers.get("content-type", ""), answer.content, sent)
            return answer

        def step(make: Make) -> None:
            answer = send(*make(me, draw))
            if answer.status_code == 200 and f'"request_id":"{me.model}:{me.seq + 1}"' in answer.text:
                me.seq += 1
                send(f"{API}/retrieve_future", answer.content)

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=N_REQUESTS,
            deadline=None,
            database=None,
            phases=[hypothesis.Phase.generate],  # the service remembers: a body alone need not fail again
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(SHOTS)
        def storm(make: Make) -> None:
            step(make)

        with httpx.Client(base_url=run.url, timeout=150.0) as http:
            for make in (of_a_pass(LOSSES[0], []), *(of_json(path, []) for path in SCHEMAS)):
                step(make)
            granted = {path for path, status in statuses if status < 300}
            assert granted == {*SCHEMAS, PASS} - NEVER_GRANTED, statuses
            storm()
        print(dict(sorted(statuses.items())))
        assert not wrong, "\n".join(wrong.values())
        assert run.process.poll() is None
        assert "Traceback" not in run.log(), run.log()
        seen = Counter(status < 300 for _, status in statuses.elements())
        assert seen[True] > N_REQUESTS // 4, "a part of it reaches what is behind the checks"
        check(run, other)
        check(run, settle(run, "later", "word", "hidden"))
