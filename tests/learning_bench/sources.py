"""Which code decides the figures: cells and runs are named after what it says."""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What decides the figures; comments and layout do not.
_SOURCES = (
    "config/recipes.py",
    "crypto/disclosure.py",
    "crypto/privacy.py",
    "crypto/quantize.py",
    "daemon/personal/held_out.py",
    "daemon/learning/batches.py",
    "daemon/personal/depth.py",
    "daemon/learning/retriever/encoder.py",
    "daemon/evaluation/evaluation.py",
    "daemon/learning/retriever/peer_negatives.py",
    "daemon/learning/retriever/heads.py",
    "daemon/jobs/learning.py",
    "daemon/learning/adaptations.py",
    "daemon/learning/retriever/adaptations.py",
    "daemon/learning/losses.py",
    "daemon/learning/retriever/training_data.py",
    "daemon/learning/retriever/mining.py",
    "daemon/learning/retriever/retriever.py",
    "daemon/learning/parameters.py",
    "daemon/jobs/personal.py",
    "daemon/learning/from_settings.py",
    "daemon/learning/server_step.py",
    "daemon/personal/tiers.py",
    "daemon/learning/retriever/training.py",
    "daemon/pairs/training_set.py",
    "daemon/personal/tuning.py",
    "daemon/personal/layer.py",
    "daemon/personal/mixture.py",
    "daemon/personal/query_encoder.py",
    "daemon/personal/serving.py",
    "daemon/personal/tiered_head.py",
    "daemon/library/store.py",
    "daemon/jobs/sums/ckks.py",
    "peers/link/negatives.py",
    "tests/learning_bench/corpora.py",
    "tests/learning_bench/recipes/exchange.py",
    "tests/learning_bench/recipes/foreign.py",
    "tests/learning_bench/recipes/learning.py",
    "tests/learning_bench/recipes/named.py",
    "tests/learning_bench/recipes/recipes.py",
)


@cache
def code_digest(names: tuple[str, ...] = _SOURCES) -> str:
    """SHA-256 (hex, shortened) of what the sources say, apart from comments and layout."""
    outer = hashlib.sha256()
    for name in names:
        tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
        outer.update(f"{name}\0{ast.dump(tree)}\0".encode())
    return outer.hexdigest()[:16]
