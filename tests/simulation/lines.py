"""Two logs of rounds at the same sites, as a daemon would have them that trains two models.

Each line has a log of its own, run by the machine as it is: what tells them apart is the
federation's id, which is that of the line and is in whatever is signed. The process is one:
it dies and starts with both lines, links are cut for both, a manifest is installed for both.
One worker trains, for one line at a time. Whatever is said in one line is said once more
in the other, by somebody who takes it there word for word.

    python -m tests.simulation.lines [--seeds 1000] [--first 0]     # the invariants, line by line
    python -m tests.simulation.lines --compare                      # with one log of both, in turn
"""

from __future__ import annotations

import argparse
import heapq
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress

from peers.attempts import effects as do
from peers.wire.manifest import FederationManifest
from proto import federation_pb2 as pb
from tests.simulation.__main__ import sweep
from tests.simulation.network import FEDERATION, World
from tests.simulation.scenarios.faults import Faults
from tests.simulation.scenarios.invariants import Violation
from tests.simulation.scenarios.schedule import Play, Scenario, draw, draw_with_liar
from tests.simulation.work import SimulatedWork

LINES: Final = ("retriever", "generator")
REPEATED = 0.5  # of what a site that lies hears in one line, it says in the other
ROUNDS = 4
# To compare one log and two: seconds of training at most, versions of the retriever that are
# waited for, and sites that can't train the generator before so many seconds.
TRAIN_S: Final = {"retriever": 2.0, "generator": 40.0}
WANTED: Final = 6
ROOMLESS: Final = "cde"
ROOM_AFTER_S: Final = 600.0


class LineWork(SimulatedWork):
    """A site's workers, of which the one that trains is that of both lines."""

    def __init__(self, line: Line, train_s: float) -> None:
        super().__init__(line)
        self._line, self._train_s = line, train_s

    def _work(
        self,
        name: str,
        phase: str,
        at: pb.Plan | do.OfAttempt,
        done: Callable[..., None],
        *arguments: object,
    ) -> None:
        line = self._line
        if phase == "train" and line.both.compared and lacks(line.line, name, line.now):
            return
        if phase != "train" or (name, phase) in self._line.failing:
            super()._work(name, phase, at, done, *arguments)
            return
        busy = self._line.both.busy_until
        ends = max(busy.get(name, 0.0), self._line.now) + self._drawn(name, self._train_s)
        busy[name] = ends
        self._after(name, ends - self._line.now, done, arguments)


class Line(World):
    """The sites as one line sees them."""

    def __init__(self, both: Lines, name: str, train_s: float, **chosen: Any) -> None:
        self.both, self.line = both, name
        super().__init__(**chosen, federation=f"{FEDERATION}-{name}")
        self._work = LineWork(self, train_s)

    def step(self) -> None:
        """Both lines have one clock."""
        for line in self.both.lines:
            line.now = self._queue[0][0]
        super().step()

    # ---- what is of the site, and so of both lines -------------------------------

    def add(self, name: str) -> None:
        for line in self.both.lines or [self]:
            if line is not self:
                line.installed[name] = as_of(self.installed[name], line)
                line.manifests[self.installed[name].version] = line.installed[name]
            World.add(line, name)

    def crash(self, name: str) -> None:
        self.both.busy_until.pop(name, None)
        for line in self.both.lines:
            World.crash(line, name)
        boot = max(line._boots[name] for line in self.both.lines)
        for line in self.both.lines:  # one that died before another line had started, too
            line._boots[name] = boot

    def start(self, name: str) -> None:
        for line in self.both.lines or [self]:
            if name in line.disks:
                World.start(line, name)
                if name not in line.machines:
                    return  # it died in the midst of it, and the process is one

    def install(self, name: str, manifest: FederationManifest) -> None:
        for line in self.both.lines:
            line.manifests[manifest.version] = as_of(manifest, line)
            World.install(line, name, line.manifests[manifest.version])

    # ---- what is said ----------------------------------------------------------------

    def _arrive(self, sender: str, to: str, body: do.Body) -> None:
        """A site that lies says in the other line, too, what it hears in this one."""
        super()._arrive(sender, to, body)
        if to not in self.liars:
            return
        chance = self.both.chance
        for line in self.both.lines:
            if line is not self and to in line.machines and chance.random() < REPEATED:
                others = [name for name in line.disks if name != to]
                line.tell(to, chance.choice(others), body)


def as_of(manifest: FederationManifest, line: Line) -> FederationManifest:
    """The manifest that a line goes by follows from the one that is signed."""
    return replace(manifest, federation_id=line.federation)


class Lines:
    """Both lines of a federation, on one clock."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        train_s: dict[str, float] | None = None,
    ) -> None:
        self.lines: list[Line] = []  # until all are there each is made for itself
        self.busy_until: dict[str, float] = {}
        self.chance = random.Random(f"lines {scenario.seed}")
        self.compared = train_s is not None
        lines = [
            Line(
                self,
                name,
                (train_s or {}).get(name, 2.0),
                sites=scenario.sites,
                seed=scenario.seed + number,
                faults=scenario.noise,
                min_participants=scenario.min_participants,
                skewed=scenario.skewed,
                record=False,
                mode=pb.MASKING if scenario.way == "masking" else pb.CKKS,
                faulty_sites=scenario.faulty_sites,
            )
            for number, name in enumerate(LINES)
        ]
        first, *others = lines
        for number, line in enumerate(others, start=1):
            ahead = number << 40  # so that no two are of one place in the queue
            first._queue += [(entry[0], ahead + entry[1], *entry[2:]) for entry in line._queue]
            line._sequence += ahead
            line._queue = first._queue
            line.slowness, line.failing, line.blocked = first.slowness, first.failing, first.blocked
        heapq.heapify(first._queue)
        self.lines = lines


class LinesPlay(Play):
    """A scenario's faults, where a manifest is the newest one in both lines before the next."""

    def change(self, site: str, spread_s: float) -> None:
        line = self.world
        assert isinstance(line, Line)
        for one in line.both.lines:
            head = max(one.disks.values(), key=lambda disk: disk.durable.head_round)
            last = head.commits.get(head.durable.head_round)
            if last is None or last.certificate.body.manifest_version != max(one.manifests):
                return
        super().change(site, spread_s)


def play(scenario: Scenario, **chosen: Any) -> Lines:
    """Both lines to their end. Raises Violation.

    The first line's people have what goes wrong; the other line has it with them.
    """
    both = Lines(scenario, **chosen)
    plays = [
        LinesPlay(
            replace(scenario, schedule=scenario.schedule if line is both.lines[0] else ()), line
        )
        for line in both.lines
    ]
    for one in plays:
        one.corrupt()
        one.arrange()
    both.lines[0].run_for(scenario.peace)
    for one in plays:
        one.make_peace()
    if scenario.liar and scenario.sites == 3:
        both.lines[0].run_for(600.0)
        return both
    for one in plays:
        one.must_commit()
    return both


def drawn(seed: int) -> Scenario:
    """A scenario of a seed, of which every other has a site that lies."""
    scenario = (draw, draw_with_liar)[seed % 2](seed)
    noise = replace(scenario.noise, delay_s=(0.001, min(3.0, scenario.noise.delay_s[1])))
    way = "ckks" if scenario.way == "norm" else scenario.way
    return replace(scenario, rounds=ROUNDS, noise=noise, way=way)


# ---- two logs, or one of both in turn ------------------------------------------------


class TurnsWork(SimulatedWork):
    """Of one log in which the lines take turns, round by round."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._of = world

    def _work(
        self,
        name: str,
        phase: str,
        at: pb.Plan | do.OfAttempt,
        done: Callable[..., None],
        *arguments: object,
    ) -> None:
        line = LINES[(at.round + 1) % 2]
        if phase != "train":
            super()._work(name, phase, at, done, *arguments)
        elif not lacks(line, name, self._of.now):
            self._after(name, self._drawn(name, TRAIN_S[line]), done, arguments)


def lacks(line: str, site: str, now: float) -> bool:
    """Whether a site trains nothing there: of five, three have no room for the generator yet."""
    return line == LINES[1] and site in ROOMLESS and now < ROOM_AFTER_S


def in_turn(seed: int) -> float:
    """Seconds until the retriever has `WANTED` versions, where the lines take turns in one log."""
    world = World(sites=5, seed=seed, record=False)
    world._work = TurnsWork(world)
    world.train("a", 2 * WANTED - 1)
    world.run_until_committed(2 * WANTED - 1, within_s=1e6)
    return world.now


def beside(seed: int) -> float:
    """Likewise, where each has a log of its own."""
    scenario = replace(draw(seed), sites=5, min_participants=3, noise=Faults(), faulty_sites=0)
    both = Lines(replace(scenario, skewed=False, way="ckks"), train_s=TRAIN_S)
    for line in both.lines:
        line.train("a", WANTED)
    both.lines[0].run_until_committed(WANTED, within_s=1e6)
    return both.lines[0].now


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.lines", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--compare", action="store_true", help="with one log of both, in turn")
    asked = parser.parse_args(arguments)
    if asked.compare:
        some = range(asked.first, asked.first + asked.seeds)
        for name, how in (("one log, in turn", in_turn), ("two logs", beside)):
            print(f"{name}: {WANTED} versions in {median(map(how, some)):.0f} s")
        return 0
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        failed = sweep(asked.first, asked.seeds, asked.jobs, progress, drawn, play)
    for seed in failed:
        try:
            play(drawn(seed))
        except Violation as error:
            print(f"seed {seed}: {error}", flush=True)
    print(f"{asked.seeds} runs of {len(LINES)} lines, {len(failed)} violations")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
