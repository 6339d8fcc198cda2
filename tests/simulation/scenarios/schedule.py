"""One simulated run: a federation, what goes wrong and when, and what must follow.

A scenario is drawn from its seed and is plain, frozen data, so that it can be
shrunk. Its faults end at `Scenario.peace`; from then on a majority that can train
is up, and the federation must commit again within `ATTEMPTS` attempts, and then
all rounds that were asked for.
"""

from __future__ import annotations

import random
import string
from dataclasses import dataclass, replace
from itertools import combinations

from peers.rounds.protocol import Protocol
from peers.wire.manifest import FederationManifest, ManifestSite
from proto import federation_pb2 as pb
from tests.simulation.network import World
from tests.simulation.scenarios.faults import Faults
from tests.simulation.scenarios.invariants import claim

SIZES = (3, 5, 7)
ROUNDS = 10
LIED_ROUNDS = 3
LEADERS = ("b", "c", "d")  # of the first attempts of these rounds: there lies are worth most
# A liar can waste the attempts that it leads or deals the key of.
LIED_ATTEMPTS = 12
# Attempts of a round that may fail once the faults have ended, beside one for each
# site that stays down: those that were begun before, and two coordinators in each
# other's way until their deadlines have grown apart.
ATTEMPTS = 8
SCARCE = (
    *("Vote", "Vote", "Commit", "Proven", "Promised", "RunWish", "Bundle", "Trained"),
    *("EndedAttempt", "State", "Stated", "Certified", "AppliedSum", "Contributed"),
)
# Looks at the federation, one in ten seconds, after which a person stops a run that is
# another one at other sites, or is the liar's.
STOPPED_AFTER = 12
PATIENCE_S = 40_000.0
# What fails instead of a drawn phase where updates get into the sum another way.
_STEPS: dict[str, dict[str, str]] = {
    "ckks": {},
    "masking": {"key": "mask"},
    "norm": {"encrypt": "select"},
}


@dataclass(frozen=True)
class Crash:
    """A site dies behind ``after`` effects of its next step (that writes), and comes back."""

    at: float
    site: str
    after: int
    writing: bool
    down_s: float


@dataclass(frozen=True)
class Cut:
    """Links are dead for a while, each one way."""

    at: float
    for_s: float
    links: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Slow:
    """A site and its network are slow for a while."""

    at: float
    for_s: float
    site: str
    factor: float


@dataclass(frozen=True)
class Failing:
    """Local work of one phase fails at a site for a while."""

    at: float
    for_s: float
    site: str
    phase: str


@dataclass(frozen=True)
class Unwilling:
    """A site does not train for a while."""

    at: float
    for_s: float
    site: str


@dataclass(frozen=True)
class Stop:
    """A person at a site stops the run; another one starts a new one later."""

    at: float
    site: str
    starter: str
    pause_s: float


@dataclass(frozen=True)
class Change:
    """A new manifest that disables, enables or adds one site, installed site by site."""

    at: float
    site: str
    spread_s: float


@dataclass(frozen=True)
class Restore:
    """A site is stopped, and started with its disk as it was some writes ago."""

    at: float
    site: str
    writes: int
    down_s: float


Fault = Crash | Cut | Slow | Failing | Unwilling | Stop | Change | Restore


@dataclass(frozen=True)
class Scenario:
    """Everything that a run depends on."""

    seed: int
    sites: int
    rounds: int
    min_participants: int
    noise: Faults
    skewed: bool
    schedule: tuple[Fault, ...]
    peace: float
    down_for_good: tuple[str, ...]
    way: str = "ckks"
    faulty_sites: int = 0
    liar: str = ""

    def __str__(self) -> str:
        lines = [
            f"seed {self.seed}: {self.sites} sites, {self.rounds} rounds, "
            f"{self.min_participants} participants at least, f = {self.faulty_sites}, {self.way}, "
            f"peace at {self.peace:.1f} s",
            f"  noise {self.noise}{', skewed clocks' if self.skewed else ''}",
            *(f"  {fault}" for fault in self.schedule),
        ]
        if self.liar:
            lines.append(f"  {self.liar} lies")
        if self.down_for_good:
            lines.append(f"  down for good: {' '.join(self.down_for_good)}")
        return "\n".join(lines)


def draw_with_liar(seed: int) -> Scenario:
    """The scenario of a seed with one site that lies, of 4, 5 or 7, and sometimes of 3."""
    chance = random.Random(f"liar {seed}")
    scenario = draw(seed)
    sites = chance.choice((3, 4, 4, 5, 7))
    names = string.ascii_lowercase[:sites]
    peace = scenario.peace
    schedule = [_fault(chance, names, peace) for _ in range(chance.choice((0, 0, 1, 3)))]
    quiet = Faults(delay_s=scenario.noise.delay_s)
    return replace(
        scenario,
        sites=sites,
        rounds=LIED_ROUNDS,
        min_participants=2,
        noise=quiet if chance.random() < 0.6 else scenario.noise,
        schedule=tuple(sorted(schedule, key=lambda fault: fault.at)),
        down_for_good=(),
        way=chance.choice(("ckks", "ckks", "masking", "norm" if sites == 7 else "ckks")),
        faulty_sites=1,
        liar=chance.choice((*names, *LEADERS[:sites])),
    )


def draw_with_restore(seed: int) -> Scenario:
    """The scenario of a seed in which one site's state goes back, once or several times."""
    chance = random.Random(f"restore {seed}")
    scenario = draw_with_liar(seed)
    sites = chance.choice((4, 4, 5, 7))
    names = string.ascii_lowercase[:sites]
    site, peace = chance.choice(names), scenario.peace
    schedule: list[Fault] = [_fault(chance, names, peace) for _ in range(chance.choice((0, 1, 3)))]
    schedule += [
        Restore(
            chance.uniform(0.0, peace),
            site,
            chance.choice((1, 1, 2, 3, 5, 20, 100)),
            chance.choice((0.1, 1.0, 30.0)) * chance.random(),
        )
        for _ in range(chance.randint(1, 4))
    ]
    return replace(
        scenario,
        sites=sites,
        schedule=tuple(sorted(schedule, key=lambda fault: fault.at)),
        way=chance.choice(("ckks", "ckks", "masking", "norm" if sites == 7 else "ckks")),
        liar="",
    )


def draw_with_both(seed: int) -> Scenario:
    """The scenario of a seed with a site that lies and another one whose state goes back.

    These are two, and one may lie: it counts as honest as long as an honest one that is up
    knows what it has signed. So everybody is up, and the network quick.
    """
    chance = random.Random(f"both {seed}")
    scenario = draw_with_restore(seed)
    names = string.ascii_lowercase[: scenario.sites]
    liar, site = chance.sample((*names, *LEADERS), 2)
    while liar == site:
        site = chance.choice(names)
    back = [fault for fault in scenario.schedule if isinstance(fault, Restore)]
    return replace(
        scenario,
        schedule=(replace(chance.choice(back), site=site),),
        noise=Faults(delay_s=(0.001, 0.05)),
        liar=liar,
    )


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    chance = random.Random(f"scenario {seed}")
    sites = SIZES[seed % len(SIZES)]
    names = string.ascii_lowercase[:sites]
    peace = chance.uniform(15.0, 90.0)
    faulty = random.Random(f"faulty {seed}").choice((0, 1))
    most = sites - max((sites + faulty) // 2 + 1, 2)
    down = tuple(sorted(chance.sample(names, chance.randint(0, most))))
    if chance.random() < 0.7:
        down = ()
    noise = Faults(
        drop=chance.choice((0.0, 0.0, 0.02, 0.1, 0.25)),
        duplicate=chance.choice((0.0, 0.05, 0.3)),
        delay_s=(0.001, chance.choice((0.05, 0.05, 0.5, 3.0, 15.0))),
        cut=chance.choice((0.0, 0.2, 0.5)),
        fail=chance.choice((0.0, 0.0, 0.02)),
        scarce=chance.choice(SCARCE) if chance.random() < 0.4 else _scarce_proofs(seed),
    )
    schedule = [_fault(chance, names, peace) for _ in range(chance.randint(0, 8))]
    if chance.random() < 0.3 and not down:
        schedule += _changes(chance, names, peace)
    return Scenario(
        seed=seed,
        sites=sites,
        rounds=ROUNDS,
        min_participants=chance.randint(2, max(2, sites // 2)),
        noise=noise,
        skewed=chance.random() < 0.5,
        schedule=tuple(sorted(schedule, key=lambda fault: fault.at)),
        peace=peace,
        down_for_good=down,
        way=_way(seed, sites),
        faulty_sites=faulty,
    )


def _scarce_proofs(seed: int) -> str:
    """Drawn apart, as is the way."""
    apart = random.Random(f"proofs {seed}")
    return apart.choice(("Scale", "Challenge", "Proof")) if apart.random() < 0.2 else ""


def _way(seed: int, sites: int) -> str:
    """How updates get into the sum. Drawn apart, so that older seeds stay what they were.

    A robust rule needs four sites, and is drawn where every majority has as many.
    """
    drawn = random.Random(f"way {seed}").random()
    if drawn < 0.3:
        return "masking"
    return "norm" if drawn < 0.6 and sites == 7 else "ckks"


def _fault(chance: random.Random, names: str, peace: float) -> Fault:
    at, site = chance.uniform(0.0, peace), chance.choice(names)
    for_s = chance.choice((1.0, 5.0, 20.0, 60.0)) * chance.random()
    kind = chance.choices((Crash, Cut, Slow, Failing, Unwilling, Stop), weights=(8, 5, 2, 2, 1, 1))[
        0
    ]
    if kind is Crash:
        long = chance.random() < 0.2
        down_s = (
            chance.uniform(100.0, 300.0)
            if long
            else chance.choice((1.0, 10.0, 40.0)) * chance.random()
        )
        return Crash(at, site, chance.randint(0, 5), chance.random() < 0.7, down_s)
    if kind is Cut:
        return Cut(at, for_s, _links(chance, names, site))
    if kind is Slow:
        return Slow(at, for_s, site, chance.choice((3.0, 10.0, 40.0)))
    if kind is Failing:
        phase = chance.choice(("key", "train", "encrypt", "aggregate", "apply"))
        return Failing(at, for_s, site, phase)
    if kind is Unwilling:
        return Unwilling(at, for_s, site)
    return Stop(at, site, chance.choice(names), chance.uniform(1.0, 50.0))


def _links(chance: random.Random, names: str, site: str) -> tuple[tuple[str, str], ...]:
    """One link one way, one site cut off (perhaps one way), or two sides."""
    kind = chance.choice(("link", "site", "deaf", "mute", "sides"))
    others = [name for name in names if name != site]
    if kind == "link":
        return ((site, chance.choice(others)),)
    mute = [(site, other) for other in others]
    deaf = [(other, site) for other in others]
    if kind in ("mute", "deaf"):
        return tuple(mute if kind == "mute" else deaf)
    if kind == "site":
        return tuple(mute + deaf)
    side = set(chance.sample(names, len(names) // 2))
    pairs = [(a, b) for a, b in combinations(names, 2) if (a in side) != (b in side)]
    return tuple(pairs + [(b, a) for a, b in pairs])


def _changes(chance: random.Random, names: str, peace: float) -> list[Fault]:
    """At most a few; the run itself sees to it that each one is in force before the next."""
    candidates = [*names, string.ascii_lowercase[len(names)]]
    return [
        Change(chance.uniform(0.0, peace), chance.choice(candidates), chance.uniform(0.0, 60.0))
        for _ in range(chance.randint(1, 3))
    ]


# ---- playing ---------------------------------------------------------------------


@dataclass
class Play:
    """A scenario under way."""

    scenario: Scenario
    world: World
    _next_wish: float = 0.0
    _strange: int = 0
    _stopped: bool = False

    def corrupt(self) -> None:
        """From now on the scenario's liar lies."""
        world, liar = self.world, self.scenario.liar
        if not liar:
            return
        lies = random.Random(f"lies {self.scenario.seed}")
        world.make_liar(liar, lies)
        if self.scenario.way != "norm":  # by a robust rule's weights, those of everybody are known
            world.examples[liar] = lies.choice((1, 100, 500, 10**6))
            world.set_willing(liar, willing=True)

    def arrange(self) -> None:
        world = self.world
        world.train(world.random.choice(sorted(world.disks)), self.scenario.rounds)
        for fault in self.scenario.schedule:
            if fault.at < self.scenario.peace:  # of a shrunken one they may be later
                world.at(fault.at, self._happen, fault)

    def _happen(self, fault: Fault) -> None:
        world = self.world
        match fault:
            case Crash(_, site, after, writing, down_s):
                world.doom(site, after, down_s, writing=writing)
            case Cut(_, for_s, links):
                world.cut(links)
                world.at(world.now + for_s, world.heal, links)
            case Slow(_, for_s, site, factor):
                world.slowness[site] = factor
                world.at(world.now + for_s, self._fast, site)
            case Failing(_, for_s, site, phase):
                fails = (site, _STEPS[self.scenario.way].get(phase, phase))
                world.failing.add(fails)
                world.at(world.now + for_s, world.failing.discard, fails)
            case Unwilling(_, for_s, site):
                world.set_willing(site, willing=False)
                world.at(world.now + for_s, self._willing, site)
            case Stop(_, site, starter, pause_s):
                world.stop(site)
                world.at(world.now + pause_s, world.train, starter, self.scenario.rounds)
            case Restore(_, site, writes, down_s):
                world.restore(site, writes)
                world.at(world.now + down_s, world.start, site)
            case Change(_, site, spread_s):
                self.change(site, spread_s)

    def _fast(self, site: str) -> None:
        self.world.slowness.pop(site, None)

    def _willing(self, site: str) -> None:
        self.world.set_willing(site, willing=True)

    def change(self, site: str, spread_s: float) -> None:
        """The next manifest differs by one site, and the last one has committed a round."""
        world = self.world
        newest = max(world.manifests.values(), key=lambda manifest: manifest.version)
        head = max(world.disks.values(), key=lambda disk: disk.durable.head_round)
        last = head.commits.get(head.durable.head_round)
        in_use = last.certificate.body.manifest_version if last else 1
        everywhere = all(
            world.installed[name].version == newest.version for name in newest.enabled_ids
        )
        known = {entry.id: entry for entry in newest.sites}
        entry = known.get(site, ManifestSite(site, f"{site}:1", False))
        known[site] = replace(entry, enabled=not entry.enabled)
        enabled = [name for name, entry in known.items() if entry.enabled]
        if in_use != newest.version or not everywhere or len(enabled) < 3:
            return
        version = newest.version + 1
        sites = tuple(known[name] for name in sorted(known))
        faulty = newest.faulty_sites
        manifest = FederationManifest(world.federation, version, sites, faulty)
        world.manifests[version] = manifest
        if site not in world.disks:
            world.installed[site] = manifest
            world.add(site)
        for name in sorted(world.disks):
            delay = world.random.uniform(0.0, spread_s)
            world.at(world.now + delay, world.install, name, manifest)

    # ---- after the faults ------------------------------------------------------------

    def make_peace(self) -> None:
        """All that is broken is repaired, but for the sites that stay down."""
        world = self.world
        world.faults = Faults()
        world.slowness.clear()
        world.failing.clear()
        world.blocked.clear()
        newest = max(world.manifests.values(), key=lambda manifest: manifest.version)
        for name in sorted(world.disks):
            if name in self.scenario.down_for_good:
                world.crash(name)
            else:
                world.spare(name)
                world.start(name)
                if world.installed[name] is not newest:
                    world.install(name, newest)
                world.set_willing(name, willing=True)

    def must_commit(self) -> None:
        """From peace on: a round within so many attempts, and so on to the last."""
        world = self.world
        newest = max(world.manifests.values(), key=lambda manifest: manifest.version)
        liar = self.scenario.liar
        up = [name for name in newest.enabled_ids if name in world.machines and name != liar]
        began = world.now
        head = max(world.disks[name].durable.head_round for name in world.disks)
        target = max(head + 1, self.scenario.rounds)
        before = max(
            world.disks[name].durable.promised
            for name in world.disks
            if world.disks[name].durable.head_round == head
        )
        while min(world.machines[name].head_round for name in up) < target:
            world.run_for(1.0)
            claim(world.now < began + PATIENCE_S, f"stuck: {self._where()}")
            if world.now > self._next_wish:
                self._wish(up, target)
        allowed = ATTEMPTS + len(self.scenario.down_for_good) + LIED_ATTEMPTS * bool(liar)
        for round_ in range(head + 1, target + 1):
            attempt = world.certificate(round_).attempt
            wasted = attempt - (before + 1 if round_ == head + 1 else 0)
            few = wasted <= allowed or self._stopped
            claim(few, f"round {round_} took {wasted + 1} attempts in peace")

    def _wish(self, up: list[str], target: int) -> None:
        """People want their rounds: where most see no run under way, one of them starts it."""
        world = self.world
        self._next_wish = world.now + 10.0
        runs = [run for name in up if (run := world.machines[name].run) is not None]
        lied = any(run.requested_by == self.scenario.liar for run in runs)
        strange = lied or len({str(run) for run in runs}) > 1
        self._strange = self._strange + 1 if strange else 0
        if self._strange > STOPPED_AFTER:
            # Two of which none may take the other's place, or one that can't be carried.
            self._strange, self._stopped = 0, True
            world.stop(world.random.choice(up))
        idle = [name for name in up if not world.machines[name].busy]
        if len(idle) > len(up) // 2:
            missing = target - min(world.machines[name].head_round for name in up)
            world.train(idle[0], max(1, missing))

    def _where(self) -> str:
        return ", ".join(
            f"{name} {m.head_round}.{m.durable.promised}" for name, m in self.world.machines.items()
        )


def world_of(
    scenario: Scenario,
    machine: type[Protocol] = Protocol,
    *,
    record: bool = False,
    copies: bool = False,
) -> World:
    """The world that a scenario begins with."""
    world = World(
        sites=scenario.sites,
        seed=scenario.seed,
        faults=scenario.noise,
        min_participants=scenario.min_participants,
        machine=machine,
        skewed=scenario.skewed,
        record=record,
        copies=copies,
        mode=pb.MASKING if scenario.way == "masking" else pb.CKKS,
        faulty_sites=scenario.faulty_sites,
    )
    if scenario.way == "norm":
        world.training.robust = pb.ROBUST_NORM
        world.training.byzantine_sites = 1
    return world


def play_in(world: World, scenario: Scenario) -> World:
    """Play a scenario to its end in the world that it begins with. Raises Violation.

    A site whose state goes back is one of f that do not keep what they have promised.
    Three sites are safe and not live: with a liar among them nothing must be committed.
    """
    under_way = Play(scenario, world)
    under_way.corrupt()
    for fault in scenario.schedule:
        if isinstance(fault, Restore) and scenario.faulty_sites:
            # It counts towards f, which a liar is already.
            (world.watch.restored if scenario.liar else world.watch.liars).add(fault.site)
    under_way.arrange()
    world.run_for(scenario.peace)
    under_way.make_peace()
    if scenario.liar and scenario.sites == 3:
        world.run_for(600.0)
    else:
        under_way.must_commit()
    return world


def play(scenario: Scenario, machine: type[Protocol] = Protocol) -> World:
    """Play a scenario to its end, as fast as can be. Raises Violation."""
    return play_in(world_of(scenario, machine), scenario)
