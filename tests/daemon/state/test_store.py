"""The state file: old or new, never half, and never silently a fresh one."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sqlite3
from pathlib import Path
from typing import cast

import pytest
from structlog.testing import capture_logs

from daemon.rounds.write_ahead import Unwritable, WriteAhead
from daemon.state.store import Accusation, CurvePoint, Store, StoreError
from peers.attempts.effects import Durable
from proto import federation_pb2 as pb
from tests.daemon.state.test_versions import child

SHAPE, GENESIS = b"s" * 32, b"g" * 32


def digest_of(round_: int) -> bytes:
    return round_.to_bytes(32)


def commit(round_: int, manifest: int = 1) -> pb.Commit:
    parent = digest_of(round_ - 1) if round_ > 1 else GENESIS
    body = pb.VoteBody(
        round=round_,
        parent_digest=parent,
        model_digest=digest_of(round_),
        manifest_version=manifest,
    )
    return pb.Commit(certificate=pb.Certificate(body=body))


def durable(round_: int, promised: int = -1) -> Durable:
    state = pb.RoundState()
    if promised >= 0:
        body = pb.VoteBody(round=round_ + 1, model_digest=digest_of(round_ + 1))
        state.vote.CopyFrom(pb.Vote(attempt=promised, body=body, site="alpha"))
    run = pb.Run(generation=1, run_id="a-run", target_round=9)
    signed = pb.Signed(body=run.SerializeToString(), site="alpha", signature=b"s")
    head = digest_of(round_) if round_ else GENESIS
    return Durable(round_, head, promised, state, signed if promised >= 0 else None)


def opened(path: Path) -> tuple[Store, Durable]:
    store = Store(path)
    return store, store.load("med", SHAPE, GENESIS)


LOOP = """
import sys; from pathlib import Path
from tests.daemon.state.test_store import commit, durable, opened
store, state = opened(Path(sys.argv[1]))
for round_ in range(state.head_round, state.head_round + 20):
    for promised in (0, 1):
        print(round_, promised, "begin", flush=True)
        store.persist(durable(round_, promised), ())
        print(round_, promised, "end", flush=True)
    print(round_ + 1, -1, "begin", flush=True)
    store.persist(durable(round_ + 1), (commit(round_ + 1),))
    print(round_ + 1, -1, "end", flush=True)
"""


@pytest.mark.slow
def test_killed_again_and_again_the_state_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite3"
    for number in range(1, 9):
        side = "before" if number % 2 else "after"
        killed = child("-c", LOOP, path, fault=f"persist:{side}=kill@{number}")
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        lines = [line.split() for line in killed.stdout.splitlines()]
        round_, promised = int(lines[-1][0]), int(lines[-1][1])
        assert lines[-1][2] == "begin", "it died within a write"
        store, state = opened(path)
        new = durable(round_, promised)
        if side == "after":
            assert state == new, "what was written before the kill is there"
        else:
            assert (state.head_round, state.promised) < (round_, promised) or (
                state.head_round < round_
            )
        commits = store.rounds(1, 0)
        assert [c.certificate.body.round for c in commits] == list(range(1, state.head_round + 1))
        store.close()


def test_votes_are_synced_before_they_are_said(tmp_path: Path) -> None:
    store, _ = opened(tmp_path / "state.sqlite3")
    assert store._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert store._db.execute("PRAGMA synchronous").fetchone() == (2,), "FULL"
    store.close()


def test_a_new_file_is_in_its_folder_for_good_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gone after a power cut, it would be a first start: what was promised would be forgotten."""
    path = tmp_path / "state" / "state.sqlite3"
    synced: list[tuple[os.stat_result, bool]] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append((os.fstat(fd), path.exists())))
    Store(path).close()
    for folder in (path.parent, tmp_path):
        assert any(os.path.samestat(folder.stat(), one) and named for one, named in synced)


def test_an_empty_file_is_not_a_first_start(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite3"
    store, _ = opened(path)
    store.close()
    path.write_bytes(b"")
    with pytest.raises(StoreError, match="empty, which no state file of ours ever is") as refused:
        Store(path)
    assert "committed another round without this one" in str(refused.value)
    assert path.read_bytes() == b"", "and it is left as it is"


def test_a_half_made_file_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "state.sqlite3.new").write_bytes(b"cut off in the first second")
    store, state = opened(tmp_path / "state.sqlite3")
    assert state == Durable(0, GENESIS)
    store.close()


def test_a_file_without_its_name_is_not_a_first_start(tmp_path: Path) -> None:
    (tmp_path / "state.sqlite3-wal").write_bytes(b"promises")
    with pytest.raises(StoreError, match="put it back"):
        Store(tmp_path / "state.sqlite3")


def test_a_link_to_nothing_is_not_a_first_start(tmp_path: Path) -> None:
    """As when the disk that it is on is not mounted."""
    (tmp_path / "state.sqlite3").symlink_to(tmp_path / "disk" / "state.sqlite3")
    with pytest.raises(StoreError, match=r"a link to .*, which is not there"):
        Store(tmp_path / "state.sqlite3")
    assert (tmp_path / "state.sqlite3").is_symlink()


@pytest.mark.parametrize("damage", ["garbage", "torn", "cut"])
def test_a_damaged_file_is_refused_with_the_remedy(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "state.sqlite3"
    store, _ = opened(path)
    for round_ in range(1, 60):
        store.persist(durable(round_), (commit(round_),))
    store.close()
    raw = bytearray(path.read_bytes())
    if damage == "garbage":
        raw[:4096] = b"x" * 4096
    elif damage == "torn":
        raw[4096:8192] = bytes(range(256)) * 16
    else:
        raw = raw[: len(raw) // 2]
    path.write_bytes(raw)
    with pytest.raises(StoreError, match="Move it away only after"):
        opened(path)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ("UPDATE protocol SET promised = 3", "digest of what this site promised"),
        ("UPDATE protocol SET head_round = 1", "digest of what this site promised"),
        ("DELETE FROM rounds WHERE round = 2", "certificate of round 2 is not in it"),
        ("DELETE FROM rounds WHERE round = 1", "holds 1 rounds and stands at 2"),
        ("DELETE FROM protocol", "no word of what this site promised"),
    ],
)
def test_a_changed_file_is_refused(tmp_path: Path, change: str, cause: str) -> None:
    path = tmp_path / "state.sqlite3"
    store, _ = opened(path)
    store.persist(durable(1), (commit(1),))
    store.persist(durable(2, 0), (commit(2),))
    store.close()
    with sqlite3.connect(path) as db:
        db.execute(change)
    db.close()
    with pytest.raises(StoreError, match=cause):
        opened(path)


def test_a_write_that_fails_changes_nothing_and_may_be_tried_again(tmp_path: Path) -> None:
    store, _ = opened(tmp_path / "state.sqlite3")
    store.persist(durable(1), (commit(1),))
    store._db.execute("PRAGMA max_page_count = 1")  # as full as a disk can be
    big = pb.Commit(
        certificate=commit(2).certificate, report=pb.RoundReport(coordinator="x" * 99999)
    )
    with pytest.raises(StoreError, match="full"):
        store.persist(durable(2), (big,))
    assert store.load("med", SHAPE, GENESIS) == durable(1)
    store._db.execute("PRAGMA max_page_count = 1000000")
    store.persist(durable(2), (big,))
    assert store.load("med", SHAPE, GENESIS) == durable(2)
    store.close()


@pytest.mark.parametrize(
    "state",
    [
        Durable(0, GENESIS, promised=1 << 63),  # more than SQLite's integers
        Durable(0, cast(bytes, object())),  # and what is none of its types
    ],
)
async def test_what_no_disk_is_to_blame_for_is_not_tried_again(
    tmp_path: Path, state: Durable
) -> None:
    store, before = opened(tmp_path / "state.sqlite3")
    told: list[str] = []
    journal = WriteAhead(store, told.append)
    with capture_logs() as logged, pytest.raises(Unwritable, match="restart it"):
        await asyncio.wait_for(journal.persist(state, ()), 5)
    assert [line["log_level"] for line in logged] == ["critical"]
    with pytest.raises(Unwritable):
        await journal.persist(durable(0), ())  # nothing follows it any more
    assert journal.broken
    assert len(told) == 1
    assert "not because of the disk" in journal.trouble
    assert store.load("med", SHAPE, GENESIS) == before
    store.close()


@pytest.mark.slow
async def test_the_journal_waits_for_the_disk_and_says_so(tmp_path: Path) -> None:
    store, _ = opened(tmp_path / "state.sqlite3")
    told: list[str] = []
    journal = WriteAhead(store, told.append)
    store._db.execute("PRAGMA max_page_count = 1")
    report = pb.RoundReport(coordinator="x" * 99999)
    first = pb.Commit(certificate=commit(1).certificate, report=report)
    writing = asyncio.create_task(journal.persist(durable(1), (first,)))
    while len(told) < 2 and not writing.done():
        await asyncio.sleep(0.05)
    assert not writing.done(), "nothing may follow a Persist that does not hold"
    assert "stands still" in journal.trouble
    assert "full" in journal.trouble
    store._db.execute("PRAGMA max_page_count = 1000000")
    await asyncio.wait_for(writing, 10)
    assert journal.trouble == ""
    assert store.load("med", SHAPE, GENESIS) == durable(1)
    store.close()


def test_manifests_that_peers_showed_us_are_never_in_force(tmp_path: Path) -> None:
    store, _ = opened(tmp_path / "state.sqlite3")
    store.file_manifest(3, b"three")
    store.learn_manifests([(1, b"one"), (2, b"two"), (3, b"other"), (7, b"seven")])
    assert store.manifests() == [b"one", b"two", b"three", b"seven"]
    assert store.manifests(2) == [b"two", b"three", b"seven"]
    store.file_manifest(4, b"four")  # 7 was never in force: this is no step back
    with pytest.raises(StoreError, match="older than 4"):
        store.file_manifest(3, b"three")
    store.close()


# What a state file was before quorums decided (schema 4), word by word.
SCHEMA_4 = """
CREATE TABLE protocol (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    federation TEXT NOT NULL,
    shape_digest BLOB NOT NULL,
    head_round INTEGER NOT NULL,
    head_digest BLOB NOT NULL,
    promised INTEGER NOT NULL,
    accepted BLOB,
    run BLOB,
    seal BLOB NOT NULL
);
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
CURVE_4 = """
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
CURVE_3 = (
    "CREATE TABLE curve (round INTEGER NOT NULL, model_digest BLOB NOT NULL, metric TEXT NOT NULL,"
    " value REAL NOT NULL, questions INTEGER NOT NULL, unix_ms INTEGER NOT NULL,"
    " PRIMARY KEY (round, model_digest, metric)) WITHOUT ROWID;"
)


def seal_of_old(columns: tuple[object, ...]) -> bytes:
    """As schemas 2 to 4 sealed their state."""
    seal = hashlib.sha256(b"hanse-state-v2\0")
    for column in columns:
        raw = column if isinstance(column, bytes) else repr(column).encode()
        seal.update(type(column).__name__.encode() + len(raw).to_bytes(8) + raw)
    return seal.digest()


def write_old(path: Path, schema: int, curve: str = "") -> None:
    """A file at round 1 that has promised attempt 4, accepted in it, and knows of a run."""
    state = ("med", SHAPE, 1, digest_of(1), 4, b"accepted", b"a run")
    with sqlite3.connect(path) as db:
        db.executescript(f"{SCHEMA_4}{curve}PRAGMA user_version = {schema};")
        db.execute(
            "INSERT INTO protocol VALUES (1, ?, ?, ?, ?, ?, ?, ?, ?)", (*state, seal_of_old(state))
        )
        first = commit(1)
        db.execute(
            "INSERT INTO rounds VALUES (1, ?, ?)",
            (first.certificate.SerializeToString(), first.report.SerializeToString()),
        )
        db.execute("INSERT INTO manifests VALUES (2, x'32', 1)")
    db.close()


def test_a_file_of_schema_1_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite3"
    with sqlite3.connect(path) as db:
        db.executescript(
            "CREATE TABLE protocol (id INTEGER PRIMARY KEY CHECK (id = 1), federation TEXT NOT"
            " NULL, shape_digest BLOB NOT NULL, head_round INTEGER NOT NULL, head_digest BLOB NOT"
            " NULL, promised INTEGER NOT NULL, accepted BLOB, run BLOB);"
            "CREATE TABLE rounds (round INTEGER PRIMARY KEY, certificate BLOB NOT NULL, report BLOB"
            " NOT NULL);"
            "CREATE TABLE manifests (version INTEGER PRIMARY KEY, signed BLOB NOT NULL);"
            "PRAGMA user_version = 1;"
        )
        db.execute(
            "INSERT INTO protocol VALUES (1, 'med', ?, 0, ?, 4, NULL, NULL)", (SHAPE, GENESIS)
        )
        db.execute("INSERT INTO manifests VALUES (2, x'32')")
    db.close()
    store, state = opened(path)
    assert state == Durable(0, GENESIS)
    with pytest.raises(StoreError, match="older than 2"):
        store.file_manifest(1, b"1")
    store.persist(durable(1), (commit(1),))
    store.close()
    again, state = opened(path)
    assert state == durable(1)
    assert again.curve() == []
    again.close()


@pytest.mark.parametrize(("schema", "curve"), [(2, ""), (3, CURVE_3), (4, CURVE_4)])
def test_of_when_majorities_decided_the_history_stays_and_nothing_else(
    tmp_path: Path, schema: int, curve: str
) -> None:
    path = tmp_path / "state.sqlite3"
    write_old(path, schema, curve)
    with capture_logs() as logged:
        store, state = opened(path)
    assert state == Durable(1, digest_of(1)), "nothing promised, signed or asked for"
    assert any("ask again" in line["event"] and line["round"] == 2 for line in logged)
    assert [c.certificate for c in store.rounds(1, 0)] == [commit(1).certificate]
    assert store.manifests() == [b"2"]
    assert store.accused() == frozenset()
    store.file_scores(1, digest_of(1), {"em": 1.0}, 5, 1)
    store.persist(durable(1, 3), ())
    store.close()
    with capture_logs() as logged:
        again, state = opened(path)
    assert state == durable(1, 3)
    assert state.run is not None
    assert state.run.target_round == 9
    assert len(again.curve()) == 1
    assert logged == []
    again.close()


def test_an_old_file_that_was_changed_is_not_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite3"
    write_old(path, 4, CURVE_4)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE protocol SET head_round = 0")
    db.close()
    with pytest.raises(StoreError, match="digest of what this site promised"):
        opened(path)
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (4,), "and it is left as it is"
    db.close()


def test_evidence_is_kept_once_of_each_kind(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite3"
    store, _ = opened(path)
    one, other = (pb.Signed(body=body, site="gamma") for body in (b"1", b"2"))
    votes = pb.Evidence(kind=pb.TWO_VOTES, first=one, second=other)
    promises = pb.Evidence(kind=pb.TWO_PROMISES, first=one, second=other)
    store.file_evidence(votes, 1000)
    store.file_evidence(pb.Evidence(kind=pb.TWO_VOTES, first=other, second=one), 2000)
    store.file_evidence(promises, 3000)
    store.close()
    again, _ = opened(path)
    assert again.accused() == {"gamma"}
    assert again.evidence() == [
        Accusation("gamma", pb.TWO_VOTES, 1000, votes),
        Accusation("gamma", pb.TWO_PROMISES, 3000, promises),
    ]
    again.close()


def test_a_curve_is_kept_and_a_version_judged_again_is_judged_anew(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite3"
    store, _ = opened(path)
    store.file_scores(1, digest_of(1), {"mrr@10": 0.5, "em": 0.25}, 20, 1000)
    store.file_scores(0, GENESIS, {"mrr@10": 0.25, "em": 0.0}, 20, 2000)
    store.file_scores(1, digest_of(1), {"mrr@10": 0.75, "em": 0.5}, 40, 3000)
    store.close()
    again, _ = opened(path)
    assert again.curve("mrr@10") == [
        CurvePoint(0, GENESIS, "mrr@10", 0.25, 20, 2000),
        CurvePoint(1, digest_of(1), "mrr@10", 0.75, 40, 3000),
    ]
    assert [(p.round, p.metric) for p in again.curve()] == [
        (0, "em"), (0, "mrr@10"), (1, "em"), (1, "mrr@10"),
    ]  # fmt: skip
    again.close()


def test_a_version_is_kept_as_what_it_was_judged(tmp_path: Path) -> None:
    store, _ = opened(tmp_path / "state.sqlite3")
    version, own = (1, digest_of(1)), b"\x07" * 32
    assert store.judged(*version) == frozenset()
    store.file_scores(*version, {"em": 0.75}, 20, 1000, kind="mixture", own_digest=b"\x06" * 32)
    store.file_scores(*version, {"em": 0.5}, 20, 2000)
    store.file_scores(*version, {"em": 1.0}, 20, 3000, kind="mixture", own_digest=own)
    assert store.judged(*version) == {b"", own}
    assert store.curve() == [
        CurvePoint(*version, "em", 0.5, 20, 2000),
        CurvePoint(*version, "em", 1.0, 20, 3000, "mixture", own),
    ]
    store.close()


def test_a_curve_of_schema_3_is_kept_and_says_no_kind(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite3"
    write_old(path, 3, CURVE_3)
    older = [
        (n, digest_of(n), metric, n / 8, 20, 1000 * n) for n in (0, 1) for metric in ("em", "map")
    ]
    with sqlite3.connect(path) as db:
        db.executemany("INSERT INTO curve VALUES (?, ?, ?, ?, ?, ?)", older)
    db.close()
    again, state = opened(path)
    assert state == Durable(1, digest_of(1))
    assert again.curve() == [CurvePoint(*row, kind="") for row in older]
    assert again.judged(1, digest_of(1)) == frozenset(), "it is judged anew, and says as what"
    again.file_scores(1, digest_of(1), {"em": 0.5, "map": 0.5}, 20, 5000)
    assert [(p.round, p.kind) for p in again.curve("map")] == [(0, ""), (1, "shared")]
    again.close()
    third, _ = opened(path)
    assert [(p.round, p.kind) for p in third.curve("em")] == [(0, ""), (1, "shared")]
    third.close()


def test_another_retriever_is_refused_until_it_is_changed(tmp_path: Path) -> None:
    """By a step of the manifest; what was promised, voted and committed stays."""
    other = b"o" * 32
    store, _ = opened(tmp_path / "state.sqlite3")
    store.persist(durable(1), (commit(1),))
    store.persist(durable(1, promised=2), ())
    with pytest.raises(StoreError, match="step of the manifest"):
        store.load("med", other, b"")
    before, rounds = store.load("med", SHAPE, b""), store.rounds(0, 0)
    store.change_model(other)
    assert store.trained == other
    assert (store.load("med", other, b""), store.rounds(0, 0)) == (before, rounds)
    store.close()
    again = Store(tmp_path / "state.sqlite3")
    assert again.load("med", other, b"") == before
    with pytest.raises(StoreError, match="another retriever"):
        again.load("med", SHAPE, b"")


def test_before_the_first_round_the_retriever_is_not_changed(tmp_path: Path) -> None:
    """The first version is the retriever's own, and sites have promised by its digest."""
    store, before = opened(tmp_path / "state.sqlite3")
    with pytest.raises(StoreError, match="no round is committed in it"):
        store.change_model(b"o" * 32)
    assert store.load("med", SHAPE, b"") == before
