"""`fedd` that lies when it coordinates, among sites that may lack a defence against it.

    HANSE_UNDEFENDED=weights,promises python -m tests.attacks.programs.lying_fedd --config fedd.toml

As long as the daemon's folder (HANSE_TAPE) holds a file ``lie`` with "HOW SITE", it does
to that site what the function of that name in LIES says; a daemon without the file does
as the program says. HANSE_UNDEFENDED takes some of `defences.OF_SUMS` out, at every site.
Every update is kept as ``update-ROUND-ATTEMPT.npy``, and what is made of a sum as
``opened-ROUND-ATTEMPT.safetensors``, so that a test can tell what an attacker has learnt.
HANSE_COUNTS, "SITE=NUMBER ...": how many examples sites say that they have.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from daemon import main as fedd
from daemon.jobs.sums import ckks, masking
from daemon.jobs.sums.ckks import Finished
from daemon.jobs.sums.integers import NewVersion, SumTerms
from daemon.rounds.work import WORK, AttemptWork
from daemon.services.collection import Collection
from daemon.state.versions import read_whole_version, write_version
from peers.attempts import bundle, coordination, scale, statement
from peers.attempts import effects as do
from peers.attempts.bundle import Ground, Promised
from peers.attempts.coordination import Coordination, Tally
from peers.attempts.lead import AttemptFails
from peers.attempts.statement import EncodedStatement
from peers.attempts.summation import Summation
from peers.rounds.acceptor import Acceptor
from peers.rounds.pacemaker import Timing
from peers.rounds.protocol import Protocol
from peers.rounds.replica import Replica
from peers.wire.signing import Kind, name_of, sign, verify
from peers.wire.vectors import BlobInfo, read_encrypted, write_encrypted
from proto import federation_pb2 as pb
from tests.attacks.programs import defences
from tests.attacks.programs.defences import proven_by_anyone, unverified
from tests.attacks.programs.planting import put

HEAVY = 100_000
COARSER = scale.MOST_BITS_ABOVE  # bits: what a site may be above the median

_folder = Path(os.environ.get("HANSE_TAPE", "."))


def lying(*ways: str) -> str:
    """At whose cost this site lies in one of these ways just now; empty when it does not."""
    path = _folder / "lie"
    how, _, victim = path.read_text().partition(" ") if path.exists() else ("", "", "")
    return victim if how in ways else ""


def _with_body(signed: pb.Signed, message: Any) -> pb.Signed:
    """Other words above a signature that is not theirs."""
    body = message.SerializeToString(deterministic=True)
    return pb.Signed(
        body=body, site=signed.site, signature=signed.signature, certificate=signed.certificate
    )


# ---- lies about the bundle ---------------------------------------------------------


def weighs() -> None:
    """In the bundle the victim promises 100,000 examples, and everybody else 1."""
    make = vars(coordination)["make"]

    def forged(ground: Ground, run: pb.Signed, promised: Iterable[Promised]) -> pb.Bundle:
        made: pb.Bundle = make(ground, run, promised)
        if victim := lying("weighs"):
            for signed in made.promises:
                promise = pb.Promise.FromString(signed.body)
                promise.num_examples = HEAVY if signed.site == victim else 1
                if signed.site != ground.coordinator:
                    signed.CopyFrom(_with_body(signed, promise))
        return made

    put(coordination, "make", forged)
    _believe_ourselves()


def drops_privacy() -> None:
    """In the bundle the run is without differential privacy, and all promises are for that."""
    make, go = vars(coordination)["make"], Coordination._go

    def going(self: Coordination, now: float) -> list[do.Effect]:
        if lying("drops-privacy"):
            run = pb.Run.FromString(self.run.body)
            run.plan.ClearField("privacy")
            self.run = _with_body(self.run, run)
        return go(self, now)

    def forged(ground: Ground, run: pb.Signed, promised: Iterable[Promised]) -> pb.Bundle:
        made: pb.Bundle = make(ground, run, promised)
        if lying("drops-privacy"):
            for signed in made.promises:
                promise = pb.Promise.FromString(signed.body)
                promise.run_digest = name_of(run)
                signed.CopyFrom(_with_body(signed, promise))
        return made

    put(Coordination, "_go", going)
    put(coordination, "make", forged)
    _believe_ourselves()


def _believe_ourselves() -> None:
    """A liar's own daemon must not refuse what it forged, nor accuse others of it."""
    honest, note = vars(bundle)["read"], Replica.note

    def believing(*arguments: Any, **named: Any) -> Any:
        forging = lying("weighs", "drops-privacy")
        return (unverified if forging else honest)(*arguments, **named)

    def noting(self: Replica, *said: Any) -> None:
        if not lying("weighs", "drops-privacy"):
            note(self, *said)

    put(bundle, "read", believing)
    put(Replica, "note", noting)


def leaves_out() -> None:
    """It sums without the victim, opens that for itself, and then calls the attempt failed.

    As "sulks" it takes no part in the next one, so that no sum can be made again.
    """
    promised, applied = Coordination.promised, Coordination.applied
    make_promise = Acceptor.make_promise

    def deaf(self: Coordination, one: Promised, now: float) -> list[do.Effect]:
        return [] if one.site == lying("leaves-out", "sulks") else promised(self, one, now)

    def opened(
        self: Coordination, sender: str, message: pb.AppliedSum, now: float
    ) -> list[do.Effect]:
        if not lying("leaves-out", "sulks"):
            return applied(self, sender, message, now)
        if sender == self.lead.site:
            raise AttemptFails("the sum was not opened in time")
        return []

    def promising(self: Acceptor, ground: Ground, *, tried: bool) -> pb.Promised:
        if lying("sulks") and ground.attempt > 0:
            self._here.situation = replace(self._here.situation, willing=False, reason="sulks")
        return make_promise(self, ground, tried=tried)

    put(Coordination, "promised", deaf)
    put(Coordination, "applied", opened)
    put(Acceptor, "make_promise", promising)


# ---- lies about the scale ------------------------------------------------------------


def scales() -> None:
    """The victim is told its own scale, everybody else one that is 2^6 times as coarse.

    So coarse as a site may make it without being left out: what they send on it is read on
    the victim's, where it is a sixty-fourth.
    """
    scale, contributed = Summation._scale, Summation.contributed

    def telling(self: Summation, now: float) -> list[do.Effect]:
        effects = scale(self, now)
        if victim := lying("scales"):
            for effect in effects:
                if not isinstance(effect, do.Send) or not isinstance(effect.body, pb.Scale):
                    continue
                if effect.to not in (victim, self._lead.site):
                    message = pb.Scale()
                    message.CopyFrom(effect.body)
                    effects[effects.index(effect)] = do.Send(effect.to, message)
                    for signed in message.exponents:
                        if signed.site == self._lead.site:
                            signed.CopyFrom(_coarser(self, signed))
        return effects

    def taking(
        self: Summation, sender: str, message: pb.Contributed, now: float
    ) -> list[do.Effect]:
        if not lying("scales"):
            return contributed(self, sender, message, now)
        signed = message.contribution
        told = pb.Contribution.FromString(signed.body)
        return self._joined(sender, self.updates.signed(sender, signed, told), now)

    put(Summation, "_scale", telling)
    put(Summation, "contributed", taking)


def _coarser(self: Summation, ours: pb.Signed) -> pb.Signed:
    """Exponents of our own that we sign once more, as high as they are taken."""
    told = pb.Exponents.FromString(ours.body)
    told.scale_exponents[:] = [max(told.scale_exponents) + COARSER] * len(told.scale_exponents)
    return sign(self._lead.keys, Kind.EXPONENTS, told)


# ---- lies about what is stated -------------------------------------------------------


@dataclass
class _Second:
    """The sum without the victim, as far as it has come."""

    known: EncodedStatement | None = None
    signatures: dict[str, pb.Signature] = field(default_factory=dict)
    told: bytes = b""  # the version that its opener says it is
    here: bool = False
    waits: bool = False  # for its signatures, however long they take
    held: list[tuple[str, pb.AppliedSum]] = field(default_factory=list)


def two_sums() -> None:
    """One holder of the key is to open the sum of all, another one that without the victim."""
    second = _Second()
    _state_both(second)
    _certify_the_second(second)
    _send_each_holder_one(second)
    _wait_for_what_is_told(second)


def _state_both(second: _Second) -> None:
    """Behind the sum of all, the coordinator states the second one to everybody."""
    worked = Coordination.worked

    def stating(self: Coordination, event: do.WorkDone, now: float) -> list[do.Effect]:
        effects = worked(self, event, now)
        if not lying("two-sums") or not isinstance(event, do.SumFinished):
            return effects
        second.known = without_victim(self)
        at = second.known.message
        state = pb.State(round=at.round, attempt=at.attempt, statement=second.known.raw)
        return [*effects, *(do.Send(site, state) for site in sorted(self.lead.promises))]

    put(Coordination, "worked", stating)


def without_victim(leading: Coordination) -> EncodedStatement:
    """A statement of the sum of all but the victim."""
    assert leading.sum is not None
    digest = _other_sum(leading.lead.round, leading.lead.attempt)[1]
    message = leading.sum._about(pb.SUM, digest, ())
    told = leading.sum.updates.contributions
    kept = sorted({*told} - {lying("two-sums")})
    message.contributions.extend(told[site] for site in kept)
    return EncodedStatement.of(message)


def _certify_the_second(second: _Second) -> None:
    """Signed by a quorum, it goes to the second holder."""
    stated = Coordination.stated

    def signing(self: Coordination, sender: str, message: pb.Stated, now: float) -> list[do.Effect]:
        known = second.known
        if not lying("two-sums") or not known or message.statement_digest != known.digest:
            return stated(self, sender, message, now)
        keys, manifest = self.lead.keys, self.lead.ground.manifest
        verify(keys, Kind.STATEMENT, known.raw, message.signature, manifest)
        signatures = second.signatures
        signatures[sender] = message.signature
        if len(signatures) != self.lead.ground.manifest.quorum:
            return []
        both = pb.StatementCertificate(
            statement=known.raw, signatures=[signatures[site] for site in sorted(signatures)]
        )
        asked = pb.Certified(round=self.lead.round, attempt=self.lead.attempt, certificate=both)
        return [do.SendSum((_second_of(self),), asked)]

    put(Coordination, "stated", signing)


def _send_each_holder_one(second: _Second) -> None:
    """The sum of all to all holders but the second one, which is sent the second sum."""
    certified, send_sum = Coordination._certified, WORK[do.SendSum]

    def certifying(
        self: Coordination,
        known: EncodedStatement,
        certificate: pb.StatementCertificate,
        now: float,
    ) -> list[do.Effect]:
        effects = certified(self, known, certificate, now)
        if lying("two-sums"):
            other = _second_of(self)
            effects = [
                do.SendSum(tuple({*effect.holders} - {other}), effect.certified)
                if isinstance(effect, do.SendSum)
                else effect
                for effect in effects
            ]
        return effects

    async def sending(self: AttemptWork, effect: do.SendSum) -> None:
        known, here = second.known, effect.certified
        if not lying("two-sums") or not known or here.certificate.statement != known.raw:
            await send_sum(self, effect)
            return
        path = _other_sum(here.round, here.attempt)[0]
        await self._context.peers.send_behind(effect, pb.ENCRYPTED_SUM, path)

    put(Coordination, "_certified", certifying)
    WORK[do.SendSum] = sending


def _wait_for_what_is_told(second: _Second) -> None:
    """What was made of the second sum is fetched; only then the round goes on."""
    applied, version_here = Coordination.applied, Protocol._version_here

    def opened(
        self: Coordination, sender: str, message: pb.AppliedSum, now: float
    ) -> list[do.Effect]:
        told = pb.Applied.FromString(message.applied.body)
        known, both = second.known, self.lead.ground.manifest.quorum
        coming = second.waits or len(second.signatures) >= both
        if not lying("two-sums") or not known or not coming:
            return applied(self, sender, message, now)
        if told.root_digest != known.digest:  # the round goes on when both are here
            if second.here:
                return applied(self, sender, message, now)
            second.held.append((sender, message))
            return []
        second.told = told.model_digest
        return [do.FetchVersion(told.model_digest, (sender,))]

    def fetched(self: Protocol, digest: bytes) -> None:
        version_here(self, digest)
        under_way = self._here.coordination
        if lying("two-sums") and digest == second.told and under_way is not None:
            made = _folder / "state" / "versions" / f"{digest.hex()}.safetensors"
            name = f"told-{under_way.lead.round}-{under_way.lead.attempt}.safetensors"
            shutil.copy(made, _folder / name)
            second.here = True
            for sender, message in second.held:
                self._here.emit(*applied(under_way, sender, message, self._here.now))

    put(Coordination, "applied", opened)
    put(Protocol, "_version_here", fetched)


def second_holder(participants: Iterable[str], lead: str) -> str:
    """Who is to open the sum without the victim: the last one that is neither of the two."""
    return max({*participants} - {lead, lying("two-sums")})


def _second_of(leading: Coordination) -> str:
    assert leading.sum is not None
    return second_holder(leading.sum.participants, leading.lead.site)


def _other_sum(round_: int, attempt: int) -> tuple[Path, bytes]:
    """Where the crypto worker has left the sum without the victim, and its digest."""
    path = _folder / f"other-{round_}-{attempt}.bin"
    return path, hashlib.sha256(path.read_bytes()).digest()


def hands_out() -> None:
    """In masking mode it alone opens the sum, and hands out a version that it made up."""
    pass_on, believe = Summation._pass_on, statement.read_proof

    def keeping(self: Summation, now: float) -> list[do.Effect]:
        effects = pass_on(self, now)
        if lying("hands-out"):
            return [e for e in effects if not _is_opening(e) or _goes_to(e, self._lead.site)]
        return effects

    def alone(self: Tally) -> int:
        return 1 if lying("hands-out") else self.ground.manifest.tolerated + 1

    def believing(*arguments: Any) -> pb.Applied:
        return (proven_by_anyone if lying("hands-out") else believe)(*arguments)

    put(Summation, "_pass_on", keeping)
    put(Tally, "proving", property(alone))
    put(statement, "read_proof", believing)


def _goes_to(effect: do.Effect, site: str) -> bool:
    return isinstance(effect, do.Send) and effect.to == site


def _is_opening(effect: do.Effect) -> bool:
    return isinstance(effect, do.Send) and isinstance(effect.body, pb.Openings)


# ---- lies of the crypto worker -------------------------------------------------------


def changes_the_sum() -> None:
    """Without the victim's update ("drops"), nothing but it ("singles-out"), or both sums."""
    add_update, finish_sum = ckks.add_update, ckks.finish_sum
    answer_challenge = ckks.answer_challenge
    blocks: dict[str, list[bytes]] = {}

    def keeping_blocks(
        round: int, attempt: int, site: str, path: Path, nonce: bytes | None = None
    ) -> None:
        held = ckks._state(round, attempt)
        assert held.total is not None
        values, behind = held.total._values, ckks._tags_behind(held, site)
        blocks[site] = list(read_encrypted(path, held.parameters, values, trailer=behind))
        add_update(round, attempt, site, path, nonce)

    def finishing(round: int, attempt: int, out_path: Path) -> Finished:
        finished = finish_sum(round, attempt, out_path)
        held = ckks._state(round, attempt)
        assert held.total is not None
        total, written = held.total, BlobInfo(finished.digest, finished.size)
        if victim := lying("drops", "two-sums"):
            for index, block in enumerate(blocks[victim]):
                total._total.subtract(index, block)
            drops = lying("drops")
            written = total.write(out_path if drops else _folder / f"other-{round}-{attempt}.bin")
            if not drops:
                written = BlobInfo(finished.digest, finished.size)
        elif victim := lying("singles-out"):
            written = write_encrypted(out_path, held.parameters, total._values, blocks[victim])
        return Finished(written.digest, written.size, finished.nonces)

    def answering(round: int, attempt: int, holder: str, challenge: bytes) -> bytes:
        victim = lying("two-sums")
        held = ckks._state(round, attempt)
        if not victim or held.tally is None or held.total is None:
            return answer_challenge(round, attempt, holder, challenge)
        check = held.tally.check
        sites = set(held.total.contributors)
        if holder == second_holder(check.holders, check.coordinator):
            sites.discard(victim)
        return held.tally.answer(sites, holder, challenge)

    put(ckks, "add_update", keeping_blocks)
    put(ckks, "finish_sum", finishing)
    put(ckks, "answer_challenge", answering)


def makes_a_version_up() -> None:
    """Of "hands-out": everything is 1 more than in the parent."""
    apply_sum = masking.apply_sum

    @functools.wraps(apply_sum)
    def opening(*arguments: Any, **named: Any) -> NewVersion:
        applied = apply_sum(*arguments, **named)
        if not lying("hands-out"):
            return applied
        (terms,) = [one for one in arguments if isinstance(one, SumTerms)]
        at = (terms.versions, terms.shape_digest)
        parent, _ = read_whole_version(terms.versions, terms.parent_digest, terms.shape_digest)
        digest, _ = write_version(*at, parent + np.float32(1.0))
        return replace(applied, model_digest=digest)

    put(masking, "apply_sum", opening)


def _keep_records() -> None:
    """Each update as it was trained, and what was made of a sum."""
    for module, name in ((ckks, "encrypt_update"), (masking, "mask_update")):
        _keep_update(module, name)
    for module in (ckks, masking):
        _keep_version(module)


def _keep_update(module: Any, name: str) -> None:
    hide = getattr(module, name)

    @functools.wraps(hide)
    def keeping(round: int, attempt: int, path: Path, *rest: Any, **named: Any) -> Any:
        if path.exists():  # not where a sum is made again: nothing is trained for it
            shutil.copy(path, _folder / f"update-{round}-{attempt}.npy")
        return hide(round, attempt, path, *rest, **named)

    setattr(module, name, keeping)


def _keep_version(module: Any) -> None:
    apply_sum = module.apply_sum

    @functools.wraps(apply_sum)
    def keeping(round: int, attempt: int, *rest: Any, **named: Any) -> NewVersion:
        applied: NewVersion = apply_sum(round, attempt, *rest, **named)
        (terms,) = [one for one in rest if isinstance(one, SumTerms)]
        made = terms.versions / f"{applied.model_digest.hex()}.safetensors"
        shutil.copy(made, _folder / f"opened-{round}-{attempt}.safetensors")
        return applied

    module.apply_sum = keeping


LIES: dict[str, Callable[[], None]] = {
    "weighs": weighs,
    "drops-privacy": drops_privacy,
    "leaves-out": leaves_out,  # "sulks", too
    "scales": scales,
    "two-sums": two_sums,
    "hands-out": hands_out,
}
WORKERS_LIES: dict[str, Callable[[], None]] = {
    "drops": changes_the_sum,  # "singles-out" and "two-sums", too
    "hands-out": makes_a_version_up,
}


def _count_as_told() -> None:
    """How many examples this site says it has, where HANSE_COUNTS says so."""
    counts = dict(one.split("=") for one in os.environ.get("HANSE_COUNTS", "").split())
    told, situation = counts.get(_folder.name), Collection.situation

    async def saying(self: Collection) -> do.Situation:
        honest = await situation(self)
        return replace(honest, num_examples=int(told)) if told else honest

    put(Collection, "situation", saying)


def _wait_for_all() -> None:
    """A site that is late on a loaded machine is waited for: who takes part is to be certain."""
    put(Timing, "straggler", lambda self, attempt: self.phase(attempt) / 2)


def _undefended() -> list[str]:
    return [one for one in os.environ.get("HANSE_UNDEFENDED", "").split(",") if one]


# A worker imports its daemon's main module anew, under this name (multiprocessing.spawn).
if __name__ == "__mp_main__":
    for removed in _undefended():
        defences.OF_WORKERS.get(removed, lambda: None)()
    for lie in WORKERS_LIES.values():
        lie()
    _keep_records()

if __name__ == "__main__":
    for removed in _undefended():
        if removed not in defences.OF_WORKERS:
            defences.OF_SUMS[removed]()
    for lie in LIES.values():
        lie()
    _count_as_told()
    _wait_for_all()
    fedd.main()
