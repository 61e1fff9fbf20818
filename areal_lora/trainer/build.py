"""From a configuration to a trainer rank that is ready to run: engine, adapters, links to the others."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from transformers import AutoTokenizer

from areal_lora.checkpoint.files import Disk
from areal_lora.checkpoint.saver import Saver
from areal_lora.checkpoint.store import Store
from areal_lora.config.models import Config
from areal_lora.config.place import own_place
from areal_lora.distributed.exchange import GroupExchange
from areal_lora.engine.megatron_engine import MegatronEngine
from areal_lora.platforms.device import own_device, platform_of
from areal_lora.processes.faults import reached
from areal_lora.rollout.channel.client import ControllerClient
from areal_lora.run_folder.heartbeat import beat_on
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import Endpoint, read_endpoint, read_secret, wait_endpoint
from areal_lora.run_folder.status import set_status
from areal_lora.trainer.audit import Auditor
from areal_lora.trainer.checkpointing import Checkpointing, resume
from areal_lora.trainer.learn import ALIGNMENT_LIMITS
from areal_lora.trainer.loop import Trainer
from areal_lora.trainer.publishing import AdapterPublishing
from areal_lora.trainer.recording import Recorder
from areal_lora.trainer.tenant import Tenant, build_tenant
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.trainer.leader import Active, Leader
from areal_lora.weight_sync.trainer.membership import RendezvousWatch
from areal_lora.weight_sync.trainer.publisher import Publisher
from areal_lora.weight_sync.trainer.role import Follower

STARTUP_TIMEOUT_S = 900.0
CONTROLLER_START_S = 120.0  # what a controller that was ended needs to be there again
CONTROL_TIMEOUT_S = 7200.0  # rank 0 may wait this long for rollouts while the others wait for rank 0


def build_trainer(config: Config, run_folder: RunFolder, rank: int) -> Trainer:
    """Collective over all ranks. Rank 0 waits for servers and controller; see its status line."""
    started_s = time.monotonic()
    set_status(run_folder, "trainer", rank, "loading the base model")
    device = own_device(config.cluster.device, int(os.environ.get("LOCAL_RANK", "0")))
    engine = MegatronEngine(config.model, config.trainer, device)
    tokenizer = AutoTokenizer.from_pretrained(config.model.folder)
    tenants = [build_tenant(config, adapter, tokenizer) for adapter in config.adapters]
    for tenant in tenants:
        engine.add_adapter(tenant.spec, tenant.config.optimizer, config.run.seed)
    control = GroupExchange(timeout_s=CONTROL_TIMEOUT_S)
    resume(engine, tenants, config, run_folder, control)
    client = _controller(config, run_folder, tenants) if rank == 0 else None
    recorder = Recorder(config, run_folder, client, tenants, started_s) if client else None
    store = Store(run_folder, GroupExchange(timeout_s=CONTROL_TIMEOUT_S), Disk())
    saver = Saver(store=store, config=config.checkpoint, committed=partial(_commit, client) if client else None)
    auditor = None
    if rank == 0:
        auditor = Auditor(
            read_secret(run_folder),
            ALIGNMENT_LIMITS[config.model.dtype],
            timeout_s=config.weight_sync.attempt_s,
            max_model_len=config.rollout.max_model_len,
        )
    publisher = Publisher(
        run=config.run.name,
        config=config.weight_sync,
        exchange=GroupExchange(timeout_s=CONTROL_TIMEOUT_S),
        role=_leader(config, run_folder, client, auditor) if client and auditor else Follower(),
        secret=read_secret(run_folder),
        bind=own_place(config.cluster, run_folder).address,
        backend=platform_of(device).xccl,
        device=device,
    )
    publishing = AdapterPublishing(engine, publisher, config.weight_sync, recorder.published if recorder else None)
    return Trainer(
        config=config,
        run_folder=run_folder,
        engine=engine,
        tenants=tenants,
        checkpointing=Checkpointing(config, engine, saver),
        publishing=publishing,
        recorder=recorder,
        control=control,
        auditor=auditor,
    )


def _controller(config: Config, run_folder: RunFolder, tenants: Sequence[Tenant]) -> ControllerClient:
    """A client that has said what the tenants go on from."""
    set_status(run_folder, "trainer", 0, "waiting for the rollout controller")
    wait_endpoint(run_folder, "controller", 0, STARTUP_TIMEOUT_S)

    def find() -> Endpoint | None:
        # Asked a few times a second while the controller is waited for.
        beat_on(run_folder, "trainer", 0)
        with suppress(OSError):  # asked again at once; the client's patience bounds how long
            return read_endpoint(run_folder, "controller", 0)
        return None

    client = ControllerClient(find, read_secret(run_folder), patience_s=controller_patience_s(config))
    client.hello({t.name: t.version for t in tenants}, {t.name: t.ledger for t in tenants if t.ledger})
    return client


def controller_patience_s(config: Config) -> float:
    """How long a controller may be away: its event loop stuck, found out, ended, and started again."""
    return config.run.stall_s + config.run.heartbeat_timeout_s + CONTROLLER_START_S


def _commit(client: ControllerClient, ref: AdapterRef) -> None:
    """The checkpoint of ``ref`` is durable. Version 0 comes from no step."""
    if ref.version:
        client.commit(ref.name, ref.version - 1)
        reached("trainer.committed")


def _leader(config: Config, run_folder: RunFolder, client: ControllerClient, auditor: Auditor) -> Leader:
    """Rank 0's: knows the servers of the run folder, and tells the controller where each version serves."""
    set_status(run_folder, "trainer", 0, "waiting for the rollout servers")
    watch = RendezvousWatch(run_folder, config.rollout.tp)
    for index in range(config.rollout.servers):
        wait_endpoint(run_folder, "server", index, STARTUP_TIMEOUT_S)

    def announce(active: Active) -> None:
        auditor.servers = active.servers
        client.announce(active.ref, {s.name: s.data_url for s in active.servers}, active.lost)
        reached("trainer.published")

    return Leader(
        run=config.run.name,
        secret=read_secret(run_folder),
        servers=watch.present(),
        config=config.weight_sync,
        watch=watch,
        on_active=announce,
    )
