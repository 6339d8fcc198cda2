"""Attacks on the list of sites: changed, forged, doubled, oversized and garbled manifests."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.identity.authority import create_authority, sign_with_authority
from crypto.identity.keys import IdentityError
from crypto.identity.trust import Trust
from peers.wire.manifest import (
    GENERATOR,
    MAX_BYTES,
    MAX_FAULTY_SITES,
    RETRIEVER,
    FederationManifest,
    ManifestError,
    ManifestSite,
    NamedModel,
    log_id,
    model_of,
    parse_signed,
    signed,
)


@dataclass(frozen=True)
class Keeper:
    authority: Path
    trust: Trust
    file: bytes  # of MANIFEST, signed


MANIFEST = FederationManifest(
    "med",
    7,
    (
        ManifestSite("alpha", "alpha.example.org:7443"),
        ManifestSite("beta", "10.0.0.2:7443"),
        ManifestSite("delta", "[2001:db8::1]:7443", enabled=False),
        ManifestSite("gamma", "localhost:65535"),
    ),
)


@pytest.fixture(scope="module")
def keeper(tmp_path_factory: pytest.TempPathFactory) -> Keeper:
    authority = tmp_path_factory.mktemp("ca")
    create_authority(authority, "med")
    trust = Trust.from_pem((authority / "ca.crt").read_bytes())
    return Keeper(authority, trust, signed(MANIFEST, authority))


def test_a_signed_manifest_reads_back_as_it_was(keeper: Keeper) -> None:
    assert parse_signed(keeper.file, keeper.trust) == MANIFEST


def test_only_enabled_sites_take_part_and_count(keeper: Keeper) -> None:
    assert MANIFEST.enabled_ids == ("alpha", "beta", "gamma")
    assert MANIFEST.majority == 2
    assert not MANIFEST.enabled("delta")
    assert not MANIFEST.enabled("mallory")
    assert MANIFEST.site("delta").address == "[2001:db8::1]:7443"
    with pytest.raises(ManifestError, match=r"'mallory' is not in the manifest.*version 7"):
        MANIFEST.site("mallory")


@pytest.mark.parametrize(
    ("sites", "majority"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (256, 129)]
)
def test_two_majorities_always_share_a_site(sites: int, majority: int) -> None:
    members = tuple(ManifestSite(f"s{i:03}", "h:1") for i in range(sites))
    assert FederationManifest("med", 1, members).majority == majority
    assert 2 * majority > sites


# ---- how many may lie, and how many decide ----------------------------------------

QUORUMS = {  # of 1, 2 … 25 sites, by how many may lie; 0 where too few take part for any round
    0: (0, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13),
    1: (0, 0, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14),
    2: (0, 0, 0, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14),
    3: (0, 0, 0, 0, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15),
    8: (*(0,) * 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15, 16, 16, 17, 17),
    23: (*(0,) * 24, 25),
}


def of(sites: int, faulty: int | None, *, spared: int = -1) -> FederationManifest:
    """So many sites; one of those before it, ``spared``, takes no part."""
    listed = tuple(ManifestSite(f"s{i:03}", "h:1", i != spared) for i in range(sites))
    return FederationManifest("med", 1, listed, faulty)


@pytest.mark.parametrize("faulty", QUORUMS)
def test_quorums_of_up_to_25_sites(faulty: int) -> None:
    for sites, quorum in enumerate(QUORUMS[faulty], 1):
        manifest = of(sites, faulty)
        assert bool(manifest.objection) is (quorum == 0)
        if quorum:
            assert manifest.quorum == quorum
            assert 2 * quorum > sites + faulty >= 2 * (quorum - 1)
            # n > 3f: f that are silent leave a quorum.
            assert (sites - quorum >= faulty) is (sites > 3 * faulty)


def test_without_liars_a_quorum_is_a_majority() -> None:
    assert all(of(n, 0).quorum == of(n, 0).majority for n in range(1, 257))


def able() -> Iterator[FederationManifest]:
    """All manifests of up to 10 sites under which rounds can run."""
    yield from (of(n, f) for n in range(2, 11) for f in range(n - 1))


def shared_at_least(one: FederationManifest, other: FederationManifest) -> int:
    """How many sites any quorum of the one shares with any of the other; all are tried."""
    return min(
        len({*a}.intersection(b))
        for a in combinations(one.enabled_ids, one.quorum)
        for b in combinations(other.enabled_ids, other.quorum)
    )


def test_two_quorums_share_more_sites_than_may_lie() -> None:
    assert all(shared_at_least(one, one) > one.tolerated for one in able())


def test_quorums_one_step_apart_share_one_site_more_than_may_lie_in_either() -> None:
    for one in able():
        sites, faulty = len(one.sites), one.tolerated
        for other in (of(sites + 1, faulty), of(sites, faulty + 1)):
            assert not one.step_from(other) and not other.step_from(one)
            if not other.objection:
                assert shared_at_least(one, other) == max(faulty, other.tolerated) + 1


def test_a_step_over_a_manifest_without_rounds_leaves_an_honest_site() -> None:
    """Nothing is decided under such a one, so what matters is who is before it and behind."""
    for one in (of(n, n - 2) for n in range(2, 9)):  # the least that f bears: all must agree
        sites, faulty = len(one.sites), one.tolerated
        for other in (
            of(sites - 1, faulty - 1) if faulty else one,  # one is expelled; then f falls
            of(sites + 1, faulty, spared=0),  # one is expelled; then another comes
            of(sites + 1, faulty + 1),  # f rises; then another comes
        ):
            assert not other.objection
            assert shared_at_least(one, other) > max(faulty, other.tolerated)


def test_two_steps_at_once_can_leave_quorums_with_liars_alone_in_common() -> None:
    """What `step_from` refuses: with each of these two halves could go different ways."""
    for one, other in (
        (of(4, 1), of(6, 1)),
        (of(4, 1), of(5, 1, spared=0)),  # one goes, another comes
        (of(4, 1), of(5, 2)),
        (of(6, 1), of(5, 2)),
        (of(6, 1), of(6, 3)),
    ):
        assert shared_at_least(one, other) == max(one.tolerated, other.tolerated)
        assert one.step_from(other) and other.step_from(one)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(data=st.data(), sites=st.integers(2, 256))
def test_drawn_quorums_share_more_than_may_lie(data: st.DataObject, sites: int) -> None:
    most = min(sites - 2, MAX_FAULTY_SITES)
    faulty = data.draw(st.integers(0, most))
    one = of(sites, faulty)
    near = [one]
    near += [of(sites + 1, faulty)] if sites < 256 else []
    near += [of(sites, faulty + 1)] if faulty < most else []
    other = data.draw(st.sampled_from(near))
    quorums = [set(data.draw(st.permutations(m.enabled_ids))[: m.quorum]) for m in (one, other)]
    assert len(quorums[0] & quorums[1]) > max(faulty, other.tolerated)


def test_a_step_is_one_site_or_one_liar() -> None:
    four = of(4, 1)
    moved = replace(four, version=2, sites=(ManifestSite("s000", "new:1"), *four.sites[1:]))
    for step in (four, moved, of(5, 1), of(3, 1), of(4, 2), of(4, 0), of(4, None), of(5, None)):
        assert step.step_from(four) == "" == four.step_from(step)
    # A site that is listed and takes no part is none.
    assert of(5, 1, spared=4).step_from(four) == ""
    assert of(5, 2, spared=4).step_from(four) == ""

    swapped = replace(of(5, 1, spared=0), version=2).step_from(four)
    assert (
        "from manifest 1 to 2 it is more than one step: s000, s004 would come or go at" in swapped
    )
    assert "Sign the steps in between" in swapped and "committed under each" in swapped
    assert "faulty_sites would go from 1 to 3 at once" in of(4, 3).step_from(four)
    both = of(3, 0).step_from(four)
    assert "s003 would come or go and faulty_sites would go from 1 to 0 at once" in both


def test_too_few_sites_for_rounds_are_told_what_to_do() -> None:
    assert of(3, 1).objection == of(2, 0).objection == ""
    two = of(2, 1).objection
    assert "two sites of manifest 1 can't run rounds where faulty_sites is 1" in two
    assert "Let 1 more take part; or sign one with --faulty-sites 0" in two
    assert "two sites need faulty_sites = 0, which counts on every site keeping to the pro" in two
    assert "--faulty-sites 2" in of(4, 3).objection
    # Nobody learns alone; nor do sites count that take no part.
    assert of(1, 0).objection.endswith("Let 1 more take part")
    assert of(3, 1, spared=1).objection == two


# ---- manifests from before they said it --------------------------------------------


def test_a_manifest_that_does_not_say_keeps_its_bytes_and_bears_one_liar() -> None:
    old = replace(MANIFEST, sites=MANIFEST.sites[:1])
    assert old.payload == (
        b'hanse-manifest-v1\0{"federation_id":"med","sites":[{"address":"alpha.example.org:7443",'
        b'"enabled":true,"id":"alpha"}],"version":7}'
    )
    assert old.digest == hashlib.sha256(old.payload).digest()
    assert (old.faulty_sites, old.tolerated, old.majority) == (None, 1, 1)
    said = replace(old, faulty_sites=1)
    assert said.payload == old.payload.replace(b'"federation', b'"faulty_sites":1,"federation')
    assert said.digest != old.digest
    assert said.step_from(old) == ""


def test_how_many_may_lie_is_signed_and_reads_back(keeper: Keeper) -> None:
    for faulty in (0, 1, MAX_FAULTY_SITES):
        manifest = replace(MANIFEST, faulty_sites=faulty)
        file = signed(manifest, keeper.authority)
        assert parse_signed(file, keeper.trust) == manifest
        without = json.loads(file)
        del without["manifest"]["faulty_sites"]
        with pytest.raises(ManifestError, match="not signed by this federation's authority"):
            parse_signed(json.dumps(without).encode(), keeper.trust)


@pytest.mark.parametrize("faulty", [None, 0])
def test_too_few_sites_still_read_for_the_history_they_verify(
    keeper: Keeper, faulty: int | None
) -> None:
    lonely = replace(MANIFEST, sites=MANIFEST.sites[:1], faulty_sites=faulty)
    assert lonely.objection
    assert parse_signed(signed(lonely, keeper.authority), keeper.trust) == lonely


def test_two_manifests_of_a_version_that_differ_in_liars_are_noticed() -> None:
    with pytest.raises(ManifestError, match="two different manifests of version 7"):
        replace(MANIFEST, faulty_sites=1).newer_than(MANIFEST)


def test_spaces_and_the_order_of_keys_do_not_matter(keeper: Keeper) -> None:
    file = json.loads(keeper.file)
    file["manifest"] = dict(reversed(file["manifest"].items()))
    for indent in (None, 4):
        text = json.dumps(file, indent=indent).encode()
        assert parse_signed(text, keeper.trust) == MANIFEST


# ---- changed after it was signed ------------------------------------------------


def change(path: list[str | int], value: object) -> Callable[[dict[str, Any]], None]:
    def apply(manifest: dict[str, Any]) -> None:
        target: Any = manifest
        for step in path[:-1]:
            target = target[step]
        target[path[-1]] = value

    return apply


@pytest.mark.parametrize(
    "tamper",
    [
        change(["version"], 8),
        change(["faulty_sites"], 0),
        change(["faulty_sites"], 1),
        change(["sites", 0, "address"], "mallory.example.org:7443"),
        change(["sites", 2, "enabled"], True),
        change(["sites", 1, "id"], "betb"),
        lambda manifest: manifest["sites"].pop(),
        lambda manifest: manifest["sites"].append(
            {"id": "mallory", "address": "m:1", "enabled": True}
        ),
    ],
)
def test_a_tampered_manifest_is_refused(
    keeper: Keeper, tamper: Callable[[dict[str, Any]], object]
) -> None:
    file = json.loads(keeper.file)
    tamper(file["manifest"])
    with pytest.raises(ManifestError, match="not signed by this federation's authority"):
        parse_signed(json.dumps(file).encode(), keeper.trust)


def test_a_manifest_signed_by_another_authority_of_that_name_is_refused(
    keeper: Keeper, tmp_path: Path
) -> None:
    create_authority(tmp_path, "med")
    with pytest.raises(ManifestError, match="not signed by this federation's authority"):
        parse_signed(signed(MANIFEST, tmp_path), keeper.trust)


def test_a_signature_over_the_bare_json_is_no_signature_of_a_manifest(keeper: Keeper) -> None:
    """What the authority signs says what it is, so nothing else it signs can pass for it."""
    bare = MANIFEST.payload.split(b"\0", 1)[1]
    file = json.loads(keeper.file)
    file["signature"] = base64.b64encode(sign_with_authority(keeper.authority, bare)).decode()
    with pytest.raises(ManifestError, match="not signed"):
        parse_signed(json.dumps(file).encode(), keeper.trust)


def test_the_manifest_of_another_federation_is_refused(keeper: Keeper, tmp_path: Path) -> None:
    create_authority(tmp_path, "law")
    other = signed(replace(MANIFEST, federation_id="law"), tmp_path)
    with pytest.raises(ManifestError, match="of federation 'law', expected 'med'"):
        parse_signed(other, keeper.trust)


def test_an_authority_does_not_sign_for_another_federation(keeper: Keeper) -> None:
    with pytest.raises(ManifestError, match="expected 'med'"):
        signed(replace(MANIFEST, federation_id="law"), keeper.authority)


def test_without_the_authoritys_key_nothing_is_signed(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="fedctl ca init"):
        signed(MANIFEST, tmp_path)


# ---- signed, but out of bounds ------------------------------------------------------


def sign_anything(keeper: Keeper, manifest: object) -> bytes:
    """A file over any JSON, signed as the authority signs: only the contents can be wrong."""
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    signature = sign_with_authority(keeper.authority, b"hanse-manifest-v1\0" + canonical)
    file = {"manifest": manifest, "signature": base64.b64encode(signature).decode()}
    return json.dumps(file).encode()


def as_json() -> dict[str, Any]:
    sites = [{"id": s.id, "address": s.address, "enabled": s.enabled} for s in MANIFEST.sites]
    return {"federation_id": "med", "version": 7, "sites": sites}


def test_the_signer_of_the_following_attacks_makes_good_manifests_too(keeper: Keeper) -> None:
    assert parse_signed(sign_anything(keeper, as_json()), keeper.trust) == MANIFEST


@pytest.mark.parametrize(
    ("tamper", "expected"),
    [
        (lambda m: m["sites"].insert(1, m["sites"][0]), "each site once, sorted"),
        (lambda m: m["sites"].reverse(), "each site once, sorted"),
        (lambda m: m["sites"].clear(), "1 to 256 sites"),
        (lambda m: m["sites"].extend(m["sites"][:1] * 300), "1 to 256 sites"),
        (change(["version"], 0), "begins at 1"),
        (change(["version"], -1), "begins at 1"),
        (change(["version"], 2**63), "is refused"),
        (change(["version"], True), "whole number"),
        (change(["version"], 1.0), "whole number"),
        (change(["version"], "7"), "whole number"),
        (change(["version"], None), "whole number"),
        (change(["faulty_sites"], -1), "expected 0 to 85"),
        (change(["faulty_sites"], MAX_FAULTY_SITES + 1), "expected 0 to 85"),
        (change(["faulty_sites"], True), "whole number"),
        (change(["faulty_sites"], 1.0), "whole number"),
        (change(["faulty_sites"], "1"), "whole number"),
        (change(["faulty_sites"], None), "whole number"),
        (change(["sites"], {}), "a list"),
        (change(["sites", 0], "alpha"), "exactly id, address, enabled"),
        (change(["sites", 0, "enabled"], 1), "true or false"),
        (change(["sites", 0, "id"], "../alpha"), "is refused"),
        (change(["sites", 0, "id"], "alpha\n"), "is refused"),
        (change(["sites", 0, "id"], "\ud800"), "is refused"),
        (change(["sites", 0, "id"], "a" * 64), "is refused"),
        (change(["sites", 0, "address"], "alpha"), "expected host:port"),
        (change(["sites", 0, "address"], "alpha:0"), "expected host:port"),
        (change(["sites", 0, "address"], "alpha:65536"), "expected host:port"),
        (change(["sites", 0, "address"], "alpha:٤٤٣"), "expected host:port"),
        (change(["sites", 0, "address"], "unix:/run/x:1"), "expected host:port"),
        (change(["sites", 0, "address"], "h" * 300 + ":1"), "expected host:port"),
        (change(["sites", 0, "password"], "x"), "exactly id, address, enabled"),
        (change(["comment"], "x"), "exactly federation_id, version, sites"),
        (lambda m: m.pop("version"), "exactly federation_id, version, sites"),
    ],
)
def test_a_manifest_out_of_bounds_is_refused_even_if_it_is_signed(
    keeper: Keeper, tamper: Callable[[dict[str, Any]], object], expected: str
) -> None:
    manifest = as_json()
    tamper(manifest)
    with pytest.raises(ManifestError, match=expected):
        parse_signed(sign_anything(keeper, manifest), keeper.trust)


def test_a_key_that_is_there_twice_is_refused(keeper: Keeper) -> None:
    text = keeper.file.replace(b'"version": 7', b'"version": 7, "version": 7')
    assert text != keeper.file
    with pytest.raises(ManifestError, match="twice"):
        parse_signed(text, keeper.trust)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"9" * 10_000,
        b'{"manifest": NaN, "signature": ""}',
        b'{"manifest": {}, "signature": 5}',
        b" " * (MAX_BYTES + 1),
    ],
)
def test_what_is_no_manifest_is_refused(keeper: Keeper, text: bytes) -> None:
    with pytest.raises(ManifestError):
        parse_signed(text, keeper.trust)


@pytest.mark.parametrize("signature", ["", "!", "AAAA", "ä", "A" * 10_000, 5, None])
def test_what_is_no_signature_is_refused(keeper: Keeper, signature: object) -> None:
    file = json.loads(keeper.file) | {"signature": signature}
    with pytest.raises(ManifestError):
        parse_signed(json.dumps(file).encode(), keeper.trust)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=12,
)
site_like = st.fixed_dictionaries(
    {"id": json_values, "address": json_values, "enabled": json_values}
)
manifest_like = st.fixed_dictionaries(
    {
        "federation_id": json_values,
        "version": json_values,
        "sites": st.lists(site_like) | json_values,
    },
    optional={"faulty_sites": json_values},
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    text=st.binary(max_size=200)
    | json_values.map(lambda value: json.dumps(value).encode())
    | st.fixed_dictionaries({"manifest": manifest_like, "signature": st.text()}).map(
        lambda value: json.dumps(value).encode()
    )
)
def test_garbage_never_raises_anything_but_our_error(keeper: Keeper, text: bytes) -> None:
    with pytest.raises(ManifestError):
        parse_signed(text, keeper.trust)


# ---- older and newer --------------------------------------------------------------


def test_a_manifest_is_newer_by_its_version_alone() -> None:
    newer = replace(MANIFEST, version=8, sites=MANIFEST.sites[:1])
    assert newer.newer_than(MANIFEST)
    assert not MANIFEST.newer_than(newer)
    assert not MANIFEST.newer_than(MANIFEST)


def test_two_different_manifests_of_one_version_are_noticed() -> None:
    twin = replace(MANIFEST, sites=MANIFEST.sites[:2])
    with pytest.raises(ManifestError, match="two different manifests of version 7"):
        twin.newer_than(MANIFEST)


def test_manifests_of_different_federations_are_not_compared() -> None:
    with pytest.raises(ManifestError, match="federation 'law'"):
        replace(MANIFEST, federation_id="law", version=9).newer_than(MANIFEST)


# ---- logs of rounds ----------------------------------------------------------------

NAMED = NamedModel(b"g" * 32, 1000, b"f" * 32)


def test_a_manifest_that_names_a_generator_reads_back(keeper: Keeper) -> None:
    named = replace(MANIFEST, version=8, generator=NAMED)
    assert parse_signed(signed(named, keeper.authority), keeper.trust) == named
    assert MANIFEST.payload == replace(named, version=7, generator=None).payload


def test_each_log_has_a_manifest_of_its_own_name_and_the_same_sites() -> None:
    named = replace(MANIFEST, generator=NAMED, retriever=NamedModel(b"r" * 32, 10))
    log = log_id("med", GENERATOR)
    theirs = named.of_log(log)
    assert (log, model_of(log), model_of("med")) == ("med.generator", GENERATOR, RETRIEVER)
    assert (theirs.sites, theirs.tolerated, theirs.version) == (named.sites, 1, 7)
    assert (theirs.retriever, theirs.digest == named.digest) == (NAMED, False)
    assert named.of_log("med") == named


def test_no_round_runs_of_a_generator_that_is_not_named() -> None:
    whole = replace(MANIFEST, sites=(*MANIFEST.sites, ManifestSite("zeta", "localhost:1")))
    assert "names no generator" in whole.of_log("med.generator").objection
    assert replace(whole, generator=NAMED).of_log("med.generator").objection == ""
    assert whole.objection == ""


def test_another_generator_is_a_step_of_its_own() -> None:
    named = replace(MANIFEST, version=8, generator=NAMED)
    assert named.step_from(MANIFEST) == ""
    both = replace(named, faulty_sites=2)
    assert "the generator would be another" in both.step_from(MANIFEST)
    # Each log goes over what concerns it.
    assert both.of_log("med.generator").step_from(MANIFEST.of_log("med.generator"))


@pytest.mark.parametrize(
    "text",
    ["", f"{'0' * 64}:1", f"{'0' * 64}:1:", f"{'0' * 64}:1:{'0' * 63}", f"{'0' * 64}:0:{'0' * 64}"],
)
def test_a_generator_is_named_whole_or_not_at_all(keeper: Keeper, text: str) -> None:
    inner = json.loads(keeper.file)["manifest"] | {"generator": text}
    payload = b"hanse-manifest-v1\0" + json.dumps(
        inner, sort_keys=True, separators=(",", ":")
    ).encode("ascii")
    signature = base64.b64encode(sign_with_authority(keeper.authority, payload)).decode()
    file = json.dumps({"manifest": inner, "signature": signature}).encode()
    with pytest.raises(ManifestError):
        parse_signed(file, keeper.trust)


def test_a_federation_cannot_be_called_as_a_log_of_another(keeper: Keeper) -> None:
    posing = replace(MANIFEST, federation_id="med.generator")
    with pytest.raises(ManifestError, match="is of federation"):
        signed(posing, keeper.authority)
    with pytest.raises(ManifestError, match="refused"):
        replace(MANIFEST, federation_id="med.planner")
    with pytest.raises(IdentityError, match="refused"):
        create_authority(keeper.authority.parent / "other", "med.generator")
