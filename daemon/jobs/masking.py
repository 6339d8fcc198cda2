"""Jobs of the crypto worker in masking mode: a site's steps, and the coordinator's.

Plain functions with plain arguments, run in the crypto worker process, beside those
of daemon/jobs/ckks.py. Secrets of an attempt live in this process's memory and
nowhere else: when it ends, this site has dropped out of the attempt, and the others
finish without it. Nothing here signs: the site's identity stays in the daemon, which
signs what these jobs return.

The coordinator adds what is masked and opens nothing alone. When a quorum has signed
whose inputs are in which masked sum (`roster_digest`, `finish_sum`), each of those
sites opens its shares (`open_shares`) and takes the masks off for itself
(`apply_sum`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from crypto.identity.site import IdentityError, Trust
from crypto.keystream import Ring, Words
from crypto.masking.coordinator import MaskedSum, Unmasking
from crypto.masking.roster import KEY_BYTES, Advertisement, Roster, Terms, Verify
from crypto.masking.site import Contributor, Dealer, Opened, Outcome, SiteKeys
from crypto.privacy import NoiseTerms
from crypto.quantize import CryptoError
from daemon.jobs.ckks import FEDAVG, Applied, Summed, apply_integers
from daemon.jobs.integers import integers_of
from daemon.learning.options import ServerOptions
from daemon.process.workers import reads
from peers.wire.vectors import BlobInfo

_ATTEMPTS_HELD = 2

State = TypeVar("State", SiteKeys, Dealer, Contributor)


@dataclass(frozen=True)
class Believed:
    """Whom to believe: the federation's authority, and each participant's certificate (DER)."""

    authority_pem: bytes
    certificates: Mapping[str, bytes]

    def verifier(self) -> Verify:
        """Raises IdentityError unless the participant itself signed."""
        trust = Trust.from_pem(self.authority_pem)

        def verify(site: str, signature: bytes, payload: bytes) -> None:
            signer = trust.verify(self.certificates[site], signature, payload, at=None)
            if signer != site:
                raise IdentityError(f"the plan gives the certificate of {signer} for {site}")

        return verify


@dataclass
class _Site:
    """A participant's state: that of the last step done. ``roster``: what it dealt under."""

    terms: Terms
    believed: Believed
    state: SiteKeys | Dealer | Contributor
    roster: Roster | None = None


@dataclass
class _Sum:
    """The coordinator's state. ``total``: None once it is written."""

    total: MaskedSum | None


_sites: dict[tuple[int, int], _Site] = {}
_sums: dict[tuple[int, int], _Sum] = {}


def forget(round: int, attempt: int) -> None:
    """Drop the attempt's secrets and sum; an attempt that is not held is no error."""
    _sites.pop((round, attempt), None)
    _sums.pop((round, attempt), None)


# ---- a participant -----------------------------------------------------------


def make_keys(terms: Terms, site: str, believed: Believed) -> tuple[bytes, bytes]:
    """Fresh keys: what the identity must sign, and the content that the signature follows."""
    keys = SiteKeys(terms, site)
    _sites[terms.round, terms.attempt] = _Site(terms, believed, keys)
    for oldest in sorted(_sites)[:-_ATTEMPTS_HELD]:
        del _sites[oldest]
    shown = keys.advertisement(b"")
    return keys.payload, shown.channel_key + shown.mask_key + shown.commitment


def deal(round: int, attempt: int, contents: Mapping[str, bytes]) -> dict[str, bytes]:
    """Sealed shares for everybody else whose keys are here (site -> content).

    Raises CryptoError or IdentityError when a site's keys are refused.
    """
    held = _held(round, attempt)
    roster = _roster(held.terms, contents, held.believed)
    held.state, sealed = _in_step(held, SiteKeys).deal(roster)
    held.roster = roster
    return sealed


def roster_digest(round: int, attempt: int) -> bytes:
    """32 bytes that name the terms, and all keys under which this site has dealt its shares."""
    return _dealt_under(_held(round, attempt)).digest


def hold_shares(round: int, attempt: int, sealed: Mapping[str, bytes]) -> None:
    """The shares that others dealt to this site, by sender."""
    held = _held(round, attempt)
    held.state = _in_step(held, Dealer).receive(sealed)


def mask_update(
    round: int,
    attempt: int,
    update_path: Path,
    sizes: Sequence[int],
    weight: float,
    exponents: Sequence[int],
    out_path: Path,
    residual_path: Path | None = None,
    *,
    noise: NoiseTerms | None = None,
    kept_path: Path | None = None,
) -> BlobInfo:
    """Quantise and mask this site's update; as `round_crypto.encrypt_update`."""
    held = _held(round, attempt)
    contributor = _in_step(held, Contributor)
    bits = held.terms.bits
    integers = integers_of(
        update_path, sizes, weight, exponents, bits, residual_path, noise, kept_path
    )
    # Noise is made in 64 bits; the mask refuses what is beyond ±(2^(bits-1) - 1).
    return _write(out_path, contributor.mask(integers.astype(np.int32, casting="same_kind")))


def open_shares(
    round: int, attempt: int, survivors: tuple[str, ...], dropouts: tuple[str, ...]
) -> dict[str, bytes]:
    """This site's share of one secret of each site: what a certified outcome needs.

    Of survivors it is the seed's, of dropouts the mask key's. Raises CryptoError for an
    outcome that may not be opened, and for a second one of the attempt.
    """
    contributor = _in_step(_held(round, attempt), Contributor)
    opened = contributor.open(Outcome(survivors, dropouts))
    return {**opened.seeds, **opened.mask_keys}


@reads("the coordinator's masked sum")
def apply_sum(
    round: int,
    attempt: int,
    survivors: tuple[str, ...],
    dropouts: tuple[str, ...],
    opened: Mapping[str, Mapping[str, bytes]],
    sum_path: Path,
    sum_digest: bytes,
    sizes: Sequence[int],
    exponents: Sequence[int],
    total_weight: float,
    parent_digest: bytes,
    shape_digest: bytes,
    versions: Path,
    summed: Summed | None = None,
    server: ServerOptions = FEDAVG,
) -> Applied:
    """Take the masks off the certified sum and make the new version from it.

    At any site that has dealt shares, in the sum or not. ``opened``: by holder, its
    shares by owner, as they were passed on; ``sum_digest``: SHA-256 of the masked sum.
    Every site gets the same bits or none, as `round_crypto.apply_sum`: masks follow
    from what was advertised under the roster, whoever's shares they are rebuilt from.

    Changes nothing here, so it may be tried again with more shares. Raises CryptoError
    when the sum is not the one that was certified, is none, or too few shares fit;
    VersionError when the parent is missing or damaged.
    """
    held = _held(round, attempt)
    terms, roster = held.terms, _dealt_under(held)
    if not 0.0 < total_weight <= len(terms.sites):
        raise CryptoError(f"a total weight lies in (0, {len(terms.sites)}], got {total_weight}")
    masked = _read_sum(sum_path, terms.ring, terms.values, sum_digest)
    unmasking = Unmasking(roster, Outcome(survivors, dropouts), masked)
    wrong = _take_shares(unmasking, opened)
    try:
        integers = unmasking.finish().astype(np.int64)
    except CryptoError as error:
        raise CryptoError("; ".join((str(error), *wrong, *_unfit(unmasking)))) from error
    wrong += _unfit(unmasking)
    del masked, unmasking  # its words: no longer needed beside what is made of the integers
    applied = apply_integers(
        integers,
        sizes,
        exponents,
        terms.bits,
        total_weight,
        parent_digest,
        shape_digest,
        versions,
        summed,
        server,
    )
    return replace(applied, wrong_shares=tuple(wrong))


def _take_shares(unmasking: Unmasking, opened: Mapping[str, Mapping[str, bytes]]) -> list[str]:
    """All that can be used; what is wrong with the others."""
    wrong = []
    survivors = unmasking.outcome.survivors
    for site, shares in sorted(opened.items()):
        seeds = {owner: share for owner, share in shares.items() if owner in survivors}
        keys = {owner: share for owner, share in shares.items() if owner not in survivors}
        try:
            unmasking.take(Opened(site, seeds, keys))
        except CryptoError as error:
            wrong.append(f"the shares that came from {site} were refused: {error}")
    return wrong


def _unfit(unmasking: Unmasking) -> list[str]:
    return [
        f"the share of a secret of {owner} is wrong, as it came from {holder}"
        for holder, owner in unmasking.unfit
    ]


# ---- the coordinator ---------------------------------------------------------


def start_sum(
    terms: Terms, contents: Mapping[str, bytes], believed: Believed, sharers: tuple[str, ...]
) -> bytes:
    """Begin the sum of those who have shared their secrets; the roster's digest, 32 bytes."""
    roster = _roster(terms, contents, believed)
    _sums[terms.round, terms.attempt] = _Sum(MaskedSum(roster, sharers))
    for oldest in sorted(_sums)[:-_ATTEMPTS_HELD]:
        del _sums[oldest]
    return roster.digest


def add_update(
    round: int, attempt: int, site: str, path: Path, _nonce: bytes | None = None
) -> None:
    """Add a site's masked input; there are no tags.

    Raises CryptoError, the sum unchanged, when it is refused.
    """
    total = _open_sum(round, attempt)
    try:
        with path.open("rb") as file:
            total.add_from(site, file)
    except OSError as error:
        raise CryptoError(f"cannot read the masked input {path.name}: {error}") from error


def finish_sum(round: int, attempt: int, out_path: Path) -> BlobInfo:
    """Close the sum and write it, masked as it is: what is stated, and goes to every site.

    It is no longer held here then. Raises CryptoError when too few inputs are in it,
    OSError (and it may be tried again) when it can't be written.
    """
    _, words = _open_sum(round, attempt).close()
    written = _write(out_path, words)
    _sums[round, attempt].total = None
    return written


# ---- small parts -------------------------------------------------------------


def _roster(terms: Terms, contents: Mapping[str, bytes], believed: Believed) -> Roster:
    """Content of a site: two keys and a commitment of 32 bytes each, then the signature."""
    shown = []
    for site, content in contents.items():
        first, second, third = (content[at : at + KEY_BYTES] for at in (0, 32, 64))
        shown.append(Advertisement(site, first, second, third, content[3 * KEY_BYTES :]))
    return Roster.of(terms, shown, believed.verifier())


def _dealt_under(held: _Site) -> Roster:
    if held.roster is None:
        raise CryptoError("this site has dealt no shares in this attempt: it has no masks to undo")
    return held.roster


def _held(round: int, attempt: int) -> _Site:
    held = _sites.get((round, attempt))
    if held is None:
        raise CryptoError(
            f"no masks are held for round {round}, attempt {attempt}: they were forgotten, or the "
            "crypto worker was restarted; this site has dropped out of the attempt"
        )
    return held


def _in_step(held: _Site, kind: type[State]) -> State:
    if not isinstance(held.state, kind):
        raise CryptoError(
            f"a step of masking came out of turn: expected {kind.__name__}, this site is at "
            f"{type(held.state).__name__}"
        )
    return held.state


def _open_sum(round: int, attempt: int) -> MaskedSum:
    held = _sums.get((round, attempt))
    if held is None:
        raise CryptoError(f"no masked sum was started for round {round}, attempt {attempt}")
    if held.total is None:
        raise CryptoError("the sum is closed and written: nothing is added to it any more")
    return held.total


def _write(path: Path, words: Words) -> BlobInfo:
    """The file appears under its name only when it is whole."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(words.data)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    return BlobInfo(hashlib.sha256(words.data).digest(), words.nbytes)


def _read_sum(path: Path, ring: Ring, values: int, digest: bytes) -> Words:
    """The masked sum that was certified, in memory of its own; read once, of its one length."""
    words = np.empty(values, dtype=ring.dtype)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            whole = size == words.nbytes == file.readinto(words.view(np.uint8).data)
    except OSError as error:
        raise CryptoError(f"cannot read the masked sum {path.name}: {error}") from error
    if not whole:
        raise CryptoError(f"the masked sum has {size} bytes; expected {words.nbytes}")
    if hashlib.sha256(words.data).digest() != digest:
        raise CryptoError("the masked sum is not the one whose digest was certified: refused")
    return words
