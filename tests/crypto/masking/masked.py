"""A masked attempt from the first key to the sum, its sites in one process.

    >>> crowd = Crowd(terms(5, bits=16, values=100))
    >>> crowd.aggregate(inputs, gone={"s02": 3}).total       # s02 sends no masked input

A site's signature is stood in for by a digest with its name in it, which costs
nothing; one test in test_masking.py goes the same way with real certificates. Step 4,
the statement that a quorum signs, is the protocol's: here all sites are told the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from crypto.arrays import Int32, Int64
from crypto.identity.keys import IdentityError
from crypto.keystream import Words
from crypto.masking.coordinator import MaskedSum, Unmasking
from crypto.masking.roster import Advertisement, Agreement, Roster, smallest_threshold
from crypto.masking.site import (
    SEALED_BYTES,
    Attendance,
    Contributor,
    Dealer,
    OpenedShares,
    SiteKeys,
)
from crypto.quantize import CryptoError

PLAN = hashlib.sha256(b"plan").digest()
NEVER = 9
NOTHING = Attendance((), ())


def sign(site: str, payload: bytes) -> bytes:
    return hashlib.sha256(site.encode() + b" signs " + payload).digest()


def verify(site: str, signature: bytes, payload: bytes) -> None:
    if signature != sign(site, payload):
        raise IdentityError(f"the signature is not by {site}")


def terms(
    sites: int,
    *,
    bits: int = 16,
    values: int = 20,
    threshold: int = 0,
    round_: int = 7,
    attempt: int = 0,
) -> Agreement:
    return Agreement(
        federation="med",
        round=round_,
        attempt=attempt,
        plan_digest=PLAN,
        sites=tuple(f"s{number:02}" for number in range(sites)),
        threshold=threshold or smallest_threshold(sites),
        bits=bits,
        values=values,
    )


def random_inputs(agreed: Agreement, seed: int = 1) -> dict[str, Int32]:
    chance, limit = np.random.default_rng(seed), agreed.ring.limit
    return {
        site: chance.integers(-limit, limit, agreed.values, dtype=np.int32, endpoint=True)
        for site in agreed.sites
    }


def exact(inputs: Mapping[str, Int32], sites: Iterable[str]) -> Int64:
    total: Int64 = np.sum([inputs[site] for site in sites], axis=0, dtype=np.int64)
    return total


class Relay:
    """Sealed shares on their way from each site to each other one, in one process.

    In the product each is an item of a message (peers/attempts/masking.py).
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._sealed: dict[str, dict[str, bytes]] = {}

    def take(self, dealer: str, sealed: Mapping[str, bytes]) -> None:
        """One site's shares, for all others of the roster.

        Raises CryptoError when they are not exactly that, or came before.
        """
        if dealer not in self._roster.sites or dealer in self._sealed:
            raise CryptoError(f"{dealer!r} has no keys in this attempt, or has dealt already")
        if set(sealed) != set(self._roster.sites) - {dealer}:
            raise CryptoError(f"{dealer} has not dealt shares to every other site")
        if any(len(one) != SEALED_BYTES for one in sealed.values()):
            raise CryptoError(f"sealed shares have {SEALED_BYTES} bytes; not those of {dealer}")
        self._sealed[dealer] = dict(sealed)

    def close(self) -> dict[str, dict[str, bytes]]:
        """For each sharer what the other sharers sealed for it, by sender.

        Raises CryptoError when they are fewer than the threshold.
        """
        if len(self._sealed) < self._roster.terms.threshold:
            raise CryptoError(
                f"{len(self._sealed)} sites have shared their secrets, "
                f"{self._roster.terms.threshold} are needed: the attempt must fail"
            )
        return {
            to: {sender: sealed[to] for sender, sealed in self._sealed.items() if sender != to}
            for to in sorted(self._sealed)
        }


@dataclass
class Crowd:
    """All sites and the coordinator. Each step keeps what it made, for tests to look at.

    ``total``: the masked sum that was closed; a site's `Unmasking` is of a copy.
    """

    terms: Agreement
    keys: dict[str, SiteKeys] = field(default_factory=dict)
    advertisements: dict[str, Advertisement] = field(default_factory=dict)
    dealers: dict[str, Dealer] = field(default_factory=dict)
    sealed: dict[str, dict[str, bytes]] = field(default_factory=dict)
    contributors: dict[str, Contributor] = field(default_factory=dict)
    masked: dict[str, Words] = field(default_factory=dict)
    opened: dict[str, OpenedShares] = field(default_factory=dict)
    roster: Roster | None = None
    outcome: Attendance = NOTHING
    total: Words | None = None

    def advertise(self, sites: Iterable[str]) -> Roster:
        for site in sites:
            keys = self.keys[site] = SiteKeys(self.terms, site)
            self.advertisements[site] = keys.advertisement(sign(site, keys.payload))
        # Every site makes the same roster of what the coordinator relays.
        self.roster = Roster.of(self.terms, self.advertisements.values(), verify)
        return self.roster

    def deal(self, sites: Iterable[str]) -> dict[str, dict[str, bytes]]:
        assert self.roster is not None
        relay = Relay(self.roster)
        for site in sites:
            self.dealers[site], self.sealed[site] = self.keys[site].deal(self.roster)
            relay.take(site, self.sealed[site])
        return relay.close()

    def receive(self, relayed: Mapping[str, Mapping[str, bytes]], sites: Iterable[str]) -> None:
        for site in sites:
            self.contributors[site] = self.dealers[site].receive(relayed[site])

    def sum_up(self, inputs: Mapping[str, Int32], sites: Iterable[str]) -> Unmasking:
        assert self.roster is not None
        total = MaskedSum(self.roster, tuple(sorted(self.sealed)))
        for site in sites:
            self.masked[site] = self.contributors[site].mask(inputs[site])
            total.add(
                site, self.roster.terms.ring.parse(self.masked[site].tobytes(), len(inputs[site]))
            )
        self.outcome, self.total = total.close()
        return self.unmasking()

    def unmasking(self) -> Unmasking:
        """A site's own, of the sum that all were sent."""
        assert self.roster is not None
        assert self.total is not None
        return Unmasking(self.roster, self.outcome, self.total.copy())

    def open(self, unmasking: Unmasking, sites: Iterable[str]) -> None:
        for site in sites:
            self.opened[site] = self.contributors[site].open(unmasking.outcome)
            unmasking.take(self.opened[site])

    def until_masked(self, inputs: Mapping[str, Int32], gone: Mapping[str, int]) -> Unmasking:
        """Steps 1 to 3; ``gone``: the step from which a site is not heard of any more."""
        self.advertise(self.there(1, gone))
        relayed = self.deal(self.there(2, gone))
        self.receive(relayed, self.there(3, gone))
        return self.sum_up(inputs, self.there(3, gone))

    def aggregate(
        self, inputs: Mapping[str, Int32], gone: Mapping[str, int] | None = None
    ) -> tuple[Attendance, Int64]:
        gone = gone or {}
        unmasking = self.until_masked(inputs, gone)
        self.open(unmasking, self.there(5, gone))
        return unmasking.outcome, unmasking.finish()

    def there(self, step: int, gone: Mapping[str, int]) -> list[str]:
        return [site for site in self.terms.sites if gone.get(site, NEVER) > step]
