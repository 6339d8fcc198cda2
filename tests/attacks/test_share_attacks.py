"""Malformed, foreign and misdirected shares in a masked attempt.

Each is tried twice: as it is, where it must fail, and with the defence removed, where
it must succeed. Replays of shares are among tests/attacks/test_masking_attacks.py.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from crypto.arrays import Int32
from crypto.identity.keys import IdentityError
from crypto.masking import roster, shamir
from crypto.masking import site as masking
from crypto.masking.coordinator import Unmasking
from crypto.masking.roster import Roster
from crypto.masking.site import Contributor, OpenedShares, SiteKeys
from crypto.quantize import CryptoError
from tests.attacks.programs.planting import without
from tests.crypto.masking.masked import Crowd, exact, random_inputs, sign, terms, verify

pytestmark = pytest.mark.attacks

TERMS = terms(5)  # three shares open a secret


def dealt() -> tuple[Crowd, dict[str, dict[str, bytes]]]:
    """A crowd whose shares are at the coordinator: for each site, by sender."""
    crowd = Crowd(TERMS)
    sites = crowd.advertise(TERMS.sites).sites
    return crowd, {site: dict(sealed) for site, sealed in crowd.deal(sites).items()}


def closed() -> tuple[Crowd, Unmasking, dict[str, Int32]]:
    crowd, inputs = Crowd(TERMS), random_inputs(TERMS)
    return crowd, crowd.until_masked(inputs, {}), inputs


def answer(crowd: Crowd, unmasking: Unmasking, site: str) -> OpenedShares:
    return crowd.contributors[site].open(unmasking.outcome)


# ---- malformed --------------------------------------------------------------------------------


def test_a_share_has_one_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """x + p for x: the same share to whoever reduces it, another one to whoever compares."""
    crowd, unmasking, inputs = closed()
    opened = [answer(crowd, unmasking, site) for site in ("s00", "s01", "s02")]
    beyond = {
        owner: (int.from_bytes(share, "big") + shamir.PRIME).to_bytes(33, "big")
        for owner, share in opened[0].seeds.items()
    }
    other = dataclasses.replace(opened[0], seeds=beyond)
    with pytest.raises(CryptoError, match="not a canonical element of the field"):
        unmasking.take(other)
    without(monkeypatch, shamir, "parse", "if value >= PRIME:")
    for one in (other, *opened[1:]):
        unmasking.take(one)
    assert np.array_equal(unmasking.finish(), exact(inputs, TERMS.sites))


def test_a_share_at_nought(monkeypatch: pytest.MonkeyPatch) -> None:
    """The polynomial's value at 0 is the secret: whoever has, or names, that point has it all."""
    secret = bytes(range(32))
    shares = shamir.split(secret, 3, 5)
    assert secret not in [share[1:] for share in shares]
    chosen = {0: bytes(1) + b"\x5a" * 32, 1: shares[0], 2: shares[1]}
    with pytest.raises(CryptoError, match=r"points 1 \.\. 256"):
        shamir.combine(chosen, 3)
    text = "if not points or not 1 <= points[0] <= points[-1] <= MAX_SHARES:"
    without(monkeypatch, shamir, "combine", text)
    assert shamir.combine(chosen, 3) == chosen[0][1:]
    # And the first site would need nobody, if sites were counted from 0.
    without(monkeypatch, shamir, "split", "range(1, shares + 1)", instead="range(shares)")
    assert shamir.split(secret, 3, 5)[0][1:] == secret


# ---- for, or by, somebody else -------------------------------------------------------------------


def test_shares_that_were_sealed_for_another_site(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator, who relays them, gives s00 what s01 has sealed for s02.

    Without keys of each pair and direction s00 would hold it as its own share, and the
    attempt fail when it is opened: at the end, and with the blame on s00 or s01.
    """

    def misdirected() -> tuple[Crowd, Contributor]:
        crowd, relayed = dealt()
        relayed["s00"]["s01"] = relayed["s02"]["s01"]
        return crowd, crowd.dealers["s00"].receive(relayed["s00"])

    with pytest.raises(CryptoError, match="the shares of s01 do not open"):
        misdirected()

    def one_for_all(agreed: Roster, _private: object, sender: str, _to: str, *, peer: str) -> bytes:
        del peer
        return roster.derive(bytes(32), agreed.digest, masking._CHANNEL, roster.text(sender))

    monkeypatch.setattr(masking, "_channel_key", one_for_all)
    with pytest.raises(CryptoError, match="the shares of s01 do not open"):
        misdirected()  # what is sealed says for whom
    monkeypatch.setattr(masking, "_associated", lambda *_: masking._SHARES)
    crowd, taken = misdirected()
    assert taken._held["s01"] == crowd.dealers["s02"]._open("s01", crowd.sealed["s01"]["s02"])


def test_shares_under_keys_that_another_site_has_signed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator deals shares of its own making in the name of s02."""

    def dealt_for_s02() -> Contributor:
        crowd = Crowd(TERMS)
        crowd.advertise(TERMS.sites)
        keys = SiteKeys(TERMS, "s02")
        forged = keys.advertisement(sign("s04", keys.payload))
        swapped = {**crowd.advertisements, "s02": forged}
        crowd.roster = Roster.of(TERMS, swapped.values(), verify)
        crowd.keys["s02"] = keys
        relayed = crowd.deal(crowd.roster.sites)
        return crowd.dealers["s00"].receive(relayed["s00"])

    with pytest.raises(IdentityError, match="not by s02"):
        dealt_for_s02()
    text = "verify(site, advertisement.signature, advertised(terms, advertisement))"
    without(monkeypatch, roster, "check_advertisement", text, instead="pass")
    assert dealt_for_s02().sharers == TERMS.sites


# ---- a secret that is two -----------------------------------------------------------------------


def test_a_mask_key_with_two_private_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two liars could give two sites two masks of one pair, and so two sums, each proven.

    s03 advertises the public key of k, which 8 l - k has as well, s04 a point of the
    curve's twist, on which the two scalars do not agree. s03 drops out, and shares that
    s04 passes on make k of its secret at one site and 8 l - k at another.
    """
    scalar = 2**254 + 8 * 12345
    halves = [k.to_bytes(32, "little") for k in (scalar, 8 * roster._CURVE_ORDER - scalar)]
    crowd = Crowd(TERMS)
    crowd.advertise(TERMS.sites)
    keys = {site: SiteKeys(TERMS, site) for site in ("s03", "s04")}
    keys["s03"]._mask = X25519PrivateKey.from_private_bytes(halves[0])
    shown = {site: one.advertisement(b"") for site, one in keys.items()}
    shown["s04"] = dataclasses.replace(shown["s04"], mask_key=(2).to_bytes(32, "little"))
    signed = {
        site: dataclasses.replace(one, signature=sign(site, roster.advertised(TERMS, one)))
        for site, one in shown.items()
    }
    agreed = Roster.of(TERMS, {**crowd.advertisements, **signed}.values(), verify)
    assert not any(agreed.is_mask_key("s03", half) for half in halves)
    text = "if _scalar(private) <= 8 * _CURVE_ORDER - 2**254:"
    without(monkeypatch, Roster, "is_mask_key", text)
    assert all(agreed.is_mask_key("s03", half) for half in halves)
    first, second = (X25519PrivateKey.from_private_bytes(half) for half in halves)
    assert agreed.pair_masks("s03", first, ["s04"]) != agreed.pair_masks("s03", second, ["s04"])
    # With a key that is on the curve, whoever's, they do agree.
    honest = ["s00", "s01", "s02"]
    assert agreed.pair_masks("s03", first, honest) == agreed.pair_masks("s03", second, honest)


def test_every_honest_mask_key_is_taken() -> None:
    crowd = Crowd(TERMS)
    agreed = crowd.advertise(TERMS.sites)
    for site, keys in crowd.keys.items():
        assert agreed.is_mask_key(site, keys._mask.private_bytes_raw())
        assert not agreed.is_mask_key(site, SiteKeys(TERMS, site)._mask.private_bytes_raw())
