"""Rendezvous files, the run secret and the keys derived from it."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from areal_lora.errors import ConfigError, EnvironmentError_, ProcessFailed
from areal_lora.network import rpc
from areal_lora.run_folder import rendezvous
from areal_lora.run_folder.paths import RunFolder


def test_servers_that_the_launcher_does_without_are_not_waited_for(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    rendezvous.publish_endpoint(folder, "server", 1, {"data": 7, "admin": 8})
    threading.Timer(0.3, folder.excluded("server-0").touch).start()
    rendezvous.wait_servers(folder, 2, timeout_s=120)
    with pytest.raises(ProcessFailed, match="server-2 did not publish"):
        rendezvous.wait_servers(folder, 3, timeout_s=0.1)
    folder.excluded("server-1").touch()
    rendezvous.forget_endpoint(folder, "server", 1)
    with pytest.raises(ProcessFailed, match="none of 2 servers came up"):
        rendezvous.wait_servers(folder, 2, timeout_s=120)


def test_a_server_that_loads_its_model_is_waited_for_beyond_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, reads = RunFolder(tmp_path), 0

    def loading() -> list[str]:
        nonlocal reads
        if (reads := reads + 1) == 3:
            rendezvous.publish_endpoint(folder, "server", 0, {"data": 7})
        return ["server-0"]

    rendezvous.wait_servers(folder, 1, 0.0, loading)
    assert reads == 3
    with pytest.raises(ProcessFailed, match="server-1 did not publish"):
        rendezvous.wait_servers(folder, 2, 0.0, loading)
    monkeypatch.setattr(rendezvous, "LOADING_S", 0.0)
    with pytest.raises(ProcessFailed, match="server-1 did not publish"):
        rendezvous.wait_servers(folder, 2, 0.0, lambda: ["server-1"])


def test_what_is_published_is_read(tmp_path: Path) -> None:
    rendezvous.publish_endpoint(RunFolder(tmp_path), "server", 1, {"data": 1234, "admin": 1235})
    endpoint = rendezvous.wait_endpoint(RunFolder(tmp_path), "server", 1, timeout_s=120)
    assert (endpoint.host, endpoint.ports, endpoint.pid) == ("127.0.0.1", {"data": 1234, "admin": 1235}, os.getpid())
    assert [p.name for p in (tmp_path / "rendezvous").iterdir()] == ["server-1.json"]


def test_waiting_ends_when_it_appears(tmp_path: Path) -> None:
    timer = threading.Timer(0.2, rendezvous.publish_endpoint, (RunFolder(tmp_path), "trainer", 0, {"store": 7}))
    timer.start()
    assert rendezvous.wait_endpoint(RunFolder(tmp_path), "trainer", 0, timeout_s=120).ports == {"store": 7}
    timer.join()


def test_timeout_and_death_name_the_process(tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed, match=r"server-3 did not publish .*/logs/server-3\.log"):
        rendezvous.wait_endpoint(RunFolder(tmp_path), "server", 3, timeout_s=0.1)
    with pytest.raises(ProcessFailed, match="server-3 ended before"):
        rendezvous.wait_endpoint(RunFolder(tmp_path), "server", 3, timeout_s=120, still_alive=lambda: False)


def test_waiting_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(rendezvous, "REMIND_S", 0.05)

    def not_said() -> bool:
        return "waiting for server-0" not in capsys.readouterr().err

    with pytest.raises(ProcessFailed, match="ended before"):
        rendezvous.wait_endpoint(RunFolder(tmp_path), "server", 0, timeout_s=120, still_alive=not_said)


def test_secret_is_private_random_and_anew_at_each_start(tmp_path: Path) -> None:
    path = RunFolder(tmp_path).secret
    rendezvous.create_secret(RunFolder(tmp_path))
    secret = rendezvous.read_secret(RunFolder(tmp_path))
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(bytes.fromhex(secret)) == 32
    rendezvous.create_secret(RunFolder(tmp_path))
    assert rendezvous.read_secret(RunFolder(tmp_path)) != secret
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    rendezvous.create_secret(RunFolder(tmp_path))
    RunFolder(tmp_path).secret.chmod(0o640)
    with pytest.raises(EnvironmentError_, match="readable by others"):
        rendezvous.read_secret(RunFolder(tmp_path))
    with pytest.raises(EnvironmentError_, match="no run secret"):
        rendezvous.read_secret(RunFolder(tmp_path / "nowhere"))


def test_curve_keys_are_pairs_that_depend_on_secret_and_role() -> None:
    zmq = pytest.importorskip("zmq")
    public, private = rpc.zmq_curve_keys("aa", "controller")
    assert zmq.curve_public(private) == public
    assert rpc.zmq_curve_keys("aa", "controller") == (public, private)
    assert rpc.zmq_curve_keys("aa", "trainer")[1] != private
    assert rpc.zmq_curve_keys("ab", "controller")[1] != private


class Trouble:
    """``Path.read_text`` that raises ``errors`` (or returns texts) one after the other, then reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *outcomes: OSError | str) -> None:
        self.outcomes, self._read = list(outcomes), Path.read_text
        monkeypatch.setattr(Path, "read_text", lambda path, encoding=None: self.read(path, encoding))

    def read(self, path: Path, encoding: str | None) -> str:
        if not self.outcomes:
            return self._read(path, encoding)
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, OSError):
            raise outcome
        return outcome


STALE = OSError(errno.ESTALE, "Stale file handle", "server-0.json")


@pytest.mark.parametrize("outcome", [STALE, OSError(errno.EIO, "Input/output error"), "", '{"host": "1.2.3'])
def test_a_file_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: OSError | str
) -> None:
    rendezvous.publish_endpoint(RunFolder(tmp_path), "server", 0, {"admin": 5})
    Trouble(monkeypatch, outcome)
    endpoint = rendezvous.read_endpoint(RunFolder(tmp_path), "server", 0)
    assert endpoint is not None
    assert endpoint.ports == {"admin": 5}


@pytest.mark.parametrize("outcome", [STALE, "{}", "[1]"])
def test_a_file_that_stays_unreadable_is_an_os_error_and_named_by_who_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: OSError | str
) -> None:
    monkeypatch.setattr(rendezvous, "RETRY_S", 0.001)
    trouble = Trouble(monkeypatch, *[outcome] * 3)
    with pytest.raises(OSError, match=r"server-0\.json"):
        rendezvous.read_endpoint(RunFolder(tmp_path), "server", 0)
    trouble.outcomes = [outcome] * 10_000
    with pytest.raises(ProcessFailed, match=r"within 0 s \(.*server-0.json: (Stale|holds no endpoint)"):
        rendezvous.wait_endpoint(RunFolder(tmp_path), "server", 0, timeout_s=0.1)


def test_a_wildcard_cannot_be_published(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", ""):
        with pytest.raises(ConfigError, match=r"cluster\.bind"):
            rendezvous.publish_endpoint(RunFolder(tmp_path), "server", 0, {"data": 1}, host)
    assert rendezvous.published_hosts(RunFolder(tmp_path)) == []


def test_hosts_are_listed_once(tmp_path: Path) -> None:
    for index, host in enumerate(["10.0.0.2", "10.0.0.1", "10.0.0.2"]):
        rendezvous.publish_endpoint(RunFolder(tmp_path), "server", index, {"data": 1}, host)
    assert rendezvous.published_hosts(RunFolder(tmp_path)) == ["10.0.0.2", "10.0.0.1"]
