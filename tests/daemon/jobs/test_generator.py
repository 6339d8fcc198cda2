"""The learning worker's jobs for a generator, from a library to an update, on small models."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from config.recipes import ServerOptions
from crypto.arrays import Float32
from crypto.quantize import LOSS_BOUND
from daemon.answering import transformers_model
from daemon.answering.citations import support_of
from daemon.answering.options import AnsweringOptions, FederatedWriter
from daemon.jobs.generator import training as jobs
from daemon.jobs.generator.examples import examples_of
from daemon.jobs.generator.judging import choose, judge
from daemon.learning.generator.encoding import encoded
from daemon.learning.generator.in_use import InUse, read_in_use, write_in_use
from daemon.learning.generator.spec import GeneratorSpec
from daemon.learning.generator.triples import Triple
from daemon.learning.language_model import LanguageModelError
from daemon.learning.options import (
    EpochProgress,
    EvaluationError,
    GeneratorLoad,
    LearningError,
    TrainingError,
    TrainingOptions,
    TrainingResult,
)
from daemon.library.passages import SentenceSplitter
from daemon.library.readers.documents import Document, Pair, Reference
from daemon.library.store import Library
from daemon.pairs.triples import held_out_triples
from daemon.process.workers import Worker
from daemon.state.versions import VersionError, read_version, write_version
from tests.support.small_models import small_generator

SUBJECTS = ("pump", "lamp", "rope", "sail", "gate", "bell", "well", "kiln")
PLAN = TrainingOptions(local_epochs=4, batch_size=4, learning_rate=1e-2)
DOCUMENTS = [
    Document(
        f"yard/{subject}",
        f"The {subject}",
        f"Nobody knows who built it. The {subject} needs oil of grade {number}.",
    )
    for number, subject in enumerate(SUBJECTS)
]
PAIRS = [
    Pair(
        f"what care does the {subject} need?",
        (f"yard/{subject}",),
        reference=Reference((f"The {subject} needs oil of grade {number}.",)),
    )
    for number, subject in enumerate(SUBJECTS)
]


@dataclass(frozen=True)
class Site:
    """A site's folder and what it runs."""

    spec: GeneratorSpec
    folder: Path

    @property
    def library(self) -> Path:
        return self.folder / "library.sqlite3"

    @property
    def versions(self) -> Path:
        return self.folder / "versions"

    @property
    def update(self) -> Path:
        return self.folder / "spool" / "update.npy"

    def fill(self, documents: list[Document], pairs: list[Pair]) -> None:
        with Library.open(self.library) as library:
            words: Callable[[str], int] = lambda text: len(text.split())  # noqa: E731
            library.put_documents(documents, splitter=SentenceSplitter(words, 40))
            library.put_pairs(pairs)

    def train(
        self, parent: bytes, plan: TrainingOptions = PLAN, round: int = 1, site: str = "yard"
    ) -> tuple[TrainingResult, Float32]:
        result = jobs.train(
            self.spec, self.library, self.versions, parent, plan, round, site, self.update
        )
        return result, np.load(self.update, allow_pickle=False)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> GeneratorSpec:
    texts = [document.text for document in DOCUMENTS] + [pair.query for pair in PAIRS]
    folder = small_generator(tmp_path_factory.mktemp("base"), "llama", texts)
    return GeneratorSpec(base_model=str(folder), prompt_tokens=900, answer_tokens=64, device="cpu")


@pytest.fixture
def site(spec: GeneratorSpec, tmp_path: Path) -> Site:
    made = Site(spec, tmp_path)
    made.fill(DOCUMENTS, PAIRS)
    return made


def test_an_update_is_what_training_changed_and_its_loss(site: Site) -> None:
    first = jobs.write_initial_version(site.spec, site.versions)
    shape = jobs.describe(site.spec).shape_manifest
    result, update = site.train(first)
    assert update.dtype == np.float32
    assert update.shape == (shape.total + 1,)
    assert result.num_examples == len(PAIRS) == jobs.trainable(site.spec, site.library)
    assert update[-1] == pytest.approx(result.mean_loss / LOSS_BOUND)
    start = read_version(site.versions, first, shape.digest)
    second, _ = write_version(site.versions, shape.digest, start + update[:-1])
    again, _ = site.train(second, round=2)
    assert again.mean_loss < result.mean_loss
    # Nothing of the last job is in this one.
    assert site.train(first)[1].tobytes() == update.tobytes()
    assert site.train(first, site="mill")[1].tobytes() != update.tobytes()


def test_a_round_without_epochs_exchanges_zeros(site: Site) -> None:
    first = jobs.write_initial_version(site.spec, site.versions)
    result, update = site.train(first, replace(PLAN, local_epochs=0))
    assert result == TrainingResult(0.0, len(PAIRS))
    assert not update.any()


@pytest.mark.parametrize(
    ("documents", "pairs", "cause"),
    [
        ([], [], "none of this site's 0 question-passage-answer triples"),
        (
            DOCUMENTS,
            [replace(pair, query=pair.query * 200) for pair in PAIRS],
            "none of this site's 8 ",
        ),
    ],
    ids=["nothing", "questions without room"],
)
def test_a_site_without_triples_says_what_it_lacks(
    spec: GeneratorSpec, tmp_path: Path, documents: list[Document], pairs: list[Pair], cause: str
) -> None:
    site = Site(spec, tmp_path)
    site.fill(documents, pairs)
    first = jobs.write_initial_version(spec, site.versions)
    with pytest.raises(TrainingError, match=cause):
        site.train(first)
    assert not site.update.exists()


def test_plans_that_do_not_go_with_a_generator_are_refused(site: Site) -> None:
    first = jobs.write_initial_version(site.spec, site.versions)
    with pytest.raises(LearningError, match="a generator has none: use 'global'"):
        site.train(first, replace(PLAN, start_from="local"))
    projected = replace(site, spec=replace(site.spec, adapt="lora_server"))
    with pytest.raises(LearningError, match="aggregate = 'fedadam' and adapt = 'lora_server'"):
        projected.train(first, replace(PLAN, server=ServerOptions(rule="fedadam")))
    with pytest.raises(LearningError, match=r"set generator\.base_model"):
        jobs.describe(GeneratorSpec())
    with pytest.raises(VersionError):
        projected.train(first)


def test_what_is_held_out_is_no_triple(site: Site) -> None:
    kept = Document("yard/loom", "The loom", "The loom needs wax.", split="test")
    asked = Pair("what does the loom need?", ("yard/loom",), reference=Reference(("wax",)))
    site.fill([kept], [asked, replace(PAIRS[0], query="and now?", split="test")])
    assert jobs.trainable(site.spec, site.library) == len(PAIRS)


async def test_the_worker_says_what_it_takes_and_then_each_epoch(site: Site) -> None:
    worker = Worker("learning", threads=1)
    told: list[Any] = []
    try:
        first = await worker.run(jobs.write_initial_version, site.spec, site.versions)
        at = (site.spec, site.library, site.versions, first, PLAN, 1, "yard", site.update)
        await worker.run_reporting(told.append, jobs.train, *at)
    finally:
        await worker.stop()
    load, *epochs = told
    assert isinstance(load, GeneratorLoad)
    assert (load.examples, load.left_out, load.cut) == (len(PAIRS), 0, 0)
    assert load.optimiser + load.activations < load.available
    assert [type(one) for one in epochs] == [EpochProgress] * PLAN.local_epochs


def test_a_triple_is_asked_as_the_site_asks_and_cites_its_passages(site: Site) -> None:
    model = jobs.generator_for(site.spec).language_model
    triple = Triple(
        "what care does the pump need?",
        ("The lamp needs tar.", "The pump needs oil. It needs water [4]."),
        "The pump needs oil. Tar is for the lamp! It needs water [4]",
        "supplied",
    )
    (example,) = examples_of([triple], model, site.spec)
    assert example.prompt.index("The lamp needs tar.") < example.prompt.index("The pump needs oil.")
    assert "what care does the pump need?" in example.prompt
    assert (
        example.answer == "The pump needs oil [2]. Tar is for the lamp [1]! It needs water (4) [2]"
    )
    # Passages are left out, worst first, until the prompt has room; the question never is.
    narrow = replace(site.spec, prompt_tokens=model.count(example.prompt) - 1)
    (shorter,) = examples_of([triple], model, narrow)
    assert triple.question in shorter.prompt
    assert model.count(shorter.prompt) <= narrow.prompt_tokens


def test_naming_the_jobs_loads_no_torch() -> None:
    code = "import sys, daemon.jobs.generator.judging; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- which version answers -------------------------------------------------------------


@pytest.fixture
def judging(site: Site) -> Site:
    """A site with questions of its own to judge by: as those it learns from, asked otherwise."""
    valid = [replace(pair, query=f"say: {pair.query}", split="valid") for pair in PAIRS]
    more = [replace(pair, query=f"tell me: {pair.query}", split="valid") for pair in PAIRS]
    site.fill([], [*valid, *more])
    return site


def version_of(site: Site, vector: Float32) -> bytes:
    return write_version(site.versions, jobs.describe(site.spec).shape_manifest.digest, vector)[0]


def test_a_version_answers_once_it_does_better_here(judging: Site) -> None:
    site, path = judging, judging.folder / "generator" / "in_use.json"
    shape = jobs.describe(site.spec).shape_manifest.digest
    first = jobs.write_initial_version(site.spec, site.versions)
    start = read_version(site.versions, first, shape)
    plan = replace(PLAN, local_epochs=4, learning_rate=1e-2)
    better = version_of(site, start + site.train(first, plan)[1][:-1])
    noise = np.random.default_rng(0).normal(size=start.size)
    worse = version_of(site, (start + noise).astype(np.float32))

    def chosen(digest: bytes) -> InUse:
        return choose(site.spec, site.library, site.versions, digest, path)

    assert read_in_use(path) == InUse(), "the base model, before anything is judged"
    unlearned = chosen(worse)
    assert (unlearned.version, unlearned.judged) == ("", worse.hex())
    learned = chosen(better)
    assert learned.base is not None
    assert learned.best is not None
    assert (learned.version, learned.triples) == (better.hex(), 2 * len(PAIRS))
    assert learned.best.nats < learned.base.nats
    # What comes later and does worse is not used, and what does best stays.
    again = chosen(worse)
    assert (again.version, again.judged) == (better.hex(), worse.hex())
    assert read_in_use(path) == again


def test_with_too_few_questions_to_judge_by_the_base_model_answers(site: Site) -> None:
    path = site.folder / "in_use.json"
    site.fill([], [replace(PAIRS[0], query="say it", split="valid")])
    first = jobs.write_initial_version(site.spec, site.versions)
    found = choose(site.spec, site.library, site.versions, first, path)
    assert found == InUse(triples=1), "as soon as there are more it is judged"


def test_a_version_is_judged_by_all_tokens_of_the_right_answers(judging: Site) -> None:
    """By hand: the mean over tokens is what the sum over batches of one is, whatever a batch."""
    site = judging
    shape = jobs.describe(site.spec).shape_manifest.digest
    first = jobs.write_initial_version(site.spec, site.versions)
    start = read_version(site.versions, first, shape)
    trained = version_of(site, start + site.train(first)[1][:-1])
    base, triples = judge(site.spec, site.library, site.versions, b"")
    assert triples == 2 * len(PAIRS)
    assert judge(site.spec, site.library, site.versions, first) == (base, triples)
    learned, _ = judge(site.spec, site.library, site.versions, trained)
    assert learned.nats < base.nats
    generator = jobs.generator_for(site.spec)
    with Library.open(site.library) as library:
        held_out = held_out_triples(library, support_of)
    examples = examples_of(held_out, generator.language_model, site.spec)
    lessons = encoded(
        generator.language_model, examples, site.spec.prompt_tokens, site.spec.answer_tokens
    ).lessons
    generator.load_vector(start)
    sums = [generator.loss(batch).item() for batch in generator.batches(lessons, 1)]
    assert base.tokens == sum(len(lesson.answer) for lesson in lessons)
    assert base.nats == pytest.approx(sum(sums) / base.tokens, rel=1e-5)
    # It is what `choose` says of it, too: a version is judged once.
    found = choose(site.spec, site.library, site.versions, trained, site.folder / "in_use.json")
    assert (found.base, found.newest) == (base, learned)


def test_too_few_questions_to_judge_by_are_told_with_the_remedy(site: Site) -> None:
    site.fill([], [replace(PAIRS[0], query="say it", split="valid")])
    with pytest.raises(EvaluationError, match="and 1 are here: ingest pairs of split valid"):
        judge(site.spec, site.library, site.versions, b"")
    with pytest.raises(LearningError, match=r"set generator\.base_model"):
        jobs.generator_for(GeneratorSpec())


def noted(**changed: Any) -> bytes:
    return json.dumps({"format": "hanse-generator-in-use-1", **asdict(InUse()), **changed}).encode()


@pytest.mark.parametrize(
    "said",
    [
        *(b"", b"{", b"[]", b'{"format": "another"}', b'"x"', noted(more=1), noted(base=3)),
        *(noted(version=wrong) for wrong in ("zz", "ab", 5, None)),
        *(noted(triples=wrong) for wrong in ("x", -5, 2**64, True)),
        noted(base={"nats": "x", "rouge_l": 0.5, "cited": 0.0}),
        b"[" * 200_000,
    ],
)
def test_a_note_that_is_none_means_the_base_model(tmp_path: Path, said: bytes) -> None:
    (tmp_path / "in_use.json").write_bytes(said)
    assert read_in_use(tmp_path / "in_use.json") == InUse()


def test_the_next_question_is_answered_by_what_was_chosen_meanwhile(judging: Site) -> None:
    site, path = judging, judging.folder / "in_use.json"
    shape = jobs.describe(site.spec).shape_manifest.digest
    first = jobs.write_initial_version(site.spec, site.versions)
    start = read_version(site.versions, first, shape)
    trained = version_of(site, start + site.train(first)[1][:-1])
    options = AnsweringOptions(federated=FederatedWriter(site.spec, site.versions, path))

    def surprise() -> float:
        asked = transformers_model.federated(options)
        assert asked.version.hex() == read_in_use(path).version, "what an answer says of itself"
        return asked.surprise("what does the saw need?", "oil")

    base = surprise()
    write_in_use(path, InUse(version=trained.hex()))
    other = surprise()
    assert other != base
    write_in_use(path, InUse())
    assert surprise() == base
    (site.versions / f"{trained.hex()}.safetensors").unlink()
    write_in_use(path, InUse(version=trained.hex()))
    with pytest.raises(LanguageModelError, match="the generator's version is not used"):
        surprise()
    with pytest.raises(LanguageModelError, match=r"set generator\.base_model"):
        transformers_model.federated(AnsweringOptions())
