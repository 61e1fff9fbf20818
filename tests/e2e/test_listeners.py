"""Every listener of a running system is in the table of docs/en/cluster.md, and answers whom the table says.

Print what was found with ``pytest -s tests/e2e/test_listeners.py``.
"""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import read_secret, wait_endpoint
from areal_lora.weight_sync.admin_client import AdminClient
from areal_lora.weight_sync.trainer.membership import RendezvousWatch
from tests.support.e2e.listeners import Listener
from tests.support.e2e.metrics import records
from tests.support.engine.vllm_ext import stand_in
from tests.support.engine.vllm_ext.stand_in import TOKEN_S
from tests.support.forks.starter import starter_of
from tests.support.launcher.command import ROLES, configs, forked_run
from tests.support.paths import ROOT

NAMESPACE, ADDRESS = f"al-{os.getpid()}", "10.77.0.1"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    process: str
    plane: str
    transport: str
    bind: str


def table() -> list[Row]:
    """Of docs/en/cluster.md, the columns that can be checked."""
    rows = []
    for line in (ROOT / "docs" / "en" / "cluster.md").read_text().splitlines():
        cells = [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 9 and cells[0] != "process" and set(cells[0]) != {"-"}:
            rows.append(Row(process=cells[0], plane=cells[1], transport=cells[2], bind=cells[3]))
    return rows


def fits(row: Row, listener: Listener, bind: str) -> bool:
    if (row.process, row.plane, row.transport) != (listener.process, listener.plane, listener.transport):
        return False
    if not listener.port:
        return True  # a path, whose rights the script looks at
    address = ipaddress.ip_address(listener.address)
    match row.bind:
        case "cluster.bind":
            return listener.address == (ADDRESS if bind == "0.0.0.0" else bind)
        case "one address":
            return not address.is_unspecified and (address.is_loopback or bind != "127.0.0.1")
        case fixed:
            return listener.address == fixed


@contextmanager
def namespace() -> Iterator[list[str]]:
    """The command prefix that runs in a network namespace with loopback and one more address."""
    made = subprocess.run(["ip", "netns", "add", NAMESPACE], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no network namespace can be made here: {made.stderr.strip()}")
    try:
        for command in (
            "link set lo up",
            "link add v0 type veth peer name v1",
            f"addr add {ADDRESS}/24 dev v0",
            "link set v0 up",
            "link set v1 up",
        ):
            subprocess.run(["ip", "-n", NAMESPACE, *command.split()], check=True)
        yield ["ip", "netns", "exec", NAMESPACE]
    finally:
        subprocess.run(["ip", "netns", "del", NAMESPACE], check=True)


def walk(root: Path, prefix: list[str], *settings: str, goes_on: bool) -> list[Listener]:
    """Start a run, find and try its listeners once a version is published, stop it.

    ``goes_on``: it takes steps, before and after that.
    """
    command = [
        *prefix,
        *forked_run(root, *configs("vote", folder=ROOT / "examples" / "workflows")),  # agents have an endpoint
        f"run.root={root}",
        "run.name=listeners",
        "run.steps=500",
        "eval.every_steps=0",
        "adapters.gsm8k.sampling.prompts_per_step=8",
        "adapters.gsm8k.sampling.n_samples=2",
        "adapters.gsm8k.task.n_eval=8",
        *settings,
    ]
    folder, mark = root / "listeners", uuid.uuid4().hex
    with (root / "log").open("w") as out:
        launcher = subprocess.Popen(command, env=os.environ | {"AREAL_LORA_TEST": mark}, stdout=out, stderr=out)
    try:
        if goes_on:
            wait_record(launcher, folder, "step", 1)
        else:
            wait_version(launcher, folder)
        script = [*prefix, sys.executable, "-m", "tests.support.e2e.listeners", mark, str(folder)]
        done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr
        if goes_on:
            wait_record(launcher, folder, "step", 2 + count(folder, "step"))  # one may have been under way
    finally:
        launcher.terminate()
        time.sleep(0.3)
        launcher.terminate()  # without the time that processes have to end
        launcher.wait(150)
    return [Listener(**found) for found in json.loads(done.stdout)]


def wait_version(launcher: subprocess.Popen[bytes], folder: Path) -> None:
    """Until the server holds a version: all groups are formed."""
    wait_endpoint(RunFolder(folder), "server", 0, 280.0, still_alive=lambda: launcher.poll() is None)
    server = RendezvousWatch(RunFolder(folder), workers=1).server(0)
    assert server is not None
    client, deadline = AdminClient(server, read_secret(RunFolder(folder))), time.monotonic() + 280
    while not client.info(60.0).refs:
        assert launcher.poll() is None, f"the run ended:\n{(folder.parent / 'log').read_text()}"
        assert time.monotonic() < deadline, "no version was published in time"
        time.sleep(0.5)


def count(folder: Path, kind: str) -> int:
    return sum(r["kind"] == kind for r in records(folder))


def wait_record(launcher: subprocess.Popen[bytes], folder: Path, kind: str, number: int) -> None:
    deadline = time.monotonic() + 280
    while count(folder, kind) < number:
        what = f"{number} records of kind {kind}"
        assert launcher.poll() is None, f"the run ended before {what}:\n{(folder.parent / 'log').read_text()}"
        assert time.monotonic() < deadline, f"{what} were not made in time"
        time.sleep(0.2)


def check(found: list[Listener], bind: str) -> Counter[Row]:
    """All are in the table, and none has a fault; prints them. How many there are of each row."""
    rows = table()
    assert rows, "docs/en/cluster.md has no table"
    seen: Counter[Row] = Counter()
    wrong = []
    for listener in found:
        where = f"{listener.address}:{listener.port}" if listener.port else listener.address
        match = next((row for row in rows if fits(row, listener, bind)), None)
        line = f"{listener.process:15} {listener.plane:15} {listener.transport:10} {where:28}"
        if match is None:
            wrong.append(f"{line} is not in the table")
        else:
            seen[match] += 1
        wrong += [f"{line} {fault}" for fault in listener.faults]
    print(f"\nlisteners of a run with cluster.bind {bind}:")
    for row, count in seen.items():
        print(f"{count:4} x {row.process:15} {row.plane:15} {row.transport:10} bound to {row.bind}")
    assert not wrong, "\n".join(wrong)
    return seen


def planes_of(seen: Counter[Row]) -> set[tuple[str, str]]:
    return {(row.plane, row.transport) for row in seen}


BASIC = {("admin", "HTTPS"), ("control", "zmq CURVE"), ("agents", "HTTP"), ("collectives", "gloo")}


def on_loopback(root: Path) -> list[Listener]:
    # Answers take their time, since made-up ones must not be trained on: the trainer waits for them meanwhile.
    python = starter_of(ROLES["trainer.python"]).interpreter(root / "python", stand_in.__name__, {TOKEN_S: "60"})
    settings = ("cluster.bind=127.0.0.1", f"rollout.python={python}", "weight_sync.probe_tolerance=1e9")
    return walk(root, [], *settings, goes_on=False)


def on_all_addresses(root: Path) -> list[Listener]:
    with namespace() as prefix:
        return walk(root, prefix, "cluster.bind=0.0.0.0", goes_on=True)


Walks = dict[str, Future[list[Listener]]]


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walks]:
    """Both at once: most of their time they wait for answers that should not come."""
    with ThreadPoolExecutor(2) as threads:
        yield {
            name: threads.submit(at, tmp_path_factory.mktemp("walk"))
            for name, at in (("127.0.0.1", on_loopback), ("0.0.0.0", on_all_addresses))
        }


def test_listeners_on_loopback_with_a_server_without_a_model(walks: Walks) -> None:
    seen = check(walks["127.0.0.1"].result(), "127.0.0.1")
    assert planes_of(seen) >= BASIC | {("data", "HTTP")}


def test_listeners_of_a_run_that_other_machines_can_reach(walks: Walks) -> None:
    seen = check(walks["0.0.0.0"].result(), "0.0.0.0")
    assert planes_of(seen) >= BASIC | {("data", "HTTPS"), ("worker channel", "zmq CURVE"), ("engine queue", "Unix")}
    elsewhere = {("rollout server", "data", "HTTP"), ("rollout server", "collectives", "gloo")}  # the test above
    elsewhere |= {("service", "API", "HTTP")}  # tests/e2e/test_service_run.py
    elsewhere |= {("page", "page", "HTTP")}  # tests/unit/obs/report/test_live.py
    elsewhere |= {("gateway", "remote", "HTTP or HTTPS")}  # tests/process/engine/vllm_ext/test_remote.py
    elsewhere |= {("launcher", "nodes", "zmq CURVE")}  # tests/e2e/test_nodes_run.py
    not_seen = {(row.process, row.plane, row.transport) for row in table() if row not in seen}
    assert not_seen == elsewhere, "the table has rows of listeners that do not exist"
