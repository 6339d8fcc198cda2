"""The encoder: same text, same vector; and nothing but the weights that were asked for."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from config.recipes import DEFAULT_ENCODER
from daemon.learning.options import EncoderError
from daemon.learning.retriever import encoder as encoder_module
from daemon.learning.retriever.encoder import OFFLINE_PACKAGE, Encoder, locate
from tests.support.small_models import small_encoder

TEXTS = [
    "a short one",
    "pumps are inspected before every long journey, and after it as well.",
    "why?",
    "lamps last for about two winters",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_encoder(tmp_path_factory.mktemp("encoder"), ["pumps", "lamps"])


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Encoder:
    return Encoder.load(str(folder), max_tokens=48, device="cpu", threads=1)


def test_vectors_have_length_one_and_come_in_the_order_of_the_texts(encoder: Encoder) -> None:
    together = encoder.encode(TEXTS, batch_size=2)
    assert together.shape == (4, encoder.dimension)
    assert together.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1.0, atol=1e-5)
    for text, vector in zip(TEXTS, together, strict=True):
        np.testing.assert_allclose(encoder.encode([text])[0], vector, atol=1e-5)


def test_padding_does_not_change_a_vector(encoder: Encoder) -> None:
    alone = encoder.encode(["why?"])[0]
    padded = encoder.encode(["why?", TEXTS[1]], batch_size=2)[0]
    np.testing.assert_allclose(padded, alone, atol=1e-5)
    other = encoder.encode([TEXTS[1]])[0]
    assert float(alone @ other) < 0.999, "different texts must not look the same"


def test_no_text_gives_no_rows_and_an_empty_text_a_finite_one(encoder: Encoder) -> None:
    assert encoder.encode([]).shape == (0, encoder.dimension)
    assert np.isfinite(encoder.encode([""])).all()


def test_texts_are_cut_at_max_tokens(folder: Path) -> None:
    short = Encoder.load(str(folder), max_tokens=8, device="cpu")
    kept = "lamps lamps lamps lamps lamps lamps"  # six tokens and the two at the ends
    np.testing.assert_allclose(
        short.encode([f"{kept} pumps pumps"]), short.encode([kept]), atol=1e-6
    )


def test_tokens_are_counted_without_special_ones_and_without_cutting(encoder: Encoder) -> None:
    assert encoder.count_tokens("lamps pumps lamps") == 3
    assert encoder.count_tokens("lamps " * 200) == 200


def test_progress_reaches_the_total(encoder: Encoder) -> None:
    seen: list[tuple[int, int]] = []
    encoder.encode(TEXTS, batch_size=3, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(3, 4), (4, 4)]


def test_the_digest_names_weights_tokenizer_config_and_length(folder: Path, tmp_path: Path) -> None:
    def digest(path: Path, max_tokens: int = 48) -> bytes:
        return Encoder.load(str(path), max_tokens=max_tokens, device="cpu").digest

    copied = shutil.copytree(folder, tmp_path / "elsewhere")
    assert digest(copied) == digest(folder), "where it lies says nothing"
    assert digest(folder, max_tokens=32) != digest(folder)
    assert digest(small_encoder(tmp_path / "other", ["pumps", "lamps"], seed=1)) != digest(folder)
    tokenizer = copied / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"lowercase": true', '"lowercase": false'))
    assert digest(copied) != digest(folder)


@pytest.mark.parametrize("max_tokens", [2, 65])
def test_a_length_the_encoder_cannot_read_is_refused(folder: Path, max_tokens: int) -> None:
    with pytest.raises(EncoderError, match="choose 3 to 64"):
        Encoder.load(str(folder), max_tokens=max_tokens)


def test_a_pickled_model_is_refused(folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "pickled")
    (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    with pytest.raises(EncoderError, match=r"no \*\.safetensors"):
        Encoder.load(str(copied), max_tokens=48)


def test_code_that_comes_with_a_model_is_not_run(folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "coded")
    witness = tmp_path / "ran"
    (copied / "configuration_evil.py").write_text(
        "from transformers import BertConfig\n"
        f"open({str(witness)!r}, 'w').close()\n"
        "class EvilConfig(BertConfig):\n    model_type = 'evil'\n"
    )
    config = json.loads((copied / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "configuration_evil.EvilConfig"}}
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(EncoderError, match="cannot load"):
        Encoder.load(str(copied), max_tokens=48)
    assert not witness.exists()


def test_damaged_weights_are_an_encoder_error(folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "damaged")
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(EncoderError, match="cannot load"):
        Encoder.load(str(copied), max_tokens=48)


def test_a_missing_folder_says_so_without_asking_the_hub() -> None:
    with pytest.raises(EncoderError, match="does not exist"):
        locate("./no-such-folder")


def test_offline_an_unknown_hub_id_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    started = time.monotonic()
    with pytest.raises(EncoderError, match="local folder"):
        locate("nobody/no-such-encoder")
    assert time.monotonic() - started < 2


def test_a_name_that_is_no_hub_id_is_refused() -> None:
    with pytest.raises(EncoderError, match="nor a valid hub id"):
        locate("a name with spaces/and/slashes")


LOCATE_AGAINST = """
import sys, time
from daemon.learning.retriever.encoder import locate
from daemon.learning.options import EncoderError
started = time.monotonic()
try:
    locate("nobody/no-such-encoder")
except EncoderError as error:
    print(f"{time.monotonic() - started:.1f} {error}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("behaviour", ["refuses", "never answers"])
def test_a_hub_out_of_reach_does_not_hang(behaviour: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if behaviour == "refuses":
            server.close()
        # A process of its own: the hub's address is read once, when its client is imported.
        environment = {k: v for k, v in os.environ.items() if k.upper() != "HF_HUB_OFFLINE"}
        environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", LOCATE_AGAINST],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
    seconds, message = done.stdout.split(" ", 1)
    assert "cannot be had from the hub" in message
    assert "local folder" in message
    assert float(seconds) < 30


def test_a_package_with_other_weights_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A package of that name, found the way packages are, with another file as weights."""
    name = OFFLINE_PACKAGE.replace("-", "_")
    information = tmp_path / f"{name}-0.1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {OFFLINE_PACKAGE}\n")
    (information / "RECORD").write_text(f"{name}/model/model.safetensors,,\n")
    (tmp_path / name / "model").mkdir(parents=True)
    (tmp_path / name / "model" / "model.safetensors").write_bytes(b"not the upstream file")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(EncoderError, match="SHA-256"):
        encoder_module._offline_package()


def _packaged() -> bool:
    try:
        importlib.metadata.distribution(OFFLINE_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.skipif(not _packaged(), reason="the extra hanse[offline-model] is not installed")
def test_the_default_encoder_without_a_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    encoder = Encoder.load(DEFAULT_ENCODER, max_tokens=256, device="cpu", threads=1)
    assert OFFLINE_PACKAGE.replace("-", "_") not in sys.modules, "its code must not be imported"
    assert encoder.dimension == 384
    question, near, far = encoder.encode(
        [
            "How often is the pump serviced?",
            "The pump is serviced every six months.",
            "Visitors pay at the gate.",
        ]
    )
    assert question @ near > 0.7 > 0.3 > question @ far
