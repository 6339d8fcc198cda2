"""Fixtures that several test files use, and which files may run at the same moment."""

import gc
import os
import re
import signal
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

pytest_plugins = ["tests.support.command_line"]

# Tables are as wide as `fedctl` makes them for a file, whatever the terminal is of whoever
# runs the tests (pytest-xdist, too, sets this).
os.environ.pop("COLUMNS", None)

# As in the workers: threads of the tokenizers' own have been seen to wait for one another.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# Who cuts networks is at it for minutes; who starts daemons, or takes every descriptor, too.
_ONE_AT_A_TIME = {
    "faults": re.compile(r"\bmark\.faults\b"),
    "attacks": re.compile(r"\bmark\.attacks\b"),
    "daemons": re.compile(r"\bmark\.federation\b"),
    # They share the process that workers are forked from: to import torch there takes seconds.
    "workers": re.compile(r"\bimport_once\(|\bWorkers\.of\("),
    # They read each file of ours, which takes seconds, and keep what they read.
    "sources": re.compile(r"^def parsed\(|^from tests\.test_rooms import", re.MULTILINE),
}

# Half a minute or more each, and none of a kind's processes needed: none is to be the last.
_LONG = (
    "tests/simulation/test_simulation.py",
    "tests/peers/rounds/test_people.py",
    "tests/learning_bench/test_bench.py",
)

# How long an example takes says more of what else the machine does.
settings.register_profile("busy", deadline=None)
settings.load_profile("busy")

# Ctrl-C means the same to what tests start as to a person's shell, also where the tests run in
# the background, which a shell starts with the signal ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class _OneFederation(LoadFileScheduling):
    """A file at a time (its fixtures are made once), and of those with daemons one a kind.

    Each kind is in one process then, which forks all its daemons from one (tests/support/warm.py)
    and starts with them: they take longest. Which files those are is read from the files: the
    process that deals them out has not imported them.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return _kind_of(self.config.rootpath / file) or file


@cache
def _kind_of(file: Path) -> str:
    if str(file).endswith(_LONG):
        return ""
    text = file.read_text(encoding="utf-8")
    return next((kind for kind, marks in _ONE_AT_A_TIME.items() if marks.search(text)), "")


@pytest.hookimpl(optionalhook=True)  # there is none without pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    """Deal out files as `_OneFederation` says, in the order in which they were collected."""
    config.option.loadscopereorder = False
    return _OneFederation(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest: with each kind that runs one at a time."""
    items.sort(key=lambda item: (not _kind_of(item.path), not item.nodeid.startswith(_LONG)))


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector need not look at it again and again."""
    gc.collect()
    gc.freeze()
