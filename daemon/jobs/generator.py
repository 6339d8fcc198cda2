"""stub"""

from __future__ import annotations

from pathlib import Path

from daemon.learning.generator.spec import GeneratorSpec
from daemon.learning.options import RetrieverDescription, TrainingOptions, TrainingResult


def describe(spec: GeneratorSpec) -> RetrieverDescription: ...
def write_initial_version(spec: GeneratorSpec, versions: Path) -> bytes: ...
def trainable(spec: GeneratorSpec, library_path: Path) -> int: ...
def train(
    spec: GeneratorSpec,
    library_path: Path,
    versions: Path,
    parent_digest: bytes,
    options: TrainingOptions,
    round: int,
    site: str,
    update_path: Path,
    *,
    draw: int = 0,
) -> TrainingResult: ...
