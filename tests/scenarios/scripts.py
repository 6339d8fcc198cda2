"""Schedules that chance hardly ever draws: one site lies, and the network does as it likes.

    attempt 0 of b   the sum of all four is proven; only b votes for it, and locks X
    attempt 1 of c   without b another sum is drawn and proven; only a votes, and locks Y
    attempt 5 of c   c, which lies, shows some promises that name X, others that name Y
    attempt 6 of d   whatever was committed in attempt 5 must be stated again

c is where a liar is worth most. Everybody else is honest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from peers import effects as do
from peers.bundle import bundle_digest
from peers.signing import Kind, name_of, sign, sign_bytes
from peers.statement import HeldLock, Known, read_lock
from proto import federation_pb2 as pb
from tests.simulation import FEDERATION, GENESIS, SimulatedKeys, World

LIAR = "c"
Passes = Callable[[str, str, do.Body], bool]


def nothing(_sender: str, _to: str, _body: do.Body) -> bool:
    """The network is down."""
    return False


def among(*sites: str, without: type | None = None) -> Passes:
    """These sites hear each other, but for one kind of message."""
    return lambda sender, to, body: {sender, to} <= {*sites} and type(body) is not without


class Script(World):
    """Four sites whose network passes what the script says."""

    def __init__(self) -> None:
        self.passes: Passes = nothing
        super().__init__(sites=4, seed=1, faulty_sites=1, min_participants=2)
        self.watch.liars.add(LIAR)
        self.keys = SimulatedKeys(LIAR)

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
    """Everybody promises, nobody is prepared, until all have come so far."""
    script.passes = lambda _sender, _to, body: isinstance(body, pb.Promised | pb.RunWish)
    script.until(lambda: {script.disks[s].durable.promised for s in "abd"} == {attempt})
    script.run_for(1.0)
    script.passes = nothing


def two_locks() -> tuple[Script, HeldLock, HeldLock]:
    """As far as attempt 5: b has the lock X of attempt 0, a has Y of attempt 1."""
    script = Script()
    script.passes = among(*"abcd", without=pb.Proven)
    script.train("b", rounds=1)
    script.until(lambda: script.locked("b", 0))

    def only_a_hears(sender: str, to: str, body: do.Body) -> bool:
        return among(*"acd")(sender, to, body) and not (isinstance(body, pb.Proven) and to != "a")

    script.passes = only_a_hears
    script.until(lambda: script.locked("a", 1))
    to_attempt(script, 5)
    x, y = script.lock("b"), script.lock("a")
    if x is None or y is None or x.root.digest == y.root.digest:
        raise LookupError("the script has gone another way")
    return script, x, y


class Courier:
    """What the liar makes of the promises of attempt 5."""

    def __init__(self, script: Script, attempt: int = 5) -> None:
        self.script, self.attempt = script, attempt

    def own(self, lock: HeldLock | None) -> pb.Signed:
        """The liar's promise, with the lock that helps."""
        promise = pb.Promise.FromString(self.script.promised("d").body)
        promise.ClearField("stated")
        promise.ClearField("lock")
        if lock is not None:
            promise.lock.CopyFrom(lock.name)
        return sign(self.script.keys, Kind.PROMISE, promise)

    def bundle(self, sites: str, lock: HeldLock, own: HeldLock | None = None) -> pb.Bundle:
        """The promises of these sites and the liar's; ``lock`` is shown for the highest."""
        promises = [self.script.promised(s) if s != LIAR else self.own(own) for s in sites]
        run = self.script.disks["b"].durable.signed_run
        return pb.Bundle(
            round=1, attempt=self.attempt, run=run, promises=promises, lock=lock.message
        )

    def restated(self, bundle: pb.Bundle, lock: HeldLock) -> Known:
        """The lock's version, stated again on the strength of these promises."""
        manifest = self.script.manifest
        return Known.of(
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

    def states(self, to: str, bundle: pb.Bundle, known: Known) -> list[pb.Signature]:
        """Who of these signs it, and the liar."""
        script = self.script
        script.tells([*to], bundle)
        script.tells([*to], pb.State(round=1, attempt=self.attempt, statement=known.raw))
        signed = {LIAR: sign_bytes(script.keys, Kind.STATEMENT, known.raw)}
        for site in to:
            for one in script.disks[site].durable.state.statements:
                if one.body == known.raw:
                    signed[site] = sign_bytes(SimulatedKeys(site), Kind.STATEMENT, known.raw)
        return [signed[site] for site in sorted(signed)]

    def proves(self, to: str, known: Known, lock: HeldLock, signatures: list[pb.Signature]) -> None:
        """The version again, under a certificate of this attempt."""
        certificate = pb.StatementCertificate(statement=known.raw, signatures=signatures)
        shown = pb.Lock(certificate=certificate, root=lock.root.raw, proof=lock.message.proof)
        self.script.tells([*to], pb.Proven(round=1, attempt=self.attempt, lock=shown))


def restate_both(script: Script, x: HeldLock, y: HeldLock) -> None:
    """X is stated again before b and d, Y before a; then d carries attempt 6."""
    courier = Courier(script)
    for sites, to, lock in (("bcd", "bd", x), ("acd", "a", y)):
        bundle = courier.bundle(sites, lock)
        known = courier.restated(bundle, lock)
        courier.proves(to, known, lock, courier.states(to, bundle, known))
    script.passes = among(*"acd")
    script.run_for(600.0)
    script.passes = among(*"abcd")
    script.run_until_committed(1)


def restate_the_lower(script: Script, x: HeldLock, _y: HeldLock) -> None:
    """Among promises that name X and Y, X is shown, which is the older one."""
    courier = Courier(script)
    bundle = courier.bundle("abcd", x)
    courier.states("abd", bundle, courier.restated(bundle, x))


def prove_two(script: Script, x: HeldLock, y: HeldLock) -> None:
    """As if an attempt had two certificates: both are shown to d."""
    courier = Courier(script)
    for sites, lock in (("bcd", x), ("acd", y)):
        known = courier.restated(courier.bundle(sites, lock), lock)
        own = sign_bytes(script.keys, Kind.STATEMENT, known.raw)
        courier.proves("d", known, lock, [own])


def sum_less(script: Script) -> None:
    """A sum of all four was stated and not opened; c makes it again, without b's update."""
    script.passes = among(*"abcd", without=pb.AppliedSum)
    script.train("b", rounds=1)
    script.until(lambda: script.site("c")._coordination is not None, 5_000.0)
    script.passes = lambda sender, _to, body: not (sender == LIAR and isinstance(body, pb.State))
    lead = script.site("c")
    script.until(lambda: lead._coordination is not None and lead._coordination.phase == "state")
    coordination = lead._coordination
    if coordination is None or coordination._tally.known is None:
        raise LookupError("the script has gone another way")
    statement = pb.Statement()
    statement.CopyFrom(coordination._tally.known.message)
    del statement.contributions[1]
    raw = Known.of(statement).raw
    script.tells("abd", pb.State(round=1, attempt=1, statement=raw))
