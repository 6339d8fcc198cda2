"""The first half of an attempt at its coordinator: promises, plan, key, training. PURE.

It ends with everybody's exponents passed on; peers/attempts/coordination.py goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from peers.attempts import effects as do
from peers.attempts.bundle import (
    Bundle,
    Ground,
    PlanFails,
    Promised,
    derive_plan,
    make,
    needed_contributors,
    read_bundle,
)
from peers.attempts.masking import MaskingSteps
from peers.attempts.reports import Reports, RoundKey
from peers.attempts.roles import is_masked
from peers.attempts.statement import HeldLock, ManifestOf
from peers.attempts.timing import Timing
from peers.attempts.update_collector import Gathering
from peers.wire.signing import Keys, digest_of, name_of
from proto import federation_pb2 as pb


class AttemptFails(Exception):
    """This attempt can't go on; the text says why and at whose side."""


@dataclass
class Preparing:
    """One attempt as its coordinator sees it, until updates are asked for."""

    site: str
    ground: Ground
    run: pb.Signed
    shape_digest: bytes
    shared_values: int
    keys: Keys
    manifest_of: ManifestOf
    timing: Timing
    unix_ms: Callable[[], int]
    now: float
    head_certificate: pb.Certificate | None = None
    phase: str = "prepare"
    deadline: float = 0.0
    bundle: Bundle | None = None
    plan: pb.Plan | None = None
    plan_digest: bytes = b""
    _promises: dict[str, Promised] = field(default_factory=dict)
    _refusals: dict[str, str] = field(default_factory=dict)
    _behind: dict[str, str] = field(default_factory=dict)
    _answers: dict[str, pb.PlanAnswer] = field(default_factory=dict)
    _masking: MaskingSteps | None = None
    _key: RoundKey | None = None
    _reports: Reports | None = None
    _context_held: bool = False
    _updates: Gathering | None = None
    _phases: list[tuple[str, float]] = field(default_factory=list)
    _phase_began: float = 0.0

    def __post_init__(self) -> None:
        self._phase_began = self.now
        self.deadline = self.now + self.timing.phase(self.attempt)

    @property
    def round(self) -> int:
        """The round under way."""
        return self.ground.round

    @property
    def attempt(self) -> int:
        """The attempt of it."""
        return self.ground.attempt

    # ---- prepare ---------------------------------------------------------------

    def prepare(self, own: pb.Promised) -> list[do.Effect]:
        """Ask every other enabled site for its promise."""
        message = pb.Prepare(
            round=self.round,
            attempt=self.attempt,
            head_digest=self.ground.parent_digest,
            run=self.run,
            shape_digest=self.shape_digest,
            manifest_version=self.ground.manifest.version,
            promise=own,
        )
        return [do.Send(peer, message) for peer in self._enabled if peer != self.site]

    def promised(self, promised: Promised, now: float) -> list[do.Effect]:
        """A site promised; go on when all have answered, or soon after a quorum."""
        if promised.site in self._promises:
            return []
        if self.phase != "prepare":  # too late to count, and to sign; it may vote
            late = self.bundle.message if self.bundle else None
            return [do.Send(promised.site, late)] if late is not None else []
        if objection := self._disagrees(promised.promise):
            self._refusals[promised.site] = objection
        else:
            self._promises[promised.site] = promised
        if self._all_have_answered():
            return self._go(now)
        if len(self._promises) == self.ground.manifest.quorum:
            self.deadline = min(self.deadline, now + self.timing.straggler(self.attempt))
        return []

    def _disagrees(self, promise: pb.Promise) -> str:
        manifest = self.ground.manifest
        if promise.manifest_digest != manifest.digest:
            if promise.manifest_version == manifest.version:
                return (
                    f"goes by another manifest {manifest.version} ("
                    f"{promise.manifest_digest.hex()[:12]}) than the coordinator "
                    f"({manifest.digest.hex()[:12]}): sign one of version {manifest.version + 1}"
                )
            return (
                f"goes by manifest {promise.manifest_version}, the coordinator by "
                f"{manifest.version}: install the newer one at both (SIGHUP)"
            )
        if promise.parent_digest != self.ground.parent_digest:
            return "builds on another version"
        return "" if promise.run_digest == self._run_digest else "knows of another run"

    @property
    def _run_digest(self) -> bytes:
        return name_of(self.run)

    def _refused_before_scale(self, sender: str, reason: str, now: float) -> list[do.Effect]:
        if sender == self._plan.key_dealer and not self._context_held:
            raise AttemptFails(f"the key dealer {sender} failed to {reason}")
        if sender not in self.participants:
            return []
        self._told.told[sender] = None
        masking = self._masking_without(sender, now)
        return [*masking, *(self._all_planned(now) or self._scale_if_all_trained(now))]

    def behind(self, sender: str, head_round: int) -> None:
        """A site has yet to learn of the last commit; it answers when it has."""
        self._behind[sender] = f"is behind, at round {head_round}"

    def _all_have_answered(self) -> bool:
        return set(self._promises) | set(self._refusals) >= set(self._enabled)

    def _go(self, now: float) -> list[do.Effect]:
        quorum = self.ground.manifest.quorum
        if len(self._promises) < quorum:
            raise AttemptFails(
                f"{len(self._promises)} of {len(self._enabled)} sites promised, "
                f"{quorum} decide{self._why_not()}"
            )
        message = make(self.ground, self.run, self._promises.values())
        self.bundle = read_bundle(message, self.ground, self.keys, self.manifest_of)
        bundles = [do.Send(site, message) for site in sorted(self._promises)]
        if self.bundle.lock is not None:
            return [*bundles, *self._restate(self.bundle.lock, now)]
        try:
            self.plan = derive_plan(self.bundle, self.ground, self.head_certificate)
        except PlanFails as error:
            raise AttemptFails(f"{error}{self._why_not()}") from error
        self.plan_digest = digest_of(self.plan)
        self._updates = Gathering(self.plan)
        self._key = RoundKey(self.ground, self.keys, self.plan)
        self._reports = Reports(self.ground, self.keys, self.plan)
        self._masking = MaskingSteps(self.plan) if is_masked(self.plan) else None
        self._enter("plan", now, self.timing.phase(self.attempt))
        return [do.Coordinate(self.plan), *bundles]

    # ---- plan and key ------------------------------------------------------------

    def plan_answered(self, sender: str, answer: pb.PlanAnswer, now: float) -> list[do.Effect]:
        """A participant took or declined the plan; a declining key dealer ends the attempt."""
        if self.plan is None or sender not in self.participants or sender in self._answers:
            return []
        self._answers[sender] = answer
        if not answer.accepted:
            self._refusals[sender] = answer.reason
            if sender == self.plan.key_dealer:
                raise AttemptFails(f"the key dealer {sender} declined the plan: {answer.reason}")
            return [*self._masking_without(sender, now), *self._all_planned(now)]
        return self._all_planned(now)

    def _all_planned(self, now: float) -> list[do.Effect]:
        """Every participant has answered the plan, or has failed since."""
        heard = self._answers.keys() | self._told.told.keys()
        if self.phase != "plan" or not heard >= set(self.participants):
            return []
        return self._begin_training(now)

    def _begin_training(self, now: float) -> list[do.Effect]:
        phase, train = self.timing.phase(self.attempt), self.timing.train(self.attempt)
        self._enter("train", now, train if self._context_held else min(phase, train))
        return self._scale_if_all_trained(now)

    def expects_context(self, sender: str) -> bool:
        """Whether the key dealer's public context belongs here now."""
        waiting = self.phase in ("plan", "train") and not self._round_key.public_digest
        return waiting and self.plan is not None and sender == self.plan.key_dealer

    def key_committed(self, sender: str, message: pb.KeyCommitted, now: float) -> list[do.Effect]:
        """The dealer's word on the key, which everybody will hold it to."""
        if self.plan is None:
            return []
        self._round_key.committed(sender, message)
        return self._key_ready(now)

    def context_held(self, event: do.ContextHeld, now: float) -> list[do.Effect]:
        """The public context is here."""
        key = self._round_key
        key.public_digest = key.public_digest or event.digest
        return self._key_ready(now)

    def _key_ready(self, now: float) -> list[do.Effect]:
        """With key and commitment, or the sharers' roster, updates can be added from now on."""
        if self._context_held or not self._round_key.ready:
            return []
        if objection := self._round_key.objection:
            raise AttemptFails(objection)
        self._context_held = True
        if self.phase == "train":
            self.deadline = self._phase_began + self.timing.train(self.attempt)
        # Runs beside training, so it is a span since the plan, not a phase.
        self._phases.append(("key", now - self._phase_began))
        return self._scale_if_all_trained(now)

    # ---- masking -----------------------------------------------------------------

    def masking_answered(
        self, sender: str, answer: pb.MaskingAnswer, now: float
    ) -> list[do.Effect]:
        """A participant has done its step of masking."""
        if self._masking is None or not self._masking.answered(sender, answer):
            return []
        return self._masking_on(now)

    def _masking_without(self, sender: str, now: float) -> list[do.Effect]:
        """A site is out of the attempt: its step is not waited for."""
        if self._masking is None:
            return []
        self._masking.gone(sender)
        return self._masking_on(now)

    def _masking_on(self, now: float) -> list[do.Effect]:
        """When all have answered: pass it on. With enough of them, the rest gets a moment."""
        steps = self._masking
        if steps is None:
            return []
        if steps.complete:
            return self._pass_on(steps, now)
        if self.phase == "open" and steps.heard >= steps.threshold:
            self.deadline = min(self.deadline, now + self.timing.straggler(self.attempt))
        return []

    def _pass_on(self, steps: MaskingSteps, now: float) -> list[do.Effect]:
        step = "" if steps.step is None else pb.MaskingStep.Name(steps.step).lower()
        if steps.heard < steps.threshold:
            raise AttemptFails(
                f"{steps.heard} sites have answered masking's {step or 'last'} step, "
                f"{steps.threshold} must{self._why_not()}"
            )
        effects = steps.pass_on()
        if self.phase != "plan":
            self.deadline = now + self.timing.phase(self.attempt)
        return effects

    # ---- train -------------------------------------------------------------------

    def trained(self, sender: str, message: pb.Trained, now: float) -> list[do.Effect]:
        """A participant has trained, or says that it could not."""
        if self.plan is None or sender not in self.participants or sender in self._told.told:
            return []
        self._told.trained(sender, message)
        if not message.HasField("exponents"):
            self._refusals[sender] = message.reason
        return self._all_planned(now) or self._scale_if_all_trained(now)

    def _scale_if_all_trained(self, now: float) -> list[do.Effect]:
        agreed = {site for site, answer in self._answers.items() if answer.accepted}
        waiting = agreed - set(self._told.told)
        if self.phase == "train" and self._context_held and not waiting:
            return self._scale(now)
        return []

    def _scale(self, now: float) -> list[do.Effect]:
        """Pass on what all have told: one fixed-point scale follows from it."""
        if not self._context_held:
            raise AttemptFails(f"no round key came from the key dealer {self._plan.key_dealer}")
        # Who has shared no secrets can't be in a masked sum.
        told = self._told.of(self._masking.sharers if self._masking else None)
        self._need(len(told), "have trained")
        try:
            exponents, rejected = self._told.scale(told)
        except ValueError as error:
            raise AttemptFails(str(error)) from error
        self._reject(rejected)
        self._gathered.left_out = len(rejected)
        asked = sorted(set(told) - set(rejected))
        self._need(len(asked), "can contribute")
        self._gathered.ask(asked, exponents)
        self._enter("aggregate", now, self.timing.phase(self.attempt))
        message = pb.Scale(round=self.round, attempt=self.attempt, exponents=list(told.values()))
        # To all who promised: who is not asked learns that the attempt goes on.
        return [do.Send(site, message) for site in sorted(self._promises)]

    def _reject(self, rejected: dict[str, str]) -> None:
        self._gathered.reject(rejected)
        self._refusals |= {site: f"rejected, {reason}" for site, reason in rejected.items()}

    def _restate(self, lock: HeldLock, now: float) -> list[do.Effect]:
        """A version that may be committed somewhere goes first."""
        raise NotImplementedError

    # ---- small parts ---------------------------------------------------------------

    @property
    def _gathered(self) -> Gathering:
        if self._updates is None:
            raise AssertionError(f"phase {self.phase} without a plan")
        return self._updates

    @property
    def _round_key(self) -> RoundKey:
        if self._key is None:
            raise AssertionError(f"phase {self.phase} without a plan")
        return self._key

    @property
    def _told(self) -> Reports:
        if self._reports is None:
            raise AssertionError(f"phase {self.phase} without a plan")
        return self._reports

    @property
    def participants(self) -> list[str]:
        """Sites of the plan, sorted."""
        return [p.site for p in self.plan.participants] if self.plan else []

    @property
    def _plan(self) -> pb.Plan:
        if self.plan is None:
            raise AssertionError(f"phase {self.phase} without a plan")
        return self.plan

    @property
    def _enabled(self) -> tuple[str, ...]:
        return self.ground.manifest.enabled_ids

    def _enter(self, phase: str, now: float, allowance: float) -> None:
        self._phases.append((self.phase, now - self._phase_began))
        self.phase, self._phase_began, self.deadline = phase, now, now + allowance

    def _need(self, count: int, what: str) -> None:
        minimum = needed_contributors(self._plan) + self._gathered.still_byzantine
        if count < minimum:
            raise AttemptFails(f"{count} sites {what}, the plan needs {minimum}{self._why_not()}")

    def _untold(self) -> set[str]:
        return set(self.participants) - set(self._told.told)

    def _why_not(self) -> str:
        reasons = dict(self._refusals)
        for site, promised in self._promises.items():
            promise = promised.promise
            if not promise.willing:
                reasons[site] = promise.reason or "not willing to train"
            elif promise.shape_digest != self.shape_digest:
                reasons[site] = "its retriever differs (encoder or adaptation)"
        for site in self._enabled:
            if self.phase == "prepare" and site not in self._promises:
                reasons.setdefault(site, self._behind.get(site, "did not answer"))
            if self.phase in ("plan", "train") and site in self._untold():
                reasons.setdefault(site, "did not tell in time that it has trained")
        return "".join(f"; {site}: {reasons[site]}" for site in sorted(reasons))
