"""What the distribution says of itself."""

from __future__ import annotations

import ast
import hashlib
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import areal_lora
from tests.support.paths import ROOT

APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
"""sha256 of www.apache.org/licenses/LICENSE-2.0.txt."""


def test_the_license_is_apache_2_in_the_file_the_readme_and_the_metadata(tmp_path: Path) -> None:
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_2
    assert "[Apache License 2.0](LICENSE)" in (ROOT / "README.md").read_text()
    (tmp_path / "areal_lora").mkdir()
    for name in ("pyproject.toml", "LICENSE", "README.md", "areal_lora/__init__.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    code = "from setuptools import build_meta; print(build_meta.prepare_metadata_for_build_wheel('out'))"
    (tmp_path / "out").mkdir()
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    folder = tmp_path / "out" / done.stdout.strip().splitlines()[-1]
    fields = (folder / "METADATA").read_text().splitlines()
    assert "License-Expression: Apache-2.0" in fields
    assert "License-File: LICENSE" in fields
    assert f"Version: {areal_lora.__version__}" in fields
    assert {
        f"Provides-Extra: {extra}" for extra in ("trainer", "rollout", "cpu", "data", "math", "wandb", "mlflow")
    } <= set(fields)
    assert {f"Classifier: Programming Language :: Python :: 3.{minor}" for minor in (11, 12)} <= set(fields)
    assert "# areal_lora" in fields, "the long description is the README"
    assert (folder / "licenses" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_the_package_holds_no_test_code_and_names_no_test() -> None:
    modules = [path.relative_to(ROOT) for path in sorted((ROOT / "areal_lora").rglob("*.py"))]
    assert len(modules) > 200
    assert [module for module in modules if "testing" in module.with_suffix("").parts] == []
    assert [module for module in modules if "tests/" in (ROOT / module).read_text(encoding="utf-8")] == []
    assert [module for module in modules if imports_tests(ROOT / module)] == []


def imports_tests(path: Path) -> bool:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return any(name.partition(".")[0] == "tests" for name in names)


def run(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, words)], cwd=cwd, capture_output=True, text=True, check=False, timeout=200)


@pytest.mark.slow
def test_the_wheel_works_in_another_environment_without_the_checkout(tmp_path: Path) -> None:
    """Only the dependencies come from this environment."""
    source, bare, away = tmp_path / "source", tmp_path / "a venv", tmp_path / "away"
    away.mkdir()
    source.mkdir()
    for name in ("areal_lora", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    built = run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", tmp_path, source, cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    [wheel] = tmp_path.glob("*.whl")
    assert run(sys.executable, "-m", "venv", "--without-pip", bare, cwd=tmp_path).returncode == 0
    python = bare / "bin" / "python"
    done = run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [site] = (bare / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    shutil.rmtree(source)

    place = run(python, "-c", "import areal_lora; print(areal_lora.__file__)", cwd=away).stdout
    assert place.startswith(str(site)), place
    command = bare / "bin" / "areal-lora"
    assert run(command, "--version", cwd=away).stdout == f"areal_lora {areal_lora.__version__}\n"
    assert "init" in run(command, "--help", cwd=away).stdout
    configs = ("--config", "gsm8k_grpo_megatron_lora_moe.yaml", "--config", "embedded.yaml")
    planned = run(command, "plan", *configs, cwd=away)
    assert planned.returncode == 0, planned.stderr
    assert "embedded" in planned.stdout
    assert (site / "areal_lora" / "py.typed").is_file()
    assets = {path.name for path in (ROOT / "areal_lora" / "obs" / "report" / "assets").iterdir()}
    assert {path.name for path in (site / "areal_lora" / "obs" / "report" / "assets").iterdir()} == assets
    assert {"page.js", "uPlot.iife.min.js", "uPlot.LICENSE"} <= assets
    assert (site / "areal_lora" / "examples" / "math" / "evaluate.py").is_file()

    (site / "dependencies.pth").unlink()
    (site / "some.pth").write_text(f"{only_what_is_needed(tmp_path / 'some')}\n")
    missing = run(command, "train", *configs, cwd=away)
    assert (missing.returncode, missing.stderr.count("\n")) == (69, 1), missing.stderr
    assert "has no package megatron" in missing.stderr
    assert not (away / "runs").exists()


def only_what_is_needed(folder: Path) -> Path:
    """This environment's packages without Megatron and vLLM."""
    folder.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("megatron", "vllm", "areal_lora", "__editable__")):
            (folder / path.name).symlink_to(path)
    return folder
