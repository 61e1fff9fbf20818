"""From a configuration to a trainer rank that is ready to run: engine, adapters, links to the others."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from transformers import AutoTokenizer

from areal_lora.config.models import Config
from areal_lora.config.rendezvous import reachable_host, read_secret, wait_endpoint
from areal_lora.engine.base import TrainEngine
from areal_lora.engine.megatron_engine import MegatronEngine
from areal_lora.obs.log import set_status
from areal_lora.platforms.device import platform_of
from areal_lora.rollout.trainer_client import RolloutClient
from areal_lora.trainer.loop import Trainer
from areal_lora.trainer.publishing import AdapterPublishing
from areal_lora.trainer.recording import Recorder
from areal_lora.trainer.tenant import Tenant, build_tenant
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.exchange import GroupExchange
from areal_lora.weight_sync.publisher import Publisher
from areal_lora.weight_sync.transport import ServerEndpoint

STARTUP_TIMEOUT_S = 900.0
CONTROL_TIMEOUT_S = 7200.0  # rank 0 may wait this long for rollouts while the others wait for rank 0


def build_trainer(config: Config, run_folder: Path, rank: int) -> Trainer:
    """Collective over all ranks. Rank 0 waits for servers and controller; see its status line."""
    started_s = time.monotonic()
    set_status(run_folder, "trainer", rank, "loading the base model")
    device = torch.device(config.cluster.device)
    engine = MegatronEngine(config.model, config.trainer, device)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    tenants = [build_tenant(config, adapter, tokenizer) for adapter in config.adapters]
    for tenant in tenants:
        engine.add_adapter(tenant.spec, tenant.config.optimizer, config.run.steps, config.run.seed)
    control = GroupExchange(timeout_s=CONTROL_TIMEOUT_S)
    set_status(run_folder, "trainer", rank, "waiting for the rollout servers")
    servers = [_server(run_folder, index, config) for index in range(config.rollout.servers)]
    client = _controller(run_folder) if rank == 0 else None
    recorder = Recorder(config, run_folder, client, started_s) if client else None
    publisher = _publisher(config, run_folder, engine, tenants, rank, servers, client)
    publishing = AdapterPublishing(engine, publisher, recorder.published if recorder else None)
    set_status(run_folder, "trainer", rank, "connecting the weight-sync groups")
    publisher.connect()
    return Trainer(
        config=config, run_folder=run_folder, engine=engine, tenants=tenants, publishing=publishing,
        recorder=recorder, control=control,
    )


def _server(run_folder: Path, index: int, config: Config) -> ServerEndpoint:
    endpoint = wait_endpoint(run_folder, "server", index, STARTUP_TIMEOUT_S)
    return ServerEndpoint(host=endpoint.host, admin_port=endpoint.ports["admin"], workers=config.rollout.tp)


def _controller(run_folder: Path) -> RolloutClient:
    endpoint = wait_endpoint(run_folder, "controller", 0, STARTUP_TIMEOUT_S)
    return RolloutClient(endpoint, read_secret(run_folder))


def _publisher(
    config: Config, run_folder: Path, engine: TrainEngine, tenants: list[Tenant], rank: int,
    servers: list[ServerEndpoint], client: RolloutClient | None,
) -> Publisher:
    sources = sorted({source for tenant in tenants for source in engine.adapter_plan(tenant.name).sources})

    def announce(ref: AdapterRef) -> None:
        if client is not None:
            client.announce(ref)

    return Publisher(
        run=config.run.name, sources=sources, rank=rank, servers=servers, secret=read_secret(run_folder),
        config=config.weight_sync, exchange=GroupExchange(timeout_s=CONTROL_TIMEOUT_S),
        bind=reachable_host(config.cluster.bind), backend=platform_of(config.cluster.device).xccl,
        on_active=announce,
    )
