"""The federation manifest: the signed list of sites, and who of them counts.

It is a JSON file, so that people can read what they are asked to trust:
``{"manifest": {...}, "signature": "<base64>"}``. The federation's authority
signs the canonical encoding of the inner object, so that spaces and the order
of keys do not matter but every value does.

It says, too, how many of the sites may lie (``faulty_sites``, f), and so how many of
them decide: of n that take part more than (n + f) / 2, a quorum. And it may name the
retriever that rounds train (``retriever``): one that others name is no step of a member's.
Where it names a ``generator``, too, there are rounds that train it, in a log of their own.

A manifest is only ever replaced by one with a greater version number, one step at a
time. Whether one is newer, and whether it is a step, is told here; to refuse one that
is not is the caller's decision.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from crypto.identity.authority import sign_with_authority
from crypto.identity.keys import IdentityError
from crypto.identity.names import check_id
from crypto.identity.trust import Trust

MAX_BYTES = 1024 * 1024
MAX_SITES = 256
MAX_FAULTY_SITES = (MAX_SITES - 1) // 3  # what n > 3f can ever bear
MAX_VERSION = 2**63 - 1  # fits SQLite's and protobuf's integers
MAX_VALUES = 2**32  # 16 GiB of float32

_DOMAIN = b"hanse-manifest-v1\0"  # the authority signs nothing else that begins like this
_MAX_ADDRESS = 261  # a DNS name of 255, a colon, a port of 5
_ADDRESS = re.compile(
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})"
)
_NAMED = re.compile(r"([0-9a-f]{64}):([1-9][0-9]{0,9})(?::([0-9a-f]{64}))?")

RETRIEVER, GENERATOR = "retriever", "generator"
MODELS = (RETRIEVER, GENERATOR)  # each is trained in a log of rounds of its own


def log_id(federation_id: str, model: str) -> str:
    """What names a model's log of rounds in whatever is signed there.

    That of the retriever is the federation's id; the others have a dot, which no such id has.
    """
    return federation_id if model == RETRIEVER else f"{federation_id}.{model}"


def model_of(log: str) -> str:
    """The model whose rounds a log has."""
    return log.partition(".")[2] or RETRIEVER


_KINDS: dict[type, str] = {
    str: "text",
    int: "a whole number",
    bool: "true or false",
    list: "a list",
}
_T = TypeVar("_T")


class ManifestError(Exception):
    """A manifest was refused: what was found, what was expected, what to do."""


@dataclass(frozen=True)
class ManifestSite:
    """A site of the federation: where it is reached, and whether it takes part."""

    id: str
    address: str  # advertised "host:port"; IPv6 as "[::1]:port"
    enabled: bool = True

    def __post_init__(self) -> None:
        _check_id(self.id, "site id")
        match = _ADDRESS.fullmatch(self.address) if len(self.address) <= _MAX_ADDRESS else None
        if match is None or not 1 <= int(match[1]) <= 65535:
            raise ManifestError(
                f"address {self.address[:80]!r} of site {self.id!r} is refused: expected host:port "
                "as other sites reach it"
            )


@dataclass(frozen=True)
class NamedModel:
    """What rounds train, by name.

    ``digest``: SHA-256 (32 bytes) of the shape manifest, which covers the weights of what it
    builds on, how that reads texts, and the adaptation; ``values``: how many float32 a version
    has, so that a site without that model knows how long its file may be. ``first``: the digest
    of the version that round 1 trains from, for a site that can't make it; empty: sites
    go by what round 1's quorum signed.
    """

    digest: bytes
    values: int
    first: bytes = b""

    def __post_init__(self) -> None:
        sound = len(self.digest) == 32 and len(self.first) in (0, 32)
        if not sound or not 1 <= self.values <= MAX_VALUES:
            raise ManifestError(
                f"a model of {self.values} values by a name of {len(self.digest)} bytes is "
                f"refused: expected 1 to {MAX_VALUES} values, and 32 bytes"
            )

    @classmethod
    def parse(cls, text: str) -> NamedModel:
        """As `fedctl status` shows it, DIGEST:VALUES or DIGEST:VALUES:FIRST.

        Raises ManifestError.
        """
        match = _NAMED.fullmatch(text)
        if match is None:
            raise ManifestError(
                f"{text[:80]!r} names no model: expected DIGEST:VALUES, 64 hexadecimal "
                "digits and a number, as `fedctl status` shows it at a site that has it"
            )
        return cls(bytes.fromhex(match[1]), int(match[2]), bytes.fromhex(match[3] or ""))

    def __str__(self) -> str:
        first = f":{self.first.hex()}" if self.first else ""
        return f"{self.digest.hex()}:{self.values}{first}"


@dataclass(frozen=True)
class FederationManifest:
    """Who is in a federation. Sites are sorted by id, which is also the rotation's order."""

    federation_id: str
    version: int  # 1 ..
    sites: tuple[ManifestSite, ...]
    faulty_sites: int | None = None  # None: signed when manifests did not say it
    retriever: NamedModel | None = None  # None: whatever the sites were founded with
    generator: NamedModel | None = None  # None: none is trained together

    def __post_init__(self) -> None:
        _check_id(self.federation_id.removesuffix(f".{GENERATOR}"), "federation id")
        if self.generator is not None and not self.generator.first:
            raise ManifestError(
                "a generator is named with the version that its rounds begin at: expected "
                "DIGEST:VALUES:FIRST, as `fedctl status` shows it at a site that has it"
            )
        if not 1 <= self.version <= MAX_VERSION:
            raise ManifestError(f"manifest version {self.version} is refused: it begins at 1")
        if not 1 <= len(self.sites) <= MAX_SITES:
            raise ManifestError(
                f"a manifest has 1 to {MAX_SITES} sites, this one has {len(self.sites)}"
            )
        if self.faulty_sites is not None and not 0 <= self.faulty_sites <= MAX_FAULTY_SITES:
            raise ManifestError(
                f"faulty_sites = {self.faulty_sites} is refused: expected 0 to "
                f"{MAX_FAULTY_SITES}, how many of the sites may lie"
            )
        for before, site in zip(self.sites, self.sites[1:], strict=False):
            if before.id >= site.id:
                raise ManifestError(
                    f"site {site.id!r} follows {before.id!r}: list each site once, sorted by id"
                )

    def of_log(self, log: str) -> FederationManifest:
        """The same sites, and f, as a model's rounds go by them.

        It follows from the one that is signed, and is named by the log: what counts under it
        counts in no other log.
        """
        if log == self.federation_id:
            return self
        return replace(self, federation_id=log, retriever=self.generator, generator=None)

    @cached_property
    def enabled_ids(self) -> tuple[str, ...]:
        """The sites that take part, sorted."""
        return tuple(site.id for site in self.sites if site.enabled)

    @property
    def tolerated(self) -> int:
        """How many sites, f, may lie in any message at any time: 1 where it does not say."""
        return 1 if self.faulty_sites is None else self.faulty_sites

    @cached_property
    def quorum(self) -> int:
        """How many sites decide, whoever answers: the least number above (n + f) / 2.

        So two quorums share more than f sites, and with them an honest one (Malkhi, Reiter,
        "Byzantine Quorum Systems", 1998). A federation of f sites or fewer has no quorum.
        """
        return (len(self.enabled_ids) + self.tolerated) // 2 + 1

    @cached_property
    def majority(self) -> int:
        """More than half of the enabled sites: what decided before there were quorums.

        Two majorities share a site, but it may be one that lies. History from then is
        verified by it, and nothing new is decided by it.
        """
        return len(self.enabled_ids) // 2 + 1

    @property
    def objection(self) -> str:
        """Why no round can run under it, and what to do; empty if rounds can.

        A sum needs two honest sites beside f that lie: with fewer, what one honest site
        sends is what the others do not know of the sum.
        """
        if self.retriever is None and model_of(self.federation_id) != RETRIEVER:
            return (
                f"manifest {self.version} names no {model_of(self.federation_id)}: have the "
                f"federation's keeper name one (`fedctl manifest sign --generator`)"
            )
        sites, needed = len(self.enabled_ids), self.tolerated + 2
        if sites >= needed:
            return ""
        cause = (
            f"{_counted(sites)} of manifest {self.version} can't run rounds where faulty_sites is "
            f"{self.tolerated}: that takes {_counted(needed)}. Let {needed - sites} more take part"
        )
        if sites < 2:
            return cause
        given_up = (
            "counts on every site keeping to the protocol: one that lies can split the history"
            if sites == 2
            else "bears no more liars than that"
        )
        return (
            f"{cause}; or sign one with --faulty-sites {sites - 2} (`fedctl manifest sign`): "
            f"{_counted(sites)} need faulty_sites = {sites - 2}, which {given_up}"
        )

    def site(self, site_id: str) -> ManifestSite:
        """The entry of a site; raises ManifestError when the manifest does not list it."""
        for site in self.sites:
            if site.id == site_id:
                return site
        raise ManifestError(
            f"site {site_id!r} is not in the manifest of {self.federation_id!r} (version "
            f"{self.version}): its keeper adds sites with `fedctl manifest`"
        )

    def enabled(self, site_id: str) -> bool:
        """Whether a site is listed and takes part."""
        return site_id in self.enabled_ids

    def newer_than(self, other: FederationManifest) -> bool:
        """Whether this one replaces ``other``; ManifestError if they cannot be compared.

        Two manifests of one version must be equal: if the authority has signed
        two, nobody can tell which one holds.
        """
        if self.federation_id != other.federation_id:
            raise ManifestError(
                f"the manifest is of federation {self.federation_id!r}, expected "
                f"{other.federation_id!r}: take the one of this federation"
            )
        if self.version == other.version and self != other:
            raise ManifestError(
                f"there are two different manifests of version {self.version}: its keeper must "
                "sign a new version (`fedctl manifest`)"
            )
        return self.version > other.version

    def step_from(self, before: FederationManifest) -> str:
        """Why a daemon may not put it in force directly behind ``before``; empty if it may.

        A step is one site that comes or goes, or f by one, or another model, never two of
        these; addresses are free. Then any quorum of the one and any of the other share more
        sites than either's f, so that of two versions committed while sites go over, an honest
        site would have had to vote for both. Whether this one is newer, `newer_than` says.
        """
        moved = set(before.enabled_ids) ^ set(self.enabled_ids)
        steps = len(moved) + abs(self.tolerated - before.tolerated)
        steps += (self.retriever != before.retriever) + (self.generator != before.generator)
        if steps <= 1:
            return ""
        return (
            f"from manifest {before.version} to {self.version} it is more than one step: "
            f"{self.changes_from(before)} at once. While some sites have the old list and some the "
            "new one, each half could commit a round of its own. Sign the steps in between, one "
            "site, one of faulty_sites or one model at a time, and let a round be committed "
            "under each"
        )

    def changes_from(self, before: FederationManifest) -> str:
        """Which sites would come or go behind ``before``, and what else would change, in words."""
        moved = sorted(set(before.enabled_ids) ^ set(self.enabled_ids))
        changes = [f"{', '.join(moved)} would come or go"] if moved else []
        if self.tolerated != before.tolerated:
            changes.append(f"faulty_sites would go from {before.tolerated} to {self.tolerated}")
        if self.retriever != before.retriever:
            changes.append("the retriever would be another")
        if self.generator != before.generator:
            changes.append("the generator would be another")
        return " and ".join(changes)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of what is signed: 32 bytes that name this manifest and no other."""
        return hashlib.sha256(self.payload).digest()

    @property
    def payload(self) -> bytes:
        """The canonical encoding that is signed: JSON, keys sorted, no spaces, ASCII."""
        return _DOMAIN + _canonical(self._as_json()).encode("ascii")

    def _as_json(self) -> dict[str, object]:
        fields: dict[str, object] = {
            "federation_id": self.federation_id,
            "version": self.version,
            "sites": [
                {"id": site.id, "address": site.address, "enabled": site.enabled}
                for site in self.sites
            ],
        }
        # Manifests signed before there was one keep their encoding, so their signatures hold.
        if self.faulty_sites is not None:
            fields["faulty_sites"] = self.faulty_sites
        if self.retriever is not None:
            fields["retriever"] = str(self.retriever)
        if self.generator is not None:
            fields["generator"] = str(self.generator)
        return fields


def signed(manifest: FederationManifest, authority_dir: Path) -> bytes:
    """The manifest file, signed by the authority in that folder, checked as its readers will.

    Raises IdentityError when the authority cannot sign, ManifestError when it
    is another federation's.
    """
    signature = sign_with_authority(authority_dir, manifest.payload)
    file = {
        "manifest": manifest._as_json(),
        "signature": base64.b64encode(signature).decode("ascii"),
    }
    text = json.dumps(file, indent=2).encode("ascii") + b"\n"
    parse_signed(text, Trust.from_pem((authority_dir / "ca.crt").read_bytes()))
    return text


def parse_signed(text: bytes, trust: Trust, *, at: datetime | None = None) -> FederationManifest:
    """The manifest in a file, after its form, bounds, federation and signature were checked.

    ``at``: the moment at which the authority that signed it must be in office, or one that
    is about to follow another; None accepts any authority of this federation's past, too.
    Raises ManifestError, whatever the bytes are.
    """
    if len(text) > MAX_BYTES:
        raise ManifestError(f"a manifest has at most {MAX_BYTES} bytes, this one {len(text)}")
    file = _object(_json(text), ("manifest", "signature"), "the manifest file")
    manifest = _manifest(file["manifest"])
    if manifest.federation_id != trust.federation_id:
        raise ManifestError(
            f"the manifest is of federation {manifest.federation_id!r}, expected "
            f"{trust.federation_id!r}: take the one of this federation"
        )
    try:
        signature = base64.b64decode(_typed(file["signature"], str, "signature"), validate=True)
        trust.verify_authority(signature, manifest.payload, at=at)
    except ValueError as error:
        raise ManifestError(f"the manifest's signature is not base64 ({error})") from error
    except IdentityError as error:
        raise ManifestError(
            "the manifest is not signed by this federation's authority, or was changed since: "
            "get it again from the federation's keeper"
        ) from error
    return manifest


def _manifest(value: object) -> FederationManifest:
    required = ("federation_id", "version", "sites")
    optional = ("faulty_sites", *MODELS)
    fields = _object(value, required, "the manifest", optional=optional)
    sites: list[object] = _typed(fields["sites"], list, "sites")
    if len(sites) > MAX_SITES:
        raise ManifestError(f"a manifest has 1 to {MAX_SITES} sites, this one has {len(sites)}")
    return FederationManifest(
        federation_id=_typed(fields["federation_id"], str, "federation_id"),
        version=_typed(fields["version"], int, "version"),
        sites=tuple(_site(site) for site in sites),
        faulty_sites=(
            _typed(fields["faulty_sites"], int, "faulty_sites")
            if "faulty_sites" in fields
            else None
        ),
        retriever=_model(fields, RETRIEVER),
        generator=_model(fields, GENERATOR),
    )


def _model(fields: dict[str, object], name: str) -> NamedModel | None:
    return NamedModel.parse(_typed(fields[name], str, name)) if name in fields else None


def _site(value: object) -> ManifestSite:
    fields = _object(value, ("id", "address", "enabled"), "a site of the manifest")
    return ManifestSite(
        id=_typed(fields["id"], str, "id"),
        address=_typed(fields["address"], str, "address"),
        enabled=_typed(fields["enabled"], bool, "enabled"),
    )


def _json(text: bytes) -> object:
    try:
        # A key that is there twice would mean one thing to us and another to a reader.
        result: object = json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"the manifest is not JSON in UTF-8 ({error})") from error
    return result


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ManifestError("the manifest has a key twice: each belongs there once")
    return result


def _object(
    value: object, keys: tuple[str, ...], what: str, *, optional: tuple[str, ...] = ()
) -> dict[str, object]:
    if not isinstance(value, dict) or not set(keys) <= set(value) <= {*keys, *optional}:
        perhaps = f", and perhaps {', '.join(optional)}" if optional else ""
        raise ManifestError(f"{what} is an object with exactly {', '.join(keys)}{perhaps}")
    return value


def _typed(value: object, kind: type[_T], what: str) -> _T:
    # In Python a bool is an int; in JSON, true is no version number.
    if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
        raise ManifestError(f"{what} in the manifest must be {_KINDS[kind]}")
    return value


def _counted(sites: int) -> str:
    return "one site" if sites == 1 else "two sites" if sites == 2 else f"{sites} sites"


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _check_id(value: str, what: str) -> None:
    try:
        check_id(value[:80], what)
    except IdentityError as error:
        raise ManifestError(str(error)) from error


def coordinator_of(manifest: FederationManifest, round_: int, attempt: int) -> str:
    """The site that runs this attempt: the sorted enabled sites in rotation."""
    sites = manifest.enabled_ids
    return sites[(round_ + attempt) % len(sites)]
