"""docs/results/retrieval.md, made of what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from daemon.evaluation.intervals import Interval, differences_of
from tests.benchmarks.retrieval.gold_sentences import judged, scored

_LEVELS = ("passage", "sentence", "both")
_INTRODUCTION = """\
# What passages are found by

`python -m tests.benchmarks.retrieval --data DATA` (an hour of two cores; what is embedded is
kept) asks seven institutions of MedQuAD, each in its own documents, and FinanceBench's whole
development corpus. The encoder is the default one as it comes (in bfloat16), passages have up to
220 tokens.
*Level* is `[retrieval] level`: what of a passage is compared with the question. *Read* is what
the encoder reads of it: with headings (the document's title, and headings where there are any)
or its text alone. What titles and words count is chosen as a site chooses it, on its validation
questions (MedQuAD) or those of every other company (FinanceBench); the figures are of the
others, with intervals of 95 % over questions. *By meaning*: without words and titles.
"""
_GOLD = """\
## Sentences that answer

{questions} test questions of the seven institutions, of which a reader marked the sentences that
one would quote (`tests/benchmarks/retrieval/gold_sentences.jsonl`, marked before any way of
ranking sentences was measured). PDD-AS2's two levels (its Table 1), encoder as it comes, titles
and words apart: a sentence is right if it is marked, a passage if it holds a marked sentence.
*Sentences of 200 passages* is what a site does, *all sentences* what that is measured by.
{without} marked questions have no sentence that is cut as it was marked, and are left out.
"""
_TRAINED = """\
## Sentences that answer, trained

{asked}, asked of what PDD-AS2 makes of the encoder (`pdd-as2` with a head; by
`--trained`, minutes where all is embedded).
*Stage 1*: one version by all seven institutions, in three rounds of four epochs on their training
pairs. *Both stages*: and four epochs of each institution's own encoder of questions against the
others' passages, kept where it does better on validation pairs. Pairs are of questions and
passages, read with headings: none names a sentence, while the paper trains on sentences. Nothing
is chosen by these questions, and their topics are in no training pair. The head learns from, and
is put over, what the encoder says in bfloat16, kept as float16, as for the rows above. One seed.
"""


def page(lines: Sequence[Mapping[str, Any]]) -> str:
    """The whole page."""
    parts = [_INTRODUCTION]
    if lines:
        parts += ["\n".join(_summary(lines)), "\n".join(_every(lines))]
    if any(line["kinds"] for line in lines):
        parts.append("\n".join(_kinds(lines)))
    marked = [line for line in lines if line["gold"]]
    if marked:
        parts.append("\n".join(_gold(marked)))
    if any(line.get("trained") for line in marked):
        parts.append("\n".join(_trained(marked)))
    return "\n".join(part if part.endswith("\n") else f"{part}\n" for part in parts)


def _summary(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """MRR@10 of what people get, a corpus a line."""
    ways = [(row["read"], row["level"]) for row in lines[0]["rows"]]
    yield "## MRR@10 of what people get"
    yield ""
    yield "| corpus | passages | questions | " + " | ".join(map(", ".join, ways)) + " |"
    yield "|---" * (len(ways) + 3) + "|"
    for line in lines:
        cells = " | ".join(_interval(row["mrr@10"]) for row in line["rows"])
        yield f"| {line['corpus']} | {line['passages']:,} | {line['questions'][1]} | {cells} |"
    sites = [line for line in lines if not line["kinds"]]
    weights = [line["questions"][1] for line in sites]
    if sites:
        means = " | ".join(
            f"{_mean([line['rows'][at]['mrr@10'][0] for line in sites], weights):.3f}"
            for at in range(len(ways))
        )
        total = sum(line["passages"] for line in sites)
        yield f"| MedQuAD, all questions alike | {total:,} | {sum(weights)} | {means} |"


def _every(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "## Titles and words apart"
    yield ""
    heads = ("corpus", "read", "level", "by meaning", "and words", "and titles")
    yield f"| {' | '.join(heads)} | Hit@1 | Hit@10 | title, words |"
    yield "|---" * 9 + "|"
    for line in lines:
        for row in line["rows"]:
            yield (
                f"| {line['corpus'].split(',')[0]} | {row['read']} | {row['level']} "
                f"| {row['meaning']:.3f} | {row['untitled']:.3f} | {row['mrr@10'][0]:.3f} "
                f"| {row['hit@1'][0]:.3f} | {row['hit@10'][0]:.3f} "
                f"| {row['title']:g}, {row['words']:g} |"
            )


def _kinds(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "## By kinds of questions"
    yield ""
    yield "MRR@10 of what people get, read with headings."
    yield ""
    yield "| corpus | kind | questions | " + " | ".join(_LEVELS) + " |"
    yield "|---" * (3 + len(_LEVELS)) + "|"
    for line in lines:
        for kind, row in line["kinds"].items():
            cells = " | ".join(f"{row[level]:.3f}" for level in _LEVELS)
            yield f"| {line['corpus'].split(',')[0]} | {kind} | {row['questions']} | {cells} |"


def _gold(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    first = lines[0]["gold"]
    reads = list(first)
    questions = sum(line["gold"][reads[0]]["questions"] for line in lines)
    without = sum(line["gold"][reads[0]]["without"] for line in lines)
    yield _GOLD.format(questions=questions, without=without)
    metrics = list(scored([0]))
    yield "| right is | by | read | " + " | ".join(metrics) + " |"
    yield "|---" * (3 + len(metrics)) + "|"
    for level in ("sentence", "passage"):
        for way in first[reads[0]][level]:
            for read in reads[:1] if way == "BM25" else reads:
                ranks = [rank for line in lines for rank in line["gold"][read][level][way]]
                cells = " | ".join(_cell(one) for one in scored(ranks).values())
                yield f"| a {level} | {way} | {read if way != 'BM25' else ''} | {cells} |"


def _trained(marked: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Each way as the encoder comes, after stage 1 and after both, below one another."""
    lines = [line for line in marked if line.get("trained")]
    of_first = lines[0]["gold"]
    by_read = next(iter(of_first.values()))
    names = ", ".join(line["name"] for line in lines)
    some = f"Of these questions those of {names}"
    yield _TRAINED.format(asked=some if len(lines) < len(marked) else "All of these questions")
    metrics = list(scored([0]))
    heads = ("right is", "by", "read", "encoder", *metrics, f"{metrics[0]} above the row before")
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    ways = [(level, way) for level in ("sentence", "passage") for way in by_read[level]]
    for level, way in (one for one in ways if one[1] != "BM25"):
        for read in of_first:
            before = None
            for stage in ("as it comes", *lines[0]["trained"]):
                made = [line["trained"].get(stage, line["gold"]) for line in lines]
                ranks = [rank for of_site in made for rank in of_site[read][level][way]]
                cells = " | ".join(_cell(one) for one in scored(ranks).values())
                above = _above(ranks, before) if before else ""
                yield f"| a {level} | {way} | {read} | {stage} | {cells} | {above} |"
                before = ranks


def _above(ranks: Sequence[int], before: Sequence[int]) -> str:
    """The difference of MRR@10 on the same questions."""
    one = differences_of(judged(ranks), judged(before))["mrr@10"]
    return f"{one.mean:+.3f} ({one.low:+.3f} to {one.high:+.3f})"


def _cell(one: Interval) -> str:
    return _interval((one.mean, one.low, one.high))


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / max(1, sum(weights))


def _interval(triple: Sequence[float]) -> str:
    mean, low, high = triple
    return f"{mean:.3f} ({low:.3f} to {high:.3f})"
