"""The data sets as worlds: sites with libraries to learn from, and tests to take.

Everything is put into the project's own libraries (`daemon.library.store`),
with frozen features beside it, by the job that a daemon runs. A library's folder
is named after the digest of what it was made of, so a changed file makes a new
one; one that was cut short is taken up where it stopped.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from crypto.arrays import Float32
from daemon.jobs import learning
from daemon.learning.retriever.encoder import Encoder
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.readers.documents import Document, FileProblem, Item, Pair
from daemon.library.store import Library
from daemon.personal.serving import retriever_for
from tests.daemon.library.unboxed import read

PASSAGE_TOKENS = 220  # as [retrieval] has it
SYNONYMS = "synonyms"  # a test of its own: never in "test"
POOLED = "pooled"
_FORMAT = "learning-bench-1"
_SLICE = 256
_ALL = 2**62  # no limit, as SQLite counts
_FILINGS = "filings"
_FEWEST, _DRAWS = 20, 200


Told = Callable[[str, int, int], None]  # (what, done, total)


class DataError(Exception):
    """The data at that place is not what its README says."""


@dataclass(frozen=True)
class Question:
    """A test question, whose site asks it, and the documents that answer it.

    ``elsewhere``: documents of other sites that answer it too.
    """

    site: str
    text: str
    positives: frozenset[str]
    elsewhere: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Test:
    """Questions and the library they are asked of; None: each its own site's."""

    questions: tuple[Question, ...]
    corpus: str | None = None

    def right(self, question: Question) -> frozenset[str]:
        """The documents that answer it in this test: other sites' only where they can be found."""
        return question.positives | (question.elsewhere if self.corpus else frozenset())


@dataclass(frozen=True, eq=False)
class World:
    """A data set made ready: per site a library, and the tests.

    ``central``: the library that holds what all sites have, to train on and to
    ask. ``digest`` (hex) names the data and the way it was cut.
    """

    name: str
    digest: str
    folder: Path
    sites: tuple[str, ...]
    tests: dict[str, Test]
    central: str = POOLED

    def library(self, site: str) -> Path:
        """Where that site's library (or the pooled, or the tested one) lies."""
        return self.folder / f"{site}.sqlite"

    @property
    def sites_ask(self) -> bool:
        """Whether questions are the sites' own, so that each can be asked of its own model."""
        return any(q.site for test in self.tests.values() for q in test.questions)

    @property
    def libraries(self) -> tuple[str, ...]:
        """Every library, the sites' first: what others hold as well is not encoded again."""
        others = (self.central, *(test.corpus for test in self.tests.values() if test.corpus))
        return tuple(dict.fromkeys((*self.sites, *others)))


@dataclass(frozen=True)
class _Source:
    documents: Sequence[Document]
    pairs: Sequence[Pair]
    questions: dict[str, tuple[Question, ...]]


def medquad(
    data: Path,
    cache_folder: Path,
    spec: RetrieverSpec,
    sites: Sequence[str] = (),
    subset: str = "medquad",
) -> World:
    """The institutions of MedQuAD, or some of them; nothing is embedded yet."""
    root = data / subset
    chosen = tuple(sites) or tuple(sorted(p.name for p in root.iterdir() if p.is_dir()))
    sources = {site: _medquad_site(root / site) for site in chosen}
    asked = {
        name: tuple(q for site in chosen for q in sources[site].questions[name])
        for name in ("test", SYNONYMS)
    }
    tests = {"test": Test(asked["test"]), POOLED: Test(asked["test"], POOLED)}
    if asked[SYNONYMS]:
        tests[SYNONYMS] = Test(asked[SYNONYMS])
    files = [path for site in chosen for path in sorted((root / site).iterdir())]
    name = f"{subset}_{len(sites)}" if sites else subset
    return _made((name, cache_folder, spec), sources, tests, files)


def split_anew(
    data: Path, cache_folder: Path, spec: RetrieverSpec, alpha: float, subset: str = "medquad"
) -> World:
    """The same documents and questions at as many sites, allotted by Dirichlet(alpha).

    Each institution's documents are dealt out in proportions drawn for it: with a small
    alpha a site holds what one or two institutions wrote, with a large one a sample of all.
    The draw is repeated until every site has `_FEWEST` pairs to learn from.
    """
    root = data / subset
    old = sorted(path.name for path in root.iterdir() if path.is_dir())
    before = [_medquad_site(root / name) for name in old]
    chance = np.random.Generator(np.random.Philox(key=int(1000 * alpha)))
    sites = [f"site{number + 1}" for number in range(len(old))]
    for _ in range(_DRAWS):
        owner = _dealt(before, sites, alpha, chance)
        sources = {site: _at_site(site, before, owner) for site in sites}
        if min(_learned(source) for source in sources.values()) >= _FEWEST:
            break
    else:
        raise DataError(f"no split by Dirichlet({alpha}) gave every site {_FEWEST} pairs")
    asked = {
        name: tuple(q for source in sources.values() for q in source.questions[name])
        for name in ("test", SYNONYMS)
    }
    tests = {"test": Test(asked["test"]), POOLED: Test(asked["test"], POOLED)}
    if asked[SYNONYMS]:
        tests[SYNONYMS] = Test(asked[SYNONYMS])
    files = [path for name in old for path in sorted((root / name).iterdir())]
    return _made((f"{subset}_alpha_{alpha:g}", cache_folder, spec), sources, tests, files)


def fede4fin(data: Path, cache_folder: Path, spec: RetrieverSpec) -> World:
    """The five companies of FedE4FIN; the questions are FinanceBench's, of its corpus."""
    root = data / "fede4fin"
    chosen = tuple(sorted(path.name for path in root.iterdir() if path.is_dir()))
    sources = {site: _fede4fin_site(root / site, site) for site in chosen}
    bench = data / "financebench"
    pages = [bench / "eval" / "pages.jsonl.gz", *sorted(bench.glob("clients/*/pages.jsonl.gz"))]
    inside = {row["doc"] for row in _rows(bench / "docs.jsonl") if row["in_eval_corpus"]}
    questions = tuple(
        Question("", row["query"].strip(), frozenset(map(_page_id, row["positives"])))
        for row in _rows(bench / "eval" / "questions.jsonl")
    )
    asked = bench / "eval" / "questions.jsonl"
    files = [*(root / site / "pairs_train.jsonl" for site in chosen), *pages, asked]
    tests = {"test": Test(questions, _FILINGS)}
    corpus = {_FILINGS: _Source(_pages(pages, inside), (), {})}
    return _made(("fede4fin", cache_folder, spec), sources, tests, files, corpus)


def embed(world: World, spec: RetrieverSpec, told: Told) -> None:
    """Compute what the frozen encoder says about every passage and query, once.

    Done in slices of 256 texts that stay: an interrupted run goes on where it was.
    """
    known = _known_elsewhere(world, spec)
    smallest_first = sorted(world.sites, key=lambda site: world.library(site).stat().st_size)
    for name in dict.fromkeys((*smallest_first, *world.libraries)):
        asked = [
            question.text
            for test in world.tests.values()
            for question in test.questions
            if (test.corpus or question.site) == name
        ]
        with Library.open(world.library(name)) as library:
            told_here = functools.partial(told, name)
            _copy_known(library, spec, known)
            _embed_passages(library, spec, told_here)
            queries = [pair.query for split in ("train", "valid") for pair in library.pairs(split)]
            _embed_queries(library, spec, [*queries, *asked], known, told_here)
            _, vectors = library.features(encoder_of(spec).digest)
            texts = [passage.embedding_text for passage in library.passages()]
            known |= dict(zip(texts, vectors, strict=True))
            known |= library.query_features(encoder_of(spec).digest, [*queries, *asked])


def encoder_of(spec: RetrieverSpec) -> Encoder:
    """The frozen encoder, loaded once a process."""
    return _encoder(replace(spec, adapt="head", personal="none", personal_folder=""))


@cache
def _encoder(spec: RetrieverSpec) -> Encoder:
    return retriever_for(spec).encoder


def _known_elsewhere(world: World, spec: RetrieverSpec) -> dict[str, Float32]:
    """Features in other worlds' libraries: the same sites, in another selection."""
    known: dict[str, Float32] = {}
    for path in sorted(world.folder.parent.glob(f"{world.name.split('_')[0]}*/*.sqlite")):
        if path.parent != world.folder and path.with_suffix(".whole").exists():
            with Library.open(path, read_only=True) as library:
                labels, vectors = library.features(encoder_of(spec).digest)
                texts = library.passages_by_rowid(labels.tolist())
            known |= {
                texts[label].embedding_text: vector
                for label, vector in zip(labels.tolist(), vectors, strict=True)
            }
    return known


def _copy_known(library: Library, spec: RetrieverSpec, known: dict[str, Float32]) -> None:
    digest = encoder_of(spec).digest
    found = [
        (r, known[text]) for r, text in library.missing_features(digest, _ALL) if text in known
    ]
    for start in range(0, len(found), _SLICE):
        rowids, vectors = zip(*found[start : start + _SLICE], strict=True)
        library.put_features(digest, rowids, np.stack(vectors))


def _embed_passages(
    library: Library, spec: RetrieverSpec, told: Callable[[int, int], None]
) -> None:
    encoder = encoder_of(spec)
    missing = library.missing_features(encoder.digest, _ALL)
    missing.sort(key=lambda item: len(item[1]))  # equal lengths together: little padding
    for start in range(0, len(missing), _SLICE):
        some = missing[start : start + _SLICE]
        vectors = encoder.encode([text for _, text in some])
        library.put_features(encoder.digest, [rowid for rowid, _ in some], vectors)
        told(start + len(some), len(missing))


def _embed_queries(
    library: Library,
    spec: RetrieverSpec,
    queries: list[str],
    known: dict[str, Float32],
    told: Callable[[int, int], None],
) -> None:
    encoder = encoder_of(spec)
    there = library.query_features(encoder.digest, queries)
    missing = [query for query in dict.fromkeys(queries) if query not in there]
    for start in range(0, len(missing), _SLICE):
        some = missing[start : start + _SLICE]
        new = [query for query in some if query not in known]
        vectors = dict(zip(new, encoder.encode(new), strict=True)) if new else {}
        both = np.stack([known[q] if q in known else vectors[q] for q in some])
        library.put_query_features(encoder.digest, some, both)
        told(start + len(some), len(missing))


# ---- reading ---------------------------------------------------------------------


def _medquad_site(folder: Path) -> _Source:
    documents: list[Document] = []
    pairs: list[Pair] = []
    questions: dict[str, tuple[Question, ...]] = {"test": (), SYNONYMS: ()}
    for path in sorted(folder.iterdir()):
        if path.name.startswith("documents"):
            documents += [item for item in _items(path) if isinstance(item, Document)]
        elif path.name in ("pairs_train.jsonl", "pairs_valid.jsonl"):
            split = "train" if "train" in path.name else "valid"
            pairs += [_pair(row, split) for row in _rows(path)]
        elif path.name.startswith("pairs_test"):
            name = SYNONYMS if "synonyms" in path.name else "test"
            questions[name] = tuple(_question(folder.name, row) for row in _rows(path))
    return _Source(documents, pairs, questions)


def _pair(row: dict[str, Any], split: str) -> Pair:
    """With other sites' answers: a library passes over those that it doesn't hold."""
    positives = [*row["positives"], *row.get("other_site_positives", ())]
    return Pair(row["query"].strip(), tuple(dict.fromkeys(positives)), split)


def _question(site: str, row: dict[str, Any]) -> Question:
    elsewhere = frozenset(row.get("other_site_positives", ()))
    return Question(site, row["query"].strip(), frozenset(row["positives"]), elsewhere)


def _dealt(
    before: Sequence[_Source], sites: Sequence[str], alpha: float, chance: np.random.Generator
) -> dict[str, str]:
    """Document -> site."""
    owner: dict[str, str] = {}
    for source in before:
        shares = chance.dirichlet(np.full(len(sites), alpha))
        ends = np.round(np.cumsum(shares) * len(source.documents)).astype(int)
        shuffled = chance.permutation(len(source.documents))
        for site, rows in zip(sites, np.split(shuffled, ends[:-1]), strict=True):
            owner |= {source.documents[row].id: site for row in rows.tolist()}
    return owner


def _at_site(site: str, before: Sequence[_Source], owner: dict[str, str]) -> _Source:
    """What falls to one site; a question belongs to whoever holds its first answer."""
    documents = [d for s in before for d in s.documents if owner[d.id] == site]
    pairs = [p for s in before for p in s.pairs if _asker(p.positives, owner) == site]
    questions: dict[str, tuple[Question, ...]] = {}
    for name in ("test", SYNONYMS):
        mine: list[Question] = []
        for question in (q for s in before for q in s.questions[name]):
            right = question.positives | question.elsewhere
            if _asker(sorted(question.positives), owner) == site:
                here = frozenset(d for d in right if owner.get(d) == site)
                mine.append(Question(site, question.text, here, right - here))
        questions[name] = tuple(mine)
    return _Source(documents, pairs, questions)


def _asker(positives: Sequence[str], owner: dict[str, str]) -> str | None:
    return next((owner[document] for document in positives if document in owner), None)


def _learned(source: _Source) -> int:
    return sum(pair.split == "train" for pair in source.pairs)


def _fede4fin_site(folder: Path, site: str) -> _Source:
    documents: dict[str, Document] = {}
    pairs: list[Pair] = []
    for row in _rows(folder / "pairs_train.jsonl"):
        name = f"{site}/{row['index']}"
        documents[name] = Document(name, "", row["passage"], "train")
        pairs.append(Pair(row["query"].strip(), (name,), "train"))
    return _Source(list(documents.values()), pairs, {})


def _pages(paths: Sequence[Path], inside: set[str]) -> list[Document]:
    """Pages of filings; eval/ holds whole documents of the corpus, clients/ others as well."""
    found: dict[str, Document] = {}
    for path in paths:
        for row in _rows(path):
            if row["text"].strip() and row["doc"] in inside:
                name = _page_id(row["id"])
                found[name] = Document(name, "", row["text"], "test")
    return list(found.values())


def _page_id(name: str) -> str:
    """``DOC#12`` as ``DOC/page12``: a page is an answer, not a part of one (`answer_of`)."""
    document, _, page = name.rpartition("#")
    return f"{document}/page{page}"


def _items(path: Path) -> Iterator[Item]:
    for item in read(path):
        if isinstance(item, FileProblem):
            raise DataError(str(item))
        yield item


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    raw = path.read_bytes()
    text = gzip.decompress(raw) if path.suffix == ".gz" else raw
    for line in text.splitlines():
        yield json.loads(line)


# ---- libraries --------------------------------------------------------------------


def _made(
    what: tuple[str, Path, RetrieverSpec],
    sources: dict[str, _Source],
    tests: dict[str, Test],
    files: Sequence[Path],
    corpora: dict[str, _Source] | None = None,
) -> World:
    name, cache_folder, spec = what
    outer = hashlib.sha256(f"{_FORMAT}\0{PASSAGE_TOKENS}\0".encode() + encoder_of(spec).digest)
    for path in files:
        outer.update(f"{path.parent.name}/{path.name}\0".encode() + _digest(path))
    digest = outer.hexdigest()[:16]
    folder = cache_folder / f"{name}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    world = World(name, digest, folder, tuple(sources), tests)
    documents = [document for source in sources.values() for document in source.documents]
    pairs = [pair for source in sources.values() for pair in source.pairs]
    everything = {**sources, POOLED: _Source(documents, pairs, {}), **(corpora or {})}
    for site, source in everything.items():
        if not (folder / f"{site}.whole").exists():
            world.library(site).unlink(missing_ok=True)
            learning.ingest(
                spec, world.library(site), source.documents, source.pairs, PASSAGE_TOKENS
            )
            (folder / f"{site}.whole").touch()
    return world


@cache
def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
