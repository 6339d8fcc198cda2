"""llama.cpp's own server, unchanged, writes answers with a model that was taught on the spot.

Its package has an environment of its own, which `make test-clients` makes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon.answering import openai_server
from daemon.answering.options import AnsweringOptions
from daemon.answering.written import WrittenGenerator
from daemon.process.chat_client import ChatClient, Sampling
from tests.daemon.answering.test_language_models import (
    OPTIONS,
    Silent,
    asked,
    lessons,
    taught,
)

ENVIRONMENT = Path(sys.prefix) / ".llama-cpp"
SERVES = Path(__file__).with_name("serve_llama_cpp.py")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ENVIRONMENT / ".installed").exists(),
        reason="llama.cpp is not installed: `make test-clients` does that",
    ),
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = taught(tmp_path_factory.mktemp("llama"), "llama")
    serving = subprocess.Popen(
        [ENVIRONMENT / "bin" / "python", "-I", SERVES, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(folder / "log").open("w"),
        text=True,
    )
    assert serving.stdin is not None
    assert serving.stdout is not None
    try:
        address = serving.stdout.readline().strip()
        assert address.startswith("http"), (folder / "log").read_text()[-2000:]
        yield f"{address}/v1"
    finally:
        serving.stdin.close()
        serving.wait(60)


def test_it_copies_the_right_sentence_and_cites_it(url: str) -> None:
    chosen = AnsweringOptions(
        generator="openai",
        language_model=f"{url}#small",
        **{**OPTIONS, "answer_within_s": 100.0, "sampling_temperature": 0.0},
    )
    writing = WrittenGenerator(lambda: openai_server.model(chosen), Silent(), chosen)
    for lesson in lessons():
        given = writing.generate(lesson.question, lesson.passages)
        assert not given.instead, given.text
        sentence, _ = lesson.answer.rsplit(" [", 1)
        assert given.text == f"{sentence}. [1]"
        (citation,) = given.citations
        assert citation.document_id == lesson.document


def test_it_stops_where_it_is_told(url: str) -> None:
    short = ChatClient(url, "small").reply(asked(lessons()[0]), Sampling(3), 60.0)
    assert 0 < len(short) < len(lessons()[0].answer)
