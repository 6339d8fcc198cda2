"""Jobs of the crypto worker in masking mode: a site's steps, and the coordinator's.

Plain functions with plain arguments, run in the crypto worker process, beside those
of daemon/round_crypto.py. Secrets of an attempt live in this process's memory and
nowhere else: when it ends, this site has dropped out of the attempt, and the others
finish without it. Nothing here signs: the site's identity stays in the daemon, which
signs what these jobs return.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from crypto.identity import IdentityError, Trust
from crypto.keystream import Ring, Words
from crypto.masking import Contributor, Dealer, Opened, Outcome, SiteKeys
from crypto.privacy import NoiseTerms
from crypto.quantize import CryptoError
from crypto.roster import KEY_BYTES, Advertisement, Roster, Terms, Verify
from crypto.unmasking import MaskedSum, Unmasking
from daemon.learning.terms import ServerOptions
from daemon.round_crypto import FEDAVG, Applied, Summed, apply_integers, integers_of
from peers.vectors import BlobInfo

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
    """A participant's state: that of the last step done."""

    terms: Terms
    believed: Believed
    state: SiteKeys | Dealer | Contributor
    outcome: Outcome | None = None


@dataclass
class _Sum:
    """The coordinator's state."""

    terms: Terms
    total: MaskedSum | Unmasking


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
    return sealed


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
) -> BlobInfo:
    """Quantise and mask this site's update; as `round_crypto.encrypt_update`."""
    held = _held(round, attempt)
    contributor = _in_step(held, Contributor)
    bits = held.terms.bits
    integers = integers_of(update_path, sizes, weight, exponents, bits, residual_path, noise)
    # Noise is made in 64 bits; the mask refuses what is beyond ±(2^(bits-1) - 1).
    return _write(out_path, contributor.mask(integers.astype(np.int32, casting="same_kind")))


def confirm(
    round: int, attempt: int, survivors: tuple[str, ...], dropouts: tuple[str, ...]
) -> bytes:
    """What the identity must sign to confirm this outcome, the only one of the attempt."""
    held = _held(round, attempt)
    outcome = Outcome(survivors, dropouts)
    payload = _in_step(held, Contributor).confirm(outcome)
    held.outcome = outcome
    return payload


def open_shares(round: int, attempt: int, signatures: Mapping[str, bytes]) -> dict[str, bytes]:
    """This site's share of one secret of each site: what the confirmed outcome needs."""
    held = _held(round, attempt)
    if held.outcome is None:
        raise CryptoError("nothing is opened for an outcome that this site was not told of")
    verify = held.believed.verifier()
    opened = _in_step(held, Contributor).open(held.outcome, signatures, verify)
    return {**opened.seeds, **opened.mask_keys}


def apply_sum(
    terms: Terms,
    sum_path: Path,
    sizes: Sequence[int],
    exponents: Sequence[int],
    total_weight: float,
    parent_digest: bytes,
    shape_digest: bytes,
    versions: Path,
    summed: Summed | None = None,
    server: ServerOptions = FEDAVG,
) -> Applied:
    """Make the new version from the opened sum; as `round_crypto.apply_sum`."""
    ring = terms.ring
    if not 0.0 < total_weight <= len(terms.sites):
        raise CryptoError(f"a total weight lies in (0, {len(terms.sites)}], got {total_weight}")
    summands = ring.to_integers(_read(sum_path, ring, terms.values), len(terms.sites))
    integers = summands.astype(np.int64)
    return apply_integers(
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


# ---- the coordinator ---------------------------------------------------------


def start_sum(
    terms: Terms, contents: Mapping[str, bytes], believed: Believed, sharers: tuple[str, ...]
) -> None:
    """Begin the sum of those who have shared their secrets."""
    roster = _roster(terms, contents, believed)
    _sums[terms.round, terms.attempt] = _Sum(terms, MaskedSum(roster, sharers))
    for oldest in sorted(_sums)[:-_ATTEMPTS_HELD]:
        del _sums[oldest]


def add_update(round: int, attempt: int, site: str, path: Path) -> None:
    """Add a site's masked input. Raises CryptoError, the sum unchanged, when it is refused."""
    held = _sum_of(round, attempt)
    if not isinstance(held.total, MaskedSum):
        raise CryptoError("the sum is closed: this input came too late")
    try:
        with path.open("rb") as file:
            held.total.add_from(site, file)
    except OSError as error:
        raise CryptoError(f"cannot read the masked input {path.name}: {error}") from error


def finish_sum(round: int, attempt: int) -> None:
    """Close the sum. Raises CryptoError when too few inputs are in it."""
    held = _sum_of(round, attempt)
    if isinstance(held.total, MaskedSum):
        held.total = held.total.close()


def unmask(
    round: int,
    attempt: int,
    survivors: tuple[str, ...],
    dropouts: tuple[str, ...],
    opened: Mapping[str, Mapping[str, bytes]],
    out_path: Path,
) -> tuple[BlobInfo, list[str]]:
    """Open the sum with the shares of these sites, and write it.

    Also returns what is wrong with shares that were not needed, for the log. Raises
    CryptoError when the sum cannot be opened.
    """
    held = _sum_of(round, attempt)
    total = held.total
    if not isinstance(total, Unmasking) or total.outcome != Outcome(survivors, dropouts):
        raise CryptoError("the sum to be opened is not the one that was closed")
    wrong = []
    for site, shares in opened.items():
        seeds = {owner: share for owner, share in shares.items() if owner in survivors}
        keys = {owner: share for owner, share in shares.items() if owner not in survivors}
        try:
            total.take(Opened(site, seeds, keys))
        except CryptoError as error:
            wrong.append(str(error))
    ring = held.terms.ring
    words = total.finish().view(ring.dtype)
    wrong += [f"the share by {holder} of a secret of {o} is wrong" for holder, o in total.unfit]
    return _write(out_path, words), wrong


# ---- small parts -------------------------------------------------------------


def _roster(terms: Terms, contents: Mapping[str, bytes], believed: Believed) -> Roster:
    """Content of a site: two keys and a commitment of 32 bytes each, then the signature."""
    shown = []
    for site, content in contents.items():
        first, second, third = (content[at : at + KEY_BYTES] for at in (0, 32, 64))
        shown.append(Advertisement(site, first, second, third, content[3 * KEY_BYTES :]))
    return Roster.of(terms, shown, believed.verifier())


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


def _sum_of(round: int, attempt: int) -> _Sum:
    held = _sums.get((round, attempt))
    if held is None:
        raise CryptoError(f"no masked sum was started for round {round}, attempt {attempt}")
    return held


def _write(path: Path, words: Words) -> BlobInfo:
    """The file appears under its name only when it is whole."""
    partial = path.with_name(path.name + ".partial")
    raw = words.tobytes()
    partial.write_bytes(raw)
    partial.rename(path)
    return BlobInfo(hashlib.sha256(raw).digest(), len(raw))


def _read(path: Path, ring: Ring, values: int) -> Words:
    """Bounded by what the terms imply, whatever the file's length."""
    try:
        with path.open("rb") as file:
            return ring.parse(file.read(ring.size(values) + 1), values)
    except OSError as error:
        raise CryptoError(f"cannot read the vector {path.name}: {error}") from error
