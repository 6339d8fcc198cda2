"""Targets: what sites sign for good, and what others show of it.

Promises, bundles of them, certificates and proofs of sums, evidence: see
tests/fuzz/targets/wire.py for what a judge is. An input is a byte that says which, then the
message. Mutations reach into what was signed, and half of them are signed anew by who
is said to have signed, as a site that lies would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from random import Random

from google.protobuf.message import DecodeError, Message

from peers.attempts.bundle import PlanFails, derive_plan, needed_contributors
from peers.attempts.statement import EncodedStatement, read_certificate, read_lock, value_of
from peers.plans.weights import stands_out
from peers.rounds import evidence
from peers.wire.certificates import CertificateError, vote_payload
from peers.wire.errors import RemoteProtocolError
from peers.wire.messages import check, decode, parse
from peers.wire.signing import Kind
from proto import federation_pb2 as pb
from tests.crypto.identity.forgery import IdentityKeys
from tests.fuzz.mutators import mutate_message
from tests.fuzz.world import AT, SITES, training, world
from tests.support.signed_rounds import Stage

_ATTEMPT = 2  # that promises and bundles are for
_LATER = _ATTEMPT + 1


def _keys(site: str) -> IdentityKeys:
    return IdentityKeys(world().identities[site], world().trust, AT)


@cache
def stage() -> Stage:
    """The federation of all targets, in the second attempt of its first round."""
    made = Stage(manifest=world().manifests[1], training=training(), keys=_keys)
    made.manifests = dict(world().manifests)
    return made


# ---- judges -------------------------------------------------------------------------------


def _promised(message: pb.Promised) -> None:
    """Accepted: what it names is what it shows, of an earlier attempt of its round."""
    read = stage().read_promised(message)
    assert message.HasField("lock") == read.promise.HasField("lock")
    if read.lock is not None:
        assert read.lock.name == read.promise.lock
        assert read.lock.name.attempt < read.promise.attempt
        _lock(message.lock)
    if message.HasField("stated"):
        _whole(EncodedStatement.parse(message.stated.body).message)


def _whole(statement: pb.Statement) -> None:
    """A sum that may be made again is one that nobody stands out in."""
    sites = [one.site for one in statement.contributions]
    assert len(sites) >= needed_contributors(statement.plan) >= 3
    assert set(sites) <= set(SITES)


def _bundle(message: pb.Bundle) -> None:
    """Accepted: a quorum's, and a plan that passes every bound, or none, follows from it."""
    read = stage().read(message, _LATER)
    assert len(read.promises) >= stage().manifest.quorum
    if read.lock is not None:
        named = [one.lock.attempt for one in read.promises.values() if one.HasField("lock")]
        assert read.lock.name.attempt == max(named)
        return
    try:
        made = derive_plan(read, stage().ground(_LATER))
    except PlanFails:
        return
    check(made)
    assert made.training == read.run.plan or read.repeated is not None
    counts = [one.num_examples for one in made.participants]
    assert not stands_out(counts, stage().manifest.tolerated)
    if read.repeated is None:
        told = {site: one.num_examples for site, one in read.promises.items()}
        assert all(one.num_examples <= told[one.site] for one in made.participants)


def _certificate(message: pb.StatementCertificate) -> None:
    """Accepted: different sites' signatures, as many as a quorum of the manifest named."""
    known = read_certificate(message, _keys("alpha"), world().manifests.get)
    manifest = world().manifests[known.message.manifest_version]
    signers = {one.site for one in message.signatures}
    assert len(signers) == len(message.signatures) >= manifest.quorum
    assert signers <= set(manifest.enabled_ids)


def _lock(message: pb.Lock) -> None:
    """Accepted: f + 1 sites made the one version of a sum, and it can be voted on."""
    held = read_lock(message, _keys("alpha"), world().manifests.get)
    assert len({one.site for one in message.proof}) > stage().manifest.tolerated
    assert len({one.body for one in message.proof}) == 1
    assert held.root.message.kind == pb.SUM
    assert held.applied.root_digest == held.root.digest
    body = value_of(held, stage().manifest)
    try:
        vote_payload(body, held.name.attempt)
    except CertificateError:  # a quorum would have had to sign it
        assert not 1 <= len(held.root.contributors) <= 256 or held.root.message.rejected


def _evidence(message: pb.Evidence) -> None:
    """Accepted: one site's two signatures under what differs."""
    site = evidence.check_evidence(message, _keys("alpha"), stage().manifest)
    assert site == message.first.site == message.second.site
    assert message.first.body != message.second.body


_KINDS: tuple[tuple[type[Message], Callable[..., None]], ...] = (
    (pb.Promised, _promised),
    (pb.Bundle, _bundle),
    (pb.StatementCertificate, _certificate),
    (pb.Lock, _lock),
    (pb.Evidence, _evidence),
)


def judge_signed(data: bytes) -> bool:
    """As the judge of the kind says that its first byte names."""
    kind, judge = _KINDS[data[0] % len(_KINDS) if data else 0]
    try:
        judge(parse(kind, data[1:]))
    except (RemoteProtocolError, CertificateError):
        return False
    return True


# ---- mutations ----------------------------------------------------------------------------

_BODIES: dict[str, tuple[Kind, type[Message]]] = {
    "run": (Kind.RUN, pb.Run),
    "promise": (Kind.PROMISE, pb.Promise),
    "promises": (Kind.PROMISE, pb.Promise),
    "stated": (Kind.STATEMENT, pb.Statement),
    "proof": (Kind.APPLIED, pb.Applied),
    "contributions": (Kind.CONTRIBUTION, pb.Contribution),
    "commitment": (Kind.KEY_COMMITMENT, pb.KeyCommitment),
    "answers": (Kind.PRODUCTS, pb.Products),
}
_EVIDENCE: dict[int, tuple[Kind, type[Message]]] = {
    pb.TWO_PROMISES: (Kind.PROMISE, pb.Promise),
    pb.TWO_STATEMENTS: (Kind.STATEMENT, pb.Statement),
    pb.TWO_APPLIED: (Kind.APPLIED, pb.Applied),
}


def mutate_signed(data: bytes, chance: Random) -> bytes:
    """Something outside of what was signed, or something inside of it."""
    kind, _ = _KINDS[data[0] % len(_KINDS) if data else 0]
    try:
        message = decode(kind, data[1:])
    except RemoteProtocolError:
        return data
    if chance.random() < 0.4:
        mutate_message(message, chance)
    else:
        _mutate_inside(message, chance)
    return data[:1] + message.SerializeToString()


def _mutate_inside(message: Message, chance: Random) -> None:
    places = list(_signed(message))
    if not places:
        mutate_message(message, chance)
        return
    place, kind, as_a = chance.choice(places)
    try:
        body = as_a.FromString(place.body)
    except DecodeError:
        return
    if isinstance(body, pb.Statement) and chance.random() < 0.5:
        _mutate_inside(body, chance)
    else:
        mutate_message(body, chance)
    place.body = body.SerializeToString(deterministic=True)
    if place.site in SITES and chance.random() < 0.7:
        by = _keys(place.site).sign(kind.value + place.body)
        place.signature, place.certificate = by.signature, by.certificate


def _signed(message: Message) -> Iterator[tuple[pb.Signed, Kind, type[Message]]]:
    """Where a message, or a part of it, carries what a site has signed."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for part in value if field.is_repeated else (value,):
            if not isinstance(part, pb.Signed):
                yield from _signed(part)
            elif field.name in _BODIES:
                yield part, *_BODIES[field.name]
            elif isinstance(message, pb.Evidence) and message.kind in _EVIDENCE:
                yield part, *_EVIDENCE[message.kind]


# ---- honest inputs ------------------------------------------------------------------------


def signed_seeds() -> Iterator[bytes]:
    for number, (kind, _) in enumerate(_KINDS):
        for message in _honest():
            if isinstance(message, kind):
                yield bytes([number]) + message.SerializeToString()


def _honest() -> Iterator[Message]:
    here = stage()
    known = here.statement()
    lock = here.lock(known)
    again = here.restated(lock, here.bundle(attempt=1), 1)
    restated = pb.Lock(certificate=here.certified(again), root=known.raw, proof=lock.message.proof)
    yield from (here.promised("alpha", _ATTEMPT), here.promised("beta", _ATTEMPT, lock=lock))
    yield here.promised("gamma", _ATTEMPT, stated=known)
    plain = [here.promised(site, _LATER) for site in SITES]
    locked = [here.promised(SITES[0], _LATER, lock=here.read_lock(restated)), *plain[1:]]
    stated = [here.promised(site, _LATER, stated=known) for site in SITES]
    yield from (here.message(promised, _LATER) for promised in (plain, locked, stated))
    yield here.message([*plain[:2], here.promised(SITES[2], _LATER, willing=False)], _LATER)
    yield from (here.certified(known), here.certified(again))
    yield from (lock.message, restated)
    yield from _contradictions()


def _contradictions() -> Iterator[pb.Evidence]:
    here = stage()
    first, other = here.promised("beta"), here.promised("beta", num_examples=7)
    yield pb.Evidence(kind=pb.TWO_PROMISES, first=first.promise, second=other.promise)
    known = here.statement()
    whole = EncodedStatement.of(here.statement_of(rejected=["x"]))
    yield pb.Evidence(
        kind=pb.TWO_STATEMENTS,
        first=here.signed_statement("beta", known),
        second=here.signed_statement("beta", whole),
    )
    yield pb.Evidence(
        kind=pb.TWO_APPLIED,
        first=here.applied("beta", known),
        second=here.applied("beta", known, bytes(32)),
    )
    bodies = [
        value_of(here.lock(known, version), here.manifest) for version in (b"v" * 32, b"w" * 32)
    ]
    yield pb.Evidence(kind=pb.TWO_VOTES, first=_voted(bodies[0]), second=_voted(bodies[1]))


def _voted(body: pb.VoteBody) -> pb.Signed:
    by = _keys("beta").sign(vote_payload(body, 0))
    vote = pb.Vote(body=body, site="beta", signature=by.signature, certificate=by.certificate)
    return pb.Signed(
        body=vote.SerializeToString(deterministic=True),
        site="beta",
        signature=by.signature,
        certificate=by.certificate,
    )
