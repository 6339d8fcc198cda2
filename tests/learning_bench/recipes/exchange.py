"""How updates become a version: encrypted, masked, as bare integers, or as they are.

What daemons do in a round, without the network. A mode's arithmetic and cryptography
are the project's own, called here in the order of its messages; every site's part is
in this one process, since what is measured is quality and bytes. That sites keep
their secrets from one another is tested where they are processes of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from crypto.arrays import Int64
from crypto.identity.keys import IdentityError
from crypto.identity.site import Identity
from crypto.masking.coordinator import MaskedSum, Unmasking
from crypto.masking.roster import Agreement, Roster, Verify, smallest_threshold
from crypto.masking.site import SiteKeys
from crypto.privacy import NoiseTerms
from crypto.quantize import FRACTION_INTEGERS
from daemon.jobs.sums import ckks
from daemon.jobs.sums import integers as integers_
from daemon.jobs.sums.integers import Hiding, Summed, SumTerms, apply_integers, measure_update
from daemon.learning.options import TrainingOptions
from daemon.state.versions import ShapeManifest, largest_file, read_version, write_version
from tests.crypto.masking.masked import Relay
from tests.daemon.jobs.sums.proofs import AGREED, LEAD, check_of, proven
from tests.support.authority import FEDERATION_ID, Federation

Updates = dict[str, tuple[Path, int]]  # site -> its update's file, how many examples
Exchange = Literal["ckks", "masking", "integers", "in the clear"]


@dataclass(frozen=True)
class Training:
    """How a recipe trains: the plan that sites would agree on.

    ``weighted``: by num_examples; else every site counts the same. ``exchange``: as
    daemons do it, in one mode or the other, or the mean of the updates as they are, which
    no daemon offers: the control that shows what quantising and encrypting cost; or the sum
    of the integers with nothing that hides them, the control of both modes.
    ``noise``: that each site adds.
    """

    options: TrainingOptions = field(default_factory=TrainingOptions)
    rounds: int = 3
    bits: int = 16
    weighted: bool = True
    exchange: Exchange = "ckks"
    noise: NoiseTerms | None = None


@dataclass(frozen=True)
class Agreed:
    """What all sites of a round know before anything is hidden."""

    number: int
    training: Training
    weights: dict[str, float]
    exponents: list[int]
    manifest: ShapeManifest
    versions: Path
    parent: bytes
    kept: Path | None = None

    @property
    def weight(self) -> float:
        """Of all sites together."""
        return sum(self.weights.values())

    def hiding(self, site: str) -> Hiding:
        """How a site's update is hidden."""
        kept = self.kept / f"{site}.integers" if self.kept else None
        return Hiding(self.weights[site], self.exponents, noise=self.training.noise, kept=kept)


@dataclass(frozen=True)
class Exchanged:
    """The new version, what the sites lost on average, and the bytes.

    ``uploaded``: by one site; ``sent``: by all, a site's share of it on average.
    """

    version: bytes
    loss: float
    uploaded: int
    sent: float


def exchange(
    updates: Updates,
    training: Training,
    number: int,
    at: tuple[Path, bytes],
    manifest: ShapeManifest,
    scratch: Path,
    kept: Path | None = None,
) -> Exchanged:
    """Agree on weights and scales, then hide, add, open and apply. ``at``: versions, parent.

    ``kept``: a folder in which each site's integers stay: what is exchanged again with it, in
    whichever way, are the same.
    """
    largest = max(examples for _, examples in updates.values())
    weights = {
        site: examples / largest if training.weighted else 1.0
        for site, (_, examples) in updates.items()
    }
    noise = (training.noise, training.bits) if training.noise else None
    measured = [
        measure_update(path, manifest.sizes, weights[site], noise=noise)
        for site, (path, _) in updates.items()
    ]
    exponents = [max(group) for group in zip(*measured, strict=True)]
    agreed = Agreed(number, training, weights, exponents, manifest, *at, kept)
    if training.exchange == "integers":
        return _added(updates, agreed)
    return (_masked if training.exchange == "masking" else _encrypted)(updates, agreed, scratch)


def in_the_clear(
    updates: Updates, at: tuple[Path, bytes], shape_digest: bytes, weighted: bool = True
) -> bytes:
    """Parent plus the mean update (whose last value is a loss): also of a site alone."""
    versions, parent = at
    rows = [np.load(path, allow_pickle=False)[:-1] for path, _ in updates.values()]
    weights = [float(examples) if weighted else 1.0 for _, examples in updates.values()]
    vector = read_version(versions, parent, shape_digest) + np.average(rows, 0, weights)
    return write_version(versions, shape_digest, vector.astype(np.float32))[0]


def _added(updates: Updates, agreed: Agreed) -> Exchanged:
    """The integers as a mode would hide them, added as they are; the sum goes back in 32 bits."""
    training, manifest, sites = agreed.training, agreed.manifest, len(updates)
    rows = [
        integers_.integers_of(path, manifest.sizes, agreed.hiding(site), training.bits)
        for site, (path, _) in updates.items()
    ]
    total: Int64 = np.asarray(np.sum(rows, axis=0, dtype=np.int64))
    applied = apply_integers(total, training.bits, _terms(agreed, sites))
    uploaded = total.size * -(-training.bits // 8)
    sent = (sites - 1) * (uploaded + 4 * total.size) / sites
    return Exchanged(applied.model_digest, applied.mean_loss, uploaded, sent)


# ---- mode ckks -------------------------------------------------------------------


def _encrypted(updates: Updates, agreed: Agreed, scratch: Path) -> Exchanged:
    """Quantise, encrypt, add, decrypt, apply."""
    training, manifest, sites = agreed.training, agreed.manifest, len(updates)
    # Attempts stand for roles: who adds has no key, and everybody else checks what was added.
    holder, adding = (agreed.number, 0), (agreed.number, 1)
    key = ckks.deal_key(*holder, sites, training.bits)
    ckks.hold_context(*adding, key.public, secret=False, contributors=sites, bits=training.bits)
    ckks.start_sum(*adding, manifest.sizes, check_of(LEAD, updates))
    uploaded = 0
    for site, (path, _) in updates.items():
        out = scratch / f"{site}.encrypted"
        blob = ckks.encrypt_update(
            *(*holder, path, manifest.sizes, agreed.hiding(site), out),
            check=check_of(site, updates),
        )
        ckks.add_update(*adding, site, out)
        uploaded = blob.size
        out.unlink()
    summed = scratch / "sum"
    total = ckks.finish_sum(*adding, summed)
    applied = ckks.apply_sum(
        *holder,
        summed,
        _terms(agreed, sites),
        answer=proven(holder, adding, check_of(min(updates), updates), total),
    )
    for role in (holder, adding):
        ckks.forget(*role)
    # The coordinator can't decrypt the version: it gets it from one of the others.
    back = largest_file(manifest.total)
    sent = ((sites - 1) * (uploaded + total.size) + back) / sites
    return Exchanged(applied.model_digest, applied.mean_loss, uploaded, sent)


# ---- mode masking ----------------------------------------------------------------


def _terms(agreed: Agreed, sites: int) -> SumTerms:
    """What becomes of a sum of so many."""
    training, manifest = agreed.training, agreed.manifest
    return SumTerms(
        *(manifest.sizes, agreed.exponents, agreed.weight),
        *(agreed.parent, manifest.digest, agreed.versions),
        Summed(training.noise, 0.0, sites) if training.noise else None,
        training.options.server,
    )


def _masked(updates: Updates, agreed: Agreed, scratch: Path) -> Exchanged:
    """Quantise, mask, add, open, apply: `crypto.masking.site` step by step, nobody drops out."""
    training, manifest = agreed.training, agreed.manifest
    ids = {site.replace("_", "-"): site for site in sorted(updates)}  # as ids may be written
    sites = tuple(sorted(ids))
    terms = Agreement(
        federation=FEDERATION_ID,
        round=agreed.number,
        attempt=0,
        plan_digest=AGREED,
        sites=sites,
        threshold=smallest_threshold(len(sites), colluding=1),
        bits=training.bits,
        values=manifest.total + FRACTION_INTEGERS,
    )
    identities, verify = _enrolled(scratch / f"federation-{agreed.number}", sites)
    keys = {site: SiteKeys(terms, site) for site in sites}
    shown = [one.advertisement(identities[site].sign(one.payload)) for site, one in keys.items()]
    roster = Roster.of(terms, shown, verify)
    relay = Relay(roster)
    dealers = {}
    for site, one in keys.items():
        dealers[site], sealed = one.deal(roster)
        relay.take(site, sealed)
    passed_on = relay.close()
    contributors = {site: dealer.receive(passed_on[site]) for site, dealer in dealers.items()}
    total, uploaded = MaskedSum(roster, sites), 0
    for site, name in ids.items():
        path, hiding = updates[name][0], agreed.hiding(name)
        integers = integers_.integers_of(path, manifest.sizes, hiding, training.bits)
        words = contributors[site].mask(integers.astype(np.int32, casting="same_kind"))
        total.add(site, words)
        uploaded = words.nbytes
    outcome, masked = total.close()
    unmasking = Unmasking(roster, outcome, masked)  # as each site does for itself, once here
    for contributor in contributors.values():
        unmasking.take(contributor.open(outcome))
    applied = apply_integers(
        unmasking.finish().astype(np.int64), training.bits, _terms(agreed, len(sites))
    )
    # The coordinator sends the masked sum, which is as long as an input, to the others.
    sent = 2 * (len(sites) - 1) * uploaded / len(sites)
    return Exchanged(applied.model_digest, applied.mean_loss, uploaded, sent)


def _enrolled(folder: Path, sites: tuple[str, ...]) -> tuple[dict[str, Identity], Verify]:
    """An authority, every site with a certificate of it, and whom to believe."""
    federation = Federation.found(folder, *sites)
    identities = {site: federation.identity(site) for site in sites}
    trust = federation.trust

    def verify(site: str, signature: bytes, payload: bytes) -> None:
        signer = trust.verify(identities[site].certificate_der, signature, payload, at=None)
        if signer != site:
            raise IdentityError(f"{signer} has signed for {site}")

    return identities, verify
