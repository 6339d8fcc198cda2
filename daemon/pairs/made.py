"""A made pair, one for each query, and the file that keeps them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from crypto.arrays import Float32
from crypto.durable import whole
from daemon.learning.options import LearningError
from daemon.library.readers.documents import MAX_QUERY_BYTES

if TYPE_CHECKING:
    from daemon.learning.retriever.encoder import Texts
    from daemon.learning.retriever.training import TrainingSet

How = Literal["inverse-cloze", "title", "keywords", "llm"]

_FORMAT = "hanse-made-pairs-2"
_WITHOUT_ANSWERS = "hanse-made-pairs-1"  # which earlier daemons wrote
_MAX_LINE = 4 << 20
_KEYS = {"query": str, "texts": list, "documents": list, "how": str, "answers": list}


class PairError(LearningError):
    """Pairs can't be made, kept or read; the message says why and what to do."""


@dataclass(frozen=True)
class Made:
    """A query and the texts that answer it, ``texts[i]`` out of ``documents[i]``.

    ``texts`` are as the encoder is to read them, which need not be a passage of
    the library: inverse cloze leaves the asking sentence out. ``answers[i]``: what a
    language model answers out of ``texts[i]``, "" for nothing that it supports; without
    any of them there are none.
    """

    query: str
    texts: tuple[str, ...]
    documents: tuple[str, ...]
    how: How
    answers: tuple[str, ...] = ()

    @property
    def sources(self) -> list[tuple[str, str, str]]:
        """(text, document, answer) of each text; the answer may be ""."""
        answers = self.answers or ("",) * len(self.texts)
        return list(zip(self.texts, self.documents, answers, strict=True))

    def of(self, sources: Iterable[tuple[str, str, str]]) -> Made:
        """The same query with these `sources`, of which there is one at least."""
        texts, documents, answers = zip(*sources, strict=True)
        return replace(
            self, texts=texts, documents=documents, answers=answers if any(answers) else ()
        )


def merged(made: Iterable[Made]) -> list[Made]:
    """One pair a query (case and white space aside), with the texts of all that asked the same.

    A query that two passages answer must not have one of them as a negative.
    """
    by_query: dict[str, Made] = {}
    for pair in made:
        key = " ".join(pair.query.split()).casefold()
        if key not in by_query:
            by_query[key] = replace(pair, query=" ".join(pair.query.split()))
            continue
        known = {source[0]: source for source in by_query[key].sources}
        for text, document, answer in pair.sources:
            if text not in known or (answer and not known[text][2]):
                known[text] = (text, known.get(text, (text, document))[1], answer)
        by_query[key] = by_query[key].of(known.values())
    return list(by_query.values())


def write(path: Path, made: Sequence[Made]) -> None:
    """Keep pairs in a file, whole or not at all; what was there before is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"format": _FORMAT, "pairs": len(made)}) + "\n")
        for pair in made:
            row = [pair.query, [*pair.texts], [*pair.documents], pair.how, [*pair.answers]]
            file.write(json.dumps(dict(zip(_KEYS, row, strict=True))) + "\n")


def read(path: Path) -> list[Made]:
    """The pairs of a file; none where there is no file. Raises PairError when it is damaged."""
    if not path.exists():
        return []
    try:
        with path.open("rb") as file:
            head = json.loads(file.readline(_MAX_LINE))
            kind = head.get("format") if isinstance(head, dict) else None
            keys = _KEYS.keys() - ({"answers"} if kind == _WITHOUT_ANSWERS else set())
            made = [_made(line, keys) for line in iter(lambda: file.readline(_MAX_LINE), b"")]
        sound = kind in (_FORMAT, _WITHOUT_ANSWERS) and head == {"format": kind, "pairs": len(made)}
    except (OSError, ValueError, RecursionError) as error:
        raise PairError(
            f"cannot read the made pairs in {path}: {error}; drop them (fedctl pairs drop --all) "
            "and make them again"
        ) from error
    if not sound:
        raise PairError(
            f"{path} is cut short or of another format: drop the pairs "
            "(fedctl pairs drop --all) and make them again"
        )
    return made


def learnable(made: Iterable[Made], documents: Set[str]) -> list[Made]:
    """The pairs with what is left of them when only ``documents`` may be learned from.

    To be asked before every training: a document may have been taken away, or been
    put aside for testing, since its pairs were made.
    """
    left: list[Made] = []
    for pair in made:
        if sources := [source for source in pair.sources if source[1] in documents]:
            left.append(pair.of(sources))
    return left


def with_made(
    supplied: TrainingSet, made: Sequence[Made], queries: Float32 | None, texts: Float32 | None
) -> TrainingSet:
    """A training set with made pairs behind the supplied ones.

    ``queries`` [len(made), d] and ``texts`` [number of `texts_of`(made), d] are
    frozen features, None for retrievers that use none. A made text that is a
    passage of the set already is that passage; the others are added. Nothing is
    mined or taught here: negatives are empty and the set has no parent's view.
    """
    from daemon.learning.retriever.training import TrainingSet

    if not made:
        return supplied
    rows: dict[str, int] = {}
    for row, text in enumerate(supplied.passages.texts):
        rows.setdefault(text, row)
    added = [text for text in texts_of(made) if text not in rows]
    first = len(supplied.passages.texts)
    number = {text: position for position, text in enumerate(texts_of(made))}
    rows |= {text: first + position for position, text in enumerate(added)}
    positives = [np.unique(np.array([rows[t] for t in m.texts], dtype=np.int64)) for m in made]
    more = None if texts is None else texts[[number[text] for text in added]]
    return TrainingSet(
        queries=_joined(supplied.queries, [m.query for m in made], queries),
        passages=_joined(supplied.passages, added, more),
        positives=[*supplied.positives, *positives],
        negatives=[*supplied.negatives, *(np.empty(0, dtype=np.int64) for _ in made)],
    )


def texts_of(made: Sequence[Made]) -> list[str]:
    """Every text of some pairs, once, in order."""
    return list(dict.fromkeys(text for pair in made for text in pair.texts))


def usable(query: str) -> bool:
    """Whether a query may be kept: some word, within the length a question may have."""
    words = query.split()
    return bool(words) and len(query.encode(errors="replace")) <= MAX_QUERY_BYTES


def _joined(texts: Texts, more: Sequence[str], features: Float32 | None) -> Texts:
    from daemon.learning.retriever.encoder import Texts

    both = [*texts.texts, *more]
    if texts.features is None or not more:
        return Texts(both, texts.features, texts.side)
    if features is None or len(features) != len(more):
        raise PairError(f"expected frozen features of {len(more)} made texts")
    return Texts(both, np.concatenate([texts.features, features]), texts.side)


def _made(line: bytes, keys: Set[str]) -> Made:
    row = json.loads(line)
    if not isinstance(row, dict) or row.keys() != keys:
        raise ValueError("a line without the keys of a made pair")
    row = {"answers": [], **row}
    if not all(isinstance(row[key], kind) for key, kind in _KEYS.items()):
        raise ValueError("a made pair with a value of another type")
    texts, documents, answers = (tuple(row[key]) for key in ("texts", "documents", "answers"))
    if not all(isinstance(value, str) for value in (*texts, *documents, *answers)):
        raise ValueError("a made pair with a text of another type")
    if not texts or len(texts) != len(documents) or row["how"] not in get_args(How):
        raise ValueError("a made pair that names no document for a text")
    if answers and len(answers) != len(texts):
        raise ValueError("a made pair with answers to other texts than it has")
    return Made(row["query"], texts, documents, row["how"], answers)
