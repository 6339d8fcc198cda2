"""The SQLite file of a site's state: its tables, as they are in this version."""

from __future__ import annotations

SCHEMA_VERSION = 5
CURVE = """
CREATE TABLE curve (
    round INTEGER NOT NULL,
    model_digest BLOB NOT NULL,
    kind TEXT NOT NULL,
    metric TEXT NOT NULL,
    value REAL NOT NULL,
    questions INTEGER NOT NULL,
    unix_ms INTEGER NOT NULL,
    own_digest BLOB NOT NULL,
    PRIMARY KEY (round, model_digest, kind, metric)
) WITHOUT ROWID;
"""
PROTOCOL = """
CREATE TABLE protocol (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    federation TEXT NOT NULL,
    shape_digest BLOB NOT NULL,
    head_round INTEGER NOT NULL,
    head_digest BLOB NOT NULL,
    promised INTEGER NOT NULL,
    state BLOB NOT NULL,
    run BLOB,
    seal BLOB NOT NULL
);
"""
EVIDENCE = """
CREATE TABLE evidence (
    site TEXT NOT NULL,
    kind INTEGER NOT NULL,
    unix_ms INTEGER NOT NULL,
    shown BLOB NOT NULL,
    PRIMARY KEY (site, kind)
) WITHOUT ROWID;
"""
SCHEMA = (
    PROTOCOL
    + """
CREATE TABLE rounds (
    round INTEGER PRIMARY KEY,
    certificate BLOB NOT NULL,
    report BLOB NOT NULL
);
CREATE TABLE manifests (
    version INTEGER PRIMARY KEY,
    signed BLOB NOT NULL,
    in_force INTEGER NOT NULL
);
"""
    + CURVE
    + EVIDENCE
)
