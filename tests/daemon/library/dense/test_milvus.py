"""What an index at a server may meet: kills, removals, outages, a change of engine and back."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daemon.library.dense.engines import engine_of
from daemon.library.dense.folder import (
    IndexDamaged,
    forget_elsewhere,
    load_index,
    newest_index,
    remove_other_indexes,
    save_index,
)
from daemon.library.dense.index import Wanted, build_index, update_index
from daemon.library.dense.options import EMBEDDED, EngineUnavailable, IndexOptions
from tests.daemon.library.dense.test_index import contents_of, index_of, labelled, unit_vectors
from tests.daemon.library.dense.tls import Authority, tls_before
from tests.support.authority import free_port

MODEL, CONTENT, AFTER = b"m" * 32, b"c" * 32, b"d" * 32
NOBODY = IndexOptions(engine="milvus", uri=f"http://127.0.0.1:{free_port()}", owner="elm")


@pytest.fixture
def there(milvus_uri: str, request: pytest.FixtureRequest) -> IndexOptions:
    return IndexOptions(engine="milvus", uri=milvus_uri, owner=request.node.nodeid)


def collections(options: IndexOptions) -> list[str]:
    from pymilvus import MilvusClient  # type: ignore[import-not-found, unused-ignore]

    begins = engine_of(options)._begins  # type: ignore[attr-defined]
    found = MilvusClient(options.uri).list_collections()
    return [name for name in found if name.startswith(begins)]


def wanted(count: int, embedded: list[int]) -> Wanted:
    """Passages as a library has them; ``embedded`` is told how many have to be embedded."""
    labels = labelled(count)
    vectors = dict(zip(labels.tolist(), unit_vectors(count), strict=True))

    def embed(some: Any) -> Any:
        embedded.append(len(some))
        return np.array([vectors[label] for label in some.tolist()])

    return Wanted(labels, contents_of(labels), embed)


def test_a_move_there_and_back_embeds_nothing_and_loses_nothing(
    there: IndexOptions, tmp_path: Path
) -> None:
    embedded: list[int] = []
    queries = unit_vectors(20, seed=9)
    exact = index_of(1500).search(queries, 10)[0]
    for options in (EMBEDDED, there, replace(EMBEDDED, uri=there.uri, owner=there.owner)):
        before = newest_index(tmp_path, MODEL, options)
        built = update_index(before, wanted(1500, embedded), options=options)
        path = save_index(built, tmp_path, MODEL, CONTENT, options)
        opened = load_index(path, MODEL, CONTENT, options=options)
        assert opened.base.engine == options.engine
        assert (opened.search(queries, 10)[0] == exact).mean() > 0.95
        assert (opened.labels() == labelled(1500)).all()
        forget_elsewhere(tmp_path, options)
        assert len(collections(there)) == (options.engine == "milvus")
    assert embedded == [1500], "once, by the first engine"


def test_until_it_is_built_anew_another_engines_index_answers(
    there: IndexOptions, tmp_path: Path
) -> None:
    path = save_index(index_of(60), tmp_path, MODEL, CONTENT)
    opened = load_index(path, MODEL, CONTENT, options=there)
    queries = unit_vectors(3, seed=9)
    assert (opened.search(queries, 5)[0] == index_of(60).search(queries, 5)[0]).all()
    assert opened.base.engine == "hnswlib", "so who asks for another one builds it"


def test_what_no_index_names_is_dropped_and_others_stay(
    there: IndexOptions, tmp_path: Path
) -> None:
    """After a removal no vector of what went is at the server."""
    other = replace(there, owner="another site")
    save_index(index_of(40, other), tmp_path / "other", MODEL, CONTENT, other)
    save_index(index_of(50, there), tmp_path / "mine", MODEL, CONTENT, there)
    kept = save_index(index_of(60, there), tmp_path / "mine", MODEL, AFTER, there)
    assert len(collections(there)) == 2
    remove_other_indexes(tmp_path / "mine", {kept})
    forget_elsewhere(tmp_path / "mine", there)
    assert (len(collections(there)), len(collections(other))) == (1, 1)
    assert load_index(kept, MODEL, AFTER, options=there).count == 60
    forget_elsewhere(tmp_path / "nowhere", other)
    assert collections(other) == []


KILLED = """
    import os, signal, sys
    from daemon.library.dense.engines import engine_of
    from daemon.library.dense.options import IndexOptions
    from tests.daemon.library.dense.test_index import labelled, unit_vectors

    def told(done, total):
        if done >= int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)

    options = IndexOptions(engine="milvus", uri=sys.argv[1], owner=sys.argv[2])
    engine_of(options).build(labelled(3000), unit_vectors(3000), threads=1, told=told)
"""


@pytest.mark.parametrize("after", [1, 2048, 3000])
def test_a_build_that_is_killed_leaves_nothing_that_is_searched(
    there: IndexOptions, tmp_path: Path, after: int
) -> None:
    words = [there.uri, there.owner, str(after)]
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), *words], check=False)
    assert ran.returncode == -signal.SIGKILL
    assert [name.endswith("_part") for name in collections(there)] == [True]
    path = save_index(index_of(3000, there), tmp_path, MODEL, CONTENT, there)
    forget_elsewhere(tmp_path, there)
    assert [name.endswith("_part") for name in collections(there)] == [False]
    opened = load_index(path, MODEL, CONTENT, options=there)
    queries = unit_vectors(20, seed=9)
    exact = index_of(3000).search(queries, 10)[0]
    assert (opened.search(queries, 10)[0] == exact).mean() > 0.95


def altered(change: Callable[[Any, str], object]) -> Callable[[IndexOptions], None]:
    def act(options: IndexOptions) -> None:
        from pymilvus import MilvusClient

        (name,) = collections(options)
        change(MilvusClient(options.uri), name)

    return act


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (altered(lambda client, name: client.drop_collection(name)), "has no collection"),
        (
            altered(lambda client, name: client.delete(name, ids=labelled(9).tolist())),
            "passages and not 50",
        ),
    ],
    ids=["dropped", "emptied"],
)
def test_what_is_not_as_it_was_put_there_is_built_again(
    there: IndexOptions, tmp_path: Path, act: Callable[[IndexOptions], None], why: str
) -> None:
    path = save_index(index_of(50, there), tmp_path, MODEL, CONTENT, there)
    act(there)
    with pytest.raises(IndexDamaged, match=why):
        load_index(path, MODEL, CONTENT, options=there)
    assert save_index(index_of(50, there), tmp_path, MODEL, CONTENT, there) == path
    assert load_index(path, MODEL, CONTENT, options=there).count == 50


def test_another_sites_collection_is_not_opened(there: IndexOptions, tmp_path: Path) -> None:
    path = save_index(index_of(50, there), tmp_path, MODEL, CONTENT, there)
    with pytest.raises(IndexDamaged, match="another site's"):
        load_index(path, MODEL, CONTENT, options=replace(there, owner="oak"))


@pytest.mark.timeout(120)
def test_without_its_server_an_index_compares_with_all(there: IndexOptions, tmp_path: Path) -> None:
    """An outage is no damage: the same answers, later."""
    path = save_index(index_of(50, there), tmp_path, MODEL, CONTENT, there)
    opened = load_index(path, MODEL, CONTENT, options=replace(there, uri=NOBODY.uri))
    queries = unit_vectors(3, seed=9)
    for _ in range(2):  # the second does not wait for the server
        assert (opened.search(queries, 5)[0] == index_of(50).search(queries, 5)[0]).all()


@pytest.mark.timeout(120)
def test_what_is_to_be_built_or_dropped_there_says_who_does_not_answer(
    there: IndexOptions, tmp_path: Path
) -> None:
    del there  # its client is needed
    for act in (
        lambda: build_index(labelled(9), unit_vectors(9), options=NOBODY),
        lambda: forget_elsewhere(tmp_path, NOBODY),
    ):
        with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1:\d+ does not do what it is"):
            act()


def test_a_server_and_its_site_know_each_other_by_certificates(
    there: IndexOptions, tmp_path: Path
) -> None:
    ours, foreign = Authority(tmp_path, "ours"), Authority(tmp_path, "foreign")
    (cert, key), (other_cert, other_key) = ours.issue("elm"), foreign.issue("elm-by-another")
    known = replace(there, ca_file=str(ours.file), cert_file=str(cert), key_file=str(key))
    server = ours.issue("milvus")
    with tls_before(there.uri, server, clients=ours.file) as uri:
        options = replace(known, uri=uri)
        path = save_index(index_of(60, options), tmp_path, MODEL, CONTENT, options)
        assert load_index(path, MODEL, CONTENT, options=options).count == 60
    for wrong in (
        replace(known, ca_file=str(foreign.file)),
        replace(known, cert_file=str(other_cert), key_file=str(other_key)),
        replace(known, cert_file="", key_file=""),
    ):
        # Each at a listener of its own: the client keeps a connection to an address.
        refused = pytest.raises(EngineUnavailable, match="certificates")
        with tls_before(there.uri, server, clients=ours.file) as uri, refused:
            index_of(60, replace(wrong, uri=uri))


def test_a_server_that_asks_for_no_certificate_shows_its_own(
    there: IndexOptions, tmp_path: Path
) -> None:
    ours, foreign = Authority(tmp_path, "ours"), Authority(tmp_path, "foreign")
    server = ours.issue("milvus")
    with tls_before(there.uri, server, clients=None) as uri:
        known = replace(there, uri=uri, ca_file=str(ours.file))
        assert index_of(60, known).base.engine == "milvus"
    for wrong in (str(foreign.file), ""):
        refused = pytest.raises(EngineUnavailable, match="certificates")
        with tls_before(there.uri, server, clients=None) as uri, refused:
            index_of(60, replace(there, uri=uri, ca_file=wrong))
