"""Answers of an evaluation in a file at the site, for its owner alone (0600).

The first line says what answered (a reply of `fedctl eval --answers`, with its figures), each
further line is a question with its right answers and what it was answered with.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crypto.durable import whole
from daemon.fedctl.terminal.output import CommandError, Exit
from daemon.fedctl.transfer.originals import there_already

_FORMAT = 1
_MOST_BYTES = 1 << 30  # of a file that is read


def save(
    place: Path, evaluation: dict[str, Any], answers: Iterable[dict[str, Any]], *, replace: bool
) -> None:
    """Write it whole or not at all; CommandError where that fails."""
    lines = [{"hanse_answers": _FORMAT, "evaluation": evaluation}, *answers]
    try:
        with whole(place, fresh=not replace) as temporary:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with os.fdopen(os.open(temporary, flags, 0o600), "w", encoding="utf-8") as file:
                file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    except FileExistsError:
        raise there_already(place) from None
    except OSError as error:
        raise CommandError(
            f"cannot write {place} ({error.strerror or error})", "Name another with --save"
        ) from error


@dataclass(frozen=True)
class SavedAnswers:
    """What `save` wrote; ``answers`` by their question."""

    path: Path
    evaluation: dict[str, Any]
    answers: dict[str, dict[str, Any]]


def saved(path: Path) -> SavedAnswers:
    """Read it; CommandError for what is none."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise _no_evaluation(path)
        with path.open(encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        if rows[0]["hanse_answers"] != _FORMAT:
            raise _no_evaluation(path)
        answers = {row["question"]: row for row in rows[1:] if _is_answer(row)}
        return SavedAnswers(path, rows[0]["evaluation"], answers)
    except OSError as error:
        raise CommandError(
            f"cannot read {path}: {error.strerror}", "Check the path", exit_code=Exit.USAGE
        ) from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _no_evaluation(path) from error


def _is_answer(row: dict[str, Any]) -> bool:
    """Whether it has an answer; TypeError for a row that nothing here has written."""
    texts = [*row["references"]]
    for one in row["citations"]:
        texts += [one["title"], one["document_id"], one["text"]]
    if not all(isinstance(text, str) for text in (row["question"], *texts)):
        raise TypeError
    return isinstance(row["answer"], str)


def _no_evaluation(path: Path) -> CommandError:
    return CommandError(
        f"{path} holds no answers of an evaluation",
        "Write one with `fedctl eval --answers --save FILE`",
        exit_code=Exit.USAGE,
    )
