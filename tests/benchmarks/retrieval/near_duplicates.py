"""Near-duplicates of real passages: what is found, how right that is, and what it costs.

Held against the exact Jaccard coefficient of every pair (a prefix filter finds all of them,
Bayardo et al. 2007), and against people's questions: how often a passage that answers one is
shown no longer, since one that is no answer stands for it.

    python -m tests.benchmarks.retrieval.near_duplicates ../shared/data
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np

from daemon.library.catalogue import minhash
from daemon.library.catalogue.near_duplicates import ALIKE
from daemon.library.passages import SentenceSplitter
from daemon.library.store import Library
from tests.benchmarks.retrieval.corpora import SITES, Corpus, filings, institution

WORDS, FEW_WORDS = 120, 62  # of a passage; with few there are more than 100,000
LOOKED_AT, SHOWN = 50, 5
LEVELS = (0.8, 0.9, 0.95, 1.0)

Pairs = dict[tuple[int, int], float]


def exact_pairs(shingles: dict[int, minhash.Shingles], least: float) -> Pairs:
    """All pairs that are as alike as ``least``, the lower rowid first, each with its likeness."""
    often = Counter(one for some in shingles.values() for one in some.tolist())
    rarest: dict[int, list[int]] = defaultdict(list)
    found: Pairs = {}
    for row, some in shingles.items():
        in_order = sorted(some.tolist(), key=lambda one: (often[one], one))
        prefix = in_order[: len(in_order) - int(np.ceil(least * len(in_order))) + 1]
        met = {other for one in prefix for other in rarest[one]}
        for one in prefix:
            rarest[one].append(row)
        for other in met:
            sizes = sorted((len(some), len(shingles[other])))
            if sizes[0] >= least * sizes[1]:
                alike = minhash.likeness(some, shingles[other])
                if alike >= least:
                    found[other, row] = alike
    return found


def numbers_of(text: str) -> list[str]:
    """The words of a text that have a digit, sorted."""
    return sorted(x for x in minhash.words_of(text) if any(c.isdigit() for c in x))


def leaders(texts: dict[int, str], pairs: Pairs, least: float, numbers: bool) -> dict[int, int]:
    """Whose group each passage is of, as `NearDuplicates` forms them, from exact likenesses."""
    before: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for (one, row), alike in pairs.items():
        same = not numbers or numbers_of(texts[one]) == numbers_of(texts[row])
        if alike >= least and same:
            before[row].append((-alike, one))
    led: dict[int, int] = {}
    for row in texts:
        led[row] = next((one for _, one in sorted(before[row]) if led[one] == one), row)
    return led


def measure(
    corpora: Sequence[Corpus], folder: Path, words: int, *, cost_only: bool
) -> Iterator[str]:
    """Lines about these, as one library of passages of so many words."""
    path = folder / "library.sqlite3"
    splitter = SentenceSplitter(lambda text: len(text.split()), words)
    with Library.open(path) as library:
        for corpus in corpora:
            library.put_documents(corpus.documents, splitter=splitter)
        library.erasure.clear()
        size, started = path.stat().st_size, time.process_time()
        count = library.near.mark(1e9)
        took = time.process_time() - started
        library.erasure.clear()
        yield (
            f"{count} passages: {took / count * 1e6:.0f} us each, "
            f"{(path.stat().st_size - size) / count:.0f} bytes each"
        )
        yield _cost(library, corpora)
        if cost_only:
            return
        texts = {one.rowid: one.text for one in library.passages()}
        shingles = {row: minhash.shingles_of(minhash.words_of(x)) for row, x in texts.items()}
        pairs = exact_pairs({row: x for row, x in shingles.items() if len(x)}, LEVELS[0])
        yield from _held_against(library, texts, shingles, pairs)
        yield _by_simhash({row: x for row, x in shingles.items() if len(x)}, pairs)
        yield from _asked(library, corpora, texts, pairs)


def _held_against(
    library: Library, texts: dict[int, str], shingles: dict[int, minhash.Shingles], pairs: Pairs
) -> Iterator[str]:
    keys = {row: set(minhash.keys_of(x)) for row, x in shingles.items()}  # numbers or not
    met = sum(not keys[one].isdisjoint(keys[other]) for one, other in pairs)
    yield f"pairs of likeness >= {LEVELS[0]}: {len(pairs)}; with a key in common: {met}"
    wanted = [
        (one, other)
        for (one, other), alike in pairs.items()
        if alike >= ALIKE and numbers_of(texts[one]) == numbers_of(texts[other])
    ]
    led = library.near.leaders(list(texts))
    groups: dict[int, list[int]] = defaultdict(list)
    for row, leader in led.items():
        groups[leader].append(row)
    told = [pair for some in groups.values() for pair in combinations(sorted(some), 2)]
    right = sum(led[one] == led[other] for one, other in wanted)
    alike = [minhash.likeness(shingles[one], shingles[other]) for one, other in told]
    several = [len(some) for some in groups.values() if len(some) > 1]
    yield (
        f"of those >= {ALIKE} with the same numbers: {len(wanted)}, of one group: {right} "
        f"(recall {right / max(1, len(wanted)):.4f})"
    )
    share = sum(x >= ALIKE for x in alike) / max(1, len(alike))
    yield f"pairs of one group: {len(told)}, of these >= {ALIKE}: {share:.4f}"
    yield f"the least alike of them: {min(alike, default=1):.2f}"
    most = max(several, default=1)
    yield f"groups: {len(several)} of {sum(several)} passages, the largest of {most}"
    for level in LEVELS:
        some = [pair for pair, x in pairs.items() if x >= level]
        same = sum(numbers_of(texts[a]) == numbers_of(texts[b]) for a, b in some)
        equal = sum(minhash.words_of(texts[a]) == minhash.words_of(texts[b]) for a, b in some)
        yield f"  >= {level}: {len(some)} pairs, {same} with the same numbers, {equal} word by word"


def _by_simhash(shingles: dict[int, minhash.Shingles], pairs: Pairs) -> str:
    """The alternative: 64 signs of sums (Charikar 2002), three of which may differ (Manku 2007)."""
    bits = np.arange(64, dtype=np.uint64)
    made: dict[int, int] = {}
    blocks: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row, some in shingles.items():
        ones = ((some[:, np.newaxis] >> bits) & np.uint64(1)).sum(axis=0) * 2 > len(some)
        made[row] = int((ones.astype(np.uint64) << bits).sum())
        for block in range(4):
            blocks[block, made[row] >> (16 * block) & 0xFFFF].append(row)
    near = {
        pair
        for some in blocks.values()
        for pair in combinations(some, 2)
        if (made[pair[0]] ^ made[pair[1]]).bit_count() <= 3
    }
    wanted = {pair for pair, alike in pairs.items() if alike >= ALIKE}
    least = sum(pair not in pairs for pair in near)
    return (
        f"SimHash: {len(near & wanted)} of {len(wanted)} pairs >= {ALIKE}; of its {len(near)} "
        f"pairs {least} are below {LEVELS[0]}"
    )


def _asked(
    library: Library, corpora: Sequence[Corpus], texts: dict[int, str], pairs: Pairs
) -> Iterator[str]:
    owner = library.document_of()
    asked = [pair for corpus in corpora for pair in [*corpus.chosen_on, *corpus.judged_on]]
    found = [[row for row, _ in library.bm25(pair.query, LOOKED_AT)] for pair in asked]
    raw = sum(
        not {owner[row] for row in rows[:SHOWN]}.isdisjoint(pair.positives)
        for pair, rows in zip(asked, found, strict=True)
    )
    yield f"questions: {len(asked)}; one of {SHOWN} passages is right (by words): {raw}"
    for level in LEVELS:
        for numbers in (False, True):
            led = leaders(texts, pairs, level, numbers)
            shown = lost = won = doubles = 0
            for pair, rows in zip(asked, found, strict=True):
                groups: dict[int, list[int]] = defaultdict(list)
                for row in rows:
                    groups[led[row]].append(row)
                best = [some[0] for some in groups.values()][:SHOWN]
                before = not {owner[row] for row in rows[:SHOWN]}.isdisjoint(pair.positives)
                now = not {owner[row] for row in best}.isdisjoint(pair.positives)
                shown, lost, won = shown + now, lost + (before > now), won + (now > before)
                doubles += SHOWN - len({led[row] for row in rows[:SHOWN]})
            yield (
                f"  >= {level}{', same numbers' if numbers else ''}: {doubles} of "
                f"{SHOWN * len(asked)} were doubles; right is shown for {shown}: "
                f"{won} more, {lost} no longer"
            )


def _cost(library: Library, corpora: Sequence[Corpus]) -> str:
    asked = [pair for corpus in corpora for pair in corpus.judged_on][:300]
    took = []
    for pair in asked:
        rows = [row for row, _ in library.bm25(pair.query, LOOKED_AT)]
        started = time.perf_counter()
        led = library.near.leaders(rows)
        groups: dict[int, list[int]] = defaultdict(list)
        for row in rows:
            groups[led[row]].append(row)
        library.near.copies({one: others for one, *others in list(groups.values())[:SHOWN]})
        took.append(time.perf_counter() - started)
    return f"a question: {np.median(took) * 1e3:.3f} ms, p99 {np.quantile(took, 0.99) * 1e3:.3f} ms"


def main() -> None:
    """Measure the filings, then the institutions; then what a question costs in all of them."""
    data = Path(sys.argv[1])
    one, others = [filings(data)], [institution(data, site) for site in SITES]
    for corpora, words in ((one, WORDS), (others, WORDS), ([*one, *others], FEW_WORDS)):
        with tempfile.TemporaryDirectory() as folder:
            for line in measure(corpora, Path(folder), words, cost_only=words == FEW_WORDS):
                print(line, flush=True)


if __name__ == "__main__":
    main()
