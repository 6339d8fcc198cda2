"""A site's triples as examples to learn from: its own prompt, and an answer that cites."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from daemon.answering.prompts.kinds import kind_of
from daemon.answering.prompts.prompts import NoRoomError, neutral, prompt
from daemon.answering.statements.support import Wording
from daemon.learning.generator.spec import GeneratorSpec
from daemon.learning.generator.triples import Triple
from daemon.library.contents import Passage
from daemon.library.passages import sentences

if TYPE_CHECKING:
    from daemon.learning.generator.encoding import Example
    from daemon.learning.language_model import LanguageModel

_ENDS = ".!?…"


def examples_of(
    triples: Sequence[Triple], model: LanguageModel, spec: GeneratorSpec
) -> list[Example]:
    """Triples as the site's own prompt asks, and as it wants them answered: with citations.

    The prompt takes passages, best first, until ``prompt_tokens`` are full. Where not even one
    fits, it is the question's alone, and too long to be trained on.
    """
    from daemon.learning.generator.encoding import Example

    budget = min(spec.prompt_tokens, model.room(spec.answer_tokens))
    made = []
    for triple in triples:
        passages = [Passage(n, "", "", "", text) for n, text in enumerate(triple.passages)]
        kind = kind_of(spec.prompt, triple.question)
        try:
            text, given = prompt(
                kind, triple.question, passages, budget, model.count, model.special_tokens
            )
        except NoRoomError:
            made.append(Example("", triple.answer))
            continue
        answer = neutral(triple.answer, model.special_tokens)
        made.append(Example(text, cited(answer, triple.passages[:given])))
    return made


def cited(answer: str, passages: Sequence[str]) -> str:
    """An answer with [n] at the end of each sentence: the passage with most of its words.

    One of which no passage has a word gets none: nothing there supports it.
    """
    marked = []
    for sentence in sentences(answer):
        asked = Wording.of(sentence).stems
        best = max(range(len(passages)), key=lambda n: _shared(asked, passages[n]))
        if not _shared(asked, passages[best]):
            marked.append(sentence)
            continue
        body = sentence.rstrip(_ENDS)
        marked.append(f"{body} [{best + 1}]{sentence[len(body) :]}")
    return " ".join(marked)


def _shared(asked: frozenset[str], text: str) -> int:
    return len(asked & Wording.of(text).stems)
