"""The file: what it remembers, what it refuses, what it does with files that are not its own."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from areal_lora.errors import NON_RETRYABLE, ConfigError, ExitCode
from areal_lora.rollout.ledger import ledger
from areal_lora.rollout.ledger.ledger import LIVE, GroupState, LedgerError, LedgerFile
from tests.support.paths import SUPPORT
from tests.support.rollout.helpers import admit_all, episode, feed, open_ledger

NO_LOCKS = SUPPORT / "no_locks.py"


def killed_after(write: Callable[[], None]) -> None:
    """Run ``write`` in a process of its own, which is then killed: nothing is closed."""
    if (pid := os.fork()) == 0:
        write()
        os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


def test_a_full_disk_is_an_error_that_no_restart_repeats(tmp_path: Path) -> None:
    file, book = open_ledger(tmp_path / "ledger.sqlite")
    pages = file.execute("PRAGMA page_count").fetchone()[0]
    file.execute(f"PRAGMA max_page_count = {pages}")  # SQLite reports it as a disk without room

    def fill() -> None:
        for position in range(10_000):
            book.issue(position, 1)
        book.flush()

    with pytest.raises(LedgerError, match="database or disk is full") as full:
        fill()
    assert full.value.exit_code == ExitCode.DISK
    assert ExitCode.DISK in NON_RETRYABLE


def test_a_run_whose_disk_was_full_continues_once_there_is_room(tmp_path: Path) -> None:
    """SQLite rolls back the whole transaction; the head in memory counts what it contained."""
    path = tmp_path / "ledger.sqlite"
    file = LedgerFile(path, "t")
    made, book, _ = feed(file=file, b=4)
    made.announce(0)
    tickets = admit_all(made)
    for ticket in tickets[:3]:
        made.finish(ticket, episode(ticket.prompt, 0))
    issued = book.head.issued
    room = file.execute("PRAGMA page_count").fetchone()[0] + 1
    file.execute(f"PRAGMA max_page_count = {room}")
    book.issue(99, 1)  # written into the transaction that the full disk undoes
    long = replace(episode(tickets[3].prompt, 0), texts=("x" * 100_000,) * 2)
    with pytest.raises(LedgerError, match="database or disk is full"):
        made.finish(tickets[3], long)
    with pytest.raises(LedgerError):  # another task, before it is cancelled
        book.flush()
    file.close()
    with contextlib.closing(LedgerFile(path, "t")) as again:
        resumed, found, _ = feed(file=again, b=4, version=None)
        resumed.hello(0, trainer="second")
        assert (found.head.issued, resumed.stats().ready) == (issued, 3)


def test_a_ledger_that_does_not_add_up_is_rebuilt_once_it_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    file = LedgerFile(path, "t")
    made, book, _ = feed(file=file, b=2)
    made.announce(0)
    tickets = admit_all(made)
    for ticket in tickets:
        made.finish(ticket, episode(ticket.prompt, 0))
    lease = made.take(0)
    assert lease is not None
    kept = lease.snapshot
    book.head.issued += 1
    file.close()
    with contextlib.closing(LedgerFile(path, "t")) as found:
        again, _, _ = feed(file=found, b=2, version=None)
        with pytest.raises(LedgerError, match=r"does not add up.*\(fix: remove the file: it is rebuilt"):
            again.hello(1, trainer="second", snapshot=kept)
    path.unlink()
    with contextlib.closing(LedgerFile(path, "t")) as fresh:
        again, rebuilt, _ = feed(file=fresh, b=2, version=None)
        again.hello(1, trainer="third", snapshot=kept)
        assert rebuilt.counts[GroupState.CONSUMED] == 2
        assert [row.position for row in rebuilt.table.rows(*LIVE)] == [2, 3], "ready, without trajectories: issued"


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        (sqlite3.SQLITE_FULL, ExitCode.DISK),
        (sqlite3.SQLITE_IOERR_WRITE, ExitCode.DISK),  # a quota, a limit of the size of files
        (sqlite3.SQLITE_IOERR_READ, LedgerError.exit_code),
    ],
)
def test_errors_of_a_write_are_those_of_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, exit_code: ExitCode
) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = code

    def failing(path: str, synchronous: str, page_bytes: int) -> NoReturn:
        raise error

    monkeypatch.setattr(ledger, "connect", failing)
    with pytest.raises(LedgerError, match="disk I/O error") as raised:
        LedgerFile(tmp_path / "ledger.sqlite", "r")
    assert raised.value.exit_code == exit_code


def test_a_commit_does_not_write_the_trajectories_that_it_deletes(tmp_path: Path) -> None:
    """The log of writes has the length of its longest transaction, which is that of one group: not of eight."""
    file, book = open_ledger(tmp_path / "ledger.sqlite")
    payload, groups = os.urandom(2 << 20), range(8)
    for seq in groups:
        book.run(book.issue(seq, 1), 0)
        book.finish(seq, 0, 0, payload)
        book.flush()
    book.lease(groups, 0)
    book.consume(0)
    book.flush()
    assert file.execute("SELECT COUNT(*) FROM trajectories").fetchone() == (0,)
    assert (tmp_path / "ledger.sqlite-wal").stat().st_size < 3 * len(payload)


def write_and_forget(path: Path) -> None:
    _, book = open_ledger(path)
    book.issue(0, 1)
    book.flush()
    book.issue(1, 1)
    book.head.next_position = 2


def test_what_was_flushed_is_there_after_a_crash_and_the_rest_is_forgotten_whole(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    killed_after(lambda: write_and_forget(path))
    assert (tmp_path / "ledger.sqlite-wal").stat().st_size > 0, "the writes were folded in: the death came too late"
    _, again = open_ledger(path)
    assert again.known
    assert (again.head.issued, again.head.next_position) == (1, 0)
    again.check(live=1)


def test_another_machine_finds_all_of_it_in_files(tmp_path: Path) -> None:
    """No part of it is in memory that connections share: that would stay behind on the first one."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    killed_after(lambda: write_and_forget(here / "ledger.sqlite"))
    assert sorted(path.name for path in here.iterdir()) == ["ledger.sqlite", "ledger.sqlite-wal"]
    shutil.copytree(here, there)
    _, again = open_ledger(there / "ledger.sqlite")
    assert again.head.issued == 1
    again.check(live=1)


SECOND = """
import sys
from areal_lora.rollout.ledger import ledger as files
from areal_lora.run_folder import sqlite
from areal_lora.rollout.ledger.ledger import Ledger
sqlite.LOCK_S = sqlite.LOCK_WAIT_S = 0.3
try:
    file = files.LedgerFile(sys.argv[1], "r")
except files.LedgerError as error:
    print(error)
else:
    book = Ledger(file, "math", "o")
    print("issue", book.issue(book.head.issued, 1))
    book.flush()
"""


def in_another_process(path: Path, *lacks: str) -> str:
    command = [sys.executable, str(NO_LOCKS), *lacks] if lacks else []
    command += [sys.executable, "-c", SECOND, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_second_controller_is_kept_out(tmp_path: Path) -> None:
    path = tmp_path / "a #ledger?.sqlite"
    file, _ = open_ledger(path)
    assert "cannot be opened: database is locked (fix: end the process that has it open" in in_another_process(path)
    file.close()
    assert in_another_process(path) == "issue 0"


@pytest.mark.parametrize("error", ["ENOSYS", "EOPNOTSUPP", "ENOLCK"])
def test_file_systems_without_locks(tmp_path: Path, error: str) -> None:
    path = tmp_path / "a #ledger?.sqlite"
    assert [in_another_process(path, "all", error) for _ in range(2)] == ["issue 0", "issue 1"]
    assert in_another_process(path) == "issue 2"
    _, book = open_ledger(path)
    book.check(live=3)


def test_the_ledger_of_a_renamed_run_folder_is_taken(tmp_path: Path) -> None:
    file, book = open_ledger(tmp_path / "ledger.sqlite", run="before")
    book.issue(0, 1)
    file.close()
    file, again = open_ledger(tmp_path / "ledger.sqlite", run="after")
    assert again.known
    again.check(live=1)
    file.close()


def test_the_ledger_of_another_schema_or_other_prompts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    file, book = open_ledger(path)
    book.issue(0, 1)
    file.close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE meta SET schema_version = 1")
        db.commit()
    with pytest.raises(ConfigError, match=r"in schema 1, not in 3 .*rebuilt from the checkpoint"):
        open_ledger(path)
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE meta SET schema_version = 3")
        db.commit()
    with pytest.raises(ConfigError, match="its prompts of math are of another task, size or seed"):
        open_ledger(path, order="p")


@pytest.mark.parametrize("damage", ["text", "torn", "page"])
def test_a_damaged_file_is_moved_aside_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    path = tmp_path / "ledger.sqlite"
    file, book = open_ledger(path)
    for position in range(2000):
        book.issue(position, 1)
    file.close()
    whole = path.read_bytes()
    broken = {
        "text": b"no database " * 1000,
        "torn": whole[: len(whole) // 2],
        "page": whole[:8192] + b"\xff" * 4096 + whole[12288:],
    }[damage]
    path.write_bytes(broken)
    with caplog.at_level(logging.WARNING, "areal_lora"):
        file, book = open_ledger(path)
    assert "is damaged" in caplog.text
    assert "moved to ledger.sqlite.damaged-1" in caplog.text
    assert (tmp_path / "ledger.sqlite.damaged-1").read_bytes() == broken
    assert not book.known
    book.issue(0, 1)
    book.check(live=1)


def test_another_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE t (x)")
    other.commit()
    with pytest.raises(ConfigError, match="no run ledger"):
        open_ledger(path)


@pytest.mark.parametrize("statements", range(1, 7))
def test_a_death_while_the_file_is_made_leaves_nothing_that_is_refused(
    tmp_path: Path, statements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, left, connect = tmp_path / "ledger.sqlite", statements - 1, sqlite3.connect

    class Dying(sqlite3.Connection):
        """Ends, without a word to SQLite, before one of the statements that write."""

        def execute(self, sql: str, *arguments: object) -> sqlite3.Cursor:
            nonlocal left
            if sql.lstrip().startswith(("CREATE", "INSERT", "BEGIN")):
                left -= 1
                if left < 0:
                    super().close()
                    raise KeyboardInterrupt
            return super().execute(sql, *arguments)  # type: ignore[arg-type]

        def executescript(self, script: str) -> sqlite3.Cursor:
            cursor, statement = self.cursor(), ""
            for line in script.splitlines():
                statement += f"{line}\n"
                if sqlite3.complete_statement(statement):
                    cursor, statement = self.execute(statement), ""
            return cursor

    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: connect(*a, factory=Dying, **k))
    with contextlib.suppress(KeyboardInterrupt):
        LedgerFile(path, "r").close()
    monkeypatch.setattr(sqlite3, "connect", connect)
    file, book = open_ledger(path)
    book.issue(0, 1)
    book.check(live=1)
    file.close()
