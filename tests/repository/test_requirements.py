"""What pip would install: the extras on both Pythons, and the pinned files of the GPU roles."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.paths import ROOT
from tests.support.sizes import NIGHTLY

REQUIREMENTS = ROOT / "requirements"
ROLES = ("trainer", "rollout")
OFFLINE = re.compile(r"failed to fetch|error sending request|dns error|no route|timed out", re.IGNORECASE)
asks_an_index = pytest.mark.skipif(not NIGHTLY, reason="asks a package index for hundreds of files; make test-all")


def pins(file: Path) -> dict[str, str]:
    """Version by name; a line that pins nothing is an error."""
    lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    found = [re.fullmatch(r"([\w.-]+)(?:\[[\w,-]+\])?==([^\s;]+)(?: *;.*)?", line) for line in lines if line]
    assert all(found), file
    return {match[1].lower().replace("_", "-"): match[2] for match in found if match}


def uv(*words: str) -> str:
    """What a command prints that uses the uv of the tests' environment. Skips where no package index is reached."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        words, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False, timeout=550
    )
    if done.returncode and OFFLINE.search(done.stderr):
        pytest.skip(f"no package index: {done.stderr.strip().splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("role", ROLES)
def test_the_pins_of_a_role_hold_what_is_asked_for(role: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = pins(REQUIREMENTS / f"gpu-{role}.txt")
    assert len(locked) > 100, "every package, not only the ones that were asked for"
    assert pins(REQUIREMENTS / f"gpu-{role}.in").items() <= locked.items()
    for text in (*project["dependencies"], *project["optional-dependencies"][role]):
        wanted = Requirement(text)
        version = locked[wanted.name.lower().replace("_", "-")]
        assert wanted.specifier.contains(version, prereleases=True), f"{text}: {version}"


def test_the_roles_cannot_share_an_environment() -> None:
    trainer, rollout = (pins(REQUIREMENTS / f"gpu-{role}.txt")["transformers"] for role in ROLES)
    assert trainer != rollout, "if they agree, one environment is enough: say so in the quickstart"


@pytest.mark.slow
@pytest.mark.timeout(600)
@asks_an_index
@pytest.mark.parametrize("python", ["3.11", "3.12"])
@pytest.mark.parametrize("extra", ["cpu", "data", "math", "rollout", "s3", "trainer"])
def test_an_extra_resolves(extra: str, python: str) -> None:
    command = ("uv", "pip", "compile", "--quiet", "--python-version", python, "--extra", extra, "pyproject.toml")
    if (extra, python) == ("trainer", "3.11"):
        with pytest.raises(AssertionError, match="megatron-bridge"):
            uv(*command)
        return
    assert "==" in uv(*command)


@pytest.mark.slow
@pytest.mark.timeout(600)
@asks_an_index
@pytest.mark.parametrize("role", ROLES)
def test_the_pins_can_be_installed_together(role: str) -> None:
    """Every pin is on the index with a wheel or a source, and no two contradict each other."""
    target = ("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_39")
    assert "==" in uv("uv", "pip", "compile", "--quiet", *target, f"requirements/gpu-{role}.txt")


BUILT = {"transformer-engine-torch", "antlr4-python3-runtime", "wget"}
"""Pins without a wheel: the first against the installed torch, the others are Python alone."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@asks_an_index
@pytest.mark.parametrize("role", ROLES)
def test_pins_have_wheels(role: str, tmp_path: Path) -> None:
    """pip builds nothing that needs the role's own torch, or sources that are not whole."""
    lines = [f"{name}=={version}" for name, version in pins(REQUIREMENTS / f"gpu-{role}.txt").items()]
    file = tmp_path / "wheels.txt"
    file.write_text("\n".join(line for line in lines if line.partition("==")[0] not in BUILT))
    target = ("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_39", "--no-deps", "--no-build")
    assert "==" in uv("uv", "pip", "compile", "--quiet", *target, str(file))


@pytest.mark.slow
@pytest.mark.timeout(600)
@asks_an_index
def test_the_pins_can_be_made_again(tmp_path: Path) -> None:
    uv("requirements/lock.sh", str(tmp_path))
    for role in ROLES:
        made = pins(tmp_path / f"gpu-{role}.txt")
        assert pins(REQUIREMENTS / f"gpu-{role}.in").items() <= made.items()
        assert made.keys() == pins(REQUIREMENTS / f"gpu-{role}.txt").keys()
