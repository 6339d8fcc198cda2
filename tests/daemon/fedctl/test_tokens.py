"""fedctl tokens as a person and a script see it."""

from __future__ import annotations

import pytest

from daemon.fedctl.terminal.output import Exit
from tests.support.canned_daemon import CannedDaemon
from tests.support.command_line import Fedctl


def test_a_token_is_shown_once_with_what_to_do(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    made = fedctl("tokens", "create", "chat", "--scope", "ask", "--scope", "search", "--days", "30")
    assert made.code == Exit.OK
    assert "hanse_told-once" in made.out
    assert "Nobody can show it again" in made.out
    (asked,) = daemon.asked
    assert (asked.name, list(asked.scopes), asked.days) == ("chat", ["ask", "search"], 30)


def test_a_script_gets_it_as_an_object(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    made = fedctl("tokens", "create", "chat", "--scope", "ask", "--json").object
    assert made["secret"] == "hanse_told-once"
    assert made["token"]["scopes"] == ["ask"]
    assert daemon.asked[0].days == 90


def test_a_token_for_nothing_is_not_made(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    assert fedctl("tokens", "create", "chat").code == Exit.USAGE
    assert fedctl("tokens", "create", "chat", "--scope", "ask", "--days", "0").code == Exit.USAGE
    assert not daemon.asked


def test_the_list_says_which_are_refused_and_why(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    shown = fedctl("tokens", "list")
    rows = {line.split()[0]: line for line in shown.out.splitlines() if line.strip()}
    assert "2026-05-31" in rows["chat"]
    assert rows["old"].rstrip().endswith("expired")
    assert rows["spare"].rstrip().endswith("revoked 1970-01-02")
    assert "never" in rows["spare"]
    assert len(fedctl("tokens", "list", "--json").object["tokens"]) == 3


def test_a_token_is_revoked_by_its_name(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    assert "chat" in fedctl("tokens", "revoke", "chat").out
    assert daemon.asked[0].name == "chat"
    assert fedctl("tokens", "revoke", "chat", "--json").object["name"] == "chat"


@pytest.mark.parametrize("words", [("create", "chat", "--scope", "ask"), ("revoke", "chat")])
def test_what_the_daemon_refuses_is_told(
    fedctl: Fedctl, daemon: CannedDaemon, words: tuple[str, ...]
) -> None:
    daemon.refusal = "there is a token 'chat' already\nchoose another name"
    told = fedctl("tokens", *words)
    assert told.code == Exit.FAILED
    assert "there is a token 'chat' already. choose another name." in told.err


def test_what_a_token_may_ask_of_is_said_in_words(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    everything = fedctl("tokens", "create", "chat", "--scope", "ask").out
    assert "all of the site" in everything
    some = (
        "tokens",
        "create",
        "clerk",
        "--scope",
        "ask",
        "--collection",
        "hr/",
        "--collection",
        "x",
    )
    assert "documents  hr, x" in fedctl(*some).out
    assert list(daemon.asked[-1].collections) == ["hr", "x"]
    told = fedctl(*some, "--json").object["token"]
    assert (told["collections"], told["all_documents"]) == (["hr", "x"], False)
    plain = fedctl("tokens", "create", "chat", "--scope", "ask", "--json").object["token"]
    assert (plain["collections"], plain["all_documents"]) == ([], True)


def test_a_collection_that_is_not_there_yet_may_be_named(
    fedctl: Fedctl, daemon: CannedDaemon
) -> None:
    made = fedctl("tokens", "create", "clerk", "--scope", "ask", "--collection", "later")
    assert made.code == Exit.OK
    assert "Nothing is in later yet" in made.out
    changed = fedctl("tokens", "change", "clerk", "--collection", "later")
    assert "Nothing is in later yet" in changed.out


@pytest.mark.parametrize("name", ["", "/", "x" * 101])
def test_no_name_of_a_collection_is_not_taken_for_all(
    fedctl: Fedctl, daemon: CannedDaemon, name: str
) -> None:
    made = fedctl("tokens", "create", "clerk", "--scope", "ask", "--collection", name)
    assert made.code == Exit.USAGE
    assert not daemon.asked


def test_rights_are_changed_by_name(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    said = fedctl("tokens", "change", "clerk", "--collection", "hr", "--scope", "search").out
    assert "documents  hr" in said
    (asked,) = daemon.asked
    assert (list(asked.collections), asked.all_documents) == (["hr"], False)
    assert list(asked.scopes) == ["search"]
    assert "all of the site" in fedctl("tokens", "change", "clerk", "--all-documents").out
    assert daemon.asked[1].all_documents


def test_the_list_says_of_which_documents(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    shown = fedctl("tokens", "list").out
    rows = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert "all of the site" in rows["chat"]
    assert " hr " in rows["spare"]


def test_the_list_says_who_signs_in_elsewhere_and_with_which_keys(
    fedctl: Fedctl, daemon: CannedDaemon
) -> None:
    shown = fedctl("tokens", "list").out
    for one in ("https://sso.example", "oidc:clinic:…", "2026-a, 2026-b", "token:chat:…"):
        assert one in shown
    assert "oidc:clinic:ann" in shown
    assert "Nobody who signs in elsewhere" not in shown
    daemon.people_fault = "keys.json: no such file"
    assert "is let in: keys.json: no such file" in fedctl("tokens", "list").out


def test_a_person_is_blocked_by_the_name_in_the_audit_log(
    fedctl: Fedctl, daemon: CannedDaemon
) -> None:
    assert "blocked" in fedctl("tokens", "block", "oidc:clinic:ann").out
    told = fedctl("tokens", "block", "token:chat:u-1", "--undo", "--json").object
    assert told == {"person": "token:chat:u-1", "blocked": False}
    assert [(one.name, one.undo) for one in daemon.asked] == [
        ("oidc:clinic:ann", False),
        ("token:chat:u-1", True),
    ]
