"""The ``cluster`` part of the configuration: nodes, devices, addresses, and the job that Slurm allocates."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from areal_lora.config.sections.section import TIME_LIMIT, NonNegInt, PositiveInt, Section
from areal_lora.network.addresses import WILDCARDS, Place, find_place
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import published_hosts

Role = Literal["trainer", "rollout", "controller"]
LINK_BITS = 100e9
"""Network bandwidth of a node in the estimates of ``--dry-run``, bit/s: one port of InfiniBand EDR or 100 GbE."""
Word = Annotated[str, Field(pattern=r"^\S+$")]
"""One word of a #SBATCH line."""
OwnWord = Annotated[str, Field(pattern=r"^\S*$")]
Line = Annotated[str, Field(pattern=r"^[^\r\n]+$")]
Memory = Annotated[str, Field(pattern=r"^\d+[KMGTkmgt]?$")]
"""An amount of memory as Slurm reads it: MiB without a unit."""
TimeLimit = Annotated[str, Field(pattern=TIME_LIMIT)]


class SlurmComponent(Section):
    """One component of a heterogeneous job. What is unset is that of ``cluster.slurm``; an empty text is none."""

    roles: list[Role] = Field(min_length=1, description="`trainer`, `rollout`, `controller`: what runs on its nodes.")
    nodes: PositiveInt = Field(1, description="Nodes of the component.")
    devices_per_node: NonNegInt | None = Field(
        None, description="Unset: `cluster.devices_per_node`, or 0 for nodes of the controller alone."
    )
    partition: OwnWord | None = Field(None, description="Unset: that of `cluster.slurm`, as below. Empty: none.")
    gres_type: OwnWord | None = Field(None, description="Type of the GPUs.")
    mem: Memory | None = Field(None, description="sbatch --mem: host memory of each node.")
    extra: list[Line] = Field(default_factory=list, description="Further #SBATCH lines, without the prefix.")


class SlurmConfig(Section):
    partition: Word | None = Field(None, description="sbatch --partition.")
    account: Word | None = Field(None, description="sbatch --account.")
    time_limit: TimeLimit = Field("24:00:00", description="sbatch --time.")
    mem: Memory | None = Field(None, description="sbatch --mem: host memory of each node, such as `800G`; `0`: all.")
    gres_type: Word | None = Field(None, description="Type of the GPUs, such as `h100` in `--gres=gpu:h100:8`.")
    extra: list[Line] = Field(
        default_factory=list,
        description="Further #SBATCH lines of the job, or of its first component, such as `--qos=high`, "
        "`--constraint=ib`, `--exclude=n7`, `--exclusive`, `--mail-type=END`.",
    )
    setup: list[str] = Field(default_factory=list, description="Shell lines run on each node before a role starts.")
    srun_extra: dict[Role, list[Line]] = Field(
        default_factory=dict,
        description="Further srun options by role, such as `rollout: [--container-image=...]` (enroot and pyxis).",
    )
    wrapper: dict[Role, list[Line]] = Field(
        default_factory=dict,
        description="Words before the interpreter by role, such as `trainer: [apptainer, exec, --nv, image.sif]`.",
    )
    components: list[SlurmComponent] = Field(
        default_factory=list,
        description="Components of a heterogeneous job, each with nodes of its own; empty: one allocation.",
    )


class ClusterConfig(Section):
    kind: Literal["local", "slurm"] = Field("local", description="This machine, or a Slurm job.")
    device: Literal["cpu", "cuda", "npu"] = Field("cuda", description="What trainer ranks and servers compute on.")
    nodes: PositiveInt = Field(1, description="Nodes of the job; with `slurm.components` leave it out.")
    devices_per_node: PositiveInt = Field(
        8, description="Devices of each node. On CPUs: trainer ranks on a node, if the job has enough nodes."
    )
    share_devices: bool = Field(
        False,
        description="Servers use the devices of the trainer ranks: number the devices of a node from 0 for each role. "
        "A rank gets what `rollout.gpu_memory_utilization` leaves.",
    )
    device_memory_gib: PositiveFloat | None = Field(
        None, description="Memory of one device, GiB. If unset, it is read where the devices are on this machine."
    )
    min_servers: PositiveInt = Field(
        1,
        description="Rollout servers that a run needs. With fewer a publish waits for `weight_sync.rejoin_s`, then "
        "fails; a job that has lost a node continues with as many.",
    )
    controller_python: str | None = Field(None, description="Interpreter of the controller; this one if unset.")
    bind: str = Field(
        "127.0.0.1",
        description="Address that ports bind to; with `0.0.0.0` (or `::` for IPv6) each node binds to the one address "
        "that `interface` finds. Except on loopback, the data plane uses TLS and requires its key.",
    )
    interface: str = Field(
        "auto",
        description="With `bind: 0.0.0.0` or `::`, the address of a node for the other nodes: the name of an "
        "interface, a network such as `10.0.0.0/8`, or `auto` for the address on the route to the other nodes.",
    )
    slurm: SlurmConfig = SlurmConfig()

    @property
    def total_nodes(self) -> int:
        """Nodes of all components, or of the one allocation."""
        return sum(component.nodes for component in self.slurm.components) or self.nodes


def own_place(cluster: ClusterConfig, run_folder: RunFolder) -> Place:
    """Return the address that this process binds to until it exits. Raises ConfigError."""
    return _own_place(cluster.bind, cluster.interface, cluster.total_nodes, run_folder)


@cache  # endpoints published later must not move a process to another address
def _own_place(bind: str, interface: str, nodes: int, run_folder: RunFolder) -> Place:
    peers = published_hosts(run_folder) if bind in WILDCARDS else []
    return find_place(bind=bind, interface=interface, nodes=nodes, peers=peers)
