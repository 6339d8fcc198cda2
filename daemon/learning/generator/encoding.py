"""From a prompt and its answer to what a language model trains on: tokens, rows, batches.

Only the answer is learned: what the prompt is made of are strangers' texts. Of models from text
to text a row is one example. A causal model that keeps examples of one row apart gets several
in a row where they fit: positions begin anew with each, and attention does not go over them
(Krell et al. 2021). The loss is the same, whichever way they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from daemon.learning.language_model import LanguageModel
from daemon.learning.options import TrainingError

IGNORED = -100  # a label that is none


@dataclass(frozen=True)
class Example:
    """What the model is asked, with its passages, and what it is to answer."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Lesson:
    """An example as tokens; the answer's with its end, unless it was ``cut``."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    cut: bool = False

    @property
    def length(self) -> int:
        """Of both together."""
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True)
class Lessons:
    """What is trained on; ``left_out``: examples without an answer or whose prompt is too long."""

    lessons: tuple[Lesson, ...]
    left_out: int

    @property
    def cut(self) -> int:
        """Those whose answer is learned to `answer_tokens` and not to its end."""
        return sum(lesson.cut for lesson in self.lessons)


@dataclass(frozen=True)
class Batch:
    """Rows for one pass of a model, all [b, t] but ``labels`` of models from text to text.

    ``labels``: what is to be foretold, IGNORED elsewhere; of a causal model where it stands.
    ``positions``: None where a row is one example. ``mask``: 1 where something stands.
    """

    tokens: Tensor
    mask: Tensor
    labels: Tensor
    positions: Tensor | None = None

    @property
    def answered(self) -> int:
        """Tokens whose loss is in the sum."""
        return int((self.labels != IGNORED).sum())


def encoded(
    model: LanguageModel, examples: Sequence[Example], prompt_tokens: int, answer_tokens: int
) -> Lessons:
    """Examples as tokens, as the model is prompted when it answers.

    An answer is cut at ``answer_tokens``, and then has no end to learn. A prompt is never cut
    here, for its question and its instructions would be lost: what makes it leaves out passages
    (`daemon.answering.prompts.prompts`). Raises TrainingError when nothing is left, or the model
    has no room for so many tokens.
    """
    room = model.room(answer_tokens)
    if prompt_tokens > room:
        raise TrainingError(
            f"the model has room for a prompt of {room} tokens beside an answer of "
            f"{answer_tokens}: lower generator.prompt_tokens ({prompt_tokens})"
        )
    said = [one for one in examples if one.prompt.strip() and one.answer.strip()]
    lessons = [_lesson(model, example, answer_tokens) for example in said]
    fitting = [one for one in lessons if len(one.prompt) <= prompt_tokens]
    if not fitting:
        raise TrainingError(
            f"none of this site's {len(examples)} question-passage-answer triples can be trained "
            "on: ingest pairs with answers whose documents are in the library, or raise "
            f"generator.prompt_tokens ({prompt_tokens})"
        )
    return Lessons(tuple(fitting), len(examples) - len(fitting))


def _lesson(model: LanguageModel, example: Example, answer_tokens: int) -> Lesson:
    tokenizer, end = model.tokenizer, model.tokenizer.eos_token_id
    said = model.behind(example.answer.strip())
    # From text to text a target may have a begin of its own (BART's <s>).
    ids = tokenizer(said, add_special_tokens=model.to_text, verbose=False)["input_ids"]
    if end is not None and ids[-1:] != [end]:
        ids = [*ids, end]
    answer = tuple(ids[:answer_tokens])
    return Lesson(tuple(model.prompt_ids(example.prompt)), answer, len(ids) > answer_tokens)


def batches(
    lessons: Sequence[Lesson], size: int, *, to_text: bool, packs: bool, padding: int
) -> list[Batch]:
    """All of them, at most ``size`` a batch, those of alike length together.

    ``packs``: several in a row, no row longer than the longest of them. ``padding``: the token
    that fills up; it is never looked at.
    """
    order = sorted(lessons, key=lambda one: one.length, reverse=True)
    runs = [order[start : start + size] for start in range(0, len(order), size)]
    if to_text:
        return [_pairs_of_texts(run, padding) for run in runs]
    return [_rows(_packed(run) if packs else [[one] for one in run], padding) for run in runs]


def padded_share(made: Sequence[Batch]) -> float:
    """Of all positions those in which nothing stands."""
    there = sum(int(batch.mask.sum()) for batch in made)
    return 1.0 - there / sum(batch.mask.numel() for batch in made)


def _packed(lessons: Sequence[Lesson]) -> list[list[Lesson]]:
    """First fit, longest first, as they come: rows as long as the longest."""
    rows: list[list[Lesson]] = []
    left: list[int] = []
    for lesson in lessons:
        fits = (n for n, room in enumerate(left) if room >= lesson.length)
        if (row := next(fits, None)) is None:
            rows.append([lesson])
            left.append(lessons[0].length - lesson.length)
        else:
            rows[row].append(lesson)
            left[row] -= lesson.length
    return rows


def _rows(rows: Sequence[Sequence[Lesson]], padding: int) -> Batch:
    longest = max(sum(lesson.length for lesson in row) for row in rows)
    tokens = torch.full((len(rows), longest), padding)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full((len(rows), longest), IGNORED)
    positions = torch.zeros(len(rows), longest, dtype=torch.long)
    for line, row in enumerate(rows):
        at = 0
        for lesson in row:
            middle, end = at + len(lesson.prompt), at + lesson.length
            tokens[line, at:end] = torch.tensor(lesson.prompt + lesson.answer)
            labels[line, middle:end] = torch.tensor(lesson.answer)
            positions[line, at:end] = torch.arange(lesson.length)
            at = end
        mask[line, :at] = 1
        positions[line, at:] = torch.arange(longest - at)  # an example of nothing
    packed = any(len(row) > 1 for row in rows)
    return Batch(tokens, mask, labels, positions if packed else None)


def _pairs_of_texts(lessons: Sequence[Lesson], padding: int) -> Batch:
    prompts = [torch.tensor(lesson.prompt) for lesson in lessons]
    pad = torch.nn.utils.rnn.pad_sequence
    return Batch(
        tokens=pad(prompts, True, padding),
        mask=pad([torch.ones_like(row) for row in prompts], True),
        labels=pad([torch.tensor(lesson.answer) for lesson in lessons], True, IGNORED),
    )
