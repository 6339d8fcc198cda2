"""Jobs of the learning worker that make pairs and triples: plain functions, plain arguments.

The daemon's main process names them and never runs them, as those of the other files here.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from crypto.arrays import Float32
from daemon.learning.options import LearningError
from daemon.learning.retriever import training_data
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.contents import Passage
from daemon.library.search import Ranked
from daemon.library.store import Library
from daemon.personal.serving import load_serving, retriever_for
from daemon.process.workers import report

if TYPE_CHECKING:
    from daemon.answering.embedding import QuestionEmbedder
    from daemon.answering.extractive import ExtractiveGenerator
    from daemon.learning.generator.triples import Triple
    from daemon.learning.retriever.retriever import Retriever
    from daemon.pairs.made import How, Made
    from daemon.pairs.replies import Remembered
    from daemon.pairs.triples import TripleCounts
    from daemon.pairs.writing import Writer


_SHOWN, _TEXTS_SHOWN = 1000, 3  # characters of a text, and texts of a pair, that people see


@dataclass(frozen=True)
class PairPlan:
    """How pairs are made; ``domain`` and what follows matter to "llm" alone.

    ``a_passage``: sentences or written queries a passage. ``top_k``: of the round
    trip. ``model``: a folder with a causal model, or ``http://127.0.0.1:PORT/v1#NAME``.
    ``answers``: the model answers what it asked, too.
    """

    how: How = "inverse-cloze"
    a_passage: int = 1
    seed: int = 0
    domain: str = "general"
    top_k: int = 10
    model: str = ""
    answers: bool = False


@dataclass(frozen=True)
class PairCounts:
    """What was made of how many passages, and what was lost on the way.

    ``answered``: pairs with an answer; ``unsupported``: answers that their passage does not
    support, and that were dropped, or that the model did not give.
    """

    passages: int
    made: int
    repeated: int
    lost: int
    seconds: float
    answered: int = 0
    unsupported: int = 0


@dataclass(frozen=True)
class PairProgress:
    """Reported while pairs are made: passages done, passages in all; then questions answered."""

    done: int
    total: int


@dataclass(frozen=True)
class PairExample:
    """A made pair for people to look at, its texts cut short; ``answers``: one a text, or none."""

    how: str
    query: str
    texts: tuple[str, ...]
    documents: tuple[str, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True)
class MadeKind:
    """Of one kind: pairs kept, of those the usable ones, and of these the answered ones."""

    pairs: int
    usable: int
    answered: int


@dataclass(frozen=True)
class MadeOverview:
    """What there is, by how it was made.

    ``training``: pairs that the site would train on now, ``supplied``: of these and
    others those that were ingested. ``triples``: what a generator would learn from.
    """

    kinds: dict[str, MadeKind]
    examples: tuple[PairExample, ...]
    supplied: int
    training: int
    triples: TripleCounts


def write_queries(
    spec: RetrieverSpec, library_path: Path, replies_path: Path, plan: PairPlan, seconds: float
) -> PairProgress:
    """Have a language model write for some ``seconds``, from where it was; how far it is.

    What it writes is kept at ``replies_path``, so that `build_pairs` finds all of it.
    A reply that has begun is waited for. Reports `PairProgress`; raises as `build_pairs`.
    """
    with Library.open(library_path) as library:
        prompts = _prompts(library.passages(split="train"), plan)
    return _write_some(prompts, _remembered(spec, replies_path, plan), seconds)


def write_answers(
    spec: RetrieverSpec,
    library_path: Path,
    made_path: Path,
    replies_path: Path,
    plan: PairPlan,
    seconds: float,
) -> PairProgress:
    """Have the language model answer the questions that `build_pairs` has kept; as there."""
    from daemon.pairs import made
    from daemon.pairs.writing import answer_prompt

    with Library.open(library_path, read_only=True) as library:
        passages = library.passages(split="train")
    asked = _to_answer(made.read(made_path), passages)
    prompts = list(dict.fromkeys(answer_prompt(*one) for one in asked))
    return _write_some(prompts, _remembered(spec, replies_path, plan), seconds)


def _write_some(prompts: Sequence[str], writer: Remembered, seconds: float) -> PairProgress:
    until = time.monotonic() + seconds
    wrote = False  # at least one, or there would be no end to it
    for done, text in enumerate(prompts):
        if writer.knows(text):
            continue
        if wrote and time.monotonic() > until:
            return PairProgress(done, len(prompts))
        list(writer.write([text]))
        wrote = True
        report(PairProgress(done + 1, len(prompts)))
    return PairProgress(len(prompts), len(prompts))


def build_pairs(
    spec: RetrieverSpec,
    library_path: Path,
    made_path: Path,
    plan: PairPlan,
    *,
    version: tuple[Path, bytes] | None = None,
    replies_path: Path | None = None,
) -> PairCounts:
    """Make pairs of the documents that may be learned from and keep them at ``made_path``.

    Reports `PairProgress` and `EmbeddingProgress`. Those of this kind that were made
    before are replaced when all is done, and stay when it fails; other kinds stay.
    ``version``: the folder of model versions and the one that the round trip is made
    with, by default the encoder as it is. ``replies_path``: what `write_queries` has
    left; it goes when the pairs are kept, or else with `keep_answers`. Raises PairError
    (unknown domain, a model that can't be had or asked, pairs there are damaged),
    EncoderError, LibraryError.
    """
    from daemon.pairs import cloze, made

    started = time.monotonic()
    others = [pair for pair in made.read(made_path) if pair.how != plan.how]
    with Library.open(library_path) as library:
        passages = library.passages(split="train")  # never what is held out
        repeated = lost = 0
        if plan.how == "inverse-cloze":
            pairs = cloze.inverse_cloze(passages, a_passage=plan.a_passage, seed=plan.seed)
        elif plan.how == "title":
            pairs = cloze.titles(passages)
        elif plan.how == "keywords":
            pairs = cloze.keywords(passages)
        elif plan.how == "llm":
            writer = _remembered(spec, replies_path, plan)
            pairs, repeated, lost = _written(spec, library, passages, plan, writer, version)
        else:
            raise LearningError(f"how = {plan.how!r}: use inverse-cloze, title, keywords or llm")
    made.write(made_path, [*others, *pairs])
    if not plan.answers:
        _end_writing(replies_path)
    return PairCounts(len(passages), len(pairs), repeated, lost, time.monotonic() - started)


def keep_answers(
    spec: RetrieverSpec,
    library_path: Path,
    made_path: Path,
    plan: PairPlan,
    *,
    replies_path: Path | None = None,
) -> tuple[int, int]:
    """Keep what the model answers to its questions where their passage says all of it.

    How many pairs have an answer now, and how many answers were dropped: not supported, or not
    given. ``replies_path``: what `write_answers` has left; it goes. Raises as `build_pairs`.
    """
    from daemon.answering.citations import supported_text
    from daemon.pairs import made
    from daemon.pairs.writing import answer_of, answer_prompt

    pairs = made.read(made_path)
    with Library.open(library_path, read_only=True) as library:
        passages = library.passages(split="train")
    asked = _to_answer(pairs, passages)
    replies = _remembered(spec, replies_path, plan).write([answer_prompt(*one) for one in asked])
    answers: dict[tuple[str, str], str] = {}
    for (passage, query), reply in zip(asked, replies, strict=True):
        if answer := supported_text(answer_of(reply), passage):
            answers[query, passage.embedding_text] = answer
    with_answers = [
        pair.of((t, d, answers.get((pair.query, t), "")) for t, d, _ in pair.sources)
        if pair.how == "llm"
        else pair
        for pair in pairs
    ]
    made.write(made_path, with_answers)
    _end_writing(replies_path)
    return sum(bool(pair.answers) for pair in with_answers), len(asked) - len(answers)


def triples_of(spec: RetrieverSpec, library: Library) -> list[Triple]:
    """What this site's generator learns from; see `daemon.pairs.triples`.

    What is distilled is picked with the encoder as it came, so that no round changes it; all is
    remembered while this worker lives. ``library``: open for writing, for it keeps features.
    Raises PairError, LibraryError, EncoderError.
    """
    from daemon.answering.citations import support_of
    from daemon.pairs.triples import questions_to_learn, triples

    return triples(
        questions_to_learn(spec, library),
        _known_triples(spec),
        support=support_of,
        distil=_Distilling(spec, library).picked,
    )


def overview(
    spec: RetrieverSpec, library_path: Path, made_path: Path, how: str = "", examples: int = 0
) -> MadeOverview:
    """What was made so far, with ``examples`` of each kind, or of kind ``how`` alone.

    Raises PairError when the file is damaged, LibraryError.
    """
    from daemon.pairs import made
    from daemon.pairs.training_set import training_pairs
    from daemon.pairs.triples import counts_of, questions_to_learn

    pairs = made.read(made_path)
    with Library.open(library_path, read_only=True) as library:
        documents = {passage.document_id for passage in library.passages(split="train")}
        supplied = library.counts().pairs_train
        spec = replace(spec, made_pairs=str(made_path))
        training = training_pairs(spec, library)
        triples = counts_of(questions_to_learn(spec, library))
    kinds: dict[str, MadeKind] = {}
    shown: list[PairExample] = []
    for kind in dict.fromkeys(pair.how for pair in pairs):
        ours = [pair for pair in pairs if pair.how == kind]
        usable = made.learnable(ours, documents)
        answered = sum(bool(pair.answers) for pair in usable)
        kinds[kind] = MadeKind(len(ours), len(usable), answered)
        if how in ("", kind):
            step = max(1, len(usable) // max(1, examples))
            shown += [_example(pair) for pair in usable[::step][:examples]]
    return MadeOverview(kinds, tuple(shown), supplied, training, triples)


def drop_pairs(made_path: Path, how: str = "") -> None:
    """Forget the pairs of a kind; of all kinds, also where the file is damaged."""
    from daemon.pairs import made

    left = [pair for pair in made.read(made_path) if pair.how != how] if how else []
    if left:
        made.write(made_path, left)
    else:
        made_path.unlink(missing_ok=True)


def forget_documents(
    library_path: Path, made_path: Path, replies_path: Path, ids: Sequence[str]
) -> None:
    """Forget what was made of these documents; raises PairError, and all stays then.

    And of any that are not here: an earlier daemon let records leave their files without it.

    What a language model has written, and not been asked for yet, goes as a whole: it does
    not say of which passage it is.
    """
    from daemon.pairs import made

    gone = set(ids)
    pairs = made.read(made_path)
    named = {name for pair in pairs for name in pair.documents}
    with Library.open(library_path, read_only=True) as library:
        left = made.learnable(pairs, library.known(sorted(named)) - gone)
    if left != pairs:
        made.write(made_path, left)
    replies_path.unlink(missing_ok=True)


def trainable(spec: RetrieverSpec, library_path: Path) -> int:
    """How many pairs the site would train on; raises PairError, LibraryError."""
    from daemon.pairs.training_set import training_pairs

    with Library.open(library_path, read_only=True) as library:
        return training_pairs(spec, library)


def _example(pair: Made) -> PairExample:
    texts = tuple(text[:_SHOWN] for text in pair.texts[:_TEXTS_SHOWN])
    documents, answers = pair.documents[: len(texts)], pair.answers[: len(texts)]
    return PairExample(pair.how, pair.query, texts, documents, answers)


def _prompts(passages: Sequence[Passage], plan: PairPlan) -> list[str]:
    from daemon.pairs.writing import prompt

    return [prompt(p, domain=plan.domain, count=plan.a_passage) for p in passages]


class _Distilling:
    """The extractive generator's answers from the passages of a pair, those nearest first."""

    def __init__(self, spec: RetrieverSpec, library: Library) -> None:
        self._spec, self._library = spec, library

    def picked(self, question: str, passages: Sequence[Passage]) -> tuple[str, list[Passage]]:
        """See `daemon.pairs.triples.Distil`."""
        from daemon.evaluation.answers import without_marks
        from daemon.pairs.triples import PASSAGES

        embed, generator = self._ready
        cosines = self._vectors(passages) @ embed(question)
        nearest = np.argsort(-cosines, kind="stable")[:PASSAGES].tolist()
        ranked = [Ranked(passages[row], float(cosines[row])) for row in nearest]
        given = generator.generate(question, ranked)
        numbers = [citation.number for citation in given.citations]
        answer = " ".join(without_marks(given.text, numbers).split()) if numbers else ""
        return answer, [one.passage for one in ranked]

    @functools.cached_property
    def _ready(self) -> tuple[QuestionEmbedder, ExtractiveGenerator]:
        from daemon.answering.embedding import QuestionEmbedder, RememberedSentences
        from daemon.answering.extractive import ExtractiveGenerator

        embed = QuestionEmbedder(self._retriever)
        return embed, ExtractiveGenerator(embed, RememberedSentences(self._retriever))

    @functools.cached_property
    def _retriever(self) -> Retriever:
        retriever = retriever_for(self._spec)
        # The worker's last job may have left any version in it.
        retriever.load_vector(retriever.initial_vector())
        return retriever

    @functools.cached_property
    def _of_passages(self) -> dict[str, Float32]:
        passages = self._library.passages(split="train")
        rowids = [passage.rowid for passage in passages]
        features = training_data.passage_features(self._library, self._retriever, rowids)
        texts = [passage.embedding_text for passage in passages]
        return dict(zip(texts, self._retriever.embed_passages(texts, features), strict=True))

    def _vectors(self, passages: Sequence[Passage]) -> Float32:
        """[n, d]; a made text need not be a passage of the library."""
        known = self._of_passages
        return np.stack([
            known[text] if text in known else self._retriever.embed_passages([text])[0]
            for text in (passage.embedding_text for passage in passages)
        ])  # fmt: skip


@functools.lru_cache(maxsize=1)
def _known_triples(spec: RetrieverSpec) -> dict[bytes, Triple | None]:
    """What came of questions in this worker, with this encoder; see `triples`."""
    del spec
    return {}


def _to_answer(pairs: Sequence[Made], passages: Sequence[Passage]) -> list[tuple[Passage, str]]:
    """The written queries, each with every passage that it asks of."""
    of_text = {passage.embedding_text: passage for passage in passages}
    return [
        (of_text[text], pair.query)
        for pair in pairs
        if pair.how == "llm"
        for text in pair.texts
        if text in of_text
    ]


def _end_writing(replies_path: Path | None) -> None:
    if replies_path is not None:
        replies_path.unlink(missing_ok=True)
    _writer.cache_clear()  # a language model's memory is not to be held for the next build


def _remembered(spec: RetrieverSpec, replies_path: Path | None, plan: PairPlan) -> Remembered:
    from daemon.pairs.replies import Remembered

    return Remembered(replies_path, plan.model, lambda: _writer(plan.model, spec.device))


def _written(
    spec: RetrieverSpec,
    library: Library,
    passages: Sequence[Passage],
    plan: PairPlan,
    writer: Writer,
    version: tuple[Path, bytes] | None,
) -> tuple[list[Made], int, int]:
    from daemon.pairs.round_trip import round_trip
    from daemon.pairs.writing import written

    made = written(
        passages,
        writer,
        domain=plan.domain,
        count=plan.a_passage,
        told=lambda done, total: report(PairProgress(done, total)),
    )
    retriever = retriever_for(spec)
    # The worker's last job may have left any version in it.
    if version is None:
        retriever.load_vector(retriever.initial_vector())
    else:
        load_serving(spec, retriever, *version)
    rowids = [passage.rowid for passage in passages]
    features = training_data.passage_features(library, retriever, rowids)
    texts = [passage.embedding_text for passage in passages]
    filtered = round_trip(
        made,
        _embedded(library, retriever, [pair.query for pair in made]),
        texts,
        retriever.embed_passages(texts, features),
        k=plan.top_k,
    )
    return filtered.kept, filtered.repeated, filtered.lost


def _embedded(library: Library, retriever: Retriever, queries: Sequence[str]) -> Float32:
    if not queries:
        return np.zeros((0, retriever.encoder.dimension), dtype=np.float32)
    return retriever.embed_queries(
        queries, training_data.query_features(library, retriever, queries)
    )


@functools.lru_cache(maxsize=1)
def _writer(model: str, device: str) -> Writer:
    from daemon.pairs.made import PairError
    from daemon.pairs.writers import LocalModel, LocalServer

    if not model:
        raise PairError("how = 'llm' needs a model: a folder, or http://127.0.0.1:PORT/v1#NAME")
    if model.startswith(("http:", "https:")):
        url, _, name = model.partition("#")
        return LocalServer(url, name)
    return LocalModel.load(Path(model), device="cuda" if device == "cuda" else "cpu")
