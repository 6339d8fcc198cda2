"""How near a site's answers are to the right ones, question by question.

========== ======================================================================
em         the same words (SQuAD's rule: small letters, no punctuation, no articles)
token-f1   harmonic mean of precision and recall of words (SQuAD)
bleu       n-grams of up to four words (Papineni et al., 2002), of this answer alone:
           those that a short text can't have are left out
chrf       n-grams of up to six characters (Popović, 2015)
chrf++     chrf with one and two words beside them (Popović, 2017)
rouge-1-p  share of the answer's words that the right answer has (Lin, 2004);
           -r of the right answer's words that it has; -f both, their harmonic mean
rouge-2-…  the same of pairs of words
rouge-l-…  the same of the longest sequence of words in common
meteor     words that match, as they are, by their stems or by WordNet's synonyms, less
           for each break in their order (Banerjee and Lavie, 2005). Two equal texts
           of n words have 1 - 0.5 / n³
meteor-stem  the same without synonyms: nltk's METEOR with a WordNet that knows none
cer        edits of characters over the right answer's length; can exceed 1
wer        the same of words; capitals and punctuation count in both
cites-p    share of the cited documents that are right; 0 where none is cited
cites-r    share of the right documents that are cited
answered   whether there was an answer at all
ppl-reference  perplexity of the right answer behind the prompt that was asked, passages and all:
           the exponential of a token's mean negative log-likelihood (Jelinek et al., 1977)
ppl-written  the same of what the model wrote, before it is checked (FedE4RAG, section V-B)
========== ======================================================================

All lie between 0 and 1, but for error rates and perplexities, and are the better the greater, but
for these. A perplexity is the geometric mean of those of the questions for which a language model
wrote, which may be fewer; those of models with different tokens do not compare.
Where several answers are right, each figure is that of the one it is best for; the three of
a ROUGE are of the one with the best -f. No answer counts as an empty one. A question
counts as much as another.

From sacrebleu, rouge-score, jiwer and nltk, which come with ``hanse[eval]``; none of them
downloads anything. What can't be had is left out, with the reason: there is never a stand-in
under its name. WordNet's files come with none of them: ``meteor`` is computed where they lie
in one of nltk's data folders (NLTK_DATA). Words are runs of letters and digits of any
script, each Chinese or Japanese character is one: rouge-score's own rule knows only a to z.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

from daemon.library.readers.documents import answer_of
from daemon.process.chat_client import Likelihood

PERPLEXITIES = ("ppl-reference", "ppl-written")
LOWER_IS_BETTER = ("cer", "wer", *PERPLEXITIES)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_MARKS = re.compile(r"\s?\[(\d+(?:\s?,\s?\d+)*)\]")
_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_IDEOGRAPHS}]|(?:(?![{_IDEOGRAPHS}])[^\W_])+")
_IDEOGRAPH = re.compile(rf"[{_IDEOGRAPHS}]")
_ROUGE = {"rouge1": "rouge-1", "rouge2": "rouge-2", "rougeL": "rouge-l"}
_DIVERGED = 700.0  # nats; its exponential is hardly a number any more
_STEMMED = 4  # letters of a word that is stemmed, at least, as rouge-score has it

Figures = dict[str, float]


@dataclass(frozen=True)
class Scores:
    """Figures of one answer; ``missing``: those that can't be had, with the reason.

    ``nats``: logarithms of the perplexities that it has.
    """

    figures: Figures
    missing: dict[str, str] = field(default_factory=dict)
    nats: Figures = field(default_factory=dict)


def without_marks(text: str, numbers: Iterable[int]) -> str:
    """An answer without the marks of its citations, which have these numbers: [1], [1, 2]."""
    known = {str(number) for number in numbers}

    def kept(mark: re.Match[str]) -> str:
        return "" if known.issuperset(re.split(r"\s?,\s?", mark.group(1))) else mark.group()

    return _MARKS.sub(kept, text).strip()


def score_text(answer: str, references: Sequence[str]) -> Scores:
    """Compare an answer, maybe empty, with the right ones, of which there is one at least.

    None of these is blank: to tell errors by the length of nothing makes no sense.
    """
    answer = " ".join(answer.split())
    wanted = [" ".join(reference.split()) for reference in references]
    scores = Scores({})
    scores.figures["em"] = max(exact_match(answer, one) for one in wanted)
    scores.figures["token-f1"] = max(token_f1(answer, one) for one in wanted)
    for names, score in _LIBRARIES:
        try:
            scores.figures.update(score(answer, wanted))
        except ImportError as error:
            reason = f"{error.name} is not installed: pip install 'hanse[eval]'"
            scores.missing.update(dict.fromkeys(names, reason))
    if "meteor-stem" in scores.figures and "meteor" not in scores.figures:
        scores.missing["meteor"] = (
            "WordNet is in none of nltk's data folders: put corpora/wordnet into one of them and "
            "name it in fedd's NLTK_DATA"
        )
    return scores


def score_likelihood(scores: Scores, likelihood: Likelihood | None) -> None:
    """Add the perplexities; None: no language model wrote, or none was asked."""
    if likelihood is None:
        scores.missing.update(dict.fromkeys(PERPLEXITIES, "no language model wrote an answer"))
        return
    for name, nats in zip(PERPLEXITIES, (likelihood.reference, likelihood.written), strict=True):
        if nats is not None and nats <= _DIVERGED:
            scores.nats[name] = nats
        else:
            scores.missing[name] = likelihood.lacking or "it is beyond all numbers"


def score_citations(cited: Iterable[str], positives: Iterable[str]) -> Figures:
    """Documents that an answer cites against those that answer its question.

    Parts of one document count as that one, as in `daemon.evaluation.evaluation`.
    """
    ours, right = {*map(answer_of, cited)}, {*map(answer_of, positives)}
    hits = len(ours & right)
    return {
        "cites-p": hits / len(ours) if ours else 0.0,
        "cites-r": hits / len(right) if right else 0.0,
    }


def normalised(text: str) -> list[str]:
    """Words in small letters without punctuation and articles (SQuAD's rule)."""
    plain = "".join(c for c in text.lower() if c not in string.punctuation)
    return _ARTICLES.sub(" ", plain).split()


def exact_match(answer: str, reference: str) -> float:
    """1 where both have the same words; texts without a word are compared as they are."""
    ours, wanted = normalised(answer), normalised(reference)
    return float(ours == wanted if ours or wanted else answer.strip() == reference.strip())


def token_f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall of words, each counted as often as it stands."""
    ours, wanted = normalised(answer), normalised(reference)
    if not ours or not wanted:
        return exact_match(answer, reference)
    common = sum((Counter(ours) & Counter(wanted)).values())
    return 2 * common / (len(ours) + len(wanted))


def words_of(text: str) -> list[str]:
    """Runs of letters and digits, in small letters; each ideograph and kana is one."""
    return _WORD.findall(text.lower())


class _Stems:
    """How rouge-score is told to cut a text; and the stems that METEOR matches by."""

    def __init__(self) -> None:
        from nltk.stem.porter import PorterStemmer

        self._porter = PorterStemmer()

    def tokenize(self, text: str) -> list[str]:
        return [self.stem(word) if len(word) >= _STEMMED else word for word in words_of(text)]

    def stem(self, word: str) -> str:
        stemmed: str = self._porter.stem(word)
        return stemmed


@cache
def _stems() -> _Stems:
    return _Stems()


@cache
def _rouge_scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(_ROUGE), tokenizer=_stems())


@cache
def _sacrebleu(name: str) -> Any:
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    made: dict[str, Callable[[], Any]] = {
        "bleu": lambda: BLEU(effective_order=True),
        "bleu of ideographs": lambda: BLEU(effective_order=True, tokenize="zh"),
        "chrf": CHRF,
        "chrf++": lambda: CHRF(word_order=2),
    }
    return made[name]()


def _n_grams(answer: str, references: Sequence[str]) -> Figures:
    bleu = " of ideographs" * any(map(_IDEOGRAPH.search, references))
    metrics = {"bleu": f"bleu{bleu}", "chrf": "chrf", "chrf++": "chrf++"}
    return {
        name: max(
            _share(_sacrebleu(metric).sentence_score(answer, [one]).score) for one in references
        )
        for name, metric in metrics.items()
    }


def _share(percent: float) -> float:
    """What sacrebleu calls 100 may be a few last digits more."""
    return min(percent / 100.0, 1.0)


def _rouge(answer: str, references: Sequence[str]) -> Figures:
    best = _rouge_scorer().score_multi(list(references), answer)
    return {
        f"{name}-{part}": float(best[kind][position])
        for kind, name in _ROUGE.items()
        for position, part in enumerate("prf")
    }


def _error_rates(answer: str, references: Sequence[str]) -> Figures:
    import jiwer

    return {
        "wer": min(float(jiwer.wer(one, answer)) for one in references),
        "cer": min(float(jiwer.cer(one, answer)) for one in references),
    }


def _meteor(answer: str, references: Sequence[str]) -> Figures:
    from nltk.corpus import wordnet
    from nltk.translate.meteor_score import meteor_score

    no_synonyms = SimpleNamespace(synsets=lambda _word: [])
    dictionaries: dict[str, Any] = {"meteor-stem": no_synonyms}
    try:
        wordnet.ensure_loaded()
        dictionaries["meteor"] = wordnet
    except LookupError:  # of which `score_text` tells
        pass
    ours, wanted = words_of(answer), [words_of(one) for one in references]
    return {
        name: float(meteor_score(wanted, ours, stemmer=_stems(), wordnet=known))
        for name, known in dictionaries.items()
    }


_LIBRARIES: tuple[tuple[tuple[str, ...], Callable[[str, Sequence[str]], Figures]], ...] = (
    (("bleu", "chrf", "chrf++"), _n_grams),
    (tuple(f"{name}-{part}" for name in _ROUGE.values() for part in "prf"), _rouge),
    (("meteor-stem", "meteor"), _meteor),
    (("cer", "wer"), _error_rates),
)


def by_label(
    labels: Mapping[str, Sequence[str]], *, fewest: int, most: int
) -> Iterable[tuple[str, str, list[int]]]:
    """Questions of one label each: the label's name, its value, and the questions' numbers.

    Of each label the ``most`` frequent values that ``fewest`` questions have, these first.
    """
    for name, values in labels.items():
        numbers: dict[str, list[int]] = {}
        for number, value in enumerate(values):
            if value:
                numbers.setdefault(value, []).append(number)
        largest = sorted(numbers.items(), key=lambda one: (-len(one[1]), one[0]))
        yield from ((name, value, rows) for value, rows in largest[:most] if len(rows) >= fewest)
