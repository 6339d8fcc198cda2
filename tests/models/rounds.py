"""A round, without learning, arithmetic or networks: who promises, signs and votes for what.

Site 0 lies and the others keep the rules of peers/rounds/protocol.py, each of which can be left
out. Messages come in any order, or not at all. A seeded search, no proof: what it finds
without a rule is what the rule is for.

    >>> fork(seed=4, sites=4, rules=RULES)
    []
    >>> fork(seed=4, sites=4, rules=RULES - {"no vote below a promise"})
    [Version(of=(0, 1), digest=0), Version(of=(1, 1), digest=0)]
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

RULES = frozenset(
    {
        "restatements are certified, too",
        "no vote below a promise",
        "a vote counts as a promise",
        "one vote an attempt",
        "votes of one attempt count together",
        "locks are ranked by their latest certificate",
        "a sum has one version",
        "a bundle's highest lock is restated",
        "quorums share an honest site",
    }
)
LIAR = 0
ATTEMPTS = 8

Sum = tuple[int, int]  # the attempt that it was stated in, and which of its statements


class Version(NamedTuple):
    """What can be committed: a sum, and what was made of it."""

    of: Sum
    digest: int


class Lock(NamedTuple):
    """A version that was certified in an attempt, and proven."""

    attempt: int
    version: Version


class Proposal(NamedTuple):
    """A statement: a new sum, or a version again (then with its digest)."""

    attempt: int
    of: Sum
    digest: int | None


@dataclass
class Round:
    """One round of ``sites`` sites, of which ``faulty`` may lie and one does."""

    seed: int
    sites: int
    rules: frozenset[str]
    faulty: int = 1
    promised: dict[int, int] = field(default_factory=lambda: defaultdict(lambda: -1))
    promises: dict[int, dict[int, Lock | None]] = field(default_factory=lambda: defaultdict(dict))
    locks: dict[int, Lock] = field(default_factory=dict)
    shown: list[Lock] = field(default_factory=list)  # that the liar can show
    proposals: dict[int, list[Proposal]] = field(default_factory=lambda: defaultdict(list))
    signed: dict[tuple[int, int], Proposal] = field(default_factory=dict)
    certified: set[Proposal] = field(default_factory=set)
    made: dict[tuple[int, Sum], int] = field(default_factory=dict)
    voted: dict[tuple[int, int], Version] = field(default_factory=dict)
    votes: dict[object, set[int]] = field(default_factory=lambda: defaultdict(set))
    committed: dict[Version, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.honest = range(1, self.sites)
        half = self.faulty if "quorums share an honest site" in self.rules else 0
        self.quorum = (self.sites + half) // 2 + 1
        self.leads = [
            LIAR if self.chance.random() < 0.5 else self.chance.randrange(self.sites)
            for _ in range(ATTEMPTS)
        ]

    def _some(self, *, few: bool = False) -> list[int]:
        """Who hears of it: all, all but one, one or two; the more seldom, the more is open."""
        known = list(self.honest)
        self.chance.shuffle(known)
        most = len(known)
        return known[: self.chance.choice((1, 1, most - 1) if few else (most, most - 1, 1))]

    def play(self) -> list[Version]:
        """What is committed: more than one version is a fork."""
        order = [self.promise] + 3 * [self.propose, self.sign] + self.sites * [self.open]
        order += [self.vote]
        for attempt in range(ATTEMPTS):
            for step in order:
                if attempt and self.chance.random() < 0.1:  # something comes late
                    self.chance.choice(order)(self.chance.randrange(attempt))
                step(attempt)
            if len(self.committed) > 1:
                break
        return list(self.committed)

    def _keeps(self, rule: str) -> bool:
        return rule in self.rules

    def promise(self, attempt: int) -> None:
        """Some sites promise an attempt, and name their lock."""
        for site in self._some():
            if attempt > self.promised[site] and site not in self.promises[attempt]:
                self.promised[site] = max(self.promised[site], attempt)
                self.promises[attempt][site] = self.locks.get(site)

    def propose(self, attempt: int) -> None:
        """The coordinator bundles promises; one that lies does so several times."""
        lies = self.leads[attempt] == LIAR
        if len(self.proposals[attempt]) > (2 if lies else 0):
            return
        known = dict(self.promises[attempt])
        if lies or self.chance.random() < 0.8:
            earlier = [lock for lock in self.shown if lock.attempt < attempt]
            known[LIAR] = self.chance.choice([None, None, *earlier])
        if len(known) < self.quorum:
            return
        number = self.quorum if lies or self.chance.random() < 0.7 else len(known)
        sites = self.chance.sample(sorted(known), number)
        named = [lock for site in sites if (lock := known[site]) and lock.attempt < attempt]
        proposal = Proposal(attempt, (attempt, len(self.proposals[attempt]) + 1), None)
        if named and (self._keeps("a bundle's highest lock is restated") or not lies):
            highest = max(map(self._rank, named))
            lock = self.chance.choice([lock for lock in named if self._rank(lock) == highest])
            proposal = Proposal(attempt, *lock.version)
        if proposal not in self.proposals[attempt]:
            self.proposals[attempt].append(proposal)
        if proposal.digest is not None and not self._keeps("restatements are certified, too"):
            self.certified.add(proposal)

    def _rank(self, lock: Lock) -> int:
        latest = self._keeps("locks are ranked by their latest certificate")
        return lock.attempt if latest else lock.version.of[0]

    def sign(self, attempt: int) -> None:
        """Some sites sign a proposal, each one an attempt, if they have promised no later one."""
        if not self.proposals[attempt]:
            return
        proposal = self.chance.choice(self.proposals[attempt])
        for site in self._some():
            if self.promised[site] == attempt and site in self.promises[attempt]:
                self.signed.setdefault((site, attempt), proposal)
        signers = sum(one == proposal for one in self.signed.values())
        if signers + 1 >= self.quorum:  # the liar signs everything
            self.certified.add(proposal)

    def open(self, _attempt: int) -> None:
        """A site opens every certified sum; of one without a version each has its own."""
        site = self.chance.choice(self.honest)
        for proposal in sorted(self.certified, key=str):
            if proposal.digest is None and self.chance.random() < 0.7:
                own = 0 if self._keeps("a sum has one version") else self.chance.randrange(2)
                self.made.setdefault((site, proposal.of), own)

    def vote(self, attempt: int) -> None:
        """Some sites vote for a proven version of a certified proposal."""
        proposals = sorted((one for one in self.certified if one.attempt == attempt), key=str)
        if not proposals:
            return
        proposal = self.chance.choice(proposals)
        proven = {
            own
            for (_, of), own in self.made.items()
            if of == proposal.of and proposal.digest in (None, own) and self._proven(of, own)
        }
        if not proven:
            return
        version = Version(proposal.of, self.chance.choice(sorted(proven)))
        self.shown.append(Lock(attempt, version))
        for site in self._some(few=True):
            if self._votes(site, attempt, version):
                self._cast(site, attempt, version)
        for key, voters in self.votes.items():
            if len(voters) + 1 >= self.quorum:
                self.committed.setdefault(key if isinstance(key, Version) else key[1])  # type: ignore[index]

    def _proven(self, of: Sum, digest: int) -> bool:
        by = sum(one == (of, digest) for one in ((of_, d) for (_, of_), d in self.made.items()))
        return by + 1 >= self.faulty + 1

    def _votes(self, site: int, attempt: int, version: Version) -> bool:
        if self._keeps("no vote below a promise") and self.promised[site] > attempt:
            return False
        if self._keeps("one vote an attempt") and (site, attempt) in self.voted:
            return False
        if not self._keeps("a sum has one version"):
            return True
        return self.made.setdefault((site, version.of), version.digest) == version.digest

    def _cast(self, site: int, attempt: int, version: Version) -> None:
        self.voted[site, attempt] = version
        if self._keeps("a vote counts as a promise"):
            self.promised[site] = max(self.promised[site], attempt)
        known = self.locks.get(site)
        if known is None or known.attempt <= attempt:
            self.locks[site] = Lock(attempt, version)
        together = self._keeps("votes of one attempt count together")
        self.votes[(attempt, version) if together else version].add(site)


def fork(seed: int, sites: int, rules: frozenset[str]) -> list[Version]:
    """The versions of a seed's round if there are several; empty when there is no fork."""
    committed = Round(seed, sites, rules).play()
    return committed if len(committed) > 1 else []


# ---- the pacemaker ------------------------------------------------------------------------


def honest_attempts(
    seed: int, sites: int, *, paced: bool, dead: bool, hasty: bool = False, near: bool = True
) -> int:
    """How many attempts with an honest coordinator a quorum is in at once, in sixty patiences.

    Site 0 pre-empts the others by preparing attempts of its own, however far; or it is
    ``dead``. ``paced``: attempt by attempt, prepared or not, and further only where f + 1
    sites are. Otherwise a site that has waited long enough goes to the next attempt that
    somebody prepares, and waits on when nobody does. ``hasty``: of one honest site each
    attempt is over early. ``near``: a site goes on only when f + 1 others are where it is.
    """
    chance = random.Random(seed)
    honest = range(1, sites)
    quorum = (sites + 1) // 2 + 1
    at = dict.fromkeys(honest, 0)
    due = {site: 1 + chance.random() * 0.2 for site in honest}
    prepared: dict[int, float] = {}
    met: set[int] = set()

    def enter(site: int, attempt: int, now: float) -> None:
        patience = 0.1 if hasty and site == 1 else 1.0
        at[site], due[site] = attempt, now + patience + chance.random() * 0.2
        if sum(one == attempt for one in at.values()) >= quorum:
            met.add(attempt)
        if attempt % sites == site:
            prepared.setdefault(attempt, now)

    while min(due.values()) < 60:
        site = min(honest, key=lambda one: due[one])
        now, following = due[site], at[site] + 1
        if not paced:
            offers = [one for one, since in prepared.items() if one > at[site] and since < now]
            if not dead:
                offers.append((at[site] // sites + 1) * sites)
            if following % sites == site:
                offers.append(following)
            if not offers:
                due[site] = now + 1 + chance.random() * 0.2
                continue
            following = min(offers)
        close = sum(at[one] >= at[site] for one in honest if one != site) + (not dead)
        if near and close < 2:
            due[site] = now + 0.05
            continue
        enter(site, following, now)
        for other in honest:
            there = sum(at[one] >= following for one in honest) + (not dead)
            if at[other] < following and there >= 2 and chance.random() < 0.9:
                enter(other, following, now)
    return sum(attempt % sites != LIAR for attempt in met)
