"""Every input that was ever worth keeping, once more: what was found must stay mended."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.fuzz.table import CORPUS, NATIVE, TARGETS

ROOM = 1 << 20  # bytes of the whole corpus
HERE = sorted(set(TARGETS) - set(NATIVE))


@pytest.mark.parametrize("name", HERE)
def test_what_was_kept_is_judged_as_it_should_be(name: str) -> None:
    target = TARGETS[name]
    verdicts = [target.take(path.read_bytes()) for path in target.files()]
    assert {True, False} <= set(verdicts), "it has inputs of both kinds"


REPLAY = """
import sys
from tests.fuzz.__main__ import replay
from tests.fuzz.table import TARGETS
for name in sys.argv[1:]:
    found = replay(TARGETS[name], [])
    print("replayed", name, found, flush=True)
"""


@pytest.fixture(scope="module")
def replayed() -> subprocess.CompletedProcess[str]:
    """In a process of its own, so that a crash is a failure and not the end of all tests."""
    words = [sys.executable, "-u", "-c", REPLAY, *NATIVE]
    return subprocess.run(
        words, capture_output=True, text=True, timeout=120 * len(NATIVE), check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NATIVE)
def test_what_was_kept_does_not_bring_seal_down(
    replayed: subprocess.CompletedProcess[str], name: str
) -> None:
    """Where one brings it down, those behind it are not there either."""
    told = replayed.stdout.partition(f"replayed {name} ")
    assert told[2].startswith("0\n"), replayed.stdout + replayed.stderr
    lines = told[0].rpartition("\nreplayed ")[2].splitlines()
    assert {"accepted", "refused"} <= {line.split()[0] for line in lines}


@pytest.mark.parametrize("name", HERE)
def test_honest_inputs_reach_the_end(name: str) -> None:
    """Made afresh: a judge that refuses everything would find nothing."""
    target = TARGETS[name]
    assert any([target.take(seed) for seed in target.seeds()])  # noqa: C419  each is judged


def test_the_corpus_stays_small_and_has_a_folder_for_each_target() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < ROOM
    assert {path.parent.name for path in files} == set(TARGETS)
