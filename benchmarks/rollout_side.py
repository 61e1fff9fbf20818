"""The rollout side of a run without its trainer: real server, real controller, a driver in place of the trainer.

The driver publishes versions of a small random adapter, takes batches, commits them and asks for evaluations, as a
trainer does whose steps take no time. The processes run from the checkout ``tree``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from areal_lora.config.facts import gather_facts
from areal_lora.config.load import load_config
from areal_lora.config.rules.findings import resolve_targets
from areal_lora.errors import RolloutError
from areal_lora.families.shape import ModelShape, read_hf_config
from areal_lora.families.sites import pieces_of, sites_of, wire_names
from areal_lora.launcher.plan import CONTROLLER, SERVER, make_plan
from areal_lora.launcher.start import RunStart, with_absolute_root
from areal_lora.rollout.channel.channel_messages import AdapterFailed, Batch, NotReady
from areal_lora.rollout.channel.client import ControllerClient
from areal_lora.run_folder.rendezvous import read_endpoint, read_secret, wait_endpoint
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.layout import make_layout
from areal_lora.weight_sync.manifest import base_digest
from areal_lora.weight_sync.trainer.leader import Leader
from areal_lora.weight_sync.trainer.membership import RendezvousWatch
from areal_lora.weight_sync.trainer.publisher import Publisher
from tests.support.solo_exchange import SoloExchange
from tests.support.weight_sync.adapters import pack_of

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples" / "math"
FILES = (EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml")
START_S = 600.0
B_STD = 1e-3
"""Of the published ``lora_B``: so small that answers are about as long as the base model's."""


@dataclass
class RolloutSide:
    """Use it as a context manager; ``step`` then makes one step of the run."""

    root: Path
    name: str
    overrides: Sequence[str] = ()
    tree: Path = ROOT
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)
    version: int = 0

    def __enter__(self) -> Self:
        config = load_config(list(FILES), [f"run.root={self.root}", f"run.name={self.name}", *self.overrides])
        facts = gather_facts(config, runs_here=False)
        self.config = with_absolute_root(resolve_targets(config, facts))
        plan = make_plan(self.config, facts)
        self.folder = plan.run_folder
        self.root.mkdir(parents=True, exist_ok=True)
        RunStart(self.config).prepare()
        for spec in (*plan.role(SERVER), *plan.role(CONTROLLER)):
            with self.folder.log(spec.name).open("wb") as log:
                environment = os.environ | spec.env | {"PYTHONPATH": str(self.tree)}
                self.children.append(
                    subprocess.Popen(spec.argv, stdout=log, stderr=log, env=environment, cwd=self.tree)
                )
        try:
            self._connect()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _connect(self) -> None:
        server, _ = self.children
        endpoint = wait_endpoint(self.folder, SERVER, 0, START_S, lambda: server.poll() is None)
        wait_endpoint(self.folder, CONTROLLER, 0, START_S)
        self.data_url = f"http://{endpoint.host}:{endpoint.ports['data']}"
        secret, adapter = read_secret(self.folder), self.config.adapters[0]
        watch = RendezvousWatch(self.folder, self.config.rollout.tp)
        sync, run = self.config.weight_sync, self.config.run.name
        leader = Leader(run=run, secret=secret, servers=watch.present(), config=sync, watch=watch)
        self.publisher = Publisher(run=run, config=sync, exchange=SoloExchange(), leader=leader, secret=secret)
        self.client = ControllerClient(lambda: read_endpoint(self.folder, CONTROLLER, 0), secret)
        spec = adapter.spec(self.config.model.path)
        shape = ModelShape.from_hf(read_hf_config(Path(self.config.model.folder)))
        generator = torch.Generator().manual_seed(1)
        tensors, aliases = {}, {}
        for key in sites_of(shape, spec.expert_layout):
            shapes, shared = wire_names(pieces_of(shape, key))
            for name, dims in shapes.items():
                std = B_STD if name.endswith("lora_B.weight") else 0.02
                tensors[name] = torch.randn([spec.rank if d < 0 else d for d in dims], generator=generator) * std
            aliases |= shared
        named = {0: [(name, tuple(tensor.shape)) for name, tensor in tensors.items()]}
        self.layout = make_layout(spec, self.config.model.dtype, named, aliases)
        self.pack, self.base = pack_of(self.layout, 0, tensors), base_digest(self.config.model.folder)
        self.client.hello({adapter.name: 0}, {})
        self._publish()

    def step(self) -> Batch:
        """Take the next batch, commit it, publish the next version, ask for an evaluation if one is due."""
        name = self.config.adapters[0].name
        wanted = (AdapterRef(name=name, version=self.version),)
        while isinstance(batch := self.client.poll(wanted), NotReady):
            continue
        if isinstance(batch, AdapterFailed):
            raise RolloutError(f"{batch.adapter}: {batch.reason}")
        self.client.commit(name, self.version)
        self.version += 1
        self._publish()
        every = self.config.eval.every_steps
        if every and self.version % every == 0:
            self.client.request_eval(AdapterRef(name=name, version=self.version), "held-out")
        return batch

    def _publish(self) -> None:
        ref = AdapterRef(name=self.config.adapters[0].name, version=self.version)
        parent = AdapterRef(name=ref.name, version=ref.version - 1) if self.version else None
        handle = self.publisher.publish(
            ref=ref, parent=parent, layout=self.layout, pack=self.pack, base_digest=self.base, probe=None
        )
        handle.wait()
        self.client.announce(ref, {"server-0": self.data_url})

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self.children:
            child.terminate()
        for child in self.children:
            child.wait()
