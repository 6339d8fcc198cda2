"""fedctl eval --rate: people rate answers of two or more settings, blind, on one scale.

The scale is pFedRAG's (Table 9, here in words of our own): one score of 1 to 10 for an answer, by
correctness, completeness, terms, and faithfulness to what is cited. Nobody is told which setting
an answer is of: they come one at a time, shuffled for each rater anew, and the file of ratings
names them by their digest alone. Equal answers of several settings are rated once.

Agreement is Krippendorff's alpha for intervals (Computing Krippendorff's alpha-reliability, 2011)
over answers that two raters or more have rated: 1 is full agreement, 0 what chance gives.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from daemon.fedctl.commands.evaluation.saved import SavedAnswers, saved
from daemon.fedctl.terminal.output import CommandError, Exit, Session, columns, plain_text

if TYPE_CHECKING:
    from rich.console import Console

_SCALE = (
    (9, "9-10 right, complete and to the point; nothing beyond what is cited; every term is exact"),
    (7, "7-8  mostly right and on the main points; hardly anything that nothing cited supports"),
    (5, "5-6  an attempt: partly right or complete, terms are inexact or mixed up now and then"),
    (3, "3-4  mostly beside the question; wrong facts, or much that nothing cited supports"),
    (1, "1-2  wrong, made up or unusable, or no answer where there is one"),
)
_LEAST, _MOST = 1, 10
_MOST_BYTES = 1 << 28  # of a file of ratings


@dataclass(frozen=True)
class Answer:
    """What is rated: an answer to a question, of whichever settings gave it."""

    question: str
    references: tuple[str, ...]
    text: str
    cited: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Its name in the file of ratings."""
        whole = json.dumps([self.question, self.text]).encode()
        return hashlib.sha256(whole).hexdigest()


@dataclass(frozen=True)
class Comparison:
    """Settings by their file's name, each with its answers to the questions that all have."""

    settings: Mapping[str, Mapping[str, Answer]]

    @property
    def questions(self) -> list[str]:
        """That all settings answered."""
        return [*next(iter(self.settings.values()))]

    def shuffled(self, rater: str) -> list[Answer]:
        """Each different answer once, in an order of this rater's own."""
        once = {one.digest: one for of in self.settings.values() for one in of.values()}
        order = [once[digest] for digest in sorted(once)]
        random.Random(f"hanse {rater}").shuffle(order)  # noqa: S311  an order, no secret
        return order


Ratings = dict[str, dict[str, int]]  # by the answer's digest: scores by their rater


def rate(
    session: Session, files: Sequence[Path], place: Path | None, rater: str, *, results: bool
) -> Exit:
    """Ask a person for the scores that are missing, or show what came of all."""
    if len({path.stem for path in files}) < 2:
        cause = "two files of different names are compared, or more"
        raise CommandError(cause, "Give --rate FILE for each", exit_code=Exit.USAGE)
    if place is None:
        cause = "nothing says where ratings are kept"
        raise CommandError(cause, "Give --ratings FILE", exit_code=Exit.USAGE)
    compared = compare([saved(path) for path in files])
    ratings = read(place)
    if results:
        outcome = outcome_of(compared, ratings)
        session.result(outcome, lambda console: _shown(console, outcome))
        return Exit.OK
    if session.json:
        cause = "a person rates at a terminal"
        raise CommandError(cause, "Leave out --json, or give --results", exit_code=Exit.USAGE)
    rater = rater or getpass.getuser()
    order = compared.shuffled(rater)
    left = [one for one in order if rater not in ratings.get(one.digest, {})]
    with _appending(place) as file:
        done = _asked(session, left, len(order), rater, file)
    text = f"{rater} has rated {len(order) - len(left) + done} of {len(order)} answers."
    session.console.print(plain_text(f"{text} The same command goes on, --results shows them."))
    return Exit.OK if done == len(left) else Exit.PARTLY


def compare(evaluations: Sequence[SavedAnswers]) -> Comparison:
    """Raises CommandError where no question is in all of them."""
    first, *others = evaluations
    common = [one for one in first.answers if all(one in other.answers for other in others)]
    if not common:
        cause = "no question was answered in all of these evaluations"
        raise CommandError(cause, "Save them of the same split", exit_code=Exit.USAGE)
    return Comparison(
        {of.path.stem: {one: _answer(of.answers[one]) for one in common} for of in evaluations}
    )


def _answer(row: dict[str, Any]) -> Answer:
    cited = (f"[{one['number']}] {one['title'] or one['document_id']}: {one['text']}"
             for one in row["citations"])  # fmt: skip
    return Answer(row["question"], (*row["references"],), row["answer"], (*cited,))


def read(place: Path) -> Ratings:
    """What was rated so far; a person who rated one answer twice meant the second."""
    ratings: Ratings = defaultdict(dict)
    try:
        if place.stat().st_size > _MOST_BYTES:
            raise _no_ratings(place)
        for line in place.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            score = row["score"]
            if type(score) is not int or not _LEAST <= score <= _MOST:
                raise _no_ratings(place)
            ratings[str(row["answer"])][str(row["rater"])] = score
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CommandError(f"cannot read {place}: {error.strerror}", "Check the path") from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _no_ratings(place) from error
    return dict(ratings)


def _no_ratings(place: Path) -> CommandError:
    cause = f"{place} holds something that is no rating"
    return CommandError(cause, "Name another file", exit_code=Exit.USAGE)


def _appending(place: Path) -> IO[str]:
    """For its owner alone, also where it is there already."""
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(place, flags, 0o600)
        os.fchmod(descriptor, 0o600)
        return os.fdopen(descriptor, "a", encoding="utf-8")
    except OSError as error:
        cause = f"cannot write {place} ({error.strerror})"
        raise CommandError(cause, "Name another with --ratings") from error


def _asked(session: Session, left: Sequence[Answer], total: int, rater: str, file: IO[str]) -> int:
    """How many were rated before the rater had enough; each is on the disk before the next."""
    console = session.console
    for _, text in _SCALE:
        console.print(plain_text(text), soft_wrap=True)
    for done, one in enumerate(left):
        console.rule(f"{total - len(left) + done + 1} of {total}")
        console.print(plain_text(f"Question: {one.question}"), soft_wrap=True)
        for reference in one.references:
            console.print(plain_text(f"Right: {reference}"), soft_wrap=True)
        console.print(plain_text(f"\nAnswer: {one.text}\n"), soft_wrap=True)
        for cited in one.cited:
            console.print(plain_text(cited), soft_wrap=True)
        score = _score(console)
        if score is None:
            return done
        row = {"answer": one.digest, "rater": rater, "score": score, "unix_s": int(time.time())}
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())
    return len(left)


def _score(console: Console) -> int | None:
    """None: the rater has enough for now."""
    while True:
        try:
            said = input(f"Score {_LEAST} to {_MOST}, or q for later: ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return None
        if said.lower() == "q":
            return None
        if said.isascii() and said.isdigit() and _LEAST <= int(said) <= _MOST:
            return int(said)
        console.print(f"A whole number from {_LEAST} to {_MOST}.")


def outcome_of(compared: Comparison, ratings: Ratings) -> dict[str, Any]:
    """Of each setting its scores, of two each question's winner; and how far raters agree.

    A question's score is the mean of its raters'; a question counts where all settings have one.
    """
    scores = {
        name: {
            question: statistics.fmean(ratings[one.digest].values())
            for question, one in of.items()
            if ratings.get(one.digest)
        }
        for name, of in compared.settings.items()
    }
    whole = [one for one in compared.questions if all(one in of for of in scores.values())]
    mine = [ratings[one.digest] for one in compared.shuffled("") if one.digest in ratings]
    return {
        "questions": len(compared.questions),
        "rated": len(whole),
        "raters": sorted({rater for of in mine for rater in of}),
        "agreement": alpha([[*of.values()] for of in mine]),
        "settings": [
            {
                "setting": name,
                "mean": statistics.fmean(of[one] for one in whole) if whole else None,
                "deviation": statistics.stdev(of[one] for one in whole) if len(whole) > 1 else None,
            }
            for name, of in scores.items()
        ],
        "pairs": [*_pairs(scores, whole)],
    }


def _pairs(
    scores: Mapping[str, Mapping[str, float]], whole: Sequence[str]
) -> Iterator[dict[str, Any]]:
    names = [*scores]
    for number, name in enumerate(names):
        for other in names[:number]:
            more = [scores[name][one] - scores[other][one] for one in whole]
            yield {
                "setting": name,
                "against": other,
                "wins": sum(one > 0 for one in more),
                "ties": sum(one == 0 for one in more),
                "losses": sum(one < 0 for one in more),
            }


def alpha(units: Sequence[Sequence[int]]) -> float | None:
    """Krippendorff's, for intervals; None: nobody rated what another one did, or all the same."""
    units = [unit for unit in units if len(unit) > 1]
    values = [value for unit in units for value in unit]
    expected = _differences(values) / (len(values) - 1) if values else 0.0
    if not expected:
        return None
    return 1.0 - sum(_differences(unit) / (len(unit) - 1) for unit in units) / expected


def _differences(values: Sequence[int]) -> float:
    """Squares of all differences of two, each way."""
    return float(2 * (len(values) * sum(one * one for one in values) - sum(values) ** 2))


def _shown(console: Console, outcome: dict[str, Any]) -> None:
    raters = ", ".join(outcome["raters"]) or "nobody"
    text = f"{outcome['rated']} of {outcome['questions']} questions are rated, by {raters}."
    console.print(plain_text(text), soft_wrap=True)
    if not outcome["rated"]:
        return
    table = columns("setting", ">mean", ">deviation")
    for one in outcome["settings"]:
        spread = "" if one["deviation"] is None else f"{one['deviation']:.2f}"
        table.add_row(plain_text(one["setting"]), f"{one['mean']:.2f}", spread)
    console.print(table)
    for one in outcome["pairs"]:
        won = f"{one['wins']} won, {one['ties']} tied, {one['losses']} lost"
        console.print(
            plain_text(f"{one['setting']} against {one['against']}: {won}"), soft_wrap=True
        )
    if outcome["agreement"] is not None:
        console.print(f"Krippendorff's alpha of the raters: {outcome['agreement']:.2f}")
