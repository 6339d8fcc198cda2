"""Fixtures that several test files use, and which files may run at the same moment."""

import os
import re
from functools import cache
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

pytest_plugins = ["tests.daemon.fedctl.command_line"]

# Tables are as wide as `fedctl` makes them for a file, whatever the terminal is of whoever
# runs the tests (pytest-xdist, too, sets this).
os.environ.pop("COLUMNS", None)

# What starts daemons, cuts networks or takes every descriptor.
_ONE_AT_A_TIME = re.compile(r"\bmark\.(federation|faults|attacks)\b")


class _OneFederation(LoadFileScheduling):
    """A file at a time (its fixtures are made once), and of those with daemons one in all.

    Daemons have deadlines, and several processors' work. Which files those are is read
    from the files: the process that deals them out has not imported them.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "daemons" if _has_daemons(self.config.rootpath / file) else file


@cache
def _has_daemons(file: Path) -> bool:
    return _ONE_AT_A_TIME.search(file.read_text(encoding="utf-8")) is not None


@pytest.hookimpl(optionalhook=True)  # there is none without pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    """Deal out files as `_OneFederation` says."""
    return _OneFederation(config, log)
