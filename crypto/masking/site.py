"""Secure aggregation by double masking: what a site does in one attempt.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine
Learning", CCS 2017, Figure 4, with its steps against a coordinator that lies. Each
site u adds to its integers a self mask and, for every other site v, a pairwise
mask that v subtracts:

    y_u = x_u + m(b_u) + sum_{v > u} m(s_uv) - sum_{v < u} m(s_uv)      (mod 2^m)

The secrets (the seed b_u, and the private key behind s_uv) are shared t-of-n. Once
it is known whose y_u has arrived, t sites open the self masks of those who are in
the sum and the pairwise masks of those who dropped out. *Never both of one site*:
with both, y_u is x_u.

    step         a site                                           its state behind it
    1 keys       two X25519 keys and a commitment, signed         SiteKeys
    2 shares     both secrets, a sealed share of each for a peer  Dealer
    3 input      masked integers, once                            Contributor
    4 statement  signs who is in the sum, and the masked sum      made by the protocol
    5 opening    its shares for what was certified, one outcome   Contributor

Step 4 is not made here: a quorum of sites signs one statement an attempt, which names
the roster, the outcome and the masked sum's digest, and only behind that certificate
may `Contributor.open` be asked. What holds without it, whatever a site is told: it
opens for one outcome, and never both secrets of one site.

An object of one step makes that of the next one, once: keys and masks serve a
single attempt and a single input. What is done with masked inputs and opened shares
is in crypto/masking/coordinator.py. Everything here is in memory only; nothing is written to a
disk.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from crypto.arrays import Int32
from crypto.keystream import Words, add_masks
from crypto.masking import shamir
from crypto.masking.roster import (
    Advertisement,
    Agreement,
    Roster,
    advertised,
    agree,
    check_sites,
    commitment,
    derive,
    text,
)
from crypto.quantize import CryptoError

_CHANNEL = b"hanse-masking-channel-v1\0"
_SHARES = b"hanse-masking-shares-v1\0"

_TAG_BYTES = 16
SEALED_BYTES = 2 * shamir.SHARE_BYTES + _TAG_BYTES


@dataclass(frozen=True)
class Attendance:
    """Whose masked input is in the sum, and who shared secrets but sent none; both sorted."""

    survivors: tuple[str, ...]
    dropouts: tuple[str, ...]


@dataclass(frozen=True)
class OpenedShares:
    """A site's shares: of the seeds of survivors, and of the mask keys of dropouts."""

    site: str
    seeds: Mapping[str, bytes] = field(repr=False)
    mask_keys: Mapping[str, bytes] = field(repr=False)


def check_outcome(roster: Roster, sharers: tuple[str, ...], outcome: Attendance) -> None:
    """Raises CryptoError unless a list of survivors and dropouts is one that may be opened."""
    check_sites(outcome.survivors)
    check_sites(outcome.dropouts)
    if both := set(outcome.survivors) & set(outcome.dropouts):
        raise CryptoError(
            f"both secrets of {min(both)} were asked for: together they lay its input open"
        )
    if set(outcome.survivors) | set(outcome.dropouts) != set(sharers):
        raise CryptoError("survivors and dropouts must be those that have shared secrets")
    if strangers := set(sharers) - set(roster.sites):
        raise CryptoError(f"{min(strangers)} has no keys in this attempt and cannot have shared")
    if len(outcome.survivors) < roster.terms.threshold:
        raise CryptoError(
            f"{len(outcome.survivors)} sites are in the sum, at least {roster.terms.threshold} "
            "must be: the attempt must fail"
        )


# ---- step 1 ------------------------------------------------------------------


class SiteKeys:
    """A site's fresh secrets for one attempt; its public keys go out signed."""

    def __init__(self, terms: Agreement, site: str) -> None:
        """Raises CryptoError when the site is no participant."""
        self._terms = terms
        self._site = site
        self._point = terms.point(site)
        self._channel = X25519PrivateKey.generate()
        self._mask = X25519PrivateKey.generate()
        self._seed = secrets.token_bytes(shamir.SECRET_BYTES)
        self._dealt = False

    @property
    def payload(self) -> bytes:
        """What the site's identity must sign."""
        return advertised(self._terms, self.advertisement(b""))

    def advertisement(self, signature: bytes) -> Advertisement:
        """What goes to everyone, with the identity's signature of `payload`."""
        return Advertisement(
            self._site,
            self._channel.public_key().public_bytes_raw(),
            self._mask.public_key().public_bytes_raw(),
            commitment(self._terms, self._site, self._seed),
            signature,
        )

    def deal(self, roster: Roster) -> tuple[Dealer, dict[str, bytes]]:
        """Step 2: sealed shares (SEALED_BYTES each) for every other site of the roster.

        Raises CryptoError when the roster is of other terms, lacks this site or
        shows other keys of it, or when shares were dealt already.
        """
        if self._dealt:
            raise CryptoError("shares of these secrets are dealt already: a key seals once")
        own = roster.advertisements.get(self._site)
        if roster.terms != self._terms or own is None:
            raise CryptoError(f"the roster is not of this attempt, or lacks {self._site}")
        if own != self.advertisement(own.signature):
            raise CryptoError(f"the roster shows other keys of {self._site} than its own")
        self._dealt = True
        threshold, points = self._terms.threshold, len(self._terms.sites)
        of_seed = shamir.split(self._seed, threshold, points)
        of_key = shamir.split(self._mask.private_bytes_raw(), threshold, points)
        sealed = {}
        for other in roster.sites:
            if other != self._site:
                shares = of_seed[(at := self._terms.point(other) - 1)] + of_key[at]
                key = _channel_key(roster, self._channel, self._site, other, peer=other)
                associated = _associated(roster, self._site, other)
                sealed[other] = ChaCha20Poly1305(key).encrypt(_NONCE, shares, associated)
        own_shares = (of_seed[self._point - 1], of_key[self._point - 1])
        return Dealer(roster, self._site, self._channel, self._mask, self._seed, own_shares), sealed


# ---- step 2 ------------------------------------------------------------------


class Dealer:
    """A site that has dealt its shares and waits for those of the others."""

    def __init__(
        self,
        roster: Roster,
        site: str,
        channel: X25519PrivateKey,
        mask: X25519PrivateKey,
        seed: bytes,
        own_shares: tuple[bytes, bytes],
    ) -> None:
        self._roster = roster
        self._site = site
        self._channel = channel
        self._mask = mask
        self._seed = seed
        self._own_shares = own_shares
        self._received = False

    def receive(self, sealed: Mapping[str, bytes]) -> Contributor:
        """The shares that others sealed for this site, by sender; who is absent is out.

        Raises CryptoError for a stranger, for too few senders, when a share was not
        sealed by that sender for this site and attempt, or when shares came before.
        """
        if self._received:
            raise CryptoError("the shares of this attempt are received already")
        others = set(self._roster.sites) - {self._site}
        if not set(sealed) <= others:
            raise CryptoError("shares came from a site that has no keys in this attempt")
        if len(sealed) + 1 < self._roster.terms.threshold:
            raise CryptoError(
                f"{len(sealed) + 1} sites have shared their secrets, "
                f"{self._roster.terms.threshold} are needed: the attempt must fail"
            )
        shares = {sender: self._open(sender, sealed[sender]) for sender in sorted(sealed)}
        shares[self._site] = self._own_shares
        self._received = True
        return Contributor(self._roster, self._site, self._mask, self._seed, shares)

    def _open(self, sender: str, sealed: bytes) -> tuple[bytes, bytes]:
        if len(sealed) != SEALED_BYTES:
            raise CryptoError(f"sealed shares have {SEALED_BYTES} bytes, not {len(sealed)}")
        key = _channel_key(self._roster, self._channel, sender, self._site, peer=sender)
        associated = _associated(self._roster, sender, self._site)
        try:
            shares = ChaCha20Poly1305(key).decrypt(_NONCE, sealed, associated)
        except InvalidTag as error:
            raise CryptoError(
                f"the shares of {sender} do not open: they are of another attempt, from or for "
                "another site, or were changed on the way; this site cannot take part"
            ) from error
        pair = shares[: shamir.SHARE_BYTES], shares[shamir.SHARE_BYTES :]
        for share in pair:
            shamir.parse(share)
        return pair


# ---- steps 3 and 5 -----------------------------------------------------------


class Contributor:
    """A site that holds everyone's shares: it masks one input, and opens one outcome."""

    def __init__(
        self,
        roster: Roster,
        site: str,
        mask: X25519PrivateKey,
        seed: bytes,
        held: Mapping[str, tuple[bytes, bytes]],
    ) -> None:
        self._roster = roster
        self._site = site
        self._secrets: tuple[X25519PrivateKey, bytes] | None = (mask, seed)
        self._held = held
        self._outcome: Attendance | None = None

    @property
    def sharers(self) -> tuple[str, ...]:
        """Everyone whose shares this site holds, itself included, sorted."""
        return tuple(sorted(self._held))

    def mask(self, integers: Int32) -> Words:
        """Step 3: this site's integers (shape [values]) under all its masks.

        Raises CryptoError when they do not fit the terms, or when an input was masked
        before: the difference of two inputs under one mask is in the clear.
        """
        if self._secrets is None:
            raise CryptoError("an input is masked already: a mask hides one input and no second")
        words = self._roster.terms.ring.to_words(integers, self._roster.terms.values)
        key, seed = self._secrets
        self._secrets = None
        others = [site for site in self.sharers if site != self._site]
        plus, minus = self._roster.pair_masks(self._site, key, others)
        add_masks(words, [self._roster.self_mask(self._site, seed), *plus], minus)
        return words

    def open(self, outcome: Attendance) -> OpenedShares:
        """Step 5: this site's shares of what the outcome needs, and of nothing else.

        Only for the outcome of a certified statement: nothing here can tell whether
        all sites were told the same one. From here on this site opens no other.
        Raises CryptoError, and opens nothing, when the outcome is not one of this
        attempt's sharers, asks for both secrets of a site, has too few survivors,
        lacks this site or differs from the one that it has opened.
        """
        check_outcome(self._roster, self.sharers, outcome)
        if self._site not in outcome.survivors or self._secrets is not None:
            raise CryptoError(f"{self._site} opens no sum that its own input is not in")
        if self._outcome not in (None, outcome):
            raise CryptoError(
                "another outcome of this attempt was opened already: two of them would open "
                "both secrets of a site"
            )
        self._outcome = outcome
        return OpenedShares(
            self._site,
            {site: self._held[site][0] for site in outcome.survivors},
            {site: self._held[site][1] for site in outcome.dropouts},
        )


# ---- sealing -----------------------------------------------------------------

# Each direction of a pair has a key of its own that seals one message (`SiteKeys.deal`
# happens once, and the keys are made for the attempt), so no nonce can repeat.
_NONCE = bytes(12)


def _channel_key(
    roster: Roster, private: X25519PrivateKey, sender: str, to: str, *, peer: str
) -> bytes:
    """The key under which ``sender`` seals for ``to``; both can derive it, nobody else."""
    shared = agree(private, roster.advertisements[peer].channel_key, peer)
    return derive(shared, roster.digest, _CHANNEL, text(sender) + text(to))


def _associated(roster: Roster, sender: str, to: str) -> bytes:
    """Federation, round, attempt and all keys (in the roster's digest), from, to."""
    return _SHARES + roster.digest + text(sender) + text(to)
