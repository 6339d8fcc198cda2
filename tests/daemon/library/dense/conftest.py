"""The engines, each where it can run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from daemon.library.dense.engines import ENGINES
from daemon.library.dense.options import IndexOptions
from tests.daemon.library.dense.milvus_lite import milvus_lite


@pytest.fixture(scope="session")
def milvus_uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server of its own, which a path in this process would not be."""
    with milvus_lite(tmp_path_factory.mktemp("milvus")) as uri:
        yield uri


@pytest.fixture(params=sorted(ENGINES))
def options(request: pytest.FixtureRequest) -> IndexOptions:
    """Each engine as an operator chooses it."""
    if request.param == "hnswlib":
        return IndexOptions()
    uri = request.getfixturevalue(f"{request.param}_uri")
    return IndexOptions(engine=request.param, uri=uri, owner=request.node.nodeid)
