"""kill -9 of the service wherever something is written: nothing acknowledged is lost, nothing is half there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from areal_lora.config.recorded import write_config
from areal_lora.processes.watched import VARIABLE
from areal_lora.run_folder.paths import RunFolder, read_desired
from areal_lora.run_folder.rendezvous import create_secret, forget_endpoint, read_endpoint
from areal_lora.service.queue.queue_rows import LOCAL, Quota
from areal_lora.service.queue.queue_store import Store, put_tenant
from tests.support.clocks import wait_until
from tests.support.forks.starter import starter_of
from tests.support.service.running import section, service_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

START_S, ANSWER_S = 150.0, 150.0
SERVICE = "areal_lora.service.main"
POINTS = (
    "service.decided",
    "service.half_recorded",
    "service.recorded",
    "service.committed",
    "service.desired",
    "service.answering",
)
DURABLE = ("service.committed", "service.desired", "service.answering")


class Life:
    """One process of the service, with a fault or without."""

    def __init__(self, folder: RunFolder, fault: str = "") -> None:
        self.folder = folder
        forget_endpoint(folder, "service", 0)
        self._log = (folder.path / "log").open("ab")
        self.process = starter_of(SERVICE).start(
            SERVICE, ["--run-folder", str(folder)], os.environ | {VARIABLE: fault}, self._log
        )
        wait_until(self._is_up, START_S)
        endpoint = read_endpoint(folder, "service", 0)
        assert endpoint is not None
        key = folder.service_key.read_text().strip()
        self.http = httpx.Client(
            base_url=f"http://{endpoint.host}:{endpoint.ports['api']}",
            headers={"Authorization": f"Bearer {key}"},
            timeout=ANSWER_S,
        )

    def _is_up(self) -> bool:
        assert self.process.poll() is None, (self.folder.path / "log").read_text()
        return read_endpoint(self.folder, "service", 0) is not None

    def request(self, method: str, path: str, request: str = "", **more: Any) -> httpx.Response | None:
        """None where the service ended before it had answered."""
        headers = {"Idempotency-Key": request} if request else {}
        try:
            return self.http.request(method, path, headers=headers, **more)
        except httpx.TransportError:
            return None

    def adapters(self) -> dict[str, str]:
        answer = self.request("GET", "/v1/adapters")
        assert answer is not None
        return {f"local-{a['name']}.{a['incarnation']}": a["wanted"] for a in answer.json()["adapters"]}

    def killed(self) -> None:
        assert self.process.wait(ANSWER_S) == -9, (self.folder.path / "log").read_text()
        self._close()

    def end(self) -> None:
        self.process.terminate()
        assert self.process.wait(ANSWER_S) == 0, (self.folder.path / "log").read_text()
        self._close()

    def _close(self) -> None:
        self.http.close()
        self._log.close()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    config = service_config(tmp_path / "the runs")
    folder = config.run_folder
    folder.path.mkdir(parents=True)
    create_secret(folder)
    write_config(folder, config)
    store = Store(folder.service_tables, config.run.name)
    store.change(lambda tx: put_tenant(tx, LOCAL, Quota(adapters=99)), 0.0)
    store.close()
    return folder


def desired(folder: RunFolder) -> dict[str, str]:
    return {adapter.key: adapter.phase.value for adapter in read_desired(folder).adapters}


def test_nothing_acknowledged_is_lost_and_nothing_is_half_there(folder: RunFolder) -> None:
    """Each life is killed at the next point, in its second operation: a create, a pause or a delete in turn."""
    small = {"n_train": 8, "n_eval": 2, "kind": "word_problems"}
    known: dict[str, str] = {}
    ever = set[str]()
    pending: tuple[str, str, str, dict[str, Any], dict[str, str]] | None = None
    for number, point in enumerate([*POINTS, ""]):
        life = Life(folder, f"{point}:2:kill" if point else "")
        assert desired(folder) == life.adapters(), "a start makes the desired state that of the tables"
        if pending is not None:
            last, *request = pending[0], *pending[1:]
            after = pending[4]
            there = life.adapters()
            assert there == (after if last in DURABLE else known), f"killed at {last}: all of it or nothing"
            again = life.request(request[0], request[1], f"killed {number - 1}", **request[2])
            assert again is not None
            if point and last not in DURABLE:  # it was this life's first operation
                assert again.status_code in (200, 201)
            repeated = life.adapters()
            assert repeated == after, "a repeated request changes nothing twice"
            known = after
        if not point:
            life.end()
            break
        # An operation that succeeds comes first. A repeated request is none, but it is answered.
        if pending is None or (pending[0] in DURABLE and point != "service.answering"):
            name = f"first{number}"
            created = life.request("POST", "/v1/adapters", f"first {number}", json=section(name=name, task=small))
            assert created is not None
            assert created.status_code == 201
            known = known | {f"local-{name}.{born(ever, known)}": "active"}
        assert life.adapters() == known
        ever |= known.keys()
        pending = (point, *killing(number, known, born(ever, known), small))
        assert life.request(pending[1], pending[2], f"killed {number}", **pending[3]) is None, f"no answer at {point}"
        life.killed()
    assert desired(folder) == known
    assert known


def born(ever: set[str], known: dict[str, str]) -> int:
    """The incarnation of the next adapter: none that a deleted one had is used again."""
    return 1 + max((int(key.rpartition(".")[2]) for key in ever - known.keys()), default=0)


def killing(
    number: int, known: dict[str, str], incarnation: int, small: dict[str, Any]
) -> tuple[str, str, dict[str, Any], dict[str, str]]:
    """Method, path, body of the operation that is cut, and the adapters once it has happened."""
    key = next(iter(known))
    name = key.removeprefix("local-").rpartition(".")[0]
    match number % 3:
        case 0:
            body = {"json": section(name=f"cut{number}", task=small)}
            return "POST", "/v1/adapters", body, known | {f"local-cut{number}.{incarnation}": "active"}
        case 1:
            return "POST", f"/v1/adapters/{name}/pause", {}, known | {key: "paused"}
        case _:
            return "DELETE", f"/v1/adapters/{name}", {}, {k: v for k, v in known.items() if k != key}


def test_a_file_of_the_inbox_is_taken_in_once(folder: RunFolder) -> None:
    """Killed between acceptance and the move, and stopped at once after."""
    life = Life(folder, "service.inbox_taken:1:kill")
    text = "\n".join(f"{key}: {value}" for key, value in section(name="dropped").items()).replace("'", "")
    folder.inbox.mkdir(exist_ok=True)  # the service may not have made it yet
    (folder.inbox / "one.yaml").write_text(text)
    life.killed()
    assert (folder.inbox / "one.yaml").exists()
    assert desired(folder) == {"local-dropped.1": "active"}
    life = Life(folder)
    wait_until((folder.inbox / "accepted" / "one.yaml").exists, START_S)
    assert life.adapters() == {"local-dropped.1": "active"}
    assert not (folder.inbox / "one.yaml.error").exists()
    life.end()
