"""Attacks on a masked attempt, by curious and by lying sites and coordinators.

Each is tried twice: as it is, where it must fail, and with the defence removed,
where it must succeed: an attack that never works shows nothing.
"""

from __future__ import annotations

import hashlib
import math
import random
import secrets
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from crypto.arrays import Int32
from crypto.identity.keys import IdentityError
from crypto.keystream import Words, add_masks
from crypto.masking import roster, shamir
from crypto.masking import site as masking
from crypto.masking.coordinator import Unmasking
from crypto.masking.roster import Roster, smallest_threshold
from crypto.masking.site import Attendance, Contributor, OpenedShares, SiteKeys
from crypto.quantize import CryptoError
from tests.crypto.masking.masked import Crowd, exact, random_inputs, sign, terms, verify

pytestmark = pytest.mark.attacks

VALUES = 400


def crowd_of(n: int, *, threshold: int = 0, attempt: int = 0) -> tuple[Crowd, dict[str, Int32]]:
    agreed = terms(n, values=VALUES, threshold=threshold, attempt=attempt)
    return Crowd(agreed), random_inputs(agreed, seed=n)


def known_roster(crowd: Crowd) -> Roster:
    assert crowd.roster is not None
    return crowd.roster


def as_integers(crowd: Crowd, words: Words) -> np.ndarray:
    return words.view(np.dtype(f"<i{crowd.terms.ring.word_bits // 8}")).astype(np.int64)


def opened_seed(crowd: Crowd, victim: str, shares: Mapping[str, bytes]) -> bytes:
    return combined(crowd, shares, lambda secret: known_roster(crowd).is_seed(victim, secret))


def combined(crowd: Crowd, shares: Mapping[str, bytes], fits: Callable[[bytes], bool]) -> bytes:
    """What a coordinator does with all the shares it has; CryptoError when they are too few."""
    threshold = crowd.terms.threshold
    first = dict(list(shares.items())[:threshold])
    secret = shamir.combine({crowd.terms.point(s): share for s, share in first.items()}, threshold)
    assert fits(secret)
    return secret


def without_masks(
    crowd: Crowd, victim: str, seed: bytes, masks_of: Iterable[tuple[list[bytes], list[bytes]]]
) -> np.ndarray:
    """The victim's masked input less its self mask and the pairwise masks that are known."""
    words = crowd.masked[victim].copy()
    add_masks(words, [], [known_roster(crowd).self_mask(victim, seed)])
    for plus, minus in masks_of:
        add_masks(words, minus, plus)  # what the victim added is subtracted
    return as_integers(crowd, words)


def pooled(crowd: Crowd, victim: str, colluders: list[str]) -> np.ndarray:
    """The victim's input, as far as the colluders and the coordinator get with all they have.

    The coordinator has every masked input and every opened share; a colluder its own
    keys and the shares that others dealt to it.
    """
    agreed = known_roster(crowd)
    shares = {site: opened.seeds[victim] for site, opened in crowd.opened.items()}
    seed = opened_seed(crowd, victim, shares)
    held = {site: crowd.contributors[site]._held[victim][1] for site in colluders}
    if len(held) >= crowd.terms.threshold:
        private = combined(crowd, held, lambda s: agreed.is_mask_key(victim, s))
        key = X25519PrivateKey.from_private_bytes(private)
        others = [site for site in agreed.sites if site != victim]
        return without_masks(crowd, victim, seed, [agreed.pair_masks(victim, key, others)])
    known = []
    for site in colluders:
        plus, minus = agreed.pair_masks(site, crowd.keys[site]._mask, [victim])
        known.append((minus, plus))  # what the colluder adds, the victim subtracts
    return without_masks(crowd, victim, seed, known)


# ---- t - 1 sites pool what they have -------------------------------------------------------


@pytest.mark.parametrize(("n", "threshold"), [(5, 4), (7, 4), (9, 5)])
def test_one_site_less_than_the_threshold_learns_nothing_of_an_input(
    n: int, threshold: int
) -> None:
    """The coordinator, itself a site, and the others of t - 1; with one more, all is open."""
    crowd, inputs = crowd_of(n, threshold=threshold)
    crowd.aggregate(inputs)
    *many, victim = crowd.terms.sites
    guess = pooled(crowd, victim, many[: threshold - 1])
    assert not np.array_equal(guess, inputs[victim])
    assert looks_uniform(guess - inputs[victim])
    # The defence removed: as many shares as the threshold.
    assert np.array_equal(pooled(crowd, victim, many[:threshold]), inputs[victim])


def test_without_pairwise_masks_the_coordinator_reads_everybody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Roster, "pair_masks", lambda *_: ([], []))
    crowd, inputs = crowd_of(5)
    crowd.aggregate(inputs)
    for victim in crowd.terms.sites:
        assert np.array_equal(pooled(crowd, victim, []), inputs[victim])


def looks_uniform(values: np.ndarray) -> bool:
    """Chi-square over the 256 values of each of the low 4 bytes; p < 1e-9 is not uniform."""
    octets = values.astype("<u4").view(np.uint8)
    counts = np.bincount(octets, minlength=256)
    statistic = float(((counts - octets.size / 256) ** 2 / (octets.size / 256)).sum())
    return statistic < 255 + 6 * math.sqrt(2 * 255) + 20


def test_a_masked_input_is_uniform_whatever_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extreme input, all values at the clip bound, leaves no trace; without masks it does."""

    def shown() -> np.ndarray:
        crowd = Crowd(terms(5, values=20_000))
        limit = crowd.terms.ring.limit
        inputs = {s: np.full(20_000, limit, dtype=np.int32) for s in crowd.terms.sites}
        crowd.until_masked(inputs, {})
        return crowd.masked["s00"]

    words = shown()
    assert looks_uniform(words)
    assert abs(np.corrcoef(words[1:], words[:-1])[0, 1]) < 6 / np.sqrt(20_000)
    monkeypatch.setattr(masking, "add_masks", lambda *_: None)
    assert not looks_uniform(shown())


# ---- the same view for two inputs ------------------------------------------------------------


class World:
    """One attempt with all its chance drawn from a seed, and one ideal mask.

    The mask of the pair (victim, other) is not ChaCha20's but a given vector, as in
    the proof (Bonawitz et al. 2017, §6, the hybrid in which the PRG's output is
    replaced by a uniform vector).
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str], mask: Words) -> None:
        chance = random.Random(17)
        generate = lambda: X25519PrivateKey.from_private_bytes(chance.randbytes(32))  # noqa: E731
        monkeypatch.setattr(masking, "X25519PrivateKey", SimpleNamespace(generate=generate))
        monkeypatch.setattr(secrets, "token_bytes", chance.randbytes)
        monkeypatch.setattr(secrets, "randbelow", chance.randrange)
        monkeypatch.setattr(masking, "add_masks", self._add_masks)
        self.crowd, _ = crowd_of(7)
        self._pair = pair
        self._mask = mask

    def _add_masks(self, words: Words, plus: list[bytes], minus: list[bytes]) -> None:
        victim, other = self._pair
        agreed = known_roster(self.crowd)
        (ideal,), _ = agreed.pair_masks(victim, self.crowd.keys[victim]._mask, [other])
        add_masks(words, [k for k in plus if k != ideal], [k for k in minus if k != ideal])
        if ideal in plus:
            words += self._mask
        if ideal in minus:
            words -= self._mask

    def view(self, inputs: Mapping[str, Int32], colluders: list[str]) -> dict[str, Any]:
        """All that the coordinator and the colluders see, the sum included."""
        outcome, total = self.crowd.aggregate(inputs, {"s06": 3})
        return {
            "public": self.crowd.advertisements,
            "relayed": self.crowd.sealed,
            "masked": {site: words.tobytes() for site, words in self.crowd.masked.items()},
            "opened": self.crowd.opened,
            "outcome": outcome,
            "sum": total.tobytes(),
            "held": {site: self.crowd.contributors[site]._held for site in colluders},
            "seeds": {site: self.crowd.keys[site]._seed for site in colluders},
            "keys": {site: self.crowd.keys[site]._mask.private_bytes_raw() for site in colluders},
            "inputs": {site: inputs[site].tobytes() for site in colluders},
        }


def two_worlds() -> tuple[dict[str, Int32], dict[str, Int32], Words, Words]:
    """Inputs of two worlds with one sum: the victim has more, the other one as much less.

    For each uniform mask of the pair in the first world there is exactly one in the
    second that gives the same words, and it is just as likely.
    """
    first = {site: values // 2 for site, values in crowd_of(7)[1].items()}
    moved = np.random.default_rng(3).integers(-9000, 9000, VALUES, dtype=np.int32)
    second = {**first, "s02": first["s02"] + moved, "s03": first["s03"] - moved}
    mask = np.random.default_rng(4).integers(0, 2**32, VALUES, dtype="<u4")
    return first, second, mask, mask - moved.astype("<u4")


def test_what_two_sites_and_a_coordinator_see_fits_every_input_of_the_sum() -> None:
    """n = 7, t = 4: three collude, s06 drops out; bit for bit they see the same."""
    first, second, mask, other_mask = two_worlds()
    colluders, pair = ["s00", "s04", "s05"], ("s02", "s03")
    survivors = [f"s0{number}" for number in range(6)]
    assert np.array_equal(exact(first, survivors), exact(second, survivors))
    assert not np.array_equal(first["s02"], second["s02"])
    views = []
    for inputs, pair_mask in ((first, mask), (second, other_mask)):
        with pytest.MonkeyPatch.context() as patched:
            views.append(World(patched, pair, pair_mask).view(inputs, colluders))
    assert views[0] == views[1]


def test_without_the_mask_of_that_pair_the_views_differ() -> None:
    first, second, mask, _ = two_worlds()
    views = []
    for inputs in (first, second):
        with pytest.MonkeyPatch.context() as patched:
            world = World(patched, ("s02", "s03"), np.zeros_like(mask))
            views.append(world.view(inputs, ["s00", "s04", "s05"]))
    assert {key for key in views[0] if views[0][key] != views[1][key]} == {"masked"}


# ---- masks from the public transcript --------------------------------------------------------


def from_transcript(crowd: Crowd, victim: str) -> list[np.ndarray]:
    """The victim's input by everything that can be derived from public keys alone."""
    agreed = known_roster(crowd)
    shares = {site: opened.seeds[victim] for site, opened in crowd.opened.items()}
    seed = opened_seed(crowd, victim, shares)
    own = agreed.advertisements[victim].mask_key
    results = []
    for recipe in (
        lambda theirs: hashlib.sha256(min(own, theirs) + max(own, theirs)).digest(),
        lambda theirs: min(own, theirs),
        lambda theirs: bytes(a ^ b for a, b in zip(own, theirs, strict=True)),
        lambda theirs: roster.agree(X25519PrivateKey.from_private_bytes(own), theirs, ""),
    ):
        masks: tuple[list[bytes], list[bytes]] = ([], [])
        for other in agreed.sites:
            if other != victim:
                pair = roster.text(min(victim, other)) + roster.text(max(victim, other))
                secret = recipe(agreed.advertisements[other].mask_key)
                key = roster.derive(secret, agreed.digest, roster._PAIR, pair)
                masks[victim > other].append(key)
        results.append(without_masks(crowd, victim, seed, [masks]))
    return results


def test_masks_cannot_be_recomputed_from_the_transcript(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd, inputs = crowd_of(5)
    crowd.aggregate(inputs)
    assert all(looks_uniform(guess - inputs["s03"]) for guess in from_transcript(crowd, "s03"))

    def public(private: X25519PrivateKey, theirs: bytes, _site: str) -> bytes:
        own = private.public_key().public_bytes_raw()
        return hashlib.sha256(min(own, theirs) + max(own, theirs)).digest()

    monkeypatch.setattr(roster, "agree", public)  # masks from public keys
    crowd, inputs = crowd_of(5)
    crowd.aggregate(inputs)
    assert np.array_equal(from_transcript(crowd, "s03")[0], inputs["s03"])


def test_each_use_of_a_secret_has_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commitment is public: derived like the self mask, it would be the self mask's key."""

    def shown_by_commitment() -> bool:
        crowd, inputs = crowd_of(3)
        crowd.aggregate(inputs)
        agreed = known_roster(crowd)
        public = agreed.advertisements["s01"].commitment
        return agreed.self_mask("s01", crowd.keys["s01"]._seed) == public

    assert not shown_by_commitment()
    monkeypatch.setattr(roster, "_SELF", roster._COMMITMENT)
    assert not shown_by_commitment()  # the salt differs as well: terms there, roster here
    monkeypatch.setattr(Roster, "digest", property(lambda self: self.terms.digest))
    assert shown_by_commitment()


# ---- replays -----------------------------------------------------------------------------------


def twins(monkeypatch: pytest.MonkeyPatch) -> list[Crowd]:
    """Attempts 0 and 1 of sites that, against the rules, use their keys in both."""
    crowds = []
    for attempt in (0, 1):
        chance = random.Random(5)
        generate = lambda c=chance: X25519PrivateKey.from_private_bytes(c.randbytes(32))  # noqa: E731
        with monkeypatch.context() as patched:
            patched.setattr(masking, "X25519PrivateKey", SimpleNamespace(generate=generate))
            patched.setattr(secrets, "token_bytes", chance.randbytes)
            crowd, _ = crowd_of(4, attempt=attempt)
            crowd.advertise(crowd.terms.sites)
        crowd.deal(crowd.terms.sites)
        crowds.append(crowd)
    return crowds


def test_keys_of_another_attempt_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = twins(monkeypatch)
    with pytest.raises(IdentityError, match="not by s00"):
        Roster.of(new.terms, old.advertisements.values(), verify)
    # The defence removed: signatures over the keys alone.
    monkeypatch.setattr(roster, "advertised", lambda _terms, keys: keys.channel_key)
    replayed = [
        roster.Advertisement(
            *(one.site, one.channel_key, one.mask_key, one.commitment),
            sign(one.site, one.channel_key),
        )
        for one in old.advertisements.values()
    ]
    Roster.of(new.terms, replayed, verify)


def test_shares_of_another_attempt_do_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def replay() -> Contributor:
        old, new = twins(monkeypatch)
        return new.dealers["s00"].receive({s: old.sealed[s]["s00"] for s in ("s01", "s02", "s03")})

    with pytest.raises(CryptoError, match="do not open"):
        replay()
    monkeypatch.setattr(Roster, "digest", b"nothing of the attempt")
    replay()


def test_shares_opened_in_another_attempt_open_nothing_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are well-formed, so they are taken; then no secret fits its commitment."""

    def replay() -> np.ndarray:
        old, inputs = crowd_of(4)
        old.aggregate(inputs)
        new, _ = crowd_of(4, attempt=1)
        unmasking = new.until_masked(inputs, {})
        for opened in old.opened.values():
            unmasking.take(opened)
        return unmasking.finish()

    with pytest.raises(CryptoError, match="do not fit what it advertised"):
        replay()
    # The defence removed: garbage instead of a reason, found only because it is too large.
    monkeypatch.setattr(Roster, "is_seed", lambda *_: True)
    with pytest.raises(CryptoError, match="the unmasked sum was refused"):
        replay()


# ---- both secrets of one site --------------------------------------------------------------------


def laid_open(crowd: Crowd, victim: str, seeds: Any, mask_keys: Any) -> np.ndarray:
    """A victim's input from enough shares of both its secrets."""
    agreed = known_roster(crowd)
    seed = opened_seed(crowd, victim, seeds)
    private = combined(crowd, mask_keys, lambda s: agreed.is_mask_key(victim, s))
    key = X25519PrivateKey.from_private_bytes(private)
    others = [site for site in sorted(crowd.sealed) if site != victim]
    return without_masks(crowd, victim, seed, [agreed.pair_masks(victim, key, others)])


def masked_crowd(n: int, threshold: int = 0) -> tuple[Crowd, dict[str, Int32], Unmasking]:
    crowd, inputs = crowd_of(n, threshold=threshold)
    return crowd, inputs, crowd.until_masked(inputs, {})


def ask(crowd: Crowd, outcome: Attendance, asked: Iterable[str]) -> dict[str, OpenedShares]:
    """What these sites open, by site, when a coordinator says that this was certified."""
    return {site: crowd.contributors[site].open(outcome) for site in asked}


def test_both_secrets_in_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd, inputs, _ = masked_crowd(5)
    sites = crowd.terms.sites
    both = Attendance(sites, ("s02",))
    with pytest.raises(CryptoError, match="both secrets of s02"):
        ask(crowd, both, sites)
    monkeypatch.setattr(masking, "check_outcome", lambda *_: None)
    opened = ask(crowd, both, sites)
    seeds = {site: one.seeds["s02"] for site, one in opened.items()}
    keys = {site: one.mask_keys["s02"] for site, one in opened.items()}
    assert np.array_equal(laid_open(crowd, "s02", seeds, keys), inputs["s02"])


def test_both_secrets_in_two_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """First everybody is said to be in the sum, then the victim is said to have dropped out."""
    crowd, inputs, _ = masked_crowd(5)
    sites, rest = crowd.terms.sites, ("s00", "s01", "s03", "s04")
    first = ask(crowd, Attendance(sites, ()), sites)
    second = Attendance(rest, ("s02",))
    for site in rest:
        with pytest.raises(CryptoError, match="another outcome"):
            ask(crowd, second, [site])
    for site in rest:  # the defence removed: a site that does not remember
        monkeypatch.setattr(crowd.contributors[site], "_outcome", None)
    opened = ask(crowd, second, rest)
    seeds = {site: one.seeds["s02"] for site, one in first.items()}
    keys = {site: one.mask_keys["s02"] for site, one in opened.items()}
    assert np.array_equal(laid_open(crowd, "s02", seeds, keys), inputs["s02"])


def test_an_outcome_that_was_refused_is_not_the_one_that_counts() -> None:
    """Or a coordinator could make sites useless by a question that none of them answers."""
    crowd, _, _ = masked_crowd(5)
    sites = crowd.terms.sites
    for wrong in (Attendance(sites, ("s02",)), Attendance(sites[1:], ("s00",))):
        with pytest.raises(CryptoError):
            ask(crowd, wrong, ["s00"])
    assert set(ask(crowd, Attendance(sites, ()), ["s00"])["s00"].seeds) == set(sites)


# ---- a coordinator that lies about who dropped out ---------------------------------------------
#
# Sites ask for the certificate of a statement before they open anything, so that all open
# for one list: that is the protocol's, above what is tried here. These are sites that were
# told of different lists all the same, and what the threshold alone keeps from the liar.

LIAR = "s06"


def a_list_for_each() -> dict[str, Attendance]:
    """Seven sites: every honest site is told another list, with four survivors each.

    The liar (itself a site) thus gets, for each honest site but the victim s05,
    three shares of its mask key; the fourth is its own. The victim survives in all.
    """
    sites = [f"s0{number}" for number in range(7)]
    lists = {}
    for number in range(5):
        dropped = sorted(f"s0{(number + step) % 5}" for step in (1, 2, 3))
        lists[f"s0{number}"] = Attendance(
            tuple(s for s in sites if s not in dropped), tuple(dropped)
        )
    lists["s05"] = lists["s00"]
    return lists


def a_list_for_each_read(threshold: int) -> tuple[np.ndarray, Int32]:
    """What the liar makes of the victim's input with all that it was given; and that input."""
    crowd, inputs, _ = masked_crowd(7, threshold)
    opened = {site: ask(crowd, one, [site])[site] for site, one in a_list_for_each().items()}
    held = crowd.contributors[LIAR]._held
    seeds = {site: one.seeds["s05"] for site, one in opened.items()}
    seed = opened_seed(crowd, "s05", seeds)
    agreed, known = known_roster(crowd), []
    for other in ("s00", "s01", "s02", "s03", "s04"):
        shares = {s: one.mask_keys[other] for s, one in opened.items() if other in one.mask_keys}
        shares[LIAR] = held[other][1]
        private = combined(crowd, shares, lambda s, o=other: agreed.is_mask_key(o, s))  # type: ignore[misc]
        plus, minus = agreed.pair_masks(
            other, X25519PrivateKey.from_private_bytes(private), ["s05"]
        )
        known.append((minus, plus))
    plus, minus = agreed.pair_masks(LIAR, crowd.keys[LIAR]._mask, ["s05"])
    known.append((minus, plus))
    return without_masks(crowd, "s05", seed, known), inputs["s05"]


def test_a_list_for_each_site_opens_nothing_above_half_of_sites_and_liars() -> None:
    """t = 5 among seven: no list may name more than two as dropped out."""
    assert smallest_threshold(7, colluding=1) == 5
    with pytest.raises(CryptoError, match="4 sites are in the sum, at least 5 must be"):
        a_list_for_each_read(5)


def test_limit_who_opens_uncertified_is_read_under_a_threshold_of_half() -> None:
    """Why nothing is opened before the statement is certified: here each saw another list."""
    guess, truth = a_list_for_each_read(4)
    assert np.array_equal(guess, truth)


def two_lists(threshold: int) -> tuple[np.ndarray, Int32]:
    """Five sites, s04 lies: s00 and s01 hear that s00 is in the sum, s02 and s03 that it is not.

    What the liar makes of the victim's input, with its own shares of both secrets.
    """
    crowd, inputs, _ = masked_crowd(5, threshold)
    sites = crowd.terms.sites
    within = ask(crowd, Attendance(sites, ()), ("s00", "s01"))
    without = ask(crowd, Attendance(sites[1:], ("s00",)), ("s02", "s03"))
    held = crowd.contributors["s04"]._held["s00"]
    seeds = {**{s: one.seeds["s00"] for s, one in within.items()}, "s04": held[0]}
    keys = {**{s: one.mask_keys["s00"] for s, one in without.items()}, "s04": held[1]}
    return laid_open(crowd, "s00", seeds, keys), inputs["s00"]


def test_two_lists_need_a_threshold_above_half_of_sites_and_liars() -> None:
    """t > (n + f) / 2 (decision 0011): with t = 4 one liar among five gets neither secret ..."""
    assert smallest_threshold(5, colluding=1) == 4
    with pytest.raises(CryptoError, match="a secret comes from 4 shares, not 3"):
        two_lists(4)


def test_limit_at_the_smallest_threshold_a_lying_coordinating_site_wins() -> None:
    """... and with t = 3, which is meant for sites that follow the protocol, it reads an input."""
    guess, truth = two_lists(3)
    assert np.array_equal(guess, truth)


# ---- a coordinator that says what the sum is -----------------------------------------------------


def test_limit_a_coordinator_adds_to_a_sum_what_it_fixed_before_opening() -> None:
    """As it might have sent it for its own input. It can't choose it by what it then sees:
    the digest is certified before (tests/daemon/jobs/sums/test_masking.py has what comes after)."""
    crowd, inputs, unmasking = masked_crowd(5)
    assert crowd.total is not None
    crowd.open(unmasking, crowd.terms.sites)
    truth = exact(inputs, crowd.terms.sites)
    assert np.array_equal(unmasking.finish(), truth)
    crowd.total += np.uint32(3)
    changed = crowd.unmasking()
    for one in crowd.opened.values():
        changed.take(one)
    assert np.array_equal(changed.finish(), truth + 3)


# ---- keys of the coordinator's own, and masks used twice ---------------------------------------


def test_a_coordinator_cannot_put_its_own_key_in_a_sites_place() -> None:
    crowd, _ = crowd_of(4)
    crowd.advertise(crowd.terms.sites)
    keys = SiteKeys(crowd.terms, "s02")  # made by the coordinator, who cannot sign for s02
    forged = keys.advertisement(sign("s03", keys.payload))
    swapped = {**crowd.advertisements, "s02": forged}
    with pytest.raises(IdentityError, match="not by s02"):
        Roster.of(crowd.terms, swapped.values(), verify)
    # The defence removed: nobody looks at signatures. What is sealed for s02, it reads.
    deceived = Roster.of(crowd.terms, swapped.values(), lambda *_: None)
    _, sealed = crowd.keys["s00"].deal(deceived)
    dealer, _ = keys.deal(deceived)
    seed_share, _ = dealer._open("s00", sealed["s02"])
    assert len(seed_share) == shamir.SHARE_BYTES


def test_a_key_of_small_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With it, "shared" secrets are zeros, known to everybody."""
    crowd, _ = crowd_of(4)
    crowd.advertise(crowd.terms.sites)
    weak = roster.Advertisement("s02", bytes(32), (1).to_bytes(32, "little"), bytes(32), b"")
    weak = roster.Advertisement(
        *("s02", weak.channel_key, weak.mask_key, weak.commitment),
        sign("s02", roster.advertised(crowd.terms, weak)),
    )
    swapped = {**crowd.advertisements, "s02": weak}
    with pytest.raises(CryptoError, match="small order"):
        Roster.of(crowd.terms, swapped.values(), verify)
    monkeypatch.setattr(roster, "agree", lambda *_: bytes(32))  # what X25519 would return
    deceived = Roster.of(crowd.terms, swapped.values(), verify)
    (key,), _ = deceived.pair_masks("s01", crowd.keys["s01"]._mask, ["s02"])
    pair = roster.text("s01") + roster.text("s02")
    assert key == roster.derive(bytes(32), deceived.digest, roster._PAIR, pair)


def test_a_second_input_under_the_same_masks_would_show_the_difference() -> None:
    crowd, inputs, _ = masked_crowd(3)
    contributor, first = crowd.contributors["s00"], crowd.masked["s00"]
    with pytest.raises(CryptoError, match="hides one input and no second"):
        contributor.mask(inputs["s00"] // 2)
    keys = crowd.keys["s00"]
    contributor._secrets = (keys._mask, keys._seed)  # the defence removed
    second = contributor.mask(inputs["s00"] // 2)
    shown = as_integers(crowd, first - second)
    assert np.array_equal(shown, inputs["s00"] - inputs["s00"] // 2)


def test_no_two_masks_have_one_key() -> None:
    """Nonce and counter are zero for all: only the key tells masks apart, so each has its own."""
    crowd, inputs = crowd_of(6)
    seen: list[bytes] = []

    def watched(words: Words, plus: list[bytes], minus: list[bytes]) -> None:
        seen.extend([*plus, *minus])
        add_masks(words, plus, minus)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(masking, "add_masks", watched)
        crowd.aggregate(inputs)
    assert len(seen) == 6 * 6  # a self mask and five pairwise ones a site
    assert len(set(seen)) == 6 + 15  # each pairwise one at its two ends
