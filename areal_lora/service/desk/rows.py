"""Rows of the desk: sessions, models, saved states, sampling sessions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from areal_lora.service.desk.asks import Lora

SCHEME = "tinker://"
STATE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Kind(StrEnum):
    """Of a saved state, as it stands in its path."""

    WEIGHTS = "weights"
    SAMPLER = "sampler_weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """``about`` is the face's own. A session that has ended has no models."""

    session: str
    tenant: str
    about: bytes
    created_s: float
    ended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """An adapter whose operations the desk orders. ``adapter`` is what the run calls it; the service's table of
    adapters has it as ``name``.

    ``of_state`` is the path that a model serves which the desk made for samplers; clients cannot address that one.
    ``next_seq`` is the client's next number, ``next_number`` the desk's; a checkpoint covers the operations up to
    ``closed``. ``published`` is the newest version that servers had. ``gone``: the adapter leaves, or has left.
    ``broken`` says why no operation of it can be carried out. ``notes`` are the client's own.
    """

    model: str
    tenant: str
    session: str
    name: str
    incarnation: int
    adapter: str
    lora: Lora
    created_s: float
    of_state: str | None = None
    gone: bool = False
    joined: bool = False
    next_seq: int = 1
    next_number: int = 1
    closed: int = 0
    published: int | None = None
    broken: str = ""
    notes: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A saved state: ``label`` of ``adapter`` on the disk. Without ``named`` it belongs to a sampling session.

    ``version`` is the one that servers had it as, None for a state that was not published.
    """

    model: str
    tenant: str
    adapter: str
    kind: Kind
    name: str
    label: str
    named: bool
    version: int | None
    step: int
    n_bytes: int
    lora: Lora
    created_s: float
    expires_s: float | None
    notes: dict[str, str]

    @property
    def path(self) -> str:
        return path_of(self.model, self.kind, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """A sampling session: of the saved state ``path``, of the newest version of ``model``, or of the base."""

    sampler: str
    tenant: str
    session: str
    path: str | None
    model: str | None
    created_s: float


def path_of(model: str, kind: Kind, name: str) -> str:
    return f"{SCHEME}{model}/{kind}/{name}"


def parse_path(path: str) -> tuple[str, Kind, str] | None:
    """Model, kind and name of a saved state; None for what is no path."""
    parts = path.removeprefix(SCHEME).split("/")
    if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in list(Kind):
        return None
    return parts[0], Kind(parts[1]), parts[2]


def model_id(session: str, model_seq: int) -> str:
    return f"{session}:train:{model_seq}"


def sampler_id(session: str, sampler_seq: int) -> str:
    return f"{session}:sample:{sampler_seq}"
