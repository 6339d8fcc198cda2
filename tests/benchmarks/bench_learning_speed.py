"""Seconds of a local epoch, beside a bare loop of the same model in the same run.

Text is drawn from the encoder's own words and the head's features at random: what
a step costs does not depend on what the texts say. The controls are what one would
write with plain torch, transformers and peft: no seeds, no checks, no duplicates
sought, nothing hidden. Ours and the control take turns, so that both meet the same
neighbours; seconds are those of the processor, with one thread.

    python -m tests.benchmarks.bench_learning_speed
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer

from daemon.learning.options import TrainingOptions
from daemon.learning.retriever.encoder import Encoder, Texts, locate
from daemon.learning.retriever.heads import ResidualHead
from daemon.learning.retriever.retriever import Retriever, adapted
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.learning.retriever.training import TrainingSet, fit
from daemon.personal.tiers import TieredHeadRetriever

HEAD_PAIRS, HEAD_BATCH = 5_000, 32
TEXT_PAIRS, TEXT_BATCH = 64, 16
QUERY_WORDS, PASSAGE_WORDS = 10, 120
HARD = 4  # negatives a pair, for the head
RUNS = 3
SEED = 7
HEAD_LOOP = "the same head in a bare torch loop, in-batch negatives"
LORA_LOOP = "the same LoRA in a bare transformers and peft loop"
HEAD_OPTIONS = TrainingOptions(local_epochs=1, batch_size=HEAD_BATCH, hard_negatives=HARD)
TEXT_OPTIONS = TrainingOptions(local_epochs=1, batch_size=TEXT_BATCH, hard_negatives=0)


def figures() -> list[dict[str, Any]]:
    """One row a figure; ratio > 1 means slower than the control."""
    spec = RetrieverSpec(threads=1)
    encoder = Encoder.load(spec.encoder, max_tokens=256, device="cpu", threads=1)
    return [*_head_rows(encoder), *_lora_rows(encoder, spec)]


def _head_rows(encoder: Encoder) -> list[dict[str, Any]]:
    pairs = _drawn_features(encoder.dimension)
    in_batch = TrainingOptions(local_epochs=1, batch_size=HEAD_BATCH, hard_negatives=0)
    topic = TrainingOptions(
        local_epochs=1, batch_size=HEAD_BATCH, hard_negatives=HARD, batches="topic"
    )
    extended = TieredHeadRetriever(encoder)
    extended.begin_tier("extended")
    head = adapted(encoder, "head")
    jobs: dict[str, Callable[[], object]] = {
        "in-batch negatives": lambda: fit(head, pairs, in_batch, SEED),
        "4 hard negatives": lambda: fit(head, pairs, HEAD_OPTIONS, SEED),
        "4 hard negatives, batches by topic": lambda: fit(head, pairs, topic, SEED),
        "the extended tier too": lambda: fit(extended, pairs, HEAD_OPTIONS, SEED),
    }
    control = _bare_head(pairs, encoder.dimension)
    seconds = _in_turn([*jobs.values(), control], RUNS)
    return [
        _row(f"local epoch of head, {HEAD_PAIRS} pairs, {name}", value, HEAD_LOOP, seconds[-1])
        for name, value in zip(jobs, seconds, strict=False)
    ]


def _lora_rows(encoder: Encoder, spec: RetrieverSpec) -> list[dict[str, Any]]:
    pairs = drawn_texts(encoder)
    retrievers: dict[str, Retriever] = {
        adapt: adapted(encoder, adapt) for adapt in ("lora", "full", "lora_server")
    }
    jobs: list[Callable[[], object]] = [
        lambda retriever=retriever: fit(retriever, pairs, TEXT_OPTIONS, SEED)  # type: ignore[misc]
        for retriever in retrievers.values()
    ]
    seconds = _in_turn([*jobs, _bare_lora(pairs, spec)], RUNS)
    return [
        _row(f"local epoch of {adapt}, {TEXT_PAIRS} pairs", value, LORA_LOOP, seconds[-1])
        for adapt, value in zip(retrievers, seconds, strict=False)
    ]


# ---- the controls ------------------------------------------------------------------


def _bare_head(pairs: TrainingSet, dimension: int) -> Callable[[], None]:
    head = ResidualHead(dimension)
    optimiser = torch.optim.AdamW(head.parameters(), lr=1e-4)
    queries, passages = (torch.from_numpy(_features(t)) for t in (pairs.queries, pairs.passages))

    def epoch() -> None:
        for rows in torch.split(torch.randperm(HEAD_PAIRS), HEAD_BATCH):
            scores = head(queries[rows]) @ head(passages[rows]).T / 0.05
            loss = functional.cross_entropy(scores, torch.arange(len(rows)))
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()

    return epoch


def _bare_lora(pairs: TrainingSet, spec: RetrieverSpec) -> Callable[[], None]:
    folder = locate(spec.encoder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"])
    model = get_peft_model(AutoModel.from_pretrained(folder, dtype=torch.float32), config).eval()
    trainable = [value for value in model.parameters() if value.requires_grad]
    optimiser = torch.optim.AdamW(trainable, lr=1e-4)

    def embed(texts: list[str]) -> torch.Tensor:
        tokens = tokenizer(
            texts, padding=True, truncation=True, max_length=spec.max_tokens, return_tensors="pt"
        )
        hidden = model(**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(-1).float()
        return functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    def epoch() -> None:
        for rows in torch.split(torch.randperm(TEXT_PAIRS), TEXT_BATCH):
            queries = embed([pairs.queries.texts[row] for row in rows])
            passages = embed([pairs.passages.texts[row] for row in rows])
            scores = queries @ passages.T / 0.05
            loss = functional.cross_entropy(scores, torch.arange(len(rows)))
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()

    return epoch


def _in_turn(jobs: list[Callable[[], object]], runs: int) -> list[float]:
    """Median processor seconds of each job."""
    taken: list[list[float]] = [[] for _ in jobs]
    for _ in range(runs):
        for job, seconds in zip(jobs, taken, strict=True):
            started = time.process_time()
            job()
            seconds.append(time.process_time() - started)
    return [statistics.median(seconds) for seconds in taken]


def _row(name: str, value: float, control: str, base: float) -> dict[str, Any]:
    return {
        "name": name,
        "value": round(value, 3),
        "unit": "s",
        "control": control,
        "control_value": round(base, 3),
        "ratio": round(value / base, 3),
    }


# ---- drawn data ---------------------------------------------------------------------


def _features(texts: Texts) -> NDArray[np.float32]:
    if texts.features is None:
        raise RuntimeError("no features were drawn: the benchmark measures nothing")
    return texts.features


def _drawn_features(dimension: int) -> TrainingSet:
    rng = np.random.default_rng(SEED)
    rows = rng.normal(size=(2, HEAD_PAIRS, dimension)).astype(np.float32)
    queries, passages = rows / np.linalg.norm(rows, axis=2, keepdims=True)
    names = [str(number) for number in range(HEAD_PAIRS)]
    return TrainingSet(
        Texts(names, queries),
        Texts(names, passages),
        [np.array([number]) for number in range(HEAD_PAIRS)],
        [(number + 1 + rng.permutation(50)[:HARD]) % HEAD_PAIRS for number in range(HEAD_PAIRS)],
        parent=(queries, passages),
    )


def drawn_texts(encoder: Encoder) -> TrainingSet:
    """Pairs of words of the encoder's own, drawn at random."""
    rng = np.random.default_rng(SEED)
    words = [word for word in encoder.tokenizer.get_vocab() if word.isascii() and word.isalpha()]

    def drawn(length: int) -> Texts:
        return Texts([" ".join(rng.choice(words, size=length)) for _ in range(TEXT_PAIRS)])

    rows = np.arange(TEXT_PAIRS)
    return TrainingSet(
        drawn(QUERY_WORDS),
        drawn(PASSAGE_WORDS),
        [rows[row : row + 1] for row in rows],
        [np.empty(0, dtype=np.int64)] * TEXT_PAIRS,
    )


def main() -> None:
    """Print the figures, one JSON object a line."""
    for row in figures():
        print(json.dumps(row))


if __name__ == "__main__":
    main()
