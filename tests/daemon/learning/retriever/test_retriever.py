"""Retrievers: they start as their encoder, with the same bits everywhere, as one flat vector."""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path

import numpy as np
import pytest
import torch

from daemon.learning.options import LearningError
from daemon.learning.parameters import uniform
from daemon.learning.retriever.adaptations import LoraRetriever
from daemon.learning.retriever.encoder import OFFLINE_PACKAGE, Encoder, Texts
from daemon.learning.retriever.heads import HeadRetriever
from daemon.learning.retriever.retriever import Retriever, adapted
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.personal.serving import open_retriever
from daemon.state.versions import VersionError
from tests.support.small_models import small_encoder

TEXTS = ["the pump is checked in spring", "lamps last two winters", "who pays the ferryman?"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    folder = small_encoder(tmp_path_factory.mktemp("encoder"))
    return Encoder.load(str(folder), max_tokens=48, device="cpu", threads=1)


@pytest.fixture(params=["head", "lora"])
def retriever(request: pytest.FixtureRequest, encoder: Encoder) -> Retriever:
    return adapted(encoder, request.param)


def test_a_fresh_retriever_is_its_encoder(retriever: Retriever, encoder: Encoder) -> None:
    frozen = encoder.encode(TEXTS)
    np.testing.assert_allclose(retriever.embed_queries(TEXTS), frozen, atol=1e-6)
    np.testing.assert_allclose(retriever.embed_passages(TEXTS), frozen, atol=1e-6)


def test_the_starting_vector_does_not_depend_on_torchs_randomness(
    retriever: Retriever, encoder: Encoder
) -> None:
    torch.manual_seed(12345)
    again = adapted(encoder, "head" if retriever.uses_features else "lora")
    assert again.initial_vector().tobytes() == retriever.initial_vector().tobytes()
    assert again.vector().tobytes() == retriever.initial_vector().tobytes()


def test_starting_values_are_these_bits_on_every_machine() -> None:
    values = uniform((384, 1536), 1 / np.sqrt(384), stream=0)
    assert hashlib.sha256(values.astype("<f4").tobytes()).hexdigest() == STARTING_BITS
    assert abs(float(values.mean())) < 1e-3
    assert 0.051 < np.abs(values).max() <= 0.0511


STARTING_BITS = "8dc1dff42ed28ae318338ea618c56f7a60899963c98f32e7bdaa9f5ee71ebcd5"


def test_different_streams_differ() -> None:
    assert not np.array_equal(uniform((8,), 1.0, stream=0), uniform((8,), 1.0, stream=1))


def test_a_vector_goes_in_and_comes_out_unchanged(retriever: Retriever) -> None:
    chance = np.random.default_rng(0)
    vector = chance.normal(size=retriever.shape_manifest.total).astype(np.float32)
    kept = vector.copy()
    retriever.load_vector(vector)
    assert retriever.vector().tobytes() == kept.tobytes()
    retriever.load_vector(retriever.initial_vector())
    assert vector.tobytes() == kept.tobytes(), "the caller's array is not written to"


def test_loading_a_vector_changes_what_is_embedded(retriever: Retriever, encoder: Encoder) -> None:
    chance = np.random.default_rng(0)
    vector = retriever.initial_vector()
    vector += 0.3 * chance.normal(size=len(vector)).astype(np.float32)
    retriever.load_vector(vector)
    embedded = retriever.embed_passages(TEXTS)
    np.testing.assert_allclose(np.linalg.norm(embedded, axis=1), 1.0, atol=1e-5)
    assert (np.sum(embedded * encoder.encode(TEXTS), axis=1) < 0.999).all()


def test_a_vector_of_another_length_is_refused(retriever: Retriever) -> None:
    with pytest.raises(VersionError, match="expected"):
        retriever.load_vector(np.zeros(retriever.shape_manifest.total + 1, dtype=np.float32))


def test_the_encoder_itself_is_never_trained(encoder: Encoder) -> None:
    before = encoder.encode(TEXTS)
    lora = LoraRetriever(encoder)
    lora.load_vector(np.ones(lora.shape_manifest.total, dtype=np.float32))
    assert np.array_equal(encoder.encode(TEXTS), before)
    assert not any(parameter.requires_grad for parameter in encoder.model.parameters())


def test_cached_features_give_what_the_texts_give(encoder: Encoder) -> None:
    head = HeadRetriever(encoder)
    features = encoder.encode(TEXTS)
    np.testing.assert_allclose(
        head.embed_passages(TEXTS, features), head.embed_passages(TEXTS), atol=1e-6
    )
    rows = head.forward(Texts(TEXTS, features), np.array([2, 0])).detach().numpy()
    np.testing.assert_allclose(rows, head.embed_passages(TEXTS, features)[[2, 0]], atol=1e-6)


def test_the_head_refuses_to_train_without_features(encoder: Encoder) -> None:
    with pytest.raises(LearningError, match="encode the texts first"):
        HeadRetriever(encoder).forward(Texts(TEXTS), np.array([0]))


def test_the_manifest_names_encoder_and_adaptation(encoder: Encoder, tmp_path: Path) -> None:
    other = Encoder.load(str(small_encoder(tmp_path, seed=1)), max_tokens=48, device="cpu")
    heads = HeadRetriever(encoder), HeadRetriever(other)
    assert heads[0].shape_manifest.groups == heads[1].shape_manifest.groups
    assert heads[0].shape_manifest.digest != heads[1].shape_manifest.digest
    assert LoraRetriever(encoder).shape_manifest.digest != heads[0].shape_manifest.digest
    assert encoder.digest.hex() in heads[0].shape_manifest.family


def test_the_head_has_the_size_that_the_design_names(encoder: Encoder) -> None:
    d = encoder.dimension
    assert HeadRetriever(encoder).shape_manifest.total == 2 * d + 2 * d * 4 * d + 4 * d + d


def test_lora_adapts_query_and_value_of_every_layer(encoder: Encoder) -> None:
    names = [name for name, _ in LoraRetriever(encoder).shape_manifest.groups]
    layers = encoder.model.config.num_hidden_layers
    assert len(names) == layers * 2 * 2  # query and value, A and B
    assert all(".query." in name or ".value." in name for name in names)


def test_an_unknown_adaptation_is_refused(encoder: Encoder) -> None:
    with pytest.raises(LearningError, match="'head' or 'lora'"):
        adapted(encoder, "everything")


@pytest.mark.slow
def test_the_default_retriever_shares_1_18_million_values() -> None:
    try:
        importlib.metadata.distribution(OFFLINE_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the extra hanse[offline-model] is not installed")
    retriever = open_retriever(RetrieverSpec(device="cpu"))
    assert retriever.shape_manifest.total == 1_182_336
    frozen = retriever.encoder.encode(TEXTS)
    np.testing.assert_allclose(retriever.embed_queries(TEXTS, frozen), frozen, atol=1e-6)
