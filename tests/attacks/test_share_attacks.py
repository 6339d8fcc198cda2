"""Malformed, foreign and misdirected shares in a masked attempt.

Each is tried twice: as it is, where it must fail, and with the defence removed, where
it must succeed. Replays of shares are among tests/attacks/test_masking_attacks.py.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from crypto import masking, roster, shamir
from crypto.identity import IdentityError
from crypto.masking import Contributor, Opened, SiteKeys
from crypto.quantize import CryptoError, Int32
from crypto.roster import Roster
from crypto.unmasking import Unmasking
from tests.attacks.planting import without
from tests.masked import Crowd, exact, random_inputs, sign, terms, verify

pytestmark = pytest.mark.attacks

TERMS = terms(5)  # three shares open a secret


def dealt() -> tuple[Crowd, dict[str, dict[str, bytes]]]:
    """A crowd whose shares are at the coordinator: for each site, by sender."""
    crowd = Crowd(TERMS)
    sites = crowd.advertise(TERMS.sites).sites
    return crowd, {site: dict(sealed) for site, sealed in crowd.deal(sites).items()}


def closed() -> tuple[Crowd, Unmasking, dict[str, Int32]]:
    crowd, inputs = Crowd(TERMS), random_inputs(TERMS)
    unmasking = crowd.until_masked(inputs, {})
    crowd.confirm(unmasking.outcome, TERMS.sites)
    return crowd, unmasking, inputs


def answer(crowd: Crowd, unmasking: Unmasking, site: str) -> Opened:
    return crowd.contributors[site].open(unmasking.outcome, crowd.signatures, verify)


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
