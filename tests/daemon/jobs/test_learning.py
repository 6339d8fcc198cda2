"""The learning worker's jobs, from documents to an update, on a small encoder."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from config.recipes import ServerOptions
from crypto.quantize import LOSS_BOUND
from daemon.jobs import learning
from daemon.learning.options import (
    EmbeddingProgress,
    EncoderError,
    EpochProgress,
    LearningError,
    TrainingError,
    TrainingOptions,
    TrainingResult,
)
from daemon.learning.retriever import training, training_data
from daemon.learning.retriever.retriever import Retriever
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.learning.updates import check_update
from daemon.library.dense import folder as index_folder
from daemon.library.dense import index
from daemon.library.dense.folder import load_index
from daemon.library.readers.documents import Document, Pair
from daemon.library.store import Library
from daemon.pairs import made
from daemon.pairs.made import Made
from daemon.pairs.training_set import training_set
from daemon.personal.serving import open_retriever, retriever_for
from daemon.process.workers import Worker
from daemon.state.versions import VersionError, read_version, write_version
from tests.daemon.evaluation.rankings import evaluate_rankings
from tests.support.small_models import small_encoder

SUBJECTS = ["pump", "lamp", "rope", "sail", "gate", "bell", "well", "kiln", "loom", "mill"]
PLAN = TrainingOptions(local_epochs=6, batch_size=4, learning_rate=3e-3, hard_negatives=2)

DOCUMENTS = [
    Document(f"yard/{subject}#0", f"The {subject}", f"Keep it dry, and the {subject} will serve.")
    for subject in SUBJECTS
]
PAIRS = [
    Pair(f"what care does the {subject} need?", (f"yard/{subject}#0",)) for subject in SUBJECTS
]


@dataclass(frozen=True)
class Site:
    """A site's folder and what it runs."""

    spec: RetrieverSpec
    folder: Path

    @property
    def library(self) -> Path:
        return self.folder / "library.sqlite3"

    @property
    def versions(self) -> Path:
        return self.folder / "versions"

    def indexed(self, digest: bytes, folder: str = "index") -> Path:
        return learning.build_index(
            self.spec, self.library, self.versions, digest, self.folder / folder
        )

    def train(
        self, parent: bytes, plan: TrainingOptions = PLAN, round: int = 1, site: str = "yard"
    ) -> tuple[TrainingResult, np.ndarray[tuple[int], np.dtype[np.float32]]]:
        update = self.folder / "spool" / "update.npy"
        result = learning.train(
            self.spec, self.library, self.versions, parent, plan, round, site, update
        )
        return result, np.load(update, allow_pickle=False)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> RetrieverSpec:
    folder = small_encoder(tmp_path_factory.mktemp("encoder"), [*SUBJECTS, "care", "keep"])
    return RetrieverSpec(encoder=str(folder), max_tokens=48, device="cpu")


@pytest.fixture
def site(spec: RetrieverSpec, tmp_path: Path) -> Site:
    made = Site(spec, tmp_path)
    learning.ingest(spec, made.library, DOCUMENTS, PAIRS, passage_tokens=40)
    return made


def test_ingest_stores_documents_and_pairs_and_the_second_time_nothing(
    site: Site,
) -> None:
    counts = learning.ingest(site.spec, site.library, DOCUMENTS, PAIRS, passage_tokens=40)
    assert (counts.new, counts.changed, counts.unchanged) == (0, 0, 10)
    with Library.open(site.library) as library:
        assert library.counts().passages == 10
        assert library.counts().pairs_train == 10


@pytest.mark.slow
def test_the_token_budget_cuts_documents(site: Site) -> None:
    long = Document("yard/long", "", "The mill turns. " * 30)
    learning.ingest(site.spec, site.library, [long], [], passage_tokens=40)
    with Library.open(site.library) as library:
        pieces = [p for p in library.passages() if p.document_id == "yard/long"]
    count = open_retriever(site.spec).encoder.count_tokens
    assert len(pieces) >= 3
    assert all(count(piece.text) <= 40 for piece in pieces)


def test_passages_are_embedded_once(site: Site) -> None:
    assert learning.embed_passages(site.spec, site.library).done == 10
    assert learning.embed_passages(site.spec, site.library).done == 0
    learning.ingest(
        site.spec, site.library, [replace(DOCUMENTS[0], text="It moved.")], [], passage_tokens=40
    )
    assert learning.embed_passages(site.spec, site.library).done == 1


def test_all_sites_start_from_the_same_version(site: Site, tmp_path: Path) -> None:
    digest = learning.write_initial_version(site.spec, site.versions)
    assert learning.write_initial_version(site.spec, tmp_path / "elsewhere") == digest
    shape = learning.describe(site.spec).shape_manifest
    assert len(read_version(site.versions, digest, shape.digest)) == shape.total


def test_an_update_is_the_difference_and_the_loss(site: Site) -> None:
    parent = learning.write_initial_version(site.spec, site.versions)
    result, update = site.train(parent)
    total = learning.describe(site.spec).shape_manifest.total
    assert update.dtype == np.float32
    assert update.shape == (total + 1,)
    assert update[-1] == np.float32(result.mean_loss / LOSS_BOUND) > 0
    assert 0 < np.abs(update[:-1]).max() < 1
    assert result.num_examples == 10
    assert sorted(path.name for path in (site.folder / "spool").iterdir()) == ["update.npy"]


def test_training_can_be_repeated_and_differs_by_round_and_site(site: Site) -> None:
    parent = learning.write_initial_version(site.spec, site.versions)
    _, first = site.train(parent)
    _, again = site.train(parent)
    assert again.tobytes() == first.tobytes()
    assert site.train(parent, round=2)[1].tobytes() != first.tobytes()
    assert site.train(parent, site="harbour")[1].tobytes() != first.tobytes()


def test_no_local_epoch_gives_an_update_of_zeros(site: Site) -> None:
    parent = learning.write_initial_version(site.spec, site.versions)
    result, update = site.train(parent, replace(PLAN, local_epochs=0))
    assert not update.any()
    assert (result.mean_loss, result.num_examples) == (0.0, 10)


def test_a_student_goes_on_from_where_it_was_and_not_twice(site: Site) -> None:
    plan = replace(PLAN, start_from="local", local_epochs=2)
    site = replace(site, spec=replace(site.spec, personal_folder=str(site.folder / "personal")))
    parent = learning.write_initial_version(site.spec, site.versions)
    _, first = site.train(parent, plan, round=1)
    _, again = site.train(parent, plan, round=1)
    assert again.tobytes() == first.tobytes(), "another attempt starts from where this one did"
    _, second = site.train(parent, plan, round=2)
    _, fresh = site.train(parent, replace(plan, start_from="global"), round=2)
    assert np.linalg.norm(second[:-1]) > 1.2 * np.linalg.norm(fresh[:-1])
    assert second[-1] < fresh[-1], "it had learned already"


@pytest.mark.slow
def test_a_student_of_an_earlier_run_is_not_taken_up(site: Site) -> None:
    """From it, an update would take back what the runs between have brought."""
    plan = replace(PLAN, start_from="local", local_epochs=1)
    site = replace(site, spec=replace(site.spec, personal_folder=str(site.folder / "personal")))
    new = replace(site, spec=replace(site.spec, personal_folder=str(site.folder / "new")))
    parent = learning.write_initial_version(site.spec, site.versions)
    site.train(parent, plan, round=1)
    later = replace(plan, seed=plan.seed + 1)
    assert site.train(parent, later, 2)[1].tobytes() == new.train(parent, later, 2)[1].tobytes()
    # With the same seed as well, when a round between went on from the shared version.
    _, goes_on = site.train(parent, later, round=3)
    site.train(parent, replace(plan, start_from="global"), round=3)
    _, begins = site.train(parent, later, round=4)
    assert np.linalg.norm(begins[:-1]) < 0.9 * np.linalg.norm(goes_on[:-1])


@pytest.mark.slow
def test_a_student_needs_a_place_and_another_encoders_is_left_alone(
    site: Site, tmp_path: Path
) -> None:
    plan = replace(PLAN, start_from="local", local_epochs=1)
    parent = learning.write_initial_version(site.spec, site.versions)
    with pytest.raises(LearningError, match="no folder"):
        site.train(parent, plan)
    placed = replace(site.spec, personal_folder=str(tmp_path / "personal"))
    with pytest.raises(LearningError, match="do not combine"):
        clash = replace(placed, adapt="lora_server")
        replace(site, spec=clash).train(learning.write_initial_version(clash, site.versions), plan)
    with pytest.raises(LearningError, match="momentum goes on"):
        moved = replace(PLAN, server=ServerOptions("fedavgm"))
        replace(site, spec=clash).train(learning.write_initial_version(clash, site.versions), moved)
    replace(site, spec=placed).train(parent, plan, round=1)
    shorter = replace(placed, max_tokens=40)  # the digest covers the length that texts are cut at
    there = learning.write_initial_version(shorter, site.versions)
    _, update = replace(site, spec=shorter).train(there, plan, round=2)
    global_plan = replace(plan, start_from="global")
    assert (
        update.tobytes()
        == replace(site, spec=shorter).train(there, global_plan, round=2)[1].tobytes()
    )


def test_where_negatives_come_from_changes_what_is_learned(site: Site) -> None:
    parent = learning.write_initial_version(site.spec, site.versions)
    # A random encoder says nearly the same of every text: features that differ, then.
    chance = np.random.default_rng(0)
    digest = retriever_for(site.spec).encoder.digest
    passages, queries = (chance.normal(size=(10, 32)).astype(np.float32) for _ in range(2))
    with Library.open(site.library) as library:
        library.put_features(digest, [passage.rowid for passage in library.passages()], passages)
        library.put_query_features(digest, [pair.query for pair in PAIRS], queries)
    negatives: list[Literal["in_batch", "bm25", "static"]] = ["in_batch", "bm25", "static"]
    updates = {site.train(parent, replace(PLAN, negatives=n))[1].tobytes() for n in negatives}
    assert len(updates) == 3
    nothing = replace(PLAN, negatives="bm25", hard_negatives=0)
    in_batch = replace(PLAN, negatives="in_batch")
    assert site.train(parent, nothing)[1].tobytes() == site.train(parent, in_batch)[1].tobytes()


def test_no_update_that_is_not_finite_leaves_the_job(site: Site) -> None:
    digest = learning.write_initial_version(site.spec, site.versions)
    shape = learning.describe(site.spec).shape_manifest
    vector = read_version(site.versions, digest, shape.digest)
    vector[:] = 3e38  # finite, and nothing that is computed with it
    parent, _ = write_version(site.versions, shape.digest, vector)
    with pytest.raises(TrainingError, match=r"not finite|became nan"):
        site.train(parent)
    assert not (site.folder / "spool").exists()
    # The worker keeps its retriever: what went wrong must not stay in it.
    assert np.isfinite(site.train(digest)[1]).all()


def test_an_update_that_weighs_nothing_is_refused() -> None:
    with pytest.raises(TrainingError, match="weighs nothing"):
        check_update(np.zeros(3, dtype=np.float32), 0)
    with pytest.raises(TrainingError, match="not finite"):
        own = np.array([np.inf], dtype=np.float32)
        check_update(np.zeros(3, dtype=np.float32), 1, own)


def reciprocal_rank(site: Site, digest: bytes) -> float:
    path = site.indexed(digest)
    shape = learning.describe(site.spec).shape_manifest
    retriever = open_retriever(site.spec)
    retriever.load_vector(read_version(site.versions, digest, shape.digest))
    with Library.open(site.library, read_only=True) as library:
        document_of = {passage.rowid: passage.document_id for passage in library.passages()}
        pairs = library.pairs("train")
    labels, _ = load_index(path, digest).search(
        retriever.embed_queries([pair.query for pair in pairs]), 10
    )
    rankings = [[document_of[label] for label in row] for row in labels.tolist()]
    return evaluate_rankings(rankings, [set(pair.positives) for pair in pairs]).mrr_at_10


@pytest.mark.slow
@pytest.mark.parametrize("adapt", ["head", "lora"])
def test_a_version_with_the_update_applied_finds_more(site: Site, adapt: str) -> None:
    plan = PLAN
    if adapt == "lora":  # a random encoder's attention hardly looks at the words: larger steps
        site = replace(site, spec=replace(site.spec, adapt="lora"))
        plan = replace(PLAN, local_epochs=12, batch_size=10, learning_rate=5e-2)
    parent = learning.write_initial_version(site.spec, site.versions)
    _, update = site.train(parent, plan)
    shape = learning.describe(site.spec).shape_manifest
    vector = read_version(site.versions, parent, shape.digest) + update[:-1]
    after, _ = write_version(site.versions, shape.digest, vector)
    assert reciprocal_rank(site, after) > reciprocal_rank(site, parent) + 0.1


def test_an_index_is_built_once_and_again_when_damaged(site: Site) -> None:
    digest = learning.write_initial_version(site.spec, site.versions)
    path = site.indexed(digest)
    assert load_index(path, digest).count == 10
    written = (path / "index.hnsw").stat().st_mtime_ns
    assert site.indexed(digest) == path
    assert (path / "index.hnsw").stat().st_mtime_ns == written
    (path / "index.hnsw").write_bytes(b"damaged")
    assert site.indexed(digest) == path
    assert load_index(path, digest).count == 10


@pytest.mark.parametrize("adapt", ["head", "lora"])
def test_a_change_of_the_library_embeds_what_is_new_and_no_more(
    site: Site, adapt: Literal["head", "lora"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "_QUICKLY_BUILT", 1)
    site = replace(site, spec=replace(site.spec, adapt=adapt))
    digest = learning.write_initial_version(site.spec, site.versions)
    before = site.indexed(digest)
    embedded, asked = training_data.embedded, list[int]()

    def counting(library: Library, retriever: Retriever, rowids: list[int]) -> object:
        asked.extend(rowids)
        return embedded(library, retriever, rowids)

    monkeypatch.setattr(training_data, "embedded", counting)
    keel = Document("yard/keel", "The keel", "Keep it straight, and the keel will serve.")
    learning.ingest(site.spec, site.library, [keel], [], passage_tokens=40)
    after = site.indexed(digest)
    opened = load_index(after, digest)
    assert asked == opened.delta.labels.tolist() == opened.labels()[-1:].tolist()
    assert (opened.count, len(opened.gone)) == (11, 0)
    assert (before / "index.hnsw").stat().st_ino == (after / "index.hnsw").stat().st_ino
    anew = load_index(site.indexed(digest, "anew"), digest)
    assert np.allclose(opened.vectors(opened.labels()), anew.vectors(anew.labels()), atol=1e-5)


def test_after_a_removal_no_file_has_the_vector_whatever_comes_between(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index isn't made at once here, as after a crash; and a document comes first."""
    monkeypatch.setattr(index, "_QUICKLY_BUILT", 1)
    digest = learning.write_initial_version(site.spec, site.versions)
    opened = load_index(site.indexed(digest), digest)
    with Library.open(site.library) as library:
        gone = [p.rowid for p in library.passages() if p.document_id == DOCUMENTS[3].id]
        _, features = library.features(open_retriever(site.spec).encoder.digest, gone)
    vectors = [*opened.vectors(np.array(gone)), *features]
    assert len(vectors) == 2

    def holding() -> list[str]:
        files = [file for file in site.folder.rglob("*") if file.is_file()]
        return [f.name for f in files if any(v.tobytes() in f.read_bytes() for v in vectors)]

    assert "vectors.npy" in holding()
    learning.remove(site.library, [DOCUMENTS[3].id])
    keel = Document("yard/keel", "The keel", "Keep it straight, and the keel will serve.")
    learning.ingest(site.spec, site.library, [keel], [], passage_tokens=40)
    kept = site.indexed(digest)
    index_folder.remove_other_indexes(kept.parent, [kept])
    assert holding() == []
    assert load_index(kept, digest).count == 10
    assert not len(load_index(kept, digest).gone)


def test_held_out_documents_are_never_learned_from(site: Site) -> None:
    """Not as positives, not as negatives: with or without them the update has the same bits."""
    parent = learning.write_initial_version(site.spec, site.versions)
    result, update = site.train(parent)
    held_out = [
        Document(f"yard/{split}#0", "Care", "what care does the pump need?", split)
        for split in ("valid", "test")
    ]
    secret = [Pair("what care does the anchor need?", ("yard/test#0",), "train")]
    asked = [Pair("who looks after the bell?", ("yard/bell#0",), "test")]
    learning.ingest(site.spec, site.library, held_out, [*secret, *asked], passage_tokens=40)
    again, with_them = site.train(parent)
    assert with_them.tobytes() == update.tobytes()
    assert again.num_examples == result.num_examples


def test_the_passage_that_a_sentence_was_cut_from_is_no_negative_of_it(
    site: Site, tmp_path: Path
) -> None:
    """Nor is the cut passage one of a question that was supplied about the whole."""
    made_path = tmp_path / "made.jsonl"
    spec = replace(site.spec, learn_from="supplied+made", made_pairs=str(made_path))
    text = "Keep it dry, and the pump will serve"
    made.write(made_path, [Made("who keeps it dry?", (text,), ("yard/pump#0",), "inverse-cloze")])
    retriever = open_retriever(spec)
    retriever.load_vector(retriever.initial_vector())
    chance = np.random.default_rng(0)  # a random encoder says nearly the same of every text
    features = chance.normal(size=(10, 32)).astype(np.float32)
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    with Library.open(site.library) as library:
        rowids = [passage.rowid for passage in library.passages()]
        library.put_features(retriever.encoder.digest, rowids, features)
        pairs = training_set(library, retriever, PLAN, spec)
    assert pairs.right is not None
    assert pairs.parent is not None
    whole = pairs.passages.texts.index("The pump\nKeep it dry, and the pump will serve.")
    cut = pairs.passages.texts.index(text)
    asked = pairs.queries.texts.index("what care does the pump need?")
    assert len(pairs.positives) == 11
    assert pairs.positives[-1].tolist() == [cut]
    assert pairs.positives[asked].tolist() == [whole]
    batch = np.array([10, asked])
    hidden = training.also_right(
        pairs, batch, np.array([whole, cut]), np.array([cut, whole]), np.arange(11)
    )
    assert hidden.tolist() == [[True, False], [False, True]]
    assert not {whole, cut} & {*pairs.negatives[-1], *pairs.negatives[asked]}
    assert len(pairs.negatives[-1]) == PLAN.hard_negatives


def test_whatever_answers_a_question_is_no_negative_of_it(site: Site) -> None:
    """Asked on two lines with an answer on each; or answered by a part that no pair names."""
    documents = [
        Document("yard/oil#0", "", "Oil the winch in spring."),
        Document("yard/oil#1", "", "Oil the winch in autumn as well."),
        Document("yard/rust", "", "Rust is what oil keeps away."),
    ]
    pairs = [
        Pair("when is the winch oiled?", ("yard/oil#0",), "train"),
        Pair("When is the  winch oiled?", ("yard/rust",), "train"),
    ]
    learning.ingest(site.spec, site.library, documents, pairs, passage_tokens=40)
    retriever = open_retriever(site.spec)
    retriever.load_vector(retriever.initial_vector())
    # Texts that a random encoder tells apart.
    features = np.random.default_rng(0).normal(size=(13, 32)).astype(np.float32)
    plan = replace(PLAN, hard_negatives=12)
    with Library.open(site.library) as library:
        rowids = [passage.rowid for passage in library.passages()]
        library.put_features(retriever.encoder.digest, rowids, features)
        made = training_set(library, retriever, plan, site.spec)
    texts = made.passages.texts
    right = [row for row, text in enumerate(texts) if text.startswith(("Oil", "Rust"))]
    both = [n for n, query in enumerate(made.queries.texts) if "winch" in query]
    assert (len(right), len(both)) == (3, 2)
    for pair in both:
        assert made.answers[pair].tolist() == right
        assert made.answers[pair] is made.answers[both[0]], "one array, however often it is asked"
        assert not {*right} & {*made.negatives[pair].tolist()}
        assert len(made.negatives[pair]) > 5
    hidden = training.also_right(
        made, np.array(both), np.array(right), np.array([right[0], right[2]]), np.arange(13)
    )
    assert hidden.tolist() == [[False, True, True], [True, True, False]]


def test_query_features_are_kept_for_the_next_round(site: Site) -> None:
    parent = learning.write_initial_version(site.spec, site.versions)
    site.train(parent)
    digest = retriever_for(site.spec).encoder.digest
    with Library.open(site.library, read_only=True) as library:
        known = library.query_features(digest, [pair.query for pair in PAIRS])
    assert len(known) == 10


def test_a_site_without_pairs_says_so(spec: RetrieverSpec, tmp_path: Path) -> None:
    site = Site(spec, tmp_path)
    learning.ingest(spec, site.library, DOCUMENTS, [], passage_tokens=40)
    parent = learning.write_initial_version(spec, site.versions)
    with pytest.raises(TrainingError, match="0 usable training pairs"):
        site.train(parent)
    empty = Site(spec, tmp_path / "empty")
    with pytest.raises(VersionError, match="cannot read model version"):
        empty.train(parent)


def test_a_missing_parent_is_refused(site: Site) -> None:
    with pytest.raises(VersionError, match="cannot read model version"):
        site.train(b"\x01" * 32)


@pytest.mark.slow
def test_importing_the_jobs_loads_nothing_heavy() -> None:
    """The daemon's main process imports them to name them."""
    heavy = "{'torch', 'transformers', 'peft', 'hnswlib', 'tenseal', 'ir_measures'}"
    program = (
        "import sys, daemon.jobs.learning, daemon.learning.options, daemon.evaluation.evaluation\n"
        f"print(sorted({heavy} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
async def test_in_a_worker_progress_and_refusals_arrive(site: Site, tmp_path: Path) -> None:
    worker = Worker("learning", threads=1)
    seen: list[object] = []
    try:
        await worker.run_reporting(seen.append, learning.embed_passages, site.spec, site.library)
        parent = await worker.run(learning.write_initial_version, site.spec, site.versions)
        update = tmp_path / "update.npy"
        result = await worker.run_reporting(
            seen.append, learning.train, site.spec, site.library, site.versions, parent, PLAN, 1,
            "yard", update,
        )  # fmt: skip
        with pytest.raises(EncoderError, match="does not exist"):
            await worker.run(learning.describe, replace(site.spec, encoder="./nowhere"))
    finally:
        await worker.stop()
    assert EmbeddingProgress(10, 10) in seen
    epochs = [item for item in seen if isinstance(item, EpochProgress)]
    assert [item.epoch for item in epochs] == [1, 2, 3, 4, 5, 6]
    assert epochs[-1].loss == result.mean_loss
    assert update.exists()
