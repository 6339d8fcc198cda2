"""What embeddings of real institutions expose: `python -m tests.benchmarks.attacks.inversion`.

Reads HANSE_DATA/medquad, embeds each site's passages with the default encoder (kept in
--cache), runs the daemon's own audit and appends a line a site to
docs/results/inversion.jsonl, from which it writes docs/results/inversion.md.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from daemon.inversion import negative_utility
from daemon.inversion.exposure import AuditOptions
from daemon.jobs import learning
from daemon.jobs.inversion import audit_embeddings, embedded_texts
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.readers.documents import Document, Pair
from tests.daemon.library.unboxed import read

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
_EPSILONS = (5000.0, 1000.0, 200.0, 50.0)
_BITS = (256, 64, 16, 8)
_KINDS = ("passages", "questions")


def main() -> None:
    """Audit some sites and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("HANSE_DATA"))
    parser.add_argument("--sites", nargs="*", default=["mplus_topics", "nhlbi", "gard"])
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/hanse-inversion").expanduser())
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--negatives",
        action="store_true",
        help="attack nothing: put what the negatives keep into the last figures of each site",
    )
    chosen = parser.parse_args()
    if chosen.sites and chosen.data is None:
        parser.error("name the data: --data or HANSE_DATA")
    lines = (RESULTS / "inversion.jsonl").read_text().splitlines()
    newest = {line["site"]: line for line in map(json.loads, lines)}
    for site in chosen.sites:
        source, cache = chosen.data / "medquad" / site, chosen.cache / site
        if chosen.negatives:
            line = with_negatives(newest[site], source, cache, chosen)
        else:
            line = {"site": site, "minutes": chosen.minutes, **audit(source, cache, chosen)}
        newest[site] = line
        with (RESULTS / "inversion.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    (RESULTS / "inversion.md").write_text(page(list(newest.values())), encoding="utf-8")


def audit(source: Path, cache: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """One site's audit under the version that every site starts from."""
    spec, library, versions, digest = prepared(source, cache, chosen)
    options = AuditOptions(noises=(), epsilons=_EPSILONS, bits=_BITS, minutes=chosen.minutes)
    return asdict(audit_embeddings(spec, library, versions, digest, options))


def with_negatives(
    line: dict[str, Any], source: Path, cache: Path, chosen: argparse.Namespace
) -> dict[str, Any]:
    """A site's figures with the columns of what its negatives keep measured again."""
    spec, library, versions, digest = prepared(source, cache, chosen)
    texts, vectors, queries, _ = embedded_texts(spec, library, versions, digest)
    asked = negative_utility.AuditQuestions.of(queries, vectors, texts.right, seed=0)
    options = AuditOptions(noises=(), epsilons=_EPSILONS, bits=_BITS)
    kept = {
        (level.epsilon, level.bits): negative_utility.utility_of(
            asked, level, digest, options.table_noise
        )
        for level in options.levels
    }
    measured = ("overlap", "cosine", "returned")
    levels = [
        {**old, **dict(zip(measured, kept[old["epsilon"], old["bits"]], strict=True))}
        for old in line["levels"]
    ]
    return {**line, "levels": levels, "advice": ""}


def prepared(
    source: Path, cache: Path, chosen: argparse.Namespace
) -> tuple[RetrieverSpec, Path, Path, bytes]:
    """A library of a site's documents, embedded, and the version that every site starts from."""
    cache.mkdir(parents=True, exist_ok=True)
    spec = RetrieverSpec(threads=chosen.threads, device="cpu")
    library, versions = cache / "library.sqlite3", cache / "versions"
    items = list(read(source))
    documents = [item for item in items if isinstance(item, Document)]
    pairs = [item for item in items if isinstance(item, Pair)]
    learning.ingest(spec, library, documents, pairs, passage_tokens=220)
    learning.embed_passages(spec, library)
    return spec, library, versions, learning.write_initial_version(spec, versions)


def page(audits: list[dict[str, Any]]) -> str:
    """The figures of some sites in Markdown."""
    parts = [_HEAD]
    for one in audits:
        parts.append(_section(one))
    return "\n".join(parts)


_HEAD = """# What embeddings expose

Made by `python -m tests.benchmarks.attacks.inversion --data DATA` (MedQuAD, MiniLM as it comes, 384
coordinates); the figures with all digits are in [inversion.jsonl](inversion.jsonl). What is
attacked, how and why: [decision 0017](../decisions/0017-inversion-audit.md). A site makes its
own table with `fedctl audit embeddings`.

Attacked are texts on subjects that the attacker has no text of. *F1*, *P*, *R*: distinct words
of a text, mean over the texts; *telling*: only words that at most 5 % of the attacker's texts
have; *names*: share of the names in the texts (spans of capitalised words, codes, dates,
quantities, the title) that were named exactly, and in brackets the share of what was named that
is right. *Guessing* sees no embedding; *others'* holds the guesses from exact embeddings against
other texts. Epsilon is for one vector sent once, at delta 1e-5. A lower bound throughout.
*Overlap*: share of the 10 exact nearest negatives among what is returned; *cosine*: mean of the
question with what is returned, before its noise. As a site answers: `noisy` with the level's
noise on question and passages, `bucket` with a noise of 0.05 on passages. A bucket is what a
question leaves as: its figures for passages tell what such bits would give away of one. The
machine had other work meanwhile: where minutes ran out (\\*) the decoder had fewer epochs than
it could have used, and an attacker has them.
"""


def _section(one: dict[str, Any]) -> str:
    levels = one["levels"]
    exact = levels[0]
    lines = [
        f"## {one['site']}",
        "",
        f"{one['passages_known']} passages and {one['questions_known']} questions known to the "
        f"attacker; {one['passages_unseen']} passages and {one['questions_unseen']} questions on "
        f"{one['subjects_unseen']} unseen subjects attacked; {one['seconds'] / 60:.0f} minutes "
        "with one thread.",
        "",
        "| disclosed | sigma | passages: F1 (P/R) | telling F1 | names "
        "| questions: F1 | telling F1 | names | overlap | cosine |",
        "|---|---|---|---|---|---|---|---|---|---|",
        _row("*guessing*", "", one["guessing_passages"], one["guessing_questions"])
        + f" | {one['cosine_at_random']:.2f} |",
        _row("*others'*", "", exact["shuffled"], None) + " | |",
    ]
    for level in levels:
        sigma = f"{level['sigma']:.3f}" if level["sigma"] else ""
        called = f"noisy, epsilon {level['epsilon']:g}" if level["epsilon"] else level["level"]
        name = called + ("\\*" if level["cut_short"] else "")
        row = _row(name, sigma, level["passages"], level["questions"], f"{level['overlap']:.2f}")
        lines.append(f"{row} | {level['cosine']:.2f} |")
    best = []
    for measure in ("words", "telling", "names"):
        of = {level[kind][measure]["attacker"] for level in levels for kind in _KINDS}
        best.append(f"{measure}: {', '.join(sorted(of))}")
    lines += ["", f"Best attackers at one level or another: {'; '.join(best)}.", ""]
    if any(level["cut_short"] for level in levels):
        lines += [f"\\* the decoder's share of {one['minutes']:g} minutes was used up.", ""]
    return "\n".join(lines)


def _row(
    name: str,
    sigma: str,
    passages: dict[str, Any],
    questions: dict[str, Any] | None,
    overlap: str = "",
) -> str:
    words, names = passages["words"], passages["names"]
    cells = [
        name,
        sigma,
        f"{words['f1']:.3f} ({words['precision']:.2f}/{words['recall']:.2f})",
        f"{passages['telling']['f1']:.3f}",
        _names(names),
    ]
    if questions is None:
        cells += ["", "", ""]
    else:
        cells += [
            f"{questions['words']['f1']:.3f}",
            f"{questions['telling']['f1']:.3f}",
            _names(questions["names"]),
        ]
    return "| " + " | ".join([*cells, overlap])


def _names(names: dict[str, Any]) -> str:
    return f"{100 * names['recall']:.1f} % ({100 * names['precision']:.0f} %)"


if __name__ == "__main__":
    main()
