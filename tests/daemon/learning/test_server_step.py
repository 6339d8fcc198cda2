"""The step from mean update to next version: by hand, to the bit, and through a version's file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from config.recipes import ServerOptions
from daemon.learning.options import LearningError
from daemon.learning.server_step import step
from daemon.state.versions import (
    ShapeManifest,
    VersionError,
    import_version,
    largest_file,
    read_version,
    read_whole_version,
    write_version,
)

SHAPE = ShapeManifest("encoder/head-v1", (("a", (3,)),))
X = np.array([1.0, 0.0, -1.0], dtype=np.float32)
D = np.array([0.5, 0.0, -0.25])


def test_fedavg_adds_the_mean() -> None:
    version, moments = step(X, D, None, ServerOptions())
    assert version.tolist() == [1.5, 0.0, -1.25]
    assert moments is None
    # Bit for bit what rounds without a rule have always computed.
    mean = np.random.default_rng(0).normal(size=3)
    assert step(X, mean, None, ServerOptions())[0].tobytes() == (mean + X).astype("<f4").tobytes()


def test_momentum_by_hand() -> None:
    options = ServerOptions("fedavgm", learning_rate=0.5, momentum=0.5)
    version, moments = step(X, D, None, options)
    assert moments is not None
    assert moments.tolist() == [[0.5, 0.0, -0.25]]
    assert version.tolist() == [1.25, 0.0, -1.125]
    version, moments = step(version, D, moments, options)
    assert moments is not None
    assert moments.tolist() == [[0.75, 0.0, -0.375]]
    assert version.tolist() == [1.625, 0.0, -1.3125]


def test_adam_by_hand() -> None:
    options = ServerOptions("fedadam", 0.1, momentum=0.5, second_momentum=0.75, adam_tau=0.25)
    version, moments = step(X, D, None, options)
    assert moments is not None
    # The squares begin at 0.25^2: 0.75 * 0.0625 + 0.25 * (0.5^2, 0, 0.25^2).
    assert moments.tolist() == [[0.25, 0.0, -0.125], [0.109375, 0.046875, 0.0625]]
    # 0.1 * 0.25 / (sqrt(0.109375) + 0.25); 0.1 * 0.125 / (0.25 + 0.25) = 0.025
    first = 1 + 0.1 * 0.25 / (0.109375**0.5 + 0.25)
    np.testing.assert_allclose(version, [first, 0.0, -1.025], rtol=1e-6)


def test_another_rules_moments_are_not_taken_for_its_own() -> None:
    _, momentum = step(X, D, None, ServerOptions("fedavgm"))
    adam = ServerOptions("fedadam")
    assert step(X, D, momentum, adam)[0].tobytes() == step(X, D, None, adam)[0].tobytes()


def test_a_step_that_is_not_finite_is_refused() -> None:
    with pytest.raises(LearningError, match="not finite: lower"):
        step(X, np.array([1e39, 0, 0]), None, ServerOptions())
    with pytest.raises(LearningError, match="not finite"):
        step(X, np.array([np.nan, 0, 0]), None, ServerOptions("fedadam"))


BITS = """
import hashlib, numpy as np
from daemon.learning.server_step import step
from daemon.learning.options import ServerOptions
raw = np.random.Philox(key=5).random_raw(3000).astype(np.int64)
x = ((raw[:1000] >> 40) * 2.0**-24).astype(np.float32)
digest = hashlib.sha256()
for rule in ("fedavg", "fedavgm", "fedadam"):
    moments = None
    for part in (raw[1000:2000], raw[2000:]):
        x, moments = step(x, (part >> 30) * 2.0**-40, moments, ServerOptions(rule))
        digest.update(x.tobytes())
print(digest.hexdigest())
"""
STEP_BITS = "7c299b36085bbd26d83f7dcbc381f2c70e334218a140ddf5ce75160397207d78"


@pytest.mark.slow
def test_every_machine_computes_these_bits() -> None:
    """Also with the vector instructions of another processor: numpy's dispatch is turned down."""
    for features in ("", "AVX2 FMA3 AVX512F AVX512_SKX"):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", BITS],
            env={"NPY_DISABLE_CPU_FEATURES": features, "PYTHONPATH": "."},
            cwd=Path(__file__).parents[3],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert done.stdout.strip() == STEP_BITS


@pytest.mark.parametrize("rule", ["fedavgm", "fedadam"])
def test_a_site_that_catches_up_takes_the_same_next_step(
    rule: Literal["fedavgm", "fedadam"], tmp_path: Path
) -> None:
    options = ServerOptions(rule)
    first, moments = step(X, D, None, options)
    digest, path = write_version(tmp_path / "here", SHAPE.digest, first, moments)
    assert path.stat().st_size <= largest_file(SHAPE.total)

    arrived = tmp_path / "arrived"
    arrived.write_bytes(path.read_bytes())
    import_version(arrived, tmp_path / "late", digest)
    caught = read_version(tmp_path / "late", digest, SHAPE.digest)
    _, carried = read_whole_version(tmp_path / "late", digest, SHAPE.digest)
    assert carried is not None
    late, _ = step(caught, D, carried, options)
    assert late.tobytes() == step(first, D, moments, options)[0].tobytes()
    assert late.tobytes() != step(first, D, None, options)[0].tobytes(), "the moments matter"


def test_moments_are_part_of_the_versions_name(tmp_path: Path) -> None:
    moments = np.ones((1, 3), dtype=np.float32)
    plain, _ = write_version(tmp_path, SHAPE.digest, X)
    carrying, path = write_version(tmp_path, SHAPE.digest, X, moments)
    assert plain != carrying
    assert read_whole_version(tmp_path, plain, SHAPE.digest)[1] is None
    _, other = write_version(tmp_path, SHAPE.digest, X, moments * 2)
    path.write_bytes(other.read_bytes())
    with pytest.raises(VersionError, match="damaged"):
        read_version(tmp_path, carrying, SHAPE.digest)


@pytest.mark.parametrize("shape", [(3, 3), (1, 2), (3,), (0, 3)])
def test_moments_of_another_shape_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(VersionError, match="moments of shape"):
        write_version(tmp_path, SHAPE.digest, X, np.zeros(shape, dtype=np.float32))
    with pytest.raises(VersionError, match="finite"):
        write_version(tmp_path, SHAPE.digest, X, np.full((1, 3), np.inf, dtype=np.float32))
