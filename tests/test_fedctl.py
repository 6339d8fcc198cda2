"""fedctl as a person and a script see it: command lines, what they print, how they end."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from config import settings
from daemon.fedctl import app, ingesting
from daemon.fedctl.connection import DEFAULT_SOCKET
from daemon.fedctl.output import Exit
from proto import control_pb2 as control
from tests.canned_daemon import DIGEST, CannedDaemon, canned_daemon, progress
from tests.command_line import Fedctl, Ran

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HANSE_SOCKET", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)


# ---- a federation is set up -------------------------------------------------


def test_federation_is_set_up_by_hand(
    fedctl: Fedctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    made = fedctl("ca", "init", "ca", "--federation", "trade")
    assert (made.code, made.err) == (0, "")
    assert "fedctl site init" in made.out  # what to do next
    assert stat.S_IMODE(Path("ca/ca.key").stat().st_mode) == 0o600

    asked = fedctl("site", "init", "north", "--federation", "trade", "--site", "north", "--json")
    assert asked.object == {"site": "north", "federation": "trade", "request": "north/site.csr"}
    assert stat.S_IMODE(Path("north/site.key").stat().st_mode) == 0o600

    sign = ["ca", "sign", "north/site.csr", "--ca", "ca", "--out", "out/site.crt", "--json"]
    signed = fedctl(*sign, "--site", "north", "--days", 30).object
    assert (signed["site"], signed["federation"]) == ("north", "trade")

    install = ["site", "install", "north", "--certificate", "out/site.crt"]
    installed = fedctl(*install, "--authority", "ca/ca.crt", "--json").object
    assert installed == fedctl("site", "show", "north", "--json").object
    assert installed["fingerprint_sha256"] == signed["fingerprint_sha256"]
    assert len(installed["fingerprint_sha256"].split(":")) == 32
    assert installed["days_left"] in (29, 30)
    # People compare fingerprints: it must stand there whole.
    assert installed["fingerprint_sha256"] in fedctl("site", "show", "north").out


def test_request_of_another_site_is_not_signed(fedctl: Fedctl, tmp_path: Path) -> None:
    fedctl("ca", "init", tmp_path / "ca", "--federation", "trade")
    fedctl("site", "init", tmp_path / "s", "--federation", "trade", "--site", "north")
    sign = ["ca", "sign", tmp_path / "s/site.csr", "--ca", tmp_path / "ca"]

    refused = fedctl(*sign, "--out", tmp_path / "site.crt", "--site", "south")

    assert refused.code == Exit.FAILED
    assert "'north', expected 'south'" in refused.err
    assert not (tmp_path / "site.crt").exists()


def test_authority_and_site_key_are_never_overwritten(fedctl: Fedctl, tmp_path: Path) -> None:
    authority = ["ca", "init", tmp_path / "ca", "--federation", "trade"]
    site = ["site", "init", tmp_path / "s", "--federation", "trade", "--site", "north"]
    for again, key in ((authority, tmp_path / "ca/ca.key"), (site, tmp_path / "s/site.key")):
        assert fedctl(*again).code == Exit.OK
        before = key.read_bytes()
        assert fedctl(*again).code == Exit.FAILED
        assert key.read_bytes() == before


def test_manifest_grows_and_shrinks_by_versions(fedctl: Fedctl, tmp_path: Path) -> None:
    ca, file = tmp_path / "ca", tmp_path / "manifest.json"
    fedctl("ca", "init", ca, "--federation", "trade")

    def sign(*words: object) -> Ran:
        return fedctl("manifest", "sign", "--ca", ca, "--out", file, "--json", *words)

    sites = ("--site", "south=s.example:7443", "--site", "north=10.0.0.1:7443")
    first = sign(*sites, "--site", "west=h:1", "--site", "east=h:2").object
    assert first["version"] == 1
    assert [site["id"] for site in first["sites"]] == ["east", "north", "south", "west"]  # sorted
    assert (first["faulty_sites"], first["quorum"], first["objection"]) == (1, 3, "")
    assert json.loads(file.read_text())["manifest"]["faulty_sites"] == 1

    second = sign("--previous", file, "--disable", "south", "--site", "north=10.0.0.2:1").object
    assert second["version"] == 2
    assert second["sites"][1:3] == [
        {"id": "north", "address": "10.0.0.2:1", "enabled": True},
        {"id": "south", "address": "s.example:7443", "enabled": False},
    ]

    # A moved site stays as enabled or disabled as it was.
    third = sign("--previous", file, "--site", "south=t.example:1", "--version", 7).object
    assert (third["version"], third["sites"][2]["enabled"]) == (7, False)
    words = ("--previous", file, "--enable", "south", "--remove", "north")
    fourth = sign(*words, "--before-first-round").object
    assert [site["id"] for site in fourth["sites"]] == ["east", "south", "west"]
    assert fourth["sites"][1] == {"id": "south", "address": "t.example:1", "enabled": True}

    shown = fedctl("manifest", "show", file, "--authority", ca / "ca.crt", "--json").object
    assert shown == fourth
    assert "signature good" in fedctl("manifest", "show", file, "--authority", ca / "ca.crt").out


def test_one_site_comes_or_goes_at_a_time(fedctl: Fedctl, tmp_path: Path) -> None:
    ca, file = tmp_path / "ca", tmp_path / "manifest.json"
    fedctl("ca", "init", ca, "--federation", "trade")
    sign = ["manifest", "sign", "--ca", ca, "--out", file]
    sites = [word for n, name in enumerate("nset") for word in ("--site", f"{name}=h:{n + 1}")]
    fedctl(*sign, *sites)
    before = file.read_bytes()
    two = [*sign, "--previous", file, "--disable", "s", "--site", "w=h:9"]
    refused = fedctl(*two)
    assert refused.code == Exit.USAGE
    assert "s, w would come or go at once" in refused.err
    assert "Sign the steps in between" in refused.err
    assert "--before-first-round" in refused.err
    assert file.read_bytes() == before
    assert fedctl(*sign, "--previous", file, "--site", "w=h:8", "--site", "e=h:5").code == 0
    assert fedctl(*two, "--before-first-round").code == 0


def test_how_many_may_lie_is_signed_and_shown(fedctl: Fedctl, tmp_path: Path) -> None:
    ca, file = tmp_path / "ca", tmp_path / "manifest.json"
    fedctl("ca", "init", ca, "--federation", "trade")
    sign = ["manifest", "sign", "--ca", ca, "--out", file]
    again = [*sign, "--previous", file]

    def site(name: str) -> list[str]:
        return ["--site", f"{name}={name}.example:1"]

    three = fedctl(*sign, *site("a"), *site("b"), *site("c"))
    assert "faulty_sites = 1: 3 of 3 decide; 0 may be down; 1 may lie and not split" in three.out
    assert "can stop rounds until expelled: for that not to be, 4 take part" in three.out
    show = ["manifest", "show", file, "--authority", ca / "ca.crt"]
    assert three.out == fedctl(*show).out
    four = fedctl(*again, *site("d"))
    assert "3 of 4 decide; 1 may be down; 1 may lie and not split the history, nor stop" in four.out

    # f goes by one, and by itself; from then on the next manifest has it, too.
    both = fedctl(*again, *site("e"), "--faulty-sites", 0)
    assert (both.code, "e would come or go and faulty_sites would go from 1 to 0" in both.err) == (
        Exit.USAGE,
        True,
    )
    none = fedctl(*again, "--faulty-sites", 0)
    assert "none may lie: the federation counts on every site keeping to the protocol" in none.out
    assert "A crash costs no more than before; a lying coordinator can split" in none.out
    assert fedctl(*again, *site("e"), "--json").object["faulty_sites"] == 0
    twice = fedctl(*again, "--faulty-sites", 2)
    assert (twice.code, "from 0 to 2" in twice.err) == (Exit.USAGE, True)
    assert (
        fedctl(*again, "--faulty-sites", 2, "--before-first-round", "--json").object["quorum"] == 4
    )
    assert fedctl(*again, "--faulty-sites", 86, "--before-first-round").code == Exit.FAILED
    help_ = " ".join(re.sub(r"[^\w;.]+", " ", fedctl("manifest", "sign", "--help").out).split())
    assert "a lying coordinator can split the history" in help_


def test_too_few_sites_for_their_liars_are_not_signed(fedctl: Fedctl, tmp_path: Path) -> None:
    ca, file = tmp_path / "ca", tmp_path / "manifest.json"
    fedctl("ca", "init", ca, "--federation", "trade")
    sign = ["manifest", "sign", "--ca", ca, "--out", file]
    two = [*sign, "--site", "a=h:1", "--site", "b=h:2"]
    refused = fedctl(*two)
    assert refused.code == Exit.USAGE
    assert "two sites need faulty_sites = 0" in refused.err
    assert not file.exists()
    assert fedctl(*two, "--faulty-sites", 0).code == Exit.OK
    assert fedctl(*sign, "--site", "a=h:1", "--faulty-sites", 0).code == Exit.USAGE
    assert fedctl(*sign, "--previous", file, "--disable", "a").code == Exit.USAGE


def test_a_site_is_expelled_by_the_next_manifest(fedctl: Fedctl, tmp_path: Path) -> None:
    ca, file, out = tmp_path / "ca", tmp_path / "manifest.json", tmp_path / "next.json"
    fedctl("ca", "init", ca, "--federation", "trade")
    sites = [word for name in "nse" for word in ("--site", f"{name}={name}.example:7443")]
    assert fedctl("manifest", "sign", "--ca", ca, *sites, "--out", file).code == Exit.OK
    expel = ["site", "expel", "s", "--ca", ca, "--out", out, "--previous"]

    told = fedctl(*expel, file)
    assert told.code == Exit.OK
    assert "systemctl reload fedd" in told.out
    shown = fedctl("manifest", "show", out, "--authority", ca / "ca.crt", "--json").object
    assert (shown["version"], [s["enabled"] for s in shown["sites"]]) == (2, [True, True, False])
    # It is shut out though two can't go on as they are; f by one is the next step.
    assert "No round runs: two sites of manifest 2" in told.out
    assert "--faulty-sites 0" in shown["objection"]
    on = ["manifest", "sign", "--ca", ca, "--previous", out, "--out", tmp_path / "on.json"]
    assert fedctl(*on, "--faulty-sites", 0, "--json").object["quorum"] == 2

    again = fedctl(*expel, out)
    assert (again.code, "already" in again.err) == (Exit.FAILED, True)
    stranger = fedctl("site", "expel", "x", "--ca", ca, "--out", out, "--previous", file)
    assert (stranger.code, "no site x" in stranger.err) == (Exit.USAGE, True)
    # Two manifests of version 2 would split the federation.
    second = fedctl(*expel, file, "--remove")
    assert (second.code, "holds another manifest, version 2" in second.err) == (Exit.FAILED, True)
    assert fedctl(*expel, file).code == Exit.OK  # the same again
    out.unlink()
    struck = fedctl(*expel, file, "--remove", "--json").object
    assert struck["expelled"] == "s"
    assert [s["id"] for s in struck["sites"]] == ["e", "n"]


def test_one_version_is_signed_once(fedctl: Fedctl, tmp_path: Path) -> None:
    ca, other, file = tmp_path / "ca", tmp_path / "other", tmp_path / "manifest.json"
    fedctl("ca", "init", ca, "--federation", "trade")
    fedctl("ca", "init", other, "--federation", "trade")
    sign = ["manifest", "sign", "--out", file, "--ca"]
    sites = [word for n in ("a=h:1", "b=h:2", "c=h:3") for word in ("--site", n)]
    signed = fedctl(*sign, ca, *sites, "--json").object
    assert len(bytes.fromhex(signed["digest"])) == 32
    assert f"version 1, digest {signed['digest'][:12]}, signature" in fedctl(*sign, ca, *sites).out
    before = file.read_bytes()
    refused = fedctl(*sign, ca, *sites, "--site", "d=h:4")
    assert refused.code == Exit.FAILED
    assert f"holds another manifest, version 1 ({signed['digest'][:12]})" in refused.err
    assert f"--previous {file}" in refused.err
    assert file.read_bytes() == before
    assert fedctl(*sign, ca, "--previous", file, "--site", "d=h:4").code == Exit.OK
    assert fedctl(*sign, ca, *sites).code == Exit.FAILED  # version 1 again, over version 2
    assert fedctl(*sign, other, *sites).code == Exit.OK  # not this authority's: nothing of ours


def test_two_sites_of_one_address_are_not_signed(fedctl: Fedctl, tmp_path: Path) -> None:
    ca, file = tmp_path / "ca", tmp_path / "manifest.json"
    fedctl("ca", "init", ca, "--federation", "trade")
    sign = ["manifest", "sign", "--out", file, "--ca", ca, "--site", "a=h:1", "--site", "b=h:2"]
    refused = fedctl(*sign, "--site", "c=H:1")
    assert refused.code == Exit.USAGE
    assert "a and c have one address, H:1" in refused.err
    assert not file.exists()
    assert fedctl(*sign, "--site", "c=h:3", "--site", "d=h:4").code == Exit.OK
    on = ["manifest", "sign", "--out", file, "--ca", ca, "--previous", file]
    assert fedctl(*on, "--disable", "a").code == Exit.OK
    assert fedctl(*on, "--site", "e=h:1").code == Exit.OK  # of a site that takes no part
    assert fedctl(*on, "--enable", "a").code == Exit.USAGE


def test_manifest_refusals(fedctl: Fedctl, tmp_path: Path) -> None:
    ca, other, file = tmp_path / "ca", tmp_path / "other", tmp_path / "manifest.json"
    fedctl("ca", "init", ca, "--federation", "trade")
    fedctl("ca", "init", other, "--federation", "trade")
    sign = ["manifest", "sign", "--ca", ca, "--out", file]
    sites = [word for n in ("north=h:1", "south=h:2", "east=h:3") for word in ("--site", n)]
    assert fedctl(*sign, *sites).code == Exit.OK

    not_an_address = fedctl(*sign, "--site", "north")
    assert (not_an_address.code, "ID=HOST:PORT" in not_an_address.err) == (Exit.USAGE, True)
    unknown = fedctl(*sign, "--previous", file, "--disable", "west")
    assert (unknown.code, "no site west" in unknown.err) == (Exit.USAGE, True)
    older = fedctl(*sign, "--previous", file, "--version", 1)
    assert (older.code, "not above" in older.err) == (Exit.USAGE, True)
    no_authority = fedctl("manifest", "show", file)
    assert (no_authority.code, "--authority" in no_authority.err) == (Exit.USAGE, True)

    wrong_authority = fedctl("manifest", "show", file, "--authority", other / "ca.crt")
    assert wrong_authority.code == Exit.FAILED
    file.write_text(file.read_text().replace("h:1", "evil:1"))
    forged = fedctl("manifest", "show", file, "--authority", ca / "ca.crt", "--json")
    assert forged.code == Exit.FAILED
    assert "not signed by this federation's authority" in forged.object["error"]


# ---- every command speaks JSON, and nothing but JSON ------------------------

ANSWERED = [
    (["status"], "site"),
    (["peers"], "peers"),
    (["rounds"], "rounds"),
    (["rounds", "show", "2"], "round"),
    (["ask", "Why do locks leak?"], "answer"),
    (["eval"], "mrr_at_10"),
    (["eval", "--split", "valid"], "mrr_at_10"),
    (["eval", "--history"], "points"),
    (["pairs"], "kinds"),
    (["pairs", "list"], "kinds"),
    (["pairs", "show"], "examples"),
    (["pairs", "build", "--how", "cloze"], "made"),
    (["pairs", "drop", "--all"], "kinds"),
    (["train", "--rounds", "2", "--detach"], "run"),
    (["train", "--stop"], "run"),
    (["personalise"], "pairs_judged"),
]


@pytest.mark.parametrize(("words", "key"), ANSWERED, ids=lambda v: " ".join(v)[:24])
@pytest.mark.parametrize("before", [True, False], ids=["--json first", "--json last"])
def test_json_is_one_object_and_alone(
    fedctl: Fedctl, daemon: CannedDaemon, words: list[str], key: str, before: bool
) -> None:
    ran = fedctl("--json", *words) if before else fedctl(*words, "--json")
    assert (ran.code, ran.err) == (0, "")
    assert key in ran.object


@pytest.mark.parametrize(("words", "key"), ANSWERED, ids=lambda v: " ".join(v)[:24])
def test_people_get_no_json(
    fedctl: Fedctl, daemon: CannedDaemon, words: list[str], key: str
) -> None:
    ran = fedctl(*words)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.strip()
    assert "{" not in ran.out


NEED_A_DAEMON = [words for words, _ in ANSWERED] + [["train", "--attach"], ["ingest", str(ROOT)]]


@pytest.mark.parametrize("words", NEED_A_DAEMON, ids=lambda v: " ".join(v)[:24])
def test_without_a_daemon(fedctl: Fedctl, path: Path, words: list[str]) -> None:
    ran = fedctl(*words, "--socket", path, "--json")
    assert ran.code == Exit.UNREACHABLE
    assert ran.err == f"fedctl: {ran.object['error']}. {ran.object['remedy']}.\n"
    assert str(path) in ran.object["error"]


def test_every_command_takes_the_same_options(fedctl: Fedctl) -> None:
    for words in ("ca init", "ca sign", "site init", "site install", "site show", "manifest sign",
                  "manifest show", "ingest", "train", "ask", "eval", "status", "peers", "rounds",
                  "rounds show", "demo", "pairs", "pairs build", "pairs drop"):  # fmt: skip
        shown = fedctl(*words.split(), "--help")
        assert shown.code == 0
        for option in ("--json", "--socket", "--config"):
            assert option in shown.out, f"{words} lacks {option}"


def test_no_help_text_loses_a_word() -> None:
    """Typer's help takes "[learning]" for a style, and drops it."""
    found, commands = [], [("fedctl", typer.main.get_command(app))]
    while commands:
        name, one = commands.pop()
        commands += [(f"{name} {n}", sub) for n, sub in getattr(one, "commands", {}).items()]
        texts = [one.help, *(getattr(option, "help", "") for option in one.params)]
        found += [(name, word) for t in texts for word in re.findall(r"\[[a-z_]+\]", t or "")]
    assert not found


# ---- what people see --------------------------------------------------------


def test_status_for_people(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    out = fedctl("status").out
    assert "north of hanse-test" in out
    assert "1 of 2 connected" in out
    assert "EXPIRED" in out  # the canned certificate ended in 1970
    # Markup and control characters from elsewhere are shown, not obeyed.
    assert "east [did not answer]\N{REPLACEMENT CHARACTER}[31m" in out


def test_status_for_machines(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    plain = fedctl("status", "--json").object
    assert plain["model_digest"] == DIGEST.hex()
    assert plain["run"]["target_round"] == 2
    assert plain["run"]["plan"] is None  # unset, and told to be
    assert plain["uptime_s"] == 0.0  # unset fields are there, too


def test_rounds(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    both = fedctl("rounds", "--json").object["rounds"]
    assert [one["round"] for one in both] == [1, 2]
    assert both[0]["coordinator"] == "north"
    assert both[0]["key_dealer"] == "west"
    assert both[0]["contributors"] == ["east", "north", "west"]
    assert both[0]["seconds"] == {"train": 2.5}
    assert both[0]["mean_loss"] is None
    one = fedctl("rounds", "show", 2, "--json").object
    assert (one["round"], one["signed_by"]) == (2, ["east", "north", "west"])
    missing = fedctl("rounds", "show", 9)
    assert (missing.code, "round 9 is not committed" in missing.err) == (Exit.FAILED, True)
    daemon.rounds = []
    assert "No round is committed yet" in fedctl("rounds").out


def test_a_noised_loss_is_marked(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    for one, noise in zip(daemon.rounds, (0.0, 2.0), strict=True):
        one.report.mean_loss, one.report.noise_multiplier = 1.25, noise
    plain, noised = (line for line in fedctl("rounds").out.splitlines() if "1.250" in line)
    assert "noised" not in plain
    assert "1.250 (noised)" in noised
    assert "1.2500 (noised)" in fedctl("rounds", "show", 2).out
    assert "noised" not in fedctl("train", "--attach").err
    daemon.run.plan.privacy.noise_multiplier = 2.0
    assert "round 1 committed, mean loss 1.2500 (noised)" in fedctl("train", "--attach").err


def test_errors_of_peers_stand_whole_below_the_table(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    out = fedctl("peers").out
    assert "\nlast error of west: refused\n" in out
    assert "last error of east" not in out


def test_ask_for_people(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    out = fedctl("ask", "Why do locks leak?", "--top-k", 3).out
    assert "Locks leak. [1]" in out
    assert "[1] Locks (d1#0)" in out
    assert (daemon.asked[0].question, daemon.asked[0].top_k) == ("Why do locks leak?", 3)


# ---- refusals ---------------------------------------------------------------


def test_the_daemons_refusal_is_told_in_one_line(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    daemon.refusal = "a question has at most 16384 bytes\nAsk it in fewer words"
    ran = fedctl("ask", "why", "--json")
    assert ran.code == Exit.FAILED
    assert ran.object == {
        "error": "a question has at most 16384 bytes",
        "remedy": "Ask it in fewer words",
    }
    assert ran.err == "fedctl: a question has at most 16384 bytes. Ask it in fewer words.\n"


def test_socket_without_a_listener(fedctl: Fedctl, path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    ran = fedctl("status", "--socket", path)
    assert (ran.code, "Connection refused" in ran.err) == (Exit.UNREACHABLE, True)


def test_socket_path_longer_than_the_kernel_takes(fedctl: Fedctl, tmp_path: Path) -> None:
    ran = fedctl("status", "--socket", tmp_path / ("s" * 120))
    assert (ran.code, "107 bytes" in ran.err) == (Exit.USAGE, True)


def test_socket_from_the_settings(fedctl: Fedctl, path: Path, tmp_path: Path) -> None:
    file = tmp_path / "fedd.toml"
    file.write_text(f'[control]\nsocket = "{path}"\n')
    with canned_daemon(path):
        assert fedctl("status", "--config", file, "--json").object["site"] == "north"
    file.write_text("[control]\nsocket = 7\n[oops]\n")
    refused = fedctl("--config", file, "status")
    assert refused.code == Exit.USAGE
    assert "control.socket" in refused.err
    assert "[oops]" in refused.err
    assert refused.err.count("\n") == 1


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("option", ["--socket", "--config"])
def test_an_option_beats_the_environment(
    fedctl: Fedctl, daemon: CannedDaemon, path: Path, tmp_path: Path, option: str, *, behind: bool
) -> None:
    """The environment names the site north (`daemon`), the option the site south."""
    socket_south, file = path.with_name("south.sock"), tmp_path / "fedd.toml"
    file.write_text(f'[control]\nsocket = "{socket_south}"\n')
    (tmp_path / "a.txt").write_text("Locks keep the level of a canal.")
    named = [option, socket_south if option == "--socket" else file]

    def at_south(*words: object) -> Ran:
        return fedctl(*words, *named) if behind else fedctl(*named, *words)

    with canned_daemon(socket_south) as south:
        south.site = "south"
        assert at_south("status", "--json").object["site"] == "south"
        assert at_south("rounds", "show", 1).code == 0  # a group's own options stand between
        assert "At site south: 1 documents new" in at_south("ingest", tmp_path / "a.txt").out
        assert "at site south" in at_south("train", "--rounds", 1, "--detach").out
        assert "at site south" in at_south("train", "--rounds", 1).err
        assert daemon.asked == []
        assert fedctl("status", "--json").object["site"] == "north"


@pytest.mark.parametrize(
    "words",
    [
        ["bogus"],
        ["ca"],
        ["ask"],
        ["eval", "--bogus"],
        ["train"],
        ["train", "--rounds", "0"],
        ["train", "--rounds", "1", "--stop"],
        ["train", "--attach", "--learning-rate", "0.1"],
        ["rounds", "show", "x"],
        ["ca", "sign", "missing.csr", "--ca", "ca", "--out", "x"],
        ["demo", "--data", "missing"],
        ["demo", "--sites", "a,b"],
    ],
    ids=" ".join,
)
def test_usage_errors(fedctl: Fedctl, words: list[str]) -> None:
    ran = fedctl(*words, "--json")
    assert ran.code == Exit.USAGE
    assert ran.err.startswith("fedctl: ")
    assert ran.err.count("\n") == 1
    assert set(ran.object) == {"error", "remedy"}


def test_a_defect_of_ours_is_no_traceback(
    fedctl: Fedctl, daemon: CannedDaemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # A reply that the converter was not made for.
    monkeypatch.setattr(math, "isfinite", lambda _: 1 / 0)
    ran = fedctl("status", "--json")
    assert ran.code == Exit.FAILED
    assert ran.err.count("\n") == 1
    assert "ZeroDivisionError" in ran.object["error"]
    (report,) = tmp_path.glob("fedctl-*.txt")
    assert str(report) in ran.object["remedy"]
    assert "Traceback" in report.read_text()
    assert stat.S_IMODE(report.stat().st_mode) == 0o600


# ---- ingest -----------------------------------------------------------------


def test_ingest_goes_on_after_a_refused_file(
    fedctl: Fedctl, daemon: CannedDaemon, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("Locks keep the level of a canal.")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "docs.jsonl").write_text(
        '{"id": "1", "title": "Weirs", "text": "A weir."}\n{"id": broken\n'
    )
    ran = fedctl("ingest", tmp_path, tmp_path / "vanished", "--json")
    assert ran.code == Exit.PARTLY
    assert ran.object["documents_new"] == 2
    assert [Path(p["path"]).name for p in ran.object["problems"]] == [
        "b.txt",
        "docs.jsonl",
        "vanished",
    ]
    assert ran.object["problems"][1]["line"] == 2
    assert ran.err.count("refused: ") == 3
    assert fedctl("ingest", tmp_path / "vanished").code == Exit.FAILED  # nothing was ingested


def test_ingest_tells_what_the_daemon_refused(
    fedctl: Fedctl, daemon: CannedDaemon, tmp_path: Path
) -> None:
    (tmp_path / "a.md").write_text("# Locks\n\nLocks keep the level.")
    daemon.ingest_errors = ["document b: its id is too long"]
    ran = fedctl("ingest", tmp_path)
    assert ran.code == Exit.PARTLY
    assert "refused: document b: its id is too long" in ran.err


def test_ingest_tells_of_pairs_that_name_no_document_here(
    fedctl: Fedctl, daemon: CannedDaemon, tmp_path: Path
) -> None:
    pair = json.dumps({"query": "Who mends the lift?", "positives": ["lift"]})
    (tmp_path / "pairs_train.jsonl").write_text(f"{pair}\n" * 3)
    assert "; 3 pairs." in fedctl("ingest", tmp_path).out
    daemon.unusable = 2
    ran = fedctl("ingest", tmp_path)
    assert ran.code == Exit.OK
    assert "3 pairs, of which 1 can be used: 2 name documents" in ran.out
    assert "(first: '[lift]'; is it 'lift.txt'?)" in ran.out
    daemon.unusable = 3
    ran = fedctl("ingest", tmp_path, "--json")
    assert (ran.code, ran.object["pairs"], ran.object["pairs_usable"]) == (Exit.PARTLY, 3, 0)
    assert (ran.object["unknown_document"], ran.object["known_document"]) == ("[lift]", "lift.txt")


def test_ingest_sends_batches(fedctl: Fedctl, daemon: CannedDaemon, tmp_path: Path) -> None:
    lines = (json.dumps({"id": str(n), "title": "t", "text": "word " * 40_000}) for n in range(50))
    (tmp_path / "docs.jsonl").write_text("\n".join(lines))
    assert fedctl("ingest", tmp_path, "--json").object["documents_new"] == 50
    sizes = [r.ByteSize() for r in daemon.asked if isinstance(r, control.IngestRequest)]
    assert len(sizes) == 3
    assert max(sizes) < ingesting.BATCH_BYTES + (1 << 20)


# ---- train ------------------------------------------------------------------


def test_train_watches_until_the_end(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    ran = fedctl("train", "--rounds", 2, "--local-epochs", 3)
    assert ran.code == Exit.OK
    (asked,) = [one for one in daemon.asked if isinstance(one, control.TrainRequest)]
    assert (asked.rounds, asked.plan.local_epochs) == (2, 3)
    assert "round 1.0 train, coordinator north" in ran.err
    assert "round 1 committed, mean loss 1.2500" in ran.err
    assert "Round 2 is committed" in ran.out


def test_train_for_machines_is_a_line_a_step(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    ran = fedctl("train", "--attach", "--json")
    assert (ran.code, ran.err) == (Exit.OK, "")
    assert [line["phase"] for line in ran.lines] == ["train", "committed", "train", "committed"]
    assert ran.lines[0]["loss"] is None  # NaN is no JSON


@pytest.mark.parametrize(("reached", "code"), [(1, Exit.PARTLY), (0, Exit.FAILED)])
def test_a_run_that_ends_early(
    fedctl: Fedctl, daemon: CannedDaemon, reached: int, code: Exit
) -> None:
    daemon.training = [
        progress(round=1, phase="train", head_round=0),
        progress(phase="idle", head_round=reached, finished=True, message="stopped by east"),
    ]
    ran = fedctl("train", "--attach")
    assert ran.code == code
    assert f"ended at round {reached} of 2. stopped by east" in ran.err


def test_a_reason_that_comes_back_is_counted(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    """Two coordinators in turn, each with a reason of its own, and at last another one."""
    reasons = ["0 sites are ready; east: has 0 pairs", "0 sites are ready; east: did not answer"]
    daemon.training = []
    for attempt in range(13):
        for phase, message in (("prepare", ""), ("failed", reasons[attempt % 2])):
            said = progress(round=1, attempt=attempt, phase=phase, message=message)
            daemon.training += [said, said]  # an epoch's report repeats what stands
    last = progress(phase="idle", round=1, attempt=13, finished=True, message="stopped")
    daemon.training.append(last)
    lines = fedctl("train", "--attach").err.splitlines()
    assert [lines.count(f"  {reason}") for reason in reasons] == [1, 1]
    first = "  same reason, {} times: 0 sites are ready; east: has 0 pairs…"
    assert [lines.count(first.format(n)) for n in (2, 3, 4, 7)] == [1, 0, 1, 1]
    assert "  same reason, 2 times" in lines
    assert "  same reason, 6 times: 0 sites are ready; east: did not answer…" in lines


def test_a_site_without_pairs_is_told_and_may_ask(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    assert "no pairs" not in fedctl("train", "--rounds", 1).err  # it has pairs that it made
    daemon.training_pairs = 0
    ran = fedctl("train", "--rounds", 1)
    assert ran.code == Exit.OK
    assert "site north has no pairs to learn from and adds nothing" in ran.err
    assert "`fedctl ingest` adds pairs" in ran.err


def test_attempts_alike_are_one_row(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    for n in range(6):
        daemon.rounds[1].attempts.add(
            attempt=n,
            coordinator=("east", "north", "west")[n % 3],
            outcome="failed" if n < 5 else "committed",
            phase="prepare" if n < 5 else "",
            reason="0 sites are ready" if n != 3 else "the line was cut",
            seconds=1.5,
            bytes_sent=100,
        )
    out = fedctl("rounds", "show", 2).out
    row = next(line for line in out.splitlines() if "0–2 (3 ×)" in line)
    assert "east, north, west" in row
    assert "4.5" in row
    assert "300 B" in row
    assert out.count("0 sites are ready") == 3  # 0 to 2, 4, and 5, which was committed
    assert len(fedctl("rounds", "show", 2, "--json").object["attempts"]) == 6


def test_daemon_that_hangs_up_while_watched(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    daemon.training = daemon.training[:1]
    ran = fedctl("train", "--attach")
    assert (ran.code, "--attach" in ran.err) == (Exit.UNREACHABLE, True)


def test_ctrl_c_leaves_the_run_going(daemon: CannedDaemon, path: Path) -> None:
    interrupted = threading.Event()

    def slowly() -> Iterator[Any]:
        yield progress(round=1, phase="train", head_round=0)
        interrupted.wait(30)

    daemon.training = slowly()  # type: ignore[assignment]
    with _process("train", "--attach", "--socket", path) as process:
        assert process.stderr is not None
        assert "round 1.0 train" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(10) == Exit.INTERRUPTED
    interrupted.set()
    assert "the training goes on" in rest
    assert "fedctl train --attach" in rest
    assert "Traceback" not in rest


# ---- the program ------------------------------------------------------------


def _process(*words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "daemon.fedctl", *(str(word) for word in words)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from daemon.fedctl import main; main(['--help']); "
        "heavy = {'grpc', 'torch', 'transformers', 'tenseal', 'hnswlib', 'numpy', "
        "'cryptography', 'pydantic'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_a_reader_that_goes_away_is_no_traceback(daemon: CannedDaemon, path: Path) -> None:
    with _process("rounds", "--socket", path) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()


def test_default_socket_is_the_settings_default() -> None:
    assert settings.ControlSettings.model_fields["socket"].default == DEFAULT_SOCKET
