"""Sampling sessions and samples. A server of the run answers a sample; what comes of it is kept until it is fetched.

    asample --> the queue keeps the request --> its id     retrieve_future --> the outcome; the queue may forget

What comes of samples is in memory: a service that starts samples again what no client has fetched.
"""

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from areal_lora.config.models import Config
from areal_lora.config.sizing.slots import served_targets
from areal_lora.errors import RequestError, Unavailable
from areal_lora.families.family import ATTENTION_LINEARS
from areal_lora.operations.protocol import OperationFailure
from areal_lora.processes.log import get_logger
from areal_lora.service.gateway import Gateway, Meter, Names, n_tokens
from areal_lora.service.http import Answered, Caller, Guard, body_of, fingerprint, sdk_decoded
from areal_lora.service.queue.client_sessions import kept_samples, open_sampler
from areal_lora.service.queue.queue import RequestQueue
from areal_lora.service.queue.requests import Lora, Pending
from areal_lora.service.tinker import sdk_bodies

log = get_logger(__name__)

ALPHA = 32.0  # of every model: the SDK names none
NO_OUTPUT_LAYER = "train_unembed is ignored: this service trains attention and MLP, not the output layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """``name`` is the hub's, or that of the model's folder. ``tokenizer`` is what transformers loads it from.

    ``aliases`` are other names for it.
    """

    name: str
    aliases: frozenset[str] = frozenset()
    tokenizer: str
    context: int
    targets: tuple[str, ...]

    @classmethod
    def of(cls, config: Config) -> "Base":
        folder = Path(config.model.path)
        local = folder.is_dir()
        name, aliases = _names(folder) if local else (config.model.path, frozenset())
        return cls(
            name=name,
            aliases=aliases,
            tokenizer=str(folder.resolve()) if local else config.model.path,
            context=config.rollout.max_model_len,
            targets=served_targets(config),
        )

    def check(self, given: str | None) -> None:
        """Raises RequestError for the name of another base."""
        if given not in {None, self.name, self.tokenizer, *self.aliases}:
            raise RequestError("base_model", f"{str(given)[:64]!r} is not the base of this run", f"use {self.name}")

    def lora(self, given: sdk_bodies.LoraConfig | None, optimizer: sdk_bodies.OptimizerBody | None) -> Lora:
        """The settings of a model. Raises RequestError."""
        if given is None:
            raise RequestError("lora_config", "there is none: only adapters are trained", "send lora_config")
        check_optimizer(optimizer)
        targets = tuple(t for t in self.targets if (given.train_attn if of_attention(t) else given.train_mlp))
        if not targets:
            reason = f"none of the modules that it names can be adapted here: {', '.join(self.targets)} can"
            raise RequestError("lora_config", reason, "set train_attn or train_mlp")
        return Lora(rank=given.rank, alpha=ALPHA, target_modules=targets, seed=given.seed)

    def about(self, lora: Lora) -> dict[str, object]:
        """What the SDK reads of every model."""
        return {"base_model": self.name, "is_lora": True, "lora_rank": lora.rank}


def _names(folder: Path) -> tuple[str, frozenset[str]]:
    """Of a base in a folder: its hub name if it is in the hub's cache, else the folder's; the others that it may have.

    Clients look up tokenizers and templates by the hub's name. A folder ``ORG/MODEL`` has that one as well.
    """
    for each in folder.resolve().parents:
        if each.name.startswith("models--"):  # HUB/models--ORG--MODEL/snapshots/COMMIT
            return each.name.removeprefix("models--").replace("--", "/"), frozenset()
    ways = (folder.absolute(), folder.resolve())
    others = {name for way in ways for name in (way.name, f"{way.parent.name}/{way.name}", str(way))}
    return folder.resolve().name, frozenset(others)


def check_optimizer(optimizer: sdk_bodies.OptimizerBody | None) -> None:
    if optimizer is not None and optimizer.type != "adamw":
        raise RequestError("optimizer_config", f"{optimizer.type[:64]!r} is not supported", "use AdamW")


def of_attention(target: str) -> bool:
    return target.rpartition(".")[2] in ATTENTION_LINEARS or "attn" in target


BASE = "base"
PAUSE_S = 0.25
PATIENCE_S = 900.0
"""A sample waits this long for a server or a place that holds what it samples; servers restart in that time."""
FAILURES = 3  # a server that fails is often not to blame, but a sample that ends servers must not end all of them
KEPT = 4
"""Samples of a tenant, answered ones included, as a multiple of those in progress that its quota allows."""
KEPT_MIB = 256
"""Of a tenant in memory, requests and answers, whatever its quota of data in the file."""
GRACE_S, UNFETCHED_S = 60.0, 900.0
"""An answer is kept so long after it was fetched, for a client that repeats the fetch, and so long without one."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Sample:
    """``found`` is the SDK's message, or why there is none. ``waits`` is why it has not started.

    ``n_bytes`` are those of the request while the queue keeps it, and those of the answer. ``tokens`` are in progress.
    ``requests`` wait until the file has it.
    """

    tenant: str
    mark: str
    tokens: int
    n_bytes: int = 0
    requests: int = 0
    task: asyncio.Task[None] | None = None
    found: bytes | OperationFailure | None = None
    waits: Pending | None = None
    fetched: bool = False
    leaves: asyncio.TimerHandle | None = None


class _Samples(dict[str, _Sample]):
    """Those of one tenant. What bounds them is counted as it changes, as there are thousands; `insert`, `remove`."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: dict[str, _Sample] = {}
        self.in_progress = self.n_bytes = 0

    def insert(self, name: str, sample: _Sample, n_bytes: int) -> None:
        self[name] = sample
        self.in_progress += 1
        self.resize(sample, n_bytes)

    def remove(self, name: str) -> None:
        self.fetched.pop(name, None)
        self.resize(self.pop(name), 0)

    def resize(self, sample: _Sample, n_bytes: int) -> None:
        self.n_bytes += n_bytes - sample.n_bytes
        sample.n_bytes = n_bytes


class Sampling:
    def __init__(self, queue: RequestQueue, base: Base, gateway: Gateway, meter: Meter) -> None:
        self._queue, self._base, self._gateway, self._meter = queue, base, gateway, meter
        self._samples: defaultdict[str, _Samples] = defaultdict(_Samples)  # by tenant

    def routes(self, guard: Guard) -> list[Route]:
        return [
            guard("POST", "/api/v1/create_sampling_session", self.create),
            guard("POST", "/api/v1/asample", self.sample),
            guard("GET", "/api/v1/samplers/{sampler}", self.show),
        ]

    async def start(self) -> None:
        """Sample again what an earlier process has acknowledged."""
        for each in await self._queue.change(kept_samples):
            wanted: sdk_bodies.SampleRequest | RequestError
            try:
                wanted = sdk_bodies.read_sample(each.body)
                tokens = self._tokens(wanted)
            except RequestError as refused:  # an earlier release took it; it fails in its turn
                wanted, tokens = refused, 0
            sample = _Sample(tenant=each.tenant, mark=each.fingerprint, tokens=tokens)
            self._meter.start(each.tenant, tokens)
            self._samples[each.tenant].insert(each.sample, sample, len(each.body))
            sample.task = asyncio.create_task(self._answer(sample, each.sample, wanted))

    async def close(self) -> None:
        tasks = [each.task for mine in self._samples.values() for each in mine.values() if each.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def create(self, request: Request, caller: Caller) -> Answered:
        parsed = sdk_decoded(await body_of(request, caller), sdk_bodies.CreateSampler)
        self._base.check(parsed.base_model)
        if parsed.base_model is None and parsed.model_path is None:
            raise RequestError("model_path", "neither a state nor a base is named", "send model_path or base_model")
        session, seq, path = parsed.session_id, parsed.sampling_session_seq_id, parsed.model_path
        sampler = await self._queue.change(lambda tx: open_sampler(tx, caller.tenant, session, seq, path))
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    async def show(self, request: Request, caller: Caller) -> Answered:
        name = request.path_params["sampler"]
        sampler = await self._queue.change(lambda tx: tx.sampler(caller.tenant, name))
        return {"sampler_id": sampler.sampler, "base_model": self._base.name, "model_path": sampler.path}

    async def sample(self, request: Request, caller: Caller) -> Answered:
        """The same request again has the id of the first one."""
        body = await body_of(request, caller, long=True)
        parsed, mark = sdk_bodies.read_sample(body), fingerprint("sample", body)
        session = parsed.sampling_session_id
        sampler = (await self._queue.change(lambda tx: tx.sampler(caller.tenant, session))).sampler
        name = f"{sampler}:{parsed.seq_id}"
        if (sample := self._samples[caller.tenant].get(name)) is None:
            tokens = self._tokens(parsed)
            self._make_room(caller, len(body))
            self._meter.start(caller.tenant, tokens, caller.quota)
            sample = _Sample(tenant=caller.tenant, mark=mark, tokens=tokens)
            self._samples[caller.tenant].insert(name, sample, len(body))
        if sample.mark != mark:
            raise RequestError("seq_id", "another request came under this number", "use a new number")
        if sample.task is None:
            sample.requests += 1
            try:
                await self._queue.keep_sample(caller.tenant, sampler, name, mark, body)
                if sample.task is None:  # the same request may have come twice meanwhile
                    sample.task = asyncio.create_task(self._answer(sample, name, parsed))
            finally:
                sample.requests -= 1
                if sample.task is None and not sample.requests:
                    self._samples[caller.tenant].remove(name)
                    self._unmeter(sample)
        ids = [f"{name}:{k}" for k in range(parsed.num_samples)]
        return {"request_id": name, "sample_sequence_ids": ids}

    async def retrieve(self, request: Request, caller: Caller, name: str, wait_s: float) -> Answered | None:
        """The answer of a sample; None for the id of something else. Raises RequestError."""
        if (sample := self._samples[caller.tenant].get(name)) is None:
            if ":sample:" in name:
                raise RequestError("request_id", "this sample is no longer kept", "sample again", status=410)
            return None
        if sample.task is not None:
            await asyncio.wait({sample.task}, timeout=wait_s)
        if (
            sample.found is not None
            and not sample.fetched
            and not await request.is_disconnected()
            and self._samples[caller.tenant].get(name) is sample
        ):
            sample.fetched = True
            self._samples[caller.tenant].fetched[name] = sample
            self._samples[caller.tenant].resize(sample, _length(sample.found))
            self._queue.dropped_samples.add(name)
            self._keep(name, sample, GRACE_S)
        match sample.found:
            case bytes(body):
                return Response(body, media_type=sdk_bodies.PROTOBUF)
            case OperationFailure() as failed:
                return sdk_bodies.retrieved(failed, name)
            case None:
                return sdk_bodies.retrieved(sample.waits or Pending(reason="it is being sampled"), name)

    def _tokens(self, parsed: sdk_bodies.SampleRequest) -> int:
        body = sdk_bodies.completion(parsed, BASE, self._base.context, pinned=False)
        as_text = {"prompt": "-" * parsed.n_prompt}  # which counts the same, and whose elements are not checked again
        return n_tokens(body | as_text, self._base.context)

    def _make_room(self, caller: Caller, n_bytes: int) -> None:
        """Forget samples of a tenant that were fetched, oldest first, if they are many. Raises RequestError (429)."""
        mine = self._samples[caller.tenant]
        most_mib, most = min(caller.quota.queued_mib, KEPT_MIB), KEPT * caller.quota.queued

        def full() -> bool:
            return n_bytes + mine.n_bytes > most_mib << 20 or len(mine) >= most

        while full() and mine.fetched:
            self._forget(*next(iter(mine.fetched.items())))
        if mine.in_progress >= caller.quota.queued or full():
            reason = f"{caller.quota.queued} samples, or {most_mib} MiB of them, are the quota"
            raise RequestError("asample", reason, "fetch some, or wait for those in progress", status=429, retry_s=1)

    def _keep(self, name: str, sample: _Sample, for_s: float) -> None:
        if sample.leaves is not None:
            sample.leaves.cancel()
        sample.leaves = asyncio.get_running_loop().call_later(for_s, self._forget, name, sample)

    def _forget(self, name: str, sample: _Sample) -> None:
        if sample.leaves is not None:
            sample.leaves.cancel()
        if self._samples[sample.tenant].get(name) is sample:
            self._samples[sample.tenant].remove(name)
            self._queue.dropped_samples.add(name)

    async def _answer(self, sample: _Sample, name: str, wanted: sdk_bodies.SampleRequest | RequestError) -> None:
        try:
            if isinstance(wanted, RequestError):
                raise wanted
            sample.found = await self._sampled(sample, wanted)
        except RequestError as refused:
            sample.found = OperationFailure(reason=str(refused), by_client=refused.status < 500)
        except Exception as error:  # fault boundary: one sample must not end the service
            log.error("sample %s failed", name, exc_info=error)
            sample.found = OperationFailure(reason="an unexpected error; the service's log has it", by_client=False)
        finally:
            self._unmeter(sample)
        if isinstance(sample.found, OperationFailure):
            self._queue.dropped_samples.add(name)  # nor does a restart of the service repeat it
            self._samples[sample.tenant].resize(sample, 0)
        self._samples[sample.tenant].resize(sample, sample.n_bytes + _length(sample.found))
        self._keep(name, sample, UNFETCHED_S)

    def _unmeter(self, sample: _Sample) -> None:
        self._meter.end(sample.tenant, sample.tokens)
        self._samples[sample.tenant].in_progress -= 1
        sample.tokens = 0

    async def _sampled(self, sample: _Sample, parsed: sdk_bodies.SampleRequest) -> bytes:
        """Raises RequestError, also where no server can answer for a long time."""
        until, missing, failures, crowded = time.monotonic() + PATIENCE_S, None, 0, 0
        while True:
            try:
                served = await self._queue.serve(sample.tenant, parsed.sampling_session_id, missing)
            except Unavailable as unavailable:
                if time.monotonic() > until:
                    raise
                served = Pending(reason=unavailable.reason)
            if isinstance(served, Pending):
                sample.waits = served
                crowded += served.capacity
                if crowded * PAUSE_S > PATIENCE_S:
                    fix = "sample newer weights, or free a place"
                    raise RequestError("sampling_session_id", served.reason, fix, status=503)
            else:
                sample.waits = None
                inner = served or BASE
                names = Names(BASE, BASE, BASE) if inner == BASE else Names("it", "it", inner)
                body = sdk_bodies.completion(parsed, inner, self._base.context, pinned="@" in inner)
                try:
                    return sdk_bodies.sampled_body(parsed, await self._gateway.answer("/v1/completions", body, names))
                except RequestError as refused:
                    failures += refused.status == 502
                    if refused.status not in (404, 502, 503) or failures == FAILURES:
                        raise
                    missing = inner if refused.status == 404 else None
                    if time.monotonic() > until:
                        raise
            await asyncio.sleep(PAUSE_S)


def _length(found: bytes | OperationFailure) -> int:
    return len(found) if isinstance(found, bytes) else len(found.reason)
