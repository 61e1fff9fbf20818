"""Servers restart in turn: who leaves when, as data, and what the launcher reads and writes."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from areal_lora.config.load import load_config
from areal_lora.launcher.plan import SERVER
from areal_lora.launcher.watch import (
    BACK_S,
    RestartProgress,
    RestartRequest,
    RollingRestart,
    ServersSeen,
    Turns,
    away_at_once,
)
from areal_lora.obs.console import LiveConsole
from areal_lora.obs.metrics.records import MembersRecord
from areal_lora.run_folder.paths import RunFolder, read_record
from areal_lora.run_folder.rendezvous import forget_endpoint, publish_endpoint, read_endpoint
from tests.support.paths import EXAMPLES

NAMES = [f"server-{i}" for i in range(4)]
FIRST, SECOND = (1, 1), (2, 2)


@pytest.mark.parametrize(
    ("servers", "requested", "min_servers", "at_once"),
    [
        (1, 0, 1, 1),
        (8, 0, 1, 1),
        (9, 0, 1, 1),
        (16, 0, 1, 2),
        (512, 0, 1, 64),
        (8, 3, 1, 3),
        (8, 8, 1, 7),
        (8, 3, 7, 1),
        (2, 0, 2, 1),
    ],
)
def test_servers_away_together(servers: int, requested: int, min_servers: int, at_once: int) -> None:
    assert away_at_once(servers, requested, min_servers) == at_once


def all_there() -> ServersSeen:
    return ServersSeen(published=dict.fromkeys(NAMES, FIRST), joins=dict.fromkeys(NAMES, 0))


def without(seen: ServersSeen, name: str, **facts: list[str]) -> ServersSeen:
    return replace(seen, published={n: f for n, f in seen.published.items() if n != name}, **facts)


def back(seen: ServersSeen, name: str, joined: bool = True) -> ServersSeen:
    published = {**seen.published, name: SECOND}
    return replace(seen, published=published, joins={**seen.joins, name: seen.joins[name] + joined}, loading=[])


def test_each_leaves_when_the_one_before_has_joined_again() -> None:
    turns, seen, now = Turns("x", NAMES, 1), all_there(), 0.0
    for name in NAMES:
        assert turns.step(seen, now) == [name]
        assert turns.progress.now == {name: "leaves in order"}
        for what, state in (
            ("leaves in order", seen),
            ("starts", without(seen, name)),
            ("loads", without(seen, name, loading=[name])),
            ("joins with the next publish", back(seen, name, joined=False)),
        ):
            now += BACK_S * 0.9  # each of these may take long
            assert turns.step(state, now) == ([name] if what == "leaves in order" else [])
            assert turns.progress.now == {name: what}
        seen = back(seen, name)
    assert turns.step(seen, now) == []
    assert turns.progress == RestartProgress(id="x", waiting=[], now={}, done=NAMES, failed={})
    assert str(turns.progress) == "4 of 4 servers restarted"
    assert turns.progress.ended


def test_several_are_away_at_once_and_the_first_that_is_back_makes_room() -> None:
    turns, seen = Turns("x", NAMES, 2), all_there()
    assert turns.step(seen, 0.0) == NAMES[:2]
    seen = without(back(seen, NAMES[1]), NAMES[0])
    assert turns.step(seen, 1.0) == [NAMES[2]]
    assert str(turns.progress) == "1 of 4 servers restarted; server-0: starts; server-2: leaves in order"


def test_one_that_does_not_return_is_named_and_the_others_continue() -> None:
    turns, seen = Turns("x", NAMES, 1), all_there()
    turns.step(seen, 0.0)
    seen = without(seen, NAMES[0])
    assert turns.step(replace(seen, abandoned=[NAMES[0]]), 1.0) == [NAMES[1]]
    seen = without(seen, NAMES[1])
    assert turns.step(replace(seen, loading=[NAMES[1]]), 100.0) == []
    assert turns.step(seen, 100.0 + BACK_S) == []
    assert turns.step(seen, 100.1 + BACK_S) == [NAMES[2]]
    failed = turns.progress.failed
    assert failed[NAMES[0]] == "it left, and its launcher does not restart it"
    assert failed[NAMES[1]] == "it has neither loaded nor served for 300 s"


def test_one_that_restarts_already_at_its_turn_need_not_leave() -> None:
    turns, seen = Turns("x", NAMES[:2], 1), without(all_there(), NAMES[0])
    assert turns.step(seen, 0.0) == []
    assert turns.progress.now == {NAMES[0]: "starts"}
    assert turns.step(back(seen, NAMES[0]), 1.0) == [NAMES[1]]


Launched = tuple[RunFolder, LiveConsole, RollingRestart, io.StringIO]


@pytest.fixture
def launched(tmp_path: Path) -> Launched:
    files = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]
    config = load_config(files, [f"run.root={tmp_path}", "rollout.servers=2"])
    folder, text = RunFolder(tmp_path / "run", ""), io.StringIO()
    folder.leaves.mkdir(parents=True)
    for i in range(2):
        publish_endpoint(folder, SERVER, i, {})
    publish_endpoint(folder, SERVER, 2, {}, workers=1)  # elsewhere
    view = LiveConsole(folder, {"a": 5}, Console(file=text, width=200))
    return folder, view, RollingRestart(config, folder, view), text


def asks(folder: RunFolder, name: str) -> bool:
    return (folder.leaves / name).exists()


def comes_back(folder: RunFolder, view: LiveConsole, index: int) -> None:
    """As its launcher and its server do it."""
    forget_endpoint(folder, SERVER, index)
    (folder.leaves / f"server-{index}").unlink()
    publish_endpoint(folder, SERVER, index, {"data": 7})
    view.view.add(MembersRecord(version=1, servers=2, joined=[f"server-{index}"]))


def test_a_request_is_carried_out_and_recorded(launched: Launched) -> None:
    folder, view, rolling, text = launched
    rolling.look(0.0)
    assert not folder.restart_progress.exists(), "nothing without a request"
    folder.restart_request.write_bytes(msgspec.json.encode(RestartRequest(id="x", at_once=0)))
    rolling.look(1.0)
    endpoint = read_endpoint(folder, SERVER, 0)
    assert endpoint is not None
    assert (folder.leaves / "server-0").read_text() == f"{endpoint.pid}\n"
    assert not asks(folder, "server-1")
    assert not folder.restart_request.exists()
    comes_back(folder, view, 0)
    rolling.look(2.0)
    assert asks(folder, "server-1")
    forget_endpoint(folder, SERVER, 1)
    folder.excluded("server-1").touch()
    rolling.look(3.0)
    progress = read_record(folder.restart_progress, RestartProgress)
    assert progress is not None
    assert progress.ended
    assert (progress.done, list(progress.failed)) == (["server-0"], ["server-1"])
    printed = text.getvalue()
    assert "2 servers restart in turn, 1 at once" in printed
    assert "1 of 2 servers restarted; error: server-1 does not return: it left, and its launcher does not" in printed
    assert not asks(folder, "server-2")


def test_another_request_after_the_first_restarts_them_again(launched: Launched) -> None:
    folder, view, rolling, _ = launched
    for request in ("x", "y"):
        folder.restart_request.write_bytes(msgspec.json.encode(RestartRequest(id=request, at_once=2)))
        for index in range(2):
            rolling.look(float(index))
            comes_back(folder, view, index)
        rolling.look(5.0)
        progress = read_record(folder.restart_progress, RestartProgress)
        assert progress == RestartProgress(id=request, waiting=[], now={}, done=["server-0", "server-1"], failed={})


@pytest.mark.parametrize("content", [b"{", b'{"id": 3}'])
def test_a_request_that_is_none_is_printed_once(launched: Launched, content: bytes) -> None:
    folder, _, rolling, text = launched
    folder.restart_request.write_bytes(content)
    for now in range(3):
        rolling.look(float(now))
    assert text.getvalue().count("servers do not restart in turn") == 1
