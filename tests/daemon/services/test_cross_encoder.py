"""A site whose settings name a cross-encoder: real workers, small models."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from daemon.answering.options import AnsweringOptions
from daemon.jobs import learning
from daemon.learning.options import EncoderError, EvaluationProgress
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.catalogue.filters import EVERY
from daemon.library.readers.documents import Document, Pair
from daemon.process.workers import Worker, import_once
from daemon.services import collection as collection_module
from daemon.services.collection import Collection, CollectionSettings, Listeners
from daemon.services.rights import of_all
from daemon.state.folder import StateFolder
from tests.support.small_models import small_cross_encoder, small_encoder

pytestmark = pytest.mark.slow  # it loads transformers

SUBJECTS = ["pump", "lamp", "rope", "sail", "gate", "bell", "well", "kiln"]
DOCUMENTS = [Document(f"yard/{one}", one, f"Somebody keeps the {one} dry.") for one in SUBJECTS]
WORDS = sorted({word for one in DOCUMENTS for word in re.findall(r"\w+", one.text.lower())})
PAIRS = [Pair(f"keep the {one} dry", (f"yard/{one}",), "test") for one in SUBJECTS]
QUESTION = "Who keeps the pump dry?"


@pytest_asyncio.fixture
async def worker() -> AsyncIterator[Worker]:
    import_once(["daemon.learning.retriever.retriever"], threads=1)  # as others in this process
    started = Worker("answering", threads=1, forked=True)
    try:
        yield started
    finally:
        await started.stop()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder, and a cross-encoder that likes kilns; it breaks where it reads of quays."""
    root = tmp_path_factory.mktemp("models")
    small_encoder(root / "encoder", WORDS)
    small_cross_encoder(root / "cross", [*WORDS, "quay"], "kiln")
    weights = load_file(root / "cross" / "model.safetensors")
    word = AutoTokenizer.from_pretrained(root / "cross").convert_tokens_to_ids("quay")
    weights["bert.embeddings.word_embeddings.weight"][word] = torch.nan
    save_file(weights, root / "cross" / "model.safetensors", {"format": "pt"})
    return root


@pytest.fixture
def named(models: Path, tmp_path: Path) -> Path:
    """The folder that the settings name."""
    return Path(shutil.copytree(models / "cross", tmp_path / "cross"))


@pytest.fixture
def collection(worker: Worker, models: Path, named: Path, tmp_path: Path) -> Collection:
    spec = RetrieverSpec(encoder=str(models / "encoder"), max_tokens=48, device="cpu")
    options = AnsweringOptions(cross_encoder=str(named))
    nobody = Listeners(lambda: None, lambda: None, lambda: None)
    return Collection(
        spec=spec,
        state=StateFolder(tmp_path / "state"),
        settings=CollectionSettings(40, 3, True, 4, answering=options),
        learning=worker,
        answering=worker,
        listeners=nobody,
    )


@pytest_asyncio.fixture
async def serving(collection: Collection, worker: Worker) -> AsyncIterator[Collection]:
    """It has documents, and answers."""
    await collection.prepare()
    genesis = await worker.run(
        learning.write_initial_version, collection._spec, collection.versions
    )
    indexing = asyncio.create_task(collection.run())
    collection.adopt(genesis)
    await collection.ingest(DOCUMENTS, PAIRS)
    await collection.index(lambda _: None)
    yield collection
    indexing.cancel()


async def best(collection: Collection) -> str:
    found = (await collection.search(QUESTION, 1, True, EVERY, of_all)).passages
    return found[0].passage.document_id


async def test_a_start_is_refused_where_the_model_can_not_be_had(
    collection: Collection, named: Path
) -> None:
    shutil.rmtree(named)
    with pytest.raises(EncoderError, match=r"cross holds no .*: correct retrieval\.cross_encoder"):
        await collection.prepare()
    assert not collection.library_path.exists()


async def test_a_lost_model_costs_no_answer_and_is_warned_of(
    serving: Collection, worker: Worker, named: Path
) -> None:
    assert (await best(serving), serving.warnings) == ("yard/kiln", [])
    shutil.rmtree(named)
    assert await best(serving) == "yard/kiln", "it was loaded"
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    assert await best(serving) == "yard/pump"
    (said,) = serving.warnings
    assert said.startswith("questions are ranked without the cross-encoder: the cross-encoder /")
    assert said.endswith(
        "cross holds no *.safetensors: correct retrieval.cross_encoder, or remove it"
    )
    assert (await serving.ask(QUESTION, 1, rights=of_all)).citations[0].document_id == "yard/pump"
    assert serving.warnings == [said]


async def test_a_question_that_breaks_the_model_is_answered_and_warned_of(
    serving: Collection,
) -> None:
    breaking, why = "Is the pump dry on the quay?", "it gives passages what is no number"
    answered = await serving.ask(breaking, 1, rights=of_all)
    assert answered.citations[0].document_id == "yard/pump"
    assert serving.warnings == [f"questions are ranked without the cross-encoder: {why}"]
    assert (await best(serving), serving.warnings) == ("yard/kiln", []), "the next one is as wanted"
    await serving.search(breaking, 1, False, EVERY, of_all)
    assert len(serving.warnings) == 1


async def test_people_are_answered_while_it_ranks_for_an_evaluation(
    serving: Collection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collection_module, "_RANKING_S", 0.0)  # a question at a time
    steps, asked, in_between = list[object](), list[asyncio.Task[str]](), list[bool]()

    def listener(step: object) -> None:
        steps.append(step)
        assert isinstance(step, EvaluationProgress)
        if step[:2] == ("cross-encoder", 3):
            asked.append(asyncio.create_task(best(serving)))
        if step.step == "questions":
            in_between.append(asked[0].done())

    judged = await serving.evaluate("", listener)
    assert steps == [
        ("index", 0, 0),
        *(("cross-encoder", done, len(PAIRS)) for done in range(1, len(PAIRS) + 1)),
        ("questions", 0, 0),
    ]
    assert in_between == [True]
    assert [await one for one in asked] == ["yard/kiln"]
    found = judged.figures["cross-encoder"]["hit@1"].mean
    assert found == 1 / len(PAIRS), "of kilns one question is"
    assert judged.figures["fused"]["hit@1"].mean > found


async def test_an_evaluation_is_of_the_pairs_that_there_are(
    serving: Collection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was given up leaves its rankings behind; a pair has come since."""
    monkeypatch.setattr(collection_module, "_RANKING_S", 0.0)

    def give_up(step: object) -> None:
        assert isinstance(step, EvaluationProgress)
        if step[:2] == ("cross-encoder", 3):
            raise InterruptedError

    with pytest.raises(InterruptedError):
        await serving.evaluate("", give_up)
    await serving.ingest([], [Pair("a kiln, dry", ("yard/kiln",), "test")])
    judged = await serving.evaluate("")
    assert judged.dense.questions == len(PAIRS) + 1
    assert judged.figures["cross-encoder"]["hit@1"].mean == 2 / (len(PAIRS) + 1)
