"""What becomes of masked inputs: the coordinator adds them, every site opens the sum.

The objects follow the steps of crypto/masking/site.py:

    MaskedSum   step 3, coordinator: adds masked inputs, each once; memory is one sum
    Unmasking   step 5, every site: t shares -> secrets -> masks -> the exact sum, in place

Nobody opens the sum for the others: who unmasks alone can report any sum. Masked sum
and shares go to all contributors, and each takes the masks off for itself. That all
get the same bits follows from what was certified before (roster, outcome, digest of
the masked sum): a rebuilt secret must be the one that its owner has advertised, of
which there is one, so there is one result or none, whichever shares a site was given.
What comes from a site is checked before it is used, and a refusal names the site.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import BinaryIO

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from crypto.keystream import Integers, Words, add_masks
from crypto.masking import shamir
from crypto.masking.roster import Roster
from crypto.masking.site import Attendance, OpenedShares, check_outcome
from crypto.quantize import CryptoError

_PIECE_BYTES = 1 << 18  # of an input that comes from a file


class MaskedSum:
    """The running sum of masked inputs, mod 2^m."""

    def __init__(self, roster: Roster, sharers: tuple[str, ...]) -> None:
        self._roster = roster
        self._sharers = sharers
        self._total = np.zeros(roster.terms.values, dtype=roster.terms.ring.dtype)
        self._added: set[str] = set()
        self._closed = False

    @property
    def contributors(self) -> frozenset[str]:
        """Whose masked inputs are in the sum."""
        return frozenset(self._added)

    def add(self, site: str, words: Words) -> None:
        """Add one site's masked input, whole; CryptoError when it is not due or malformed."""
        self._check_due(site)
        if words.dtype != self._total.dtype or words.shape != self._total.shape:
            raise CryptoError(
                f"the masked input of {site} has {words.dtype} of shape {words.shape}; "
                f"expected {self._total.dtype} of shape {self._total.shape}"
            )
        self._total += words
        self._added.add(site)

    def add_from(self, site: str, file: BinaryIO) -> None:
        """Add one site's masked input from a file, which is never in memory whole.

        Raises CryptoError, the sum unchanged, when it is not due or has not exactly the
        length that the terms imply (every word is valid). Where it can't be read to its
        end after all, what was added can't be had again to take it back: no sum is left.
        """
        self._check_due(site)
        ring, values = self._roster.terms.ring, self._roster.terms.values
        if (size := file.seek(0, os.SEEK_END)) != ring.size(values):
            raise CryptoError(
                f"the masked input of {site} has {size} bytes; expected {ring.size(values)}"
            )
        file.seek(0)
        step = _PIECE_BYTES // self._total.itemsize
        try:
            for start in range(0, values, step):
                part = self._total[start : start + step]
                part += ring.parse(file.read(part.nbytes), part.size)
        except (OSError, CryptoError):
            self._closed = True
            self._added.clear()  # so that `close` refuses, too
            raise
        self._added.add(site)

    def _check_due(self, site: str) -> None:
        if self._closed or site not in self._sharers or site in self._added:
            raise CryptoError(f"a masked input of {site!r} is not due: it is in, or too late")

    def close(self) -> tuple[Attendance, Words]:
        """No input is added any more: who is not in has dropped out. Outcome and masked sum.

        Raises CryptoError when too few are in.
        """
        survivors = tuple(sorted(self._added))
        dropouts = tuple(sorted(set(self._sharers) - self._added))
        outcome = Attendance(survivors, dropouts)
        check_outcome(self._roster, self._sharers, outcome)
        self._closed = True
        return outcome, self._total


class Unmasking:
    """A closed sum, and the shares that open it.

    ``unfit`` lists (holder, owner) whose share did not belong to the owner's secret,
    as far as `finish` had to look: one of the two, or who passed the share on, does
    not follow the protocol.
    """

    def __init__(self, roster: Roster, outcome: Attendance, total: Words) -> None:
        """``total``: the masked sum, whose memory becomes that of the result.

        Raises CryptoError when the outcome is none that may be opened under this
        roster, or the sum has not the form that its terms imply.
        """
        sharers = tuple(sorted({*outcome.survivors, *outcome.dropouts}))
        check_outcome(roster, sharers, outcome)
        terms = roster.terms
        if total.dtype != terms.ring.dtype or total.shape != (terms.values,):
            raise CryptoError(
                f"the masked sum has {total.dtype} of shape {total.shape}; expected "
                f"{terms.ring.dtype} of shape {(terms.values,)}"
            )
        self._roster = roster
        self._total = total
        self._integers: Integers | None = None
        self._opened: dict[str, OpenedShares] = {}
        self.outcome = outcome
        self.unfit: list[tuple[str, str]] = []

    def take(self, opened: OpenedShares) -> None:
        """One survivor's shares. Raises CryptoError when they are not exactly those due."""
        site = opened.site
        if site not in self.outcome.survivors or site in self._opened:
            raise CryptoError(f"shares of {site!r} are not due: it is not in the sum, or they came")
        expected = (set(self.outcome.survivors), set(self.outcome.dropouts))
        if (set(opened.seeds), set(opened.mask_keys)) != expected:
            raise CryptoError(f"{site} has opened other shares than those asked for")
        for share in (*opened.seeds.values(), *opened.mask_keys.values()):
            shamir.parse(share)
        self._opened[site] = opened

    @property
    def enough(self) -> bool:
        """Whether as many sites have opened their shares as the secrets need."""
        return len(self._opened) >= self._roster.terms.threshold

    def finish(self) -> Integers:
        """The exact sum of the survivors' integers, shape [values], read-only.

        They are as wide as the ring's words: masks are taken off where the sum lies,
        since a copy, and one of 64 bits, would make an update's memory five of them.
        Every secret must fit what its owner advertised. One share that does not is
        worked around if there is another. Raises CryptoError, and leaves the sum
        as it was, when there are too few shares, a secret cannot be had, or what comes
        out is no sum.
        """
        if self._integers is not None:
            return self._integers
        if not self.enough:
            raise CryptoError(
                f"{len(self._opened)} sites have opened their shares, "
                f"{self._roster.terms.threshold} are needed: the attempt must fail"
            )
        plus, minus = self._masks()
        add_masks(self._total, plus, minus)
        try:
            integers = self._roster.terms.ring.to_integers(self._total, len(self.outcome.survivors))
        except CryptoError:
            add_masks(self._total, minus, plus)  # exact in the ring
            raise
        integers.flags.writeable = False
        self._integers = integers
        return integers

    def _masks(self) -> tuple[list[bytes], list[bytes]]:
        """Keys of the masks to add to the sum, and of those to subtract."""
        roster, survivors = self._roster, self.outcome.survivors
        plus: list[bytes] = []
        minus: list[bytes] = []
        for site in survivors:
            shares = {holder: opened.seeds[site] for holder, opened in self._opened.items()}
            seed = self._recover(site, shares, roster.is_seed)
            minus.append(roster.self_mask(site, seed))
        for site in self.outcome.dropouts:
            shares = {holder: opened.mask_keys[site] for holder, opened in self._opened.items()}
            private = self._recover(site, shares, roster.is_mask_key)
            key = X25519PrivateKey.from_private_bytes(private)
            # What the dropout would have added, so that it cancels what the survivors did.
            added, subtracted = roster.pair_masks(site, key, survivors)
            plus += added
            minus += subtracted
        return plus, minus

    def _recover(
        self, owner: str, shares: Mapping[str, bytes], fits: Callable[[str, bytes], bool]
    ) -> bytes:
        """The owner's secret. Without one wrong share, if need be; more are not looked for."""
        threshold = self._roster.terms.threshold
        holders = sorted(shares)
        # The first holders; then the first without one of them, if there is one more.
        spare = holders[: threshold + 1] if len(holders) > threshold else []
        choices = [(holders[:threshold], "")]
        choices += [([h for h in spare if h != left_out], left_out) for left_out in spare[:-1]]
        for chosen, left_out in choices:
            try:
                secret = shamir.combine(
                    {self._roster.terms.point(holder): shares[holder] for holder in chosen},
                    threshold,
                )
            except CryptoError:
                continue
            if fits(owner, secret):
                if left_out:
                    self.unfit.append((left_out, owner))
                return secret
        raise CryptoError(
            f"the shares of a secret of {owner} do not fit what it advertised: {owner}, one of "
            f"{', '.join(holders)}, or who passed them on does not follow the protocol; this site "
            "cannot open the sum"
        )
