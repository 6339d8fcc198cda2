"""The learning worker's job that makes ready what an evaluation compares a version with.

Where the encoder itself is trained, its passages' vectors from before training are
needed for nothing else, and no index has them.
"""

from __future__ import annotations

import time
from pathlib import Path

from daemon.jobs import learning
from daemon.learning.options import EmbeddingProgress
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.store import Library
from daemon.process.workers import report

_AT_ONCE = 64  # texts embedded between two progress reports, and stored in one transaction
_ALL = 2**62  # no limit, as SQLite counts


def embed_frozen(
    spec: RetrieverSpec, library_path: Path, split: str, seconds: float
) -> EmbeddingProgress:
    """Encode passages as the encoder was before training, for so long: how many of how many.

    Those that have been encoded already don't count. At least some are; reports
    `EmbeddingProgress`, and what is done stays done. Raises EvaluationError when there
    are no pairs of ``split`` to judge by, and then nothing is encoded.
    """
    from daemon.evaluation.rankings import held_out

    until = time.monotonic() + seconds
    encoder = learning.retriever_for(spec).encoder
    done = 0
    with Library.open(library_path) as library:
        held_out(library, split)
        missing = library.missing_features(encoder.digest, _ALL)
        missing.sort(key=lambda item: len(item[1]))  # equal lengths together: little padding
        while done < len(missing):
            some = missing[done : done + _AT_ONCE]
            vectors = encoder.encode([text for _, text in some])
            library.put_features(encoder.digest, [rowid for rowid, _ in some], vectors)
            done += len(some)
            report(EmbeddingProgress(done, len(missing)))
            if time.monotonic() >= until:
                break
    return EmbeddingProgress(done, len(missing))
