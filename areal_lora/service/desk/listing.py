"""What a tenant looks up of its own: sessions, models and sampling sessions, also those that have ended."""

from __future__ import annotations

from dataclasses import dataclass

from areal_lora.service.desk.books import Books, unknown
from areal_lora.service.desk.rows import Model, Session


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionView:
    """A session with the names of its models and sampling sessions."""

    session: Session
    models: list[str]
    samplers: list[str]


def sessions(books: Books, tenant: str) -> list[str]:
    """Newest first."""
    return [each.session for each in reversed(books.sessions("tenant = ?", tenant))]


def session(books: Books, tenant: str, name: str) -> SessionView:
    """Raises Refused."""
    found = books.sessions("session = ? AND tenant = ?", name, tenant)
    if not found:
        raise unknown("session_id", "session", name)
    samplers = books.rows("SELECT sampler FROM samplers WHERE session = ? ORDER BY rowid", name)
    models = books.models("session = ? AND of_state IS NULL", name)
    return SessionView(session=found[0], models=[each.model for each in models], samplers=[row[0] for row in samplers])


def models(books: Books, tenant: str) -> list[Model]:
    """Newest first."""
    return books.models("tenant = ? AND of_state IS NULL", tenant)[::-1]


def model(books: Books, tenant: str, name: str) -> Model:
    """Raises Refused."""
    found = books.models("model = ? AND tenant = ? AND of_state IS NULL", name, tenant)
    if not found:
        raise unknown("model_id", "model", name)
    return found[0]
