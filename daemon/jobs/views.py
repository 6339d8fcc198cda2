"""What answers who may ask of some collections alone: the open version, over their documents.

A *view* is an `OpenVersion` whose library, titles and vectors are those of some collections, and
whose weights and threshold are fitted on these. So it answers as a site would that had nothing
else, by the same code (docs/decisions/0046). It takes memory and some time to make, so it is kept,
and brought up to date where the library, or the open version, is another by now.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import numpy as np

from daemon.answering.abstention import Abstention
from daemon.answering.answering import OpenVersion
from daemon.library.allowed.documents import AllowedLibrary
from daemon.library.allowed.vectors import AllowedVectors
from daemon.library.search import RankingWeights
from daemon.library.titles import Titles

# In all views together, but of one at least: some 5 KB a passage of usual length, with 384 values.
_MOST_PASSAGES = 200_000
_LEAST_COUNTED = 200  # passages that a view counts as, at least: an empty one takes some, too

Collections = tuple[str, ...]
Make = Callable[[OpenVersion], OpenVersion]


@dataclass(frozen=True)
class _Fitted:
    """What of an `OpenVersion` is."""

    weights: RankingWeights
    weighed_on: tuple[str, ...]
    abstention: Abstention

    @classmethod
    def of(cls, version: OpenVersion) -> _Fitted:
        return cls(version.weights, version.weighed_on, version.abstention)


@dataclass
class _View:
    """``version``: None: it was of an open version that is no more."""

    library: AllowedLibrary
    version: OpenVersion | None = None
    as_of: int = -1  # `Library.changes` of the open version's when it was up to date
    fitted: _Fitted | None = None
    fitted_by: bytes = b""  # digest of all that goes into that
    passages: int = 0


class Views:
    """Those that were asked of last, by the names of their collections."""

    def __init__(self) -> None:
        self._views: OrderedDict[Collections, _View] = OrderedDict()  # asked of last stands last

    @property
    def kept(self) -> list[Collections]:
        """Which there are."""
        return list(self._views)

    def let_go(self) -> None:
        """Hold nothing of the open version: another is opened."""
        for view in self._views.values():
            view.version = None

    def of(
        self, collections: Collections, opened: OpenVersion, path: Path, begin: Make, fit: Make
    ) -> OpenVersion:
        """What answers of these collections; raises LibraryError.

        ``path``: of the library's file. ``begin``: puts on a version what reads its library;
        ``fit``: weights and threshold, where anything that these are fitted by is new. Another
        collection's documents make the site open a version anew; that must not be felt here, and
        arithmetic on the same numbers may differ in its last bits (MKL goes by where they lie).
        """
        view = self._views.pop(collections, None) or _View(AllowedLibrary(path, collections))
        with ExitStack() as undoing:
            undoing.callback(view.library.close)  # what failed half way is made anew
            as_of, version = opened.library.changes(), view.version
            if version is None or view.as_of != as_of:
                changed = view.library.update()
                if version is None:
                    version = _with_fitted(view, begin(_over(view.library, opened, opened)), fit)
                elif changed:  # what was fitted stays, as that of the open version does
                    version = _over(view.library, version, opened)
                view.version, view.as_of = version, as_of
                view.passages = len(view.library.rowids())
            undoing.pop_all()
        self._views[collections] = view
        self._keep_to_bound()
        return version

    def _keep_to_bound(self) -> None:
        counted = {name: max(_LEAST_COUNTED, one.passages) for name, one in self._views.items()}
        while len(self._views) > 1 and sum(counted.values()) > _MOST_PASSAGES:
            name, view = self._views.popitem(last=False)
            del counted[name]
            view.library.close()


def _over(library: AllowedLibrary, version: OpenVersion, opened: OpenVersion) -> OpenVersion:
    """The version, with what there is of this library in place of all."""
    return replace(
        version,
        library=library,
        titles=Titles(library.titles()),
        index=AllowedVectors(opened.index, np.array(library.rowids(), np.int64)),
    )


def _with_fitted(view: _View, version: OpenVersion, fit: Make) -> OpenVersion:
    by = sha256(view.library.state + version.model_digest)
    for parameter in version.retriever.parameters():
        by.update(np.ascontiguousarray(parameter.detach().cpu().numpy()).tobytes())
    by.update(version.index.vectors(version.index.labels()).tobytes())
    if view.fitted is None or view.fitted_by != by.digest():
        view.fitted, view.fitted_by = _Fitted.of(fit(version)), by.digest()
    return replace(version, **vars(view.fitted))
