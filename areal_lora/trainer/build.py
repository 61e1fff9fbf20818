"""Build a trainer rank from a configuration: engine, adapters, connections to controller and servers."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from areal_lora.algorithms.fair_queue import FairQueue
from areal_lora.checkpoint.checkpoint_store import CheckpointStore, Saver
from areal_lora.checkpoint.state import Disk
from areal_lora.config.models import Config
from areal_lora.config.recorded import probe_tolerance
from areal_lora.config.sections.run import own_place
from areal_lora.config.sizing.slots import broadcast_backend, send_places
from areal_lora.data.prompts import load_tokenizer, vocabulary
from areal_lora.distributed.store import Exchange
from areal_lora.engine.common.adapter_engine import AdapterEngine
from areal_lora.engine.megatron_engine import MegatronEngine
from areal_lora.families.shape import read_shape
from areal_lora.obs.machine import MachineWatch
from areal_lora.obs.metrics.rollout_store import RolloutWriter
from areal_lora.operations.link import TrainerEnd
from areal_lora.platforms.device import own_device, peak_flops
from areal_lora.processes.watched import reached
from areal_lora.rollout.channel.client import ControllerClient
from areal_lora.run_folder.paths import DesiredWatch, RunFolder, raise_session
from areal_lora.run_folder.rendezvous import Endpoint, read_endpoint, read_secret, wait_endpoint, wait_servers
from areal_lora.run_folder.status import HEARTBEAT_TIMEOUT_S, LoadingServers, beat_on, set_status
from areal_lora.trainer.adapter import ControllerState, Restored, TokenRows, TrainingState, build_adapter, probe_rows
from areal_lora.trainer.audit import Auditor
from areal_lora.trainer.clients.client_operations import Clients
from areal_lora.trainer.clients.client_passes import Limits, tidy_states
from areal_lora.trainer.collective.joining import recorded_as_final
from areal_lora.trainer.controller_link import ControllerLink
from areal_lora.trainer.learn import ALIGNMENT_LIMITS
from areal_lora.trainer.recording import Recorder
from areal_lora.trainer.step_metrics import Devices
from areal_lora.trainer.training_state import Rank0, Trainer
from areal_lora.trainer.versions.checkpointing import Checkpointing, resume
from areal_lora.trainer.versions.publishing import AdapterPublishing
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.trainer.decisions import PublishReport
from areal_lora.weight_sync.trainer.gathering import PlaceGather
from areal_lora.weight_sync.trainer.leader import Leader
from areal_lora.weight_sync.trainer.membership import RendezvousWatch
from areal_lora.weight_sync.trainer.publisher import Publisher

STARTUP_TIMEOUT_S = 900.0
CONTROLLER_START_S = 120.0  # start of a restarted controller until it answers
CONTROL_TIMEOUT_S = 7200.0  # longest wait of the other ranks for rank 0 without a signal from it (`work.Waiting`)


def build_trainer(config: Config, run_folder: RunFolder, rank: int) -> Trainer:
    """Build this rank. Collective over all ranks; rank 0 waits for servers and controller (see its status line)."""
    started_s = time.monotonic()
    set_status(run_folder, "trainer", rank, "loading the base model")
    reached("trainer.loading")
    device = config.cluster.device
    machines = MachineWatch(run_folder, "trainer", rank, device=device, collects=rank == 0)
    engine = build_engine(config)
    control = Exchange(timeout_s=CONTROL_TIMEOUT_S)
    mine = None
    if rank == 0:  # which tokenizes for all ranks
        tokenizer = load_tokenizer(config.model.folder)
        rows = {adapter.name: probe_rows(config, adapter, tokenizer) for adapter in config.adapters}
        mine = msgspec.msgpack.encode(rows)
    probes = msgspec.msgpack.decode(control.broadcast_bytes(mine), type=dict[str, TokenRows])
    adapters = [build_adapter(config, adapter, probes[adapter.name]) for adapter in config.adapters]
    for adapter in adapters:
        engine.add_adapter(adapter.spec, adapter.config.optimizer, adapter.run.seed)
    restored = resume(engine, adapters, config, run_folder, control)
    versions = {name: state.version for name, (state, _) in restored.items()}
    states = {a.name: TrainingState(adapter=a) for a in adapters} | {name: own for name, (own, _) in restored.items()}
    client = _connect(config, run_folder, states, restored) if rank == 0 else None
    clients = _clients(config, run_folder, engine) if rank == 0 and config.service else None
    rank_0 = _rank_0(config, run_folder, client, clients, states, restored, started_s, machines) if client else None
    store = CheckpointStore(run_folder, Exchange(timeout_s=CONTROL_TIMEOUT_S), Disk())
    saver = Saver(
        store=store,
        config=config.checkpoint,
        committed=partial(_commit, client, clients) if client else None,
        kept=clients.kept if clients else None,
    )
    exchange = Exchange(timeout_s=CONTROL_TIMEOUT_S)
    leader = _leader(config, run_folder, client, rank_0) if client and rank_0 else None
    control.broadcast_bytes(b"")  # the limits of the model's own collectives are shorter than the wait for servers
    publisher = build_publisher(config, run_folder, engine, exchange, leader)
    on_report = rank_0.recorder.reported if rank_0 else None
    return Trainer(
        config=config,
        run_folder=run_folder,
        engine=engine,
        states=states,
        checkpointing=Checkpointing(config, engine, saver, versions),
        publishing=AdapterPublishing(engine, publisher, config.rollout.adapter_mode, on_report),
        control=control,
        rank_0=rank_0,
    )


def build_engine(config: Config) -> AdapterEngine:
    """This rank's engine on its device. Raises ConfigError where sizes and model do not fit it."""
    device = own_device(config.cluster.device, int(os.environ.get("LOCAL_RANK", "0")))
    if config.trainer.engine == "megatron":
        return MegatronEngine(config.model, config.trainer, device)
    from areal_lora.engine.fsdp_engine import FsdpEngine  # loads transformers' modelling code

    return FsdpEngine(config.model, config.trainer, device, config.rollout.max_model_len)


def build_publisher(
    config: Config, run_folder: RunFolder, engine: AdapterEngine, exchange: Exchange, leader: Leader | None
) -> Publisher:
    """The publisher of this rank's shards; rank 0 has the ``leader``. Collective."""
    places = send_places(config)
    return Publisher(
        run=config.run.name,
        config=config.weight_sync,
        exchange=exchange,
        leader=leader,
        secret=read_secret(run_folder),
        bind=own_place(config.cluster, run_folder).address,
        backend=broadcast_backend(config),
        device=engine.device,
        gather=PlaceGather(places, engine.rank, engine.device) if len(set(places)) < len(places) else None,
    )


def _connect(
    config: Config, run_folder: RunFolder, states: Mapping[str, TrainingState], restored: Mapping[str, Restored]
) -> ControllerClient:
    """Connect to the controller and announce the versions that this trainer resumes from."""
    set_status(run_folder, "trainer", 0, "waiting for the rollout controller")
    wait_endpoint(run_folder, "controller", 0, STARTUP_TIMEOUT_S)

    def find() -> Endpoint | None:
        # The client calls this a few times a second while it waits for the controller.
        beat_on(run_folder, "trainer", 0)
        with suppress(OSError):  # the client calls again at once, until patience_s is over
            return read_endpoint(run_folder, "controller", 0)
        return None

    # A controller whose event loop is stuck is detected, ended and restarted.
    patience_s = config.run.stall_s + HEARTBEAT_TIMEOUT_S + CONTROLLER_START_S
    client = ControllerClient(find, read_secret(run_folder), patience_s=patience_s)
    ledgers = {name: kept.ledger for name, (_, kept) in restored.items() if kept.ledger}
    client.hello({name: state.version for name, state in states.items()}, ledgers)
    return client


def _rank_0(
    config: Config,
    run_folder: RunFolder,
    client: ControllerClient,
    clients: Clients | None,
    states: Mapping[str, TrainingState],
    restored: Mapping[str, Restored],
    started_s: float,
    machines: MachineWatch,
) -> Rank0:
    versions = {name: state.version for name, (state, _) in restored.items()}
    devices = Devices(count=config.trainer.world_size, peak_flops=peak_flops(config.cluster.device))
    limit, words = config.run.keep_rollouts_mib << 20, partial(vocabulary, config.model.folder)
    rollouts = RolloutWriter(run_folder, limit, words) if limit else None
    recorder = Recorder(
        run_folder,
        list(states),
        versions,
        started_s,
        only=config.only_adapter,
        devices=devices,
        rollouts=rollouts,
        machines=machines,
    )
    kept = {name: restored[name][1] if name in restored else ControllerState() for name in states}
    auditor = Auditor(
        read_secret(run_folder),
        ALIGNMENT_LIMITS[config.model.dtype],
        timeout_s=config.weight_sync.attempt_s,
        max_model_len=config.rollout.max_model_len,
        kept_caches=config.rollout.in_flight == "keep",
    )
    return Rank0(
        controller=ControllerLink(config, client, recorder, kept),
        recorder=recorder,
        auditor=auditor,
        turns=FairQueue({name: state.adapter.run.weight for name, state in states.items()}),
        desired=DesiredWatch(run_folder) if config.service else None,
        absent=recorded_as_final(run_folder) if config.service else {},
        clients=clients,
    )


def _clients(config: Config, run_folder: RunFolder, engine: AdapterEngine) -> Clients:
    """Listen for what clients do with their adapters; what a crash left of states that they saved goes first."""
    tidy_states(run_folder, Disk())
    shape = read_shape(Path(config.model.folder))
    end = TrainerEnd(run_folder, own_place(config.cluster, run_folder).address)
    return Clients(run_folder, end, Limits.of(config, shape), engine.base_digest())


def _commit(client: ControllerClient, clients: Clients | None, ref: AdapterRef) -> None:
    """Commit the step that produced ``ref``; the checkpoint of ``ref`` is durable. No step produces version 0.

    The controller has nothing of an adapter that a client drives: the client receives it.
    """
    if clients and ref.name in clients.known:
        clients.durable(ref)
    elif ref.version:
        client.commit(ref.name, ref.version - 1)
        reached("trainer.committed")


def _leader(config: Config, run_folder: RunFolder, client: ControllerClient, rank_0: Rank0) -> Leader:
    """Build rank 0's publish role, which announces the servers of each active version to what drives the adapter."""
    set_status(run_folder, "trainer", 0, "waiting for the rollout servers")
    watch, servers = RendezvousWatch(run_folder, config.rollout.tp), LoadingServers(run_folder)
    wait_servers(run_folder, config.rollout.servers, STARTUP_TIMEOUT_S, servers.names)

    def announce(active: PublishReport) -> None:
        rank_0.auditor.activated(active.ref, active.servers)
        if rank_0.clients and active.ref.name in rank_0.clients.known:
            rank_0.clients.active(active.ref)
        else:
            client.announce(active.ref, {s.name: s.data_url for s in active.servers}, [*active.lost], active.left)
        reached("trainer.published")

    def waits(ref: AdapterRef, held: str) -> None:
        text = f"{ref} waits for an adapter slot: {held}" if held else f"{ref} has an adapter slot"
        set_status(run_folder, "trainer", 0, text)

    def loading() -> Sequence[str]:
        names = servers.names()
        if names:
            set_status(run_folder, "trainer", 0, f"waiting for {', '.join(names)}: loading the model")
            beat_on(run_folder, "trainer", 0)  # this wait has no limit
        return names

    return Leader(
        run=config.run.name,
        secret=read_secret(run_folder),
        servers=watch.present(),
        config=config.weight_sync,
        tolerance=probe_tolerance(config),
        min_servers=config.cluster.min_servers,
        watch=watch,
        on_active=announce,
        loading=loading,
        on_wait=waits,
        session=raise_session(run_folder),
    )
