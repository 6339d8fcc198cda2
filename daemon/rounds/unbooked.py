"""Whether the privacy ledger has every committed round in which this site took part.

An update is booked before it leaves. What a certificate has and the ledger has not was
booked in a state that is gone: one that was restored, or moved away. Rounds of old are not
looked at; what was booked then, no rule says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from daemon.state.privacy_ledger import LedgerError, PrivacyBudget
from daemon.state.store import Store
from peers.wire.manifest import RETRIEVER

log = structlog.get_logger()

_SPANS = 8  # of rounds, in a line for people
_ROUNDS_AT_ONCE = 256  # certificates in memory while the ledger is compared with them


class Unbooked:
    """What the ledger lacks, as far as it was looked at."""

    def __init__(
        self,
        site: str,
        store: Store,
        model: str,
        privacy: PrivacyBudget,
        report: Callable[[str], None],
    ) -> None:
        """``model``: whose rounds; ``report`` is told why the ledger could not be read."""
        self._model = model
        self._site = site
        self._store = store
        self._privacy = privacy
        self._report = report
        self._looked_at = 0  # the last committed round that was compared
        self._rounds: list[int] = []  # of these, those that the ledger lacks

    async def look(self) -> None:
        """Compare what was committed since the last look."""
        took_part: list[int] = []
        first = self._looked_at + 1
        while commits := await asyncio.to_thread(self._store.rounds_from, first, _ROUNDS_AT_ONCE):
            bodies = [commit.certificate.body for commit in commits]
            took_part += [b.round for b in bodies if b.rules and self._site in b.contributors]
            first = bodies[-1].round + 1
        try:
            lacking = await self._privacy.unbooked(took_part, self._model) if took_part else []
        except LedgerError as error:  # which also keeps every update here until it is mended
            self._report(str(error))
            log.error("the privacy ledger is not compared", cause=str(error))  # noqa: TRY400
            return
        self._looked_at = first - 1
        if lacking:
            self._rounds += lacking
            log.warning(self.warning, rounds=len(self._rounds))

    @property
    def warning(self) -> str:
        """What the ledger lacks and what to do, for people; empty when nothing."""
        if not self._rounds:
            return ""
        of = "" if self._model == RETRIEVER else f" of the {self._model}"
        return (
            f"this site's record of what it spent lacks {_spans(self._rounds)}{of}, in which it "
            "took part: its state went back, and `fedctl privacy` counts too little. Stop fedd, "
            "put a newer copy of privacy.sqlite3, and of privacy.sqlite3-wal where there is one, "
            "in its place; or, where these rounds had noise, count them as spent (a lower "
            "privacy.epsilon)"
        )


def _spans(rounds: list[int]) -> str:
    """Rounds in words: "round 7", "rounds 3 and 9 to 17"; as many spans as people read."""
    spans: list[list[int]] = []
    for round_ in sorted(rounds):
        if spans and spans[-1][1] + 1 == round_:
            spans[-1][1] = round_
        else:
            spans.append([round_, round_])
    words = [f"{a}" if a == b else f"{a} to {b}" for a, b in spans[:_SPANS]]
    words += [f"{len(spans) - _SPANS} later spans"] if len(spans) > _SPANS else []
    listed = " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    return f"round{'s' if len(rounds) > 1 else ''} {listed}"
