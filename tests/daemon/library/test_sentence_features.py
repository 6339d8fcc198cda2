"""Sentences' features on the disk: what comes back, what goes, and a file that stays sound."""

from __future__ import annotations

import multiprocessing
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from daemon.library.contents import content_of
from daemon.library.sentence_features import SentenceFeatures, SentenceFeaturesError

ENCODER, OTHER = b"e" * 32, b"o" * 32
TEXTS = ["Hemp rope is tarred.", "It lasts four winters.", "Flax rots."]


def content(number: int) -> bytes:
    return content_of(f"passage {number}")


def drawn(number: int, count: int = 3, dimension: int = 64) -> NDArray[np.float32]:
    vectors = np.random.default_rng(number).normal(size=(count, dimension)).astype(np.float32)
    unit: NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "sentences.sqlite3"


@pytest.fixture
def kept(path: Path) -> Iterator[SentenceFeatures]:
    with closing(SentenceFeatures.open(path)) as opened:
        yield opened


def test_what_is_kept_comes_back_to_three_digits(kept: SentenceFeatures, path: Path) -> None:
    kept.put(ENCODER, content(1), TEXTS, drawn(1), whole=True)
    with closing(SentenceFeatures.open(path)) as again:
        for some in (kept, again):
            got = some.get(ENCODER, content(1), TEXTS)
            assert got.dtype == np.float32
            assert np.abs(got - drawn(1)).max() < 1e-3
            assert np.array_equal(some.get(ENCODER, content(1), TEXTS[:2]), got[:2])


def test_only_what_was_read_just_so_is_given(kept: SentenceFeatures) -> None:
    kept.put(ENCODER, content(1), TEXTS, drawn(1), whole=True)
    assert len(kept.get(ENCODER, content(1), [TEXTS[0], "It lasts six winters.", TEXTS[2]])) == 1
    assert len(kept.get(ENCODER, content(1), ["Rope\nHemp rope is tarred.", *TEXTS[1:]])) == 0
    assert len(kept.get(ENCODER, content(1), [*TEXTS, "One more."])) == 3
    assert len(kept.get(ENCODER, content(2), TEXTS)) == 0
    assert len(kept.get(OTHER, content(1), TEXTS)) == 0
    assert len(kept.get(ENCODER, content(1), [])) == 0


def test_passages_come_whole_or_not_at_all(kept: SentenceFeatures) -> None:
    kept.put(ENCODER, content(1), TEXTS, drawn(1), whole=True)
    kept.put(ENCODER, content(2), TEXTS[:2], drawn(2, 2), whole=False)
    kept.put(OTHER, content(3), TEXTS, drawn(3), whole=True)
    asked = [content(number) for number in range(1200)]
    found = kept.of_whole(ENCODER, asked)
    assert set(found) == kept.whole(ENCODER) == {content(1)}
    assert np.abs(found[content(1)] - drawn(1)).max() < 1e-3
    kept.put(ENCODER, content(2), TEXTS, drawn(2), whole=True)
    assert set(kept.of_whole(ENCODER, asked)) == {content(1), content(2)}
    assert kept.of_whole(ENCODER, []) == {}


def test_the_first_written_make_room_and_the_bound_holds(path: Path) -> None:
    bound = 400_000
    with closing(SentenceFeatures.open(path, most_bytes=bound)) as kept:
        assert not kept.full
        for number in range(300):
            kept.put(ENCODER, content(number), TEXTS * 4, drawn(number, 12), whole=True)
        assert bound // 2 < kept.bytes_used() <= bound + 3 * 4096
        there = kept.whole(ENCODER)
        assert {content(number) for number in range(260, 300)} <= there
        assert content(0) not in there
        assert np.allclose(kept.get(ENCODER, content(299), TEXTS), drawn(299, 12)[:3], atol=1e-3)
    assert path.stat().st_size <= bound + 3 * 4096


def test_of_passages_that_are_gone_nothing_is_in_any_file(
    kept: SentenceFeatures, path: Path
) -> None:
    raw = [drawn(number).astype("<f2").tobytes() for number in range(3)]

    def found() -> list[bool]:
        files = [file.read_bytes() for file in path.parent.iterdir()]
        return [any(vectors in file for file in files) for vectors in raw]

    for number in range(3):
        kept.put(ENCODER, content(number), TEXTS, drawn(number), whole=True)
    assert found() == [True] * 3
    kept.retain({content(1)})
    assert found() == [False, True, False]
    assert kept.whole(ENCODER) == {content(1)}


def test_the_log_is_not_emptied_under_a_reader(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daemon.library.sentence_features._BUSY_MS", 50)
    with closing(SentenceFeatures.open(path)) as kept, closing(sqlite3.connect(path)) as reader:
        kept.put(ENCODER, content(1), TEXTS, drawn(1), whole=True)
        rows = reader.execute("SELECT id FROM passage_sentences UNION SELECT 7")
        rows.fetchone()  # of what was there then
        with pytest.raises(SentenceFeaturesError, match="when fedd is started again"):
            kept.retain(set())
        rows.close()
        kept.retain(set())


def test_a_damaged_file_is_begun_anew(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"not a database, but long enough to be taken for one. " * 40)
    with closing(SentenceFeatures.open(path)) as kept:
        kept.put(ENCODER, content(1), TEXTS, drawn(1), whole=True)
        assert len(kept.get(ENCODER, content(1), TEXTS)) == 3


def test_a_file_that_cannot_be_had_is_explained(path: Path) -> None:
    path.mkdir(parents=True)
    with pytest.raises(SentenceFeaturesError, match="may write there"):
        SentenceFeatures.open(path)


def _fill(path: Path, told: Connection) -> None:
    kept = SentenceFeatures.open(path, most_bytes=200_000)
    for number in range(100_000):
        kept.put(ENCODER, content(number), TEXTS * 4, drawn(number, 12), whole=True)
        if number == 150:  # the oldest make room by now
            told.send(number)


@pytest.mark.slow
def test_killed_while_it_is_filled_the_file_is_sound(path: Path) -> None:
    told, tell = multiprocessing.Pipe(duplex=False)
    filler = multiprocessing.get_context("spawn").Process(target=_fill, args=(path, tell))
    filler.start()
    told.recv()
    filler.kill()
    filler.join(timeout=30)
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    with closing(SentenceFeatures.open(path)) as kept:
        kept_of = kept.whole(ENCODER)
        there = [n for n in range(100_000) if content(n) in kept_of]
        assert len(there) > 20  # 27 are left where some have just made room
        for number in there:
            got = kept.get(ENCODER, content(number), TEXTS * 4)
            assert np.abs(got - drawn(number, 12)).max() < 1e-3
