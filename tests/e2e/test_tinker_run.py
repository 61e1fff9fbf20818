"""Unmodified SDKs of tinker on a real run: the page's first adapter, and a user's loop in both versions at once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import read_endpoint
from tests.support.clocks import wait_until
from tests.support.distributed.sdk_ranks import sdk_and_engine
from tests.support.distributed.spawn import run_ranks
from tests.support.docs import blocks, commands
from tests.support.paths import ROOT
from tests.support.tinker.scripted import PROGRAMS, new_tenant
from tests.support.tinker.sdk import VERSIONS, environment, sdk_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WAIT_S, PROGRAM_S = 400.0, 400.0
STEPS, RATE = 8, 4e-3  # as in the program
TEXTS = ["1 + 1 = 2", "2 + 3 = 5", "4 + 4 = 8"]
PAGE = ROOT / "docs" / "en" / "tinker.md"
TENANTS = dict(zip(VERSIONS, ("acme", "bolt"), strict=True))


class Checkout:
    """A folder like a checkout, and the run that the page's command starts in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, RunFolder.of(folder / "runs" / "service")
        (folder / ".venv").symlink_to(sys.prefix)
        (folder / "examples").symlink_to(ROOT / "examples")
        (start,) = [each.text for each in commands(PAGE) if "areal_lora.launch" in each.text]
        self.output = (folder / "output").open("w+")
        more = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.launcher = subprocess.Popen(
            ["bash", "-c", f"exec {start}"], cwd=folder, env=os.environ | more, stdout=self.output, stderr=self.output
        )
        wait_until(self._is_up, WAIT_S, "servers and service", pause_s=0.2)

    def _is_up(self) -> bool:
        assert self.launcher.poll() is None, self.log()
        return all(read_endpoint(self.run, role, 0) is not None for role in ("service", "server"))

    @property
    def url(self) -> str:
        endpoint = read_endpoint(self.run, "service", 0)
        assert endpoint is not None
        return f"http://{endpoint.host}:{endpoint.ports['api']}"

    def begin(self, version: str, program: Path, key: str) -> subprocess.Popen[str]:
        more = {"TINKER_BASE_URL": self.url, "TINKER_API_KEY": key}
        return subprocess.Popen(
            [sys.executable, str(program)],
            cwd=self.folder,
            env=environment(version) | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, process: subprocess.Popen[str]) -> str:
        out, err = process.communicate(timeout=PROGRAM_S)
        assert process.returncode == 0, f"{out}\n{err[-6000:]}\n{self.log()}"
        return out

    def log(self) -> str:
        self.output.seek(0)
        return self.output.read()[-6000:]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    for version in VERSIONS:
        sdk_path(version)
    checkout = Checkout(tmp_path_factory.mktemp("a checkout"))
    try:
        yield checkout
    finally:
        checkout.launcher.terminate()
        checkout.launcher.wait(60)
        checkout.output.close()


def test_the_page(checkout: Checkout, tmp_path: Path) -> None:
    """The first adapter of the page prints what the page shows, up to the digits of another machine."""
    (program,) = [block.text for block in blocks(PAGE) if block.language == "python"]
    (shown,) = [each.output for each in commands(PAGE) if each.text.startswith("python ")]
    file = tmp_path / "first.py"
    file.write_text(program)
    key = new_tenant(checkout.run, checkout.url, "page")
    found = checkout.end(checkout.begin(VERSIONS[-1], file, key)).splitlines()
    number = re.compile(r"-?\d+\.\d+")
    for line, wanted in zip(found, shown.splitlines(), strict=True):
        assert number.sub("N", line.partition("tinker://")[0]) == number.sub("N", wanted.partition("tinker://")[0])
        values, expected = ([float(each) for each in number.findall(text)] for text in (line, wanted))
        assert values == pytest.approx(expected, rel=0.1, abs=0.5)


@pytest.fixture(scope="module")
def loops(checkout: Checkout) -> dict[str, dict[str, Any]]:
    begun = {}
    for version, tenant in TENANTS.items():
        key = new_tenant(checkout.run, checkout.url, tenant)
        begun[version] = checkout.begin(version, PROGRAMS / "loop.py", key)
    return {version: json.loads(checkout.end(process).splitlines()[-1]) for version, process in begun.items()}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_loop_learns_resumes_and_is_served(loops: dict[str, dict[str, Any]], version: str) -> None:
    said = loops[version]
    assert said["losses"][-1] < 0.5 * said["losses"][0]
    first, last = said["rewards"][:2], said["rewards"][-2:]
    assert sum(last) / 2 > sum(first) / 2 + 0.2, said["rewards"]
    went_on, resumed = said["ways"]
    assert resumed == went_on, "with its optimizer, to the last bit"
    assert went_on[0] == 17
    assert said["served"] == pytest.approx(went_on[2], abs=5e-3), "the servers score as the trainer does"


def test_both_versions_made_the_engines_own_steps(
    checkout: Checkout, loops: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """Beside each other, with one trainer: losses, weights and moments of eight steps are the engine's, bit for bit."""
    for version, tenant in TENANTS.items():
        session = loops[version]["model"].partition(":")[0]
        asked = (checkout.run.path, f"{tenant}-{session}-0.1", f"n{2 * STEPS + 1}", TEXTS, RATE, STEPS)
        (folder := tmp_path / tenant).mkdir()
        ((losses, engine, sdk),) = run_ranks(sdk_and_engine, 1, folder, asked, timeout_s=100.0)
        assert loops[version]["losses"] == losses
        assert sdk == engine
