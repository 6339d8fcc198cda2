"""The best passages are ranked anew by a model that reads them beside the question."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from daemon.answering.cross_encoder import CrossEncoder
from daemon.jobs import answering
from daemon.learning.options import EncoderError
from daemon.library.search import Explanation, Ranked
from tests.daemon.answering.conftest import WORDS, Site
from tests.support.small_models import small_cross_encoder, small_encoder

QUESTION = "Which oil burns in a lamp?"
TEXTS = ["rope keel", "cotton lamp", "lamp winter pump", "pump"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_cross_encoder(tmp_path_factory.mktemp("cross"), WORDS, "cotton")


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
    assert int(np.argmax(found)) == 1, "it has learned what it is to prefer"


def found(most: int = 9) -> list[Ranked]:
    return answering.search(QUESTION, most, explain=True).passages


def why(one: Ranked) -> Explanation:
    assert one.explanation is not None
    return one.explanation


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


def test_what_is_beyond_the_first_can_come_up(site: Site, folder: Path) -> None:
    site.open()
    assert [one.passage.document_id for one in found(1)] == ["lamp"]
    site.open(cross_encoder=str(folder))
    assert [one.passage.document_id for one in found(1)] == ["sail"], "it speaks of cotton"
    assert answering.ask(QUESTION, 1).citations[0].document_id == "sail"


def test_a_question_is_answered_where_the_model_fails(
    site: Site, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.open()
    plain = [one.passage.id for one in found()]
    site.open(cross_encoder=str(folder))

    def short_of_memory(*_: Any) -> Any:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(CrossEncoder, "scores", short_of_memory)
    assert [one.passage.id for one in found()] == plain


def test_an_evaluation_judges_both_rankings(site: Site, folder: Path) -> None:
    site.open()
    assert "cross-encoder" not in answering.evaluate("").figures
    site.open(cross_encoder=str(folder))
    figures = answering.evaluate("").figures
    assert [*figures][-2:] == ["fused", "cross-encoder"]
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


def test_a_version_that_was_open_stays_where_the_model_is_refused(
    site: Site, tmp_path: Path
) -> None:
    site.open()
    with pytest.raises(EncoderError):
        site.open(cross_encoder=str(tmp_path))
    assert found()
