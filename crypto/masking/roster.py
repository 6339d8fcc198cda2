"""What all sites of a masked attempt must agree on: its terms, and everyone's keys.

Everything that is signed, sealed or derived in an attempt begins with a label of
its own and is bound to these two digests, so that nothing of one attempt, round
or federation means anything in another:

    terms    federation, round, attempt, plan, participants, threshold, size
    roster   the terms, and the keys that each site has signed

Encodings are our own, byte by byte: integers are big-endian, texts and lists carry
their length, so no two meanings have the same bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from crypto.identity.keys import MAX_SIGNATURE_BYTES
from crypto.identity.names import ID
from crypto.keystream import MAX_VALUES, Ring
from crypto.quantize import CryptoError

KEY_BYTES = 32
DIGEST_BYTES = 32
_MAX_COUNT = 2**62
_CURVE_PRIME = 2**255 - 19
_CURVE_ORDER = 2**252 + 27742317777372353535851937790883648493

_TERMS = b"hanse-masking-terms-v1\0"
_KEYS = b"hanse-masking-keys-v1\0"
_ROSTER = b"hanse-masking-roster-v1\0"
_COMMITMENT = b"hanse-masking-commitment-v1\0"
_SELF = b"hanse-masking-self-v1\0"
_PAIR = b"hanse-masking-pair-v1\0"

# (site, signature, what was signed): raises (IdentityError) unless that site signed it.
Verify = Callable[[str, bytes, bytes], None]


# ---- terms -------------------------------------------------------------------


def smallest_threshold(sites: int, colluding: int = 0) -> int:
    """The fewest shares that must open a secret among so many sites.

    Any t - 1 sites that follow the protocol and pool what they see learn nothing but
    the sum. Where ``colluding`` sites, the coordinator counted if it takes part, also
    lie about who dropped out, t must be above (sites + colluding) / 2: two lists
    that differ then cannot both have t sites behind them, for each honest site
    stands behind one (Bonawitz et al. 2017, §6, active adversaries).
    """
    return (sites + colluding) // 2 + 1


@dataclass(frozen=True)
class Agreement:
    """What the participants agree on before the first key is made.

    ``sites`` are sorted; a site's point in the sharing is its place there, from 1
    on. ``threshold`` sites open a secret, and no sum of fewer contributors is ever
    unmasked. ``values`` integers of ``bits`` bits are added.
    """

    federation: str
    round: int
    attempt: int
    plan_digest: bytes
    sites: tuple[str, ...]
    threshold: int
    bits: int
    values: int

    def __post_init__(self) -> None:
        """Raises CryptoError unless these are terms under which masking protects."""
        check_sites(self.sites)
        _ = self.ring
        named = ID.fullmatch(self.federation) and len(self.plan_digest) == DIGEST_BYTES
        if not (named and 0 <= self.round <= _MAX_COUNT and 0 <= self.attempt < 2**32):
            raise CryptoError("a masked attempt has a federation, a round, an attempt and a plan")
        if not len(self.sites) < 2 * self.threshold <= 2 * len(self.sites):
            raise CryptoError(
                f"a threshold of {self.threshold} among {len(self.sites)} sites: more than half "
                "must be needed, or two halves could open both secrets of a site"
            )
        if not 1 <= self.values <= MAX_VALUES:
            raise CryptoError(f"{self.values} values: between 1 and {MAX_VALUES} can be masked")

    @cached_property
    def ring(self) -> Ring:
        """The integers in which the sum is exact, whoever drops out."""
        return Ring(self.bits, len(self.sites))

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that name these terms."""
        numbers = (self.round, self.attempt, self.threshold, self.bits, self.values)
        encoded = (text(self.federation), struct.pack(">QIIIQ", *numbers), self.plan_digest)
        return hashlib.sha256(_TERMS + b"".join(encoded) + names(self.sites)).digest()

    def point(self, site: str) -> int:
        """Where a site's shares lie on the polynomials; CryptoError for a stranger."""
        if site not in self.sites:
            raise CryptoError(f"{site!r} is no participant of this attempt")
        return self.sites.index(site) + 1


def check_sites(sites: Sequence[str]) -> None:
    """Raises CryptoError unless these are site ids, each once, sorted."""
    if list(sites) != sorted(set(sites)) or not all(map(ID.fullmatch, sites)):
        raise CryptoError("a list of sites has site ids, each once, sorted")


# ---- keys --------------------------------------------------------------------


@dataclass(frozen=True)
class Advertisement:
    """A site's two public keys (X25519, 32 bytes), its commitment, and its signature.

    ``channel_key`` agrees on keys for sealed shares, ``mask_key`` on pairwise
    masks: the second one's private half may be shared out, the first one's never.
    ``commitment`` fixes the seed of the site's self mask without showing it.
    """

    site: str
    channel_key: bytes
    mask_key: bytes
    commitment: bytes
    signature: bytes


def advertised(terms: Agreement, advertisement: Advertisement) -> bytes:
    """What a site signs of its keys, for this federation, round, attempt and plan alone."""
    return b"".join(
        (
            _KEYS,
            text(terms.federation),
            struct.pack(">QI", terms.round, terms.attempt),
            text(advertisement.site),
            terms.plan_digest,
            terms.digest,
            advertisement.channel_key,  # three times 32 bytes
            advertisement.mask_key,
            advertisement.commitment,
        )
    )


def check_advertisement(terms: Agreement, advertisement: Advertisement, verify: Verify) -> None:
    """Raises CryptoError, or what ``verify`` raises, unless a participant signed sound keys."""
    site = advertisement.site
    terms.point(site)
    keys = (advertisement.channel_key, advertisement.mask_key)
    if not all(map(_is_canonical, keys)) or len(advertisement.commitment) != DIGEST_BYTES:
        raise CryptoError(f"the keys of {site} are no X25519 keys with a commitment")
    if len(advertisement.signature) > MAX_SIGNATURE_BYTES:
        raise CryptoError(f"a signature has at most {MAX_SIGNATURE_BYTES} bytes")
    verify(site, advertisement.signature, advertised(terms, advertisement))
    for key in keys:
        agree(X25519PrivateKey.generate(), key, site)


@dataclass(frozen=True)
class Roster:
    """Who has advertised keys, every signature checked. Made by `Roster.of` alone."""

    terms: Agreement
    advertisements: Mapping[str, Advertisement]

    @classmethod
    def of(
        cls, terms: Agreement, advertisements: Iterable[Advertisement], verify: Verify
    ) -> Roster:
        """Check what the coordinator relays, which must be the same at all sites.

        Raises CryptoError when a site comes twice, keys are unsound or occur twice, or
        fewer sites than the threshold advertised; what ``verify`` raises for a
        signature that is not the site's.
        """
        by_site: dict[str, Advertisement] = {}
        seen: set[bytes] = set()
        for one in advertisements:
            check_advertisement(terms, one, verify)
            keys = {one.channel_key, one.mask_key}
            if one.site in by_site or len(keys) != 2 or keys & seen:
                raise CryptoError(f"{one.site} comes twice, or repeats a key: keys are used once")
            by_site[one.site] = one
            seen |= keys
        if len(by_site) < terms.threshold:
            raise CryptoError(
                f"{len(by_site)} sites have advertised keys, {terms.threshold} are needed"
            )
        return cls(terms, {site: by_site[site] for site in sorted(by_site)})

    @property
    def sites(self) -> tuple[str, ...]:
        """Who advertised, sorted."""
        return tuple(self.advertisements)

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that name the terms and everyone's keys."""
        parts = [_ROSTER, self.terms.digest, names(self.sites)]
        for one in self.advertisements.values():
            parts += [one.channel_key, one.mask_key, one.commitment]
        return hashlib.sha256(b"".join(parts)).digest()

    def self_mask(self, site: str, seed: bytes) -> bytes:
        """The key of a site's self mask."""
        return derive(seed, self.digest, _SELF, text(site))

    def pair_masks(
        self, site: str, private: X25519PrivateKey, others: Iterable[str]
    ) -> tuple[list[bytes], list[bytes]]:
        """Keys of the masks that ``site`` adds, and of those that it subtracts.

        Of each pair the site that sorts first adds the mask and the other one
        subtracts it, so that they cancel in the sum (Bonawitz et al. 2017, §4).
        """
        plus: list[bytes] = []
        minus: list[bytes] = []
        for other in others:
            shared = agree(private, self.advertisements[other].mask_key, other)
            pair = text(min(site, other)) + text(max(site, other))
            (plus if site < other else minus).append(derive(shared, self.digest, _PAIR, pair))
        return plus, minus

    def is_seed(self, site: str, seed: bytes) -> bool:
        """Whether this is the seed that a site has committed itself to."""
        promised = self.advertisements[site].commitment
        return hmac.compare_digest(promised, commitment(self.terms, site, seed))

    def is_mask_key(self, site: str, private: bytes) -> bool:
        """Whether this is the private half of the mask key that a site has advertised.

        The only one there is. All sites must rebuild masks alike, and a public key says
        a scalar up to its sign: k and 8 l - k (l the order of the base point) have the
        same, and agree on different secrets with a key on the curve's twist, which two
        liars could advertise between them. Both are scalars of X25519 for no more than
        2^-126 of them, so that no honest site's are: those are refused.
        """
        public = X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()
        if _scalar(private) <= 8 * _CURVE_ORDER - 2**254:
            return False
        return public == self.advertisements[site].mask_key


def commitment(terms: Agreement, site: str, seed: bytes) -> bytes:
    """Fixes a seed of 32 uniform bytes and shows nothing of it: finding it means guessing it."""
    return derive(seed, terms.digest, _COMMITMENT, text(site))


# ---- building blocks ---------------------------------------------------------


def agree(private: X25519PrivateKey, public: bytes, site: str) -> bytes:
    """X25519 (RFC 7748 §6.1), 32 bytes; the all-zero result of a small-order point is refused."""
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise CryptoError(
            f"the key of {site} is of small order: everybody would know what it agrees on"
        ) from error


def derive(secret: bytes, salt: bytes, label: bytes, about: bytes) -> bytes:
    """HKDF-SHA256 (RFC 5869): 32 bytes for one purpose; each purpose has a label of its own."""
    hkdf = HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=salt, info=label + about)
    return hkdf.derive(secret)


def text(value: str) -> bytes:
    """A text behind its length."""
    encoded = value.encode()
    return struct.pack(">H", len(encoded)) + encoded


def names(sites: Sequence[str]) -> bytes:
    """A list of sites behind its length."""
    return struct.pack(">H", len(sites)) + b"".join(map(text, sites))


def _scalar(private: bytes) -> int:
    """RFC 7748 §5: the scalar that a private key stands for, 2^254 .. 2^255 - 8."""
    return int.from_bytes(private, "little") & (2**254 - 8) | 2**254


def _is_canonical(key: bytes) -> bool:
    """RFC 7748 §5 would reduce other encodings; a key that must be found again has one."""
    return len(key) == KEY_BYTES and int.from_bytes(key, "little") < _CURVE_PRIME
