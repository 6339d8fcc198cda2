"""The local work of a simulated federation's attempts, and the blobs that its sites exchange.

What workers and streams do for the real driver: a piece of work takes a drawn time, may
fail and ends with its attempt; a blob is pushed until its receiver takes it whole; versions
and certificates are fetched from whoever has them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from peers.attempts import effects as do
from peers.attempts.ckks import AnswerChallenge, Challenge, DealKey, KeyDealt
from peers.attempts.masking import Mask, MaskedSumStarted, OpenShares, StartMaskedSum
from peers.attempts.modes import key_holders
from proto import federation_pb2 as pb
from tests.simulation.scenarios.invariants import Upload, claim
from tests.simulation.scenarios.updates import products_of

if TYPE_CHECKING:
    from tests.simulation.network import World

LONGEST_WORK_S = 2.0


class SimulatedWork:
    """All sites' workers; what they make goes to the sites' machines as events."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._kept: dict[tuple[str, int, int], bytes] = {}  # integers of a site, round and draw

    def begin(self, name: str, effect: do.Effect) -> None:
        """What this effect asks of the site's workers begins."""
        world = self._world
        match effect:
            case DealKey(plan, coordinator):
                self._work(name, "key", plan, self._deal, name, plan, coordinator)
            case Mask() | OpenShares():
                if isinstance(effect, OpenShares):
                    at = (effect.round, effect.attempt)
                    world.watch.answers(name, pb.SUM, at, effect.survivors)
                self._work(name, "mask", effect, self._job, world.masking.step, name, effect)
            case StartMaskedSum():
                at = (effect.plan.round, effect.plan.attempt)
                started = MaskedSumStarted(*at, world.masking.roster(at))
                self._work(name, "key", effect.plan, world._feed, name, started)
            case do.Train(plan):
                world.watch.begins_part(name, plan)
                done = do.LocalTrained(plan.round, plan.attempt, (1, 2))
                self._work(name, "train", plan, world._feed, name, done)
            case do.HideUpdate():
                self._work(name, "encrypt", effect, self._upload, name, effect)
            case do.AddUpdate():
                self._work(name, "aggregate", effect, self._job, world.proofs.add, name, effect)
            case do.CompareUpdates(round_, attempt, sites, _):
                digest = world.random.randbytes(32)
                asked = do.QuestionReady(round_, attempt, sites, (), digest)
                self._work(name, "select", effect, world._feed, name, asked)
            case do.SendProducts(holders, certified):
                for holder in holders:
                    world._send(name, holder, certified)
                    kind = pb.ENCRYPTED_PRODUCTS
                    self._push_blob(name, holder, kind, certified, self._nothing)
            case do.DecryptProducts(round_, attempt, sites):
                world.watch.answers(name, pb.QUESTION, (round_, attempt), sites)
                self._work(name, "select", effect, self._decrypt, name, effect)
            case do.FinishSum():
                self._work(name, "aggregate", effect, self._job, world.proofs.finish, name, effect)
            case do.SendSum(holders, certified):
                for holder in holders:
                    world._send(name, holder, certified)
                    kind = pb.ENCRYPTED_SUM
                    self._push_blob(name, holder, kind, certified, self._sum, certified)
            case Challenge():
                self._work(name, "apply", effect, self._job, world.proofs.challenge, name, effect)
            case AnswerChallenge():
                self._work(name, "prove", effect, self._job, world.proofs.answer, name, effect)
            case do.ApplySum():
                self._begin_applying(name, effect)
            case do.FetchVersion():
                self._fetch(name, effect)
            case do.FetchCertificates(site, after):
                world._at(name, 0.05, self._certificates, name, site, after)

    def _drawn(self, name: str, longest: float) -> float:
        return self._world.random.random() * longest * self._world.slowness.get(name, 1.0)

    def _work(
        self,
        name: str,
        phase: str,
        at: pb.Plan | do.OfAttempt,
        done: Callable[..., None],
        *arguments: object,
    ) -> None:
        """Work of an attempt takes a while, may fail, and ends with the attempt."""
        world, fail = self._world, self._world.faults.fail
        if (name, phase) in world.failing or (fail and world.random.random() < fail):
            failed: do.Event = do.WorkFailed(at.round, at.attempt, phase, "hm")
            if isinstance(at, do.AddUpdate):
                failed = do.UpdateRefused(at.round, at.attempt, at.site, "malformed")
            if isinstance(at, AnswerChallenge):
                failed = do.OpeningRefused(at.round, at.attempt, at.holder, "no")
            done, arguments = world._feed, (name, failed)
        longest = 0.1 if isinstance(at, Challenge | AnswerChallenge) else LONGEST_WORK_S
        self._after(name, self._drawn(name, longest), done, arguments)

    def _after(
        self, name: str, delay: float, done: Callable[..., None], arguments: tuple[object, ...]
    ) -> None:
        """Unless the site's attempt is over by then."""
        token = self._world._attempts[name]
        self._world._at(name, delay, self._unless_over, name, token, done, arguments)

    def _unless_over(
        self, name: str, token: int, done: Callable[..., None], arguments: tuple[object, ...]
    ) -> None:
        if self._world._attempts[name] == token:
            done(*arguments)

    def _job(self, job: Callable[[str, Any], do.Event], name: str, effect: do.Effect) -> None:
        self._world._feed(name, job(name, effect))

    # ---- a round's work, in its order ------------------------------------------------

    def _deal(self, dealer: str, plan: pb.Plan, coordinator: str) -> None:
        at = (plan.round, plan.attempt)
        dealt = KeyDealt(*at, _key_of(plan, "public"), _key_of(plan, "secret"))
        self._world._feed(dealer, dealt)
        self._push_blob(dealer, coordinator, pb.PUBLIC_CONTEXT, plan, self._key, plan)
        for holder in key_holders(plan):
            if holder == dealer:
                self._key(dealer, dealer, plan)
            else:
                self._push_blob(dealer, holder, pb.SEALED_CONTEXT, plan, self._key, plan)

    def _key(self, _dealer: str, holder: str, plan: pb.Plan) -> None:
        part = "public" if holder == plan.coordinator else "secret"
        held = do.ContextHeld(plan.round, plan.attempt, _key_of(plan, part))
        self._world._feed(holder, held)

    def _upload(self, name: str, effect: do.HideUpdate) -> None:
        """Integers that were drawn in a round once are sent again, bit by bit."""
        world, at = self._world, (effect.round, effect.attempt)
        world.watch.begins_part(name, world.plans[at])
        drawn = (name, effect.round, effect.draw)
        if world.plans[at].scale_exponents and drawn not in self._kept:
            world._feed(name, do.WorkFailed(*at, "encrypt", "nothing is kept"))
            return
        self._kept.setdefault(drawn, world.random.randbytes(8))
        digest = hashlib.sha256(b"%r %d" % (drawn, effect.attempt) + self._kept[drawn]).digest()
        masked = world.plans[at].training.mode == pb.MASKING
        tagged = not masked and effect.coordinator != name
        nonce = hashlib.sha256(f"{name} {at}".encode()).digest()[:16] if tagged else b""
        upload = Upload(digest, tuple(effect.scale_exponents), effect.weight)
        world.watch.uploaded(name, *at, upload)
        world._feed(name, do.UpdateReady(*at, digest, nonce))
        if effect.coordinator == name:
            self._uploaded(name, name, effect, digest)
        else:
            kind = pb.ENCRYPTED_UPDATE
            self._push_blob(name, effect.coordinator, kind, effect, self._uploaded, effect, digest)

    def _uploaded(self, sender: str, to: str, effect: do.HideUpdate, digest: bytes) -> None:
        self._world._feed(to, do.UpdateArrived(effect.round, effect.attempt, sender, digest))

    def _decrypt(self, name: str, effect: do.DecryptProducts) -> None:
        world = self._world
        products = products_of(world.updates, effect.sites)
        if name in world.misreading:
            products = tuple(world.random.uniform(-1e15, 1e15) for _ in products)
        world._feed(name, do.ProductsDecrypted(effect.round, effect.attempt, products, ()))

    def _begin_applying(self, name: str, effect: do.ApplySum) -> None:
        world = self._world
        world.watch.opens(name, effect.root_digest)
        lead = world.plans[effect.round, effect.attempt].coordinator
        wrong = world.proofs.applies(name, effect)
        claim(not wrong or world.liars.keys() & {name, lead}, wrong)
        if wrong:  # the worker refuses it
            failed = do.WorkFailed(effect.round, effect.attempt, "apply", wrong)
            self._work(name, "apply", effect, world._feed, name, failed)
        else:
            self._work(name, "apply", effect, self._apply, name, effect)

    def _apply(self, name: str, effect: do.ApplySum) -> None:
        """The version is a function of whose integers were summed, and of what they were."""
        world = self._world
        draw = world.watch.statement(effect.root_digest).plan.draw
        kept = [self._kept.get((site, effect.round, draw), b"") for site in effect.contributors]
        digest = hashlib.sha256(
            b"%d %r" % (effect.round, effect.total_weight) + effect.parent_digest + b"".join(kept)
        ).digest()
        world.disks[name].versions.add(digest)
        world.watch.made(name, effect.root_digest, digest)
        opened = do.SumOpened(effect.round, effect.attempt, effect.root_digest, digest, 1.0)
        self._after(name, 0.001, world._feed, (name, opened))

    # ---- blobs, versions and certificates ----------------------------------------------

    def _push_blob(
        self,
        sender: str,
        to: str,
        kind: pb.BlobKind.ValueType,
        at: pb.Plan | pb.Certified | do.HideUpdate,
        arrived: Callable[..., None],
        *arguments: object,
        pause: float = 0.1,
    ) -> None:
        """Push until the peer takes it whole, while the attempt lasts at the sender."""
        world = self._world
        token = world._attempts[sender]

        def attempt(pause: float) -> None:
            if world._attempts[sender] != token:
                return
            name = pb.BlobName(kind=kind, round=at.round, attempt=at.attempt)
            cut = world.faults.cut and world.random.random() < world.faults.cut
            taken = world.reaches(sender, to) and world.machines[to].expects(sender, name)
            if cut or not taken:
                world._at(sender, pause, attempt, min(2.0, 2 * pause))
            else:
                arrived(*(sender, to, *arguments))

        world._at(sender, self._drawn(sender, 0.3), attempt, pause)

    def _sum(self, _sender: str, to: str, certified: pb.Certified) -> None:
        self._world._feed(to, do.SumArrived(certified.round, certified.attempt))

    def _nothing(self, _sender: str, to: str) -> None:
        """Products are decrypted when the certified question is here."""

    def _fetch(self, name: str, effect: do.FetchVersion) -> None:
        world, digest = self._world, effect.model_digest
        if digest in world.disks[name].versions:
            world._at(name, 0.001, world._feed, name, do.VersionHere(digest))
        else:
            world._at(name, self._drawn(name, 0.4), self._fetched, name, effect)

    def _fetched(self, name: str, effect: do.FetchVersion) -> None:
        world, digest = self._world, effect.model_digest
        event: do.Event = do.VersionMissing(digest, "nobody has it")
        for site in effect.sites:
            cut = world.faults.cut and world.random.random() < world.faults.cut
            if world.reaches(name, site) and digest in world.disks[site].versions and not cut:
                world.disks[name].versions.add(digest)
                event = do.VersionHere(digest)
                break
        world._feed(name, event)

    def _certificates(self, name: str, source: str, after: int) -> None:
        world = self._world
        if world.reaches(name, source):
            commits = world.disks[source].commits
            found = tuple(commits[r].certificate for r in sorted(commits) if r > after)
            world._feed(name, do.CertificatesArrived(found))


def _key_of(plan: pb.Plan, part: str) -> bytes:
    return hashlib.sha256(f"{part} {plan.round}.{plan.attempt}".encode()).digest()
