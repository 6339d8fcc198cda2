"""What a site's generator learns from: its questions, each with one answer and its passages.

One triple a question (case and white space aside), by the best answer that there is: one that
somebody supplied with the pair, else one that the site's own language model has made and its
passage supports, else what the extractive generator picks from the passages of the pair. In the
order in which the pairs came, and the same each time.

Nothing that is held out is in it: no passage of another split than train, no question that a
validation or test pair asks, too, and no supplied answer of a pair that names a document which
is not learned from, for it may be that document's. Nothing leaves the site.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from daemon.learning.generator.triples import Triple
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.contents import Passage
from daemon.library.readers.documents import Pair
from daemon.library.store import Library
from daemon.pairs.made import Made, learnable, merged, read

PASSAGES = 3
"""Of a triple, at most: a supplied answer is of a document, which may have hundreds."""
_PAGE = 1000  # pairs that are read at once

Support = Callable[[str, Passage], float]
"""How well a passage supports an answer; greater is better."""
Distil = Callable[[str, Sequence[Passage]], tuple[str, Sequence[Passage]]]
"""The extractive answer to a question from some passages, and those it looked at; "": none."""


@dataclass(frozen=True)
class Asked:
    """A question, the passages that may answer it, and the right ``answers``.

    With ``made`` the answers are the language model's, ``made[i]`` out of ``passages[i]`` or "";
    without any of both the answer is to be distilled.
    """

    question: str
    passages: tuple[Passage, ...]
    answers: tuple[str, ...] = ()
    made: tuple[str, ...] = ()


@dataclass(frozen=True)
class TripleCounts:
    """Of how many questions the answer is of which kind.

    ``to_distil``: those without an answer; of some the extractive generator may find none.
    """

    supplied: int
    made: int
    to_distil: int


def questions_to_learn(spec: RetrieverSpec, library: Library) -> list[Asked]:
    """The site's questions with the best answer that there is, as ``spec.learn_from`` has it.

    Raises PairError when the file of made pairs is damaged, LibraryError.
    """
    passages = library.passages(split="train")
    of_document: dict[str, list[Passage]] = {}
    for passage in passages:
        of_document.setdefault(passage.document_id, []).append(passage)
    held_out: set[str] = set()
    found: dict[str, Asked] = {}
    for pair in _all_pairs(library):
        if pair.split != "train":
            held_out.add(_key(pair.query))
        elif spec.learn_from != "made":
            _add_supplied(found, _of_supplied(pair, of_document))
    if spec.learn_from != "supplied":
        of_text = {passage.embedding_text: passage for passage in passages}
        # Of a question that somebody asked, too, only a made answer is taken.
        for made in merged(learnable(read(Path(spec.made_pairs)), of_document.keys())):
            known = found.get(_key(made.query))
            if known is None or not known.passages or (made.answers and not known.answers):
                found[_key(made.query)] = _of_made(made, of_text)
    return [asked for key, asked in found.items() if asked.passages and key not in held_out]


def held_out_triples(library: Library, support: Support) -> list[Triple]:
    """The site's validation questions that have a supplied answer, by which versions are judged.

    Raises LibraryError.
    """
    of_document: dict[str, list[Passage]] = {}
    for passage in library.passages():
        of_document.setdefault(passage.document_id, []).append(passage)
    pairs, _ = library.referenced("valid")
    found: dict[str, Asked] = {}
    for pair in pairs:
        _add_supplied(found, _of_supplied(pair, of_document))
    made: list[Triple] = []
    for asked in found.values():
        if asked.answers and asked.passages:
            answer, ranked = _best_supported(asked, support)
            made.append(Triple(asked.question, _texts(ranked), answer, "supplied"))
    return made


def counts_of(questions: Sequence[Asked]) -> TripleCounts:
    """How many of them have an answer of which kind."""
    supplied = sum(bool(one.answers) for one in questions)
    made = sum(bool(one.made) for one in questions)
    return TripleCounts(supplied, made, len(questions) - supplied - made)


def triples(
    questions: Sequence[Asked],
    known: dict[bytes, Triple | None],
    *,
    support: Support,
    distil: Distil,
) -> list[Triple]:
    """A triple of each question, but of those to which nothing is distilled.

    ``known``: what came of earlier questions, so that each round need not look again. Of those
    that are not asked any more nothing stays there: their document may be gone.
    """
    asked = {hashlib.sha256(repr(one).encode(errors="replace")).digest(): one for one in questions}
    for key in known.keys() - asked.keys():
        del known[key]
    for key, one in asked.items():
        if key not in known:
            known[key] = _triple(one, support, distil)
    return [triple for key in asked if (triple := known[key]) is not None]


def _triple(asked: Asked, support: Support, distil: Distil) -> Triple | None:
    if asked.answers:
        answer, ranked = _best_supported(asked, support)
        return Triple(asked.question, _texts(ranked), answer, "supplied")
    if asked.made:
        first = next(n for n, answer in enumerate(asked.made) if answer)
        return Triple(asked.question, _texts([asked.passages[first]]), asked.made[first], "made")
    answer, looked_at = distil(asked.question, asked.passages)
    return Triple(asked.question, _texts(looked_at), answer, "distilled") if answer else None


def _best_supported(asked: Asked, support: Support) -> tuple[str, list[Passage]]:
    """Of several right answers the one that a passage says best, and who supports it, best first.

    One passage at least: what people say is right counts, in whatever words.
    """
    answers, passages = asked.answers, asked.passages
    if len(answers) == len(passages) == 1:
        return answers[0], [*passages]
    scores = [[support(answer, one) for one in passages] for answer in answers]
    best = max(range(len(scores)), key=lambda n: max(scores[n]))
    first, *others = sorted(range(len(passages)), key=lambda n: -scores[best][n])[:PASSAGES]
    rows = [first, *(n for n in others if scores[best][n] > 0)]
    return answers[best], [passages[n] for n in rows]


def _of_supplied(pair: Pair, of_document: dict[str, list[Passage]]) -> Asked:
    passages = tuple(one for name in pair.positives for one in of_document.get(name, ()))
    known = pair.reference.answers if pair.reference is not None else ()
    whole = all(name in of_document for name in pair.positives)
    return Asked(" ".join(pair.query.split()), passages, known if whole else ())


def _of_made(pair: Made, of_text: dict[str, Passage]) -> Asked:
    passages = tuple(
        of_text.get(text) or Passage(0, "", document, "", text)
        for text, document, _ in pair.sources
    )
    return Asked(pair.query, passages, made=pair.answers)


def _add_supplied(found: dict[str, Asked], asked: Asked) -> None:
    """Of lines that ask the same the first with an answer; of those without, all passages."""
    known = found.setdefault(_key(asked.question), asked)
    if not known.answers and asked.answers:
        found[_key(asked.question)] = asked
    elif not known.answers:
        both = tuple(dict.fromkeys((*known.passages, *asked.passages)))
        found[_key(asked.question)] = Asked(known.question, both)


def _all_pairs(library: Library) -> Iterator[Pair]:
    """Oldest first, with all documents that they name and their references."""
    after = 0
    while some := library.pairs_naming("", None, after, _PAGE):
        yield from (pair for _, pair in some)
        after = some[-1][0]


def _texts(passages: Sequence[Passage]) -> tuple[str, ...]:
    """As an encoder reads them: with the title and what stands above."""
    return tuple(passage.embedding_text for passage in passages)


def _key(question: str) -> str:
    return " ".join(question.split()).casefold()
