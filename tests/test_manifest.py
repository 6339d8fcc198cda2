"""Attacks on the list of sites: changed, forged, doubled, oversized and garbled manifests."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.identity import IdentityError, Trust, create_authority, sign_with_authority
from peers.manifest import (
    MAX_BYTES,
    FederationManifest,
    ManifestError,
    ManifestSite,
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
    }
)


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
