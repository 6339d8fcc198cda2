"""A broken audit log: the daemon goes on with it, says so, and a person acknowledges it."""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split

import asyncio
import io
import json
import os
import pwd
import re
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from daemon.fedctl.main import main
from daemon.state import audit as audit_module
from daemon.state.audit import AuditLog
from daemon.state.audit_format import (
    BROKEN,
    HEAD_FILE,
    AuditError,
    Break,
    Chain,
    segment,
    segments,
    walk,
)
from proto import control_pb2 as control
from tests.daemon.state.test_audit import (
    FORGERIES,
    Forge,
    alter,
    folder,
    from_another_log,
    no_space_after,
    opened,
    read,
    remove,
    reorder,
    repeat,
    spoil,
    written,
)
from tests.support.canned_daemon import canned_daemon
from tests.support.federation import LiveFederation, LiveSite

__all__ = ["folder"]  # a fixture


# ---- it is gone on with -------------------------------------------------------------------


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


@pytest.mark.slow
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
        lines = whole.splitlines(keepends=True)
        segment(folder, 1).write_bytes(b"".join([*lines[:line], *lines[line + 1 :]]))
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


def terminal(typed: str) -> io.StringIO:
    """A person at a terminal who types that."""
    stdin = io.StringIO(typed)
    stdin.isatty = lambda: True  # type: ignore[method-assign]
    return stdin


def test_acknowledging_shows_what_is_looked_at_and_asks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
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
        monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
        assert main(acknowledge) == 2, "no terminal"
        told = capsys.readouterr().err
        assert "line 4: altered\N{REPLACEMENT CHARACTER}[31m (and 2 more); entry 9" in told
        assert "Add --yes" in told
        monkeypatch.setattr("sys.stdin", terminal("n\n"))
        assert main(acknowledge) == 1
        assert "nothing was acknowledged" in capsys.readouterr().err
        assert not [one for one in daemon.asked if hasattr(one, "entries")]
        monkeypatch.setattr("sys.stdin", terminal("y\n"))
        assert main(acknowledge) == 0
        shown = capsys.readouterr()
        assert "Have you looked at it" in shown.err
        assert shown.out.lstrip() == (  # a blank of the prompt, where stdin is no real terminal
            "Acknowledged: audit-000001.jsonl, line 4: altered\N{REPLACEMENT CHARACTER}[31m "
            "(and 2 more); entry 9.\n"
        )
        assert main([*acknowledge, "9", "12", "--json"]) == 2
        assert "; entry 12." in capsys.readouterr().err
        assert main([*acknowledge, "9", "12", "--yes", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["breaks"][0]["entry"] == 9
        asked = [list(one.entries) for one in daemon.asked if hasattr(one, "entries")]
        assert asked == [[9], [9, 12]]
        assert main([*acknowledge, "0"]) == 2


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
async def test_a_daemon_with_a_broken_log_says_so_until_somebody_has_looked(
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
    code, _, err = await fedctl(*there, "audit", "acknowledge", "1", "--yes")
    assert (code, "waits to be acknowledged at entry 1" in err) == (2, True)
    code, out, err = await fedctl(*there, "audit", "acknowledge", "--yes", "--json")
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
