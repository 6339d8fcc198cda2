"""Schedules that chance hardly ever draws: one site lies, and the network does as it likes.

    attempt 0 of b   the sum of all four is proven; only b votes for it, and locks X
    attempt 1 of c   without b another sum is drawn and proven; only a votes, and locks Y
    attempt 5 of c   c, which lies, shows some promises that name X, others that name Y
    attempt 6 of d   whatever was committed in attempt 5 must be stated again

c is where a liar is worth most; with seven sites d lies, too, and the numbers of attempts
are higher by as many. Everybody else is honest. What a liar does before it comes to a vote,
or to hold others up, is in tests/simulation/scenarios/rows.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from peers.attempts import effects as do
from peers.attempts.bundle import bundle_digest
from peers.attempts.statement import EncodedStatement, HeldLock, read_lock
from peers.wire.certificates import certificate_of, sign_vote
from peers.wire.signing import Kind, name_of, sign, sign_bytes
from proto import federation_pb2 as pb
from tests.simulation.network import FEDERATION, GENESIS, SimulatedKeys, World

LIAR = "c"
# Of so many sites: who is shown X, and who is shown Y.
SIDES = {4: ("bd", "a"), 5: ("bd", "ae"), 7: ("bef", "ag")}
Passes = Callable[[str, str, do.Body], bool]


def nothing(_sender: str, _to: str, _body: do.Body) -> bool:
    """The network is down."""
    return False


def among(*sites: str, without: type | None = None) -> Passes:
    """These sites hear each other, but for one kind of message."""
    return lambda sender, to, body: {sender, to} <= {*sites} and type(body) is not without


class Script(World):
    """Some sites whose network passes what the script says; the first liar is c."""

    def __init__(self, *, sites: int = 4, liars: str = LIAR) -> None:
        self.passes: Passes = nothing
        self.silent = False  # whether liars say only what the script says
        super().__init__(sites=sites, seed=1, faulty_sites=len(liars), min_participants=2)
        self.everybody = "".join(self.disks)
        self.honest = "".join(site for site in self.disks if site not in liars)
        self.lying = liars
        self.watch.liars.update(liars)
        self.keys = SimulatedKeys(LIAR)

    def _send(self, sender: str, to: str, body: do.Body) -> None:
        if not (self.silent and sender in self.lying):
            super()._send(sender, to, body)

    def _post(self, sender: str, to: str, body: do.Body) -> None:
        self.watch.posted(body)
        if self.passes(sender, to, body):
            super()._post(sender, to, body)

    def until(self, what: Callable[[], bool], within_s: float = 2_000.0) -> None:
        """Let time pass until then."""
        end = self.now + within_s
        while not what():
            if self.now > end:
                raise LookupError(f"the script is stuck\n{self.text()}")
            self.step()

    def tells(self, to: Sequence[str], body: do.Body) -> None:
        """The liar says this, and the network passes it."""
        before, self.passes = self.passes, among(*self.disks)
        for site in to:
            self.tell(LIAR, site, body)
        self.passes = before
        self.run_for(2.0)

    def states(self, to: str, known: EncodedStatement) -> list[pb.Signature]:
        """The liar states this; who of these signs it, and the liars."""
        at = known.message
        self.tells(to, pb.State(round=at.round, attempt=at.attempt, statement=known.raw))
        signers = [
            site
            for site in self.disks
            if site in self.lying or (site in to and known.raw in self.signed_by(site))
        ]
        return [sign_bytes(SimulatedKeys(one), Kind.STATEMENT, known.raw) for one in signers]

    def signed_by(self, site: str) -> list[bytes]:
        """The statements that a site has signed in its attempt."""
        return [one.body for one in self.disks[site].durable.state.statements]

    def lock(self, site: str) -> HeldLock | None:
        """What a site has voted for last."""
        state = self.disks[site].durable.state
        return read_lock(state.lock, self.keys, self.manifests.get) if state.lock.proof else None

    def locked(self, site: str, attempt: int) -> bool:
        """Whether it has a lock of that attempt."""
        lock = self.lock(site)
        return lock is not None and lock.name.attempt == attempt

    def promised(self, site: str) -> pb.Signed:
        """The promise that a site has on its disk, and says to everybody."""
        return self.disks[site].durable.state.promise.promise


def to_attempt(script: Script, attempt: int) -> None:
    """All that are up promise, nobody is prepared, until they have come so far.

    Where too few would go on without it a silent liar says that it is nearly there. What it
    promises of this attempt it says itself.
    """

    def passes(sender: str, _to: str, body: do.Body) -> bool:
        if sender in script.lying and isinstance(body, pb.Promised):
            return pb.Promise.FromString(body.promise.body).attempt < attempt
        return isinstance(body, pb.Promised | pb.RunWish)

    script.passes = passes
    up = [site for site in script.honest if site in script.machines]
    honest = [script.disks[site] for site in up]
    if script.silent and len(up) <= len(script.lying) + 1:
        promise = pb.Promise.FromString(script.promised(up[0]).body)
        promise.ClearField("lock")
        promise.ClearField("stated")
        promise.attempt = attempt - 1  # and nobody goes further
        promised = pb.Promised(promise=sign(script.keys, Kind.PROMISE, promise))
        for site in up:
            script.tell(LIAR, site, promised)
    script.until(lambda: {disk.durable.promised for disk in honest} == {attempt}, 5_000.0)
    script.run_for(1.0)
    script.passes = nothing


def two_locks(*, sites: int = 4, liars: str = LIAR) -> tuple[Script, HeldLock, HeldLock]:
    """As far as c's second attempt: b has the lock X of attempt 0, a has Y of attempt 1."""
    script = Script(sites=sites, liars=liars)
    script.passes = among(*script.everybody, without=pb.Proven)
    script.train("b", rounds=1)
    script.until(lambda: script.locked("b", 0))
    others = among(*script.everybody.replace("b", ""))

    def only_a_hears(sender: str, to: str, body: do.Body) -> bool:
        return others(sender, to, body) and not (isinstance(body, pb.Proven) and to != "a")

    script.passes = only_a_hears
    script.until(lambda: script.locked("a", 1))
    to_attempt(script, 1 + sites)
    x, y = script.lock("b"), script.lock("a")
    if x is None or y is None or x.root.digest == y.root.digest:
        raise LookupError("the script has gone another way")
    return script, x, y


class Courier:
    """What the liars make of the promises of the attempt that c carries."""

    def __init__(self, script: Script) -> None:
        self.script, self.attempt = script, 1 + len(script.disks)

    def own(self, site: str, lock: HeldLock | None) -> pb.Signed:
        """A liar's promise, with the lock that helps."""
        promise = pb.Promise.FromString(self.script.promised("a").body)
        promise.ClearField("stated")
        promise.ClearField("lock")
        if lock is not None:
            promise.lock.CopyFrom(lock.name)
        return sign(SimulatedKeys(site), Kind.PROMISE, promise)

    def bundle(self, sites: str, lock: HeldLock, own: HeldLock | None = None) -> pb.Bundle:
        """The promises of these sites and the liars'; ``lock`` is shown for the highest."""
        script = self.script
        promises = [
            self.own(site, own) if site in script.lying else script.promised(site)
            for site in sorted({*sites, *script.lying})
        ]
        run = script.disks["b"].durable.signed_run
        return pb.Bundle(
            round=1, attempt=self.attempt, run=run, promises=promises, lock=lock.message
        )

    def restated(self, bundle: pb.Bundle, lock: HeldLock) -> EncodedStatement:
        """That this lock's version is stated again, on the strength of these promises."""
        manifest = self.script.manifest
        return EncodedStatement.of(
            pb.Statement(
                federation_id=FEDERATION,
                manifest_digest=manifest.digest,
                manifest_version=manifest.version,
                round=1,
                attempt=self.attempt,
                parent_digest=GENESIS,
                run_digest=name_of(bundle.run),
                bundle_digest=bundle_digest(bundle.promises),
                kind=pb.RESTATED,
                root_digest=lock.root.digest,
                model_digest=lock.applied.model_digest,
            )
        )

    def states(self, to: str, bundle: pb.Bundle, known: EncodedStatement) -> list[pb.Signature]:
        """Who of these signs it, and the liars."""
        self.script.tells([*to], bundle)
        return self.script.states(to, known)

    def proves(
        self, to: str, known: EncodedStatement, lock: HeldLock, signatures: list[pb.Signature]
    ) -> None:
        """The version again, under a certificate of this attempt."""
        certificate = pb.StatementCertificate(statement=known.raw, signatures=signatures)
        shown = pb.Lock(certificate=certificate, root=lock.root.raw, proof=lock.message.proof)
        self.script.tells([*to], pb.Proven(round=1, attempt=self.attempt, lock=shown))

    def shows(self, to: str, bundle: pb.Bundle, lock: HeldLock) -> None:
        """These promises, this lock's version on the strength of them, and its proof."""
        known = self.restated(bundle, lock)
        self.proves(to, known, lock, self.states(to, bundle, known))


def show_both(script: Script, x: HeldLock, y: HeldLock) -> None:
    """X is stated again before b and half of the others, Y before a and the rest."""
    courier = Courier(script)
    sees_x, sees_y = SIDES[len(script.disks)]
    courier.shows(sees_x, courier.bundle(sees_x, x), x)
    missing = max(0, script.manifest.quorum - len({*sees_y, *script.lying}))
    courier.shows(sees_y, courier.bundle(sees_y + sees_x[1 : 1 + missing], y), y)


def restate_both(script: Script, x: HeldLock, y: HeldLock) -> None:
    """Then d carries the next attempt, to those who were shown Y and one who was shown X."""
    show_both(script, x, y)
    sees_x, sees_y = SIDES[len(script.disks)]
    script.passes = among(*sees_y, *script.lying, "d", sees_x[1])
    script.run_for(1_500.0)
    script.passes = among(*script.everybody)
    script.run_until_committed(1)


def certify_both(script: Script, x: HeldLock, y: HeldLock) -> None:
    """Row 6: X is committed to some and Y to others, with c's own vote for both."""
    show_both(script, x, y)
    script.passes = among(*script.everybody)
    for sites in SIDES[len(script.disks)]:
        votes = [script.disks[site].durable.state.vote for site in sites]
        votes = [vote for vote in votes if vote.attempt == 1 + len(script.disks)]
        if votes:  # c says the same as those whom it has shown this to
            own = sign_vote(script.keys.sign, votes[0].body, votes[0].attempt)
            votes = sorted([*votes, own], key=lambda vote: vote.site)
            for site in sites:
                commit = pb.Commit(certificate=certificate_of(own.attempt, votes, 0))
                script.tell(LIAR, site, commit)
    script.run_until_committed(1)


def restate_the_lower(script: Script, x: HeldLock, _y: HeldLock) -> None:
    """Among promises that name X and Y, X is shown, which is the older one."""
    courier = Courier(script)
    bundle = courier.bundle("abd", x)
    courier.states("abd", bundle, courier.restated(bundle, x))


def restate_the_older(script: Script, x: HeldLock, _y: HeldLock) -> None:
    """X, the older sum, is rightly stated again and chosen; a, which only knows Y, is asked next.

    d's lock is of X and was certified last: by its sum's attempt it would be the lower one.
    """
    courier = Courier(script)
    courier.shows("bd", courier.bundle("bd", x), x)
    script.passes = among(*"acd")
    script.run_for(600.0)
    script.passes = among(*"abcd")
    script.run_until_committed(1)


def prove_two(script: Script, x: HeldLock, y: HeldLock) -> None:
    """As if an attempt had two certificates: both are shown to d."""
    courier = Courier(script)
    for sites, lock in (("bd", x), ("ad", y)):
        known = courier.restated(courier.bundle(sites, lock), lock)
        own = sign_bytes(script.keys, Kind.STATEMENT, known.raw)
        courier.proves("d", known, lock, [own])


def prove_to_one_who_promised_nothing() -> None:
    """d has slept: it is in no attempt when it is shown what attempt 0 has proven."""
    script = Script()
    script.passes = among(*"abc")
    script.train("b", rounds=1)
    script.until(lambda: script.locked("b", 0))
    lock = script.lock("b")
    if lock is None or script.disks["d"].durable.promised >= 0:
        raise LookupError("the script has gone another way")
    script.until(lambda: not script.site("d")._recall.waits)
    script.passes = among(*"abcd")
    script.tell(LIAR, "d", pb.Proven(round=1, attempt=0, lock=lock.message))
    script.passes = nothing
    script.until(lambda: script.locked("d", 0), 2.0)
    script.passes = among(*"abcd")
    script.run_until_committed(1)
