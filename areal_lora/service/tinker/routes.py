"""The routes of the SDK: sessions, models, their operations, futures.

    request --> caller, form --> queue (durable, in order) --> request id
    retrieve_future --> queue --> answer, or try_again

Operations of a model come with numbers, in any order, and may come twice. What is wrong with the content of one takes
its place in the order as a `Poison`, so that the operations behind it do not wait for one that never comes.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from areal_lora.operations.messages import OptimStep, Poison
from areal_lora.service.http import Caller, Guard, Handler, body_of, fingerprint, notes_of, sdk_decoded
from areal_lora.service.queue import requests
from areal_lora.service.queue.queue import RequestQueue
from areal_lora.service.refused import Refused
from areal_lora.service.tinker import bodies
from areal_lora.service.tinker.answers import answered, retrieved
from areal_lora.service.tinker.base import NO_OUTPUT_LAYER, Base, check_optimizer
from areal_lora.service.tinker.exports import Exports, keys_of, notes_with
from areal_lora.service.tinker.passes import read_pass
from areal_lora.service.tinker.sampling import Sampling

WAIT_S = 20.0
"""The SDK waits 45 s for an answer, and repeats the request after ``try_again``."""
FLAGS: dict[str, Any] = {
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": True,
    "fwdbwd_max_chunk_len": 1024,
    "fwdbwd_max_chunk_bytes_count": 4_000_000,
    "proto_write_fwdbwd": True,
    "fwd_via_fwdbwd": True,
    "proto_compress_fwdbwd": False,
    "create_model_via_load_weights": True,
    "use_pyqwest_transport": False,
    "custom_loss_server_side": False,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False,
}
"""With them every SDK version sends passes, also forward ones, in one form, and makes a model from a state at once."""
DYNAMIC: dict[str, Any] = {"refresh_interval_sec": 300, "sample_cancel_enabled": False}


class Routes:
    """Sessions, models and their operations."""

    def __init__(self, queue: RequestQueue, base: Base, sampling: Sampling) -> None:
        self._queue, self._base, self._sampling, self._exports = queue, base, sampling, Exports()

    def routes(self, guard: Guard) -> list[Route]:
        posts: dict[str, Handler] = {
            "client/config": self.config,
            "client/dynamic_config": self.dynamic_config,
            "telemetry": self.telemetry,
            "cancel_future": self.accepted,
            "create_session": self.create_session,
            "session_heartbeat": self.heartbeat,
            "sessions/{session}/finish": self.finish,
            "create_model": self.create_model,
            "unload_model": self.unload,
            "get_info": self.info,
            "forward_backward": self.forward_backward,
            "optim_step": self.optim_step,
            "save_weights": self.save,
            "save_weights_for_sampler": self.save_for_sampler,
            "save_weights_external": self.save_external,
            "load_weights": self.load,
            "retrieve_future": self.retrieve,
        }
        gets: dict[str, Handler] = {"healthz": self.health, "get_server_capabilities": self.capabilities}
        return [
            *(Route(f"/api/v1/{path}", guard(handler), methods=["POST"]) for path, handler in posts.items()),
            *(Route(f"/api/v1/{path}", guard(handler), methods=["GET"]) for path, handler in gets.items()),
        ]

    # ------------------------------------------------------------ client

    async def config(self, request: Request, caller: Caller) -> Response:
        await body_of(request, caller)
        return answered(FLAGS | {"sample_max_concurrent_requests": max(1, caller.quota.queued // 2)})

    async def dynamic_config(self, request: Request, caller: Caller) -> Response:
        await body_of(request, caller)
        return answered(DYNAMIC)

    async def telemetry(self, request: Request, caller: Caller) -> Response:
        """What the SDK reports of itself is not kept."""
        await body_of(request, caller, long=True)
        return answered({"status": "accepted"})

    async def accepted(self, request: Request, caller: Caller) -> Response:
        await body_of(request, caller)
        return answered({})

    async def health(self, request: Request, caller: Caller) -> Response:
        return answered({"status": "ok"})

    async def capabilities(self, request: Request, caller: Caller) -> Response:
        base = self._base
        model = {"model_name": base.name, "max_context_length": base.context, "trainable": True, "sampleable": True}
        return answered({"supported_models": [model]})

    # ------------------------------------------------------------ sessions and models

    async def create_session(self, request: Request, caller: Caller) -> Response:
        asked = sdk_decoded(await body_of(request, caller), bodies.CreateSession)
        notes_of(asked.user_metadata)
        session = await self._queue.open_session(caller.tenant, msgspec.json.encode(asked))
        warning = NO_OUTPUT_LAYER
        if crowded := await self._queue.crowded(caller.tenant):
            warning += f"; a new model waits for a place: {crowded}"
        return answered({"type": "create_session", "session_id": session, "warning_message": warning})

    async def heartbeat(self, request: Request, caller: Caller) -> Response:
        asked = sdk_decoded(await body_of(request, caller), bodies.OfSession)
        await self._queue.heartbeat(caller.tenant, asked.session_id)
        return answered({"type": "session_heartbeat"})

    async def finish(self, request: Request, caller: Caller) -> Response:
        await body_of(request, caller)
        await self._queue.end_session(caller.tenant, request.path_params["session"])
        return answered({})

    async def create_model(self, request: Request, caller: Caller) -> Response:
        body = await body_of(request, caller)
        asked = sdk_decoded(body, bodies.CreateModel)
        self._base.check(asked.base_model)
        lora, notes = self._base.lora(asked.lora_config, asked.optimizer_config), notes_of(asked.user_metadata)
        action = requests.CreateModel(lora=lora, notes=notes)
        session, seq, mark = asked.session_id, asked.model_seq_id, _mark("create_model", body)
        return _future(await self._queue.create_model(caller.tenant, session, seq, mark, action))

    async def unload(self, request: Request, caller: Caller) -> Response:
        asked = sdk_decoded(await body_of(request, caller), bodies.ModelRequest)
        return _future(await self._queue.unload(caller.tenant, asked.model_id))

    async def info(self, request: Request, caller: Caller) -> Response:
        asked = sdk_decoded(await body_of(request, caller), bodies.ModelRequest)
        name = caller.tenant, asked.model_id
        exported = self._exports.state(*name)
        lora = exported.lora if exported else await self._queue.change(lambda tx: tx.model(*name).lora)
        data = {"arch": "lora", "model_name": self._base.name, "tokenizer_id": self._base.tokenizer}
        return answered(
            {
                "type": "get_info",
                "model_id": asked.model_id,
                "model_data": data,
                "model_name": self._base.name,
                "is_lora": True,
                "lora_rank": lora.rank,
            }
        )

    # ------------------------------------------------------------ operations

    async def forward_backward(self, request: Request, caller: Caller) -> Response:
        body = await body_of(request, caller, long=True)
        if "protobuf" not in request.headers.get("content-type", ""):
            reason = "passes are read as protobuf, as client/config has it"
            raise Refused(422, "Content-Type", reason, "use an SDK version that the service page names")
        asked = read_pass(body)
        wanted = _poison(asked.wanted) if isinstance(asked.wanted, Refused) else asked.wanted
        mark = _mark("pass", msgspec.msgpack.encode(wanted))  # entries of a map come in any order when it is sent again
        return await self._submit(caller, asked.model, asked.seq, mark, requests.Train(what=wanted))

    async def optim_step(self, request: Request, caller: Caller) -> Response:
        body = await body_of(request, caller)
        asked = sdk_decoded(body, bodies.OptimStep)
        try:
            what: OptimStep | Poison = _step(asked)
        except Refused as refused:
            what = _poison(refused, of_step=True)
        return await self._submit(caller, asked.model_id, asked.seq_id, _mark("step", body), requests.Train(what=what))

    async def save(self, request: Request, caller: Caller) -> Response:
        body = await body_of(request, caller)
        asked = sdk_decoded(body, bodies.SaveWeights)
        name = asked.path or f"{asked.seq_id:06d}"
        try:
            notes = notes_of(asked.user_metadata)
            action: requests.ModelAction = requests.Save(
                name=name, ttl_s=asked.ttl_seconds, overwrite=asked.overwrite, notes=notes
            )
        except Refused as refused:
            action = requests.Refuse(reason=str(refused))
        return await self._submit(caller, asked.model_id, asked.seq_id, _mark("save", body), action)

    async def save_for_sampler(self, request: Request, caller: Caller) -> Response:
        body = await body_of(request, caller)
        asked = sdk_decoded(body, bodies.SaveForSampler)
        try:
            action: requests.ModelAction = requests.SaveForSampler(
                name=asked.path,
                sampler_seq=asked.sampling_session_seq_id if asked.path is None else None,
                in_flight=asked.kind == "inflight",
                ttl_s=asked.ttl_seconds,
                notes=notes_of(asked.user_metadata),
            )
        except Refused as refused:
            action = requests.Refuse(reason=str(refused))
        return await self._submit(caller, asked.model_id, asked.seq_id, _mark("sampler", body), action)

    async def save_external(self, request: Request, caller: Caller) -> Response:
        body = await body_of(request, caller)
        asked = sdk_decoded(body, bodies.SaveExternal)
        if (path := self._exports.save(caller.tenant, asked.model_id, asked.age_encryption_recipients)) is not None:
            return _future(path)
        try:
            notes = notes_with(keys_of(asked.age_encryption_recipients))
            action: requests.ModelAction = requests.Save(name=asked.path, ttl_s=asked.ttl_seconds, notes=notes)
        except Refused as refused:
            action = requests.Refuse(reason=str(refused))
        return await self._submit(caller, asked.model_id, asked.seq_id, _mark("external", body), action)

    async def load(self, request: Request, caller: Caller) -> Response:
        """Into a model that there is, or into a new one with the settings of the model that saved the state."""
        body = await body_of(request, caller)
        asked = sdk_decoded(body, bodies.LoadWeights)
        if asked.weights_access_token is not None:
            raise Refused(422, "weights_access_token", "states of other accounts cannot be read", "leave it out")
        check_optimizer(asked.optimizer_config)
        self._base.check(asked.base_model)
        action, mark = requests.Load(path=asked.path, optimizer=asked.optimizer), _mark("load", body)
        if asked.model_id is not None and asked.seq_id is not None:
            return await self._submit(caller, asked.model_id, asked.seq_id, mark, action)
        if asked.session_id is None or asked.model_seq_id is None:
            fix = "send model_id and seq_id, or session_id and model_seq_id"
            raise Refused(422, "model_id", "it names no model", fix)
        made = requests.CreateModel(lora=None, load=action, notes=notes_of(asked.user_metadata))
        if self._exports.wanted(made.notes):
            await self._queue.heartbeat(caller.tenant, asked.session_id)
            state = await self._queue.change(lambda tx: tx.state(caller.tenant, asked.path))
            return _future(self._exports.begin(caller.tenant, asked.session_id, asked.model_seq_id, state))
        return _future(await self._queue.create_model(caller.tenant, asked.session_id, asked.model_seq_id, mark, made))

    async def retrieve(self, request: Request, caller: Caller) -> Response:
        asked = sdk_decoded(await body_of(request, caller), bodies.Retrieve)
        if (sample := await self._sampling.retrieve(request, caller, asked.request_id, WAIT_S)) is not None:
            return sample
        if (exported := self._exports.answer(caller.tenant, asked.request_id)) is not None:
            return retrieved(exported, asked.request_id)
        return retrieved(await self._queue.outcome(caller.tenant, asked.request_id, WAIT_S), asked.request_id)

    async def _submit(self, caller: Caller, model: str, seq: int, mark: str, action: requests.ModelAction) -> Response:
        return _future(await self._queue.submit(caller.tenant, model, seq, mark, action))


def _step(asked: bodies.OptimStep) -> OptimStep:
    if asked.optimizer_params is not None or asked.adam_params is None:
        raise Refused(422, "optimizer_params", "only AdamW is supported", "send adam_params")
    adam = sdk_decoded(asked.adam_params, bodies.AdamParams)
    for name, least, below in (
        ("learning_rate", 0.0, math.inf),
        ("beta1", 0.0, 1.0),
        ("beta2", 0.0, 1.0),
        ("eps", 0.0, math.inf),
        ("weight_decay", 0.0, math.inf),
        ("grad_clip_norm", 0.0, math.inf),
    ):
        if not least <= (value := getattr(adam, name)) < below:
            raise Refused(422, f"adam_params.{name}", f"{value} is not from {least} to {below}", "correct it")
    return OptimStep(
        lr=adam.learning_rate,
        beta1=adam.beta1,
        beta2=adam.beta2,
        eps=adam.eps,
        weight_decay=adam.weight_decay,
        grad_clip_norm=adam.grad_clip_norm,
    )


def _poison(refused: Refused, *, of_step: bool = False) -> Poison:
    return Poison(reason=str(refused), by_client=True, of_step=of_step)


def _mark(verb: str, body: bytes) -> str:
    """What has to be equal for two requests under one number to be one."""
    return fingerprint(verb, body)


def _future(request: str) -> Response:
    return answered({"request_id": request})
