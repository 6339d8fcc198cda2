"""Sums under CKKS at one site: the jobs of its crypto worker, and what the daemon does around.

Jobs are plain functions with plain arguments, run in the crypto worker process. Keys, and the
coordinator's running sum, live in its memory under their (round, attempt) and nowhere else; at
most two attempts are held. No key is ever written to a disk; this site's own integers are, for
as long as the round may have to sum them again (kept_integers.py). `CkksJobs` calls the jobs
from the daemon's process, seals keys for their holders and tells the protocol.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import structlog

from crypto.arrays import Int64
from crypto.ckks.dot_products import Sketches, answer, draw_signs
from crypto.ckks.parameters import CkksParameters, parameters_of
from crypto.ckks.seal_library import make_ready
from crypto.ckks.sum_proof import (
    NONCE_BYTES,
    Check,
    CheckKey,
    Claim,
    Tags,
    TagTally,
    UnprovenSum,
    size_of_tags,
)
from crypto.ckks.sums import DealtKey, RoundKey, deal
from crypto.identity.keys import IdentityError
from crypto.quantize import FRACTION_INTEGERS, CryptoError, pack, unpack
from daemon.jobs.sums.aggregation import CiphertextSum
from daemon.jobs.sums.integers import (
    Hiding,
    NewVersion,
    SumTerms,
    Uploaded,
    apply_integers,
    integers_of,
)
from daemon.jobs.sums.sum_jobs import ATTEMPTS_HELD, AttemptState, Carrying, SumJobs
from daemon.process.workers import Worker, WorkerCrashed, reads
from peers.attempts import effects as do
from peers.attempts.ckks import (
    AnswerChallenge,
    Challenge,
    ChallengeAnswered,
    Challenging,
    DealKey,
    KeyDealt,
    check_of,
    holders_of,
)
from peers.plans.robust import is_robust
from peers.wire.errors import RemoteProtocolError
from peers.wire.messages import one_line
from peers.wire.vectors import BlobInfo, read_encrypted, read_trailer, write_encrypted
from proto import federation_pb2 as pb

log = structlog.get_logger()


@dataclass(frozen=True)
class Finished(BlobInfo):
    """The sum that was written, and whose updates are in it (as `Claim.nonces`)."""

    nonces: tuple[tuple[str, bytes], ...] = ()


@dataclass
class _Attempt:
    """A key holder has ``check_key`` and ``claimed``, the coordinator ``total`` and ``tally``."""

    parameters: CkksParameters
    key: RoundKey
    total: CiphertextSum | None = None
    tally: TagTally | None = None
    check_key: CheckKey | None = None
    claimed: tuple[Check, Claim] | None = None


_attempts: dict[tuple[int, int], _Attempt] = {}


def warm_up(contributors: int, bits: int, *, measurable: bool = False) -> None:
    """Load what the first round's key will need (a tenth of a second), ahead of it."""
    make_ready(parameters_of(contributors, bits, measurable=measurable))


def deal_key(
    round: int, attempt: int, contributors: int, bits: int, *, measurable: bool = False
) -> DealtKey:
    """Make the attempt's key, at the key dealer, who holds it from then on.

    ``contributors`` is the largest number of updates that may be added; ``measurable``
    says whether their dot products are wanted. The secret context must be sealed for
    each key holder before it leaves.
    """
    parameters = parameters_of(contributors, bits, measurable=measurable)
    dealt = deal(parameters)
    key = RoundKey(parameters, dealt.secret, secret=True)
    _hold(
        round,
        attempt,
        _Attempt(parameters, key, check_key=CheckKey(dealt.secret, round, attempt)),
    )
    return dealt


@reads("the key dealer's context")
def hold_context(
    round: int,
    attempt: int,
    context: bytes,
    *,
    secret: bool,
    contributors: int,
    bits: int,
    measurable: bool = False,
) -> bytes:
    """Take the dealer's context: the secret one at a key holder, the public one at the coordinator.

    Returns the SHA-256 (32 bytes) of the context that is held from now on, to compare
    with what the dealer has signed (see `crypto.ckks.sums.DealtKey`). Raises CryptoError
    unless it is exactly what the round's plan implies, or when a sum was claimed
    already: to hold the key anew would be to forget that claim.
    """
    before = _attempts.get((round, attempt))
    if before is not None and before.claimed is not None:
        raise CryptoError("a round context came after a sum was claimed: it was refused")
    parameters = parameters_of(contributors, bits, measurable=measurable)
    key = RoundKey(parameters, context, secret=secret)
    check_key = CheckKey(context, round, attempt) if secret else None
    _hold(round, attempt, _Attempt(parameters, key, check_key=check_key))
    return hashlib.sha256(context).digest()


def forget(round: int, attempt: int) -> None:
    """Drop the attempt's key and sum; an attempt that is not held is no error."""
    _attempts.pop((round, attempt), None)


def encrypt_update(
    round: int,
    attempt: int,
    update_path: Path,
    sizes: Sequence[int],
    hiding: Hiding,
    out_path: Path,
    *,
    check: Check,
) -> Uploaded:
    """Quantise and encrypt this site's update under the attempt's key; errors of `integers_of`.

    Behind a key holder's update stand its tags (docs/decisions/0014); the coordinator
    keeps its own integers until the challenges come.
    """
    state = _state(round, attempt)
    packing = state.parameters.packing
    integers = integers_of(update_path, sizes, hiding, packing.bits)
    blocks = (state.key.encrypt(row) for row in pack(integers, packing))
    tags = nonce = b""
    if state.check_key is not None:
        nonce = os.urandom(NONCE_BYTES)
        tags = state.check_key.tags(check, hiding.exponents, integers, nonce)
    elif state.tally is not None:
        state.tally.own(integers)
    written = write_encrypted(out_path, state.parameters, integers.size, blocks, tags)
    return Uploaded(written.digest, written.size, nonce)


@dataclass(frozen=True)
class Question:
    """The products of these sites' updates are written; what was malformed, and why."""

    sites: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]
    digest: bytes


def compare_updates(
    round: int,
    attempt: int,
    updates: Sequence[tuple[str, Path, bytes]],
    values: int,
    out_path: Path,
) -> Question:
    """Sketch the updates, all of which are here, and write their encrypted dot products.

    Each with the nonce that its site has signed: what could not be added later is refused
    now, while the others can go on without it. Raises CryptoError when fewer than two are
    well-formed.
    """
    state = _state(round, attempt)
    integers = values + FRACTION_INTEGERS
    sketches = Sketches(state.key, draw_signs(state.parameters.packing.blocks(integers)))
    refused: list[tuple[str, str]] = []
    for site, path, nonce in updates:
        behind = _tags_behind(state, site)
        try:
            if behind:
                _read_tags(state, site, path, nonce)
            sketches.add(site, read_encrypted(path, state.parameters, integers, trailer=behind))
        except CryptoError as error:
            refused.append((site, str(error)))
    sites = tuple(site for site, *_ in updates if site not in dict(refused))
    sketches.ask(sites, out_path)
    with out_path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    return Question(sites, tuple(refused), digest)


def decrypt_products(
    round: int, attempt: int, path: Path, sites: Sequence[str]
) -> tuple[tuple[float, ...], tuple[str, ...]]:
    """The dot products, row by row up to the diagonal, and the sites with imaginary parts.

    Raises CryptoError when the question is malformed, or this site is no key holder.
    """
    answers = answer(_state(round, attempt).key, path, len(sites))
    products = tuple(float(answers.products[a, b]) for a in range(len(sites)) for b in range(a + 1))
    marked = zip(sites, answers.imaginary, strict=True)
    return products, tuple(site for site, imaginary in marked if imaginary)


def start_sum(round: int, attempt: int, sizes: Sequence[int], check: Check) -> None:
    """Begin the coordinator's sum of updates of this length, which it will have to prove."""
    state = _state(round, attempt)
    state.total = CiphertextSum(state.parameters, sum(sizes) + FRACTION_INTEGERS)
    state.tally = TagTally(check)


@reads("the update of {site}")
def add_update(round: int, attempt: int, site: str, path: Path, nonce: bytes | None = None) -> None:
    """Add a site's update, behind which stand its tags; behind our own there are none.

    ``nonce``: the one that the site has signed, which its tags must have. Raises
    CryptoError, the sum unchanged, when one of them is refused.
    """
    state = _state(round, attempt)
    total, tally = _sum_of(state, round, attempt)
    behind = _tags_behind(state, site)
    if not behind:
        total.add_file(path, site)
        return
    tags = _read_tags(state, site, path, nonce)
    total.add_file(path, site, trailer=behind)
    tally.add(site, tags)


def _read_tags(state: _Attempt, site: str, path: Path, nonce: bytes | None) -> Tags:
    """The tags behind an update. Raises CryptoError unless its site has signed these."""
    holders = state.tally.check.holders if state.tally is not None else ()
    tags = Tags.parse(read_trailer(path, _tags_behind(state, site)), len(holders))
    if nonce is not None and tags.nonce != nonce:
        raise CryptoError(f"the tags of {site} are not those that it has signed")
    return tags


def _tags_behind(state: _Attempt, site: str) -> int:
    """Bytes of the tags behind a site's update."""
    if state.tally is None or site == state.tally.check.coordinator:
        return 0
    return size_of_tags(len(state.tally.check.holders))


def finish_sum(round: int, attempt: int, out_path: Path) -> Finished:
    """Write the sum for the key holders. Raises CryptoError below two contributors."""
    total, tally = _sum_of(_state(round, attempt), round, attempt)
    written = total.write(out_path)
    return Finished(written.digest, written.size, tally.nonces(total.contributors))


def challenge(round: int, attempt: int, check: Check, claim: Claim) -> bytes:
    """At a key holder: what it asks about the sum that the coordinator says it made.

    Told once: from then on `apply_sum` takes no other sum. Raises CryptoError when
    another was claimed before.
    """
    state = _state(round, attempt)
    claim.check(check)
    if state.check_key is None:
        raise CryptoError("only a key holder can ask for the proof of a sum")
    if state.claimed not in (None, (check, claim)):
        raise CryptoError(
            f"{check.coordinator} claims a second sum after it was told the challenge: refused"
        )
    state.claimed = (check, claim)
    return state.check_key.challenge(check.site)


def answer_challenge(round: int, attempt: int, holder: str, challenge: bytes) -> bytes:
    """At the coordinator: the answer for one key holder. Raises CryptoError."""
    total, tally = _sum_of(_state(round, attempt), round, attempt)
    return tally.answer(total.contributors, holder, challenge)


@reads("the coordinator's sum")
def apply_sum(
    round: int,
    attempt: int,
    sum_path: Path,
    terms: SumTerms,
    *,
    answer: bytes,
) -> NewVersion:
    """Decrypt the sum and make the new version: parent + sum / total weight.

    Every key holder computes the same bits: the integers are exact, and the rest
    is one IEEE double operation after the other on each value, rounded to
    float32 at the end; nothing is added up in an order that a library or the number
    of threads decides, and nothing is left to a machine's mathematical library.
    ``answer``: the coordinator's, to our `challenge`. Raises CryptoError when the sum is
    malformed, is no sum under this key, or this site is no key holder; UnprovenSum,
    which is one, when it is not what was claimed; VersionError when the parent is
    missing or damaged.
    """
    state = _state(round, attempt)
    packing = state.parameters.packing
    if not 0.0 < terms.total_weight <= packing.contributors:
        raise CryptoError(
            f"a total weight lies in (0, {packing.contributors}] here, got {terms.total_weight}"
        )
    integers = _decrypt_sum(state, sum_path, sum(terms.sizes) + FRACTION_INTEGERS)
    _check_proof(state, sum_path, terms.exponents, integers, answer)
    return apply_integers(integers, packing.bits, terms)


def _decrypt_sum(state: _Attempt, path: Path, values: int) -> Int64:
    packing = state.parameters.packing
    slots = np.empty((packing.blocks(values), packing.slots), dtype=np.complex128)
    for row, block in zip(slots, read_encrypted(path, state.parameters, values), strict=True):
        row[:] = state.key.decrypt(block)
    return unpack(slots, packing, values)


def _check_proof(
    state: _Attempt,
    path: Path,
    exponents: Sequence[int],
    integers: Int64,
    answer: bytes,
) -> None:
    if state.claimed is None or state.check_key is None:
        raise CryptoError("nothing was claimed of this sum: it was refused")
    check, claim = state.claimed
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    if digest != claim.sum_digest:
        raise UnprovenSum(
            f"the encrypted sum is not the one that {check.coordinator} claimed before it was "
            "told the challenge"
        )
    state.check_key.verify(check, claim, exponents, integers, answer)


def _hold(round: int, attempt: int, state: _Attempt) -> None:
    _attempts[round, attempt] = state
    for oldest in sorted(_attempts)[:-ATTEMPTS_HELD]:
        del _attempts[oldest]


def sealing_context(federation: str, at: tuple[int, int], dealer: str, holder: str) -> bytes:
    """What a sealed key is bound to: it opens nowhere else and in no other attempt."""
    return "\0".join(("hanse-round-key-v1", federation, *map(str, at), dealer, holder)).encode()


def _state(round: int, attempt: int) -> _Attempt:
    state = _attempts.get((round, attempt))
    if state is None:
        raise CryptoError(
            f"no key is held for round {round}, attempt {attempt}: it was forgotten, never came, "
            "or the crypto worker was restarted; the next attempt brings a new one"
        )
    return state


def _sum_of(state: _Attempt, round: int, attempt: int) -> tuple[CiphertextSum, TagTally]:
    if state.total is None or state.tally is None:
        raise CryptoError(f"no sum was started for round {round}, attempt {attempt}")
    return state.total, state.tally


# ---- in the daemon's process ---------------------------------------------------


class CkksJobs(SumJobs):
    """What a site does for a sum under CKKS, as dealer, key holder, coordinator or contributor."""

    @classmethod
    async def warm_up(cls, crypto: Worker, sites: int, bits: int, *, measurable: bool) -> None:
        """SEAL's tables for such a key: a tenth of a second."""
        await crypto.run(warm_up, sites, bits, measurable=measurable)

    async def deal(self, state: AttemptState, effect: DealKey) -> None:
        """Make the key; secret to each holder, sealed for it; public to the coordinator.

        The protocol commits this site to both before either leaves it.
        """
        del state
        plan, at, push = effect.plan, effect.at, self._context.peers.push
        key: DealtKey = await self._run(deal_key, *at, **_terms(plan))
        digests = [hashlib.sha256(part).digest() for part in (key.public, key.secret)]
        await self._feed(KeyDealt(*at, *digests))
        certificates = {p.site: p.certificate for p in plan.participants}
        async with asyncio.TaskGroup() as group:
            name = pb.BlobName(kind=pb.PUBLIC_CONTEXT, round=at[0], attempt=at[1])
            group.create_task(push(effect.coordinator, name, key.public))
            for holder in holders_of(plan):
                if holder != self._site:
                    sealed = self._seal(holder, certificates[holder], key.secret, at)
                    sealed_name = pb.BlobName(kind=pb.SEALED_CONTEXT, round=at[0], attempt=at[1])
                    group.create_task(push(holder, sealed_name, sealed))
            group.create_task(self._hold(at, key.secret, plan, secret=True))

    def _seal(self, holder: str, certificate: bytes, secret: bytes, at: tuple[int, int]) -> bytes:
        identity, trust = self._context.credentials.identity, self._context.credentials.trust
        site = trust.site_of(certificate, at=None)
        if site != holder:
            raise IdentityError(f"the plan gives the certificate of {site} for {holder}")
        context = sealing_context(self._context.log_id, at, identity.site_id, holder)
        return trust.seal_for(certificate, secret, context)

    async def take_context(
        self, state: AttemptState, sender: str, name: pb.BlobName, data: bytes
    ) -> None:
        """The dealer's context: sealed for us as a key holder, or public as the coordinator."""
        at = (name.round, name.attempt)
        secret = name.kind == pb.SEALED_CONTEXT
        if secret:
            identity = self._context.credentials.identity
            context = sealing_context(self._context.log_id, at, sender, identity.site_id)
            data = identity.unseal(data, context)
        await self._hold(at, data, state.planned, secret=secret)

    async def _hold(
        self, at: tuple[int, int], context: bytes, plan: pb.Plan, *, secret: bool
    ) -> None:
        digest = await self._run(hold_context, *at, context, secret=secret, **_terms(plan))
        if not secret:
            await self._run(start_sum, *at, self._context.shapes.sizes, self._check(plan))
        await self._feed(do.ContextHeld(*at, digest))

    def _check(self, plan: pb.Plan) -> Check:
        identity = self._context.credentials.identity
        return check_of(plan, self._context.log_id, identity.site_id)

    async def hide(self, state: AttemptState, hiding: Hiding) -> Uploaded:
        """Encrypt this site's update; a key holder's has tags behind it."""
        uploaded: Uploaded = await self._run(
            encrypt_update,
            state.round,
            state.attempt,
            state.update,
            self._context.shapes.sizes,
            hiding,
            state.hidden(self._site),
            check=self._check(state.planned),
        )
        return uploaded

    async def add(self, state: AttemptState, site: str, nonce: bytes) -> None:
        """Add an update, and what its tags prove."""
        at = (state.round, state.attempt)
        await self._run(add_update, *at, site, state.hidden(site), nonce)

    async def compare(self, state: AttemptState, effect: do.CompareUpdates) -> None:
        """Write the encrypted dot products of the updates that wait on the disk."""
        updates = [
            (site, state.hidden(site), nonce)
            for site, nonce in zip(effect.sites, effect.nonces, strict=True)
        ]
        total, products = self._context.shapes.total, state.products
        made: Question = await self._run(compare_updates, *effect.at, updates, total, products)
        for site, reason in made.refused:
            log.warning("update refused", peer=site, cause=reason)
        await self._feed(do.QuestionReady(*effect.at, made.sites, made.refused, made.digest))

    async def decrypt(self, state: AttemptState, effect: do.DecryptProducts) -> None:
        """Decrypt the products: these numbers, and nothing else of any update."""
        await state.products_here.wait()  # the end of the attempt cancels us
        if state.products_digest != effect.products_digest:
            raise RemoteProtocolError("the dot products are not those that were certified")
        products, imaginary = await self._run(
            decrypt_products, *effect.at, state.products, effect.sites
        )
        await self._feed(do.ProductsDecrypted(*effect.at, products, imaginary))

    async def finish(self, state: AttemptState) -> BlobInfo:
        """Write the encrypted sum."""
        written: BlobInfo = await self._run(finish_sum, state.round, state.attempt, state.sum)
        return written

    async def ask_for_proof(self, state: AttemptState, effect: Challenge) -> None:
        """Bind the crypto worker to what was certified; what it then asks is told."""
        claim, check = Claim(effect.sum_digest, effect.nonces), self._check(state.planned)
        question = await self._run(challenge, *effect.at, check, claim)
        await self._feed(Challenging(*effect.at, question))

    async def prove(self, state: AttemptState, effect: AnswerChallenge) -> None:
        """Prove the sum to one key holder; one that can't be answered costs only that holder."""
        del state
        at, holder = effect.at, effect.holder
        try:
            proof = await self._run(answer_challenge, *at, holder, effect.challenge)
        except (CryptoError, WorkerCrashed) as error:
            log.warning("challenge refused", peer=holder, cause=str(error))
            await self._feed(do.OpeningRefused(*at, holder, one_line(str(error))))
        else:
            await self._feed(ChallengeAnswered(*at, holder, proof))

    async def apply(
        self,
        state: AttemptState,
        effect: do.ApplySum,
        terms: SumTerms,
    ) -> NewVersion:
        """Decrypt the proven sum."""
        applied: NewVersion = await self._run(
            apply_sum, *effect.at, state.sum, terms, answer=effect.opening
        )
        return applied

    async def forget(self, round_: int, attempt: int) -> None:
        """Wipe the key and the sum."""
        await self._run(forget, round_, attempt)

    work: ClassVar[Mapping[type[do.Work], Carrying]] = {
        DealKey: deal,
        do.CompareUpdates: compare,
        do.DecryptProducts: decrypt,
        Challenge: ask_for_proof,
        AnswerChallenge: prove,
    }


def _terms(plan: pb.Plan) -> dict[str, int]:
    """What a key is made for: how many updates, of which bits, and whether they are compared."""
    training = plan.training
    count, measurable = len(plan.participants), is_robust(training)
    return {"contributors": count, "bits": training.bits, "measurable": measurable}
