"""How near generated answers are to the answers wanted.

From sacrebleu (BLEU, chrF, chrF++), rouge-score (ROUGE-1/2/L), jiwer (WER, CER)
and nltk (METEOR), which come with ``hanse[eval]``; exact match, token F1 (SQuAD's,
which no library here has) and perplexity are ours. A figure that can't be had is
left out and its reason given: there is never a stand-in under its name.

METEOR matches synonyms by WordNet, whose files nltk doesn't bring along. It is
computed only where they lie in one of nltk's data folders (NLTK_DATA).
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from crypto.arrays import Float64
from daemon.learning.options import EvaluationError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WORD = re.compile(r"\w+")
_ROUGE = {"rouge1": "rouge-1", "rouge2": "rouge-2", "rougeL": "rouge-l"}


@dataclass(frozen=True)
class TextScores:
    """Figures of a set of answers.

    ``corpus``: of the set as a whole (BLEU, chrF: 0 .. 100, as sacrebleu has them;
    WER, CER: edits over the references' length, can exceed 1). ``each``: one
    value an answer, 0 .. 1, float64 [n]. ``missing``: names of figures that
    could not be had, with the reason. ``signatures``: sacrebleu's, which name
    tokeniser, smoothing and version.
    """

    corpus: dict[str, float]
    each: dict[str, Float64]
    missing: dict[str, str] = field(default_factory=dict)
    signatures: dict[str, str] = field(default_factory=dict)

    def means(self) -> dict[str, float]:
        """All figures, those of single answers averaged."""
        return self.corpus | {name: float(values.mean()) for name, values in self.each.items()}


def score_texts(answers: Sequence[str], references: Sequence[str]) -> TextScores:
    """Compare each answer with its reference.

    An empty answer is the worst there is. Raises EvaluationError when there is
    none, the numbers differ, or a reference is blank: error rates would divide
    by zero.
    """
    if not answers or len(answers) != len(references):
        raise EvaluationError(
            f"cannot compare {len(answers)} answers with {len(references)} references: "
            "expected the same number of both, and at least one"
        )
    for number, reference in enumerate(references):
        if not normalised(reference):
            raise EvaluationError(f"reference {number} has no word in it: leave it out")
    scores = TextScores(corpus={}, each={})
    pairs = list(zip(answers, references, strict=True))
    scores.each["em"] = np.array([float(normalised(a) == normalised(r)) for a, r in pairs])
    scores.each["token-f1"] = np.array([token_f1(a, r) for a, r in pairs])
    parts: tuple[tuple[Callable[..., None], tuple[str, ...]], ...] = (
        (_sacrebleu, ("bleu", "chrf", "chrf++")),
        (_rouge, tuple(f"{n}-{part}" for n in _ROUGE.values() for part in ("p", "r", "f"))),
        (_error_rates, ("wer", "cer")),
        (_meteor, ("meteor",)),
    )
    for add, names in parts:
        try:
            add(answers, references, scores)
        except ImportError as error:
            reason = f"{error.name} is not installed: pip install 'hanse[eval]'"
            scores.missing.update(dict.fromkeys(names, reason))
    return scores


def normalised(text: str) -> list[str]:
    """Words in lower case without punctuation and articles (SQuAD's rule)."""
    plain = "".join(c for c in text.lower() if c not in string.punctuation)
    return _ARTICLES.sub(" ", plain).split()


def token_f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall of words, each counted as often as it stands."""
    ours, wanted = normalised(answer), normalised(reference)
    common = sum((Counter(ours) & Counter(wanted)).values())
    return 2 * common / (len(ours) + len(wanted)) if common else 0.0


def perplexity(model: Any, tokenizer: Any, texts: Sequence[str], *, max_tokens: int = 512) -> float:
    """exp of the mean negative log-likelihood of a token, under a causal language model.

    All texts' tokens weigh equally. A text is preceded by the model's start token,
    if it has one, so that its first token counts, too; otherwise that one is only
    a condition. Texts are cut at ``max_tokens``. Raises EvaluationError when no
    token is left to predict or the figure isn't finite.
    """
    import torch
    from torch.nn import functional

    total, count = 0.0, 0
    start = tokenizer.bos_token_id
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:max_tokens]
        row = torch.tensor([[*([] if start is None else [start]), *ids]], device=model.device)
        if row.shape[1] < 2:
            continue
        with torch.inference_mode():
            logits = model(input_ids=row).logits[0, :-1].float()  # [t - 1, vocabulary]
        total += float(functional.cross_entropy(logits, row[0, 1:], reduction="sum"))
        count += row.shape[1] - 1
    if not count:
        raise EvaluationError("perplexity needs a text of two tokens or more")
    mean = total / count
    if not math.isfinite(mean) or mean > 700.0:
        raise EvaluationError(
            f"the model's mean negative log-likelihood is {mean}: it has diverged"
        )
    return math.exp(mean)


def _sacrebleu(answers: Sequence[str], references: Sequence[str], scores: TextScores) -> None:
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    for name, metric in (("bleu", BLEU()), ("chrf", CHRF()), ("chrf++", CHRF(word_order=2))):
        scores.corpus[name] = float(metric.corpus_score(list(answers), [list(references)]).score)
        scores.signatures[name] = str(metric.get_signature())


def _rouge(answers: Sequence[str], references: Sequence[str], scores: TextScores) -> None:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(_ROUGE), use_stemmer=True)
    found = [scorer.score(r, a) for a, r in zip(answers, references, strict=True)]
    for kind, name in _ROUGE.items():
        for part, position in (("p", 0), ("r", 1), ("f", 2)):
            scores.each[f"{name}-{part}"] = np.array([float(one[kind][position]) for one in found])


def _error_rates(answers: Sequence[str], references: Sequence[str], scores: TextScores) -> None:
    import jiwer

    wanted, given = list(references), list(answers)
    scores.corpus["wer"] = float(jiwer.wer(wanted, given))
    scores.corpus["cer"] = float(jiwer.cer(wanted, given))


def _meteor(answers: Sequence[str], references: Sequence[str], scores: TextScores) -> None:
    from nltk.corpus import wordnet
    from nltk.translate.meteor_score import meteor_score

    try:
        wordnet.ensure_loaded()
    except LookupError:
        scores.missing["meteor"] = (
            "WordNet is in none of nltk's data folders: put corpora/wordnet into one of them "
            "and name it in NLTK_DATA"
        )
        return
    words = [
        ([w.lower() for w in _WORD.findall(a)], [w.lower() for w in _WORD.findall(r)])
        for a, r in zip(answers, references, strict=True)
    ]
    scores.each["meteor"] = np.array(
        [float(meteor_score([r], a, wordnet=wordnet)) for a, r in words]
    )
