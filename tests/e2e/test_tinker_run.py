"""Unmodified SDKs of tinker on a real run: the page's first adapter, a user's loop in both versions at once, and the
cookbook's own recipes.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load, load_file

from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import read_endpoint
from tests.support.cli.command import programs
from tests.support.clocks import wait_until
from tests.support.distributed.sdk_ranks import sdk_and_engine
from tests.support.distributed.spawn import run_ranks
from tests.support.docs import blocks, commands
from tests.support.launcher.command import forked_roles
from tests.support.paths import ROOT
from tests.support.sizes import sample
from tests.support.tinker.cookbook import MODEL, cookbook_environment, data_sets, metrics
from tests.support.tinker.offline import LOSSES, expected_loss
from tests.support.tinker.scripted import PROGRAMS, new_tenant
from tests.support.tinker.sdk import VERSIONS, environment, sdk_path, sdk_program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WAIT_S, PROGRAM_S = 400.0, 400.0
STEPS, RATE = 8, 4e-3  # as in the program
TEXTS = ["1 + 1 = 2", "2 + 3 = 5", "4 + 4 = 8"]
PAGE = ROOT / "docs" / "en" / "service.md"
TENANTS = dict(zip(VERSIONS, ("acme", "bolt"), strict=True))


class Checkout:
    """A folder like a checkout, and the run that the page's command starts in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, RunFolder.of(folder / "runs" / "service")
        programs(folder / ".venv" / "bin")
        (folder / "examples").symlink_to(ROOT / "examples")
        (folder / MODEL).parent.mkdir()
        (folder / MODEL).symlink_to(ROOT / "examples" / "math" / "tiny_model")
        data_sets(folder)
        (start,) = [each.text for each in commands(PAGE) if "areal_lora.launch" in each.text]
        self.output = (folder / "output").open("w+")
        more = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        base = [f"model.path={folder / MODEL}", "rollout.max_model_len=512"]  # the cookbook's prompts are long
        # Passes that are computed together have another rounding.
        base += ["rollout.deterministic=true", "rollout.max_staleness=0"]
        self.launcher = subprocess.Popen(
            ["bash", "-c", f"exec {start} {shlex.join([*base, *forked_roles(folder)])}"],
            cwd=folder,
            env=os.environ | more,
            stdout=self.output,
            stderr=self.output,
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

    def run_program(self, command: list[str], env: dict[str, str], key: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=env | {"TINKER_BASE_URL": self.url, "TINKER_API_KEY": key},
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
        checkout.launcher.wait(150)
        checkout.output.close()


def test_the_page(checkout: Checkout, tmp_path: Path) -> None:
    """The first adapter of the page prints what the page shows, up to the digits of another machine."""
    (program,) = [block.text for block in blocks(PAGE) if block.language == "python"]
    (shown,) = [each.output for each in commands(PAGE) if each.text == "python first.py"]
    file = tmp_path / "first.py"
    file.write_text(program)
    key = new_tenant(checkout.run, checkout.url, "page")
    found = checkout.end(checkout.run_program([sys.executable, str(file)], environment(VERSIONS[-1]), key)).splitlines()
    number = re.compile(r"-?\d+\.\d+")
    for line, wanted in zip(found, shown.splitlines(), strict=True):
        assert number.sub("N", line.partition("tinker://")[0]) == number.sub("N", wanted.partition("tinker://")[0])
        values, expected = ([float(each) for each in number.findall(text)] for text in (line, wanted))
        assert values == pytest.approx(expected, rel=0.1, abs=0.5)


@pytest.mark.parametrize(("recipe", "steps"), sample([("chat_sl", 4), ("math_rl", 2), ("rl_loop", 2)], 1))
def test_recipes_of_the_cookbook(checkout: Checkout, recipe: str, steps: int) -> None:
    """The page's commands, with the cookbook's own losses, evaluations and checkpoints."""
    (command,) = [each.text for each in commands(PAGE) if f"tinker_cookbook.recipes.{recipe}" in each.text]
    key = new_tenant(checkout.run, checkout.url, recipe.replace("_", ""))
    shell = ["bash", "-c", f"exec {command.replace('python', shlex.quote(sys.executable), 1)}"]
    checkout.end(checkout.run_program(shell, cookbook_environment(checkout.folder), key))
    rows = metrics(checkout.folder, recipe.replace("_loop", "-loop"))
    assert len([row for row in rows if {"progress", "progress/done_frac"} & row.keys()]) == steps
    if recipe == "chat_sl":
        losses = [row["train_mean_nll"] for row in rows if "train_mean_nll" in row]
        assert losses[-1] < losses[0], losses


@pytest.fixture(scope="module")
def loops(checkout: Checkout) -> dict[str, dict[str, Any]]:
    begun = {}
    for version, tenant in TENANTS.items():
        key = new_tenant(checkout.run, checkout.url, tenant)
        program = sdk_program(PROGRAMS / "loop.py")
        begun[version] = (key, checkout.run_program(program, environment(version), key))
    return {
        version: json.loads(checkout.end(process).splitlines()[-1]) | {"key": key}
        for version, (key, process) in begun.items()
    }


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
    assert said["unloaded"]


@pytest.mark.parametrize("version", VERSIONS)
def test_samples_end_at_a_token_and_prompts_have_scores(loops: dict[str, dict[str, Any]], version: str) -> None:
    said = loops[version]["sampled"]
    whole, (cut, reason) = said["whole"], said["cut"]
    at = whole.index(whole[len(whole) // 2])
    assert (cut, reason) == (whole[: at + 1], "stop")
    scores, top = said["prompt"]
    assert (scores[0], top[0]) == (None, None)
    for score, row in zip(scores[1:], top[1:], strict=True):
        values = [value for _, value in row]
        assert (len(row), values) == (3, sorted(values, reverse=True))
        assert score <= values[0] < 0.0
        assert score in values or score < values[-1], "the prompt's own token is among them, or less likely"


def test_a_session_in_flight_samples_the_newest_weights(loops: dict[str, dict[str, Any]]) -> None:
    """It was opened before the eight steps, and is never told of them. Version 0.24.1 cannot open one."""
    first, last, lengths = loops[VERSIONS[1]]["in_flight"]
    for served, trained in (first, last):
        assert served == pytest.approx(trained, abs=5e-3)
    assert max(abs(a - b) for a, b in zip(first[1], last[1], strict=True)) > 0.05, "the steps have changed something"
    assert lengths == [150] * 4, "answers that were cut by new weights continue"
    assert loops[VERSIONS[0]]["in_flight"] == []


def test_an_archive_is_the_saved_state(checkout: Checkout, loops: dict[str, dict[str, Any]]) -> None:
    said, tenant = loops[VERSIONS[0]], TENANTS[VERSIONS[0]]
    with tarfile.open(said["archive"]) as tar:
        assert tar.getnames() == ["adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"]
        found = {name: (file := tar.extractfile(name)) and file.read() for name in tar.getnames()}
    assert json.loads(found["adapter_config.json"] or "")["r"] == 4
    tensors = load(found["adapter_model.safetensors"] or b"")
    session = said["model"].partition(":")[0]
    folder = checkout.run.saved_state(f"{tenant}-{session}-0.1", f"n{2 * STEPS + 1}")
    kept = load_file(folder / "rank-0000.safetensors")
    weights = {values.tobytes() for name, values in kept.items() if name.startswith("weight/")}
    assert {values.tobytes() for values in tensors.values()} == weights


def test_weights_are_taken_home_while_every_place_is_taken(
    checkout: Checkout, loops: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """By the command line of both versions, and encrypted by the cookbook. The models of the loop, which cannot end
    its session, are the account's quota.
    """
    said = loops[VERSIONS[0]]
    path, begun = said["paths"][0], []
    (command,) = [each.text for each in commands(PAGE) if each.text.startswith("tinker checkpoint")]
    for version in VERSIONS:
        words = shlex.split(command.replace("tinker://sd02fea56da93:train:0/weights/first", path))
        home = tmp_path / version
        tool = [sys.executable, "-m", "tinker.cli", *words[1:], "--output", str(home)]
        begun.append(checkout.run_program(tool, environment(version), said["key"]))
    code = f"from tinker_cookbook import weights; weights.download(tinker_path={path!r}, output_dir={str(tmp_path)!r})"
    env = cookbook_environment(checkout.folder)
    begun.append(checkout.run_program([sys.executable, "-c", code], env, said["key"]))
    for process in begun:
        checkout.end(process)
    with tarfile.open(said["archive"]) as tar:
        whole = {name: tar.extractfile(name).read() for name in tar.getnames()}  # type: ignore[union-attr]
    folder = path.removeprefix("tinker://").replace("/", "_")
    for home in (tmp_path, *(tmp_path / version / folder for version in VERSIONS)):
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            assert (home / name).read_bytes() == whole[name], f"{home.name}: {name}"


def test_both_versions_made_the_engines_own_steps(
    checkout: Checkout, loops: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """Beside each other, with one trainer: losses, weights and moments of eight steps on texts, and of eight of ppo,
    cispo and dro from there, are the engine's, bit for bit. The losses are also those of a loop in float64.
    """
    for version, tenant in TENANTS.items():
        session = loops[version]["model"].partition(":")[0]
        saved = (f"{tenant}-{session}-0.1", f"n{2 * STEPS + 1}")
        branched = (f"{tenant}-{session}-1.1", f"n{1 + 2 * len(LOSSES) + 1}")  # its first operation is the load
        (folder := tmp_path / tenant).mkdir()
        asked = (checkout.run.path, saved, branched, TEXTS, RATE, STEPS)
        ((losses, others, digests),) = run_ranks(sdk_and_engine, 1, folder, asked, timeout_s=280.0)
        assert loops[version]["losses"] == losses
        assert [loss for loss, _ in loops[version]["branched"]] == others
        engine, sdk, branch, sdk_branch = digests
        assert (sdk, sdk_branch) == (engine, branch)
        for (name, settings), (loss, rows) in zip(LOSSES, loops[version]["branched"], strict=True):
            assert loss == pytest.approx(expected_loss(name, settings, rows), rel=1e-5, abs=1e-4), name
