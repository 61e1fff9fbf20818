"""Files in the inbox: taken in once they no longer change, refused with a reason beside them."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from areal_lora.errors import RequestError, Unavailable
from areal_lora.service.acceptance import FolderInbox


class Taken:
    """What was taken in; refuses names that begin with ``bad``. The file of ``removed`` is removed meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sections: list[dict[str, Any]] = []
        self.requests: list[str] = []

    async def __call__(self, section: dict[str, Any], request: str) -> None:
        self.requests.append(request)
        json.dumps(section, ensure_ascii=False).encode()
        if section["name"] == "removed":
            (self.folder / "one.yaml").unlink()
        if section["name"].startswith("bad"):
            raise RequestError("rank", "it is too high", "lower it")
        self.sections.append(section)


@pytest.fixture
def taken(tmp_path: Path) -> Taken:
    return Taken(tmp_path / "an inbox")


@pytest.fixture
def inbox(tmp_path: Path, taken: Taken) -> FolderInbox:
    return FolderInbox(tmp_path / "an inbox", taken)


def looks(inbox: FolderInbox, times: int = 2) -> None:
    for _ in range(times):
        asyncio.run(inbox.look())


def test_a_file_is_taken_in_and_moved(inbox: FolderInbox, taken: Taken, tmp_path: Path) -> None:
    folder = tmp_path / "an inbox"
    (folder / "one.yaml").write_text("name: one\nrank: 4\n")
    (folder / "notes.txt").write_text("no adapter")
    looks(inbox, 1)
    assert not taken.sections, "it may still be written"
    looks(inbox, 3)
    assert taken.sections == [{"name": "one", "rank": 4}]
    assert sorted(path.name for path in folder.iterdir()) == ["accepted", "notes.txt"]
    assert (folder / "accepted" / "one.yaml").exists()
    assert os.stat(folder).st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "text",
    [
        "name: [",
        "- a\n- b\n",
        "name: bad\n",
        "name: a\nname: b\n",
        "name: 2025-02-30\n",
        'name: "\\ud800"\n',
        pytest.param("name: " + "[" * 9000, id="deep"),
    ],
)
def test_a_refused_file_has_the_reason_beside_it_and_is_tried_once(
    text: str, inbox: FolderInbox, taken: Taken, tmp_path: Path
) -> None:
    folder = tmp_path / "an inbox"
    (folder / "one.yaml").write_text(text)
    looks(inbox, 4)
    assert (folder / "one.yaml").exists()
    error = (folder / "one.yaml.error").read_text()
    assert error
    assert not taken.sections
    assert len(taken.requests) <= 1
    (folder / "one.yaml").write_text("name: good\n")
    looks(inbox, 3)
    assert taken.sections == [{"name": "good"}]
    assert sorted(path.name for path in folder.iterdir()) == ["accepted"]


def test_a_file_that_is_removed_while_it_is_taken_in_is_no_error(
    inbox: FolderInbox, taken: Taken, tmp_path: Path
) -> None:
    (tmp_path / "an inbox" / "one.yaml").write_text("name: removed\n")
    looks(inbox, 3)
    assert taken.sections == [{"name": "removed"}]


def test_one_file_is_one_request_and_a_new_file_is_another(inbox: FolderInbox, taken: Taken, tmp_path: Path) -> None:
    """After a crash the same file actions under the same key; a file that is dropped later does not."""
    folder = tmp_path / "an inbox"
    (folder / "one.yaml").write_text("name: bad\n")
    looks(inbox)
    looks(FolderInbox(folder, taken))
    assert len(taken.requests) == 2
    assert len(set(taken.requests)) == 1
    (folder / "one.yaml").rename(tmp_path / "old")
    (folder / "one.yaml").write_text("name: bad\n")
    looks(inbox)
    assert len(set(taken.requests)) == 2


def test_links_are_not_followed(inbox: FolderInbox, taken: Taken, tmp_path: Path) -> None:
    (tmp_path / "elsewhere.yaml").write_text("name: one\n")
    (tmp_path / "an inbox" / "one.yaml").symlink_to(tmp_path / "elsewhere.yaml")
    looks(inbox, 3)
    assert not taken.requests


def test_a_file_waits_while_the_service_cannot_write(inbox: FolderInbox, tmp_path: Path) -> None:
    (tmp_path / "an inbox" / "one.yaml").write_text("name: one\n")
    outcomes = [Unavailable(507, "the disk is full"), None]

    async def take_in(section: dict[str, Any], request: str) -> None:
        if (error := outcomes.pop(0)) is not None:
            raise error

    waiting = FolderInbox(tmp_path / "an inbox", take_in)
    looks(waiting)
    assert not list((tmp_path / "an inbox").glob("*.error"))
    looks(waiting, 1)
    assert [path.name for path in (tmp_path / "an inbox" / "accepted").iterdir()] == ["one.yaml"]
