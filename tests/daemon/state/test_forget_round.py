"""fedctl site forget-round: a site whose record of a round is damaged takes part again."""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from daemon.state.audit_format import segments
from daemon.state.store import Store, StoreError
from peers.attempts.effects import Durable
from proto import federation_pb2 as pb
from tests.daemon.state.entries import entries
from tests.daemon.state.test_store import GENESIS, SHAPE, commit, digest_of, opened
from tests.support.command_line import Fedctl, fedctl  # noqa: F401  a fixture
from tests.support.federation import LiveFederation, LiveSite

ATTEMPT, GENERATION = 2**32 - 2, 2**62


def absurd(head_round: int, head: bytes) -> Durable:
    """What is sound in itself, and leads nowhere."""
    run = pb.Run(generation=GENERATION, run_id="r", requested_by="elm", target_round=2**40)
    return Durable(
        head_round,
        head,
        promised=ATTEMPT,
        state=pb.RoundState(
            promise=pb.Promised(promise=pb.Signed(body=b"promise", site="elm")), tried=1
        ),
        signed_run=pb.Signed(body=run.SerializeToString(), site="elm"),
    )


def change(path: Path, assignment: str) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"UPDATE protocol SET {assignment}")  # noqa: S608  ours
        db.commit()


# ---- the state file -------------------------------------------------------------


@pytest.mark.parametrize(
    "damage", ["", "state = x'ff'", "run = x'ff'", "promised = 7", "seal = x'00'"]
)
def test_what_was_said_in_the_round_is_forgotten_and_all_else_stays(
    tmp_path: Path, damage: str
) -> None:
    path = tmp_path / "state.sqlite3"
    store, _ = opened(path)
    for round_ in (1, 2):
        store.persist(Durable(round_, digest_of(round_)), (commit(round_),))
    store.file_manifest(1, b"signed")
    store.file_scores(2, digest_of(2), {"em": 0.5}, 20, 1000)
    store.persist(absurd(2, digest_of(2)), ())
    history = store.rounds(1, 0)
    store.close()
    if damage:
        change(path, damage)
        with closing(Store(path)) as store, pytest.raises(StoreError, match="forget-round"):
            store.load("med", SHAPE, GENESIS)
    with closing(Store(path)) as store:
        assert store.forgotten_round() == 0
        assert store.forget_round() == 3
        assert store.forgotten_round() == 3, "what peers remember of it is no surprise"
        assert store.load("med", SHAPE, GENESIS) == Durable(2, digest_of(2))
        assert store.rounds(1, 0) == history
        assert store.manifest_in_force() == b"signed"
        assert len(store.curve()) == 1


def test_sums_are_counted_from_zero_and_all_that_was_said_stays(tmp_path: Path) -> None:
    """So it may be done at all sites at once, where forgetting what binds them may not."""
    path = tmp_path / "state.sqlite3"
    said = absurd(0, GENESIS)
    counted = pb.RoundState()
    counted.CopyFrom(said.state)
    counted.drawn.add(attempt=3, sites=["elm", "oak"])
    store, _ = opened(path)
    store.persist(replace(said, state=counted), ())
    store.close()
    with closing(Store(path)) as store:
        assert store.forget_sums() == 1
        assert store.load("med", SHAPE, GENESIS) == said
        assert store.forgotten_round() == 0
    change(path, "seal = x'00'")
    with closing(Store(path)) as store, pytest.raises(StoreError, match="digest"):
        store.forget_sums()


@pytest.mark.parametrize(
    ("table", "cause"),
    [
        ("UPDATE protocol SET head_round = 1", "certificate of round 1 is not in it"),
        ("UPDATE protocol SET head_round = 0", "holds 2 rounds and stands at 0"),
        ("UPDATE protocol SET head_round = 3", "certificate of round 3 is not in it"),
        ("UPDATE protocol SET head_digest = x'00'", "certificate of round 2 is not in it"),
        ("DELETE FROM rounds WHERE round = 1", "holds 1 rounds and stands at 2"),
        ("DELETE FROM rounds", "certificate of round 2 is not in it"),
        ("DELETE FROM protocol", "does not say which federation"),
    ],
)
def test_a_head_that_is_not_the_historys_is_not_gone_on_from(
    tmp_path: Path, table: str, cause: str
) -> None:
    path = tmp_path / "state.sqlite3"
    store, _ = opened(path)
    for round_ in (1, 2):
        store.persist(Durable(round_, digest_of(round_)), (commit(round_),))
    store.close()
    with closing(sqlite3.connect(path)) as db:
        db.execute(table)
        db.commit()
    before = path.read_bytes()
    with closing(Store(path)) as store:
        with pytest.raises(StoreError, match=cause) as refused:
            store.forget_round()
        assert "Move it away only after" in str(refused.value)
    assert path.read_bytes() == before


# ---- the command ------------------------------------------------------------------


def settings(folder: Path) -> Path:
    path = folder / "fedd.toml"
    path.write_text(
        '[site]\nstate_dir = "state"\n[identity]\ndirectory = "."\nmanifest = "manifest.json"\n'
        f'[retriever]\nencoder = "{folder}"\n'
    )
    return path


def test_it_is_not_done_unasked(tmp_path: Path, fedctl: Fedctl) -> None:  # noqa: F811
    state = tmp_path / "state"
    store, _ = opened(state / "state.sqlite3")
    store.persist(replace(absurd(0, GENESIS)), ())
    store.close()
    before = (state / "state.sqlite3").read_bytes()
    ran = fedctl("site", "forget-round", "--config", settings(tmp_path), "--json")
    assert ran.code == 2
    assert "counts towards faulty_sites" in ran.object["error"]
    assert ran.object["remedy"] == "Add --yes"
    assert (state / "state.sqlite3").read_bytes() == before
    assert not (state / "audit").exists()


@pytest.mark.slow
def test_counting_sums_from_zero_needs_no_yes(tmp_path: Path) -> None:
    store, _ = opened(tmp_path / "state" / "state.sqlite3")
    store.persist(absurd(0, GENESIS), ())
    store.close()
    words = ["site", "forget-round", "--sums", "--json", "--config", str(settings(tmp_path))]
    ran = subprocess.run(
        [sys.executable, "-m", "daemon.fedctl", *words], capture_output=True, check=True, timeout=60
    )
    assert json.loads(ran.stdout)["round"] == 1
    (begun, done) = entries(segments(tmp_path / "state" / "audit"))
    assert [one["objects"]["what"] for one in (begun, done)] == ["sums", "sums"]


@pytest.mark.slow
@pytest.mark.parametrize(("word", "stay"), [("--yes", False), ("--sums", True)])
def test_integers_of_sums_that_are_forgotten_are_never_sent_again(
    tmp_path: Path, word: str, stay: bool
) -> None:
    """In another sum they would tell the difference of the two."""
    store, _ = opened(tmp_path / "state" / "state.sqlite3")
    store.close()
    kept = tmp_path / "state" / "kept" / "1-0.integers"
    kept.parent.mkdir()
    kept.touch()
    words = ["site", "forget-round", word, "--json", "--config", str(settings(tmp_path))]
    subprocess.run(
        [sys.executable, "-m", "daemon.fedctl", *words], capture_output=True, check=True, timeout=60
    )
    assert kept.exists() == stay


@pytest.mark.slow
@pytest.mark.parametrize("damaged", ["", "generator"])
def test_of_two_models_rounds_only_those_that_are_named_are_forgotten(
    tmp_path: Path, damaged: str
) -> None:
    state = tmp_path / "state"
    files = {model: state / model / "state.sqlite3" for model in ("", "generator")}
    for path in files.values():
        store, _ = opened(path)
        store.persist(absurd(0, GENESIS), ())
        store.close()
        (path.parent / "kept").mkdir()
        (path.parent / "kept" / "1-0.npy").touch()
    change(files[damaged], "seal = x'00'")
    where = "with --model generator where this file is"
    with closing(Store(files[damaged])) as store, pytest.raises(StoreError, match=where):
        store.load("med", SHAPE, GENESIS)
    words = ["site", "forget-round", "--yes", "--json", "--config", str(settings(tmp_path))]
    of = ["--model", damaged] if damaged else []
    ran = subprocess.run(
        [sys.executable, "-m", "daemon.fedctl", *words, *of],
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert json.loads(ran.stdout)["model"] == (damaged or "retriever")
    for model, path in files.items():
        with closing(Store(path)) as store:
            held = store.load("med", SHAPE, GENESIS)
        assert (held.promised == ATTEMPT) == (model != damaged)
        assert (path.parent / "kept").exists() == (model != damaged)
    (begun, done) = entries(segments(state / "audit"))
    told = [one["objects"].get("model", "") for one in (begun, done)]
    assert told == [damaged, damaged]


def test_where_no_daemon_was_nothing_is_made(tmp_path: Path, fedctl: Fedctl) -> None:  # noqa: F811
    ran = fedctl("site", "forget-round", "--config", settings(tmp_path), "--yes", "--json")
    assert ran.code == 2
    assert f"no state of a daemon in {tmp_path / 'state'}" in ran.object["error"]
    assert not (tmp_path / "state").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_user_does_not_leave_files_that_the_daemon_cannot_write(
    tmp_path: Path,
    fedctl: Fedctl,  # noqa: F811
) -> None:
    store, _ = opened(tmp_path / "state" / "state.sqlite3")
    store.close()
    os.chown(tmp_path / "state", 65534, -1)
    ran = fedctl("site", "forget-round", "--config", settings(tmp_path), "--yes", "--json")
    assert ran.code == 1
    assert "belongs to user 65534" in ran.object["error"]
    assert "sudo -u hanse" in ran.object["remedy"]
    assert not (tmp_path / "state" / "audit").exists()


# ---- real daemons -------------------------------------------------------------------


async def command(site: LiveSite) -> tuple[int, dict[str, object], str]:
    """`fedctl site forget-round` in a process of its own: exit code, its object, its stderr."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "daemon.fedctl", "site", "forget-round", "--yes", "--json"),
        *("--config", str(site.folder / "fedd.toml")),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode or 0, json.loads(out), err.decode()


@pytest.mark.federation
@pytest.mark.slow
async def test_a_site_with_an_absurd_or_damaged_round_takes_part_again(tmp_path: Path) -> None:
    async with LiveFederation.start(tmp_path, ["elm", "fir", "oak"]) as live:
        await live.ingest_all()
        await live.train("fir", rounds=1)
        elm = live.sites["elm"]
        code, told, _ = await command(elm)
        assert code == 1
        assert f"another fedd (process {elm.process.pid}) uses the state folder" in str(told)
        first = (await elm.rounds())[0].certificate
        booked = (await elm.privacy()).updates_bare
        assert booked == 1

        await elm.terminate()
        path = elm.folder / "state" / "state.sqlite3"
        with closing(Store(path)) as store:
            store.persist(absurd(1, first.body.model_digest), ())
        kept = elm.folder / "state" / "kept" / "2-0.npy"
        kept.write_bytes(b"integers of an update")
        code, told, _ = await command(elm)
        assert (code, told) == (
            0,
            {"model": "retriever", "round": 2, "state_dir": str(path.parent)},
        )
        assert not kept.exists()
        await goes_on(live, 2)

        await live.sites["elm"].terminate()
        change(path, "state = x'ff'")
        elm = await live.launch("elm")
        assert await asyncio.wait_for(elm.process.wait(), 60) == 2
        assert "`fedctl site forget-round` forgets it and keeps the history" in elm.log
        code, told, said = await command(elm)
        assert (code, told["round"], said) == (0, 3, "")
        await goes_on(live, 3)

        elm = live.sites["elm"]
        assert (await elm.privacy()).updates_bare == booked + 2, "the ledger goes on"
        log = list(entries(segments(elm.folder / "state" / "audit")))
        told_of = [
            (entry["outcome"], entry["objects"], entry["actor"])
            for entry in log
            if entry["action"] == "forget-round"
        ]
        who = f"uid:{os.getuid()}"
        assert told_of == [
            ("begun", {"what": "all"}, who),
            ("done", {"what": "all", "round": 2}, who),
            ("begun", {"what": "all"}, who),
            ("done", {"what": "all", "round": 3}, who),
        ]

        for site in live.sites.values():
            assert not any("lacks" in one for one in (await site.status()).warnings), site.id
        await elm.terminate()
        for left in (elm.folder / "state").glob("privacy.sqlite3*"):
            left.unlink()
        elm = await live.launch("elm")
        await live.until_connected()
        lacking = "this site's record of what it spent lacks rounds 1 to 3, in which it took part"
        assert any(lacking in one for one in (await elm.status()).warnings)


async def goes_on(live: LiveFederation, round_: int) -> None:
    """The site starts again, and its update is in the next round, at whose end all agree."""
    await live.launch("elm")
    await live.until_connected()
    await live.train("oak", rounds=1)
    histories = [
        [one.certificate.body.model_digest for one in await site.rounds()]
        for site in live.sites.values()
    ]
    assert [len(history) for history in histories] == [round_] * 3
    assert histories.count(histories[0]) == 3
    last = (await live.sites["elm"].rounds())[-1].certificate
    assert list(last.body.contributors) == ["elm", "fir", "oak"]
