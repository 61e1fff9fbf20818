"""A run that begins without adapters: the page's commands, two tenants, the inbox, a kill, a name used again."""

from __future__ import annotations

import io
import os
import shlex
import signal
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from safetensors.numpy import load

from areal_lora.errors import ExitCode
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import read_endpoint
from tests.support.cli.command import programs
from tests.support.clocks import wait_until
from tests.support.docs import commands
from tests.support.launcher.command import forked_roles
from tests.support.paths import EXAMPLES, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WAIT_S = 400.0
PAGE = ROOT / "docs" / "en" / "service.md"
ADAPTER: dict[str, Any] = yaml.safe_load((EXAMPLES / "adapters" / "sums.yaml").read_text())


class Checkout:
    """A folder like a checkout, in which the page's commands work, and the run that the first of them starts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, RunFolder(folder / "runs" / "service")
        programs(folder / ".venv" / "bin")
        (folder / "examples").symlink_to(ROOT / "examples")
        self.shown = {command.text: command for command in commands(PAGE)}
        self.keys: dict[str, str] = {}
        (start,) = [text for text in self.shown if "areal_lora.launch" in text]
        self.output = (folder / "output").open("w+")
        self.launcher = subprocess.Popen(
            ["bash", "-c", f"exec {start} {shlex.join(forked_roles(folder))}"],
            cwd=folder,
            env=self._env(),
            stdout=self.output,
            stderr=self.output,
        )

    def _env(self) -> dict[str, str]:
        path = f"{self.folder}/.venv/bin:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}

    def say(self, begin: str) -> str:
        """The output of the page's only command that begins so."""
        (text,) = [text for text in self.shown if text.startswith(begin)]
        done = subprocess.run(
            ["bash", "-c", text], cwd=self.folder, env=self._env(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}\n{self.log()}"
        return done.stdout

    def shown_output(self, begin: str) -> str:
        (output,) = [command.output for text, command in self.shown.items() if text.startswith(begin)]
        return output

    def call(self, caller: str, method: str, path: str, **more: Any) -> httpx.Response:
        """One request to the service that is up now; after a kill it has another port."""
        answers: list[httpx.Response] = []

        def tried() -> bool:
            assert self.launcher.poll() is None, self.log()
            if (endpoint := read_endpoint(self.run, "service", 0)) is None:
                return False
            headers = {"Authorization": f"Bearer {self.keys[caller]}"}
            url = f"http://{endpoint.host}:{endpoint.ports['api']}{path}"
            try:
                answers.append(httpx.request(method, url, headers=headers, timeout=150.0, **more))
            except httpx.TransportError:
                return False
            return True

        wait_until(tried, WAIT_S, path)
        return answers[-1]

    def phase(self, caller: str, name: str) -> str:
        return str(self.call(caller, "GET", f"/v1/adapters/{name}").json()["phase"])

    def wait_phase(self, caller: str, name: str, *phases: str) -> None:
        wait_until(lambda: self.phase(caller, name) in phases, WAIT_S, f"{name} is {phases}", pause_s=0.3)

    def log(self) -> str:
        self.output.seek(0)
        return self.output.read()[-6000:]


@pytest.fixture
def checkout(tmp_path: Path) -> Any:
    checkout = Checkout(tmp_path)
    try:
        yield checkout
    finally:
        checkout.launcher.terminate()
        checkout.launcher.wait(150)
        checkout.output.close()


def test_the_page_from_the_first_adapter_to_the_stop(checkout: Checkout) -> None:
    it = checkout
    wait_until(it.run.service_key.exists, WAIT_S, "the service", pause_s=0.1)
    it.keys["operator"] = it.run.service_key.read_text().strip()
    assert it.say("areal-lora adapters create") == it.shown_output("areal-lora adapters create")
    it.keys["acme"] = it.say("areal-lora adapters keys").strip()
    created = it.call("acme", "POST", "/v1/adapters", json=ADAPTER | {"steps": 500})
    assert created.status_code == 201, created.text

    # Paused it stays on the servers, and answers with the tenant's own name of it.
    wait_until(
        lambda: it.call("acme", "GET", "/v1/adapters/sums").json()["version"] is not None, WAIT_S, "v0", pause_s=0.3
    )
    assert it.call("acme", "POST", "/v1/adapters/sums/pause").status_code == 200
    it.wait_phase("acme", "sums", "paused")
    asked = {"model": "sums", "prompt": "1 + 1 =", "max_tokens": 4}
    answer = it.call("acme", "POST", "/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"].startswith("sums@v")

    server, endpoint = read_endpoint(it.run, "server", 0), read_endpoint(it.run, "service", 0)
    assert server is not None
    assert endpoint is not None
    assert endpoint.host == "127.0.0.1"
    direct = f"https://{server.host}:{server.ports['data']}/v1/completions"
    assert httpx.post(direct, json=asked | {"model": "acme-sums.1"}, verify=False).status_code == 401
    os.kill(endpoint.pid, signal.SIGKILL)
    dropped = it.run.inbox / "dropped.yaml"
    dropped.write_text((EXAMPLES / "adapters" / "sums.yaml").read_text().replace("name: sums", "name: dropped"))
    wait_until(lambda: (e := read_endpoint(it.run, "service", 0)) is not None and e.pid != endpoint.pid, WAIT_S)
    assert it.call("acme", "GET", "/v1/adapters/sums").json()["wanted"] == "paused"
    before = it.call("acme", "GET", "/v1/adapters/sums").json()["step"]
    assert it.call("acme", "POST", "/v1/adapters/sums/resume").status_code == 200
    wait_until(
        lambda: it.call("acme", "GET", "/v1/adapters/sums").json()["step"] > before,
        WAIT_S,
        "a further step",
        pause_s=0.3,
    )

    # Deleted while it trains; its name is used again.
    assert it.call("acme", "DELETE", "/v1/adapters/sums").status_code == 200
    again = it.call("acme", "POST", "/v1/adapters", json=ADAPTER | {"steps": 2})
    assert again.json()["incarnation"] == 2
    for caller, name in (("operator", "sums"), ("operator", "dropped"), ("acme", "sums")):
        it.wait_phase(caller, name, "done", "failed")
        shown = it.call(caller, "GET", f"/v1/adapters/{name}").json()
        assert (shown["phase"], shown["step"]) == ("done", 2 if caller == "acme" else 4), shown
    assert (it.run.inbox / "accepted" / "dropped.yaml").exists()

    listed = it.say("areal-lora adapters list").splitlines()
    assert [line.split()[:3] for line in listed[:2]] == [["adapter", "state", "step"], ["sums", "done", "4"]]
    assert [line.split()[3] for line in it.say("areal-lora adapters logs").splitlines()][-1] == "done"
    it.say("areal-lora adapters download")
    with tarfile.open(it.folder / "sums.tar") as tar:
        weights = tar.extractfile("sums/adapter_model.safetensors")
        assert weights is not None
        tensors = load(weights.read())
    assert tensors
    assert any((tensor != 0).any() for name, tensor in tensors.items() if "lora_B" in name), "it has been trained"
    other = it.call("acme", "GET", "/v1/adapters/sums/download")
    with tarfile.open(fileobj=io.BytesIO(other.content)) as tar:
        assert len(tar.getnames()) == 2
    assert other.content != (it.folder / "sums.tar").read_bytes()

    it.say("areal-lora adapters delete")
    assert it.call("operator", "GET", "/v1/adapters/sums").status_code == 404
    it.say("areal-lora stop")
    assert it.launcher.wait(150) == ExitCode.INTERRUPTED, it.log()
