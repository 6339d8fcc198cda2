"""What poisoned updates do to retrieval on real questions, with and without a robust rule.

    python -m tests.benchmarks.attacks.poisoning [--rounds 4]        (make bench-poisoning)

Seven institutes of MedQuAD (HANSE_DATA, or `shared/data` beside the project): 120
training pairs, 80 test questions and some 800 passages of each, cut at 64 tokens; two of
the seven (f = 2, the most that multi_krum allows among seven) attack in every round.
Sites train the head with the real training loop; rules are the real ones, on the Gram
matrix of the updates in the clear (the encrypted one is measured in bench_robust). A
site's weight is one. The figure is MRR@10 over all sites' test questions, each against
its own site's passages. Rows go to docs/results/poisoning.jsonl, the table to
docs/results/poisoning.md.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crypto.arrays import Float32
from daemon.learning.batches import training_seed
from daemon.learning.options import TrainingOptions
from daemon.learning.retriever.encoder import Encoder, Texts
from daemon.learning.retriever.heads import HeadRetriever
from daemon.learning.retriever.mining import mine_negatives
from daemon.learning.retriever.training import TrainingSet, fit
from peers.plans.robust import select
from tests.daemon.evaluation.rankings import evaluate_rankings

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("HANSE_DATA", ROOT.parent / "shared" / "data")) / "medquad"
RESULTS = ROOT / "docs" / "results" / "poisoning.jsonl"
TABLE = RESULTS.with_suffix(".md")
SITES = ("cancergov", "gard", "ghr", "mplus_topics", "nhlbi", "niddk", "ninds")
ATTACKERS = ("gard", "niddk")
RULES = ("none", "norm", "krum", "multi_krum")
PARTS = 2  # passages of an answer
OPTIONS = TrainingOptions(local_epochs=4, batch_size=16, learning_rate=1e-4, hard_negatives=4)

Updates = dict[str, Float32]


@dataclass(frozen=True)
class Size:
    """Of each site: training pairs, test questions, and passages that answer none of them."""

    train: int = 120
    test: int = 80
    others: int = 600


@dataclass
class Site:
    """One institute: passages, questions, and what it trains on, features encoded once."""

    ids: list[str]
    passages: Texts
    learned_ids: list[str]  # of the training split: nothing is learned from other passages
    learned: Texts
    train: Texts
    train_positives: list[NDArray[np.int64]]
    test: Texts
    test_positives: list[set[str]]


# ---- attacks: what an attacker sends, from all updates that sites would have sent ----------

Attack = Callable[[Updates, str, np.random.Generator], Float32]


def _sign_flip(updates: Updates, site: str, _chance: np.random.Generator) -> Float32:
    return -updates[site]


def _scaled(updates: Updates, site: str, _chance: np.random.Generator) -> Float32:
    return 30 * updates[site]


def _backwards(updates: Updates, site: str, _chance: np.random.Generator) -> Float32:
    return -30 * updates[site]


def _gaussian(updates: Updates, site: str, chance: np.random.Generator) -> Float32:
    own = updates[site]
    noise = chance.standard_normal(own.size)
    sent: Float32 = (noise * 100 * np.linalg.norm(own) / np.linalg.norm(noise)).astype(np.float32)
    return sent


def _collusion(updates: Updates, _site: str, _chance: np.random.Generator) -> Float32:
    """Both send the same: backwards along the honest mean, as large as the norm filter lets."""
    honest = [updates[site] for site in SITES if site not in ATTACKERS]
    mean: Float32 = np.mean(honest, axis=0)
    size = 1.4 * float(np.median([np.linalg.norm(one) for one in honest]))
    return (-mean * size / np.linalg.norm(mean)).astype(np.float32)


ATTACKS: dict[str, Attack | None] = {
    "nobody attacks": None,
    "sign flip": _sign_flip,
    "times 30": _scaled,
    "times -30": _backwards,
    "Gaussian, 100 x the norm": _gaussian,
    "label flip": None,  # trained on shuffled answers: see `_updates`
    "collusion inside the norm": _collusion,
}


# ---- the federation -----------------------------------------------------------------------


def run(
    rounds: int, attacks: Sequence[str], rules: Sequence[str], size: Size
) -> list[dict[str, Any]]:
    """One row for each attack and rule: MRR@10 after ``rounds``, and who was rejected."""
    retriever = HeadRetriever(Encoder.load("sentence-transformers/all-MiniLM-L6-v2",
                                           max_tokens=64, device="cpu", threads=1))  # fmt: skip
    sites = {name: _site(name, retriever.encoder, size) for name in SITES}
    start = retriever.initial_vector()
    before = _mrr(retriever, start, sites)
    print(f"before training: MRR@10 {before:.3f}", flush=True)
    first = {flip: _updates(retriever, sites, start, 1, flip=flip) for flip in (False, True)}
    rows = []
    for attack in attacks:
        for rule in rules:
            model, rejected = start, []
            for number in range(1, rounds + 1):
                flip = attack == "label flip"
                updates = first[flip] if number == 1 else None
                updates = updates or _updates(retriever, sites, model, number, flip=flip)
                kept, names = _aggregate(attack, rule, updates, number)
                model = model + kept
                rejected.append(names)
            rows.append(
                {
                    "attack": attack,
                    "rule": rule,
                    "rounds": rounds,
                    "before": before,
                    "mrr_at_10": _mrr(retriever, model, sites),
                    "rejected": rejected,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """MRR@10 of each attack (down) under each rule (across), as Markdown."""
    found = {(row["attack"], row["rule"]): row for row in rows}
    attacks, rules = (list(dict.fromkeys(row[key] for row in rows)) for key in ("attack", "rule"))
    first = rows[0]
    lines = [
        f"MRR@10 after {first['rounds']} rounds; before training it is {first['before']:.3f}. In "
        f"brackets: how often an attacker / an honest site was rejected, of "
        f"{len(ATTACKERS) * first['rounds']} / {(len(SITES) - len(ATTACKERS)) * first['rounds']}.",
        "",
        f"| {len(ATTACKERS)} of {len(SITES)} sites | " + " | ".join(rules) + " |",
        "|---" * (len(rules) + 1) + "|",
    ]
    for attack in attacks:
        cells = [_cell(found[attack, rule]) for rule in rules]
        lines.append(f"| {attack} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, Any]) -> str:
    names = [name for of_round in row["rejected"] for name in of_round]
    attackers = sum(name in ATTACKERS for name in names) if row["attack"] != "nobody attacks" else 0
    told = f" ({attackers} / {len(names) - attackers})" if row["rule"] != "none" else ""
    return f"{row['mrr_at_10']:.3f}{told}"


def _aggregate(attack: str, rule: str, updates: Updates, number: int) -> tuple[Float32, list[str]]:
    sent = dict(updates)
    poison = ATTACKS[attack]
    if poison is not None:
        chance = np.random.default_rng(number)
        sent |= {site: poison(updates, site, chance) for site in ATTACKERS}
    stacked = np.stack([sent[site] for site in SITES]).astype(np.float64)
    chosen = select(rule, 2, SITES, (stacked @ stacked.T).tolist(), least=3)
    places = [SITES.index(site) for site in chosen.kept]
    return stacked[places].mean(axis=0).astype(np.float32), sorted(chosen.rejected)


def _updates(
    retriever: HeadRetriever, sites: dict[str, Site], model: Float32, number: int, *, flip: bool
) -> Updates:
    """Every site trains from ``model``; with ``flip`` attackers learn shuffled answers."""
    updates = {}
    for name, site in sites.items():
        retriever.load_vector(model)
        positives = site.train_positives
        if flip and name in ATTACKERS:
            order = np.random.default_rng(number).permutation(len(positives))
            positives = [positives[place] for place in order]
        negatives = mine_negatives(
            retriever.embed_queries(site.train.texts, site.train.features),
            retriever.embed_passages(site.learned.texts, site.learned.features),
            site.learned_ids,
            positives,
            OPTIONS.hard_negatives,
        )
        pairs = TrainingSet(site.train, site.learned, positives, negatives)
        fit(retriever, pairs, OPTIONS, training_seed(1, number, name))
        updates[name] = retriever.vector() - model
    return updates


def _mrr(retriever: HeadRetriever, model: Float32, sites: dict[str, Site]) -> float:
    retriever.load_vector(model)
    rankings: list[list[str]] = []
    positives: list[set[str]] = []
    for site in sites.values():
        asked = retriever.embed_queries(site.test.texts, site.test.features)
        told = retriever.embed_passages(site.passages.texts, site.passages.features)
        for scores in asked @ told.T:
            rankings.append([site.ids[place] for place in np.argsort(-scores)[:60]])
        positives += site.test_positives
    return evaluate_rankings(rankings, positives).mrr_at_10


# ---- data ---------------------------------------------------------------------------------


def _site(name: str, encoder: Encoder, size: Size) -> Site:
    chance = np.random.default_rng(7)
    documents = {one["id"]: one for one in _lines(DATA / name / "documents.jsonl")}
    train = _drawn(_lines(DATA / name / "pairs_train.jsonl"), size.train, chance)
    test = _drawn(_lines(DATA / name / "pairs_test.jsonl"), size.test, chance)
    for pair in train + test:
        pair["positives"] = pair["positives"][:PARTS]
    wanted = {doc for pair in train + test for doc in pair["positives"]}
    others = sorted(documents.keys() - wanted)
    ids = sorted(wanted | set(_drawn(others, size.others, chance)))
    texts = [f"{documents[one]['title']}\n{documents[one]['text']}" for one in ids]
    learned = [number for number, one in enumerate(ids) if documents[one]["split"] == "train"]
    place = {ids[number]: row for row, number in enumerate(learned)}

    def encoded(some: list[str]) -> Texts:
        return Texts(some, encoder.encode(some))

    print(f"encoding {name}: {len(ids)} passages", flush=True)
    features = encoder.encode(texts)
    return Site(
        ids,
        Texts(texts, features),
        [ids[number] for number in learned],
        Texts([texts[number] for number in learned], features[learned]),
        encoded([pair["query"] for pair in train]),
        [np.unique([place[one] for one in pair["positives"]]) for pair in train],
        encoded([pair["query"] for pair in test]),
        [set(pair["positives"]) for pair in test],
    )


def _drawn(some: list[Any], count: int, chance: np.random.Generator) -> list[Any]:
    return [some[place] for place in sorted(chance.permutation(len(some))[:count])]


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        with gzip.open(path.with_name(path.name + ".gz"), "rt", encoding="utf-8") as packed:
            return [json.loads(line) for line in packed]
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    """Print the rows and write them down."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=4)
    rounds = parser.parse_args().rounds
    if not DATA.is_dir():
        sys.exit(f"skipped: no data at {DATA} (set HANSE_DATA)")
    began = time.monotonic()
    rows = run(rounds, list(ATTACKS), RULES, Size())
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    TABLE.write_text(table(rows), encoding="utf-8")
    print(f"{table(rows)}\n{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
