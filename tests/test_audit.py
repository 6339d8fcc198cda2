"""The audit log: what is in it, what crashes and full disks do to it, and ways to forge it."""

from __future__ import annotations

import peers.tls_floor  # noqa: F401  before anything imports grpc

# isort: split

import ast
import asyncio
import json
import os
import pwd
import re
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, get_args

import grpc.aio
import pytest

from daemon import audit as audit_module
from daemon.audit import SEVERAL, Action, AuditLog
from daemon.audit_chain import (
    BROKEN,
    HEAD_FILE,
    TORN,
    AuditError,
    Break,
    Chain,
    entries,
    segment,
    segments,
    walk,
)
from daemon.fedctl import main
from daemon.witness import WitnessedInbox, WitnessedTransport
from peers.errors import PeerRefused
from proto import control_pb2 as control
from proto import federation_pb2 as pb
from tests.authority import Federation
from tests.canned_daemon import canned_daemon
from tests.federation import LiveFederation, LiveSite
from tests.loopback import CONTEXT, QUICK, UPDATE, VERSION, KeepsAll, running

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


# ---- a broken log ------------------------------------------------------------------------


def reopened(folder: Path, **options: Any) -> AuditLog:
    """Opened as the daemon does, with the head noted beside the folder."""
    return opened(folder, head_file=folder.with_name(HEAD_FILE), **options)


def rewrite(folder: Path, forge: Forge, number: int = 1) -> None:
    path = segment(folder, number)
    path.write_bytes(b"".join(forge(path.read_bytes().splitlines(keepends=True))))


def cut(lines: list[bytes]) -> list[bytes]:
    return lines[:5]


def tear(lines: list[bytes]) -> list[bytes]:
    return [*lines[:7], lines[7][:40]]


def alter_the_last(lines: list[bytes]) -> list[bytes]:
    return [*lines[:7], lines[7].replace(b"uid:1000", b"uid:1001")]


def remove_all(_lines: list[bytes]) -> list[bytes]:
    return []


# Where each is found, with a head noted beside the log: (line, why).
BREAKS = {
    alter: (4, "altered"),
    remove: (4, "entry 5 does not follow entry 3"),
    reorder: (4, "entry 5 does not follow entry 3"),
    repeat: (4, "entry 3 does not follow entry 3"),
    spoil: (4, "this is no entry"),
    from_another_log: (4, "altered"),
    alter_the_last: (8, "altered"),
    cut: (6, "the log went on to entry 8: its end was cut off"),
    tear: (8, "the log went on to entry 8: its end was cut off"),
    remove_all: (1, "the log went on to entry 8: its end was cut off"),
}


@pytest.mark.parametrize("forge", BREAKS, ids=[forge.__name__ for forge in BREAKS])
def test_a_broken_log_is_gone_on_with_and_stays_broken(
    folder: Path, forge: Forge, capsys: pytest.CaptureFixture[str]
) -> None:
    """Noticed when it is opened, recorded once, shown for ever."""
    line, why = BREAKS[forge]
    log = written(folder, 8, head_file=folder.with_name(HEAD_FILE))
    old_head = log.head[1].hex()
    log.close()
    rewrite(folder, forge)
    log = reopened(folder)
    [record] = log.broken
    assert (record.file, record.line, record.head) == ("audit-000001.jsonl", line, old_head)
    assert re.search(why, record.why)
    assert log.head[0] == record.entry == 9, "numbers are not used twice"
    assert "the audit log is broken" in capsys.readouterr().out
    log.write("uid:1000", "ask", "answered", citations=1)
    log.close()
    for _ in range(2):  # neither is it recorded once more
        log = reopened(folder)
        assert [one.entry for one in log.broken] == [9]
        assert "the audit log is broken" in capsys.readouterr().out
        assert log.head[0] == 10
    verify = ["audit", "verify", "--json", "--state-dir", str(folder.parent)]
    assert main(verify) == 1
    told = capsys.readouterr().err
    assert f"audit-000001.jsonl, line {line}: " in told
    assert "`fedctl audit acknowledge`" in told
    log.write("uid:1000", "acknowledge", "done", breaks=[9], user="anna")
    assert log.broken == []
    log.close()
    assert reopened(folder).broken == []
    capsys.readouterr()
    assert main(verify) == 3
    [shown] = json.loads(capsys.readouterr().out)["breaks"]
    assert (shown["entry"], shown["line"], shown["head"]) == (9, line, old_head)
    assert shown["acknowledged_by"] == "uid:1000 (anna)"
    assert main(["audit", "verify", str(segment(folder, 1))]) == 3
    assert "acknowledged by uid:1000 (anna)" in capsys.readouterr().out
    with pytest.raises(Break):  # whoever reads it strictly stops there, recorded or not
        read(folder)


@pytest.mark.parametrize("forge", FORGERIES, ids=[forge.__name__ for forge in FORGERIES])
def test_a_break_that_was_acknowledged_does_not_cover_another_one(
    folder: Path, forge: Forge, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not behind it, not before it, not at the same place once more."""
    written(folder, 8).close()
    rewrite(folder, forge)
    log = reopened(folder)
    log.write("uid:1000", "acknowledge", "done", breaks=[log.broken[0].entry])
    log.close()
    whole = segment(folder, 1).read_bytes()
    verify = ["audit", "verify", "--state-dir", str(folder.parent)]
    assert main(verify) == 3
    for line in range(len(whole.splitlines())):
        rewrite(folder, lambda lines, line=line: [*lines[:line], *lines[line + 1 :]])
        assert main(verify) == 1, f"without line {line + 1}"
        segment(folder, 1).write_bytes(whole)
    rewrite(folder, lambda lines: [*lines[:3], lines[3].replace(b"e", b"a"), *lines[4:]])
    capsys.readouterr()
    assert main(verify) == 1
    log = reopened(folder)
    assert len(log.broken) == 1
    assert main(verify) == 1


def test_a_log_that_was_written_anew_is_noticed_at_the_next_start(folder: Path) -> None:
    written(folder, 8, head_file=folder.with_name(HEAD_FILE)).close()
    segment(folder, 1).unlink()
    log = opened(folder)  # by somebody who leaves the noted head alone
    for number in range(12):
        log.write("uid:1000", "ask", "answered", citations=number + 1)
    log.close()
    assert main(["audit", "verify", "--state-dir", str(folder.parent)]) == 1
    log = reopened(folder)
    assert [one.why for one in log.broken] == [
        "entry 8 is not the one that was written: the log was written anew"
    ]
    assert log.head[0] == 13
    log.close()
    assert len(reopened(folder).broken) == 1


def test_breaks_in_old_segments_are_found_and_recorded_together(folder: Path) -> None:
    options = {"segment_bytes": 1000, "head_file": folder.with_name(HEAD_FILE)}
    written(folder, 20, **options).close()
    assert len(segments(folder)) > 5
    rewrite(folder, lambda lines: [lines[0].replace(b"uid:1000", b"uid:1001"), *lines[1:]], 2)
    segment(folder, 4).unlink()
    log = opened(folder, **options)
    [record] = log.broken
    assert (record.file, record.line, record.breaks) == ("audit-000002.jsonl", 1, 2)
    log.write("uid:1000", "acknowledge", "done", breaks=[record.entry])
    log.close()
    segment(folder, 4).write_bytes(b"")
    assert opened(folder, **options).broken == [], "put back empty, nothing has changed"


def test_a_head_noted_before_a_power_cut_is_an_older_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The entries are synced, the note is not: an older note, or none, or half of one."""
    log = written(folder, 3, head_file=folder.with_name(HEAD_FILE))
    older = folder.with_name(HEAD_FILE).read_bytes()
    assert stat.S_IMODE(folder.with_name(HEAD_FILE).stat().st_mode) == 0o600
    log.write("uid:1000", "ask", "answered")
    log.close()
    for noted in (older, b"", older[:20]):
        folder.with_name(HEAD_FILE).write_bytes(noted)
        assert reopened(folder).broken == []
    told = capsys.readouterr().out
    assert told.count("whether the audit log lost its end is not known") == 2
    folder.with_name(HEAD_FILE).unlink()
    assert reopened(folder).broken == []


def test_a_log_that_is_broken_while_it_cannot_be_written_is_gone_on_with(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody makes room on a full disk, by emptying the log."""
    log = written(folder, 3)
    monkeypatch.setattr(audit_module, "_PAUSE_S", 0.0)
    with monkeypatch.context() as full:
        full.setattr(audit_module, "_write_all", no_space_after(0))
        with pytest.raises(AuditError, match="No space left"):
            log.write("uid:1000", "train", "begun")
    segment(folder, 1).write_bytes(b"")
    log.write("uid:1000", "train", "begun")
    assert log.trouble == ""
    assert [(one.line, one.entry) for one in log.broken] == [(1, 4)]
    assert [entry["action"] for entry in walk(segments(folder), Chain())] == [BROKEN, "train"]


def test_a_forged_record_of_a_break_does_no_harm(folder: Path) -> None:
    """Whoever can write the log may say in it what the daemon would choke on."""
    log = written(folder, 1)
    good = {"file": "f", "line": 1, "why": "w", "breaks": 1, "head": "00" * 32}
    good |= {"first": 1, "state": "00" * 32, "digests": []}
    for spoilt in (
        {"line": 1 << 70},
        {"line": "1"},
        {"head": "xy"},
        {"why": "\ud800"},
        {"why": "w" * 1000},
        {"digests": None},
        {"breaks": None},
    ):
        log._append("fedd", BROKEN, "recorded", {**good, **spoilt})
    log._append("uid:0", "acknowledge", "done", {"breaks": 7})
    log.close()
    deep = b'{"a":' + b"[" * 100_000 + b',"hash":"' + b"0" * 64 + b'"}\n'
    with segment(folder, 1).open("ab") as file:
        file.write(deep)
    log = opened(folder)
    assert [one.line for one in log.broken] == [10], "the deep one, and none of the forged"


# ---- what its documentation says ---------------------------------------------------------

ROOT = Path(__file__).parents[1]
WRITERS = {"record", "record_or_owe", "_record", "_audited"}  # (actor or context, action, ...)


def actions_in(source: str) -> Iterator[str]:
    """The literal actions of all calls that write entries, in a callback's arguments, too."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call):
            continue
        parts = [call.func, *call.args]
        for place, part in enumerate(parts[:-2]):
            if isinstance(part, ast.Attribute) and part.attr in WRITERS:
                action = parts[place + 2]
                if isinstance(action, ast.Constant):
                    yield str(action.value)


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


def test_head_without_a_daemon(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = written(folder, 2).head[1].hex()
    assert main(["audit", "head", "--state-dir", str(folder.parent)]) == 0
    assert capsys.readouterr().out == f"2 {head}\n"


def test_no_log_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "verify", "--state-dir", str(tmp_path)]) == 2
    assert "no audit log in" in capsys.readouterr().err


def test_acknowledging_names_what_was_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with canned_daemon(tmp_path / "s") as daemon:
        acknowledge = ["--socket", str(tmp_path / "s"), "audit", "acknowledge"]
        assert main(acknowledge) == 1
        assert "no break of the audit log waits to be acknowledged" in capsys.readouterr().err
        daemon.breaks = [
            control.AuditBreak(
                entry=9, file="audit-000001.jsonl", line=4, why="altered\x1b[31m", breaks=3
            )
        ]
        assert main(acknowledge) == 0
        assert capsys.readouterr().out == (
            "Acknowledged: audit-000001.jsonl, line 4: altered\N{REPLACEMENT CHARACTER}[31m "
            "(and 2 more); entry 9.\n"
        )
        assert main([*acknowledge, "9", "12", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["breaks"][0]["entry"] == 9
        asked = [list(one.entries) for one in daemon.asked if hasattr(one, "entries")]
        assert asked == [[9], [9, 12]]
        assert main([*acknowledge, "0"]) == 2


# ---- what peers do ---------------------------------------------------------------------------


async def test_what_peers_get_and_give_is_recorded_without_its_content(folder: Path) -> None:
    from peers.frames import Received

    inbox = KeepsAll(shelf={pb.MODEL_VERSION: b"the weights"})
    witnessed = WitnessedInbox(inbox, opened(folder))
    assert await witnessed.source("birch", VERSION) == b"the weights"
    await witnessed.blob("cedar", CONTEXT, Received(3, bytes(32), data=b"key"))
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
    witnessed = WitnessedInbox(inbox, opened(folder))
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
        alpha = WitnessedTransport(
            opened(folder),
            federation.identity("alpha"),
            federation.trust,
            federation.manifest(),
            federation.address("alpha"),
            beside,
            KeepsAll(),
            head_round=lambda: 0,
            terms=QUICK,
        )
        await alpha.start()
        try:
            answer = pb.PlanAnswer(round=1, attempt=2, accepted=False, reason="no pairs")
            for _ in range(2):  # what is sent again is one deed
                await alpha.push("beta", UPDATE, b"ciphertext")
            await alpha.send("beta", enveloped(plan_answer=answer))
            for _ in range(2):
                await alpha.send("beta", enveloped(commit=committed_by("alpha", "beta")))
        finally:
            await alpha.stop(grace=0)
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


# ---- a real daemon whose log was changed --------------------------------------------------------


async def fedctl(*words: str) -> tuple[int, str, str]:
    """The command as a person types it: exit code, stdout, stderr."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "daemon.fedctl"),
        *words,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


def cut_two(lines: list[bytes]) -> list[bytes]:
    return lines[:-2]


def alter_the_second(lines: list[bytes]) -> list[bytes]:
    return [lines[0], lines[1].replace(b"ask", b"vote"), *lines[2:]]


@pytest.mark.federation
async def test_a_daemon_with_a_broken_log_starts_and_says_so_until_somebody_has_looked(
    tmp_path: Path,
) -> None:
    async with LiveFederation.start(tmp_path, ["elm"], without=["fir", "oak"]) as live:
        for number, (forge, why) in enumerate(
            [(alter_the_second, "altered"), (cut_two, "its end was cut off")], start=1
        ):
            site = live.sites["elm"]
            for _ in range(3):
                await ask(site)
            assert await site.terminate() == 0
            rewrite(site.folder / "state" / "audit", forge)
            site = await live.launch("elm")
            await live.until_connected()
            await is_loud_and_then_quiet(site, number, why)


async def ask(site: LiveSite) -> None:
    question = control.AskRequest(question="who looks after the anchor winch?")
    with suppress(grpc.aio.AioRpcError):  # it has no documents, and that is in the log
        await site.stub.Ask(question, timeout=60)


async def is_loud_and_then_quiet(site: LiveSite, breaks: int, why: str) -> None:
    """The ``breaks``th break of this log, from being noticed to being acknowledged."""
    there, log = ["--socket", str(site.folder / "fedd.sock")], str(site.folder / "state")
    status = await site.status()
    [told] = status.audit_breaks
    assert why in told.why
    assert why in status.last_error
    assert [one for one in status.warnings if why in one]
    assert site.log.count("the audit log is broken") == breaks
    code, out, _ = await fedctl(*there, "status")
    assert (code, "WARNING" in out) == (0, True)
    await ask(site)
    assert (await site.status()).audit_entries > status.audit_entries, "it is gone on with"
    code, _, err = await fedctl("audit", "verify", "--state-dir", log)
    assert (code, why in err) == (1, True)
    code, _, err = await fedctl(*there, "audit", "acknowledge", "1")
    assert (code, "waits to be acknowledged at entry 1" in err) == (1, True)
    code, out, err = await fedctl(*there, "audit", "acknowledge", "--json")
    assert code == 0, err
    assert [one["entry"] for one in json.loads(out)["breaks"]] == [told.entry]
    status = await site.status()
    assert not status.audit_breaks
    assert not status.warnings
    assert status.last_error == ""
    code, out, _ = await fedctl("audit", "verify", "--state-dir", log, "--json")
    shown = json.loads(out)["breaks"]
    assert (code, len(shown)) == (3, breaks)
    user = pwd.getpwuid(os.getuid()).pw_name
    assert shown[-1]["acknowledged_by"] == f"uid:{os.getuid()} ({user})"
    code, _, err = await fedctl(*there, "audit", "acknowledge")
    assert (code, "no break of the audit log waits" in err) == (1, True)
