"""Which version of the generator answers at this site, and what it was judged by.

The learning worker judges and writes; the answering worker reads with each question, so that a
version takes over between two of them. Until one is judged to do better than the base model at
this site, the base model answers.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from crypto.durable import whole

_FORMAT = "hanse-generator-in-use-1"
_MOST = 2**63  # triples, tokens or answers


@dataclass(frozen=True)
class Judged:
    """How a version does on this site's validation triples.

    ``nats``: mean negative log-likelihood of a token of an answer; ``rouge_l``: F of what it
    writes, NaN where that is not told (hanse[eval]); ``cited``: share of written sentences that
    cite a passage and are supported by it. These two are of ``written`` answers: fewer than were
    asked for where one took too long. ``tokens``: of all answers, that ``nats`` is over.
    """

    nats: float
    rouge_l: float
    cited: float
    tokens: int = 0
    written: int = 0

    @property
    def perplexity(self) -> float:
        """Of the answers; finite, however wrong."""
        return math.exp(min(self.nats, 700.0))


@dataclass(frozen=True)
class InUse:
    """``version``: hex digest of the one that answers, "" for the base model.

    ``judged``: hex digest of the newest that was judged, ``triples`` by how many. ``base``,
    ``best``, ``newest``: the base model, what answers and the newest; None: not judged.
    ``own``: hex digest of this site's own half where a mixture of ``version`` with it answers, and
    ``share`` of it; "" and 0: none does. ``personalised``: hex digest of the version from which
    the last one was trained, whether it answers or not; "": none was.
    """

    version: str = ""
    judged: str = ""
    triples: int = 0
    base: Judged | None = None
    best: Judged | None = None
    newest: Judged | None = None
    own: str = ""
    share: float = 0.0
    personalised: str = ""

    @property
    def values(self) -> InUse:
        """What answers, and nothing of how that was judged."""
        return InUse(version=self.version, own=self.own, share=self.share)


def read_in_use(path: Path) -> InUse:
    """What was written last; the base model where nothing was, or it is no such file."""
    try:
        said = json.loads(path.read_bytes())
        if said.pop("format") != _FORMAT:
            return InUse()
        judged = {
            name: Judged(**said[name]) if said[name] is not None else None
            for name in ("base", "best", "newest")
        }
        found = InUse(**said | judged)
        digests = (found.version, found.judged, found.own, found.personalised)
        sized = not {len(bytes.fromhex(digest)) for digest in digests} - {0, 32}
        mixed = found.version and 0.0 < found.share <= 1.0
        there = [one for one in judged.values() if one is not None]
        counts = [found.triples, *(n for one in there for n in (one.tokens, one.written))]
        means = [mean for one in there for mean in (one.nats, one.rouge_l, one.cited)]
        numbered = all(type(count) is int and 0 <= count < _MOST for count in counts)
        numbered = numbered and all(type(mean) in (int, float) for mean in means)
        return found if sized and numbered and (mixed or not found.own) else InUse()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return InUse()


def write_in_use(path: Path, in_use: InUse) -> None:
    """Whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as unfinished:
        unfinished.write_text(json.dumps({"format": _FORMAT, **asdict(in_use)}))
