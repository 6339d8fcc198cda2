"""Targets: what a site proves itself with, and what the authority signs.

Certificates, enrolment requests, sealed keys, manifests: see tests/fuzz/targets/wire.py
for what a judge is.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from crypto.identity.authority import sign_request
from crypto.identity.keys import IdentityError
from crypto.identity.names import ID
from crypto.identity.trust import expiry_of
from daemon.jobs.sums.ckks import sealing_context
from peers.wire.errors import RemoteProtocolError
from peers.wire.histories import pack_manifests, unpack_manifests
from peers.wire.manifest import FederationManifest, ManifestError, parse_signed, signed
from tests.fuzz.mutators import Tlv, mutate_bytes, mutate_der, mutate_json, read_json
from tests.fuzz.targets.wire import joined, pieces, shuffled
from tests.fuzz.world import AT, FEDERATION, SITES, signed_manifests, world

# ---- a site's X.509 certificate -----------------------------------------------------


def judge_x509(data: bytes) -> bool:
    """Accepted: a site of this federation, and a key may be sealed for it."""
    trust = world().trust
    try:
        expiry_of(data)
    except IdentityError:
        expires = False
    else:
        expires = True
    try:
        site = trust.site_of(data, at=AT)
    except IdentityError:
        return False
    assert expires
    assert ID.fullmatch(site)
    trust.seal_for(data, b"a key", b"")
    return True


def mutate_x509(data: bytes, chance: Random) -> bytes:
    """Mostly signed anew by the authority: what a careless one could sign."""
    pem = data.startswith(b"-----")
    der = _from_pem(data) if pem else data
    if chance.random() < 0.7:
        der = _resigned(der, "ca", lambda tbs: mutate_der(tbs, chance))
    else:
        der = mutate_der(der, chance)
    return _pem("CERTIFICATE", der) if pem or chance.random() < 0.1 else der


def x509_seeds() -> Iterator[bytes]:
    yield from (identity.certificate_der for identity in world().identities.values())
    yield world().identities["alpha"].certificate_pem
    yield x509.load_pem_x509_certificate(world().trust.authority_pem).public_bytes(Encoding.DER)


def _resigned(der: bytes, owner: str, change: Callable[[bytes], bytes]) -> bytes:
    """The first part of a signed structure changed, the signature made to fit (RFC 5280 §4.1)."""
    try:
        (whole,) = Tlv.parse_all(der)
        first, algorithm, _ = whole.inside
    except ValueError:
        return der
    changed = change(first.encoded())
    signature = Tlv(0x03, b"\0" + world().sign(owner, changed))
    body = changed + algorithm.encoded() + signature.encoded()
    return Tlv(0x30, body).encoded()


def _from_pem(pem: bytes) -> bytes:
    lines = [line for line in pem.splitlines() if not line.startswith(b"-----")]
    try:
        return base64.b64decode(b"".join(lines))
    except ValueError:
        return b""


def _pem(what: str, der: bytes) -> bytes:
    text = base64.b64encode(der).decode()
    lines = "\n".join(text[start : start + 64] for start in range(0, len(text), 64))
    return f"-----BEGIN {what}-----\n{lines}\n-----END {what}-----\n".encode()


# ---- a request to be enrolled ---------------------------------------------------------


def judge_request(data: bytes) -> bool:
    """Accepted: what the authority signs, every site accepts, under the name asked for."""
    try:
        certificate = sign_request(world().authority, data, now=AT)
    except IdentityError:
        return False
    assert ID.fullmatch(world().trust.site_of(certificate, at=AT))
    return True


def mutate_request(data: bytes, chance: Random) -> bytes:
    der = _from_pem(data)
    if chance.random() < 0.7:
        der = _resigned(der, chance.choice(SITES), lambda info: mutate_der(info, chance))
    else:
        der = mutate_der(der, chance)
    return _pem("CERTIFICATE REQUEST", der)


def request_seeds() -> Iterator[bytes]:
    yield from ((world().root / site / "site.csr").read_bytes() for site in SITES)


# ---- a round's key, sealed for one site --------------------------------------------------

_CONTEXT = sealing_context(FEDERATION, (1, 0), "beta", "alpha")


def judge_sealed(data: bytes) -> bool:
    """Accepted: as long as what was sealed, and in no other context."""
    alpha = world().identities["alpha"]
    try:
        plaintext = alpha.unseal(data, _CONTEXT)
    except IdentityError:
        return False
    assert len(plaintext) == len(data) - 82  # version, ephemeral point, tag
    for other in (sealing_context(FEDERATION, (1, 1), "beta", "alpha"), b""):
        try:
            alpha.unseal(data, other)
        except IdentityError:
            continue
        raise AssertionError("it opens in another context, too")
    return True


def mutate_sealed(data: bytes, chance: Random) -> bytes:
    """Sealed afresh now and then, else changed in one of its parts."""
    if chance.random() < 0.2:
        secret = chance.randbytes(chance.choice((0, 1, 14, 64)))
        sealed = world().trust.seal_for(
            world().identities["alpha"].certificate_der, secret, _CONTEXT
        )
        return sealed if chance.random() < 0.3 else mutate_bytes(sealed, chance)
    start, end = chance.choice(((0, 1), (1, 2), (1, 66), (66, len(data))))
    return data[:start] + mutate_bytes(data[start:end], chance) + data[end:]


def sealed_seeds() -> Iterator[bytes]:
    for site in ("alpha", "beta"):
        certificate = world().identities[site].certificate_der
        yield world().trust.seal_for(certificate, b"HNSK and residues", _CONTEXT)
    yield world().trust.seal_for(world().identities["alpha"].certificate_der, b"", _CONTEXT)


# ---- the manifest ---------------------------------------------------------------------------


def judge_manifest(data: bytes) -> bool:
    """Accepted: what was signed is what the file says, in one encoding only."""
    try:
        manifest = parse_signed(data, world().trust)
    except ManifestError:
        return False
    _check_manifest(data, manifest)
    return True


def _check_manifest(data: bytes, manifest: FederationManifest) -> None:
    assert manifest.payload == _payload(json.loads(data)["manifest"])
    assert [site.id for site in manifest.sites] == sorted({site.id for site in manifest.sites})
    assert not manifest.newer_than(manifest)
    assert manifest.objection or manifest.quorum <= len(manifest.enabled_ids)


def _payload(inner: Any) -> bytes:
    """The canonical encoding, written down a second time."""
    text = json.dumps(inner, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return b"hanse-manifest-v1\0" + text.encode("ascii")


def mutate_manifest(data: bytes, chance: Random) -> bytes:
    """Half of them signed anew: what a careless authority could sign."""
    value = mutate_json(read_json(data), chance)
    if isinstance(value, dict) and "manifest" in value and chance.random() < 0.5:
        signature = world().sign("ca", _payload(value["manifest"]))
        value = {**value, "signature": base64.b64encode(signature).decode("ascii")}
    ensure_ascii = chance.random() < 0.5
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=chance.choice((None, 2)))
    return text.encode("utf-8", "surrogatepass")


def manifest_seeds() -> Iterator[bytes]:
    yield from signed_manifests()
    yield signed(replace(world().manifests[2], faulty_sites=1), world().authority)


# ---- manifests of the past: catching up --------------------------------------------------------


def judge_manifests(data: bytes) -> bool:
    """Accepted: packed again, it is the same bytes; each manifest is then judged alone."""
    try:
        found = unpack_manifests(data)
    except RemoteProtocolError:
        return False
    assert pack_manifests(found) == data
    verdicts = [judge_manifest(text) for text in found]
    return all(verdicts)


def mutate_manifests(data: bytes, chance: Random) -> bytes:
    items = pieces(data)
    if not items:
        return data
    if chance.random() < 0.3:
        return joined(shuffled(items, chance))
    at = chance.randrange(len(items))
    items[at] = mutate_manifest(items[at], chance)
    return joined(items)


def manifests_seeds() -> Iterator[bytes]:
    yield pack_manifests(signed_manifests())
    yield b""
