"""The routes of the SDK: sessions, models, their operations, futures.

    request --> caller, form --> queue (durable, in order) --> request id
    retrieve_future --> queue --> answer, or try_again

Operations of a model come with numbers, in any order, and may come twice. What is wrong with the content of one takes
its place in the order as a `Poison`, so that the operations behind it do not wait for one that never comes.

Calls of the SDK that this service does not have: refused by name, at once, with what to use instead.

The status is 422, because clients repeat everything from 500 on.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.routing import Route

from areal_lora.config.models import Config
from areal_lora.errors import RequestError
from areal_lora.operations.protocol import OptimStep, Poison
from areal_lora.run_folder.paths import RunFolder
from areal_lora.service import http
from areal_lora.service.gateway import Gateway, Meter
from areal_lora.service.queue import requests
from areal_lora.service.queue.queue import RequestQueue
from areal_lora.service.tinker import sdk_bodies
from areal_lora.service.tinker.checkpoints import BETWEEN, KEYS, STATE, Archives, Checkpoints, Exports, keys_of
from areal_lora.service.tinker.passes import MAX_DATA, read_pass
from areal_lora.service.tinker.sample_tasks import NO_OUTPUT_LAYER, Base, Sampling, check_optimizer

WAIT_S = 20.0  # the SDK waits 45 s for an answer, and repeats the request after ``try_again``
FLAGS: dict[str, Any] = {
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": False,  # else the first part comes last: it would wait behind a queue that is full
    "fwdbwd_max_chunk_len": MAX_DATA,
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
CREATORS = {"tinker_cookbook.weights.download", "tinker checkpoint download"}  # of models that are of a download


class Sdk:
    """``async with Sdk(...)``; inside it samples that an earlier process has acknowledged are in progress."""

    def __init__(
        self, config: Config, run_folder: RunFolder, queue: RequestQueue, gateway: Gateway, meter: Meter
    ) -> None:
        self._queue, self._base, self._exports = queue, Base.of(config), Exports()
        self._sampling = Sampling(queue, self._base, gateway, meter)
        self._saved = (Checkpoints(queue, self._base), Archives(queue, config, run_folder))

    async def __aenter__(self) -> "Sdk":
        await self._sampling.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._sampling.close()

    def routes(self, guard: http.Guard) -> list[Route]:
        json: dict[str, tuple[type[Any], JsonHandler]] = {
            "create_session": (sdk_bodies.CreateSession, self.create_session),
            "session_heartbeat": (sdk_bodies.OfSession, self.heartbeat),
            "create_model": (sdk_bodies.CreateModelBody, self.create_model),
            "unload_model": (sdk_bodies.OfModel, self.unload),
            "get_info": (sdk_bodies.OfModel, self.info),
            "save_weights_external": (sdk_bodies.SaveExternal, self.save_external),
            "load_weights": (sdk_bodies.LoadWeights, self.load),
        }
        posts: dict[str, http.Handler] = {
            "client/config": _config,
            "client/dynamic_config": partial(_constant, DYNAMIC),
            "telemetry": partial(_constant, {"status": "accepted"}, long=True),  # it is not kept
            "cancel_future": partial(_constant, {}),
            "sessions/{session}/finish": self.finish,
            "forward_backward": self.forward_backward,
            "retrieve_future": self.retrieve,
        }
        base = self._base
        model = {"model_name": base.name, "max_context_length": base.context, "trainable": True, "sampleable": True}
        json |= {verb: (kind, partial(self._submit, action)) for verb, (kind, action) in _ACTIONS.items()}
        posts |= {verb: _json(verb, kind, handle) for verb, (kind, handle) in json.items()}
        return [
            *(guard("POST", f"/api/v1/{path}", handler) for path, handler in posts.items()),
            guard("GET", "/api/v1/healthz", partial(_constant, {"status": "ok"})),
            guard("GET", "/api/v1/get_server_capabilities", partial(_constant, {"supported_models": [model]})),
            *(route for part in (self._sampling, *self._saved) for route in part.routes(guard)),
            *(
                guard(method, path, partial(_refuse, name, reason, fix))
                for name, methods, path, reason, fix in _CALLS
                for method in methods.split()
            ),
        ]

    async def create_session(self, caller: http.Caller, body: sdk_bodies.CreateSession, mark: str) -> http.Answered:
        http.notes_of(body.user_metadata)
        session = await self._queue.open_session(caller.tenant, msgspec.json.encode(body))
        warning = NO_OUTPUT_LAYER
        if crowded := await self._queue.placement.crowded(caller.tenant):
            warning += f"; a new model waits for a place: {crowded}"
        return {"type": "create_session", "session_id": session, "warning_message": warning}

    async def heartbeat(self, caller: http.Caller, body: sdk_bodies.OfSession, mark: str) -> http.Answered:
        await self._queue.heartbeat(caller.tenant, body.session_id)
        return {"type": "session_heartbeat"}

    async def finish(self, request: Request, caller: http.Caller) -> http.Answered:
        await http.body_of(request, caller)
        await self._queue.end_session(caller.tenant, request.path_params["session"])
        return {}

    async def create_model(self, caller: http.Caller, body: sdk_bodies.CreateModelBody, mark: str) -> http.Answered:
        self._base.check(body.base_model)
        lora, notes = self._base.lora(body.lora_config, body.optimizer_config), http.notes_of(body.user_metadata)
        action = requests.CreateModel(lora=lora, notes=notes)
        return _future(await self._queue.create_model(caller.tenant, body.session_id, body.model_seq_id, mark, action))

    async def unload(self, caller: http.Caller, body: sdk_bodies.OfModel, mark: str) -> http.Answered:
        return _future(await self._queue.unload(caller.tenant, body.model_id))

    async def info(self, caller: http.Caller, body: sdk_bodies.OfModel, mark: str) -> http.Answered:
        name = caller.tenant, body.model_id
        exported = self._exports.state(*name)
        lora = exported.lora if exported else await self._queue.change(lambda tx: tx.model(*name).lora)
        named = {"model_name": self._base.name}
        data = {"arch": "lora", "tokenizer_id": self._base.tokenizer} | named
        return {"type": "get_info", "model_id": body.model_id, "model_data": data} | named | self._base.about(lora)

    async def forward_backward(self, request: Request, caller: http.Caller) -> http.Answered:
        body = await http.body_of(request, caller, long=True)
        if "protobuf" not in request.headers.get("content-type", ""):
            raise RequestError("Content-Type", "passes are read as protobuf, as client/config has it", http.SDK_FIX)
        found = read_pass(body)
        wrong = found.wanted
        what = Poison(reason=str(wrong), by_client=True) if isinstance(wrong, RequestError) else wrong
        # Entries of a map come in any order when it is sent again.
        mark = http.fingerprint("pass", msgspec.msgpack.encode(what))
        action = requests.Train(what=what)
        return _future(await self._queue.submit(caller.tenant, found.model, found.seq, mark, action))

    async def save_external(self, caller: http.Caller, body: sdk_bodies.SaveExternal, mark: str) -> http.Answered:
        if (path := self._exports.save(caller.tenant, body.model_id, body.age_encryption_recipients)) is not None:
            return _future(path)
        return await self._submit(_save_external, caller, body, mark)

    async def load(self, caller: http.Caller, body: sdk_bodies.LoadWeights, mark: str) -> http.Answered:
        """Into a model that there is, or into a new one with the settings of the model that saved the state."""
        if body.weights_access_token is not None:
            raise RequestError("weights_access_token", "states of other accounts cannot be read", "leave it out")
        check_optimizer(body.optimizer_config)
        self._base.check(body.base_model)
        action = requests.Load(path=body.path, optimizer=body.optimizer)
        if body.model_id is not None and body.seq_id is not None:
            return _future(await self._queue.submit(caller.tenant, body.model_id, body.seq_id, mark, action))
        if body.session_id is None or body.model_seq_id is None:
            fix = "send model_id and seq_id, or session_id and model_seq_id"
            raise RequestError("model_id", "it names no model", fix)
        made = requests.CreateModel(lora=None, load=action, notes=http.notes_of(body.user_metadata))
        if made.notes.get("created_by") in CREATORS:
            await self._queue.heartbeat(caller.tenant, body.session_id)
            state = await self._queue.change(lambda tx: tx.state(caller.tenant, body.path))
            return _future(self._exports.start(caller.tenant, body.session_id, body.model_seq_id, state))
        return _future(await self._queue.create_model(caller.tenant, body.session_id, body.model_seq_id, mark, made))

    async def retrieve(self, request: Request, caller: http.Caller) -> http.Answered:
        name = http.sdk_decoded(await http.body_of(request, caller), sdk_bodies.Retrieve).request_id
        if (sample := await self._sampling.retrieve(request, caller, name, WAIT_S)) is not None:
            return sample
        if (exported := self._exports.answer(caller.tenant, name)) is not None:
            return sdk_bodies.retrieved(exported, name)
        return sdk_bodies.retrieved(await self._queue.outcome(caller.tenant, name, WAIT_S), name)

    async def _submit(
        self, action: Callable[[Any], requests.ModelAction], caller: http.Caller, body: sdk_bodies.OfSequence, mark: str
    ) -> http.Answered:
        """What is wrong with the content takes its place in the order, so that the requests behind it do not wait."""
        try:
            made = action(body)
        except RequestError as refused:
            made = requests.Refuse(reason=str(refused))
        return _future(await self._queue.submit(caller.tenant, body.model_id, body.seq_id, mark, made))


JsonHandler = Callable[[http.Caller, Any, str], Awaitable[http.Answered]]
"""Of a caller, its body, and what has to be equal for two requests under one number to be one."""


def _json(verb: str, kind: type[Any], handle: JsonHandler) -> http.Handler:
    async def handler(request: Request, caller: http.Caller) -> http.Answered:
        body = await http.body_of(request, caller)
        return await handle(caller, http.sdk_decoded(body, kind), http.fingerprint(verb, body))

    return handler


async def _config(request: Request, caller: http.Caller) -> http.Answered:
    await http.body_of(request, caller)
    return FLAGS | {"sample_max_concurrent_requests": max(1, caller.quota.queued // 2)}


async def _constant(
    answer: dict[str, Any], request: Request, caller: http.Caller, *, long: bool = False
) -> http.Answered:
    await http.body_of(request, caller, long=long, kept=False)
    return answer


def _optim_step(body: sdk_bodies.OptimStepBody) -> requests.Train:
    try:
        if body.optimizer_params is not None or body.adam_params is None:
            raise RequestError("optimizer_params", "only AdamW is supported", "send adam_params")
        step = http.sdk_decoded({"adam_params": body.adam_params}, sdk_bodies.AdamStep)
        values = msgspec.structs.asdict(step.adam_params)
        return requests.Train(what=OptimStep(lr=values.pop("learning_rate"), **values))
    except RequestError as refused:
        return requests.Train(what=Poison(reason=str(refused), by_client=True, of_step=True))


def _save(body: sdk_bodies.SaveWeights) -> requests.Save:
    name, notes = body.path or f"{body.seq_id:06d}", http.notes_of(body.user_metadata)
    return requests.Save(name=name, ttl_s=body.ttl_seconds, overwrite=body.overwrite, notes=notes)


def _save_for_sampler(body: sdk_bodies.SaveForSamplerBody) -> requests.Save:
    return requests.Save(
        for_sampler=True,
        name=body.path,
        overwrite=True,
        sampler_seq=body.sampling_session_seq_id if body.path is None else None,
        in_flight=body.kind == "inflight",
        ttl_s=body.ttl_seconds,
        notes=http.notes_of(body.user_metadata),
    )


def _save_external(body: sdk_bodies.SaveExternal) -> requests.Save:
    keys = keys_of(body.age_encryption_recipients)
    return requests.Save(name=body.path, ttl_s=body.ttl_seconds, notes={KEYS: BETWEEN.join(keys)} if keys else {})


_ACTIONS: dict[str, tuple[type[Any], Callable[[Any], requests.ModelAction]]] = {
    "optim_step": (sdk_bodies.OptimStepBody, _optim_step),
    "save_weights": (sdk_bodies.SaveWeights, _save),
    "save_weights_for_sampler": (sdk_bodies.SaveForSamplerBody, _save_for_sampler),
}
"""Requests of a model that become one action of the queue. They may raise RequestError for what is in the body."""


def _future(request: str) -> http.Answered:
    return {"request_id": request}


_HERE = "/api/v1"
_SESSION = f"{_HERE}/sessions/{{session}}"
_PROJECTS, _KEYS = "sessions of this service are in no projects", "keys are used as they are"
_CALLS = (
    ("publish", "POST DELETE", f"{STATE}/publish", "saved states are of one tenant alone", "download and send them"),
    ("copy_weights", "POST", f"{_HERE}/copy_weights", _PROJECTS, "load the state where it is needed"),
    ("project", "PUT", f"{_SESSION}/project", _PROJECTS, "leave it out"),
    ("trace_export", "GET", f"{_SESSION}/trace_export", "sessions are not traced", "use the records of the run"),
    ("search_sessions", "POST", f"{_HERE}/sessions/search", "sessions are not searched", "use list_sessions"),
    ("create_custom_loss", "POST", f"{_HERE}/create_custom_loss", "they run at the client", "forward_backward_custom"),
    ("join_sampling_session", "POST", f"{_HERE}/join_sampling_session", "clients choose numbers", "leave it out"),
    ("retrieve_futures", "POST", f"{_HERE}/retrieve_futures", "one request at a time", "use retrieve_future"),
    ("forward", "POST", f"{_HERE}/forward", "forward passes come as forward_backward", http.SDK_FIX),
    ("auth_token", "POST", f"{_HERE}/auth/token", _KEYS, "send X-API-Key"),
    ("apikey", "GET DELETE", f"{_HERE}/auth/apikey/me", _KEYS, "turn to the operator of the run"),
    ("audit", "GET", f"{_HERE}/audit", "there is no audit log", "use GET /v1/adapters"),
    ("billing", "GET", f"{_HERE}/billing/{{what:path}}", "this service keeps no accounts", "use the run's records"),
)
"""Name, methods, path, reason, fix of what this service does not have; of some, because client/config states so."""


async def _refuse(name: str, reason: str, fix: str, request: Request, caller: http.Caller) -> http.Answered:
    await http.body_of(request, caller, long=True, kept=False)
    raise RequestError(name, reason, fix)
