"""Figures on generated answers, each against a case worked out by hand."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.learning.options import EvaluationError
from tests.daemon.evaluation.text_metrics import normalised, perplexity, score_texts, token_f1
from tests.support.small_models import Letters

SAME = ["the cat sat on the mat today", "it rains"]


@pytest.mark.slow
def test_an_answer_that_is_the_reference_is_perfect() -> None:
    means = score_texts(SAME, SAME).means()
    assert means["bleu"] == pytest.approx(100)
    assert means["chrf"] == means["chrf++"] == pytest.approx(100)
    assert means["wer"] == means["cer"] == 0.0
    for name in ("em", "token-f1", *(f"rouge-{n}-{p}" for n in "12l" for p in "prf")):
        assert means[name] == pytest.approx(1.0), name


@pytest.mark.slow
def test_figures_by_hand() -> None:
    """Reference a b c d, answer a b x: one word of four replaced and one left out."""
    scores = score_texts(["one two nine"], ["one two three four"])
    means = scores.means()
    assert means["wer"] == pytest.approx(2 / 4)
    assert (means["rouge-1-p"], means["rouge-1-r"]) == pytest.approx((2 / 3, 2 / 4))
    assert means["rouge-1-f"] == pytest.approx(2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4))
    assert (means["rouge-2-p"], means["rouge-2-r"]) == pytest.approx((1 / 2, 1 / 3))
    assert (means["rouge-l-p"], means["rouge-l-r"]) == pytest.approx((2 / 3, 2 / 4))
    assert means["token-f1"] == pytest.approx(2 * 2 / (3 + 4))
    assert means["em"] == 0.0
    assert means["cer"] == pytest.approx(_edits("one two nine", "one two three four") / 18)


@pytest.mark.slow
def test_bleu_by_its_definition() -> None:
    """Precisions 5/6, 3/5, 2/4, 1/3 of a six-word answer, as long as its reference."""
    scores = score_texts(["a b c d x f"], ["a b c d e f"])
    precisions = [5 / 6, 3 / 5, 2 / 4, 1 / 3]
    assert scores.corpus["bleu"] == pytest.approx(100 * math.prod(precisions) ** 0.25)
    assert "tok:13a" in scores.signatures["bleu"]


def test_chrf_tells_words_from_letters() -> None:
    scores = score_texts(["tac eht"], ["the cat"])
    assert scores.corpus["chrf++"] < scores.corpus["chrf"], "no word is right"


def _edits(one: str, other: str) -> int:
    """Levenshtein distance, by its recurrence."""
    before = list(range(len(other) + 1))
    for row, letter in enumerate(one, start=1):
        now = [row]
        for column, wanted in enumerate(other, start=1):
            change = before[column - 1] + (letter != wanted)
            now.append(min(change, before[column] + 1, now[-1] + 1))
        before = now
    return before[-1]


TEXT = st.text("ab c", min_size=1, max_size=12).filter(lambda t: bool(t.strip()))


@pytest.mark.slow
@given(TEXT, st.text("ab c", max_size=12))
@settings(max_examples=60, deadline=None)
def test_character_errors_are_levenshtein(reference: str, answer: str) -> None:
    if not normalised(reference):
        return
    expected = _edits(answer.strip(), reference.strip()) / len(reference.strip())
    assert score_texts([answer], [reference]).corpus["cer"] == pytest.approx(expected)


def test_exact_match_forgives_case_punctuation_and_articles() -> None:
    assert normalised("The Answer, an 'apple'!") == ["answer", "apple"]
    scores = score_texts(["THE answer.", "answer two"], ["an answer", "answer"])
    assert scores.each["em"].tolist() == [1.0, 0.0]
    assert token_f1("x x", "x y") == pytest.approx(2 * 1 / 4), "a word counts as often as it stands"


def test_an_empty_answer_is_the_worst_and_an_empty_reference_is_refused() -> None:
    means = score_texts([""], ["two words"]).means()
    assert (means["bleu"], means["rouge-1-f"], means["em"], means["wer"]) == (0, 0, 0, 1)
    with pytest.raises(EvaluationError, match="reference 1 has no word"):
        score_texts(["x", "y"], ["x", " . "])
    with pytest.raises(EvaluationError, match="1 answers with 2"):
        score_texts(["x"], ["x", "y"])


# ---- what is not there ----------------------------------------------------------------------


def write_wordnet(folder: Path) -> None:
    """The smallest WordNet that nltk opens: one noun synset, car and auto."""
    corpus = folder / "corpora" / "wordnet"
    corpus.mkdir(parents=True)
    for part in ("adj", "adv", "noun", "verb"):
        for name in (f"index.{part}", f"data.{part}", f"{part}.exc"):
            (corpus / name).write_text("")
    for name in ("cntlist.rev", "index.sense", "frames.vrb", "sents.vrb", "sentidx.vrb"):
        (corpus / name).write_text("")
    (corpus / "lexnames").write_text(
        "00\tadj.all\t3\n01\tadj.pert\t3\n02\tadv.all\t4\n03\tnoun.Tops\t1\n"
    )
    (corpus / "data.noun").write_text("00000000 03 n 02 car 0 auto 0 000 | a thing with wheels  \n")
    (corpus / "index.noun").write_text("auto n 1 0 1 0 00000000  \ncar n 1 0 1 0 00000000  \n")


@pytest.mark.filterwarnings("ignore:The multilingual functions")
def test_meteor_is_left_out_without_wordnet_and_knows_synonyms_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nltk  # takes a second: not when tests are collected
    from nltk.corpus.reader.wordnet import WordNetCorpusReader
    from nltk.corpus.util import LazyCorpusLoader

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    fresh = LazyCorpusLoader("wordnet", WordNetCorpusReader, None)
    monkeypatch.setattr(nltk.corpus, "wordnet", fresh)
    answers, references = ["my auto is red"], ["my car is red"]
    without = score_texts(answers, references)
    assert "meteor" not in without.means()
    assert "NLTK_DATA" in without.missing["meteor"]
    write_wordnet(tmp_path)
    # All four words match in one chunk: F = 1, penalty 0.5 * (1 / 4)^3.
    expected = 1 - 0.5 * (1 / 4) ** 3
    assert score_texts(answers, references).means()["meteor"] == pytest.approx(expected)
    # Three of four and no synonym: P = R = F = 3/4, two chunks: penalty 0.5 * (2 / 3)^3.
    other = score_texts(["my bike is red"], references).means()["meteor"]
    assert other == pytest.approx(3 / 4 * (1 - 0.5 * (2 / 3) ** 3))


def test_a_library_that_is_not_installed_leaves_out_its_figures_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "jiwer", None)
    scores = score_texts(["a b"], ["a b"])
    assert {name for name in scores.missing if name != "meteor"} == {"wer", "cer"}
    assert "hanse[eval]" in scores.missing["wer"]
    assert "bleu" in scores.corpus


# ---- perplexity -------------------------------------------------------------------------------


def small_gpt(vocabulary: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel  # as nltk above

    config = GPT2Config(vocab_size=vocabulary, n_positions=64, n_embd=16, n_layer=1, n_head=2)
    return GPT2LMHeadModel(config).eval()


def test_perplexity_of_a_model_that_knows_nothing_is_its_vocabulary() -> None:
    tokenizer = Letters().tokenizer
    model = small_gpt(len(tokenizer))
    torch.nn.init.zeros_(model.transformer.wte.weight)  # tied to the output: all logits 0
    found = perplexity(model, tokenizer, ["abc", "hello there"])
    assert found == pytest.approx(len(tokenizer), rel=1e-5)


def test_perplexity_is_the_model_s_own_loss_over_all_tokens() -> None:
    tokenizer = Letters().tokenizer
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = small_gpt(len(tokenizer))
    texts = ["abc", "a longer text than that"]
    total, count = 0.0, 0
    for text in texts:
        ids = [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]
        row = torch.tensor([ids])
        total += float(model(input_ids=row, labels=row).loss.detach()) * (len(ids) - 1)
        count += len(ids) - 1
    assert perplexity(model, tokenizer, texts) == pytest.approx(np.exp(total / count), rel=1e-5)
    with pytest.raises(EvaluationError, match="two tokens"):
        perplexity(model, tokenizer, [""])
