"""A federation that never changes: the corpus holds signatures that must verify in every year.

Its certificates and keys were made once by the code that operators use; `python -m
tests.fuzz.world` makes others, and with them every seed must be made anew. The
keys are written down as numbers. They protect nothing.
"""

from __future__ import annotations

import atexit
import base64
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, cached_property
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from crypto.identity.authority import create_authority, sign_request
from crypto.identity.keys import key_pem
from crypto.identity.site import Identity, create_site, install
from crypto.identity.trust import Trust
from peers.wire.certificates import RULES, certificate_of, plan_digest, sign_vote
from peers.wire.manifest import FederationManifest, ManifestSite, signed
from proto import federation_pb2 as pb

FEDERATION = "med"
SITES = ("alpha", "beta", "gamma")
AT = datetime(2026, 6, 1, tzinfo=UTC)  # when the certificates of this world are verified
GENESIS = b"\x01" * 32

_FOUNDED = datetime(2025, 1, 1, tzinfo=UTC)
_DAYS = 20 * 366
_FILE = Path(__file__).with_name("world.json")


@dataclass(frozen=True)
class World:
    """The authority in ``root/ca``, each site in ``root/<site>``, as their people hold them."""

    root: Path

    @property
    def authority(self) -> Path:
        return self.root / "ca"

    @cached_property
    def trust(self) -> Trust:
        return Trust.from_pem((self.authority / "ca.crt").read_bytes())

    @cached_property
    def identities(self) -> dict[str, Identity]:
        return {site: self._identity(self.root / site) for site in SITES}

    def _identity(self, folder: Path) -> Identity:
        return Identity.load(folder / "site.crt", folder / "site.key", folder / "ca.crt", now=AT)

    @cached_property
    def manifests(self) -> dict[int, FederationManifest]:
        """By version: two, of the same sites."""
        sites = tuple(ManifestSite(site, f"{site}.example:7443") for site in SITES)
        return {version: FederationManifest(FEDERATION, version, sites) for version in (1, 2)}

    def key(self, owner: str) -> ec.EllipticCurvePrivateKey:
        """The key of a site, or of "ca"."""
        path = self.root / owner / ("ca.key" if owner == "ca" else "site.key")
        key = serialization.load_pem_private_key(path.read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return key

    def sign(self, owner: str, payload: bytes) -> bytes:
        return self.key(owner).sign(payload, ec.ECDSA(hashes.SHA256()))

    def folder(self, name: str) -> Path:
        """A folder for what a target needs on a disk."""
        path = self.root / name
        path.mkdir(exist_ok=True)
        return path


@cache
def world() -> World:
    """The one federation of all targets, in a folder that goes with this process."""
    root = Path(tempfile.mkdtemp(prefix="hanse-fuzz-"))
    atexit.register(shutil.rmtree, root, True)
    for name, content in json.loads(_FILE.read_text(encoding="ascii")).items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        if name.endswith(".key"):
            key = ec.derive_private_key(int(content, 16), ec.SECP256R1())
            path.touch(0o600)
            path.write_bytes(key_pem(key))
        else:
            path.write_bytes(_as_pem(name, base64.b64decode(content)))
    return World(root)


# ---- what honest sites say in it ---------------------------------------------


def training() -> pb.TrainingPlan:
    return pb.TrainingPlan(
        adapt=pb.HEAD,
        local_epochs=1,
        batch_size=32,
        learning_rate=1e-4,
        temperature=0.05,
        bits=16,
        min_participants=2,
        max_num_examples=1000,
    )


def vote_body(
    round_: int = 1, parent: bytes = GENESIS, version: int = 1, *, old: bool = False
) -> pb.VoteBody:
    """``old``: of a time when majorities decided."""
    body = pb.VoteBody(
        federation_id=FEDERATION,
        round=round_,
        parent_digest=parent,
        model_digest=bytes([round_ + 1]) * 32,
        contributors=list(SITES[:2]),
        manifest_version=version,
        plan_digest=plan_digest(training()),
    )
    if not old:
        body.rules, body.mean_loss, body.next_clip_norm = RULES, 0.5, 0.25
        body.manifest_digest = world().manifests[version].digest
        body.statement_digest = bytes([round_]) * 32
    return body


def certificate(body: pb.VoteBody, attempt: int = 0) -> pb.Certificate:
    """A round certificate with everybody's votes; of old, those of alpha and beta."""
    voters = SITES if body.rules else SITES[:2]
    votes = [sign_vote(_signing(site), body, attempt) for site in voters]
    return certificate_of(attempt, votes, unix_ms=1)


def _signing(site: str) -> Callable[[bytes], pb.Signature]:
    identity = world().identities[site]

    def sign(payload: bytes) -> pb.Signature:
        return pb.Signature(
            site=site, signature=identity.sign(payload), certificate=identity.certificate_der
        )

    return sign


def chain(old: int = 0) -> list[pb.Certificate]:
    """Three rounds, the last under a newer manifest, the first ``old`` of them of old."""
    first = certificate(vote_body(1, old=old > 0))
    second = certificate(vote_body(2, first.body.model_digest, old=old > 1), attempt=1)
    return [first, second, certificate(vote_body(3, second.body.model_digest, version=2))]


def signed_manifests() -> list[bytes]:
    return [signed(manifest, world().authority) for manifest in world().manifests.values()]


# ---- how it was made -----------------------------------------------------------


def _as_pem(name: str, der: bytes) -> bytes:
    if name.endswith(".csr"):
        request = x509.load_der_x509_csr(der)
        return request.public_bytes(serialization.Encoding.PEM)
    return x509.load_der_x509_certificate(der).public_bytes(serialization.Encoding.PEM)


def _as_text(path: Path) -> str:
    if path.suffix == ".key":
        key = serialization.load_pem_private_key(path.read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return f"{key.private_numbers().private_value:064x}"
    body = path.read_text().strip().splitlines()[1:-1]
    return "".join(body)


def _make(root: Path) -> dict[str, str]:
    create_authority(root / "ca", FEDERATION, days=_DAYS, now=_FOUNDED)
    authority = (root / "ca" / "ca.crt").read_bytes()
    for site in SITES:
        create_site(root / site, FEDERATION, site)
        request = (root / site / "site.csr").read_bytes()
        crt = sign_request(root / "ca", request, days=_DAYS - 7, now=_FOUNDED + timedelta(days=1))
        install(root / site, crt, authority, now=AT)
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): _as_text(path) for path in files}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        _FILE.write_text(json.dumps(_make(Path(made)), indent=1) + "\n", encoding="ascii")
