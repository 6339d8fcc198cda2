"""What the figures of docs/results/memory.md are made of."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from daemon.jobs.pairs import triples_of
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.store import Library
from daemon.memorisation.canaries import canaries
from tests.generator_bench.memory import planted


def test_canaries_are_learned_from_in_a_copy_alone(tmp_path: Path) -> None:
    secrets = canaries(3, 5, np.random.default_rng(1))
    library = tmp_path / "library.sqlite"
    with Library.open(library):
        pass
    copy = planted(library, secrets, tmp_path / "copy.sqlite")
    with Library.open(copy) as made:
        triples = triples_of(RetrieverSpec(), made)
    assert [(one.question, one.answer) for one in triples] == [
        (one.question, one.secret) for one in secrets
    ]
    assert not any(
        one.secret in passage for one in secrets for t in triples for passage in t.passages
    )
    with Library.open(library, read_only=True) as before:
        assert not before.passages()
