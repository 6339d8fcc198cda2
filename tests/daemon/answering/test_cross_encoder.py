"""The best passages are ranked anew by a model that reads them beside the question."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from daemon.answering import cross_encoder
from daemon.answering.abstention import Abstention, evidence_of
from daemon.answering.cross_encoder import CrossEncoder
from daemon.answering.options import AnsweringOptions
from daemon.evaluation.rankings import held_out
from daemon.jobs import answering
from daemon.learning.options import EncoderError, EvaluationError
from daemon.library.readers.documents import Pair
from daemon.library.search import Explanation, Ranked
from daemon.library.store import Library
from tests.daemon.answering.conftest import DOCUMENTS, WORDS, Site
from tests.support.small_models import small_cross_encoder, small_encoder

pytestmark = pytest.mark.slow  # it loads transformers

QUESTION = "Which oil burns in a lamp?"
TEXTS = ["rope keel", "cotton lamp", "lamp winter pump", "pump"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_cross_encoder(tmp_path_factory.mktemp("cross"), [*WORDS, "quay"], "cotton")


def test_its_scores_are_those_of_plain_transformers(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    plain = []
    for text in TEXTS:  # one at a time: nothing is padded
        with torch.no_grad():
            tokens = tokenizer("which lamp?", text, return_tensors="pt")
            plain.append(float(model(**tokens).logits[0, 0]))
    found = CrossEncoder.load(folder, 20).scores("which lamp?", TEXTS * 9)
    np.testing.assert_allclose(found, plain * 9, atol=1e-5)
    # Of equal texts any may be a last digit ahead.
    assert int(np.argmax(found)) % len(TEXTS) == 1, "it has learned what it is to prefer"


def found(most: int = 9) -> list[Ranked]:
    return answering.search(QUESTION, most, explain=True).passages


def why(one: Ranked) -> Explanation:
    assert one.explanation is not None
    return one.explanation


@contextmanager
def broken(site: Site, folder: Path, word: str = "") -> Iterator[None]:
    """The open version's model gives no numbers: where it reads that word, or at all."""
    copied = shutil.copytree(folder, site.folder / "cross")  # of its own: models are kept
    site.open(cross_encoder=str(copied))
    model: Any = answering.opened_version().cross_encoder
    weights, row = model._model.classifier.weight, 0
    if word:
        weights = model._model.bert.embeddings.word_embeddings.weight
        row = model._tokenizer.convert_tokens_to_ids(word)
    kept = weights.clone()
    weights[row] = torch.nan  # say, of memory that is bad
    yield
    weights.copy_(kept)


def test_the_best_are_ranked_anew_and_say_where_they_were(site: Site, folder: Path) -> None:
    site.open()
    plain = found()
    site.open(cross_encoder=str(folder), cross_encoder_depth=3)
    anew = found()
    texts = [one.passage.embedding_text for one in plain[:3]]
    scores = CrossEncoder.load(folder, 3).scores(QUESTION, texts)
    order = np.argsort(-scores, kind="stable").tolist()
    assert order != sorted(order), "else nothing is seen of it"
    ids = [one.passage.id for one in plain]
    assert [one.passage.id for one in anew] == [*(ids[row] for row in order), *ids[3:]]
    beyond = len(ids) - 3
    assert [why(one).place_before for one in anew] == [*(row + 1 for row in order), *[0] * beyond]
    assert beyond > 0
    assert why(anew[0]).cross_score == pytest.approx(float(scores[order[0]]), abs=1e-5)


def test_what_it_puts_behind_was_found_all_the_same(
    site: Site, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question is not refused for the order in which its passages are shown."""
    site.open()
    enough = Abstention(evidence_of(found(1)) - 1e-4)
    site.open(cross_encoder=str(folder))
    monkeypatch.setattr(answering, "_open", replace(answering.opened_version(), abstention=enough))
    assert enough.abstains(evidence_of(found(1))), "by what is shown alone"
    assert answering.ask(QUESTION, 1).citations


def test_what_is_beyond_the_first_can_come_up(site: Site, folder: Path) -> None:
    site.open()
    assert [one.passage.document_id for one in found(1)] == ["lamp"]
    site.open(cross_encoder=str(folder))
    assert [one.passage.document_id for one in found(1)] == ["sail"], "it speaks of cotton"
    assert answering.ask(QUESTION, 1).citations[0].document_id == "sail"


def test_of_copies_it_reads_one_and_room_is_for_other_texts(site: Site, folder: Path) -> None:
    lamp = next(one for one in DOCUMENTS if one.id == "lamp")
    site.ingest([replace(lamp, id=f"old/{n}") for n in range(5)], [])
    site.open(index=site.indexed(site.digest), cross_encoder=str(folder), cross_encoder_depth=4)
    first, *others = [one for one in found() if why(one).place_before]
    assert first.passage.document_id == "sail", "behind six lamps by all else"
    assert [one.copies.count for one in others if one.copies] == [5]


def test_a_question_is_answered_where_the_model_fails(site: Site, folder: Path) -> None:
    site.open()
    plain = [one.passage.id for one in found()]
    with broken(site, folder):
        assert [one.passage.id for one in found()] == plain
        assert answering.ask(QUESTION, 3).left_out == "it gives passages what is no number"
    assert [one.passage.id for one in found()] != plain
    assert answering.search(QUESTION, 3, explain=False).left_out == "", "the next one is as wanted"


def test_who_asks_waits_for_so_many_seconds_and_no_longer(
    site: Site, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.open()
    plain = [one.passage.id for one in found()]
    site.open(cross_encoder=str(folder))
    monkeypatch.setattr(cross_encoder, "_SECONDS", 0.0)
    assert [one.passage.id for one in found()] != plain, "one batch is always read"
    monkeypatch.setattr(cross_encoder, "_AT_ONCE", 2)
    assert [one.passage.id for one in found()] == plain
    said = answering.ask(QUESTION, 3).left_out
    assert said.startswith(
        "2 of 4 passages took more than 0 s: lower retrieval.cross_encoder_depth"
    )


def test_an_evaluation_judges_both_rankings(site: Site, folder: Path) -> None:
    site.open()
    assert "cross-encoder" not in answering.evaluate("").figures
    site.open(cross_encoder=str(folder))
    figures = answering.evaluate("").figures
    assert [*figures][-2:] == ["fused", "cross-encoder"]
    assert figures["cross-encoder"] != figures["fused"]


def all_ranked() -> None:
    while (at := answering.rank_anew("", 60.0)).done < at.total:
        pass


def test_two_evaluations_at_once_rank_the_questions_once(
    site: Site, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.open(cross_encoder=str(folder))
    all_ranked()
    first = answering.evaluate("").figures
    monkeypatch.delattr(CrossEncoder, "ranked")  # the second would do it while people wait
    assert answering.evaluate("").figures == first


def test_pairs_are_read_again_where_somebody_changed_the_library(
    site: Site, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = list[str]()

    def counted(library: Library, split: str, **most: int) -> tuple[str, list[Pair]]:
        reads.append(split)
        return held_out(library, split, **most)

    site.ingest([], [Pair("Who cuts a wick?", ("lamp",), "test")])
    site.open(cross_encoder=str(folder))
    answering.rank_anew("", 0.0)
    answering.rank_anew("", 0.0)
    monkeypatch.setattr(answering, "held_out", counted)
    assert (answering.rank_anew("", 0.0).done, reads) == (3, [])
    site.ingest([], [Pair("What is daily?", ("lamp",), "test")])
    assert answering.rank_anew("", 0.0) == ("cross-encoder", 1, 4)
    assert reads == ["", ""], "to see that they are others, and to ask them"


def test_an_evaluation_reads_of_copies_one_as_at_a_question(site: Site, folder: Path) -> None:
    lamp = next(one for one in DOCUMENTS if one.id == "lamp")
    copies = [replace(lamp, id=f"old/{n}") for n in range(5)]
    site.ingest(copies, [Pair(QUESTION, ("sail",), "valid"), Pair(QUESTION, ("old/4",), "valid")])
    site.open(index=site.indexed(site.digest), cross_encoder=str(folder), cross_encoder_depth=4)
    figures = answering.evaluate("valid").figures
    assert figures["fused"]["hit@1"].mean == 0.0, "six lamps come first"
    assert figures["cross-encoder"]["hit@1"].mean == 0.5, "as people get it: the sail"
    assert figures["cross-encoder"]["recall@10"].mean == 1.0, "and copies, behind one of them"


def test_an_evaluation_says_what_the_cross_encoder_left_out(site: Site, folder: Path) -> None:
    pairs = [Pair(query, ("lamp",), "test") for query in ("A lamp at the quay?", "Which wick?")]
    site.ingest([], pairs)
    site.open()
    with broken(site, folder, "quay"):  # of one question
        all_ranked()
        judged = answering.evaluate("")
        assert (judged.fell_back, judged.cause) == (1, "it gives passages what is no number")
    all_ranked()
    assert (anew := answering.evaluate("")).fell_back == 0, "it was not kept"
    assert anew.figures["cross-encoder"] != anew.figures["fused"]


def test_where_most_questions_are_left_out_no_figure_is_given(site: Site, folder: Path) -> None:
    why = "most questions are ranked without the cross-encoder: it gives passages what is no number"
    with broken(site, folder):
        for judge in (all_ranked, partial(answering.evaluate, "")):
            with pytest.raises(EvaluationError, match=why):
                judge()
    all_ranked()
    figures = answering.evaluate("").figures
    assert figures["cross-encoder"] != figures["fused"]


def test_what_is_no_cross_encoder_is_refused_by_name(tmp_path: Path, folder: Path) -> None:
    def refused(place: Path, why: str) -> None:
        with pytest.raises(EncoderError, match=why):
            CrossEncoder.load(place, 20)

    refused(tmp_path, "holds no \\*.safetensors: correct retrieval.cross_encoder")
    refused(small_encoder(tmp_path / "encoder"), "was not trained to compare texts")
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "config.json").write_text("{")
    refused(broken, "cannot load the cross-encoder")
    three = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=3, ignore_mismatched_sizes=True
    )
    three.save_pretrained(shutil.copytree(folder, tmp_path / "three"))
    refused(tmp_path / "three", "has 3 outputs")


def test_a_tokenizer_that_can_not_pad_is_refused(tmp_path: Path, folder: Path) -> None:
    """Many classifiers made of language models have none; each question would fail."""
    copied = shutil.copytree(folder, tmp_path / "cross")
    for path in copied.glob("*token*.json"):
        said = json.loads(path.read_text())
        said.pop("pad_token", None)
        path.write_text(json.dumps(said))
    with pytest.raises(EncoderError, match=r"can't compare texts: .*pad.*: correct retrieval"):
        CrossEncoder.load(copied, 20)


def test_code_that_comes_with_a_cross_encoder_is_not_run(tmp_path: Path, folder: Path) -> None:
    copied, witness = shutil.copytree(folder, tmp_path / "coded"), tmp_path / "ran"
    (copied / "modeling_evil.py").write_text(
        "from transformers import BertForSequenceClassification\n"
        f"open({str(witness)!r}, 'w').close()\n"
        "class Evil(BertForSequenceClassification):\n    pass\n"
    )
    config = json.loads((copied / "config.json").read_text())
    config["auto_map"] = {"AutoModelForSequenceClassification": "modeling_evil.Evil"}
    (copied / "config.json").write_text(json.dumps(config))
    assert CrossEncoder.load(copied, 20).scores("which?", TEXTS).argmax() == 1
    config["model_type"] = "evil"
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(EncoderError, match="cannot load the cross-encoder"):
        CrossEncoder.load(copied, 20)
    assert not witness.exists()


def test_a_start_is_refused_and_a_later_opening_goes_on_without(site: Site, folder: Path) -> None:
    """The folder may be gone when the worker dies and a version is opened again."""
    site.open()
    plain = [one.passage.id for one in found()]
    options = AnsweringOptions(cross_encoder=str(site.folder / "gone"))
    with pytest.raises(EncoderError, match="gone holds no"):
        answering.check(options, "cpu")
    site.open(cross_encoder=options.cross_encoder)
    assert [one.passage.id for one in found()] == plain
    assert "gone holds no *.safetensors" in answering.ask(QUESTION, 3).left_out
    shutil.copytree(folder, site.folder / "gone")
    answering.check(options, "cpu")
    site.open(cross_encoder=options.cross_encoder)
    assert [one.passage.id for one in found()] != plain
