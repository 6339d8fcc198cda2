"""The language that a text is in, where it can be told: by py3langid (BSD-3-Clause).

Its model (139 languages, naive Bayes over byte n-grams; Lui and Baldwin, ACL 2012) is part of
its wheel, no pickle, and nothing is downloaded. docs/decisions/0034 has what else was looked
at, and what it costs.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from daemon.library.readers.bounds import is_language
from daemon.library.readers.documents import Document

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

_FEWEST = 100  # letters; of fewer it says more than it knows
_ENOUGH = 4000  # characters; of more it says the same, and takes longer
_SURE = 0.9  # of 1; of a document
_SURE_OF_A_QUESTION = 0.7  # whose words are few: docs/decisions/0055 has what is told so


def language_of(document: Document) -> str:
    """ISO 639-1: what the document says, else what its text is in; "" where neither tells.

    Tables count for nothing, for they are names and numbers in any language.
    """
    if document.language:
        return document.language
    text = _prose(document)
    if sum(map(str.isalpha, text)) < _FEWEST:
        return ""
    return _found(text, _SURE)


def language_of_question(question: str) -> str:
    """ISO 639-1 of what somebody asks; "" where a few words don't tell."""
    return _found(question[:_ENOUGH], _SURE_OF_A_QUESTION)


def _prose(document: Document) -> str:
    """Its beginning, without tables."""
    if not document.spans:
        return document.text[:_ENOUGH]
    texts: list[str] = []
    left = _ENOUGH
    for span in document.spans:
        if span.kind in ("text", "heading") and left > 0:
            texts.append(document.text[span.begin : min(span.end, span.begin + left)])
            left -= len(texts[-1])
    return "\n".join(texts)


def _found(text: str, sure: float) -> str:
    found, probability = _identifier().classify(text)
    # "zxx": no language; some have three letters.
    return found if probability >= sure and is_language(found) else ""


@cache
def _identifier() -> LanguageIdentifier:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier: LanguageIdentifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    return identifier
