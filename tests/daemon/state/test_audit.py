"""The audit log: what is in it, what crashes and full disks do to it, and ways to forge it."""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split

import ast
import asyncio
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, get_args

import pytest
from google.protobuf.message import Message

from daemon.fedctl.main import main
from daemon.rounds.audited import AuditedInbox, AuditedTransport
from daemon.state import audit as audit_module
from daemon.state.audit import SEVERAL, Action, AuditLog
from daemon.state.audit_format import (
    BROKEN,
    TORN,
    AuditError,
    Break,
    Chain,
    segment,
    segments,
)
from peers.link.servicer import Admission
from peers.link.transport import Transport
from peers.wire.errors import PeerRefused, PeerUnreachable
from proto import federation_pb2 as pb
from tests.daemon.state.entries import entries
from tests.support.authority import Federation
from tests.support.loopback import CONTEXT, QUICK, UPDATE, VERSION, KeepsAll, running

START = datetime(2026, 3, 1, 12, tzinfo=UTC)


class Clock:
    """A minute for every entry."""

    def __init__(self) -> None:
        self.minutes = 0

    def __call__(self) -> datetime:
        self.minutes += 1
        return START + timedelta(minutes=self.minutes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state" / "audit"


def opened(folder: Path, **options: Any) -> AuditLog:
    return AuditLog(folder, now=Clock(), **options)


def written(folder: Path, count: int, **options: Any) -> AuditLog:
    log = opened(folder, **options)
    for number in range(count):
        log.write("uid:1000", "ask", "answered", citations=number)
    return log


def read(folder: Path) -> list[dict[str, Any]]:
    return list(entries(segments(folder)))


def told(folder: Path) -> list[tuple[str, str, str]]:
    return [(entry["actor"], entry["action"], entry["outcome"]) for entry in read(folder)]


# ---- what is written -------------------------------------------------------------


def test_entries_follow_one_another_and_nobody_else_may_read_them(folder: Path) -> None:
    log = written(folder, 3)
    found = read(folder)
    assert [entry["seq"] for entry in found] == [1, 2, 3]
    assert [entry["previous"] for entry in found[1:]] == [entry["hash"] for entry in found[:-1]]
    assert log.head == (3, bytes.fromhex(found[-1]["hash"]))
    assert found[0] == {
        "seq": 1,
        "time": "2026-03-01T12:01:00.000+00:00",
        "actor": "uid:1000",
        "action": "ask",
        "outcome": "answered",
        "objects": {"citations": 0},
        "previous": "00" * 32,
        "hash": found[0]["hash"],
    }
    assert stat.S_IMODE(segment(folder, 1).stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_an_entry_is_on_the_disk_when_it_is_recorded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, synced = opened(folder), []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    log.write("uid:0", "train", "begun")
    assert synced == [segment(folder, 1).stat().st_size]


@pytest.mark.slow
async def test_the_event_loop_does_not_wait_for_the_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    log, ticks = opened(folder), 0
    monkeypatch.setattr(os, "fsync", lambda _fd: time.sleep(0.3))
    recording = asyncio.create_task(log.record("uid:0", "train", "begun"))
    while not recording.done():
        await asyncio.sleep(0.01)
        ticks += 1
    assert ticks > 5


def test_the_chain_goes_on_over_segments_and_restarts(folder: Path) -> None:
    written(folder, 10, segment_bytes=1000).close()
    written(folder, 10, segment_bytes=1000).close()
    assert len(segments(folder)) > 4
    assert [entry["seq"] for entry in read(folder)] == list(range(1, 21))
    # old segments may be kept elsewhere; then what is here begins in the middle
    chain = Chain()
    assert len(list(entries(segments(folder)[2:], chain))) == 21 - chain.first > 0


def test_a_missing_segment_is_missed(folder: Path) -> None:
    written(folder, 10, segment_bytes=1000).close()
    segments(folder)[1].unlink()
    with pytest.raises(Break, match=r"audit-000002.jsonl, line 1: it is missing: put it back"):
        read(folder)


# ---- what crashes and disks do ------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 2, 70, 200])
def test_a_torn_last_line_is_kept_and_accounted_for(folder: Path, cut: int) -> None:
    written(folder, 3).close()
    path = segment(folder, 1)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    with pytest.raises(Break) as error:
        read(folder)
    assert error.value.line == 3
    log = written(folder, 1)
    assert path.read_bytes().startswith(whole[:-cut]), "nothing is dropped"
    chain = Chain()
    found = list(entries([path], chain))
    if cut == 1:  # only the line's end was missing
        assert [entry["seq"] for entry in found] == [1, 2, 3, 4]
        assert chain.torn == []
    else:
        assert [entry["action"] for entry in found] == ["ask", "ask", "torn-line-found", "ask"]
        assert chain.torn == ["audit-000001.jsonl, line 3"]
        assert found[2]["objects"]["bytes"] == len(whole.splitlines()[2]) + 1 - cut
    assert log.head[0] == 4


def test_a_line_whose_first_page_was_lost_is_torn_too(folder: Path) -> None:
    written(folder, 3).close()
    path = segment(folder, 1)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + bytes(100) + lines[2][100:])
    written(folder, 1)
    assert [action for _, action, _ in told(folder)] == ["ask", "ask", "torn-line-found", "ask"]


def test_a_crash_while_the_torn_line_is_accounted_for(folder: Path) -> None:
    written(folder, 2).close()
    path = segment(folder, 1)
    path.write_bytes(path.read_bytes()[:-20] + b'\n{"seq":2,"time":')
    written(folder, 1)
    assert [action for _, action, _ in told(folder)] == ["ask", "torn-line-found", "ask"]


def test_a_segment_that_was_only_begun(folder: Path) -> None:
    written(folder, 2).close()
    segment(folder, 2).touch()
    written(folder, 1)
    assert [entry["seq"] for entry in read(folder)] == [1, 2, 3]


async def test_a_full_disk_refuses_deeds_and_owes_questions(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = written(folder, 1)
    monkeypatch.setattr(audit_module, "_PAUSE_S", 0.0)
    with monkeypatch.context() as full:
        full.setattr(audit_module, "_write_all", no_space_after(40))
        for _ in range(2):
            with pytest.raises(AuditError, match=r"No space left.*free or repair the disk"):
                await log.record("uid:1000", "train", "begun")
        for _ in range(3):
            await log.record_or_owe("uid:1001", "ask", "answered", citations=1)
        assert "No space left" in log.trouble
    await log.record("uid:1000", "train", "begun")
    assert log.trouble == ""
    late = "done while the log could not be written"
    assert told(folder) == [
        ("uid:1000", "ask", "answered"),
        ("fedd", "torn-line-found", "kept"),
        ("uid:1001", "ask", late),
        ("uid:1000", "train", "begun"),
    ]
    assert read(folder)[2]["objects"] == {"times": 3}


def no_space_after(room: int) -> Callable[[Any, bytes], None]:
    """A disk that takes ``room`` bytes of one line and is full."""
    left = [room]

    def write(file: Any, line: bytes) -> None:
        file.write(line[: left[0]])
        left[0] = 0
        raise OSError(28, "No space left on device")

    return write


# ---- forging it ------------------------------------------------------------------------

Forge = Callable[[list[bytes]], list[bytes]]


def alter(lines: list[bytes]) -> list[bytes]:
    return [*lines[:3], lines[3].replace(b"uid:1000", b"uid:1001"), *lines[4:]]


def remove(lines: list[bytes]) -> list[bytes]:
    return [*lines[:3], *lines[4:]]


def reorder(lines: list[bytes]) -> list[bytes]:
    return [*lines[:3], lines[4], lines[3], *lines[5:]]


def repeat(lines: list[bytes]) -> list[bytes]:
    return [*lines[:3], lines[2], *lines[3:]]


def spoil(lines: list[bytes]) -> list[bytes]:
    return [*lines[:3], b"nothing to see here\n", *lines[4:]]


def from_another_log(lines: list[bytes]) -> list[bytes]:
    return [*lines[:3], lines[3].replace(lines[3][-67:-3], b"0" * 64), *lines[4:]]


FORGERIES: list[Forge] = [alter, remove, reorder, repeat, spoil, from_another_log]


@pytest.mark.parametrize("forge", FORGERIES, ids=[forge.__name__ for forge in FORGERIES])
def test_the_first_line_that_was_forged_is_named(
    folder: Path, forge: Forge, capsys: pytest.CaptureFixture[str]
) -> None:
    written(folder, 8).close()
    path = segment(folder, 1)
    path.write_bytes(b"".join(forge(path.read_bytes().splitlines(keepends=True))))
    assert main(["audit", "verify", "--state-dir", str(folder.parent)]) == 1
    assert f"{path}, line 4: " in capsys.readouterr().err
    assert main(["audit", "verify", str(path)]) == 1


def test_an_end_that_was_cut_off_shows_against_a_noted_head(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = written(folder, 8)
    noted = log.head[1].hex()
    verify = ["audit", "verify", "--json", "--state-dir", str(folder.parent)]
    assert main([*verify, "--head", noted]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "entries": 8,
        "first": 1,
        "head": noted,
        "torn": [],
        "noted_head_found": True,
        "breaks": [],
    }
    path = segment(folder, 1)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:6]))
    assert main(verify) == 0, "nothing in the log itself can tell"
    assert main([*verify, "--head", noted]) == 1
    assert "the head that was noted is not in the log" in capsys.readouterr().err
    assert main([*verify, "--head", "12"]) == 2


def test_a_log_that_was_written_anew_does_not_have_the_noted_head(folder: Path) -> None:
    noted = written(folder, 8).head[1].hex()
    segment(folder, 1).unlink()
    log = opened(folder)
    for number in range(9):
        log.write("uid:1000", "ask", "answered", citations=number + 1)
    verify = ["audit", "verify", "--state-dir", str(folder.parent)]
    assert main(verify) == 0
    assert main([*verify, "--head", noted]) == 1


# ---- what its documentation says ---------------------------------------------------------

ROOT = Path(__file__).parents[3]
WRITERS = {
    "record",
    "record_or_owe",
    "write",
    "_record",
    "_audited",
}  # (actor or context, action, ...)


def actions_in(source: str) -> Iterator[str]:
    """The literal actions of all calls that write entries, in a callback's arguments, too."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call):
            continue
        parts = [call.func, *call.args]
        for place, part in enumerate(parts[:-2]):
            if isinstance(part, ast.Attribute) and part.attr in WRITERS:
                action = parts[place + 2]
                if isinstance(action, ast.Constant) and isinstance(action.value, str):
                    yield action.value
            # Whose token is turned down is audited, too: of(context, scope, action).
            if isinstance(part, ast.Attribute) and part.attr == "of" and len(parts) == place + 4:
                action = parts[place + 3]
                if isinstance(action, ast.Constant) and isinstance(action.value, str):
                    yield action.value


@pytest.mark.slow
def test_the_actions_that_are_written_are_those_that_the_type_allows() -> None:
    """The type checker refuses others, also where an action is handed on as an argument."""
    sources = (ROOT / "daemon").rglob("*.py")
    assert {name for path in sources for name in actions_in(path.read_text())} == set(
        get_args(Action)
    )


def test_every_action_has_a_row_in_the_documentation() -> None:
    text = (ROOT / "docs/fedctl.md").read_text()
    table = text.partition("| action | actor |")[2].partition("\n\n")[0]
    first = [row.split("|")[1] for row in table.splitlines()[2:]]
    documented = {name for cell in first for name in re.findall(r"`([\w-]+)`", cell)}
    assert documented == {*get_args(Action), TORN, BROKEN}
    assert f"`{SEVERAL}`" in text


# ---- looking at it ------------------------------------------------------------------------


def test_show_filters_by_time_and_actor(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = written(folder, 2)
    log.write("site:birch", "pull", "served", kind="model_version", digest="ab" * 32, bytes=5)
    show = ["audit", "show", "--state-dir", str(folder.parent)]
    assert main([*show, "--json", "--actor", "site:birch"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert json.loads(line)["objects"] == {"kind": "model_version", "digest": "ab" * 32, "bytes": 5}
    assert main([*show, "--json", "--since", "2026-03-01T12:02Z"]) == 0
    assert [json.loads(line)["seq"] for line in capsys.readouterr().out.splitlines()] == [2, 3]
    assert main(show) == 0
    assert "digest abababababab" in capsys.readouterr().out
    assert main([*show, "--since", "yesterday"]) == 2


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_filter_that_nothing_passes_is_told_beside_the_result(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    written(folder, 2)
    show = ["audit", "show", "--state-dir", str(folder.parent), "--actor", "foo", *options]
    assert main(show) == 0
    assert capsys.readouterr() == ("", "No entry matches.\n")


def test_head_without_a_daemon(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = written(folder, 2).head[1].hex()
    assert main(["audit", "head", "--state-dir", str(folder.parent)]) == 0
    assert capsys.readouterr().out == f"2 {head}\n"


def test_no_log_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "verify", "--state-dir", str(tmp_path)]) == 2
    assert "no audit log in" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["show", "verify"])
def test_a_socket_names_no_log(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    """The log of the usual folder would be another site's, perhaps; the help says why."""
    written(folder, 2)
    asked = ["audit", command, "--socket", str(folder / "fedd.sock")]
    assert main(asked) == 2
    assert "a socket names none. Name the daemon's folder" in capsys.readouterr().err
    assert main([*asked, "--state-dir", str(folder.parent)]) == 0
    monkeypatch.setenv("HANSE_SOCKET", str(folder / "fedd.sock"))
    assert main(["audit", command, "--state-dir", str(folder.parent)]) == 0
    assert main(["audit", command, "--help"]) == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "neither --socket nor HANSE_SOCKET names any" in said


# ---- what peers do ---------------------------------------------------------------------------


async def test_what_peers_get_and_give_is_recorded_without_its_content(folder: Path) -> None:
    from peers.wire.frames import ReceivedObject

    inbox = KeepsAll(shelf={pb.MODEL_VERSION: b"the weights"})
    witnessed = AuditedInbox(inbox, opened(folder), "med")
    assert await witnessed.source("birch", VERSION) == b"the weights"
    await witnessed.blob("cedar", CONTEXT, ReceivedObject(3, bytes(32), data=b"key"))
    with pytest.raises(PeerRefused):
        await witnessed.source("birch", UPDATE)
    first, second = read(folder)
    assert (first["actor"], first["action"], first["outcome"]) == ("site:birch", "pull", "served")
    assert first["objects"] == {"kind": "model_version", "digest": "00" * 32, "bytes": 11}
    assert (second["actor"], second["action"]) == ("site:cedar", "push")
    assert second["objects"]["bytes"] == 3
    assert b"weights" not in segment(folder, 1).read_bytes()


async def test_what_cannot_be_recorded_is_not_given_away(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox = KeepsAll(shelf={pb.MODEL_VERSION: b"the weights"})
    witnessed = AuditedInbox(inbox, opened(folder), "med")
    monkeypatch.setattr(audit_module, "_write_all", no_space_after(0))
    assert witnessed.accepts("birch", UPDATE, 1) is None
    with pytest.raises(PeerRefused, match="audit log"):
        await witnessed.source("birch", VERSION)
    assert "audit log" in str(witnessed.accepts("birch", UPDATE, 1))


# ---- what leaves ------------------------------------------------------------------------------


async def test_votes_plans_and_updates_are_recorded_before_they_leave(
    folder: Path, tmp_path: Path
) -> None:
    federation = Federation.found(tmp_path, "alpha", "beta")
    beside = federation.root / "spool" / "alpha"
    async with running(federation, "beta") as beta:
        transport = Transport(
            Admission(federation.identity("alpha"), federation.trust, federation.manifest()),
            federation.address("alpha"),
            beside,
            {"med": KeepsAll()},
            options=QUICK,
        )
        alpha = AuditedTransport(transport, opened(folder), "med")
        await transport.start()
        try:
            answer = pb.PlanAnswer(round=1, attempt=2, accepted=False, reason="no pairs")
            for _ in range(2):  # what is sent again is one deed
                await alpha.push("beta", UPDATE, b"ciphertext")
            await alpha.send("beta", enveloped(plan_answer=answer))
            for _ in range(2):
                await alpha.send("beta", enveloped(commit=committed_by("alpha", "beta")))
        finally:
            await transport.stop(grace=0)
        assert len(beta.inbox.messages) == 3
    found = read(folder)
    assert told(folder) == [
        ("fedd", "send", "begun"),
        ("fedd", "plan", "declined"),
        ("fedd", "vote", "given"),
    ]
    assert found[0]["objects"] == {
        "kind": "encrypted_update",
        "round": 1,
        "attempt": 0,
        "to": "beta",
        "bytes": 10,
    }
    assert found[1]["objects"]["coordinator"] == "beta"
    assert found[2]["objects"] == {"round": 3, "attempt": 1, "digest": "02" * 32}


@pytest.mark.slow
async def test_what_this_site_signs_is_recorded_before_it_leaves_and_once(
    folder: Path, tmp_path: Path
) -> None:
    """As a participant in messages of its own; as the coordinator in what it carries."""
    federation = Federation.found(tmp_path, "alpha", "beta")
    told_of = pb.Contribution(
        plan_digest=bytes(32), scale_digest=bytes(32), upload_digest=b"u" * 32
    )
    contribution = signed_by("alpha", told_of)
    statement = pb.Statement(round=1, attempt=2, kind=pb.SUM, contributions=[contribution])
    raw = statement.SerializeToString(deterministic=True)
    digest = hashlib.sha256(raw).digest()
    applied = signed_by("alpha", pb.Applied(root_digest=digest, model_digest=b"m" * 32))
    signature = pb.Signature(site="alpha", signature=b"s", certificate=b"c")
    certificate = pb.StatementCertificate(statement=raw, signatures=[signature])
    at = {"round": 1, "attempt": 2}
    declined = pb.Promise(round=1, attempt=2, willing=False, reason="too little noise")
    promised = pb.Promised(promise=signed_by("alpha", declined))
    bodies: list[dict[str, Any]] = [
        {"promised": promised},
        {"promised": promised},
        {"contributed": pb.Contributed(**at, contribution=contribution)},
        {"state": pb.State(**at, statement=raw)},
        {"stated": pb.Stated(**at, statement_digest=digest, signature=signature)},
        {"certified": pb.Certified(**at, certificate=certificate)},
        {"applied": pb.AppliedSum(**at, applied=applied)},
        {"proven": pb.Proven(**at, lock=pb.Lock(certificate=certificate, proof=[applied]))},
    ]
    transport = Transport(
        Admission(federation.identity("alpha"), federation.trust, federation.manifest()),
        federation.address("alpha"),
        federation.root / "spool" / "alpha",
        {"med": KeepsAll()},
        options=QUICK,
    )
    alpha = AuditedTransport(
        transport, opened(folder), "med", statements=lambda: [pb.Signed(body=raw, site="alpha")]
    )
    await transport.start()
    try:
        for body in bodies:  # beta does not answer: what is said is in the log all the same
            with pytest.raises(PeerUnreachable):
                await alpha.send("beta", enveloped(**body))
    finally:
        await transport.stop(grace=0)
    assert told(folder) == [
        ("fedd", "plan", "declined"),
        ("fedd", "contribution", "signed"),
        ("fedd", "statement", "signed"),
        ("fedd", "applied", "signed"),
    ]
    why, first, second, third = (entry["objects"] for entry in read(folder))
    assert why == {**at, "reason": "too little noise"}
    assert first == {**at, "digest": (b"u" * 32).hex()}
    assert second == {**at, "digest": digest.hex(), "kind": "sum", "contributors": ["alpha"]}
    assert third == {**at, "statement": digest.hex(), "digest": (b"m" * 32).hex()}


def signed_by(site: str, message: Message) -> pb.Signed:
    body = message.SerializeToString(deterministic=True)
    return pb.Signed(body=body, site=site, signature=b"s", certificate=b"c")


def enveloped(**body: Any) -> pb.Envelope:
    return pb.Envelope(federation_id="med", sender="alpha", manifest_version=1, **body)


def committed_by(*sites: str) -> pb.Commit:
    body = pb.VoteBody(
        federation_id="med",
        round=3,
        parent_digest=b"\1" * 32,
        model_digest=b"\2" * 32,
        contributors=sites,
        manifest_version=1,
        plan_digest=bytes(32),
    )
    votes = [pb.Vote(attempt=1, site=s, signature=b"s", certificate=b"c") for s in sites]
    return pb.Commit(certificate=pb.Certificate(attempt=1, body=body, votes=votes))
