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
    "daemon/learning/apart.py",
    "daemon/learning/batches.py",
    "daemon/learning/depth.py",
    "daemon/learning/encoder.py",
    "daemon/learning/evaluation.py",
    "daemon/learning/foreign.py",
    "daemon/learning/heads.py",
    "daemon/learning/jobs.py",
    "daemon/learning/lora.py",
    "daemon/learning/losses.py",
    "daemon/learning/material.py",
    "daemon/learning/mining.py",
    "daemon/learning/mixing.py",
    "daemon/learning/mixture.py",
    "daemon/learning/models.py",
    "daemon/learning/parameters.py",
    "daemon/learning/personal_jobs.py",
    "daemon/learning/projection.py",
    "daemon/learning/query_encoder.py",
    "daemon/learning/recipes.py",
    "daemon/learning/server_side.py",
    "daemon/learning/tiering.py",
    "daemon/learning/tiers.py",
    "daemon/learning/training.py",
    "daemon/learning/tuning.py",
    "daemon/retrieval/library.py",
    "daemon/round_crypto.py",
    "peers/negatives.py",
    "tests/learning_bench/corpora.py",
    "tests/learning_bench/exchange.py",
    "tests/learning_bench/foreign.py",
    "tests/learning_bench/learning.py",
    "tests/learning_bench/named.py",
    "tests/learning_bench/recipes.py",
)


@cache
def code_digest() -> str:
    """SHA-256 (hex, shortened) of what the sources say, apart from comments and layout."""
    outer = hashlib.sha256()
    for name in _SOURCES:
        tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
        outer.update(f"{name}\0{ast.dump(tree)}\0".encode())
    return outer.hexdigest()[:16]
