"""Serve in a run that has no way to this machine: `areal-lora serve-remote`.

    gateway <-- fetch work, post answers --> RemoteServer -- HTTP, loopback --> server process
            <-- fetch shards ----------------------'-------- groups, loopback ----> its workers

The server process is that of any run, in a run folder of its own with a secret of its own; this process is the trainer
and the controller that it sees. A shard is sent on unread, in memory that its workers read: they compare fingerprints.
"""

import asyncio
import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec

from areal_lora import errors
from areal_lora.config.models import ClusterConfig, Config, ModelConfig
from areal_lora.config.recorded import cached_snapshot, write_config
from areal_lora.config.sizing.slots import adapter_capacity
from areal_lora.engine.vllm_ext.remote import remote_seat as m
from areal_lora.engine.vllm_ext.remote.shards import RETRY_S, IncomingShard, ShardBases, fetch, open_store
from areal_lora.network.http_server import LEAVING_HEADER
from areal_lora.network.tls import Plane, authorization, client_context
from areal_lora.processes.log import get_logger
from areal_lora.run_folder.paths import RunFolder, write_file
from areal_lora.run_folder.rendezvous import create_secret, read_secret, wait_endpoint
from areal_lora.weight_sync import messages as wire
from areal_lora.weight_sync.kernels import ITEM_BYTES
from areal_lora.weight_sync.layout import AdapterLayout, Payload
from areal_lora.weight_sync.link.broadcast_groups import GroupListener
from areal_lora.weight_sync.manifest import base_digest, decode, encode, expanded, trailer_part
from areal_lora.weight_sync.trainer.publish_job import PackedShard

MODULE = "areal_lora.engine.vllm_ext.server.main"
HOST = "127.0.0.1"
START_S, LEAVE_S, STOP_S = 900.0, 2.0, 20.0
PATIENCE_S = 300.0
"""A gateway that does not answer for so long has ended."""
FETCHES = 2
"""Times that a version is fetched whose bytes are wrong."""

log = get_logger(__name__)
M = TypeVar("M")


class UnknownServer(errors.PublishError):
    """The gateway does not know this server: it was lost, or the gateway was restarted."""


class GatewayClient:
    """Requests to the gateway at ``url``. Use as an async context manager.

    Methods raise aiohttp.ClientError, ConfigError for a token that is not taken, and UnknownServer.
    """

    def __init__(self, url: str, token: str) -> None:
        self.url, self._headers = url.rstrip("/"), {"Authorization": f"Bearer {token}"}
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> "GatewayClient":
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=m.HOLD_S, sock_read=2 * m.HOLD_S)
        self._session = aiohttp.ClientSession(
            headers=self._headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._session.close()

    @contextlib.asynccontextmanager
    async def open(self, method: str, path: str, **how: Any) -> Any:
        async with self._session.request(method, f"{self.url}/remote/{path}", **how) as response:
            if response.status == 401:
                fix = "copy remote.token of the run folder again: each start of a run makes another one"
                raise errors.ConfigError("--token-file", f"{self.url} does not take this token", fix)
            if response.status == 404:
                raise UnknownServer(f"{self.url} has no {path}")
            if response.status == 410:
                raise errors.PublishError(await response.text())
            response.raise_for_status()
            yield response

    async def get(self, path: str, kind: type[M], method: str = "GET") -> M:
        async with self.open(method, path) as response:
            body = await response.read()
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise aiohttp.ClientPayloadError(f"this is no answer of a gateway: {error}") from None

    async def send(self, method: str, path: str, message: msgspec.Struct | None = None) -> None:
        async with self.open(method, path, data=None if message is None else msgspec.msgpack.encode(message)):
            pass


class RemoteServer:
    """One stay in a run. ``endpoint`` of ``folder`` is that of the server process on this machine."""

    def __init__(self, gateway: GatewayClient, folder: RunFolder, settings: m.RemoteSettings, workers: int) -> None:
        self._gateway, self._folder, self._workers = gateway, folder, workers
        self._secret, self._keys = read_secret(folder), expanded(settings.shard_keys)
        self._store = open_store(settings.store)
        self._bases = ShardBases(adapter_capacity(Config.model_validate_json(settings.config)))
        endpoint = wait_endpoint(folder, "server", 0, 0.0)
        self._urls = {
            plane: f"{'https' if plane in endpoint.tls else 'http'}://{HOST}:{endpoint.ports[plane]}"
            for plane in (Plane.ADMIN, Plane.DATA)
        }
        self._name = ""
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._layouts: dict[str, AdapterLayout] = {}
        self._groups = m.StayGroups("remote")
        self._local: aiohttp.ClientSession

    async def serve(self) -> None:
        """Take part until the run is over. Raises ArealLoraError where that is impossible; leaves in any case."""
        timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)  # aiohttp's limit is 100
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as self._local:
            try:
                async with asyncio.TaskGroup() as tasks:
                    await self._work(tasks)
                    for task in self._requests.values():
                        task.cancel()
            except* errors.ArealLoraError as group:
                raise group.exceptions[0] from None
            finally:
                self._groups.leave()
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, UnknownServer, errors.ConfigError):
                    async with asyncio.timeout(LEAVE_S):
                        await self._gateway.send("DELETE", self._name)

    async def _work(self, tasks: asyncio.TaskGroup) -> None:
        seen, answered_at = 0, time.monotonic()
        while True:
            try:
                if not self._name:
                    seen = 0
                    self._name = (await self._gateway.get(f"servers/{self._workers}", m.RemoteName, "POST")).name
                    log.info("serving in the run of %s as %s", self._gateway.url, self._name)
                work = await self._gateway.get(f"{self._name}/work/{seen}", m.RemoteWork)
                answered_at = time.monotonic()
            except UnknownServer:
                self._name = ""
                for task in self._requests.values():
                    task.cancel()
                continue
            except (aiohttp.ClientError, TimeoutError) as error:
                if time.monotonic() - answered_at > PATIENCE_S:
                    fix = "see whether the run is in progress"
                    raise errors.EnvironmentError_(f"{self._gateway.url}: no answer: {error!r} (fix: {fix})") from None
                await asyncio.sleep(RETRY_S)
                continue
            if work.over:
                log.info("the run of %s is over", self._gateway.url)
                return
            for request in work.requests:
                seen = request.number
                if request.cancels:
                    if request.cancels in self._requests:
                        self._requests[request.cancels].cancel()
                    continue
                task = self._requests[seen] = tasks.create_task(self._answer(request, self._name))
                task.add_done_callback(lambda _, number=seen: self._requests.pop(number, None))  # type: ignore[misc]

    async def _answer(self, request: m.ForwardedRequest, name: str) -> None:
        try:
            match request.plane, request.path:
                case Plane.ADMIN, wire.JOIN_PATH:
                    answer = await self._join(request)
                case Plane.ADMIN, wire.PUBLISH_PATH:
                    answer = await self._publish(request, name)
                case _:
                    answer = await self._local_answer(request)
        except (aiohttp.ClientError, errors.PublishError) as error:
            answer = m.RemoteAnswer(number=request.number, status=503, body=str(error).encode())
        while True:
            try:
                await self._gateway.send("POST", f"{name}/answer", answer)
                return
            except UnknownServer:
                return
            except aiohttp.ClientResponseError as error:
                if error.status < 500:  # the answer is too long
                    answer = m.RemoteAnswer(number=request.number, status=500, body=str(error).encode())
            except (aiohttp.ClientError, TimeoutError):
                pass  # it is sent again
            await asyncio.sleep(RETRY_S)

    async def _local_answer(self, request: m.ForwardedRequest, body: bytes | None = None) -> m.RemoteAnswer:
        """The server process's answer to ``request``, with another ``body`` if given."""
        plane, url, headers = request.plane, self._urls[request.plane], dict[str, str]()
        if url.startswith("https"):
            headers = authorization(self._secret, plane)
        headers["Content-Type"] = wire.CONTENT_TYPE if plane is Plane.ADMIN else "application/json"
        async with self._local.request(
            request.method,
            url + request.path,
            data=request.body if body is None else body,
            headers=headers,
            ssl=client_context(self._secret, plane),
        ) as response:
            return m.RemoteAnswer(
                number=request.number,
                status=response.status,
                body=await response.read(),
                media_type=response.content_type,
                leaving=LEAVING_HEADER in response.headers,
            )

    async def _join(self, request: m.ForwardedRequest) -> m.RemoteAnswer:
        """Form a group for each source of the run: this process sends what that source sends there."""
        want = msgspec.msgpack.decode(request.body, type=wire.JoinRequest)
        assert want.endpoints is not None, "only a relay keeps its groups"
        self._groups.leave()
        listeners = [
            GroupListener(
                source=each.source,
                bind=HOST,
                receivers=[f"worker {w}" for w in range(self._workers)],
                bucket_bytes=each.bucket_bytes,
                backend="gloo",
                timeout_s=want.timeout_s,
                secret=self._secret,
            )
            for each in want.endpoints
        ]
        ranks, endpoints = list(range(1, 1 + self._workers)), [listener.endpoint for listener in listeners]
        body = msgspec.msgpack.encode(msgspec.structs.replace(want, endpoints=endpoints, ranks=ranks))

        async def accept(listener: GroupListener) -> None:
            self._groups[listener.endpoint.source] = await self._groups.in_thread(listener.accept)

        answer = await self._groups.settled(self._local_answer(request, body), map(accept, listeners))
        if answer.status != 200:
            self._groups.leave()
        return answer

    async def _publish(self, request: m.ForwardedRequest, name: str) -> m.RemoteAnswer:
        """Fetch a version and have the server process activate it; fetch it again where its bytes are wrong.

        Raises ProcessFailed if they are wrong again.
        """
        announced, came = decode(request.body), time.monotonic()
        ref, deadline, digest = announced.manifest.ref, came + announced.timeout_s, announced.manifest.layout
        if announced.layout is not None:
            self._layouts[digest] = announced.layout
        for fetched in range(FETCHES):
            left = msgspec.structs.replace(announced, timeout_s=deadline - time.monotonic())
            layout, body = self._layouts[digest], encode(left)
            answer = await self._transfer(request, name, ref.name, layout, body, deadline, whole=fetched > 0)
            if answer.status != 409:
                break
            refusal = msgspec.msgpack.decode(answer.body, type=wire.RefusalReply)
            if refusal.reason != errors.RefusalReason.HASH:
                break
            log.warning("%s is refused: %s", ref, refusal.detail)
        else:
            fix = "see what changes them on the way; use https"
            raise errors.ProcessFailed(
                f"{ref} arrived with wrong bytes {FETCHES} times from {self._gateway.url} (fix: {fix})"
            )
        return answer

    async def _transfer(
        self,
        request: m.ForwardedRequest,
        name: str,
        adapter: str,
        layout: AdapterLayout,
        body: bytes,
        deadline: float,
        *,
        whole: bool,
    ) -> m.RemoteAnswer:
        """Fetch all shards, as they are or as what differs from the last version, for the server process."""
        shards = dict[int, IncomingShard]()
        for each in layout.shards:
            source, nbytes = each.source, trailer_part(each)[1]
            base = None if whole else self._bases.newest(adapter, source, nbytes)
            shard = PackedShard(layout, source, self._keys)
            shards[source] = IncomingShard(shard, nbytes, ITEM_BYTES[layout.dtype], base)
        if shards.keys() - self._groups.keys():
            raise errors.PublishError(
                f"this server is in no group of source ranks {sorted(shards)}; the trainer must join it"
            )

        async def relay(source: int, coming: IncomingShard) -> None:
            sent = self._groups.in_thread(coming.shard.send, self._groups[source], deadline)
            try:
                with (
                    errors.undo_on_error(coming.shard.abandon),
                    errors.undo_on_error(self._groups[source].close),
                ):  # workers notice at once
                    await fetch(
                        self._gateway.open, f"{name}/shard/{request.number}/{source}", coming, deadline, self._store
                    )
            finally:
                await asyncio.wait([sent])
            await sent

        relays = [relay(source, coming) for source, coming in shards.items()]
        answer = await self._groups.settled(self._local_answer(request, body), relays)
        if answer.status == 200 and self._store is None and layout.payload is Payload.UNMERGED:
            for source, coming in shards.items():
                self._bases.keep(adapter, source, coming.memory)
        return answer


def local_config(settings: m.RemoteSettings, root: Path, model: Path | None, device: str | None) -> Config:
    """The run's configuration as one server on this machine has it. Raises ConfigError for another base model."""
    config = Config.model_validate_json(settings.config)
    if model is None and (commit := config.model.commit) is not None:
        model = cached_snapshot(config.model.path, commit)
    folder = model or Path(config.model.folder)
    if not folder.is_dir() or base_digest(folder) != settings.base_digest:
        fix = f"name a folder with the files of {config.model.path}"
        raise errors.ConfigError("--model", f"{folder} is not the run's base model on this machine", fix)
    chosen = ModelConfig(path=str(folder), dtype=config.model.dtype)
    cluster = ClusterConfig.model_validate({"device": device or config.cluster.device})
    rollout = config.rollout.model_copy(update={"servers": 1, "python": None, "remote": None})
    run = config.run.model_copy(update={"root": root})
    changed = {"run": run, "model": chosen, "cluster": cluster, "rollout": rollout}
    return config.model_copy(update=changed)


async def serve_remote(
    url: str, token: str, *, model: Path | None = None, device: str | None = None, python: str = sys.executable
) -> None:
    """Start a server process for the run at ``url`` and serve there until the run is over; SIGTERM leaves it.

    Raises ArealLoraError for a token or model that does not fit, a server process that ends, or a gateway that is lost.
    """
    with tempfile.TemporaryDirectory(prefix="areal-lora-remote-") as temporary:
        async with GatewayClient(url, token) as gateway:
            try:
                settings = await gateway.get("settings", m.RemoteSettings)
            except (aiohttp.ClientError, TimeoutError) as error:
                raise errors.ConfigError(url, f"no gateway answers there: {error}", "see the log of remote-0") from None
            config = local_config(settings, Path(temporary), model, device)
            open_store(settings.store)  # raises before a server starts
            folder = RunFolder(config.run_folder.path, "")
            folder.path.mkdir()
            write_config(folder, config)
            create_secret(folder)
            write_file(folder.shard_keys, settings.shard_keys, mode=0o600)
            command = [python, "-m", MODULE, "--run-folder", str(folder), "--index", "0"]
            with subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True) as process:
                try:
                    alive = partial(_alive, process)
                    await asyncio.to_thread(wait_endpoint, folder, "server", 0, START_S, alive)
                    server = RemoteServer(gateway, folder, settings, config.rollout.tp)
                    await _until_ended(process, server)
                finally:
                    process.terminate()
                    try:
                        process.wait(STOP_S)
                    except subprocess.TimeoutExpired:
                        process.kill()


def _alive(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is None


async def _until_ended(process: subprocess.Popen[bytes], server: RemoteServer) -> None:
    """Serve for as long as the server process does. Raises ProcessFailed if it ends first."""
    serving = asyncio.create_task(server.serve())
    try:
        while not serving.done():
            if not _alive(process):
                raise errors.ProcessFailed(
                    f"the server process ended with code {process.returncode}; its last lines are above"
                )
            await asyncio.wait([serving], timeout=RETRY_S)
        serving.result()
    finally:
        serving.cancel()
        await asyncio.wait([serving])


def run_remote(url: str, token: str, **how: Any) -> None:
    """`serve_remote` with SIGTERM and SIGINT as its ends."""

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await serve_remote(url, token, **how)

    asyncio.run(run())
