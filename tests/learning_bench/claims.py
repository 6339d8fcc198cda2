"""The papers' headline claims, held against finished cells: held or not, with the figures.

A claim about a difference is held when the whole 95 % interval of the difference lies
above zero, not held when it lies below, and else undecided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from crypto.arrays import Float64
from daemon.evaluation.intervals import Interval
from tests.learning_bench.cells import Cell
from tests.learning_bench.intervals import paired_bootstrap

Rows = Mapping[str, Sequence[Cell]]  # recipe -> its cells, one a seed


class Claim(NamedTuple):
    """A row of the table: who claims what, whether it held here, by which figures."""

    source: str
    claim: str
    verdict: str
    figures: str


def checked(rows: Rows) -> list[Claim]:
    """Those claims whose cells are finished."""
    claims: list[Claim] = []
    for made in (_recall_of_centralised, _above, _personal, _beside, _small_sites, _bytes):
        claims += made(rows)
    return claims


def _recall_of_centralised(rows: Rows) -> list[Claim]:
    if not {"pfedrag", "centralised"} <= set(rows):
        return []
    ours, theirs = (_scores(rows[name], "recall@5") for name in ("pfedrag", "centralised"))
    share = float(ours.mean() / theirs.mean())
    text = f"{ours.mean():.3f} / {theirs.mean():.3f} = {share:.1%}"
    return [
        Claim(
            "pFedRAG",
            "federated reaches 95 % of centralised Recall@5",
            "held" if share >= 0.95 else "not held",
            text,
        )
    ]


def _above(rows: Rows) -> list[Claim]:
    pairs = [
        ("FedE4RAG", "fede4rag (head)", "centralised"),
        ("FedE4RAG", "fede4rag (head)", "FedAvg"),
        # With a head this is FedAvg on in-batch negatives, which fede4rag has, too: what is
        # left of the difference is its distillation and its student's.
        ("FedE4RAG", "fede4rag (head)", "fedsearch (head)"),
        ("pFedRAG", "pfedrag", "FedAvg"),
        ("PDD-AS2", "pdd-as2 (head)", "FedAvg"),
    ]
    return [
        _difference(source, f"{ours} above {theirs}", rows, ours, theirs)
        for source, ours, theirs in pairs
        if ours in rows and theirs in rows
    ]


def _personal(rows: Rows) -> list[Claim]:
    ours, theirs = "pdd-as2 (head)", "pdd-as2 (head), no stage 2"
    if not {ours, theirs} <= set(rows):
        return []
    claim = "a query encoder of each site's own helps"
    return [_difference("PDD-AS2", claim, rows, ours, theirs, seeds=1)]


def _beside(rows: Rows) -> list[Claim]:
    """One seed of each: ablations have one."""
    compared = [
        (
            *("PDD-AS2", "fed-negatives above local negatives"),
            *("pdd-as2 (head)", "pdd-as2 (head), local negatives in stage 2"),
        ),
        (
            *("pFedRAG", "the depth scheduler helps"),
            "pfedrag, rounds of one epoch, scheduler at work",
            "pfedrag, rounds of one epoch",
        ),
        (*("pFedRAG", "the personal layer helps"), "pfedrag", "pfedrag, no personal layer"),
    ]
    claims = [
        _difference(source, claim, rows, ours, theirs, seeds=1)
        for source, claim, ours, theirs in compared
        if {ours, theirs} <= set(rows)
    ]
    ours, theirs = "hanse, shared version", "hanse, shared version, in the clear"
    if {ours, theirs} <= set(rows):
        interval = paired_bootstrap(_scores(rows[ours][:1]), _scores(rows[theirs][:1]))
        near = max(-interval.low, interval.high) < _EQUAL
        claim = f"as good encrypted as in the clear (within {_EQUAL})"
        verdict = "held" if near else "undecided"
        claims.append(Claim("FedE4RAG", claim, verdict, f"MRR@10 {_said(interval)}"))
    return claims


_EQUAL = 0.01  # of MRR@10: differences of seeds are as large


def _small_sites(rows: Rows) -> list[Claim]:
    """Rank correlation between a site's number of test questions and its gain."""
    ours, theirs = "pdd-as2 (head)", "each site alone"
    if not {ours, theirs} <= set(rows):
        return []
    sites = rows[ours][0].sites("test")
    gain = _scores(rows[ours]) - _scores(rows[theirs])
    names = sorted(set(sites.tolist()))
    sizes = np.array([(sites == name).sum() for name in names])
    gains = np.array([gain[sites == name].mean() for name in names])
    correlation = float(
        np.corrcoef(np.argsort(np.argsort(sizes)), np.argsort(np.argsort(gains)))[0, 1]
    )
    held = correlation < 0
    text = (
        f"rank correlation {correlation:+.2f} between size and gain over alone, {len(names)} sites"
    )
    return [Claim("PDD-AS2", "small sites gain most", "held" if held else "not held", text)]


def _bytes(rows: Rows) -> list[Claim]:
    """Values exchanged against all weights of the encoder."""
    claims: list[Claim] = []
    if "pfedrag" in rows:
        values = rows["pfedrag"][0].cost["trained_values"]
        share = values / _ENCODER_VALUES
        text = f"{values:,} of {_ENCODER_VALUES:,} values: {share:.1%} (of e5-base: 4.3 %)"
        verdict = "held" if share <= 0.043 else "not held"
        claims.append(Claim("pFedRAG", "a head is at most 4.3 % of the model", verdict, text))
    if "FedAvg (LoRA)" in rows:
        values = rows["FedAvg (LoRA)"][0].cost["trained_values"]
        times = _ENCODER_VALUES / values
        text = f"{values:,} of {_ENCODER_VALUES:,} values: {times:.0f} times"
        verdict = "held" if times >= 141 else "not held"
        claims.append(Claim("FedSearch-NLP", "LoRA is at least 141 times smaller", verdict, text))
    return claims


_ENCODER_VALUES = 22_565_376  # all-MiniLM-L6-v2 without its pooler


def _difference(
    source: str, claim: str, rows: Rows, ours: str, theirs: str, seeds: int | None = None
) -> Claim:
    both = (_scores(rows[name][:seeds]) for name in (ours, theirs))
    interval = paired_bootstrap(*both)
    return Claim(source, claim, _verdict(interval), f"MRR@10 {_said(interval)}")


def _verdict(interval: Interval) -> str:
    if interval.low > 0:
        return "held"
    return "not held" if interval.high < 0 else "undecided"


def _said(interval: Interval) -> str:
    return f"{interval.mean:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"


def _scores(cells: Sequence[Cell], metric: str = "mrr@10") -> Float64:
    scores: Float64 = np.stack([cell.scores("test", metric) for cell in cells]).mean(axis=0)
    return scores
