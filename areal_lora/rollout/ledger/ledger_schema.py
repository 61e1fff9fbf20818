"""The tables of the ledger file. Another schema needs another ``SCHEMA_VERSION``: files of earlier ones are refused."""

SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE meta (schema_version INTEGER NOT NULL, run TEXT NOT NULL);
CREATE TABLE adapters (
    adapter TEXT PRIMARY KEY,
    head TEXT NOT NULL               -- JSON of Head: counts, next position, what was folded
);
CREATE TABLE groups (
    adapter TEXT NOT NULL,
    seq INTEGER NOT NULL,            -- numbers the issues of an adapter
    position INTEGER NOT NULL,       -- of the prompt in the stream
    issue INTEGER NOT NULL,          -- of this prompt, from 1
    stale INTEGER NOT NULL,          -- earlier issues that came too late
    state INTEGER NOT NULL,
    failed INTEGER NOT NULL DEFAULT 0,      -- tries that count
    resampled INTEGER NOT NULL DEFAULT 0,   -- tries after which another seed is used
    version INTEGER NOT NULL DEFAULT -1,    -- requested; once done, of the oldest token
    newest INTEGER NOT NULL DEFAULT -1,     -- once done, version of the newest token
    server TEXT NOT NULL DEFAULT '',
    deadline_s REAL NOT NULL DEFAULT 0,     -- of the running request, on this boot's monotonic clock
    step INTEGER NOT NULL DEFAULT -1,       -- leased or consumed at; dropped before
    reason TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (adapter, seq)
) WITHOUT ROWID;
CREATE TABLE trajectories (adapter TEXT NOT NULL, seq INTEGER NOT NULL, payload BLOB NOT NULL,
    PRIMARY KEY (adapter, seq));
"""
