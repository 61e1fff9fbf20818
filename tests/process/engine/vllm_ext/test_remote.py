"""vLLM behind a real gateway: what its machine is given is a URL and a token."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import aiohttp
import pytest

from areal_lora.config.models import Config
from areal_lora.engine.vllm_ext.remote import remote_gateway
from areal_lora.engine.vllm_ext.remote.remote_server import serve_remote
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import create_secret, read_secret, wait_endpoint
from areal_lora.weight_sync.messages import ServerEndpoint
from areal_lora.weight_sync.trainer.fleet import AdminClient
from tests.support.engine.vllm_ext.serving import ADAPTER, PROMPT, RANK, RunningServer, Source, largest, make_model
from tests.support.forks.starter import starter_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_remote_vllm_scores_and_samples_published_versions_like_hugging_face(tmp_path: Path) -> None:
    model, folder = make_model(tmp_path / "model", "qwen3"), tmp_path / "test"
    rollout = {"max_lora_rank": RANK, "max_model_len": 256, "max_num_seqs": 8, "kv_cache_gib": 0.1, "remote": {}}
    config = Config.model_validate(
        {
            "run": {"name": "test", "steps": 1, "root": str(tmp_path)},
            "model": {"path": str(model), "dtype": "float32"},
            "adapters": [ADAPTER],
            "trainer": {"world_size": 1},
            "rollout": rollout,
            "cluster": {"device": "cpu"},
        }
    )
    run = RunFolder(folder)
    folder.mkdir()
    run.config.write_text(config.model_dump_json(), encoding="utf-8")
    create_secret(run)
    forks = starter_of("tests.support.forks.server")
    with (tmp_path / "log").open("wb") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        gateway = forks.start(remote_gateway.__name__, ["--run-folder", str(folder)], environment, log)
    port = wait_endpoint(run, "remote", 0, 120.0, lambda: gateway.poll() is None).ports["remote"]
    assert run.remote_token.stat().st_mode & 0o777 == 0o600
    python = forks.interpreter(tmp_path / "python")
    remote = serve_remote(f"http://127.0.0.1:{port}", run.remote_token.read_text(), model=model, python=str(python))
    thread = threading.Thread(target=asyncio.run, args=(remote,))
    thread.start()
    endpoint = wait_endpoint(run, "server", 1, 300.0, thread.is_alive)
    admin = AdminClient(
        ServerEndpoint(
            name="server-1",
            host=endpoint.host,
            admin_port=endpoint.ports["admin"],
            data_port=endpoint.ports["data"],
            workers=endpoint.workers or 0,
        ),
        read_secret(run),
    )
    server = RunningServer(folder, model, config, gateway, endpoint, Source(admin, read_secret(run)), admin)
    tensors = server.adapter(1)
    server.publish(server.adapter(2))
    ref = server.publish(tensors)
    want = server.logprobs(tensors, PROMPT)
    assert largest(server.score(ref), want) < 1e-4
    assert largest(server.score(None), want) > 0.1

    async def sample() -> None:
        async with aiohttp.ClientSession() as session:
            ids, logprobs = await server.greedy(session, str(ref), PROMPT, 8)
            assert largest(server.logprobs(tensors, [*PROMPT, *ids])[-8:], logprobs) < 1e-4

    asyncio.run(sample())
    server.source.close()
    gateway.terminate()
    assert gateway.wait(60) == 0
    thread.join(60)
    assert not thread.is_alive(), "the run is over"
