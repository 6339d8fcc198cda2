"""`fedd` whose site decides what is not its to decide, or disturbs those who would.

    HANSE_UNDEFENDED=proof python -m tests.attacks.programs.deciding_fedd --config fedd.toml

As long as the daemon's folder (HANSE_TAPE) holds a file ``lie`` with a name of `LIES`, the
site does that; the rest of it is an honest daemon. With HANSE_UNDEFENDED one of `OF_DECISIONS`
is gone, at every site. Every plan that a site takes is kept as ``plan-ROUND-ATTEMPT.bin``,
and what a test writes to ``say-SITE`` (a pb.Envelope) is sent to that site, once.
"""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import Message

from crypto.identity.site import Identity
from daemon import main as fedd
from daemon.rounds.driver import Driver
from daemon.state import membership
from daemon.state.versions import read_version, write_version
from peers.attempts import bundle, coordination, statement
from peers.attempts import effects as do
from peers.attempts.bundle import Ground, Promised
from peers.link import client
from peers.rounds import runs
from peers.rounds.protocol import Protocol
from peers.wire.certificates import certificate_of, sign_vote
from peers.wire.manifest import coordinator_of
from peers.wire.messages import check
from peers.wire.signing import Kind, sign
from proto import federation_pb2 as pb
from tests.attacks.programs import defences

FOLDER = Path(os.environ.get("HANSE_TAPE", "."))
FARTHEST_ATTEMPT, LAST_RUN = 2**32 - 2, 2**62  # no message has larger numbers
CHEAP = 1e-6  # what a liar says of the loss and of the clip norm

Effects = list[do.Effect]


def lie() -> str:
    """What this site lies about just now."""
    path = FOLDER / "lie"
    return path.read_text() if path.exists() else ""


def done(what: str) -> bool:
    """Whether that was done already, for what is done once; from now on it was."""
    mark = FOLDER / f"did-{what}"
    if mark.exists():
        return True
    mark.touch()
    return False


def others(liar: Protocol) -> list[str]:
    """Whom a site can lie to."""
    return [site for site in liar.manifest.enabled_ids if site != liar.site]


def acting(liar: Protocol, act: Callable[[], None]) -> Effects:
    """As `Protocol.step`, for what a liar does of its own accord."""
    liar._here.effects, taken = [], 0
    act()
    while taken < len(liar._here.effects):
        effect = liar._here.effects[taken]
        taken += 1
        if isinstance(effect, do.Send) and effect.to == liar.site:
            liar._take_ours(do.MessageReceived(liar.site, effect.body))
    return liar.wished


def just_certified(effects: Effects) -> bool:
    """Whether a quorum has just certified a sum that this site coordinates."""
    return any(isinstance(one, do.SendSum) for one in effects)


def promise(liar: Protocol, attempt: int, **fields: object) -> pb.Promised:
    """A promise of ours, of any attempt, signed, and on nobody's disk."""
    told = pb.Promise.FromString(liar.durable.state.promise.promise.body)
    told.attempt = attempt
    for name, value in fields.items():
        setattr(told, name, value)
    return pb.Promised(promise=sign(liar._here.keys, Kind.PROMISE, told))


def prepare(liar: Protocol, attempt: int, run: pb.Signed) -> pb.Prepare:
    """As `Coordination.prepare`, for any attempt and run."""
    return pb.Prepare(
        round=liar.head_round + 1,
        attempt=attempt,
        head_digest=liar.durable.head_digest,
        run=run,
        shape_digest=liar._here.model.shape_digest,
        manifest_version=liar.manifest.version,
        promise=promise(liar, attempt),
    )


def another_version(liar: Protocol, by: float) -> bytes:
    """A version of our own making beside our head, on our disk; its digest."""
    versions = FOLDER / "state" / "versions"
    parent = read_version(versions, liar.durable.head_digest, liar._here.model.shape_digest)
    made, _ = write_version(versions, liar._here.model.shape_digest, parent + np.float32(by))
    return made


# ---- lies --------------------------------------------------------------------------


def absurd(liar: Protocol, event: do.Event, effects: Effects) -> Effects:
    """Row 4: a Prepare and a promise of the last attempt there is, and a run of number 2^62."""
    run = liar.durable.signed_run
    if not liar._here.active or run is None or not liar.durable.state.HasField("promise"):
        return effects
    if done(f"absurd-{liar.head_round}"):
        return effects
    farthest = FARTHEST_ATTEMPT
    while coordinator_of(liar.manifest, liar.head_round + 1, farthest) != liar.site:
        farthest -= 1
    vast = pb.Run.FromString(run.body)
    vast.requested_by, vast.generation, vast.target_round = liar.site, LAST_RUN, 10**6
    wish = pb.RunWish(run=sign(liar._here.keys, Kind.RUN, vast))
    bodies = (prepare(liar, farthest, run), promise(liar, farthest), wish)
    return [*effects, *(do.Send(site, body) for site in others(liar) for body in bodies)]


def usurping(liar: Protocol, event: do.Event, effects: Effects) -> Effects:
    """Row 4: a run with the last number there is, over at once: no run can follow it."""
    run = liar.durable.signed_run
    if run is None or done("usurping"):
        return effects
    last = pb.Run.FromString(run.body)
    last.requested_by, last.generation, last.target_round = liar.site, LAST_RUN, 0
    wish = pb.RunWish(run=sign(liar._here.keys, Kind.RUN, last))
    return [*effects, *(do.Send(site, wish) for site in others(liar))]


def proving(liar: Protocol, digests: dict[str, bytes], loss: float = 0.0) -> Effects:
    """A proof for each site that we alone have made, of a sum that a quorum has certified."""
    leading = liar._here.coordination
    assert leading is not None and leading._tally.certificate is not None
    root = leading._tally.known
    assert root is not None
    at = {"round": leading.lead.round, "attempt": leading.lead.attempt}
    sending: Effects = []
    for site, digest in digests.items():
        told = pb.Applied(
            root_digest=root.digest,
            model_digest=digest,
            mean_loss=loss,
            next_clip_norm=CHEAP if loss else 0.0,
        )
        proof = [sign(liar._here.keys, Kind.APPLIED, told)]
        lock = pb.Lock(certificate=leading._tally.certificate, proof=proof)
        sending.append(do.Send(site, pb.Proven(**at, lock=lock)))
    return sending


def any_vector(liar: Protocol, event: do.Event, effects: Effects) -> Effects:
    """Row 5: the sum is handed to nobody, a version of our own making is to be voted for."""
    if not just_certified(effects):
        return effects
    made = another_version(liar, 0.25)
    (FOLDER / "made").write_bytes(made)
    return [
        *(one for one in effects if not isinstance(one, do.SendSum)),
        *_led(liar, made),
        *proving(liar, dict.fromkeys(others(liar), made)),
    ]


def _led(liar: Protocol, digest: bytes, loss: float = 0.0) -> Effects:
    """Go on to the vote with that version ourselves; what its honest code says to others."""
    leading = liar._here.coordination
    assert leading is not None and leading._tally.certificate is not None
    assert leading._tally.known is not None
    proven = proving(liar, {liar.site: digest}, loss)[0]
    assert isinstance(proven, do.Send) and isinstance(proven.body, pb.Proven)
    held = statement.HeldLock(
        proven.body.lock,
        leading._tally.known,
        leading._tally.known,
        pb.Applied.FromString(proven.body.lock.proof[0].body),
    )

    def vote() -> None:
        leading.lead.enter("vote", liar._here.now)
        leading._tally._value = statement.value_of(held, leading.lead.ground.manifest)
        liar._acceptor.vote(held)

    return acting(liar, vote)


def forking(liar: Protocol, event: do.Event, effects: Effects) -> Effects:
    """Row 6: one version to one half, another to the other half, our own vote for both."""
    halves = others(liar)
    if just_certified(effects):
        made = {site: another_version(liar, 0.25 + n) for n, site in enumerate(halves)}
        (FOLDER / "made").write_bytes(b"".join(made.values()))
        kept: Effects = [one for one in effects if not isinstance(one, do.SendSum)]
        return [*kept, *proving(liar, made)]
    if isinstance(event, do.MessageReceived) and isinstance(event.body, pb.Vote):
        vote = event.body
        ours = sign_vote(liar._here.keys.sign, vote.body, vote.attempt)
        both = sorted([vote, ours], key=lambda one: one.site)
        committed = certificate_of(vote.attempt, both, 0)
        return [do.Send(event.sender, pb.Commit(certificate=committed))]
    return effects


def ahead(liar: Protocol, event: do.Event, effects: Effects) -> Effects:
    """Row 9: whoever prepares hears that its round is over, and that we are far away."""
    if not isinstance(event, do.MessageReceived) or not isinstance(event.body, pb.Prepare):
        return effects
    body = pb.VoteBody(
        federation_id=liar._here.federation_id,
        round=event.body.round + 10**6,
        parent_digest=bytes(32),
        model_digest=bytes(32),
        contributors=liar.manifest.enabled_ids,
        manifest_version=liar.manifest.version,
        plan_digest=bytes(32),
        rules=2,
        manifest_digest=liar.manifest.digest,
        statement_digest=bytes(32),
    )
    vote = sign_vote(liar._here.keys.sign, body, 0)
    forged = certificate_of(0, [vote], 0)
    bodies: list[do.Body] = [pb.Ahead(round=event.body.round, certificate=forged)]
    if liar.durable.state.HasField("promise"):
        bodies.append(promise(liar, event.body.attempt + 1000))
    return [*effects, *(do.Send(event.sender, body) for body in bodies)]


def pre_empting(liar: Protocol, event: do.Event, effects: Effects) -> Effects:
    """Row 12: whenever an honest attempt begins we prepare our own next one."""
    attempt = liar.durable.promised
    if not liar._here.active or attempt < 0 or liar._here.coordination is not None:
        return effects
    ours = attempt
    while coordinator_of(liar.manifest, liar.head_round + 1, ours) != liar.site:
        ours += 1
    if ours == attempt:
        return effects
    return [*effects, *acting(liar, lambda: liar._synchronizer.enter(ours))]


def for_one_alone(liar: Protocol, event: do.Event, effects: Effects) -> Effects:
    """Row 12: our attempts are over for the site before us; the others have their bundle, and wait.

    It hears from us what the others promise, and of an attempt that never comes: so it goes
    on before them. Of what else we do nobody hears.
    """
    sites = sorted(liar.manifest.enabled_ids)
    one = sites[sites.index(liar.site) - 1]
    said: Effects = []
    if isinstance(event, do.MessageReceived) and isinstance(event.body, pb.Promised):
        told = pb.Promise.FromString(event.body.promise.body)
        if event.sender != one:
            said.append(do.Send(one, event.body))
        elif told.round == liar.head_round + 1:
            if coordinator_of(liar.manifest, told.round, told.attempt) == liar.site:
                said.append(do.Send(one, liar._here.signed_end(told.attempt, "cannot go on")))
            if liar.durable.state.HasField("promise") and not done(f"far-{told.round}"):
                said.append(do.Send(one, promise(liar, 2**20)))

    def heard(effect: do.Effect) -> bool:
        if not isinstance(effect, do.Send) or effect.to == liar.site:
            return True
        if isinstance(effect.body, pb.RunWish | pb.Recall | pb.Remembered):
            return True
        return isinstance(effect.body, pb.Prepare | pb.Bundle) and effect.to != one

    return [*filter(heard, effects), *said]


def weakening(liar: Protocol, event: do.Event, effects: Effects) -> Effects:
    """Row 12: a run of our own supersedes a person's and asks for less; said until it does.

    But not in the last round: of a run that is over nothing is left to weaken.
    """
    known = liar.run
    if known is None or known.requested_by == liar.site:
        return effects
    if liar.head_round + 1 >= known.target_round:
        return effects
    if not isinstance(event, do.MessageReceived) or isinstance(event.body, pb.RunWish):
        return effects  # a wish is answered by a wish
    ours = runs.following(
        known, liar.site, liar._here.federation_id, "ours", known.target_round, known.plan
    )
    ours.plan.ClearField("privacy")
    wish = pb.RunWish(run=sign(liar._here.keys, Kind.RUN, ours))
    return [*effects, *(do.Send(site, wish) for site in others(liar))]


heard_runs: dict[bytes, pb.Signed] = {}


def said_again(liar: Protocol, event: do.Event, effects: Effects) -> Effects:
    """Row 12: every run that a person has ever asked for, again and again."""
    if not isinstance(event, do.MessageReceived):
        return effects
    known = liar.durable.signed_run
    if known is not None:
        heard_runs.setdefault(known.body, known)
    if isinstance(event.body, pb.RunWish):
        return effects  # a wish is answered by a wish
    old = [signed for body, signed in heard_runs.items() if known is None or body != known.body]
    # One at a time: of several that wait for a peer the last one takes the others' place.
    wishes = [do.Send(site, pb.RunWish(run=random.choice(old))) for site in others(liar) if old]
    return [*effects, *wishes]


held_back: list[do.Event] = []


def holds_back(liar: Protocol, event: do.Event) -> bool:
    """Row 12: whether this is kept until later, or not heard at all.

    What others promise for our attempt is kept for as long as the lie is "holds back"; its
    bundle, and all that follows, comes with the lie "shows". A stop is not heard meanwhile.
    """
    if lie() not in ("holds back", "shows"):
        return False
    if liar._here.coordination is not None:
        liar._here.coordination.lead.deadline = liar._here.pace.until = math.inf
    if not isinstance(event, do.MessageReceived) or event.sender == liar.site:
        return False
    if isinstance(event.body, pb.Promised) and lie() == "holds back":
        told = pb.Promise.FromString(event.body.promise.body)
        if coordinator_of(liar.manifest, told.round, told.attempt) == liar.site:
            held_back.append(event)
            (FOLDER / "holding").write_text(str(len(held_back)))
            return True
    return isinstance(event.body, pb.RunWish) and (FOLDER / "holding").exists()


def shows(liar: Protocol, event: do.Event, effects: Effects) -> Effects:
    """What was kept is heard now."""
    while held_back:
        effects = [*effects, *Protocol.step(liar, held_back.pop(0), liar._here.now)]
    return effects


def cheap_loss(liar: Protocol, event: do.Event, effects: Effects) -> Effects:
    """Row 14: the version is the true one, its loss and next clip norm are what we like."""
    leading = liar._here.coordination
    if leading is None or not leading._tally.applied or leading.phase != "open":
        return effects
    first = next(iter(leading._tally.applied.values()))
    digest = pb.Applied.FromString(first.body).model_digest
    proven = proving(liar, dict.fromkeys(others(liar), digest), CHEAP)
    return [*effects, *_led(liar, digest, CHEAP), *proven]


def other_loss(liar: Protocol, event: do.Event, effects: Effects) -> Effects:
    """Row 14: we vote for the true version with another loss, and say that we made it so."""
    changed: Effects = []
    for effect in effects:
        if isinstance(effect, do.Send) and isinstance(effect.body, pb.Vote):
            body = pb.VoteBody()
            body.CopyFrom(effect.body.body)
            body.mean_loss = body.next_clip_norm = CHEAP
            vote = sign_vote(liar._here.keys.sign, body, effect.body.attempt)
            effect = do.Send(effect.to, vote)
        elif isinstance(effect, do.Send) and isinstance(effect.body, pb.AppliedSum):
            told = pb.Applied.FromString(effect.body.applied.body)
            told.mean_loss = told.next_clip_norm = CHEAP
            signed = sign(liar._here.keys, Kind.APPLIED, told)
            at = {"round": effect.body.round, "attempt": effect.body.attempt}
            effect = do.Send(effect.to, pb.AppliedSum(**at, applied=signed))
        changed.append(effect)
    return changed


def nobodys_run(liar: Protocol, event: do.Event, effects: Effects) -> Effects:
    """Row 14: a Prepare with a run that its person never asked for, and one without any."""
    run = liar.durable.signed_run
    if run is None or liar._here.active or done("nobodys"):
        return effects
    forged = pb.Run.FromString(run.body)
    forged.generation, forged.run_id = forged.generation + 1, "nobodys"
    forged.target_round = liar.head_round + 1
    signed = sign(liar._here.keys, Kind.RUN, forged)
    signed.site = forged.requested_by  # it wants somebody else to have signed it
    head = liar.durable
    liar._here.durable = do.Durable(head.head_round, head.head_digest, signed_run=signed)
    led = acting(liar, lambda: liar._synchronizer.enter(0))
    without = prepare(liar, 0, signed)
    without.ClearField("run")
    first = [do.Send(site, without) for site in others(liar)]
    return [*effects, *first, *led]


def two_promises(liar: Protocol, event: do.Event, effects: Effects) -> Effects:
    """Whoever does not coordinate hears another promise than the coordinator."""
    for effect in effects:
        if isinstance(effect, do.Send) and isinstance(effect.body, pb.Promised):
            told = pb.Promise.FromString(effect.body.promise.body)
            second = promise(liar, told.attempt, num_examples=told.num_examples + 1000)
            return [*effects, *(do.Send(site, second) for site in others(liar))]
    return effects


LIES: dict[str, Callable[[Protocol, do.Event, Effects], Effects]] = {
    "absurd": absurd,
    "usurping": usurping,
    "any vector": any_vector,
    "forking": forking,
    "ahead": ahead,
    "pre-empting": pre_empting,
    "for one alone": for_one_alone,
    "weakening": weakening,
    "said again": said_again,
    "shows": shows,
    "cheap loss": cheap_loss,
    "other loss": other_loss,
    "nobody's run": nobodys_run,
    "two promises": two_promises,
}


# ---- the program -------------------------------------------------------------------


def _lie_in_steps() -> None:
    """What the honest protocol wishes goes through the lie; plans are kept."""
    step, make = Protocol.step, bundle.make
    must_be_current = membership.Signatures._must_be_current

    def lying(self: Protocol, event: do.Event, now: float) -> Effects:
        if holds_back(self, event):
            return []
        effects = step(self, event, now)
        if told := LIES.get(lie()):
            effects = told(self, event, effects)
        for one in effects:
            if isinstance(one, do.TakePlan):
                kept = FOLDER / f"plan-{one.plan.round}-{one.plan.attempt}.bin"
                kept.write_bytes(one.plan.SerializeToString())
        return effects

    def bundling(ground: Ground, run: pb.Signed, promised: Iterable[Promised]) -> pb.Bundle:
        """Row 14: a site's promise, signed with the key that it had before."""
        made = make(ground, run, promised)
        if lie() != "stolen key":
            return made
        owner = Identity.load(
            FOLDER / "stolen" / "site.crt", FOLDER / "stolen" / "site.key", FOLDER / "ca.crt"
        )
        for one in made.promises:
            if one.site == owner.site_id:
                one.signature = owner.sign(Kind.PROMISE.value + one.body)
                one.certificate = owner.certificate_der
        return made

    def bounded(message: Message) -> None:
        if not lie():  # a liar's own bounds are nobody's
            check(message)

    def checking(self: membership.Signatures, *about: Any) -> None:
        if lie() != "stolen key":  # a liar believes itself
            must_be_current(self, *about)

    membership.Signatures._must_be_current = checking  # type: ignore[assignment,method-assign]
    vars(client)["check"] = bounded
    Protocol.step = lying  # type: ignore[method-assign]
    vars(coordination)["make"] = bundling


def _told_to_say() -> Iterator[tuple[str, pb.Envelope]]:
    for path in FOLDER.glob("say-*"):
        yield path.name.removeprefix("say-"), pb.Envelope.FromString(path.read_bytes())
        path.unlink()


def _say_what_the_test_says() -> None:
    look = Driver._look_at_peers

    async def looking(self: Driver) -> None:
        await look(self)
        for site, envelope in _told_to_say():
            self._out.put(site, getattr(envelope, envelope.WhichOneof("body") or ""))
        if held_back and lie() == "shows":
            await self.feed(do.Tick())

    Driver._look_at_peers = looking  # type: ignore[method-assign]


if __name__ == "__main__":
    if removed := os.environ.get("HANSE_UNDEFENDED"):
        defences.OF_DECISIONS[removed]()
    _lie_in_steps()
    _say_what_the_test_says()
    fedd.main()
