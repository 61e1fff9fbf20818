"""A controller in a thread: its tasks, sockets and HTTP, whole, with fake servers and a trainer's client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from areal_lora.config.models import WorkflowConfig
from areal_lora.config.sections.task import EvalSetConfig, FunctionReward
from areal_lora.rollout import main as rollout_main
from areal_lora.rollout.channel.channel_messages import Stats
from areal_lora.rollout.controller.controller import Controller
from areal_lora.rollout.main import adapter_data, serve
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import Endpoint, create_secret, read_secret, wait_endpoint
from areal_lora.types import AdapterRef
from tests.support.clocks import WAIT_S
from tests.support.rollout.fake_server import FakeServer
from tests.support.rollout.helpers import NAME, CharTokenizer, config
from tests.support.rollout.patient_client import PatientClient


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = loop or asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float = WAIT_S) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def close(self) -> None:
        self.run(self._cancel_tasks())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_S)
        self.loop.close()

    @staticmethod
    async def _cancel_tasks() -> None:
        """As ``asyncio.run`` does at its end: a task of a closed loop would stay pending for ever."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class Running:
    client: PatientClient
    endpoint: Endpoint
    servers: tuple[FakeServer, ...]
    ended: Any  # the controller's future
    stats: Callable[
        [str], Stats
    ]  # of an adapter, as the controller counts them; raises RolloutError for an unknown one
    folder: Path
    entry: Any  # the configuration of `NAME`

    def join(self, name: str, version: int = 0, snapshot: bytes = b"", **fields: Any) -> str:
        """An adapter like `NAME`, with other ``fields``, joins; returns why it cannot, or nothing."""
        config = self.entry.model_copy(update={"name": name, **fields}).model_dump_json().encode()
        return self.client.join(name, config, version, snapshot)

    def activate(self, version: int, name: str = NAME) -> None:
        for server in self.servers:
            server.models.add(f"{name}@v{version}")
        self.announce(version, name=name)

    def announce(self, version: int, lost: tuple[str, ...] = (), name: str = NAME) -> None:
        urls = {f"server-{i}": s.url for i, s in enumerate(self.servers) if f"server-{i}" not in lost}
        self.client.announce(AdapterRef(name=name, version=version), urls, lost)

    def batch(self, step: int) -> Any:
        return self.client.next_batch(NAME, step)


@contextmanager
def controllers(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Start controllers, each with its servers and a trainer's client; ``twins`` are more adapters, by name."""
    loop, server_loop = Loop(), Loop()
    stop = asyncio.Event()
    started: list[Running] = []

    def start(
        *servers: FakeServer,
        workflow: WorkflowConfig | None = None,
        reward: FunctionReward | None = None,
        evals: list[dict[str, Any]] | None = None,
        twins: Mapping[str, dict[str, Any]] | None = None,
        **settings: int,
    ) -> Running:
        create_secret(RunFolder(tmp_path))
        for server in servers:
            server_loop.run(server.__aenter__())
        made = config("none", servers=len(servers), **settings)
        sets = [EvalSetConfig.model_validate(chosen) for chosen in evals or ()]
        replaced = {"workflow": workflow, "reward": reward, "evals": sets}
        entry = made.adapters[0].model_copy(update={name: value for name, value in replaced.items() if value})
        others = [entry.model_copy(update={"name": name, **fields}) for name, fields in (twins or {}).items()]
        made = made.model_copy(update={"adapters": [entry, *others]})
        data = [adapter_data(made, each, CharTokenizer()) for each in made.adapters]
        built: list[Controller] = []

        class Kept(Controller):
            def __init__(self, *args: Any, **settings: Any) -> None:
                super().__init__(*args, **settings)
                built.append(self)

        async def counted(adapter: str) -> Stats:
            return built[0].adapter(adapter).feed.stats()

        def stats(adapter: str) -> Stats:
            return loop.run(counted(adapter))

        work = serve(made, RunFolder(tmp_path), data, stop)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rollout_main, "Controller", Kept)
            ended = asyncio.run_coroutine_threadsafe(work, loop.loop)
            endpoint = wait_endpoint(RunFolder(tmp_path), "controller", 0, WAIT_S, lambda: not ended.done())
        client = PatientClient(lambda: endpoint, read_secret(RunFolder(tmp_path)))
        client.hello({adapter.name: 0 for adapter in made.adapters}, {})
        started.append(Running(client, endpoint, servers, ended, stats, tmp_path, entry))
        return started[-1]

    yield start
    loop.loop.call_soon_threadsafe(stop.set)
    for running in started:
        running.client.close()
        running.ended.exception(WAIT_S)
        for server in running.servers:
            server_loop.run(server.__aexit__())
    loop.close()
    server_loop.close()
