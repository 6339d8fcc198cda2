"""The first half of an attempt at its coordinator: promises, plan, key, training. PURE.

It ends with everybody's exponents passed on; peers/attempts/coordination.py goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

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
from peers.attempts.modes import mode_of
from peers.attempts.scale import Reports
from peers.attempts.secure_sum import CoordinatorSteps
from peers.attempts.statement import HeldLock, Known, ManifestOf
from peers.plans import robust
from peers.plans.robust import Selection
from peers.wire.signing import Keys, digest_of, name_of
from proto import federation_pb2 as pb


@dataclass(frozen=True)
class SharedModel:
    """What is trained together: the digest of its shapes, and how many values are exchanged."""

    shape_digest: bytes
    values: int


class Deadlines(Protocol):
    """How long a coordinator waits, in seconds (peers/rounds/pacemaker.py)."""

    def phase(self, attempt: int) -> float:
        """In a phase other than training."""

    def train(self, attempt: int) -> float:
        """For local training."""

    def straggler(self, attempt: int) -> float:
        """For the others, after a quorum or masking's threshold."""


class AttemptFails(Exception):
    """This attempt can't go on; the text says why and at whose side."""


@dataclass
class Gathering:
    """Whose updates are wanted, which are here, and which are in the sum already.

    ``asked``: sites whose updates are waited for or in the sum, sorted.
    ``exponents``: the common fixed-point scale, one a parameter group.
    ``contributions``: what each has signed of its upload.
    ``added``: sites whose updates are in the sum.
    ``rejected``: whom the plan's robust rule, or its own exponents, keep out, and why.
    ``question``: the certified one; ``answers``: the equal ones that decided.
    """

    plan: pb.Plan
    asked: tuple[str, ...] = ()
    exponents: tuple[int, ...] = ()
    contributions: dict[str, pb.Signed] = field(default_factory=dict)
    added: set[str] = field(default_factory=set)
    rejected: dict[str, str] = field(default_factory=dict)
    left_out: int = 0  # of them by the exponents that they signed, as every participant sees
    question: Known | None = None
    answers: list[pb.Signed] = field(default_factory=list)
    _uploads: dict[str, bytes] = field(default_factory=dict)
    _promised: dict[str, pb.Contribution] = field(default_factory=dict)
    _here: set[str] = field(default_factory=set)
    _product_answers: dict[str, pb.Signed] = field(default_factory=dict)
    _comparing: bool = False
    _selected: bool = False
    _finishing: bool = False

    def ask(self, sites: Sequence[str], exponents: tuple[int, ...]) -> None:
        """These sites are about to be asked for their updates."""
        self.asked, self.exponents = tuple(sites), exponents

    def expects(self, site: str) -> bool:
        """Whether this site's update is still to come."""
        waiting = not self._comparing and not self._finishing
        return waiting and site in self.asked and site not in self.added

    def arrived(self, site: str, digest: bytes) -> list[do.Effect] | None:
        """An update is here, whole; None when it is not what its owner signed."""
        self._uploads.setdefault(site, digest)
        return self._whole(site)

    def signed(
        self, site: str, contribution: pb.Signed, told: pb.Contribution
    ) -> list[do.Effect] | None:
        """Its owner has signed it; None when that is not what is here."""
        self.contributions.setdefault(site, contribution)
        self._promised.setdefault(site, told)
        return self._whole(site)

    def _whole(self, site: str) -> list[do.Effect] | None:
        if site not in self._uploads or site not in self._promised or site in self._here:
            return []
        if self._uploads[site] != self._promised[site].upload_digest:
            return None
        self._here.add(site)
        return [] if self.robust else [self._add(site)]

    def _add(self, site: str) -> do.AddUpdate:
        nonce = self._promised[site].nonce
        return do.AddUpdate(self.plan.round, self.plan.attempt, site, nonce)

    def without(self, site: str) -> None:
        """This site's update will not come, or is no good."""
        self.asked = tuple(other for other in self.asked if other != site)

    def cut_off(self) -> None:
        """What is not here, or in the sum, by now never will be."""
        self.asked = tuple(sorted(self._here if self.robust else self.added))

    # ---- compare and select ------------------------------------------------------

    @property
    def robust(self) -> bool:
        """Whether updates are compared before they are summed."""
        return robust.is_robust(self.plan.training)

    @property
    def to_be_compared(self) -> bool:
        """Whether every update that was asked for waits to be compared."""
        return self.robust and not self._comparing and self._here >= set(self.asked)

    @property
    def selected(self) -> bool:
        """Whether nobody is rejected any more: key holders hold us to the selection."""
        return self._selected

    @property
    def still_byzantine(self) -> int:
        """How many more sites may lie: who was kept out by what it reported was one of them."""
        if not self.robust or self._selected:
            return 0
        return max(0, self.plan.training.byzantine_sites - self.left_out)

    def reject(self, rejected: Mapping[str, str]) -> None:
        """These sites' updates are kept out."""
        self.rejected.update(rejected)

    def compare(self) -> list[do.Effect]:
        """All updates are in, so nobody can adapt: have their dot products written."""
        self._comparing = True
        nonces = tuple(self._promised[site].nonce for site in self.asked)
        return [do.CompareUpdates(self.plan.round, self.plan.attempt, self.asked, nonces)]

    def answered(self, signed: pb.Signed, needed: int) -> list[pb.Signed]:
        """A key holder's answer; as many equal ones as are needed, once there are."""
        self._product_answers.setdefault(signed.site, signed)
        answers = self._product_answers.values()
        equal = [one for one in answers if one.body == signed.body]
        if len(equal) >= needed:
            self.answers = sorted(equal, key=lambda one: one.site)
            return self.answers
        return []

    def select(self, selection: Selection) -> None:
        """Keep what the rule keeps."""
        self._selected, self.asked = True, selection.kept

    def add_selected(self) -> list[do.Effect]:
        """Add what was selected."""
        return [self._add(site) for site in self.asked]

    # ---- the sum -----------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether every update that shall be in the sum is in it."""
        return self._selected >= self.robust and self.added >= set(self.asked)

    def finish(self) -> list[do.Effect]:
        """Write the sum, once.

        What was handed to the adder before this is in the sum, and says so before the
        sum is finished: ``added`` is right when `SumFinished` comes.
        """
        if self._finishing:
            return []
        self._finishing = True
        return [do.FinishSum(self.plan.round, self.plan.attempt)]

    def describe(self, statement: pb.Statement, sites: Iterable[str]) -> None:
        """Write into a statement what is summed, or compared: these sites' contributions."""
        statement.scale_exponents.extend(self.exponents)
        statement.contributions.extend(self.contributions[site] for site in sites)
        statement.rejected.extend(sorted(self.rejected))

    def rejections(self) -> list[pb.Rejection]:
        """What the round's report tells of those who were kept out."""
        reasons = sorted(self.rejected.items())
        return [pb.Rejection(site=site, reason=reason) for site, reason in reasons]


@dataclass
class Preparing:
    """One attempt as its coordinator sees it, until updates are asked for."""

    site: str
    ground: Ground
    run: pb.Signed
    model: SharedModel
    keys: Keys
    manifest_of: ManifestOf
    timing: Deadlines
    unix_ms: Callable[[], int]
    phase: str = "prepare"
    deadline: float = 0.0
    bundle: Bundle | None = None
    plan: pb.Plan | None = None
    plan_digest: bytes = b""
    _promises: dict[str, Promised] = field(default_factory=dict)
    _refusals: dict[str, str] = field(default_factory=dict)
    _behind: dict[str, str] = field(default_factory=dict)
    _answers: dict[str, pb.PlanAnswer] = field(default_factory=dict)
    _mode: CoordinatorSteps | None = None
    _reports: Reports | None = None
    _can_add: bool = False
    _updates: Gathering | None = None
    _phases: list[tuple[str, float]] = field(default_factory=list)
    _phase_began: float = 0.0

    @property
    def round(self) -> int:
        """The round under way."""
        return self.ground.round

    @property
    def attempt(self) -> int:
        """The attempt of it."""
        return self.ground.attempt

    # ---- prepare ---------------------------------------------------------------

    def prepare(self, own: pb.Promised, now: float) -> list[do.Effect]:
        """Ask every other enabled site for its promise."""
        self._phase_began = now
        self.deadline = now + self.timing.phase(self.attempt)
        message = pb.Prepare(
            round=self.round,
            attempt=self.attempt,
            head_digest=self.ground.parent_digest,
            run=self.run,
            shape_digest=self.model.shape_digest,
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
        if sender == self._plan.key_dealer and not self._can_add:
            raise AttemptFails(f"the key dealer {sender} failed to {reason}")
        if sender not in self.participants:
            return []
        self._reporting.signed[sender] = None
        left = self._steps_without(sender, now)
        return [*left, *(self._all_planned(now) or self._scale_if_all_trained(now))]

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
            self.plan = derive_plan(self.bundle, self.ground)
        except PlanFails as error:
            raise AttemptFails(f"{error}{self._why_not()}") from error
        self.plan_digest = digest_of(self.plan)
        self._updates = Gathering(self.plan)
        self._reports = Reports(self.ground, self.keys, self.plan)
        self._mode = mode_of(self.plan).coordinator(self.plan, self.keys, self.ground.manifest)
        self._enter("plan", now, self.timing.phase(self.attempt))
        return [do.LeadAttempt(self.plan), *bundles]

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
            return [*self._steps_without(sender, now), *self._all_planned(now)]
        return self._all_planned(now)

    def _all_planned(self, now: float) -> list[do.Effect]:
        """Every participant has answered the plan, or has failed since."""
        heard = self._answers.keys() | self._reporting.signed.keys()
        if self.phase != "plan" or not heard >= set(self.participants):
            return []
        return self._begin_training(now)

    def _begin_training(self, now: float) -> list[do.Effect]:
        phase, train = self.timing.phase(self.attempt), self.timing.train(self.attempt)
        self._enter("train", now, train if self._can_add else min(phase, train))
        return self._scale_if_all_trained(now)

    def expects_context(self, sender: str) -> bool:
        """Whether the key dealer's public context belongs here now."""
        waiting = self.phase in ("plan", "train") and self._mode is not None
        return waiting and self._steps.expects_context(sender)

    # ---- what the mode of the sum wants -------------------------------------------

    def steps_answered(self, sender: str, message: do.OfMode, now: float) -> list[do.Effect]:
        """A site answers in the words of the plan's mode."""
        if self._mode is None:
            return []
        effects = self._mode.answered(sender, message)
        return [*effects, *self._updates_welcome(now), *self._steps_on(now)]

    def steps_worked(self, event: do.Worked, now: float) -> list[do.Effect]:
        """Our own work is done, of which the mode may know more."""
        if self._mode is None:
            return []
        return [*self._mode.worked(event), *self._updates_welcome(now)]

    def _updates_welcome(self, now: float) -> list[do.Effect]:
        """With key and commitment, or the sharers' roster, updates can be added from now on."""
        if self._can_add or not self._steps.ready:
            return []
        if objection := self._steps.objection:
            raise AttemptFails(objection)
        self._can_add = True
        if self.phase == "train":
            self.deadline = self._phase_began + self.timing.train(self.attempt)
        # Runs beside training, so it is a span since the plan, not a phase.
        self._phases.append(("key", now - self._phase_began))
        return self._scale_if_all_trained(now)

    def _steps_without(self, sender: str, now: float) -> list[do.Effect]:
        """A site is out of the attempt: its steps are not waited for."""
        if self._mode is None:
            return []
        self._mode.gone(sender)
        return self._steps_on(now)

    def _steps_on(self, now: float) -> list[do.Effect]:
        """When all have answered: pass it on. With enough of them, the rest gets a moment."""
        steps = self._steps
        if not steps.collecting:
            return []
        if steps.complete:
            return self._pass_on(steps, now)
        if self.phase == "open" and not steps.shortage:
            self.deadline = min(self.deadline, now + self.timing.straggler(self.attempt))
        return []

    def _pass_on(self, steps: CoordinatorSteps, now: float) -> list[do.Effect]:
        if shortage := steps.shortage:
            raise AttemptFails(f"{shortage}{self._why_not()}")
        effects = steps.pass_on()
        if self.phase != "plan":
            self.deadline = now + self.timing.phase(self.attempt)
        return effects

    # ---- train -------------------------------------------------------------------

    def trained(self, sender: str, message: pb.Trained, now: float) -> list[do.Effect]:
        """A participant has trained, or says that it could not."""
        if self.plan is None or sender not in self.participants or sender in self._reporting.signed:
            return []
        self._reporting.trained(sender, message)
        if not message.HasField("exponents"):
            self._refusals[sender] = message.reason
        return self._all_planned(now) or self._scale_if_all_trained(now)

    def _scale_if_all_trained(self, now: float) -> list[do.Effect]:
        agreed = {site for site, answer in self._answers.items() if answer.accepted}
        waiting = agreed - set(self._reporting.signed)
        if self.phase == "train" and self._can_add and not waiting:
            return self._scale(now)
        return []

    def _scale(self, now: float) -> list[do.Effect]:
        """Pass on what all have told: one fixed-point scale follows from it."""
        if not self._can_add:
            raise AttemptFails(f"no round key came from the key dealer {self._plan.key_dealer}")
        reports = self._reporting.of(self._steps.able)
        self._need(len(reports), "have trained")
        try:
            exponents, rejected = self._reporting.scale(reports)
        except ValueError as error:
            raise AttemptFails(str(error)) from error
        self._reject(rejected)
        self._gathered.left_out = len(rejected)
        sites = sorted(set(reports) - set(rejected))
        self._need(len(sites), "can contribute")
        self._gathered.ask(sites, exponents)
        self._enter("aggregate", now, self.timing.phase(self.attempt))
        message = pb.Scale(round=self.round, attempt=self.attempt, exponents=list(reports.values()))
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
    def _steps(self) -> CoordinatorSteps:
        if self._mode is None:
            raise AssertionError(f"phase {self.phase} without a plan")
        return self._mode

    @property
    def _reporting(self) -> Reports:
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
        return set(self.participants) - set(self._reporting.signed)

    def _why_not(self) -> str:
        reasons = dict(self._refusals)
        for site, promised in self._promises.items():
            promise = promised.promise
            if not promise.willing:
                reasons[site] = promise.reason or "not willing to train"
            elif promise.shape_digest != self.model.shape_digest:
                reasons[site] = "its retriever differs (encoder or adaptation)"
        for site in self._enabled:
            if self.phase == "prepare" and site not in self._promises:
                reasons.setdefault(site, self._behind.get(site, "did not answer"))
            if self.phase in ("plan", "train") and site in self._untold():
                reasons.setdefault(site, "did not tell in time that it has trained")
        return "".join(f"; {site}: {reasons[site]}" for site in sorted(reasons))
