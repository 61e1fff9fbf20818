"""From a configuration to a trainer rank that is ready to run: engine, adapters, links to the others."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from transformers import AutoTokenizer

from areal_lora.config.models import Config
from areal_lora.config.rendezvous import reachable_host, read_endpoint, read_secret, wait_endpoint
from areal_lora.engine.megatron_engine import MegatronEngine
from areal_lora.obs.log import set_status
from areal_lora.platforms.device import platform_of
from areal_lora.rollout.trainer_client import RolloutClient
from areal_lora.trainer.loop import Trainer
from areal_lora.trainer.publishing import AdapterPublishing
from areal_lora.trainer.recording import Recorder
from areal_lora.trainer.tenant import build_tenant
from areal_lora.trainer.warm_start import warm_start
from areal_lora.weight_sync.coordinator import Active, Coordinator
from areal_lora.weight_sync.exchange import GroupExchange
from areal_lora.weight_sync.membership import RendezvousWatch
from areal_lora.weight_sync.publisher import Publisher

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
        warm_start(engine, tenant, config.run.seed)
    control = GroupExchange(timeout_s=CONTROL_TIMEOUT_S)
    client = _controller(run_folder) if rank == 0 else None
    if client:
        client.hello({tenant.name: tenant.version for tenant in tenants}, {})
    recorder = Recorder(config, run_folder, client, started_s) if client else None
    publisher = Publisher(
        run=config.run.name, config=config.weight_sync, exchange=GroupExchange(timeout_s=CONTROL_TIMEOUT_S),
        coordinator=_coordinator(config, run_folder, client) if client else None,
        bind=reachable_host(config.cluster.bind), backend=platform_of(config.cluster.device).xccl,
    )
    publishing = AdapterPublishing(
        engine, publisher, config.weight_sync, recorder.published if recorder else None
    )
    return Trainer(
        config=config, run_folder=run_folder, engine=engine, tenants=tenants, publishing=publishing,
        recorder=recorder, control=control,
    )


def _controller(run_folder: Path) -> RolloutClient:
    wait_endpoint(run_folder, "controller", 0, STARTUP_TIMEOUT_S)
    return RolloutClient(lambda: read_endpoint(run_folder, "controller", 0), read_secret(run_folder))


def _coordinator(config: Config, run_folder: Path, client: RolloutClient) -> Coordinator:
    """Rank 0's: knows the servers of the run folder, and tells the controller where each version serves."""
    set_status(run_folder, "trainer", 0, "waiting for the rollout servers")
    watch = RendezvousWatch(run_folder, config.rollout.tp)
    for index in range(config.rollout.servers):
        wait_endpoint(run_folder, "server", index, STARTUP_TIMEOUT_S)

    def announce(active: Active) -> None:
        client.announce(active.ref, {s.name: s.data_url for s in active.servers}, active.lost)

    return Coordinator(
        run=config.run.name, secret=read_secret(run_folder), servers=watch.present(), config=config.weight_sync,
        watch=watch, on_active=announce,
    )
