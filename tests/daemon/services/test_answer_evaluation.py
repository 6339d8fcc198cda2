"""A site's answers, judged on its own pairs: a real worker, a small encoder."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from daemon.answering.abstention import NOT_ANSWERED
from daemon.jobs import learning
from daemon.learning.options import EvaluationError, EvaluationProgress
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.readers.documents import MAX_QUERY_BYTES, Document, Pair, Reference
from daemon.process.workers import Worker, import_once
from daemon.services.answer_evaluation import AnswerJudge, AskedPair, NothingToCompareError
from daemon.services.collection import Collection, CollectionSettings, Listeners
from daemon.services.rights import of_all
from daemon.state.folder import StateFolder
from daemon.state.versions import read_version, write_version
from tests.support.small_models import small_encoder

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]  # it loads transformers

SUBJECTS = ["pump", "lamp", "rope", "sail", "gate", "bell", "well", "kiln"]
DOCUMENTS = [Document(f"yard/{one}", one, f"Somebody keeps the {one} dry.") for one in SUBJECTS]
WORDS = sorted({word for one in DOCUMENTS for word in re.findall(r"\w+", one.text.lower())})


def pair(subject: str, split: str, *answers: str, qtype: str = "") -> Pair:
    reference = Reference(answers, qtype) if answers or qtype else None
    return Pair(f"Who keeps the {subject} dry?", (f"yard/{subject}",), split, reference)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker() -> AsyncIterator[Worker]:
    import_once(["daemon.learning.retriever.retriever"], threads=1)  # as others in this process
    started = Worker("answering", threads=1, forked=True)
    try:
        yield started
    finally:
        await started.stop()


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_encoder(tmp_path_factory.mktemp("encoder"), WORDS)


@pytest_asyncio.fixture(loop_scope="module")
async def bare(worker: Worker, encoder: Path, tmp_path: Path) -> AsyncIterator[Collection]:
    """It answers, from no document yet."""
    spec = RetrieverSpec(encoder=str(encoder), max_tokens=48, device="cpu")
    collection = Collection(
        spec=spec,
        state=StateFolder(tmp_path),
        settings=CollectionSettings(40, 3, True, 4),
        learning=worker,
        answering=worker,
        listeners=Listeners(lambda: None, lambda: None, lambda: None),
    )
    await collection.prepare()
    genesis = await worker.run(learning.write_initial_version, spec, collection.versions)
    indexing = asyncio.create_task(collection.run())
    collection.adopt(genesis)
    await collection.until_settled()
    yield collection
    indexing.cancel()


@pytest_asyncio.fixture(loop_scope="module")
async def site(bare: Collection) -> Collection:
    await bare.ingest(DOCUMENTS, [])
    await bare.index(lambda _: None)
    return bare


async def test_each_question_is_asked_as_people_ask_it(site: Collection, worker: Worker) -> None:
    """By hand of what `ask` says: what it cites, and its text without the marks."""
    pairs = [
        *(pair(one, "test", f"Somebody keeps the {one} dry.", "Nobody") for one in SUBJECTS[:5]),
        pair("well", "test"),
        pair("kiln", "valid", "Somebody"),
    ]
    await site.ingest([], pairs)
    steps: list[object] = []
    judged = await AnswerJudge(site, worker).judge("", steps.append)
    told = [step for step in steps if isinstance(step, AskedPair)]
    assert [one.pair for one in told] == pairs[:5]
    assert [step for step in steps if not isinstance(step, AskedPair)] == [
        EvaluationProgress("index"),
        EvaluationProgress("abstention"),
        *(EvaluationProgress("abstention", done, 6) for done in (0, 6)),
        *(EvaluationProgress("answers", done, 5) for done in range(6)),
    ]
    assert (judged.split, judged.questions, judged.without_answer) == ("test", 5, 1)
    assert (judged.pairs, judged.failed, judged.partial, judged.asked_before) == (5, {}, "", 0)
    assert judged.model_digest == site.served_digest
    right, exact, cited = 0, 0, 0.0
    for one in pairs[:5]:
        answered = await site.ask(one.query, 0, rights=of_all)
        documents = {citation.document_id for citation in answered.citations}
        right += one.positives[0] in documents
        cited += len({*one.positives} & documents) / len(documents)
        exact += answered.text == f"{DOCUMENTS[SUBJECTS.index(one.query.split()[3])].text} [1]"
    figures = judged.figures
    assert figures["cites-r"].mean == pytest.approx(right / 5)
    assert figures["cites-p"].mean == pytest.approx(cited / 5)
    assert figures["em"].mean == pytest.approx(exact / 5)
    assert figures["answered"].mean == 1.0
    assert judged.unanswered == 0
    assert figures["token-f1"].low <= figures["token-f1"].mean <= figures["token-f1"].high


async def test_a_question_that_meets_nothing_counts_as_answered_with_nothing(
    bare: Collection, worker: Worker
) -> None:
    """What it says then is no answer, though it is the very words that are wanted."""
    wanted = Reference((NOT_ANSWERED,))
    await bare.ingest(DOCUMENTS, [Pair("Quid?", ("yard/pump",), "test", wanted)])
    assert (await bare.ask("Quid?", 0, rights=of_all)).text == NOT_ANSWERED, "nothing is indexed"
    judged = await AnswerJudge(bare, worker).judge("test")
    assert (judged.questions, judged.unanswered) == (1, 1)
    figures = {name: one.mean for name, one in judged.figures.items()}
    assert (figures["answered"], figures["em"], figures["wer"]) == (0.0, 0.0, 1.0)


async def test_where_no_pair_says_a_right_answer_it_is_said_how(
    site: Collection, worker: Worker
) -> None:
    judge = AnswerJudge(site, worker)
    with pytest.raises(NothingToCompareError, match="no pair of split test or valid here"):
        await judge.judge("")
    assert "there are no pairs of split test or valid" in (await judge.abstention("")).cause
    await site.ingest([], [pair("pump", "test"), pair("lamp", "test", qtype="who")])
    with pytest.raises(NothingToCompareError, match=r'none of 2 pairs .* give pairs an "answer"'):
        await judge.judge("test")
    await site.ingest([], [pair("kiln", "valid", "Somebody")])
    assert (await judge.judge("")).split == "valid"


async def test_people_are_answered_in_between(site: Collection, worker: Worker) -> None:
    await site.ingest([], [pair(one, "test", "Somebody") for one in SUBJECTS])
    people: list[asyncio.Task[object]] = []
    seen: list[tuple[int, bool]] = []

    def listener(step: object) -> None:

        if not isinstance(step, EvaluationProgress):
            return
        if step[:2] == ("answers", 2):
            people.append(
                asyncio.create_task(site.ask("Who keeps the bell dry?", 0, rights=of_all))
            )
        elif people:
            seen.append((step.done, people[0].done()))

    await AnswerJudge(site, worker).judge("test", listener)
    assert seen[1:] == [(done, True) for done in range(4, 9)], "they waited for one question"


async def test_who_gives_up_is_asked_no_other_question(site: Collection, worker: Worker) -> None:
    await site.ingest([], [pair(one, "test", "Somebody") for one in SUBJECTS])
    steps: list[object] = []

    def listener(step: object) -> None:
        steps.append(step)
        if step == ("answers", 3, 8):
            judging.cancel()

    judge = AnswerJudge(site, worker)
    judging = asyncio.create_task(judge.judge("test", listener))
    with pytest.raises(asyncio.CancelledError):
        await judging
    assert steps[-1] == ("answers", 3, 8)
    assert (await site.ask("Who keeps the bell dry?", 0, rights=of_all)).citations
    so_far = await judge.so_far()
    assert (so_far.questions, so_far.pairs, so_far.partial) == (3, 8, "it was given up")
    assert so_far.abstention.questions == 8, "that was judged before"
    # It goes on from there, and begins anew when all was asked.
    again: list[object] = []
    judged = await judge.judge("test", again.append)
    assert (judged.questions, judged.asked_before, judged.partial) == (8, 3, "")
    assert len([step for step in again if isinstance(step, AskedPair)]) == 8
    whole = await AnswerJudge(site, worker).judge("test")
    assert whole.figures == judged.figures, "as if nobody had given up"
    assert (await judge.judge("test")).asked_before == 0
    with pytest.raises(EvaluationError, match="no question was answered"):
        await AnswerJudge(site, worker).so_far()


async def test_two_at_once_do_not_take_what_the_other_keeps(
    site: Collection, worker: Worker
) -> None:
    await site.ingest([], [pair(one, "test", "Somebody") for one in SUBJECTS])
    judge, others = AnswerJudge(site, worker), list[asyncio.Task[object]]()

    def listener(step: object) -> None:
        if step == ("answers", 3, 8):
            others.append(asyncio.create_task(judge.judge("test")))

    judged = await judge.judge("test", listener)
    assert (judged.questions, judged.partial) == (8, "")
    with pytest.raises(EvaluationError, match="are being judged: wait until that has ended"):
        await others[0]
    assert (await judge.judge("test")).questions == 8


async def test_a_failing_question_costs_the_others_nothing(
    site: Collection, worker: Worker
) -> None:
    """One whose answer can't be compared (its reference is taken from under it): told, by cause."""
    good = [pair(one, "test", "Somebody") for one in SUBJECTS[:4]]
    await site.ingest([], good)
    expected = await AnswerJudge(site, worker).judge("test")
    bad = Pair("?" * (MAX_QUERY_BYTES + 1), ("yard/pump",), "test", Reference(("Nobody",)))
    blank = Pair("\n", ("yard/lamp",), "test", Reference(("Nobody",)))
    await site.ingest([], [bad, blank])
    judge = AnswerJudge(site, worker)
    judged = await judge.judge("test")
    assert (judged.questions, judged.pairs, judged.partial) == (4, 6, "")
    assert judged.failed == {
        "the question is longer than 16 KiB: shorten it": [bad],
        "the question is blank: write one": [blank],
    }
    assert judged.figures == expected.figures
    again = await judge.judge("test")
    assert (again.asked_before, [*again.failed.values()]) == (4, [[bad], [blank]])


async def test_where_one_fails_after_another_it_ends(site: Collection, worker: Worker) -> None:
    bad = [
        Pair("?" * (MAX_QUERY_BYTES + n), ("yard/pump",), "test", Reference(("a",)))
        for n in range(1, 31)
    ]
    await site.ingest([], bad)
    with pytest.raises(EvaluationError, match=r"no question was answered: .* KiB.* \(20\)"):
        await AnswerJudge(site, worker).judge("test")
    first = [pair("pump", "valid", "Somebody")]
    later = [Pair(one.query, ("yard/lamp",), "valid", one.reference) for one in bad]
    await site.ingest([], [*first, *later])
    judged = await AnswerJudge(site, worker).judge("valid")
    assert (judged.questions, judged.pairs) == (1, 31)
    assert judged.partial.startswith("20 questions failed one after another: the question is")


async def test_a_worker_that_dies_at_a_question_costs_that_one_at_most(
    site: Collection, worker: Worker
) -> None:
    await site.ingest([], [pair(one, "test", "Somebody") for one in SUBJECTS])

    def listener(step: object) -> None:
        if step == ("answers", 3, 8):
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)

    judged = await AnswerJudge(site, worker).judge("test", listener)
    assert judged.questions + sum(map(len, judged.failed.values())) == 8
    assert judged.questions >= 7
    assert judged.partial == ""


async def test_figures_of_two_versions_are_nobodys(site: Collection, worker: Worker) -> None:
    """A round is committed meanwhile; its version has come to answer before all are asked."""
    many = [
        Pair(f"Who keeps the {one} dry on day {n}?", ("yard/pump",), "test", Reference(("Nobody",)))
        for one in SUBJECTS
        for n in range(20)
    ]
    await site.ingest([], many)
    described = await worker.run(learning.describe, site._spec)
    shape = described.shape_manifest.digest
    start = read_version(site.versions, site.served_digest, shape)
    newer, _ = write_version(site.versions, shape, start + np.float32(0.01))

    def listener(step: object) -> None:
        if step == ("answers", 3, len(many)):
            site.adopt(newer)

    older = site.served_digest
    judge = AnswerJudge(site, worker)
    judged = await judge.judge("test", listener)
    assert site.served_digest == newer
    assert judged.partial.startswith("another model version has come to answer")
    assert (judged.model_digest, 3 <= judged.questions < len(many)) == (older, True)
    judged = await judge.judge("test")
    assert (judged.model_digest, judged.questions) == (newer, len(many))
    assert judged.asked_before == 0, "they were asked of another"
