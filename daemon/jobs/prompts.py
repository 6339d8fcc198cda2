"""A job of the answering worker: what a language model is sent for a question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from daemon.answering.answering import QuestionRefusedError, checked
from daemon.answering.generator import Asking, FilledPrompt, GeneratedAnswer
from daemon.answering.prompts.prompts import NoRoomError
from daemon.jobs import answering
from daemon.library.catalogue.filters import EVERY, Filters
from daemon.library.search import Ranked


@dataclass(frozen=True)
class TriedPrompt:
    """A prompt with its slots filled, of ``found`` passages; ``answer``: where it was wanted."""

    filled: FilledPrompt
    found: int
    answer: GeneratedAnswer | None


def try_prompt(
    kind: str, question: str, documents: Sequence[str], top_k: int, run: bool
) -> TriedPrompt:
    """What a language model is sent, of the best passages of these documents, or (none) of all.

    Raises QuestionRefusedError, also where a prompt has no room, LanguageModelError, NotOpenError.
    """
    version, question = answering.opened_version(), checked(question)
    found: list[Ranked] = []
    for filters in [Filters(begins=one) for one in documents] or [EVERY]:
        some, _ = version.search(question, top_k, filters)
        found += [one for one in some if not documents or one.passage.document_id == filters.begins]
    found = sorted(found, key=lambda one: -one.score)[:top_k]
    if not found:
        raise QuestionRefusedError("no passage was found to fill the prompt with: name others")
    try:
        filled = version.generator.filled(kind, question, found)
    except NoRoomError as error:
        raise QuestionRefusedError(str(error)) from None
    answer = version.generator.generate(question, found, Asking(prompt=kind)) if run else None
    return TriedPrompt(filled, len(found), answer)
