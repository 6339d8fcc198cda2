"""Double masking: the sum is exact whoever drops out, or the attempt fails with a reason."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import os
import random
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from crypto.arrays import Int32
from crypto.identity.keys import IdentityError
from crypto.identity.site import Identity
from crypto.keystream import MAX_VALUES
from crypto.masking.coordinator import MaskedSum, Unmasking
from crypto.masking.roster import Advertisement, Agreement, Roster, advertised, smallest_threshold
from crypto.masking.site import SEALED_BYTES, Attendance, Contributor, OpenedShares, SiteKeys
from crypto.quantize import CryptoError
from tests.crypto.masking.masked import Crowd, Relay, exact, random_inputs, sign, terms, verify
from tests.support.authority import Federation

# `make test` runs these; with HANSE_MASKING_CASES=10000 it takes a quarter of an hour or more.
CASES = int(os.environ.get("HANSE_MASKING_CASES", "120"))


# ---- whole attempts ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """One attempt: how many sites, how many of them leave before each of the five steps.

    Who leaves before step 4, the statement, is not there for step 5 either.
    """

    terms: Agreement
    seed: int
    leave: tuple[int, ...]
    extreme: str

    @property
    def gone(self) -> dict[str, int]:
        """Site -> the step from which it is not heard of."""
        order = list(self.terms.sites)
        random.Random(self.seed).shuffle(order)
        steps = [step for step, number in enumerate(self.leave, start=1) for _ in range(number)]
        return dict(zip(order, steps, strict=False))

    @property
    def inputs(self) -> dict[str, Any]:
        """At random, or all at the bounds that clipping leaves."""
        limit, shape = self.terms.ring.limit, self.terms.values
        if self.extreme == "random":
            return random_inputs(self.terms, self.seed)
        if self.extreme == "mixed":
            signs = np.random.default_rng(self.seed).choice([-limit, limit], (64, shape))
            return {s: signs[i].astype(np.int32) for i, s in enumerate(self.terms.sites)}
        value = limit if self.extreme == "top" else -limit
        return {site: np.full(shape, value, dtype=np.int32) for site in self.terms.sites}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n = draw(st.integers(2, 8) | st.integers(2, 16) | st.integers(2, 16) | st.integers(2, 64))
    threshold = draw(st.just(n // 2 + 1) | st.integers(n // 2 + 1, n))
    # Up to n - t leave; now and then more, which must fail the attempt.
    most = draw(st.just(n - threshold) | st.just(n - threshold) | st.just(n))
    leave = []
    for _ in range(5):
        leave.append(draw(st.integers(0, most)))
        most -= leave[-1]
    agreed = terms(
        n, bits=draw(st.integers(8, 24)), values=draw(st.integers(1, 40)), threshold=threshold
    )
    extreme = draw(st.sampled_from(["random", "mixed", "top", "bottom"]))
    order = draw(st.permutations(range(5)))
    return Case(agreed, draw(st.integers(0, 2**32)), tuple(leave[i] for i in order), extreme)


@pytest.mark.slow
@pytest.mark.timeout(max(300, 2 * CASES))
@settings(max_examples=CASES, deadline=None)
@given(cases())
@example(Case(terms(2), 1, (0, 0, 0, 0, 0), "top"))
@example(Case(terms(64, bits=24), 1, (6, 6, 6, 6, 7), "bottom"))
@example(Case(terms(64, bits=10), 1, (0, 0, 31, 0, 0), "mixed"))  # m = 16, all of it used
def test_the_sum_is_exact_up_to_n_minus_t_dropouts_and_fails_beyond(case: Case) -> None:
    crowd, gone = Crowd(case.terms), case.gone
    if len(gone) > len(case.terms.sites) - case.terms.threshold:
        with pytest.raises(CryptoError):
            crowd.aggregate(case.inputs, gone)
        return
    outcome, total = crowd.aggregate(case.inputs, gone)
    assert outcome.survivors == tuple(crowd.there(3, gone))
    assert outcome.dropouts == tuple(s for s in crowd.there(2, gone) if gone.get(s) == 3)
    assert total.dtype == np.dtype(f"<i{case.terms.ring.word_bits // 8}")
    assert np.array_equal(total, exact(case.inputs, outcome.survivors))


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_as_many_as_may_leave_at_each_step(step: int) -> None:
    agreed = terms(7)
    inputs, gone = random_inputs(agreed), {"s00": step, "s03": step, "s06": step}
    outcome, total = Crowd(agreed).aggregate(inputs, gone)
    assert np.array_equal(total, exact(inputs, outcome.survivors))
    assert len(outcome.survivors) == (4 if step <= 3 else 7)


@pytest.mark.parametrize(
    ("step", "refusal"),
    [
        (1, "3 sites have advertised keys, 4 are needed"),
        (2, "3 sites have shared their secrets, 4 are needed"),
        (3, "3 sites are in the sum, at least 4 must be"),
        (4, "3 sites have opened their shares, 4 are needed"),
        (5, "3 sites have opened their shares, 4 are needed"),
    ],
)
def test_one_more_at_any_step_fails_the_attempt_cleanly(step: int, refusal: str) -> None:
    agreed = terms(7)
    gone = {"s00": step, "s02": step, "s03": step, "s06": step}
    with pytest.raises(CryptoError, match=refusal):
        Crowd(agreed).aggregate(random_inputs(agreed), gone)


def test_a_whole_attempt_with_certificates(tmp_path: Path) -> None:
    federation = Federation.found(tmp_path, "s00", "s01", "s02")
    identities: Mapping[str, Identity] = {s: federation.identity(s) for s in terms(3).sites}

    def check(site: str, signature: bytes, payload: bytes) -> None:
        certificate = identities[site].certificate_der
        assert federation.trust.verify(certificate, signature, payload, at=None) == site

    agreed = terms(3)
    keys = {site: SiteKeys(agreed, site) for site in agreed.sites}
    signed = [k.advertisement(identities[s].sign(k.payload)) for s, k in keys.items()]
    roster = Roster.of(agreed, signed, check)
    swapped = dataclasses.replace(signed[0], signature=signed[1].signature)
    with pytest.raises(IdentityError, match="not by site"):
        Roster.of(agreed, [swapped, *signed[1:]], check)
    relay, dealers = Relay(roster), {}
    for site in agreed.sites:
        dealers[site], sealed = keys[site].deal(roster)
        relay.take(site, sealed)
    sites = {site: dealers[site].receive(shares) for site, shares in relay.close().items()}
    total, inputs = MaskedSum(roster, agreed.sites), random_inputs(agreed)
    for site in ("s00", "s02"):
        total.add(site, sites[site].mask(inputs[site]))
    unmasking = Unmasking(roster, *total.close())
    for site in ("s00", "s02"):
        unmasking.take(sites[site].open(unmasking.outcome))
    assert np.array_equal(unmasking.finish(), inputs["s00"].astype(np.int64) + inputs["s02"])


# ---- what is agreed on ------------------------------------------------------------------


def test_an_input_that_does_not_fit_is_refused_and_not_masked() -> None:
    crowd = Crowd(terms(3, bits=8, values=4))
    roster = crowd.advertise(crowd.terms.sites)
    crowd.receive(crowd.deal(roster.sites), roster.sites)
    contributor, good = crowd.contributors["s00"], np.array([127, -127, 0, 1], dtype=np.int32)
    least = np.full(4, np.iinfo(np.int32).min, dtype=np.int32)
    refused: list[Any] = [good[:3], good.astype(np.int64), good.reshape(2, 2), good + 1, good - 1]
    for bad in (*refused, least):
        with pytest.raises(CryptoError):
            contributor.mask(bad)
    contributor.mask(good)


def test_terms_that_protect_nothing_are_refused() -> None:
    good = terms(5)
    for change in (
        {"threshold": 2},  # two halves of 2 could open both secrets of the fifth
        {"threshold": 6},
        {"sites": ("s00",), "threshold": 1},
        {"sites": ("b", "a")},
        {"sites": ("a", "a", "b")},
        {"sites": ("A", "b", "c")},
        {"federation": "no federation"},
        {"plan_digest": b""},
        {"round": -1},
        {"attempt": 2**32},
        {"bits": 1},
        {"bits": 33},
        {"values": 0},
        {"values": MAX_VALUES + 1},
        {"sites": tuple(f"s{i:03}" for i in range(257)), "threshold": 200},
    ):
        with pytest.raises(CryptoError):
            dataclasses.replace(good, **change)
    with pytest.raises(CryptoError, match="no participant"):
        SiteKeys(good, "stranger")


def test_every_term_changes_the_digest() -> None:
    good = terms(5)
    others = [
        *(terms(4, threshold=3), terms(5, bits=12), terms(5, values=21), terms(5, threshold=4)),
        *(terms(5, round_=8), terms(5, attempt=1)),
        dataclasses.replace(good, federation="med2"),
        dataclasses.replace(good, plan_digest=bytes(32)),
    ]
    assert len({good.digest, *(one.digest for one in others)}) == 9


def test_thresholds() -> None:
    assert [smallest_threshold(n) for n in (2, 3, 4, 5, 64)] == [2, 2, 3, 3, 33]
    assert [smallest_threshold(n, 1) for n in (3, 4, 5, 7)] == [3, 3, 4, 5]


# ---- what a peer sends is checked -------------------------------------------------------

X25519_ONE = (1).to_bytes(32, "little")  # a point of order 4
NOT_CANONICAL = (2**255 - 19 + 9).to_bytes(32, "little")  # RFC 7748 would read it as 9


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"channel_key": bytes(32)}, "small order"),
        ({"mask_key": X25519_ONE}, "small order"),
        ({"mask_key": NOT_CANONICAL}, "no X25519 keys"),
        ({"channel_key": bytes(31)}, "no X25519 keys"),
        ({"mask_key": b""}, "no X25519 keys"),
        ({"commitment": bytes(33)}, "no X25519 keys"),
        ({"site": "stranger"}, "no participant"),
        ({"signature": bytes(81)}, "at most 80"),
    ],
)
def test_unsound_keys_are_refused(change: dict[str, Any], refusal: str) -> None:
    crowd = Crowd(terms(3))
    crowd.advertise(crowd.terms.sites)
    bad = dataclasses.replace(crowd.advertisements["s01"], **change)
    if "signature" not in change and "site" not in change:
        bad = signed(crowd.terms, bad)
    with pytest.raises(CryptoError, match=refusal):
        Roster.of(crowd.terms, [*crowd.advertisements.values(), bad], verify)


def signed(agreed: Agreement, advertisement: Advertisement) -> Advertisement:
    payload = advertised(agreed, advertisement)
    return dataclasses.replace(advertisement, signature=sign(advertisement.site, payload))


def test_a_key_that_two_sites_show_is_refused() -> None:
    crowd = Crowd(terms(3))
    crowd.advertise(crowd.terms.sites)
    first, second, third = crowd.advertisements.values()
    for copied in (
        dataclasses.replace(second, mask_key=first.mask_key),
        dataclasses.replace(second, channel_key=first.mask_key),
        dataclasses.replace(second, channel_key=second.mask_key),
    ):
        with pytest.raises(CryptoError, match="repeats a key"):
            Roster.of(crowd.terms, [first, signed(crowd.terms, copied), third], verify)
    with pytest.raises(CryptoError, match="comes twice"):
        Roster.of(crowd.terms, [first, second, first], verify)


def test_a_site_does_not_deal_for_a_roster_that_is_not_its_own() -> None:
    crowd, other = Crowd(terms(4)), Crowd(terms(4, attempt=1))
    crowd.advertise(crowd.terms.sites)
    foreign = other.advertise(other.terms.sites)
    keys = crowd.keys["s00"]
    lacking = Roster.of(crowd.terms, list(crowd.advertisements.values())[1:], verify)
    twin = SiteKeys(crowd.terms, "s00")
    swapped = {**crowd.advertisements, "s00": twin.advertisement(sign("s00", twin.payload))}
    for roster in (foreign, lacking, Roster.of(crowd.terms, swapped.values(), verify)):
        with pytest.raises(CryptoError, match="roster"):
            keys.deal(roster)
    assert crowd.roster is not None
    keys.deal(crowd.roster)
    with pytest.raises(CryptoError, match="dealt already"):
        keys.deal(crowd.roster)


def dealt(n: int = 4) -> tuple[Crowd, dict[str, dict[str, bytes]]]:
    crowd = Crowd(terms(n))
    roster = crowd.advertise(crowd.terms.sites)
    return crowd, crowd.deal(roster.sites)


def test_sealed_shares_have_one_size_and_fresh_bytes() -> None:
    crowd, _ = dealt()
    everything = [one for batch in crowd.sealed.values() for one in batch.values()]
    assert {len(one) for one in everything} == {SEALED_BYTES}
    assert len({one[:32] for one in everything}) == len(everything)


def test_shares_that_do_not_open_are_refused() -> None:
    crowd, relayed = dealt()
    dealer, good = crowd.dealers["s00"], relayed["s00"]
    flipped = bytearray(good["s01"])
    flipped[5] ^= 1
    for bad in (
        {**good, "s01": bytes(flipped)},
        {**good, "s01": good["s01"][:-1]},
        {**good, "s01": good["s02"]},
        {**good, "s01": relayed["s02"]["s01"]},  # sealed for another site
        {**good, "s01": relayed["s01"]["s00"]},  # sealed by this site
        {**good, "s00": good["s01"]},
        {**good, "stranger": good["s01"]},
        {"s01": good["s01"]},  # two of four, three are needed
        {},
    ):
        with pytest.raises(CryptoError):
            dealer.receive(bad)
    dealer.receive(good)
    with pytest.raises(CryptoError, match="received already"):
        dealer.receive(good)


def test_the_relay_takes_whole_batches_once() -> None:
    crowd, _ = dealt()
    assert crowd.roster is not None
    relay, batch = Relay(crowd.roster), crowd.sealed["s00"]
    for bad in (
        {},
        {k: v for k, v in batch.items() if k != "s01"},
        {**batch, "s00": bytes(SEALED_BYTES)},
        {**batch, "s01": bytes(SEALED_BYTES + 1)},
    ):
        with pytest.raises(CryptoError):
            relay.take("s00", bad)
    relay.take("s00", batch)
    for dealer in ("s00", "stranger"):
        with pytest.raises(CryptoError, match="has dealt already"):
            relay.take(dealer, batch)


def test_a_masked_input_is_added_once_whole_and_in_time() -> None:
    crowd = Crowd(terms(4))
    inputs = random_inputs(crowd.terms)
    roster = crowd.advertise(crowd.terms.sites)
    crowd.receive(crowd.deal(roster.sites), roster.sites)
    total = MaskedSum(roster, roster.sites)
    words = crowd.contributors["s00"].mask(inputs["s00"])
    for bad in (words[:-1], words.astype(np.uint64), words.view(np.int32), words.reshape(2, -1)):
        with pytest.raises(CryptoError, match="masked input of s00 has"):
            total.add("s00", bad)
    total.add("s00", words)
    for site in ("s00", "stranger"):
        with pytest.raises(CryptoError, match="is not due"):
            total.add(site, words)
    with pytest.raises(CryptoError, match="1 sites are in the sum"):
        total.close()
    for site in ("s01", "s02"):
        total.add(site, crowd.contributors[site].mask(inputs[site]))
    total.close()
    with pytest.raises(CryptoError, match="is not due"):
        total.add("s03", words)
    for length in (0, 79, 81):
        with pytest.raises(CryptoError, match="has 80 bytes"):
            crowd.terms.ring.parse(bytes(length), 20)


# ---- opening ----------------------------------------------------------------------------


def masked_crowd(n: int = 5, **gone: int) -> tuple[Crowd, Any, dict[str, Any]]:
    crowd = Crowd(terms(n))
    inputs = random_inputs(crowd.terms)
    return crowd, crowd.until_masked(inputs, gone), inputs


def test_an_outcome_that_is_not_of_this_attempt_is_refused() -> None:
    crowd, unmasking, _ = masked_crowd(5, s04=3)
    site: Contributor = crowd.contributors["s00"]
    site.open(unmasking.outcome)
    for survivors, dropouts, refusal in (
        (("s00", "s01", "s02", "s03"), ("s03", "s04"), "both secrets of s03"),
        (("s00", "s01", "s02", "s03"), (), "those that have shared"),
        (("s00", "s01", "s02", "s03", "s04"), ("s05",), "those that have shared"),
        (("s00", "s01"), ("s02", "s03", "s04"), "2 sites are in the sum"),
        (("s01", "s02", "s03"), ("s00", "s04"), "opens no sum that its own input is not in"),
        (("s01", "s00", "s02", "s03"), ("s04",), "each once, sorted"),
        (("s00", "s00", "s01", "s02", "s03"), ("s04",), "each once, sorted"),
        (("s00", "s01", "s02"), ("s03", "s04"), "another outcome"),
    ):
        with pytest.raises(CryptoError, match=refusal):
            site.open(Attendance(survivors, dropouts))


def test_an_outcome_that_nobody_could_have_opened_is_not_unmasked() -> None:
    """At a site that opens no shares itself, and so has nobody's list but the stated one."""
    crowd, _, _ = masked_crowd(5, s04=3)
    assert crowd.roster is not None
    assert crowd.total is not None
    four, good = ("s00", "s01", "s02", "s03"), crowd.total
    for survivors, dropouts, total, refusal in (
        (four, ("s03", "s04"), good, "both secrets of s03"),
        (four, ("s04", "s05"), good, "s05 has no keys in this attempt"),
        (("s00", "s01"), ("s02", "s03", "s04"), good, "2 sites are in the sum"),
        (("s00", "s00", "s01", "s02"), (), good, "each once, sorted"),
        (four, ("s04",), good[:-1], "the masked sum has"),
        (four, ("s04",), good.astype(np.uint64), "the masked sum has"),
    ):
        with pytest.raises(CryptoError, match=refusal):
            Unmasking(crowd.roster, Attendance(survivors, dropouts), total)


def test_a_site_whose_input_is_not_masked_opens_nothing() -> None:
    crowd, relayed = dealt()
    crowd.receive(relayed, crowd.terms.sites)
    with pytest.raises(CryptoError, match="its own input is not in"):
        crowd.contributors["s00"].open(Attendance(crowd.terms.sites, ()))


def test_the_same_request_again_gets_the_same_answer() -> None:
    crowd, unmasking, _ = masked_crowd(5, s04=3)
    site = crowd.contributors["s00"]
    first = site.open(unmasking.outcome)
    assert site.open(unmasking.outcome) == first
    assert set(first.seeds) == set(unmasking.outcome.survivors)
    assert set(first.mask_keys) == {"s04"}
    assert "seeds" not in repr(first)


def test_shares_that_are_not_those_asked_for_are_refused() -> None:
    crowd, unmasking, _ = masked_crowd(5, s04=3)
    good = crowd.contributors["s00"].open(unmasking.outcome)
    share = good.seeds["s01"]
    for bad in (
        dataclasses.replace(good, seeds={k: v for k, v in good.seeds.items() if k != "s01"}),
        dataclasses.replace(good, seeds={**good.seeds, "s04": share}),
        dataclasses.replace(good, mask_keys={}),
        dataclasses.replace(good, mask_keys={**good.mask_keys, "s01": share}),
        dataclasses.replace(good, seeds={**good.seeds, "s01": share[1:]}),
        dataclasses.replace(good, seeds={**good.seeds, "s01": b"\xff" * 33}),
        dataclasses.replace(good, site="s04"),
        dataclasses.replace(good, site="stranger"),
    ):
        with pytest.raises(CryptoError):
            unmasking.take(bad)
    unmasking.take(good)
    with pytest.raises(CryptoError, match="or they came"):
        unmasking.take(good)


def wrong(share: bytes) -> bytes:
    """Of no two shares alike: one bit in each of two can cancel when they are put together."""
    return share[:8] + hashlib.sha256(share).digest()[:8] + share[16:]


def spoiled(opened: OpenedShares, kind: str) -> OpenedShares:
    if kind == "seeds":
        return dataclasses.replace(opened, seeds={k: wrong(v) for k, v in opened.seeds.items()})
    return dataclasses.replace(opened, mask_keys={k: wrong(v) for k, v in opened.mask_keys.items()})


@pytest.mark.parametrize("kind", ["seeds", "mask_keys"])
@pytest.mark.parametrize("liar", ["s00", "s01", "s02", "s03"])
def test_a_wrong_share_is_found_and_worked_around(kind: str, liar: str) -> None:
    crowd, unmasking, inputs = masked_crowd(5, s04=3)
    for site in unmasking.outcome.survivors:
        opened = crowd.contributors[site].open(unmasking.outcome)
        unmasking.take(spoiled(opened, kind) if site == liar else opened)
    assert np.array_equal(unmasking.finish(), exact(inputs, unmasking.outcome.survivors))
    owners = unmasking.outcome.survivors if kind == "seeds" else ("s04",)
    # The last one's shares were not needed, so nobody looked.
    assert unmasking.unfit == ([] if liar == "s03" else [(liar, owner) for owner in owners])


def test_whichever_shares_a_site_was_given_it_gets_the_same_sum_or_none() -> None:
    """A coordinator that passes on other shares, and spoils others, to each site."""
    crowd, first, inputs = masked_crowd(5, s04=3)
    outcome = first.outcome
    opened = {site: crowd.contributors[site].open(outcome) for site in outcome.survivors}
    expected, sums = exact(inputs, outcome.survivors), 0
    for passed_on in itertools.product((0, 1, 2), repeat=len(opened)):  # withheld, right, wrong
        unmasking = crowd.unmasking()
        for how, one in zip(passed_on, opened.values(), strict=True):
            if how:
                unmasking.take(one if how == 1 else spoiled(spoiled(one, "seeds"), "mask_keys"))
        try:
            total = unmasking.finish()
        except CryptoError:
            continue
        sums += 1
        assert np.array_equal(total, expected)
    # All four right; three, the fourth withheld or wrong: nine ways.
    assert sums == 9


@pytest.mark.parametrize("kind", ["seeds", "mask_keys"])
def test_without_a_share_to_spare_a_wrong_one_fails_the_attempt(kind: str) -> None:
    crowd, unmasking, _ = masked_crowd(5, s04=3)
    for site in ("s00", "s01", "s02"):
        opened = crowd.contributors[site].open(unmasking.outcome)
        unmasking.take(spoiled(opened, kind) if site == "s01" else opened)
    with pytest.raises(CryptoError, match="do not fit what it advertised"):
        unmasking.finish()


def test_an_input_beyond_the_bounds_is_found_in_the_sum() -> None:
    """A site that adds more than b bits can hold (in the ring it may add anything)."""
    crowd = Crowd(terms(3, bits=8))
    inputs = random_inputs(crowd.terms)
    roster = crowd.advertise(crowd.terms.sites)
    crowd.receive(crowd.deal(roster.sites), roster.sites)
    total = MaskedSum(roster, roster.sites)
    for site in roster.sites:
        words = crowd.contributors[site].mask(inputs[site])
        total.add(site, words + np.uint16(4000) if site == "s01" else words)
    unmasking = Unmasking(roster, *total.close())
    crowd.open(unmasking, roster.sites)
    masked = unmasking._total.copy()
    with pytest.raises(CryptoError, match="the unmasked sum was refused"):
        unmasking.finish()
    assert np.array_equal(unmasking._total, masked)


# ---- a coordinator's memory ------------------------------------------------------------


def test_a_sum_from_files_is_opened_in_the_memory_of_one_update() -> None:
    crowd = Crowd(terms(3, values=1_000_000))
    inputs = random_inputs(crowd.terms)
    update, roster = crowd.terms.ring.size(1_000_000), crowd.advertise(crowd.terms.sites)
    crowd.receive(crowd.deal(roster.sites), roster.sites)
    masked = {s: io.BytesIO(crowd.contributors[s].mask(inputs[s]).tobytes()) for s in inputs}
    tracemalloc.start()
    try:
        total = MaskedSum(roster, roster.sites)
        for site, file in masked.items():
            total.add_from(site, file)
        unmasking = Unmasking(roster, *total.close())
        crowd.open(unmasking, roster.sites)
        opened = unmasking.finish()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * update
    assert np.array_equal(opened, exact(inputs, roster.sites))
    assert unmasking.finish() is opened  # and masks are not taken off twice
    with pytest.raises(ValueError, match="read-only"):
        opened += 1


@pytest.mark.parametrize("change", [-1, 1, -(1 << 20)])
def test_an_input_of_another_length_leaves_the_sum_as_it_was(change: int) -> None:
    crowd, total, inputs, masked = sum_from_files()
    total.add_from("s00", io.BytesIO(masked["s00"]))
    wrong = masked["s01"][:change] if change < 0 else masked["s01"] + b"0"
    with pytest.raises(CryptoError, match=f"of s01 has {len(wrong)} bytes"):
        total.add_from("s01", io.BytesIO(wrong))
    with pytest.raises(CryptoError, match=r"s00.*not due"):
        total.add_from("s00", io.BytesIO(masked["s00"]))
    for site in ("s01", "s02"):
        total.add_from(site, io.BytesIO(masked[site]))
    assert crowd.roster is not None
    unmasking = Unmasking(crowd.roster, *total.close())
    crowd.open(unmasking, crowd.terms.sites)
    assert np.array_equal(unmasking.finish(), exact(inputs, crowd.terms.sites))


def test_a_file_that_ends_while_it_is_added_leaves_no_sum_behind() -> None:
    class Shrinking(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(size) if self.tell() == 0 else b""

    _, total, _, masked = sum_from_files()
    for site in ("s00", "s01"):
        total.add_from(site, io.BytesIO(masked[site]))
    with pytest.raises(CryptoError, match="bytes, not 0"):
        total.add_from("s02", Shrinking(masked["s02"]))
    with pytest.raises(CryptoError, match="0 sites are in the sum"):
        total.close()
    with pytest.raises(CryptoError, match="too late"):
        total.add_from("s02", io.BytesIO(masked["s02"]))


def sum_from_files() -> tuple[Crowd, MaskedSum, dict[str, Int32], dict[str, bytes]]:
    """Three sites' masked inputs, of more than one piece each, and a sum without any."""
    crowd = Crowd(terms(3, values=300_000))
    inputs, roster = random_inputs(crowd.terms), crowd.advertise(crowd.terms.sites)
    crowd.receive(crowd.deal(roster.sites), roster.sites)
    masked = {s: crowd.contributors[s].mask(inputs[s]).tobytes() for s in inputs}
    return crowd, MaskedSum(roster, roster.sites), inputs, masked
