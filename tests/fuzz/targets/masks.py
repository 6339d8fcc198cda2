"""Targets: what sites of a masked attempt say to one another.

Keys, sealed shares, the list of survivors, opened shares. An input
is a list of pieces behind their lengths, in which pieces are lists again; who lies knows
its own keys, so half of what is spoilt is signed and sealed anew by its sender.

The attempt is the same in every process: five sites, three open a secret, s04 drops out.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Iterator, Mapping
from functools import cache
from random import Random
from types import SimpleNamespace
from unittest import mock

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from crypto.identity.keys import IdentityError
from crypto.keystream import Words
from crypto.masking import shamir
from crypto.masking import site as masking
from crypto.masking.coordinator import Unmasking
from crypto.masking.roster import KEY_BYTES, Advertisement, Roster, advertised
from crypto.masking.site import SEALED_BYTES, Attendance, Contributor, OpenedShares
from crypto.quantize import CryptoError
from tests.crypto.masking.masked import Crowd, Relay, exact, random_inputs, sign, terms, verify
from tests.fuzz.mutators import mutate_bytes
from tests.fuzz.targets.wire import joined, pieces, shuffled

_TERMS = terms(5)
_INPUTS = random_inputs(_TERMS)
_LIAR, _TAKER = "s01", "s00"


@cache
def _attempt() -> tuple[Crowd, Unmasking]:
    """Up to the masked sum, with all its chance drawn from a seed."""
    chance, crowd = Random(11), Crowd(_TERMS)

    def generate() -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(chance.randbytes(KEY_BYTES))

    with (
        mock.patch.object(masking, "X25519PrivateKey", SimpleNamespace(generate=generate)),
        mock.patch.object(secrets, "token_bytes", chance.randbytes),
        mock.patch.object(secrets, "randbelow", chance.randrange),
    ):
        return crowd, crowd.until_masked(_INPUTS, {"s04": 3})


def _roster() -> Roster:
    roster = _attempt()[0].roster
    assert roster is not None
    return roster


def _name(raw: bytes) -> str:
    """Texts of a message are UTF-8 before anything of ours sees them."""
    return raw.decode("utf-8", "replace")


def _pairs(raw: bytes) -> dict[str, bytes]:
    """A map from sites to bytes, as a protobuf map: the last of equal keys counts."""
    items = pieces(raw)
    return {_name(site): value for site, value in zip(items[::2], items[1::2], strict=False)}


def _unpaired(values: Mapping[str, bytes]) -> bytes:
    return joined([part for site, value in values.items() for part in (site.encode(), value)])


def mutate_nested(data: bytes, chance: Random) -> bytes:
    """A piece, or a piece of a piece, is another, is gone, or comes twice."""
    items = pieces(data)
    if not items or chance.random() < 0.05:
        return mutate_bytes(data, chance)
    if chance.random() < 0.25:
        return joined(shuffled(items, chance))
    at = chance.randrange(len(items))
    if len(pieces(items[at])) > 1 and chance.random() < 0.8:
        items[at] = mutate_nested(items[at], chance)
    elif chance.random() < 0.3:
        items[at] = chance.choice(items)
    else:
        items[at] = mutate_bytes(items[at], chance)
    return joined(items)


# ---- the roster of advertised keys ---------------------------------------------------------------


def judge_roster(data: bytes) -> bool:
    """Accepted: whose keys these are is proven, each is used once, and shares can be dealt."""
    advertisements = []
    for item in pieces(data):
        site, *rest = [*pieces(item), *[b""] * 5][:5]
        advertisements.append(Advertisement(_name(site), *rest))
    try:
        roster = Roster.of(_TERMS, advertisements, verify)
    except (CryptoError, IdentityError):
        return False
    keys = [k for one in roster.advertisements.values() for k in (one.channel_key, one.mask_key)]
    assert len(set(keys)) == len(keys) == 2 * len(advertisements)
    assert {len(key) for key in keys} == {KEY_BYTES}
    assert list(roster.sites) == sorted({one.site for one in advertisements})
    assert set(roster.sites) <= set(_TERMS.sites)
    assert len(roster.sites) >= _TERMS.threshold
    for one in advertisements:
        verify(one.site, one.signature, advertised(_TERMS, one))
    known = {s: (a.channel_key, a.mask_key, a.commitment) for s, a in roster.advertisements.items()}
    ours = _roster().advertisements.items()
    same = known == {s: (a.channel_key, a.mask_key, a.commitment) for s, a in ours}
    assert same == (roster.digest == _roster().digest)
    _deal_for(roster)
    return True


def _deal_for(roster: Roster) -> None:
    """A site deals for whoever is on it, if its own keys are."""
    keys = copy.copy(_attempt()[0].keys[_TAKER])
    keys._dealt = False
    own = roster.advertisements.get(_TAKER)
    honest = own is not None and own == keys.advertisement(own.signature)
    try:
        _, sealed = keys.deal(roster)
    except CryptoError:
        assert not honest
        return
    assert honest
    assert set(sealed) == set(roster.sites) - {_TAKER}
    assert {len(one) for one in sealed.values()} == {SEALED_BYTES}


def mutate_roster(data: bytes, chance: Random) -> bytes:
    """Half of them signed by the site that they name."""
    items = pieces(mutate_nested(data, chance))
    if chance.random() < 0.5:
        return joined(items)
    return joined([_signed(pieces(item)) if len(pieces(item)) == 5 else item for item in items])


def _signed(fields: list[bytes]) -> bytes:
    site, channel_key, mask_key, commitment = fields[:4]
    one = Advertisement(_name(site), channel_key, mask_key, commitment, b"")
    return joined([*fields[:4], sign(one.site, advertised(_TERMS, one))])


def roster_seeds() -> Iterator[bytes]:
    ours = list(_roster().advertisements.values())
    small = Advertisement("s02", ours[2].channel_key, (1).to_bytes(32, "little"), bytes(32), b"")
    other = Advertisement(_TAKER, ours[0].mask_key, ours[0].channel_key, ours[0].commitment, b"")
    for chosen in (
        *(ours, ours[1:4], ours[:2], [*ours, ours[0]]),
        *([*ours[:2], small, *ours[3:]], [other, *ours[1:]]),
    ):
        yield joined([_signed(_fields(one)) for one in chosen])
    yield joined([*(_signed(_fields(one)) for one in ours[1:3]), joined(_fields(ours[3]))])


def _fields(one: Advertisement) -> list[bytes]:
    """Without its signature."""
    return [one.site.encode(), one.channel_key, one.mask_key, one.commitment, b""]


# ---- sealed shares -------------------------------------------------------------------------------


def judge_sealed_shares(data: bytes) -> bool:
    """At the relay and at the site that they are for.

    A piece is a sender and what it says that it sealed; or, where that begins with "+",
    what it really sealed. Accepted: nothing but what a sender sealed is held.
    """
    crowd, _ = _attempt()
    given = _pairs(data)
    _judge_relayed(given)
    known = {sender: crowd.sealed[sender][_TAKER] for sender in crowd.sealed if sender != _TAKER}
    truly = {sender: _opened(sender, sealed) for sender, sealed in known.items()}
    sealed = {}
    for sender, content in given.items():
        anew = content.startswith(b"+") and sender in known
        sealed[sender] = _sealed(sender, content[1:]) if anew else content
        if anew:
            truly[sender] = content[1:]
    dealer = copy.copy(crowd.dealers[_TAKER])
    dealer._received = False
    try:
        contributor = dealer.receive(sealed)
    except CryptoError:
        return False
    assert contributor.sharers == tuple(sorted({_TAKER, *given}))
    assert len(contributor.sharers) >= _TERMS.threshold
    for sender in given:
        assert b"".join(contributor._held[sender]) == truly[sender]
        assert all(shamir.parse(share) < shamir.PRIME for share in contributor._held[sender])
    return True


def _judge_relayed(given: Mapping[str, bytes]) -> None:
    relay = Relay(_roster())
    try:
        relay.take(_LIAR, given)
    except CryptoError:
        return
    assert set(given) == set(_TERMS.sites) - {_LIAR}
    assert {len(one) for one in given.values()} == {SEALED_BYTES}


def _sealed(sender: str, content: bytes) -> bytes:
    """By the sender's own key: a liar can do that."""
    channel = _attempt()[0].keys[sender]._channel
    key = masking._channel_key(_roster(), channel, sender, _TAKER, peer=_TAKER)
    associated = masking._associated(_roster(), sender, _TAKER)
    return ChaCha20Poly1305(key).encrypt(masking._NONCE, content, associated)


def _opened(sender: str, sealed: bytes) -> bytes:
    return b"".join(_attempt()[0].dealers[_TAKER]._open(sender, sealed))


def sealed_shares_seeds() -> Iterator[bytes]:
    crowd, _ = _attempt()
    honest = {sender: crowd.sealed[sender][_TAKER] for sender in ("s01", "s02", "s03", "s04")}
    plain = {sender: b"+" + _opened(sender, sealed) for sender, sealed in honest.items()}
    beyond = {**plain, "s02": b"+" + bytes(33) + b"\xff" * 33}
    for given in (
        *(honest, plain, beyond, {**honest, **dict(list(plain.items())[:1])}),
        *({"s01": honest["s01"]}, {"s01": honest["s01"], "s02": honest["s02"]}),
        *({**honest, "s01": honest["s02"]}, crowd.sealed[_LIAR], {}),
    ):
        yield _unpaired(given)


# ---- Shamir's shares -----------------------------------------------------------------------------


def judge_shamir(data: bytes) -> bool:
    """Pieces: the threshold, then points and shares. Accepted: it is the value at nought."""
    threshold, *rest = [int.from_bytes(piece, "big") for piece in pieces(data)[:1]] or [0]
    items = pieces(data)[1:]
    shares = {
        int.from_bytes(point, "big", signed=True): share
        for point, share in zip(items[::2], items[1::2], strict=False)
    }
    try:
        secret = shamir.combine(shares, threshold)
    except CryptoError:
        return False
    assert not rest
    assert len(secret) == shamir.SECRET_BYTES
    assert len(shares) == threshold
    assert all(1 <= point <= shamir.MAX_SHARES for point in shares)
    assert {len(share) for share in shares.values()} == {shamir.SHARE_BYTES}
    values = {point: int.from_bytes(share, "big") for point, share in shares.items()}
    assert max(values.values()) < shamir.PRIME
    assert int.from_bytes(secret, "big") == _at_nought(values)
    return True


def _at_nought(values: Mapping[int, int]) -> int:
    """By Neville's scheme, which has nothing in common with Lagrange's weights."""
    points, column = list(values), list(values.values())
    for step in range(1, len(points)):
        for at in range(len(points) - step):
            near, far = points[at], points[at + step]
            value = near * column[at + 1] - far * column[at]
            column[at] = value * pow(near - far, -1, shamir.PRIME) % shamir.PRIME
    return column[0]


def shamir_seeds() -> Iterator[bytes]:
    shares = shamir.split(bytes(range(32)), 3, 5)
    for points in ((1, 2, 3), (5, 3, 1), (0, 1, 2), (1, 2), (256, 1, 2), (257, 1, 2), (-1, 1, 2)):
        given = [(p.to_bytes(2, "big", signed=True), shares[p % 5]) for p in points]
        yield joined([b"\x03", *(part for pair in given for part in pair)])
    yield joined([b"\x01", b"\x01", bytes(33)])
    yield joined([b"\x01", b"\x01", shamir.PRIME.to_bytes(33, "big")])
    yield joined([b"\x00"])


# ---- the survivors ------------------------------------------------------------------------------


def judge_outcome(data: bytes) -> bool:
    """Pieces: survivors, dropouts. Accepted: no site's two secrets are opened.

    What a site opens, it also unmasks; the other way round, a list may be of fewer
    sharers than those whose shares this site holds.
    """
    crowd, closed = _attempt()
    survivors, dropouts = [*pieces(data), *[b""] * 2][:2]
    outcome = Attendance(tuple(map(_name, pieces(survivors))), tuple(map(_name, pieces(dropouts))))
    taken = _may_be_unmasked(outcome, closed._total.copy())
    site = _unasked(crowd.contributors[_TAKER])
    try:
        opened = site.open(outcome)
    except CryptoError:
        assert site._outcome is None
        return False
    assert taken
    assert site._outcome == outcome
    assert not set(opened.seeds) & set(opened.mask_keys)
    assert set(opened.seeds) | set(opened.mask_keys) == set(site.sharers)
    assert _TAKER in opened.seeds
    assert len(opened.seeds) >= _TERMS.threshold
    return True


def _unasked(contributor: Contributor) -> Contributor:
    """A copy that has opened nothing yet."""
    site = copy.copy(contributor)
    site._outcome = None
    return site


def _may_be_unmasked(outcome: Attendance, masked: Words) -> bool:
    try:
        Unmasking(_roster(), outcome, masked)
    except CryptoError:
        return False
    named = [*outcome.survivors, *outcome.dropouts]
    assert len(set(named)) == len(named)
    assert set(named) <= set(_TERMS.sites)
    assert len(outcome.survivors) >= _TERMS.threshold
    return True


def outcome_seeds() -> Iterator[bytes]:
    sites = [site.encode() for site in _TERMS.sites]
    for survivors, dropouts in (
        *((4, (4,)), (5, ()), (3, (3, 4)), (2, (2, 3, 4))),
        *((5, (4,)), (4, ()), (4, (4, 4))),
    ):
        yield joined([joined(sites[:survivors]), joined([sites[at] for at in dropouts])])


# ---- opened shares -------------------------------------------------------------------------------


def judge_opened(data: bytes) -> bool:
    """Pieces: a site's answers; of each, its name, its seeds, its mask keys.

    Accepted: three of them gave a sum, and it is the sum.
    """
    crowd, closed = _attempt()
    masked = closed._total.copy()  # masks are taken off where the sum lies
    unmasking = Unmasking(_roster(), closed.outcome, masked)
    for item in pieces(data):
        site, seeds, mask_keys = [*pieces(item), *[b""] * 3][:3]
        opened = OpenedShares(_name(site), _pairs(seeds), _pairs(mask_keys))
        try:
            unmasking.take(opened)
        except CryptoError:
            continue
        assert set(opened.seeds) == set(closed.outcome.survivors)
        assert set(opened.mask_keys) == set(closed.outcome.dropouts)
    try:
        total = unmasking.finish()
    except CryptoError:
        assert np.array_equal(masked, closed._total)
        return False
    assert unmasking.enough
    assert np.array_equal(total, exact(_INPUTS, closed.outcome.survivors))
    assert len(unmasking.unfit) <= len(crowd.sealed)
    return True


def _answer(opened: OpenedShares) -> bytes:
    return joined([opened.site.encode(), _unpaired(opened.seeds), _unpaired(opened.mask_keys)])


def opened_seeds() -> Iterator[bytes]:
    crowd, closed = _attempt()
    answers = []
    for site in closed.outcome.survivors:
        contributor = copy.copy(crowd.contributors[site])
        answers.append(contributor.open(closed.outcome))
    wrong = OpenedShares("s01", answers[0].seeds, answers[0].mask_keys)
    for chosen in (
        *(answers, answers[:3], answers[:2], [answers[0], wrong, *answers[2:]]),
        *([answers[0], wrong, answers[2]], [*answers, answers[0]]),
        [*answers[:2], OpenedShares("s02", {"s00": answers[2].seeds["s00"]}, answers[2].mask_keys)],
    ):
        yield joined([_answer(one) for one in chosen])
