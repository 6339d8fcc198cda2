"""Which run a site goes by, and what it says when it hears of another one. PURE.

All sites come to the same run, in whichever order they hear of several (`peers.rounds.runs`), and
never go back to one: so a wish says what is over, too, to a site that has missed it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from peers.attempts.bundle import read_run
from peers.attempts.effects import Send
from peers.rounds import runs
from peers.rounds.pacemaker import reached
from peers.rounds.replica import Replica
from peers.wire.errors import RemoteProtocolError
from proto import federation_pb2 as pb


class RunInForce:
    """The run that is known, and the last one that is over."""

    def __init__(self, here: Replica) -> None:
        self._here = here
        self._generations: dict[str, int] = {}  # how far each site's runs are numbered
        self._answered: dict[str, tuple[bytes, bytes, float]] = {}  # its run, ours, and when

    def new_round(self) -> None:
        """Who was behind may not be any more: each is answered again."""
        self._answered.clear()

    @property
    def wish(self) -> pb.RunWish:
        """What we know of runs, for peers; the run is empty where there is none."""
        here = self._here
        over = runs.last_over(here.durable, here.manifest)
        other = over if over != here.durable.signed_run else None
        return pb.RunWish(run=here.durable.signed_run, over=other)

    def new_over(self, sender: str, signed: pb.Signed) -> pb.Run | None:
        """What is over elsewhere is over here; the run, where it takes the place of ours."""
        here = self._here
        ours = here.durable.signed_run
        known = ours, runs.last_over(here.durable, here.manifest)
        if any(one is not None and one.body == signed.body for one in known):
            return None
        run = self._read_run(sender, signed)
        if run.target_round > here.head_round:
            return None  # we are behind; once we are not, it is told again
        if self._is_far(run):
            return None
        if self.stands_over(run, here.run):
            return run
        if ours is not None and self.stands_over(run, None):
            self.keep(ours, signed)
        return None

    def new_run(self, sender: str, signed: pb.Signed) -> pb.Run | None:
        """The run, where it takes the place of ours; else the sender hears of ours.

        Raises RemoteProtocolError when it asks for less than ours protects.
        """
        here = self._here
        known = here.durable.signed_run
        run = self._read_run(sender, signed)
        if known is not None and known.body == signed.body:
            return None
        far = self._is_far(run)
        if not far and self.stands_over(run, here.run):
            return run
        gone = far or not self.stands_over(run, None)
        again = self._answered_lately(sender, signed)
        if far and not again:
            here.progress("waiting", message=_too_far(run, here.run))
        if known is None or here.run is None:
            return None
        if (gone or self.stands_over(here.run, run)) and not again:
            here.emit(Send(sender, self.wish))
        why = runs.weakens(run, here.run, here.head_round, here.manifest)
        if why and not gone:
            raise RemoteProtocolError(f"the run of {run.requested_by} is not taken: {why}")
        return None

    def _answered_lately(self, sender: str, signed: pb.Signed) -> bool:
        """Whether this pair of runs was answered within a phase; from now on it was.

        Two that know other rounds or manifests, and take neither's, would answer without end;
        once for all is too little for a site that was behind, and is not any more.
        """
        here = self._here
        known = here.durable.signed_run
        pair = (signed.body, known.body if known is not None else b"")
        *before, at = self._answered.get(sender, (b"", b"", -math.inf))
        again = tuple(before) == pair and here.now < at + here.timing.phase(0)
        if not again:
            self._answered[sender] = (*pair, here.now)
        return again

    def _read_run(self, sender: str, signed: pb.Signed) -> pb.Run:
        """A run that somebody shows; how far its site's runs are numbered counts."""
        here = self._here
        known = here.durable.signed_run
        same = known is not None and known.body == signed.body
        run = (here.run if same else None) or read_run(signed, here.keys, here.manifest)
        if sender != here.site:
            self._generations[sender] = max(run.generation, self._generations.get(sender, 0))
        return run

    @property
    def _last_over(self) -> pb.Run | None:
        over = runs.last_over(self._here.durable, self._here.manifest)
        return pb.Run.FromString(over.body) if over is not None else None

    def goes_on(self, begun: pb.Run) -> bool:
        """Whether what was begun by this run goes on, by the one in force now."""
        run, head = self._here.run, self._here.head_round
        return run is not None and runs.goes_on(begun, run, head, over=self._last_over)

    def stands_over(self, run: pb.Run, known: pb.Run | None) -> bool:
        """Whether a run takes the place of a known one, or of none."""
        here = self._here
        last = self._last_over
        aside = [pb.Run.FromString(one.body) for one in here.durable.state.put_aside]
        return runs.stands_over(
            run, known, here.head_round, here.manifest, over=last, put_aside=aside
        )

    @property
    def usual(self) -> int:
        """The number that runs have reached, by what more sites have told than may lie."""
        generations = {s: n for s, n in self._generations.items() if self._here.manifest.enabled(s)}
        return max(0, reached(generations, self._here.manifest.tolerated + 1))

    def _is_far(self, run: pb.Run) -> bool:
        return runs.is_far(run, self.usual)

    def keep(self, signed: pb.Signed, *over: pb.Signed) -> None:
        """It goes to all: sites that know of different runs share no attempt."""
        here = self._here
        state = runs.left_behind(here.durable, here.manifest, signed, *over)
        here.persist(replace(here.durable, signed_run=signed, state=state))
        here.tell_others(self.wish)


def _too_far(run: pb.Run, known: pb.Run | None) -> str:
    ours = known.generation if known is not None else 0
    return (
        f"the run of {run.requested_by} is not taken: it is number {run.generation}, ours is "
        f"{ours}, and no second site has told of such a one. Who lies numbers runs like that; "
        "a site that goes by it forgets it with fedctl site forget-round"
    )
