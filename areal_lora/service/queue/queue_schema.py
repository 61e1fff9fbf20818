"""Tables of the service's file: adapters of tenants, and requests of SDK clients.

``requests`` have an ``action`` until nothing can need it again, an ``answer`` once there is one. ``client_operations``
are those of the requests, and the queue's own, that the trainer may still expect: they are deleted when a checkpoint
covers them. ``samples`` are those whose outcome no client has fetched. ``forgotten`` has the highest incarnation of the
deleted adapters that are no longer kept.
"""

from __future__ import annotations

ADAPTERS = """
CREATE TABLE meta (schema_version INTEGER NOT NULL, run TEXT NOT NULL, generation INTEGER NOT NULL);
CREATE TABLE tenants (tenant TEXT PRIMARY KEY, quota TEXT NOT NULL);
CREATE TABLE keys (
    digest TEXT PRIMARY KEY, tenant TEXT NOT NULL REFERENCES tenants, label TEXT NOT NULL, operator INTEGER NOT NULL,
    UNIQUE (tenant, label)
);
CREATE TABLE adapters (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant TEXT NOT NULL REFERENCES tenants, name TEXT NOT NULL, incarnation INTEGER NOT NULL,
    wanted TEXT NOT NULL, settings TEXT NOT NULL, created_s REAL NOT NULL,
    UNIQUE (tenant, name, incarnation)
);
CREATE UNIQUE INDEX one_bearer ON adapters (tenant, name) WHERE wanted != 'deleted';
CREATE TABLE operations (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant TEXT NOT NULL REFERENCES tenants, name TEXT NOT NULL, incarnation INTEGER NOT NULL,
    verb TEXT NOT NULL, request TEXT, fingerprint TEXT NOT NULL, answer BLOB NOT NULL, at_s REAL NOT NULL,
    carried_out INTEGER NOT NULL DEFAULT 0,
    UNIQUE (tenant, request)
);
CREATE INDEX still_open ON operations (number) WHERE carried_out = 0;
"""
CLIENTS = """
CREATE TABLE sessions (
    session TEXT PRIMARY KEY, tenant TEXT NOT NULL REFERENCES tenants, about BLOB NOT NULL, created_s REAL NOT NULL,
    ended INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE models (
    model TEXT PRIMARY KEY, tenant TEXT NOT NULL REFERENCES tenants, session TEXT NOT NULL,
    name TEXT NOT NULL, incarnation INTEGER NOT NULL, adapter TEXT NOT NULL UNIQUE, lora BLOB NOT NULL,
    created_s REAL NOT NULL, of_state TEXT, gone INTEGER NOT NULL DEFAULT 0, joined INTEGER NOT NULL DEFAULT 0,
    next_seq INTEGER NOT NULL DEFAULT 1, next_number INTEGER NOT NULL DEFAULT 1, closed INTEGER NOT NULL DEFAULT 0,
    published INTEGER, broken TEXT NOT NULL DEFAULT ''
);
CREATE INDEX models_of_session ON models (session) WHERE gone = 0;
CREATE TABLE requests (
    request TEXT PRIMARY KEY, tenant TEXT NOT NULL REFERENCES tenants, owner TEXT NOT NULL, seq INTEGER NOT NULL,
    fingerprint TEXT NOT NULL, ask BLOB, n_bytes INTEGER NOT NULL, at_s REAL NOT NULL, held INTEGER NOT NULL,
    answer BLOB, answered_s REAL, fetched_s REAL
);
CREATE INDEX requests_kept ON requests (tenant) WHERE ask IS NOT NULL;
CREATE INDEX requests_open ON requests (owner, seq) WHERE answer IS NULL;
CREATE INDEX requests_answered ON requests (answered_s) WHERE answer IS NOT NULL;
CREATE TABLE client_operations (
    adapter TEXT NOT NULL, number INTEGER NOT NULL, request TEXT NOT NULL, what BLOB, kind TEXT NOT NULL,
    fate TEXT, outcome BLOB, PRIMARY KEY (adapter, number)
) WITHOUT ROWID;
CREATE INDEX operations_of_request ON client_operations (request);
CREATE TABLE saved_states (
    model TEXT NOT NULL, tenant TEXT NOT NULL REFERENCES tenants, adapter TEXT NOT NULL, kind TEXT NOT NULL,
    name TEXT NOT NULL, label TEXT NOT NULL, named INTEGER NOT NULL, version INTEGER, step INTEGER NOT NULL,
    n_bytes INTEGER NOT NULL, lora BLOB NOT NULL, created_s REAL NOT NULL, expires_s REAL,
    PRIMARY KEY (model, kind, name)
);
CREATE TABLE dropped_states (adapter TEXT NOT NULL, label TEXT NOT NULL, PRIMARY KEY (adapter, label));
CREATE TABLE samplers (
    sampler TEXT PRIMARY KEY, tenant TEXT NOT NULL REFERENCES tenants, session TEXT NOT NULL, path TEXT, model TEXT,
    created_s REAL NOT NULL
);
"""
KEPT = """
CREATE TABLE samples (
    sample TEXT PRIMARY KEY, tenant TEXT NOT NULL REFERENCES tenants, sampler TEXT NOT NULL, fingerprint TEXT NOT NULL,
    ask BLOB NOT NULL, at_s REAL NOT NULL
);
CREATE INDEX samples_of_sampler ON samples (sampler);
ALTER TABLE models ADD COLUMN notes TEXT NOT NULL DEFAULT '{}';
ALTER TABLE saved_states ADD COLUMN notes TEXT NOT NULL DEFAULT '{}';
"""
FORGOTTEN = """
CREATE TABLE forgotten (tenant TEXT PRIMARY KEY REFERENCES tenants, incarnation INTEGER NOT NULL)
"""
NAMES = """
ALTER TABLE requests RENAME COLUMN ask TO action;
ALTER TABLE samples RENAME COLUMN ask TO body;
ALTER TABLE models RENAME COLUMN gone TO removed
"""
STEPS = (ADAPTERS, CLIENTS, KEPT, FORGOTTEN, NAMES)
"""What each version adds to the one before."""
SCHEMA_VERSION = len(STEPS)
