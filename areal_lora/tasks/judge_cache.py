"""Replies of a judge in an SQLite file, which several scorer processes share and a resumed run reads again."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

FILE = "replies.sqlite"
BUSY_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeReply:
    """The text of a reply and what the API charges for."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


class JudgeCache:
    """Replies by the hash of the whole question. Raises sqlite3.Error if the file cannot be made."""

    def __init__(self, folder: Path) -> None:
        self._file = sqlite3.connect(folder / FILE, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        self._file.execute("PRAGMA journal_mode=WAL")
        self._file.execute("PRAGMA synchronous=NORMAL")
        self._file.execute(
            "CREATE TABLE IF NOT EXISTS replies (question TEXT PRIMARY KEY, text TEXT NOT NULL,"
            " prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL) WITHOUT ROWID"
        )

    def get(self, question: str) -> JudgeReply | None:
        """The reply, None if there is none or the file cannot be read."""
        try:
            row = self._file.execute(
                "SELECT text, prompt_tokens, completion_tokens FROM replies WHERE question = ?", (question,)
            ).fetchone()
        except sqlite3.Error:
            return None  # the judge is called instead
        return None if row is None else JudgeReply(text=row[0], prompt_tokens=row[1], completion_tokens=row[2])

    def put(self, question: str, reply: JudgeReply) -> bool:
        """Keep ``reply``; False if the disk does not take it: the score counts all the same."""
        try:
            self._file.execute(
                "INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?)",
                (question, reply.text, reply.prompt_tokens, reply.completion_tokens),
            )
        except sqlite3.Error:
            return False
        return True
