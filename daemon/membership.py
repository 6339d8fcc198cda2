"""Who this site is, whom it trusts, and which manifest is in force here.

The files are the operator's and are read at the start and on SIGHUP. A manifest may
also come from a peer: the authority's signature is what counts, not who hands it on
(docs/decisions/0008). It is kept in the state file, so that it is in force again after a
restart; the operator's own file is left as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime

import structlog

from config.settings import Settings
from crypto.identity import Identity, IdentityError, Trust
from daemon.store import Store
from peers.certificates import verify_certificate, verify_vote
from peers.manifest import FederationManifest, ManifestError, parse_signed
from proto import federation_pb2 as pb

log = structlog.get_logger()

_VERIFIED_AT_MOST = 100_000


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
        self._verified: set[bytes] = set()

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
        except OSError as error:
            raise ManifestError(
                f"cannot read the manifest {files.manifest}: {error.strerror}; get the signed "
                "manifest from whoever keeps the federation's authority (`fedctl manifest sign`)"
            ) from error
        manifest = parse_signed(text, trust)
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
        self.identity, self.trust = identity.following(self.identity), trust

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

    def adopt(self, found: Sequence[tuple[FederationManifest, bytes]]) -> None:
        """Put the newest of these in force.

        Raises ManifestError when it is not newer than ours, StoreError.
        """
        manifest, signed = max(found, key=lambda one: one[0].version, default=(None, b""))
        if manifest is None or not manifest.newer_than(self.manifest):
            raise ManifestError(
                f"expected a manifest newer than {self.manifest.version}, there is none"
            )
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

    def manifest_of(self, version: int) -> FederationManifest | None:
        """A manifest that was installed here, if it was."""
        return self._past.get(version)

    def verify_vote(self, vote: pb.Vote) -> None:
        """With whom we trust now; a vote under an expired certificate counts for nothing."""
        manifest = self.manifest_of(vote.body.manifest_version) or self.manifest
        verify_vote(vote, self.trust, manifest, at=datetime.now(UTC))

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
        verify_certificate(certificate, self.trust, manifest, at=None)
        if len(self._verified) >= _VERIFIED_AT_MOST:
            self._verified.clear()
        self._verified.add(digest)
