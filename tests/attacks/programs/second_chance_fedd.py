"""`fedd` of a site that makes something of another's lost memory, or of a sum that is made again.

    HANSE_UNDEFENDED="recalled lock" \
        python -m tests.attacks.programs.second_chance_fedd --config fedd.toml

As long as the daemon's folder (HANSE_TAPE) holds a file ``lie``, it lies so:

    withholds             it coordinates a round, shows nobody that its version is committed,
                          keeps the certificate (``certificate``) and says nothing more
    two-sums VICTIM       of the sum of all and the one without the victim it shows each site
                          one, and the second one also to a site that has come back
    repeats               it fails its attempt behind the sum, and has other integers, and
                          another update, when the sum is made again

HANSE_UNDEFENDED takes one of `DEFENCES` out of a daemon, liar or not. A promise that names a
lock leaves ``heard-SITE`` behind, and a certified sum of a liar ``certified``.
"""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from daemon import main as fedd
from daemon.jobs.sums import integers
from peers.attempts import bundle, participation, statement
from peers.attempts import effects as do
from peers.attempts.coordination import Coordination
from peers.attempts.gathering import Gathering
from peers.attempts.lead import AttemptFails
from peers.attempts.statement import EncodedStatement
from peers.plans import robust
from peers.rounds.acceptor import Acceptor
from peers.rounds.protocol import Protocol
from peers.wire.certificates import certificate_of, sign_vote
from peers.wire.signing import Kind, sign_bytes
from proto import federation_pb2 as pb
from tests.attacks.programs import lying_fedd as sums
from tests.attacks.programs.planting import without
from tests.live.poisoning_fedd import poison_updates
from tests.simulation.scenarios.bugs import BARE_PROMISE

FOLDER = sums._folder
lying = sums.lying
LARGER = 30.0

_for_good = pytest.MonkeyPatch()
_put = _for_good.setattr


# ---- a commit that is withheld -----------------------------------------------------


def withholds() -> None:
    """Of those who vote nobody learns that it was enough; dogwood sees no version to vote for."""
    step = Protocol.step
    votes: dict[str, pb.Vote] = {}

    def withholding(self: Protocol, event: do.Event, now: float) -> list[do.Effect]:
        heard = event.body if isinstance(event, do.MessageReceived) else None
        if _is_lying("withholds") and isinstance(heard, pb.Vote):
            _keep_certificate(self, votes, heard)
            return []
        effects = step(self, event, now)
        if isinstance(heard, pb.Promised) and heard.HasField("lock"):
            (FOLDER / f"heard-{heard.promise.site}").touch()
        if not _is_lying("withholds"):
            return effects
        done = (FOLDER / "certificate").exists()
        return [
            effect
            for effect in effects
            if not isinstance(effect, do.Send)
            or not (done or (isinstance(effect.body, pb.Proven) and effect.to == "dogwood"))
        ]

    _put(Protocol, "step", withholding)


def _is_lying(how: str) -> bool:
    path = FOLDER / "lie"
    return path.exists() and path.read_text().split()[0] == how


def _keep_certificate(liar: Protocol, votes: dict[str, pb.Vote], vote: pb.Vote) -> None:
    votes[vote.site] = vote
    votes[liar.site] = sign_vote(liar._here.keys.sign, vote.body, vote.attempt)
    if len(votes) == liar.manifest.quorum:
        enough = sorted(votes.values(), key=lambda vote: vote.site)
        certificate = certificate_of(vote.attempt, enough, 0)
        (FOLDER / "certificate").write_bytes(certificate.SerializeToString())


# ---- two sums, with the help of a site that has come back -----------------------------------


def two_sums() -> None:
    """As lying_fedd's, but each honest site is shown one statement only, before it comes back."""
    second = sums._Second(waits=True)
    _state_one_to_each(second)
    sums._certify_the_second(second)
    sums._send_each_holder_one(second)
    sums._wait_for_what_is_told(second)
    _hold_the_first_back(second)


def _state_one_to_each(second: sums._Second) -> None:
    worked, refused = Coordination.worked, Protocol._on_attempt_failed
    step = Protocol.step

    def stating(self: Coordination, event: do.WorkDone, now: float) -> list[do.Effect]:
        effects = worked(self, event, now)
        if not lying("two-sums") or not isinstance(event, do.SumFinished):
            return effects
        known = second.known = sums.without_victim(self)
        ours = sign_bytes(self.lead.keys, Kind.STATEMENT, known.raw)
        second.signatures[self.lead.site] = ours
        holder = sums._second_of(self)
        first = [one for one in effects if not _states_to(one, holder)]
        return [*first, do.Send(holder, _state(known))]

    def coming_back(self: Protocol, sender: str, message: pb.AttemptFailed) -> None:
        """It says that it was restarted: it is shown the promises again, and the second sum."""
        under_way, known = self._here.coordination, second.known
        if not lying("two-sums") or under_way is None or known is None:
            refused(self, sender, message)
        elif under_way.bundle is not None:
            bundled = do.Send(sender, under_way.bundle.message)
            self._here.emit(bundled, do.Send(sender, _state(known)))

    def forgetting(self: Protocol, event: do.Event, now: float) -> list[do.Effect]:
        """Nobody is told what it has signed."""
        effects = step(self, event, now)
        for effect in effects if lying("two-sums") else ():
            if isinstance(effect, do.Send) and isinstance(effect.body, pb.Remembered):
                effect.body.ClearField("statement")
        return effects

    _put(Protocol, "step", forgetting)
    _put(Coordination, "worked", stating)
    _put(Protocol, "_on_attempt_failed", coming_back)


def _states_to(effect: do.Effect, site: str) -> bool:
    return isinstance(effect, do.Send) and isinstance(effect.body, pb.State) and effect.to == site


def _state(known: EncodedStatement) -> pb.State:
    at = known.message
    return pb.State(round=at.round, attempt=at.attempt, statement=known.raw)


def _hold_the_first_back(second: sums._Second) -> None:
    """Nobody sees who has signed the first sum before the second one is certified."""
    certified, stated = Coordination._certified, Coordination.stated
    held: list[do.Effect] = []

    def holding(self: Coordination, *arguments: Any) -> list[do.Effect]:
        effects = certified(self, *arguments)
        if not lying("two-sums"):
            return effects
        held.extend(effects)
        (FOLDER / "certified").touch()
        return []

    def letting_go(
        self: Coordination, sender: str, message: pb.Stated, now: float
    ) -> list[do.Effect]:
        effects = stated(self, sender, message, now)
        if held and len(second.signatures) >= self.lead.ground.manifest.quorum:
            effects = [*effects, *held]
            held.clear()
        return effects

    _put(Coordination, "_certified", holding)
    _put(Coordination, "stated", letting_go)


# ---- other integers, the second time --------------------------------------------------------


def repeats() -> None:
    """Behind the sum the attempt is failed; a file ``poison`` says that it is made again."""
    applied = Coordination.applied

    def opened(
        self: Coordination, sender: str, message: pb.AppliedSum, now: float
    ) -> list[do.Effect]:
        if not _is_lying("repeats"):
            return applied(self, sender, message, now)
        (FOLDER / "poison").write_text(str(LARGER))
        raise AttemptFails("the sum was not opened in time")

    _put(Coordination, "applied", opened)


def other_integers() -> None:
    """As large as a site's integers may be, each with its sign (in its worker)."""
    recall = vars(integers)["recall"]

    def recalling(path: Any, making: Any) -> Any:
        kept = recall(path, making)
        if kept is None or not (FOLDER / "poison").exists():
            return kept
        most = 2 ** (making.bits - 1) - 1  # more is refused where the sum is opened
        larger = np.where(kept.integers < 0, -most, most).astype(kept.integers.dtype)
        larger[-2:] = kept.integers[-2:]  # the loss
        return replace(kept, integers=larger)

    _put(integers, "recall", recalling)


# ---- defences, to be taken out ----------------------------------------------------------------


def without_recalled_lock() -> None:
    """A site that comes back is told its promise, and not what the promise names."""
    for owner, name, replacement in BARE_PROMISE:
        _put(owner, name, replacement)


def without_this_start() -> None:
    """It signs in attempts that were under way when it came back, too."""
    text = "if signed is None and not self._promised_now(here.bundle):"
    without(_for_good, Acceptor, "on_state", text)
    text = "draw >= self._recall.since"
    without(_for_good, Acceptor, "_check_difference", text, instead="True")


def without_comparing_again() -> None:
    """A robust sum is repeated as others are, and what was compared once is not compared again."""
    text = "gone or less or robust.is_robust(training)"
    without(_for_good, bundle, "_repeated", text, instead="gone or less")

    def still_robust(self: Gathering) -> bool:
        return robust.is_robust(self.plan.training) and not self.plan.scale_exponents

    check = statement.check_selection

    def selection(stated: pb.Statement, *rest: Any) -> Any:
        return () if stated.plan.scale_exponents else check(stated, *rest)

    _put(Gathering, "robust", property(still_robust))
    _put(participation, "check_selection", selection)


DEFENCES: dict[str, Callable[[], None]] = {
    "recalled lock": without_recalled_lock,
    "this start": without_this_start,
    "comparing again": without_comparing_again,
}

# A worker imports its daemon's main module anew, under this name (multiprocessing.spawn).
if __name__ == "__mp_main__":
    sums.changes_the_sum()
    sums._keep_records()
    other_integers()

if __name__ == "__main__":
    if removed := os.environ.get("HANSE_UNDEFENDED"):
        DEFENCES[removed]()
    withholds()
    two_sums()
    repeats()
    poison_updates()
    sums._wait_for_all()
    fedd.main()
