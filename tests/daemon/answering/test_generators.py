"""The table of generators, and the setting that chooses one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from config.answering import USUAL_GENERATOR
from config.loading import load
from daemon.answering.generator import AS_SET, Asking, FilledPrompt, GeneratedAnswer, Told
from daemon.answering.generators import GENERATORS
from daemon.answering.options import AnsweringOptions
from daemon.jobs import answering
from daemon.library.search import Ranked
from tests.daemon.answering.conftest import Site


def test_what_the_settings_say_unasked_is_in_the_table(tmp_path: Path) -> None:
    path = tmp_path / "fedd.toml"
    path.write_text("")
    assert load(path, generators=tuple(GENERATORS)).retrieval.generator == USUAL_GENERATOR
    assert USUAL_GENERATOR in GENERATORS


class Remembering:
    """Writes nothing, and keeps what it was made for."""

    def __init__(self, options: AnsweringOptions) -> None:
        self.options = options

    def generate(
        self,
        question: str,
        passages: Sequence[Ranked],
        how: Asking = AS_SET,  # noqa: ARG002
        told: Told | None = None,  # noqa: ARG002
    ) -> GeneratedAnswer:
        return GeneratedAnswer(f"{question} {self.options.level} {len(passages)}", ())

    def filled(self, kind: str, question: str, passages: Sequence[Ranked]) -> FilledPrompt:
        return FilledPrompt(f"{kind} {question}", len(passages), 0)


@pytest.mark.slow
def test_a_generator_is_told_how_the_site_answers(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(GENERATORS, "remembering", lambda _q, _s, options: Remembering(options))
    site.open(generator="remembering", level="sentence")
    assert answering.ask("Which oil?", 2).text == "Which oil? sentence 2"


@pytest.mark.slow
def test_a_generator_that_is_not_there_is_refused_beside_all_else(tmp_path: Path) -> None:
    path = tmp_path / "fedd.toml"
    path.write_text('[retrieval]\ngenerator = "oracle"\ntop_k = 0\n[log]\nlevel = 3\n')
    command = [sys.executable, "-m", "daemon.main", "--config", str(path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == os.EX_CONFIG
    _, *lines = ran.stderr.splitlines()
    keys = [line.split()[0] for line in lines]
    assert keys == ["retrieval.top_k", "retrieval.generator", "log.level"]
    assert (
        '= "oracle": expected one of "extractive", "transformers", "openai", "federated"; choose'
        in lines[1]
    )
