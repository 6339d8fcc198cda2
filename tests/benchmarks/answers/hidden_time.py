"""Whether the time of an answer tells of documents that may not be asked of.

Two sites have the same open collection; one of them has four times as many secret documents
beside it, with the same words. Who may ask of the open one asks both the same questions in turn,
so that whatever the machine does meanwhile is in both. The seconds are compared by the test of
Kolmogorov and Smirnov: a p of less than 0.01 tells them apart. As a control the same is done as it
would be without views: all passages are searched among the allowed ones.

    python -m tests.benchmarks.answers.hidden_time [--questions 1000]
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import ks_2samp

from daemon.answering.options import AnsweringOptions
from daemon.jobs import answering, views
from daemon.jobs import learning as learning_jobs
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.catalogue.filters import EVERY, Filters
from daemon.library.readers.documents import Document
from tests.support.small_models import small_encoder

OPEN, SECRET, WORDS, LENGTH = 2000, 8000, 3000, 60  # documents, words in all and of each
LEVEL = 0.01
MINE = ("open",)
_STATE = ("_open", "_views", "_as_asked")


class Site:
    """An open version with its views; both sites are in this process, one at a time."""

    def __init__(self, spec: RetrieverSpec, folder: Path, documents: list[Document]) -> None:
        digest = learning_jobs.write_initial_version(spec, folder / "versions")
        learning_jobs.ingest(spec, folder / "library.sqlite3", documents, [], 100)
        index = learning_jobs.build_index(
            spec, folder / "library.sqlite3", folder / "versions", digest, folder / "index"
        )
        for name, value in zip(_STATE, (None, views.Views(), None), strict=True):
            setattr(answering, name, value)
        answering.open_version(
            *(spec, folder / "library.sqlite3", folder / "versions", digest, index),
            folder / "sentences.sqlite3",
            AnsweringOptions(lost_answers=0.05),
        )
        self._state = [getattr(answering, name) for name in _STATE]

    @contextmanager
    def asked(self) -> Iterator[None]:
        """What is asked in the block is asked of this one."""
        for name, value in zip(_STATE, self._state, strict=True):
            setattr(answering, name, value)
        yield


def seconds(sites: list[Site], questions: list[str], job: Callable[[str], Any]) -> Any:
    """[sites, questions] in the order of the sites, which of them begins in turn."""
    found = np.zeros((len(sites), len(questions)))
    for number, question in enumerate(questions):
        order = range(len(sites)) if number % 2 else reversed(range(len(sites)))
        for one in order:
            with sites[one].asked():
                started = time.perf_counter()
                job(question)
                found[one, number] = time.perf_counter() - started
    return found


def figures(count: int) -> dict[str, Any]:
    """Percentiles in milliseconds, and p of the test, for each way."""
    chance = np.random.default_rng(11)
    spelled = ["".join(chance.choice(list("bcdfgklmnprst"), 5)) for _ in range(WORDS)]
    common = 1 / np.arange(1, WORDS + 1)
    common /= common.sum()

    def text() -> str:
        return " ".join(chance.choice(spelled, LENGTH, p=common)) + "."

    mine = [Document(f"open/{n}", spelled[n % WORDS], text(), "train") for n in range(OPEN)]
    others = [Document(f"secret/{n}", spelled[n % WORDS], text(), "train") for n in range(SECRET)]
    questions = [" ".join(chance.choice(spelled, 6, p=common)) for _ in range(count)]
    jobs: dict[str, Callable[[str], Any]] = {
        "ask": lambda one: answering.ask(one, 5, collections=MINE),
        "search": lambda one: answering.search(one, 5, True, EVERY, MINE),
        "control: all, filtered": lambda one: answering.search(
            one, 5, True, Filters(collection="open")
        ),
    }
    told: dict[str, Any] = {"open": OPEN, "secret": SECRET, "questions": count, "level": LEVEL}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        words = [one for one in spelled if re.fullmatch(r"\w+", one)]
        spec = RetrieverSpec(
            encoder=str(small_encoder(root / "encoder", words)), max_tokens=64, device="cpu"
        )
        sites = [Site(spec, root / "without", mine), Site(spec, root / "with", mine + others)]
        started = time.perf_counter()
        with sites[1].asked():
            answering.renew_view(MINE)
        told["view made, s"] = round(time.perf_counter() - started, 2)
        for name, job in jobs.items():
            seconds(sites, questions[:20], job)
            found = seconds(sites, questions, job) * 1e3
            p = float(ks_2samp(*found).pvalue)
            told[name] = {
                "p50 without, with": np.median(found, axis=1).round(3).tolist(),
                "p99 without, with": np.percentile(found, 99, axis=1).round(3).tolist(),
                "p": float(f"{p:.3g}"),
                "told apart": p < LEVEL,
            }
    return told


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=1000)
    print(json.dumps(figures(parser.parse_args().questions), indent=2))
