"""How tests of the crypto worker's jobs prove a sum: as the rounds do, without the messages."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from crypto.ckks.sum_proof import Check, Claim
from daemon.jobs.sums import ckks
from daemon.jobs.sums.ckks import Finished

AGREED = hashlib.sha256(b"the plan").digest()
LEAD = "lead"


def check_of(site: str, holders: Iterable[str], coordinator: str = LEAD) -> Check:
    """What ``site`` checks a sum by, when ``coordinator`` made it for ``holders``."""
    return Check(site, coordinator, tuple(sorted({*holders} - {coordinator})), AGREED)


def proven(
    holder: tuple[int, int], coordinator: tuple[int, int], check: Check, finished: Finished
) -> bytes:
    """The answer that goes with a finished sum; both roles are held in this process."""
    claim = Claim(finished.digest, finished.nonces)
    asked = ckks.challenge(*holder, check, claim)
    return ckks.answer_challenge(*coordinator, check.site, asked)
