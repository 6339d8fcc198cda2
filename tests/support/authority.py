"""A federation for tests: a real authority, real sites, a signed manifest, free ports.

Example::

    federation = Federation.found(tmp_path, "alpha", "beta")
    identity = federation.identity("alpha")
    without_beta = federation.manifest(version=2, disabled={"beta"})

Everything is made by the code that operators use (crypto/identity/site.py,
peers/wire/manifest.py), so a site here is refused or accepted as one of theirs.
"""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import os
import random
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import cycle, islice
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from crypto.identity.authority import create_authority, sign_request
from crypto.identity.site import Identity, create_site, install
from crypto.identity.trust import Trust
from peers.wire.manifest import (
    FederationManifest,
    ManifestSite,
    NamedModel,
    parse_signed,
    signed,
)
from proto import federation_pb2 as pb

FEDERATION_ID = "med"


_PROCESSES = 16  # of one pytest-xdist, at most, or some share their ports
_OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")


@cache
def _ports() -> Iterator[int]:
    """In an order of chance, for ever; none comes again before all others have."""
    lowest = int(_OUTGOING.read_text().split()[0])
    ours = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _PROCESSES
    ports = range(lowest // 2 + ours, lowest, _PROCESSES)
    return cycle(random.SystemRandom().sample(ports, len(ports)))


def free_port() -> int:
    """A loopback port that nobody listens on just now.

    It may be bound seconds later, or again after a restart: so it is none of those from which
    the kernel takes one for whoever calls somebody, none that another process of the same
    pytest-xdist may choose meanwhile, and none that was chosen here a moment before.
    """
    for port in islice(_ports(), 4096):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("every port that tests may take is taken")


@dataclass(frozen=True)
class Federation:
    """An authority in ``root/ca`` and a folder for each site.

    ``ports`` are theirs on ``hosts``, or on loopback. ``faulty_sites`` of its manifests:
    with 0 a plain majority decides, so that three sites go on with one of them down.
    """

    root: Path
    federation_id: str
    ports: dict[str, int]
    hosts: dict[str, str] = field(default_factory=dict)
    faulty_sites: int = 0

    @classmethod
    def found(
        cls, root: Path, *sites: str, federation_id: str = FEDERATION_ID, faulty_sites: int = 0
    ) -> Federation:
        """Make the authority and enrol the sites."""
        long_ago = datetime.now(UTC) - timedelta(days=30)
        create_authority(root / "ca", federation_id, now=long_ago)
        ports = {site: free_port() for site in sorted(sites)}
        federation = cls(root, federation_id, ports, faulty_sites=faulty_sites)
        for site in sites:
            federation.enrol(site)
        return federation

    @property
    def authority(self) -> Path:
        return self.root / "ca"

    @property
    def trust(self) -> Trust:
        return Trust.from_pem((self.authority / "ca.crt").read_bytes())

    def address(self, site: str) -> str:
        """Where this site's peers call it, host:port."""
        return f"{self.hosts.get(site, '127.0.0.1')}:{self.ports[site]}"

    def enrol(self, site: str, *, expired: bool = False) -> Identity:
        """A site with a certificate, known to the authority if not to the manifest.

        ``expired``: its certificate was good for a day, two weeks ago.
        """
        folder, days = self.root / site, 1 if expired else 365
        now = datetime.now(UTC) - timedelta(days=14 if expired else 0)
        create_site(folder, self.federation_id, site)
        request = (folder / "site.csr").read_bytes()
        certificate = sign_request(self.authority, request, expect_site=site, days=days, now=now)
        install(folder, certificate, (self.authority / "ca.crt").read_bytes(), now=now)
        return self.identity(site, now=now)

    def forge(self, names: list[x509.GeneralName], *, seconds: int = 86_400) -> Identity:
        """What a careless authority could sign: any names, good for some ``seconds`` from now."""
        issuer = x509.load_pem_x509_certificate((self.authority / "ca.crt").read_bytes())
        signer = load_pem_private_key((self.authority / "ca.key").read_bytes(), None)
        assert isinstance(signer, ec.EllipticCurvePrivateKey)
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "mallory")])
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        certificate = (
            x509.CertificateBuilder(issuer.subject, subject, key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(seconds=seconds))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
            .add_extension(x509.ExtendedKeyUsage(usages), False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), False
            )
            .add_extension(x509.SubjectAlternativeName(names), False)
            .sign(signer, hashes.SHA256())
        )
        return Identity(
            site_id="mallory",
            federation_id=self.federation_id,
            certificate_pem=certificate.public_bytes(Encoding.PEM),
            certificate_der=certificate.public_bytes(Encoding.DER),
            key_pem=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
            authority_pem=issuer.public_bytes(Encoding.PEM),
            not_after=certificate.not_valid_after_utc,
        )

    def renew(self, site: str, *, days: int = 365) -> Identity:
        """A new certificate for a site's key."""
        folder = self.root / site
        certificate = sign_request(self.authority, (folder / "site.csr").read_bytes(), days=days)
        install(folder, certificate, (self.authority / "ca.crt").read_bytes())
        return self.identity(site)

    def identity(self, site: str, *, now: datetime | None = None) -> Identity:
        folder = self.root / site
        return Identity.load(folder / "site.crt", folder / "site.key", folder / "ca.crt", now=now)

    def manifest(
        self,
        *,
        version: int = 1,
        without: Collection[str] = (),
        disabled: Collection[str] = (),
        faulty_sites: int | None = None,
        retriever: str = "",
        generator: str = "",
    ) -> FederationManifest:
        """The signed list of the sites, read back as a site reads it.

        ``faulty_sites``: if not the federation's. ``retriever`` and ``generator``: as
        `fedctl status` shows them.
        """
        listed = tuple(
            ManifestSite(site, self.address(site), enabled=site not in disabled)
            for site in self.ports
            if site not in without
        )
        faulty = self.faulty_sites if faulty_sites is None else faulty_sites
        named = [NamedModel.parse(one) if one else None for one in (retriever, generator)]
        manifest = FederationManifest(self.federation_id, version, listed, faulty, *named)
        return parse_signed(signed(manifest, self.authority), self.trust)


def signer(identity: Identity) -> Callable[[bytes], pb.Signature]:
    """Signs as that site does."""

    def sign(payload: bytes) -> pb.Signature:
        return pb.Signature(
            site=identity.site_id,
            signature=identity.sign(payload),
            certificate=identity.certificate_der,
        )

    return sign
