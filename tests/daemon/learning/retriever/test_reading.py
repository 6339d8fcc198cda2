"""An encoder is read as its makers say: by its pooling, behind its prompts, or not at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from config.kinds import Pooling
from crypto.arrays import Float32
from daemon.learning.options import EncoderError
from daemon.learning.retriever.encoder import Encoder, Texts
from daemon.learning.retriever.reading import POOLINGS, Reading, Side, languages_of, reading_of
from daemon.learning.retriever.retriever import adapted
from daemon.learning.retriever.spec import ReadingOptions
from tests.support.small_models import small_encoder

TEXTS = ["why?", "pumps are inspected before every long journey", "Lamps last"]
E5 = {"prompts": {"query": "query: ", "passage": "passage: "}}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_encoder(tmp_path_factory.mktemp("plain"), ["pumps", "lamps", "query", "passage"])


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    return shutil.copytree(plain, tmp_path / "encoder")


def write(folder: Path, name: str, content: Any) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def give_modules(folder: Path, *kinds: str) -> None:
    modules = [
        {"idx": n, "name": str(n), "path": f"{n}_{kind}" if n else "", "type": f"s.models.{kind}"}
        for n, kind in enumerate(kinds)
    ]
    write(folder, "modules.json", modules)


def give_pooling(folder: Path, **modes: bool) -> None:
    give_modules(folder, "Transformer", "Pooling", "Normalize")
    flags = {f"pooling_mode_{mode}": on for mode, on in modes.items()}
    write(folder, "1_Pooling/config.json", {"word_embedding_dimension": 32} | flags)


def load(folder: Path, **options: Any) -> Encoder:
    asked = ReadingOptions(**options)
    return Encoder.load(str(folder), max_tokens=48, device="cpu", threads=1, options=asked)


def plainly(folder: Path, texts: list[str], pooling: str) -> Float32:
    """[n, d] by transformers alone, a text at a time: nothing is padded."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    vectors = []
    for text in texts:
        tokens = tokenizer(text, return_tensors="pt", truncation=True, max_length=48)
        with torch.no_grad():
            hidden = model(**tokens).last_hidden_state[0].numpy()  # [t, d]
        vector = {
            "mean": hidden.mean(axis=0),
            "cls": hidden[0],
            "max": hidden.max(axis=0),
            "lasttoken": hidden[-1],
        }[pooling]
        vectors.append(vector / np.linalg.norm(vector))
    return np.array(vectors, dtype=np.float32)


@pytest.mark.parametrize(
    ("mode", "pooling"),
    [
        ("mean_tokens", "mean"),
        ("cls_token", "cls"),
        ("max_tokens", "max"),
        ("lasttoken", "lasttoken"),
    ],
)
def test_the_pooling_is_that_of_its_makers(folder: Path, mode: str, pooling: Pooling) -> None:
    others = dict.fromkeys(("mean_tokens", "cls_token", "max_tokens", "lasttoken"), False)
    give_pooling(folder, **(others | {mode: True}))
    encoder = load(folder)
    assert encoder.reading == Reading(Side("", pooling), Side("", pooling))
    vectors = encoder.encode(TEXTS, batch_size=3)
    np.testing.assert_allclose(vectors, plainly(folder, TEXTS, pooling), atol=1e-5)


def test_every_pooling_passes_over_padding_on_either_side() -> None:
    hidden = torch.tensor([[[9.0], [1.0], [3.0], [9.0]]])
    mask = torch.tensor([[0, 1, 1, 0]])
    found = {name: float(pool(hidden, mask)[0, 0]) for name, pool in POOLINGS.items()}
    assert found == {"mean": 2.0, "cls": 1.0, "max": 3.0, "lasttoken": 3.0}


def test_poolings_and_prompts_have_digests_of_their_own(folder: Path) -> None:
    found = [load(folder).digest]
    give_pooling(folder, mean_tokens=True)
    assert load(folder).digest == found[0], "the mean alone is what it always was"
    found.append(load(folder, query_prompt="query: ").digest)
    found.append(load(folder, passage_prompt="query: ").digest)
    found.append(load(folder, query_pooling="cls").digest)
    found.append(load(folder, passage_pooling="cls").digest)
    give_pooling(folder, cls_token=True)
    found.append(load(folder).digest)
    write(folder, "sentence_bert_config.json", {"do_lower_case": True})
    found.append(load(folder).digest)
    assert len({*found}) == len(found)


@pytest.mark.parametrize("adapt", ["head", "lora"])
def test_questions_and_passages_are_read_behind_their_prompts(folder: Path, adapt: str) -> None:
    write(folder, "config_sentence_transformers.json", E5)
    retriever = adapted(load(folder), adapt, rank=2)
    asked = plainly(folder, [f"query: {text}" for text in TEXTS], "mean")
    told = plainly(folder, [f"passage: {text}" for text in TEXTS], "mean")
    np.testing.assert_allclose(retriever.embed_queries(TEXTS), asked, atol=1e-5)
    np.testing.assert_allclose(retriever.embed_passages(TEXTS), told, atol=1e-5)


@pytest.mark.parametrize(
    ("reading", "name"),
    [
        (Reading(), "mean-pooling"),
        (Reading(Side("", "cls"), Side("", "cls")), '["cls", "", "", false]'),
        (Reading(Side("q: "), Side("p: "), lower=True), '["mean", "q: ", "p: ", true]'),
        (Reading(Side("q: ", "cls"), Side("p: ")), '[["cls", "mean"], "q: ", "p: ", false]'),
        (Reading(Side(), Side("", "cls")), '[["mean", "cls"], "", "", false]'),
    ],
)
def test_what_a_digest_says_of_an_encoder_stays(reading: Reading, name: str) -> None:
    """As it was said before sides had poolings of their own; sites of both kinds must agree."""
    assert reading.name == name


@pytest.mark.parametrize("adapt", ["head", "lora"])
def test_each_side_has_its_pooling(folder: Path, adapt: str) -> None:
    """As PDD-AS2 has it (sec. 3): questions by their first token, sentences by the mean."""
    give_pooling(folder, mean_tokens=True)
    encoder = load(folder, query_pooling="cls")
    assert encoder.reading == Reading(Side("", "cls"), Side("", "mean"))
    retriever = adapted(encoder, adapt, rank=2)
    asked, told = plainly(folder, TEXTS, "cls"), plainly(folder, TEXTS, "mean")
    np.testing.assert_allclose(retriever.embed_queries(TEXTS), asked, atol=1e-5)
    np.testing.assert_allclose(retriever.embed_passages(TEXTS), told, atol=1e-5)
    assert np.abs(asked - told).max() > 1e-3, "the sides differ"


def test_both_poolings_may_be_said_where_the_makers_one_is_not_read_here(folder: Path) -> None:
    give_pooling(folder, weightedmean_tokens=True)
    for one in ("query_pooling", "passage_pooling"):
        with pytest.raises(EncoderError, match="pools by weightedmean_tokens"):
            load(folder, **{one: "max"})
    assert load(folder, query_pooling="max", passage_pooling="mean").reading.query.pooling == "max"


def test_texts_are_trained_on_behind_their_prompt(folder: Path) -> None:
    retriever = adapted(load(folder), "lora", rank=2)
    found = retriever.forward(Texts(TEXTS, side=Side("query: ")), np.array([2, 0]))
    expected = plainly(folder, [f"query: {TEXTS[row]}" for row in (2, 0)], "mean")
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("card", "options", "prompts"),
    [
        ({}, {}, ("", "")),
        (E5, {}, ("query: ", "passage: ")),
        ({"prompts": {"query": "q: ", "document": "d: "}}, {}, ("q: ", "d: ")),
        ({"prompts": {"s": "s: "}, "default_prompt_name": "s"}, {}, ("s: ", "s: ")),
        (E5, {"query_prompt": ""}, ("", "passage: ")),
        ({}, {"query_prompt": "ask: ", "passage_prompt": "told: "}, ("ask: ", "told: ")),
    ],
)
def test_prompts_are_the_makers_unless_the_operator_says_otherwise(
    folder: Path, card: dict[str, Any], options: dict[str, str], prompts: tuple[str, str]
) -> None:
    write(folder, "config_sentence_transformers.json", card)
    reading = load(folder, **options).reading
    assert (reading.query.prompt, reading.passage.prompt) == prompts


def test_texts_are_read_in_small_letters_where_the_makers_say_so(folder: Path) -> None:
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"lowercase": true', '"lowercase": false'))
    before = load(folder).encode(["LAMPS", "lamps"])
    assert float(before[0] @ before[1]) < 0.999
    write(folder, "sentence_bert_config.json", {"do_lower_case": True})
    after = load(folder).encode(["LAMPS", "lamps"])
    np.testing.assert_allclose(after[0], after[1], atol=1e-6)


def test_what_is_not_read_here_is_refused_by_name(folder: Path) -> None:
    def refused(words: str) -> None:
        with pytest.raises(EncoderError, match=words):
            reading_of(folder)

    give_pooling(folder, weightedmean_tokens=True)
    refused("pools by weightedmean_tokens; expected one of mean, cls, max, lasttoken")
    give_pooling(folder, mean_tokens=True, cls_token=True)
    refused("pools by mean and cls")
    write(folder, "1_Pooling/config.json", {"pooling_mode": "attention"})
    refused("pools by attention")
    write(folder, "1_Pooling/config.json", {"pooling_mode": "cls"})
    assert reading_of(folder) == Reading(Side("", "cls"), Side("", "cls"))
    give_modules(folder, "Transformer", "Pooling", "Dense")
    refused("a module 'Dense' that is not read here")
    give_modules(folder, "Transformer", "Pooling", "Pooling")
    refused("a module 'Pooling' twice")
    give_modules(folder, "Transformer", "Pooling")
    write(folder, "config_sentence_transformers.json", {"similarity_fn_name": "dot"})
    refused("compared by 'dot'")
    give_modules(folder, "Transformer", "Pooling", "Normalize")
    cls = Reading(Side("", "cls"), Side("", "cls"))
    assert reading_of(folder) == cls, "of vectors of length 1 these are the same"
    for prompts in (["query: "], {"query": 1}, {"query": "q" * 201}):
        write(folder, "config_sentence_transformers.json", {"prompts": prompts})
        refused("are no texts of up to 200 characters")
    write(folder, "config_sentence_transformers.json", E5)
    write(folder, "1_Pooling/config.json", {"pooling_mode": "mean", "include_prompt": False})
    refused("leaves its prompts out of its vectors")
    write(folder, "modules.json", [{"type": "s.Pooling", "path": "../elsewhere"}])
    refused("names a folder outside")


@pytest.mark.parametrize("content", ["{", "[1, 2]", '"text"', "\udcff", "[" * 100_000])
def test_a_damaged_file_is_named(folder: Path, content: str) -> None:
    path = folder / "config_sentence_transformers.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(EncoderError, match=r"config_sentence_transformers\.json"):
        reading_of(folder)


def test_a_prompt_leaves_room_for_the_text(folder: Path) -> None:
    assert load(folder).passage_room == 46
    assert load(folder, passage_prompt="passage: ").passage_room == 44
    with pytest.raises(EncoderError, match="takes more than half of max_tokens = 48"):
        load(folder, query_prompt="query " * 25)


@pytest.mark.parametrize(
    ("card", "languages"),
    [
        ("---\nlanguage: en\nlicense: mit\n---\n# A model", {"en"}),
        ("---\nlanguage:\n- de\n- fr\n---\n", {"de", "fr"}),
        ("---\nlanguage: multilingual\n---\n", set()),
        ("---\nlanguage:\n- en\n- multilingual\n---\n", set()),
        ("---\nlanguage: 7\n---\n", set()),
        ("---\nlanguage: {en: 1}\n---\n", set()),
        ("---\nlanguage: [\n---\n", set()),
        (f"---\nlanguage: {'[' * 5000}\n---\n", set()),
        ("---\n- en\n---\n", set()),
        ("---\nlanguage: en\n---\n" + "a" * (1 << 20), set()),
        ("# A model for English", set()),
    ],
)
def test_its_languages_are_those_of_its_card(folder: Path, card: str, languages: set[str]) -> None:
    digest = load(folder).digest
    write(folder, "README.md", card)
    assert languages_of(folder) == languages
    encoder = load(folder)
    assert encoder.languages == languages
    assert encoder.digest == digest, "they say nothing of its vectors"


def test_who_has_no_card_names_no_language(folder: Path) -> None:
    assert load(folder).languages == set()
