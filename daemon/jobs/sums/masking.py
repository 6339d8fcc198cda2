"""Masked sums at one site: the jobs of its crypto worker, and what the daemon does around.

Jobs are plain functions with plain arguments, run in the crypto worker process, beside
those of daemon/jobs/sums/ckks.py. Secrets of an attempt live in that process's memory and
nowhere else: when it ends, this site has dropped out of the attempt, and the others
finish without it. No job signs: the site's identity stays in the daemon's process, where
`MaskingJobs` signs what they return.

The coordinator adds what is masked and opens nothing alone. When a quorum has signed
whose inputs are in which masked sum (`roster_digest`, `finish_sum`), each of those
sites opens its shares (`open_shares`) and takes the masks off for itself
(`apply_sum`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np
import structlog

from crypto.durable import whole
from crypto.identity.keys import IdentityError
from crypto.identity.trust import Trust
from crypto.keystream import Ring, Words
from crypto.masking.coordinator import MaskedSum, Unmasking
from crypto.masking.roster import KEY_BYTES, Advertisement, Agreement, Roster, Verify
from crypto.masking.site import Attendance, Contributor, Dealer, OpenedShares, SiteKeys
from crypto.quantize import FRACTION_INTEGERS, CryptoError
from daemon.jobs.sums.integers import (
    Hiding,
    NewVersion,
    SumTerms,
    Uploaded,
    apply_integers,
    integers_of,
)
from daemon.jobs.sums.sum_jobs import ATTEMPTS_HELD, AttemptState, Carrying, SumJobs
from daemon.process.workers import reads
from peers.attempts import effects as do
from peers.attempts.masking import (
    Mask,
    Masked,
    MaskedSumStarted,
    OpenShares,
    StartMaskedSum,
    threshold_of,
)
from peers.wire.signing import digest_of
from peers.wire.vectors import BlobInfo
from proto import federation_pb2 as pb

log = structlog.get_logger()

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


@dataclass(frozen=True)
class Unmasked(NewVersion):
    """A new version, and what was wrong with shares that could be done without, for the log.

    These may differ from site to site; all else does not.
    """

    wrong_shares: tuple[str, ...] = ()


@dataclass
class _Site:
    """A participant's state: that of the last step done. ``roster``: what it dealt under."""

    terms: Agreement
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


def make_keys(terms: Agreement, site: str, believed: Believed) -> tuple[bytes, bytes]:
    """Fresh keys: what the identity must sign, and the content that the signature follows."""
    keys = SiteKeys(terms, site)
    _sites[terms.round, terms.attempt] = _Site(terms, believed, keys)
    for oldest in sorted(_sites)[:-ATTEMPTS_HELD]:
        del _sites[oldest]
    shown = keys.advertisement(b"")
    return keys.payload, shown.channel_key + shown.mask_key + shown.commitment


def deal(round: int, attempt: int, contents: Mapping[str, bytes]) -> dict[str, bytes]:
    """Sealed shares for everybody else whose keys are here (site -> content).

    Raises CryptoError or IdentityError when a site's keys are refused.
    """
    state = _state(round, attempt)
    roster = _roster(state.terms, contents, state.believed)
    state.state, sealed = _in_step(state, SiteKeys).deal(roster)
    state.roster = roster
    return sealed


def roster_digest(round: int, attempt: int) -> bytes:
    """32 bytes that name the terms, and all keys under which this site has dealt its shares."""
    return _dealt_under(_state(round, attempt)).digest


def hold_shares(round: int, attempt: int, sealed: Mapping[str, bytes]) -> None:
    """The shares that others dealt to this site, by sender."""
    state = _state(round, attempt)
    state.state = _in_step(state, Dealer).receive(sealed)


def mask_update(
    round: int,
    attempt: int,
    update_path: Path,
    sizes: Sequence[int],
    hiding: Hiding,
    out_path: Path,
) -> BlobInfo:
    """Quantise and mask this site's update; errors of `integers_of`."""
    state = _state(round, attempt)
    contributor = _in_step(state, Contributor)
    integers = integers_of(update_path, sizes, hiding, state.terms.bits)
    # Noise is made in 64 bits; the mask refuses what is beyond ±(2^(bits-1) - 1).
    return _write(out_path, contributor.mask(integers.astype(np.int32, casting="same_kind")))


def open_shares(
    round: int, attempt: int, survivors: tuple[str, ...], dropouts: tuple[str, ...]
) -> dict[str, bytes]:
    """This site's share of one secret of each site: what a certified outcome needs.

    Of survivors it is the seed's, of dropouts the mask key's. Raises CryptoError for an
    outcome that may not be opened, and for a second one of the attempt.
    """
    contributor = _in_step(_state(round, attempt), Contributor)
    opened = contributor.open(Attendance(survivors, dropouts))
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
    becomes: SumTerms,
) -> Unmasked:
    """Take the masks off the certified sum and make the new version from it.

    At any site that has dealt shares, in the sum or not. ``opened``: by holder, its
    shares by owner, as they were passed on; ``sum_digest``: SHA-256 of the masked sum.
    Every site gets the same bits or none, as of `ckks.apply_sum`: masks follow
    from what was advertised under the roster, whoever's shares they are rebuilt from.

    Changes nothing here, so it may be tried again with more shares. Raises CryptoError
    when the sum is not the one that was certified, is none, or too few shares fit;
    VersionError when the parent is missing or damaged.
    """
    state = _state(round, attempt)
    terms, roster = state.terms, _dealt_under(state)
    if not 0.0 < becomes.total_weight <= len(terms.sites):
        raise CryptoError(
            f"a total weight lies in (0, {len(terms.sites)}], got {becomes.total_weight}"
        )
    masked = _read_sum(sum_path, terms.ring, terms.values, sum_digest)
    unmasking = Unmasking(roster, Attendance(survivors, dropouts), masked)
    wrong = _take_shares(unmasking, opened)
    try:
        integers = unmasking.finish().astype(np.int64)
    except CryptoError as error:
        raise CryptoError("; ".join((str(error), *wrong, *_unfit(unmasking)))) from error
    wrong += _unfit(unmasking)
    del masked, unmasking  # its words: no longer needed beside what is made of the integers
    applied = apply_integers(integers, terms.bits, becomes)
    return Unmasked(**vars(applied), wrong_shares=tuple(wrong))


def _take_shares(unmasking: Unmasking, opened: Mapping[str, Mapping[str, bytes]]) -> list[str]:
    """All that can be used; what is wrong with the others."""
    wrong = []
    survivors = unmasking.outcome.survivors
    for site, shares in sorted(opened.items()):
        seeds = {owner: share for owner, share in shares.items() if owner in survivors}
        keys = {owner: share for owner, share in shares.items() if owner not in survivors}
        try:
            unmasking.take(OpenedShares(site, seeds, keys))
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
    terms: Agreement, contents: Mapping[str, bytes], believed: Believed, sharers: tuple[str, ...]
) -> bytes:
    """Begin the sum of those who have shared their secrets; the roster's digest, 32 bytes."""
    roster = _roster(terms, contents, believed)
    _sums[terms.round, terms.attempt] = _Sum(MaskedSum(roster, sharers))
    for oldest in sorted(_sums)[:-ATTEMPTS_HELD]:
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


def _roster(terms: Agreement, contents: Mapping[str, bytes], believed: Believed) -> Roster:
    """Content of a site: two keys and a commitment of 32 bytes each, then the signature."""
    shown = []
    for site, content in contents.items():
        first, second, third = (content[at : at + KEY_BYTES] for at in (0, 32, 64))
        shown.append(Advertisement(site, first, second, third, content[3 * KEY_BYTES :]))
    return Roster.of(terms, shown, believed.verifier())


def _dealt_under(state: _Site) -> Roster:
    if state.roster is None:
        raise CryptoError("this site has dealt no shares in this attempt: it has no masks to undo")
    return state.roster


def _state(round: int, attempt: int) -> _Site:
    state = _sites.get((round, attempt))
    if state is None:
        raise CryptoError(
            f"no masks are held for round {round}, attempt {attempt}: they were forgotten, or the "
            "crypto worker was restarted; this site has dropped out of the attempt"
        )
    return state


def _in_step(site: _Site, kind: type[State]) -> State:
    if not isinstance(site.state, kind):
        raise CryptoError(
            f"a step of masking came out of turn: expected {kind.__name__}, this site is at "
            f"{type(site.state).__name__}"
        )
    return site.state


def _open_sum(round: int, attempt: int) -> MaskedSum:
    total = _sums.get((round, attempt))
    if total is None:
        raise CryptoError(f"no masked sum was started for round {round}, attempt {attempt}")
    if total.total is None:
        raise CryptoError("the sum is closed and written: nothing is added to it any more")
    return total.total


def _write(path: Path, words: Words) -> BlobInfo:
    """The file appears under its name only when it is whole."""
    with whole(path, lasting=False) as unfinished:
        unfinished.write_bytes(words.data)
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


# ---- in the daemon's process ---------------------------------------------------


class MaskingJobs(SumJobs):
    """A site's steps of masking in one attempt, between the protocol and the crypto worker."""

    async def mask(self, state: AttemptState, effect: Mask) -> None:
        """One step as a participant; its answer goes to the coordinator."""
        order = effect.order
        if order is None:
            await self._answer(effect.at, pb.KEYS, await self._keys(state.planned))
            return
        given = {item.site: item.content for item in order.items}
        match order.step:
            case pb.KEYS:
                await self._answer(effect.at, pb.SHARES, await self._run(deal, *effect.at, given))
            case pb.SHARES:
                await self._run(hold_shares, *effect.at, given)
                roster = await self._run(roster_digest, *effect.at)
                await self._feed(do.ContextHeld(*effect.at, roster))

    async def _keys(self, plan: pb.Plan) -> dict[str, bytes]:
        identity = self._context.credentials.identity
        payload, content = await self._run(
            make_keys, self._terms(plan), identity.site_id, self._believed(plan)
        )
        return {identity.site_id: content + identity.sign(payload)}

    async def give_shares(self, state: AttemptState, effect: OpenShares) -> None:
        """This site's shares for the certified outcome, and for no other."""
        del state
        shares = await self._run(open_shares, *effect.at, effect.survivors, effect.dropouts)
        await self._answer(effect.at, pb.OPENING, shares)

    async def start(self, state: AttemptState, effect: StartMaskedSum) -> None:
        """Begin the sum, at the coordinator."""
        del state
        contents = {item.site: item.content for item in effect.keys.items}
        terms, believed = self._terms(effect.plan), self._believed(effect.plan)
        roster = await self._run(start_sum, terms, contents, believed, effect.sharers)
        await self._feed(MaskedSumStarted(*effect.at, roster))

    async def hide(self, state: AttemptState, hiding: Hiding) -> Uploaded:
        """Mask this site's update; there are no tags."""
        masked: BlobInfo = await self._run(
            mask_update,
            state.round,
            state.attempt,
            state.update,
            self._context.shapes.sizes,
            hiding,
            state.hidden(self._site),
        )
        return Uploaded(masked.digest, masked.size)

    async def add(self, state: AttemptState, site: str, nonce: bytes) -> None:
        """Add a masked input."""
        await self._run(add_update, state.round, state.attempt, site, state.hidden(site), nonce)

    async def finish(self, state: AttemptState) -> BlobInfo:
        """Write the masked sum."""
        written: BlobInfo = await self._run(finish_sum, state.round, state.attempt, state.sum)
        return written

    async def apply(
        self,
        state: AttemptState,
        effect: do.ApplySum,
        terms: SumTerms,
    ) -> NewVersion:
        """Take the masks off the certified sum."""
        applied: Unmasked = await self._run(
            apply_sum,
            *effect.at,
            effect.contributors,
            effect.dropouts,
            effect.opening,
            state.sum,
            effect.sum_digest,
            terms,
        )
        for cause in applied.wrong_shares:
            log.warning("a share was wrong, and not needed", cause=cause)
        return applied

    async def forget(self, round_: int, attempt: int) -> None:
        """Wipe the secrets and the sum."""
        await self._run(forget, round_, attempt)

    def _terms(self, plan: pb.Plan) -> Agreement:
        """The terms that a plan implies, at every site alike. Raises CryptoError."""
        return Agreement(
            federation=self._context.log_id,
            round=plan.round,
            attempt=plan.attempt,
            plan_digest=digest_of(plan),
            sites=tuple(participant.site for participant in plan.participants),
            threshold=threshold_of(plan),
            bits=plan.training.bits,
            values=self._context.shapes.total + FRACTION_INTEGERS,
        )

    def _believed(self, plan: pb.Plan) -> Believed:
        certificates = {one.site: one.certificate for one in plan.participants}
        return Believed(self._context.credentials.trust.authority_pem, certificates)

    async def _answer(
        self, at: tuple[int, int], step: pb.MaskingStep.ValueType, contents: dict[str, bytes]
    ) -> None:
        items = [pb.MaskingItem(site=s, content=content) for s, content in sorted(contents.items())]
        answer = pb.MaskingAnswer(round=at[0], attempt=at[1], step=step, items=items)
        await self._feed(Masked(*at, answer))

    work: ClassVar[Mapping[type[do.Work], Carrying]] = {
        Mask: mask,
        OpenShares: give_shares,
        StartMaskedSum: start,
    }
