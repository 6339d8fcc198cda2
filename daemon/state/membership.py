"""Who this site is, whom it trusts, and which manifest is in force here.

The files are the operator's and are read at the start and on SIGHUP. A manifest may
also come from a peer: the authority's signature is what counts, not who hands it on
(docs/decisions/0008). It is kept in the state file, so that it is in force again after a
restart; the operator's own file is left as it is.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

import structlog

from config.settings import Settings
from crypto.identity import keys, x509
from crypto.identity.keys import IdentityError, PublicKey
from crypto.identity.site import Identity
from crypto.identity.trust import Trust
from daemon.state.store import Store
from peers.wire.certificates import CertificateError, verify_certificate, verify_vote, vote_payload
from peers.wire.manifest import (
    FederationManifest,
    ManifestError,
    NamedModel,
    log_id,
    parse_signed,
)
from peers.wire.signing import signature_of
from proto import federation_pb2 as pb

log = structlog.get_logger()

_VERIFIED_AT_MOST = 100_000
# A lock of fifty sites has some two hundred signatures, and is verified again and again.
_SIGNATURES_AT_MOST: Final = 65_536
_CERTIFICATES_AT_MOST: Final = 1024  # several of each site of the largest federation
_SIGNED = b"hanse-verified-v1\0"
_ROUNDS_READ: Final = 64  # at the start, for who signed with which certificate last


@dataclass(frozen=True)
class _Signer:
    """A certificate that the authority issued. ``begins``, ``ends``: when it is valid (UTC)."""

    site: str
    key: PublicKey
    begins: datetime
    ends: datetime


@dataclass
class Signatures:
    """Which signatures were found good: each is verified once, each certificate read once.

    A site's key may be stolen, and its people then replace it. So once a newer certificate
    of a site was seen in a good signature, an older one is good for what was signed with it
    and seen here before, and for nothing else.
    """

    trust: Trust
    _signers: OrderedDict[bytes, _Signer] = field(default_factory=OrderedDict)
    _newest: dict[str, datetime] = field(default_factory=dict)
    # By name; whether the signer's certificate was the current one then.
    _good: OrderedDict[bytes, bool] = field(default_factory=OrderedDict)

    def verify(self, payload: bytes, signature: pb.Signature, *, past: bool) -> None:
        """Raises IdentityError unless that site signed; ``past``: see `signing.Keys`."""
        name = _name(payload, signature)
        current = self._good.get(name)
        if current or (past and current is not None):
            self._good.move_to_end(name)
            return
        signer = self._signer(signature.certificate)
        if signer.site != signature.site:
            raise IdentityError(f"the certificate is of {signer.site}, not of the signer")
        keys.check_signature(signer.key, signature.signature, payload, f"site {signer.site!r}")
        newest = self._newest.get(signer.site)
        if newest is None or signer.begins > newest:
            self._newest[signer.site] = newest = signer.begins
        if not past:
            self._must_be_current(signer, newest, signature.certificate)
        self._remember(name, current=not past)

    def made(self, payload: bytes, signature: pb.Signature) -> None:
        """One of our own: good for as long as it is remembered, whatever key we have then."""
        self._remember(_name(payload, signature), current=True)

    def seen(self, certificate: bytes) -> None:
        """A certificate that counted before this daemon was started; an older one does not now.

        One of an authority that is trusted no longer tells nothing.
        """
        with suppress(IdentityError):
            signer = self._signer(certificate)
            newest = self._newest.get(signer.site, signer.begins)
            self._newest[signer.site] = max(newest, signer.begins)

    def _must_be_current(self, signer: _Signer, newest: datetime, certificate: bytes) -> None:
        if signer.begins < newest:
            raise IdentityError(
                f"{signer.site} has had a newer certificate since {newest:%Y-%m-%d %H:%M} UTC: "
                "what is signed with an older one now counts for nothing"
            )
        now = datetime.now(UTC)
        if not signer.begins <= now <= signer.ends:
            self.trust.site_of(certificate, at=now)  # says what is wrong with it
            raise IdentityError(f"the certificate of {signer.site} is not valid now")

    def _signer(self, certificate: bytes) -> _Signer:
        known = self._signers.get(certificate)
        if known is None:
            x509.check_size(certificate, x509.MAX_DER, "a certificate")
            site = self.trust.site_of(certificate, at=None)
            parsed = x509.parse_certificate(certificate)
            known = _Signer(
                site,
                keys.p256(parsed.public_key(), "the certificate"),
                parsed.not_valid_before_utc,
                self.trust.good_until(certificate),
            )
            self._signers[certificate] = known
            if len(self._signers) > _CERTIFICATES_AT_MOST:
                self._signers.popitem(last=False)
        self._signers.move_to_end(certificate)
        return known

    def _remember(self, name: bytes, *, current: bool) -> None:
        self._good[name] = current or self._good.get(name, False)
        self._good.move_to_end(name)
        if len(self._good) > _SIGNATURES_AT_MOST:
            self._good.popitem(last=False)


def _name(payload: bytes, signature: pb.Signature) -> bytes:
    """32 bytes that name a signature, what is signed and the certificate; each has a length."""
    parts = (signature.site.encode(), signature.signature, signature.certificate, payload)
    hashed = hashlib.sha256(_SIGNED)
    for part in parts:
        hashed.update(len(part).to_bytes(8) + part)
    return hashed.digest()


class Membership:
    """Who this site is and whom it trusts; re-read from disk on SIGHUP."""

    def __init__(self, settings: Settings) -> None:
        """Read identity and manifest. Raises IdentityError or ManifestError."""
        self._files = settings.identity
        self._expected_site = settings.site.id
        self.identity, self.trust, self.manifest, self._signed = self._read()
        self._in_file = self.manifest.version
        self._store: Store | None = None
        self._past: dict[int, FederationManifest] = {}
        self._logs: dict[str, LogMembership] = {}
        self._signatures = Signatures(self.trust)

    def _read(self) -> tuple[Identity, Trust, FederationManifest, bytes]:
        files = self._files
        identity = Identity.load(files.certificate, files.key, files.authority)
        if self._expected_site not in (None, identity.site_id):
            raise IdentityError(
                f"[site] id is {self._expected_site!r}, the certificate {files.certificate} says "
                f"{identity.site_id!r}: correct the setting or install the right certificate"
            )
        trust = Trust.from_pem(identity.authority_pem)
        try:
            text = files.manifest.read_bytes()
            manifest = parse_signed(text, trust)
        except OSError as error:
            raise ManifestError(
                f"cannot read the manifest {files.manifest}: {error.strerror}; get the signed "
                "manifest from whoever keeps the federation's authority (`fedctl manifest sign`)"
            ) from error
        except ManifestError as error:
            raise ManifestError(f"{files.manifest}: {error}") from error
        if manifest.federation_id != identity.federation_id:
            raise ManifestError(
                f"the manifest is of {manifest.federation_id!r}, the certificate of "
                f"{identity.federation_id!r}: install those of one federation"
            )
        return identity, trust, manifest, text

    def reload(self) -> None:
        """Read again; raises, and changes nothing, when that would be a step back."""
        identity, trust, manifest, signed = self._read()
        if identity.site_id != self.identity.site_id:
            raise IdentityError("the new certificate is of another site: restart to become it")
        if manifest.version < self._in_file:
            raise ManifestError(
                f"manifest {manifest.version} is older than {self._in_file}, which was here "
                "before: a manifest never goes back; sign a newer one"
            )
        self._in_file = manifest.version
        if manifest.version < self.manifest.version:  # a newer one came from a peer
            manifest, signed = self.manifest, self._signed
        self._take(manifest, signed)
        self.identity = identity.following(self.identity)
        if trust != self.trust:  # whom another authority has certified is looked at anew
            self.trust, self._signatures = trust, Signatures(trust)
        self._see_current()

    def _see_current(self) -> None:
        """Which certificates are the newest: ours, and those of the votes of the last rounds.

        What was seen in signatures goes with a restart. A key that was stolen and replaced
        would be good again, until its owner signs something that comes here.
        """
        self._signatures.seen(self.identity.certificate_der)
        for commit in self._store.rounds(0, _ROUNDS_READ) if self._store else ():
            for vote in commit.certificate.votes:
                self._signatures.seen(vote.certificate)

    def remember(self, store: Store) -> None:
        """Know the manifests of the past, and file the newest. Raises StoreError."""
        for signed in store.manifests():
            manifest = parse_signed(signed, self.trust)
            self._past[manifest.version] = manifest
        self._store = store
        last = store.manifest_in_force()
        if last is not None:
            was = parse_signed(last, self.trust)
            if was.version > self.manifest.version:
                log.warning(
                    "the manifest file is older than the one in force; it came from a peer",
                    file=self.manifest.version,
                    in_force=was.version,
                )
                self.manifest, self._signed = was, last
        self._take(self.manifest, self._signed)
        self._see_current()

    def adopt(self, manifests: Sequence[tuple[FederationManifest, bytes]]) -> None:
        """Put the newest of these in force.

        Raises ManifestError when it is not newer than ours, StoreError.
        """
        manifest, signed = max(manifests, key=lambda one: one[0].version, default=(None, b""))
        if manifest is None or not manifest.newer_than(self.manifest):
            raise ManifestError(
                f"expected a manifest newer than {self.manifest.version}, there is none"
            )
        # A round goes over one step at a time: those between are needed, too.
        self.learn([text for _, text in manifests])
        self._take(manifest, signed)

    def _take(self, manifest: FederationManifest, signed: bytes) -> None:
        self._past_agrees(manifest)
        if self._store is not None:
            self._store.file_manifest(manifest.version, signed)
        self.manifest, self._signed = manifest, signed
        self._past[manifest.version] = manifest

    def _past_agrees(self, manifest: FederationManifest) -> None:
        """Raises ManifestError when another one of the same version is known here."""
        known = self._past.get(manifest.version)
        if known is not None:
            manifest.newer_than(known)

    def knows(self, manifest_version: int) -> bool:
        """Whether certificates of that manifest can be verified here."""
        return manifest_version in self._past

    def learn(self, signed: Sequence[bytes]) -> None:
        """Keep signed manifests that a peer showed us, to verify certificates with.

        The authority's signature makes them good for that, whoever sent them. They
        are not put in force here: `adopt` does that, with the newest.
        Raises ManifestError, and keeps none, when one is not what it should be.
        """
        manifests = [parse_signed(text, self.trust) for text in signed]
        for manifest in manifests:
            self._past_agrees(manifest)
        if self._store is not None:
            learnt = zip((manifest.version for manifest in manifests), signed, strict=True)
            self._store.learn_manifests(list(learnt))
        self._past.update({manifest.version: manifest for manifest in manifests})

    def signed_from(self, version: int) -> list[bytes]:
        """The signed manifests of that version and later ones that are here, oldest first."""
        return self._store.manifests(version) if self._store is not None else []

    def named(self, log: str) -> list[NamedModel]:
        """The models that the manifests known here name for a log of rounds."""
        named = (manifest.of_log(log).retriever for manifest in list(self._past.values()))
        return [one for one in named if one is not None]

    def manifest_of(self, version: int) -> FederationManifest | None:
        """A manifest that was installed here, if it was."""
        return self._past.get(version)

    # ---- signatures (peers.wire.signing.Keys) -------------------------------------------

    def sign(self, payload: bytes) -> pb.Signature:
        """This site's signature, with its current certificate."""
        signature = pb.Signature(
            site=self.identity.site_id,
            signature=self.identity.sign(payload),
            certificate=self.identity.certificate_der,
        )
        self._signatures.made(payload, signature)
        return signature

    def verify(
        self, payload: bytes, signature: pb.Signature, manifest: FederationManifest, *, past: bool
    ) -> None:
        """Raises CertificateError unless an enabled site of ``manifest`` signed, as it says.

        ``past``: the signer's certificate may have expired, or been replaced, since.
        """
        who = repr(signature.site[:63])  # of a peer's making: bounded before it is shown
        if not manifest.enabled(signature.site):
            raise CertificateError(
                f"{who} is not an enabled site of manifest {manifest.version}: "
                "its signature counts for nothing"
            )
        try:
            self._signatures.verify(payload, signature, past=past)
        except IdentityError as error:
            raise CertificateError(f"the signature of {who} is refused: {error}") from error

    def log(self, model: str) -> LogMembership:
        """As the log of a model's rounds goes by it."""
        if model not in self._logs:
            self._logs[model] = LogMembership(self, model)
        return self._logs[model]


class LogMembership:
    """Who counts in one model's log of rounds, and who verifies its past.

    Its manifests follow from those that the authority signs (`FederationManifest.of_log`), so
    members and quorums are the same in every log, and a signature of one counts in no other.
    """

    def __init__(self, membership: Membership, model: str) -> None:
        self._membership = membership
        self.log_id = log_id(membership.identity.federation_id, model)
        self._verified: set[bytes] = set()

    @property
    def manifest(self) -> FederationManifest:
        """The newest."""
        return self._membership.manifest.of_log(self.log_id)

    def manifest_of(self, version: int) -> FederationManifest | None:
        """A manifest that was installed here, if it was."""
        known = self._membership.manifest_of(version)
        return None if known is None else known.of_log(self.log_id)

    def knows(self, manifest_version: int) -> bool:
        """As `Membership.knows`."""
        return self._membership.knows(manifest_version)

    def learn(self, signed: Sequence[bytes]) -> None:
        """As `Membership.learn`."""
        self._membership.learn(signed)

    def signed_from(self, version: int) -> list[bytes]:
        """As `Membership.signed_from`."""
        return self._membership.signed_from(version)

    @property
    def most_values(self) -> int:
        """Of the versions of any model that a manifest known here names for this log; 0: none."""
        return max((one.values for one in self._membership.named(self.log_id)), default=0)

    def sign(self, payload: bytes) -> pb.Signature:
        """As `Membership.sign`."""
        return self._membership.sign(payload)

    def verify(
        self, payload: bytes, signature: pb.Signature, manifest: FederationManifest, *, past: bool
    ) -> None:
        """As `Membership.verify`, for manifests of this log alone."""
        if manifest.federation_id != self.log_id:
            raise CertificateError(f"the manifest is of {manifest.federation_id!r}, another one")
        self._membership.verify(payload, signature, manifest, past=past)

    def verify_vote(self, vote: pb.Vote) -> None:
        """With whom we trust now; a vote under an expired certificate counts for nothing.

        One of our own does, when a peer reminds us of it: we have cast it.
        """
        manifest = self.manifest_of(vote.body.manifest_version) or self.manifest
        verify_vote(vote, self._membership.trust, manifest, at=None)
        ours = vote.site == self._membership.identity.site_id
        payload = vote_payload(vote.body, vote.attempt)
        self.verify(payload, signature_of(vote), manifest, past=ours)

    def verify_certificate(self, certificate: pb.Certificate) -> None:
        """A certificate stays valid after its signers' certificates expired.

        The last ones verified are remembered: who catches up verifies thousands in a
        thread, and the protocol asks once more.
        """
        raw = certificate.SerializeToString(deterministic=True)
        digest = hashlib.sha256(raw).digest()
        if digest in self._verified:
            return
        manifest = self.manifest_of(certificate.body.manifest_version) or self.manifest
        verify_certificate(certificate, self._membership.trust, manifest, at=None)
        if len(self._verified) >= _VERIFIED_AT_MOST:
            self._verified.clear()
        self._verified.add(digest)
