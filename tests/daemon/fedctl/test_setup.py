"""fedctl sets a federation up: authority, sites, and the manifest that lists them."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path

import pytest

from daemon.fedctl.terminal.output import Exit
from tests.support.command_line import Fedctl, Ran

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HANSE_SOCKET", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)


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


@pytest.mark.slow
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
    assert fedctl(*again, "--faulty-sites", 86, "--before-first-round").code == Exit.USAGE

    # Another encoder is a step, too, and stays in the manifests behind it.
    named = f"{'5e' * 32}:147456"
    both = fedctl(*again, "--retriever", named, "--faulty-sites", 3)
    assert (both.code, "the retriever would be another" in both.err) == (Exit.USAGE, True)
    wrong = fedctl(*again, "--retriever", "all-MiniLM-L6-v2")
    assert (wrong.code, "expected DIGEST:VALUES" in wrong.err) == (Exit.USAGE, True)
    assert f"Rounds train retriever {named}." in fedctl(*again, "--retriever", named).out
    assert fedctl(*again, *site("f"), "--json").object["retriever"] == named
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_manifest_refusals(fedctl: Fedctl, tmp_path: Path) -> None:
    ca, other, file = tmp_path / "ca", tmp_path / "other", tmp_path / "manifest.json"
    fedctl("ca", "init", ca, "--federation", "trade")
    fedctl("ca", "init", other, "--federation", "trade")
    sign = ["manifest", "sign", "--ca", ca, "--out", file]
    sites = [word for n in ("north=h:1", "south=h:2", "east=h:3") for word in ("--site", n)]
    assert fedctl(*sign, *sites).code == Exit.OK

    not_an_address = fedctl(*sign, "--site", "north")
    assert (not_an_address.code, "ID=HOST:PORT" in not_an_address.err) == (Exit.USAGE, True)
    no_port = fedctl(*sign, "--site", "north=h:99999")
    assert (no_port.code, "'h:99999' of site 'north'" in no_port.err) == (Exit.USAGE, True)
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
    assert f"{file}: the manifest is not signed by this" in forged.object["error"]
    file.write_text("{")
    for words in (["manifest", "show", file, "--authority", ca / "ca.crt"],
                  [*sign[:4], "--out", tmp_path / "next.json", "--previous", file]):  # fmt: skip
        garbled = fedctl(*words)
        assert garbled.code == Exit.FAILED
        assert f"{file}: the manifest is not JSON in UTF-8" in garbled.err
