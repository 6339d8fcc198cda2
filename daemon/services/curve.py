"""The curve of a site: how each committed version does on its own validation pairs.

A version is judged once, in the background, when it is committed here, and once more as
this site answers with it when something of the site's own has been made for it: two
points, never one in place of the other. The newest version is judged again when
documents or pairs have come. It is asked in the learning worker, which runs at a low
priority and does one thing at a time: training comes before it or waits for it, which
``curve_questions`` bounds. A version that was overtaken before it could be judged is
left out. Nothing of this leaves the site.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from daemon.jobs import curve
from daemon.learning.options import EvaluationError, LearningError
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.dense.folder import IndexDamaged
from daemon.library.schema import LibraryError
from daemon.process.tasks import logged
from daemon.process.workers import Worker, WorkerCrashed
from daemon.state.folder import StateFolder
from daemon.state.store import Store, StoreError
from daemon.state.versions import VersionError

log = structlog.get_logger()

_FAILURES = (
    LearningError,
    LibraryError,
    VersionError,
    IndexDamaged,
    StoreError,
    WorkerCrashed,
    OSError,
)
_Version = tuple[int, bytes]  # round and digest


class Curve:
    """Judges versions as they come, one after the other."""

    def __init__(
        self,
        *,
        spec: RetrieverSpec,
        state: StateFolder,
        store: Store,
        learning: Worker,
        questions: int,
        head: Callable[[], _Version],
    ) -> None:
        """``questions``: asked of a version at most; 0 judges nothing. ``head``: the newest."""
        self.missing = "the newest version has not been judged yet: it is, in the background"
        self._spec = spec
        self._state = state
        self._store = store
        self._learning = learning
        self._questions = questions
        self._head = head
        self._waiting: dict[_Version, bool] = {}  # and whether again, if it was judged before
        self._awake = asyncio.Event()

    def committed(self, round_: int, model_digest: bytes) -> None:
        """A version was committed here; returns at once."""
        self._waiting.setdefault((round_, model_digest), False)
        self._awake.set()

    def answers(self) -> None:
        """Some version was opened to answer, or with another of the site's own.

        It may be what was waited for.
        """
        self.committed(*self._head())

    def changed(self) -> None:
        """Documents or pairs have come: the newest version is judged anew."""
        self._waiting[self._head()] = True
        self._awake.set()

    async def run(self) -> None:
        """Judge whatever waits, until cancelled."""
        if self._questions == 0:
            self.missing = "evaluation.curve_questions is 0 here: versions are not judged"
            return
        while True:
            await self._awake.wait()
            self._awake.clear()
            for version in sorted(self._waiting):
                again = self._waiting.pop(version)
                await logged(self._judge(version, again=again))

    async def _judge(self, version: _Version, *, again: bool) -> None:
        round_, digest = version
        known = frozenset[bytes]()
        try:
            if not again:
                known = await asyncio.to_thread(self._store.judged, *version)
            kinds = await asyncio.to_thread(curve.kinds_of, self._spec, digest)
            if not known.issuperset(kinds.values()):
                scores = await self._learning.run(
                    curve.judge_version,
                    self._spec,
                    self._state.library,
                    self._state.versions,
                    self._state.index,
                    digest,
                    self._questions,
                    known,
                )
                await asyncio.to_thread(self._file, version, scores)
            self._note(version, "")
        except curve.NotIndexed:
            # Its index wakes us again; if it was overtaken there will be none.
            self._note(version, "the newest version has not been indexed yet")
        except EvaluationError as error:
            self._note(version, str(error))
        except _FAILURES as error:
            self._note(version, str(error))
            log.warning("version not judged", round=round_, cause=str(error))

    def _note(self, version: _Version, missing: str) -> None:
        if version == self._head():
            self.missing = missing

    def _file(self, version: _Version, scores: list[curve.VersionScores]) -> None:
        now = time.time_ns() // 1_000_000
        for one in scores:
            self._store.file_scores(
                *version,
                one.means,
                one.questions,
                now,
                kind=one.kind,
                own_digest=one.own_digest,
            )
            log.info("version judged", round=version[0], kind=one.kind, questions=one.questions)
