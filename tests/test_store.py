"""The state file: old or new, never half, and never silently a fresh one."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
from pathlib import Path

import pytest

from daemon.journal import Journal
from daemon.store import CurvePoint, Store, StoreError
from peers.effects import Durable
from proto import federation_pb2 as pb
from tests.test_versions import child

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
    accepted = None
    if promised >= 0:
        value = pb.VoteBody(round=round_ + 1, model_digest=digest_of(round_ + 1))
        accepted = pb.Accepted(attempt=promised, value=value)
    return Durable(round_, digest_of(round_) if round_ else GENESIS, promised, accepted)


def opened(path: Path) -> tuple[Store, Durable]:
    store = Store(path)
    return store, store.load("med", SHAPE, GENESIS)


LOOP = """
import sys; from pathlib import Path
from tests.test_store import commit, durable, opened
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
        killed = child(LOOP, path, fault=f"persist:{side}=kill@{number}")
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


async def test_the_journal_waits_for_the_disk_and_says_so(tmp_path: Path) -> None:
    store, _ = opened(tmp_path / "state.sqlite3")
    told: list[str] = []
    journal = Journal(store, told.append)
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
    assert state == Durable(0, GENESIS, promised=4)
    with pytest.raises(StoreError, match="older than 2"):
        store.file_manifest(1, b"1")
    store.persist(durable(1), (commit(1),))
    store.close()
    again, state = opened(path)
    assert state == durable(1)
    assert again.curve() == []
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


def test_a_file_of_schema_2_gets_a_curve_and_keeps_its_promises(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite3"
    store, _ = opened(path)
    store.persist(durable(1), (commit(1),))
    store.persist(durable(1, 3), ())
    store.close()
    with sqlite3.connect(path) as db:
        db.executescript("DROP TABLE curve; PRAGMA user_version = 2;")
    db.close()
    again, state = opened(path)
    assert state == durable(1, 3)
    again.file_scores(1, digest_of(1), {"em": 1.0}, 5, 1)
    assert len(again.curve()) == 1
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
    store, _ = opened(path)
    store.persist(durable(1), (commit(1),))
    store.persist(durable(1, 3), ())
    store.close()
    with sqlite3.connect(path) as db:
        db.executescript(
            "DROP TABLE curve; CREATE TABLE curve (round INTEGER NOT NULL,"
            " model_digest BLOB NOT NULL, metric TEXT NOT NULL, value REAL NOT NULL,"
            " questions INTEGER NOT NULL, unix_ms INTEGER NOT NULL,"
            " PRIMARY KEY (round, model_digest, metric)) WITHOUT ROWID; PRAGMA user_version = 3;"
        )
        older = [
            (n, digest_of(n), metric, n / 8, 20, 1000 * n)
            for n in (0, 1)
            for metric in ("em", "map")
        ]
        db.executemany("INSERT INTO curve VALUES (?, ?, ?, ?, ?, ?)", older)
    db.close()
    again, state = opened(path)
    assert state == durable(1, 3)
    assert again.curve() == [CurvePoint(*row, kind="") for row in older]
    assert again.judged(1, digest_of(1)) == frozenset(), "it is judged anew, and says as what"
    again.file_scores(1, digest_of(1), {"em": 0.5, "map": 0.5}, 20, 5000)
    assert [(p.round, p.kind) for p in again.curve("map")] == [(0, ""), (1, "shared")]
    again.close()
    third, _ = opened(path)
    assert [(p.round, p.kind) for p in third.curve("em")] == [(0, ""), (1, "shared")]
    third.close()
