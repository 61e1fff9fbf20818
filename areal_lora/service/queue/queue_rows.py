"""What the service keeps: rows of its tables, what decisions need of them, and the schema.

An adapter's row has its desired phase; the row of one that is deleted leaves. ``answers`` are those to idempotency
keys. ``requests`` of SDK clients have an ``action`` until nothing can need it again, an ``answer`` once there is one.
``client_operations`` are those of the requests, and the queue's own, that the trainer may still expect: they are
deleted when a checkpoint covers them. ``samples`` are those whose outcome no client has fetched.
"""

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

import msgspec

from areal_lora.run_folder.paths import DesiredAdapter, DesiredPhase
from areal_lora.service.queue.requests import Lora

TENANT = re.compile(r"[a-z][a-z0-9]{0,15}")
"""Has no ``-``: the first one in a name of the run ends the tenant."""
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,46}")
SCHEME = "tinker://"
STATE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
LOCAL = "local"
"""The operator's own tenant: the inbox, and requests with the key in the run folder."""


class Verb(StrEnum):
    CREATE = "create"
    PAUSE = "pause"
    RESUME = "resume"
    DELETE = "delete"


Limit = Annotated[int, msgspec.Meta(gt=0)]


class Quota(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one tenant; ``areal-lora adapters keys --quota`` sets others.

    ``adapters`` are those at a time, ``rank`` bounds an adapter's beside `rollout.max_lora_rank`, ``sequences`` are the
    answers of one training step, ``tokens`` those of inference in progress (prompts and longest answers, times 1 +
    ``logprobs``), ``requests`` those of a minute, which may come at once. ``weight`` is that of an adapter,
    ``operations`` are acknowledged and not carried out yet, ``body_kib`` and ``pass_kib`` bound the body of a
    request and of a pass of an SDK client, ``problems`` a generated split, ``workers`` the scorer processes of an
    adapter. Of SDK clients: ``queued`` requests that are not answered, ``queued_mib`` of data kept for them and since
    the last step, ``saved`` states.
    """

    adapters: Limit = 4
    rank: Limit = 1 << 10
    sequences: Limit = 4096
    tokens: Limit = 1 << 23
    requests: Limit = 12_000
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    operations: Limit = 64
    body_kib: Limit = 256
    problems: Limit = 100_000
    workers: Limit = 4
    queued: Limit = 2048
    queued_mib: Limit = 2048
    pass_kib: Limit = 8192
    saved: Limit = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key that admits requests of ``tenant``; the key itself is not kept. ``operator``: may make tenants and keys."""

    digest: str
    tenant: str
    label: str
    operator: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRow:
    """One adapter of a tenant. ``settings`` are its section of the configuration as data, without ``name``.

    ``open`` counts the acknowledged operations that the run has not carried out yet.
    """

    tenant: str
    name: str
    incarnation: int
    wanted: DesiredPhase
    settings: dict[str, Any]
    created_s: float
    open: int = 1

    @property
    def desired(self) -> DesiredAdapter:
        name = f"{self.tenant}-{self.name}"
        return DesiredAdapter(name=name, incarnation=self.incarnation, phase=self.wanted, adapter=self.settings)

    @property
    def key(self) -> str:
        """What the run calls it: no two adapters of any tenants, nor two bearers of one name, share it."""
        return self.desired.key


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Everything that decisions need, as of one commit. ``deleted`` is the highest incarnation that a deleted adapter
    of a tenant had: none of its names has one up to there again.
    """

    quotas: Mapping[str, Quota] = field(default_factory=dict)
    keys: Mapping[str, Key] = field(default_factory=dict)
    adapters: Mapping[tuple[str, str], AdapterRow] = field(default_factory=dict)
    deleted: Mapping[str, int] = field(default_factory=dict)

    def of(self, tenant: str) -> list[AdapterRow]:
        """The tenant's adapters, oldest first."""
        return [row for row in self.adapters.values() if row.tenant == tenant]

    def desired(self) -> tuple[DesiredAdapter, ...]:
        """What the run is to have: deleted adapters are not in it."""
        return tuple(row.desired for row in self.adapters.values())


class Kind(StrEnum):
    """Of a saved state, as it stands in its path."""

    WEIGHTS = "weights"
    SAMPLER = "sampler_weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSession:
    """``about`` is the face's own. A session that has ended has no models."""

    session: str
    tenant: str
    about: bytes
    created_s: float
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """An adapter whose operations the queue orders. ``adapter`` is what the run calls it; the service's table of
    adapters has it as ``name``.

    ``of_state`` is the path that a model serves which the queue made for samplers; clients cannot address that one.
    ``next_seq`` is the client's next number, ``next_number`` the queue's; a checkpoint covers the operations up to
    ``closed``. ``published`` is the newest version that servers had. ``removed``: the adapter leaves, or has left.
    ``broken`` is the reason why no operation of it can be carried out. ``notes`` are the client's own.
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
    removed: bool = False
    joined: bool = False
    next_seq: int = 1
    next_number: int = 1
    closed: int = 0
    published: int | None = None
    broken: str = ""
    notes: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, row: AdapterRow, **values: Any) -> "Model":
        """A new model whose adapter is ``row``."""
        values |= {"tenant": row.tenant, "name": row.name, "incarnation": row.incarnation, "adapter": row.key}
        return cls(created_s=row.created_s, **values)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
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
        return f"{SCHEME}{self.model}/{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSession:
    """A sampling session: of the saved state ``path``, of the newest version of ``model``, or of the base."""

    sampler: str
    tenant: str
    session: str
    path: str | None
    model: str | None
    created_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingSample:
    """A sample that was acknowledged and that no client has fetched. ``body`` is the request of the client."""

    sample: str
    tenant: str
    sampler: str
    fingerprint: str
    body: bytes
    at_s: float


def model_id(session: str, model_seq: int) -> str:
    return f"{session}:train:{model_seq}"


def sampler_id(session: str, sampler_seq: int) -> str:
    return f"{session}:sample:{sampler_seq}"


def snapshot_id(name: str, label: str) -> str:
    """The model that serves a saved state as adapter ``name``; labels tell the states of one path apart."""
    return f"{name}:{label}"


def digest_of(key: str) -> str:
    """What is kept of a key. Keys are 256 random bits, so that no slow hash is needed."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def new_key() -> str:
    """SDK clients take keys with this prefix only."""
    return f"tml-{secrets.token_hex(32)}"


SCHEMA_VERSION = 8
SCHEMA = """
CREATE TABLE meta (schema_version INTEGER NOT NULL, run TEXT NOT NULL);
CREATE TABLE tenants (tenant TEXT PRIMARY KEY, quota TEXT NOT NULL, deleted INTEGER NOT NULL DEFAULT 0);
CREATE TABLE answers (
    tenant TEXT NOT NULL REFERENCES tenants, request TEXT NOT NULL, fingerprint TEXT NOT NULL, answer BLOB NOT NULL,
    PRIMARY KEY (tenant, request)
);
CREATE TABLE requests (
    request TEXT PRIMARY KEY, tenant TEXT NOT NULL REFERENCES tenants, owner TEXT NOT NULL, seq INTEGER NOT NULL,
    fingerprint TEXT NOT NULL, action BLOB, n_bytes INTEGER NOT NULL, at_s REAL NOT NULL,
    answer BLOB, answered_s REAL, fetched_s REAL
);
CREATE TABLE client_operations (
    adapter TEXT NOT NULL, number INTEGER NOT NULL, request TEXT NOT NULL, what BLOB, kind TEXT NOT NULL,
    failed INTEGER, outcome BLOB, PRIMARY KEY (adapter, number)
) WITHOUT ROWID;
CREATE INDEX operations_of_request ON client_operations (request);
CREATE TABLE dropped_states (adapter TEXT NOT NULL, label TEXT NOT NULL, PRIMARY KEY (adapter, label));
CREATE INDEX models_of_session ON models (session) WHERE removed = 0;
CREATE INDEX samples_of_sampler ON samples (sampler)
"""
"""What the tables of the dataclasses above (`queue_store.Table`) lack: other tables, and indices."""
INDICES = """
DROP INDEX IF EXISTS requests_kept;
DROP INDEX IF EXISTS requests_open;
DROP INDEX IF EXISTS requests_answered;
CREATE INDEX IF NOT EXISTS requests_usage ON requests (tenant, answered_s, n_bytes) WHERE action IS NOT NULL;
CREATE INDEX IF NOT EXISTS requests_held ON requests (owner, seq, at_s) WHERE answer IS NULL;
CREATE INDEX IF NOT EXISTS requests_fetched ON requests (answered_s, fetched_s) WHERE answer IS NOT NULL
"""
"""Also of older files. They have all columns of a query: one that stands behind a BLOB of megabytes costs its pages."""
