"""What a tenant of a service has, made over the wire without the SDK: an adapter of the API, a model with saved states,
a sampling session, futures that are answered. Its secret words are in names, notes and reasons of it.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from areal_lora.service.tinker import passes
from tests.support.service.running import section
from tests.support.tinker.scripted import ScriptedRun

API = "/api/v1"
WAIT_S = 150.0
TOKENS = [5, 6, 7, 8, 9]
PROTOBUF = {"Content-Type": "application/x-protobuf"}


def pass_body(model: str, seq: int, tokens: list[int] = TOKENS, loss: str = "cross_entropy") -> bytes:
    message = passes.ForwardBackwardRequest(model_id=model.encode(), seq_id=seq, loss_fn=loss.encode())
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(tokens[:-1], "<i4").tobytes()
    inputs = {
        "target_tokens": (passes.INT64, np.array(tokens[1:], "<i8")),
        "weights": (passes.FLOAT32, np.ones(len(tokens) - 1, "<f4")),
    }
    for key, (kind, values) in inputs.items():
        value = datum.loss_fn_inputs.add(key=key.encode()).value
        value.dense, value.dtype = values.tobytes(), kind
    encoded: bytes = message.SerializeToString()
    return encoded


def sample_body(sampler: str, seq: int, **changes: Any) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [3, 4]}]}
    known = {"sampling_session_id": sampler, "seq_id": seq, "prompt": prompt, "sampling_params": {"max_tokens": 3}}
    return known | changes


@dataclass(slots=True)
class World:
    """``mark`` is in names that others may guess, ``secret`` in what no one else ever sends.

    ``answers`` are those of ``futures``; ``sent`` are requests that were acknowledged, with their acknowledgement.
    """

    tenant: str
    key: str
    mark: str
    secret: str
    session: str = ""
    seq: int = 0
    answers: dict[str, bytes] = field(default_factory=dict)
    sent: list[tuple[str, dict[str, str], bytes, bytes]] = field(default_factory=list)

    @property
    def model(self) -> str:
        return f"{self.session}:train:0"

    @property
    def sampler(self) -> str:
        return f"{self.session}:sample:0"

    @property
    def states(self) -> list[str]:
        return [f"tinker://{self.model}/{kind}/{self.mark}" for kind in ("weights", "sampler_weights")]

    @property
    def keyed(self) -> dict[str, str]:
        return {"X-API-Key": self.key}

    def ids(self) -> list[str]:
        return [self.session, self.model, self.sampler, *self.states, *self.answers]


def settle(run: ScriptedRun, tenant: str, mark: str, secret: str) -> World:
    """A new tenant with all of that."""
    it = World(tenant, run.tenant(tenant), mark, secret)
    with httpx.Client(base_url=run.url, headers=it.keyed, timeout=WAIT_S) as http:
        own = section(name=mark, evals=[{"name": secret}])
        http.post("/v1/adapters", json=own, headers={"Authorization": f"Bearer {it.key}"}).raise_for_status()
        notes = {"word": secret}
        opened = _post(http, "create_session", {"user_metadata": notes, "display_name": secret, "sdk_version": "0"})
        it.session = opened["session_id"]
        made = {"session_id": it.session, "model_seq_id": 0, "base_model": "tiny_model", "lora_config": {"rank": 4}}
        actions: list[tuple[str, Any]] = [
            ("create_model", made | {"user_metadata": notes}),
            ("forward_backward", pass_body(it.model, 1)),
            ("optim_step", {"model_id": it.model, "seq_id": 2, "adam_params": {}}),
            *(
                ("save_weights", {"model_id": it.model, "seq_id": 3 + k, "path": n})
                for k, n in enumerate((mark, secret))
            ),
            ("save_weights_for_sampler", {"model_id": it.model, "seq_id": 5, "path": mark}),
            ("save_weights_for_sampler", {"model_id": it.model, "seq_id": 6, "sampling_session_seq_id": 0}),
        ]
        for path, body in actions:
            _ask(http, it, path, body)
        _ask(http, it, "asample", sample_body(it.sampler, 0))
        it.seq = 6
    with run.folder.metrics.open("a") as file:
        state = {"kind": "state", "adapter": f"{tenant}-{mark}.1", "state": "active", "version": 0, "reason": secret}
        file.write(json.dumps(state) + "\n")
    return it


def check(run: ScriptedRun, it: World) -> None:
    """The tenant still has all of that, with the same answers; those of samples leave after a while."""
    with httpx.Client(base_url=run.url, headers=it.keyed, timeout=WAIT_S) as http:
        kept = {name: answer for name, answer in it.answers.items() if ":sample:" not in name}
        assert {name: _retrieved(http, name) for name in kept} == kept
        listed = http.get(f"{API}/training_runs/{it.model}/checkpoints").raise_for_status().json()["checkpoints"]
        paths = {each["tinker_path"] for each in listed}
        assert paths >= {*it.states, f"tinker://{it.model}/weights/{it.secret}"}
        noted = http.get(f"{API}/sessions/{it.session}").raise_for_status().json()
        assert (noted["user_metadata"], noted["display_name"]) == ({"word": it.secret}, it.secret)


def _ask(http: httpx.Client, it: World, path: str, body: dict[str, Any] | bytes) -> None:
    content, headers = (body, PROTOBUF) if isinstance(body, bytes) else (json.dumps(body).encode(), {})
    answer = http.post(f"{API}/{path}", content=content, headers=headers).raise_for_status()
    it.sent.append((path, headers, content, answer.content))
    name = answer.json()["request_id"]
    it.answers[name] = _retrieved(http, name)


def _retrieved(http: httpx.Client, name: str) -> bytes:
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        answer = http.post(f"{API}/retrieve_future", json={"request_id": name}).raise_for_status()
        if answer.headers["content-type"] != "application/json" or answer.json().get("type") != "try_again":
            assert b'"error"' not in answer.content, answer.text
            return answer.content
    raise AssertionError(f"{name} has no answer")


def _post(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = http.post(f"{API}/{path}", json=body).raise_for_status().json()
    return found
