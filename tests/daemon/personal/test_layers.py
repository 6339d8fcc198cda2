"""The table of personal layers: what settings know of it, and what each tells of itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from config.recipes import PERSONAL, RECIPES, PersonalTraits
from config.settings import RetrieverSettings
from crypto.arrays import Float32
from daemon.jobs import curve, learning, personal
from daemon.learning.options import DepthReport, LearningError, Personalised, TrainingOptions
from daemon.learning.retriever.peer_negatives import AskingTerms
from daemon.learning.retriever.retriever import Retriever
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.readers.documents import Document, Pair
from daemon.personal.layer import Fact, FitRequest, Fitted, Layer, Serving
from daemon.personal.layers import LAYERS
from daemon.personal.serving import load_serving, retriever_for
from daemon.personal.store import PersonalState, embedded_by
from tests.support.canned_replies import DIGEST
from tests.support.small_models import small_encoder
from tests.test_rooms import ROOT, name_of, sources

SHOWN = DIGEST.hex()[:12]
TIER = DepthReport("advanced", "upgrade", 0.25, "stable for 3 rounds")


def told(name: str, state: PersonalState | None, report: DepthReport | None = None) -> list[Fact]:
    return LAYERS[name].facts(Serving(DIGEST, state, report))


def made(*, changed: bool = True, share: float = math.nan, untrained: bool = False) -> Personalised:
    return Personalised(
        DIGEST, 4, 1.25, 80, 20, 0.5, 0.625, changed, 2.5, share=share, untrained=untrained
    )


def test_settings_and_the_table_name_the_same_layers() -> None:
    assert list(LAYERS) == list(PERSONAL)
    for name, layer in LAYERS.items():
        assert (layer.name, layer.traits) == (name, PERSONAL[name])
    assert {recipe.personal for recipe in RECIPES.values()} <= {*LAYERS}


def test_a_layer_is_named_in_its_file_the_tables_and_recipes_alone() -> None:
    """Who adds one touches three files: everybody else asks the table."""
    naming = {
        name_of(path)
        for path in sources("config", "daemon")
        for name in LAYERS
        if name != "none" and f'"{name}"' in path.read_text(encoding="utf-8")
    }
    own = {f"daemon/personal/{name}.py" for name in LAYERS if name != "none"}
    # `generator.personal` is another setting, which has a "mixture", too, and no other.
    of_the_generator = {"config/settings.py", "daemon/personal/generator.py"}
    naming = {name for name in naming - of_the_generator if "/generator/" not in name}
    assert naming - own == {"config/recipes.py", "daemon/personal/layers.py"}
    assert all((ROOT / name).is_file() for name in own)


def test_only_what_a_layer_says_of_itself_is_kept_fitted_or_pinned() -> None:
    assert {name for name, layer in LAYERS.items() if layer.kept} == {*LAYERS} - {"none"}
    assert {name for name, layer in LAYERS.items() if layer.fitted} == {"query_encoder", "mixture"}
    for trait in ("trained_in_rounds", "pinned_by_index"):
        assert {name for name, layer in LAYERS.items() if getattr(layer, trait)} == {"tiered_head"}


def test_a_state_of_another_layer_is_not_taken_for_ones_own() -> None:
    states = {
        "tiered_head": PersonalState({}, {"tier": "base"}),
        "query_encoder": PersonalState({}, {"kind": "query_encoder"}),
        "mixture": PersonalState({}, {"kind": "mixture"}),
    }
    for name, layer in LAYERS.items():
        assert {whose for whose, state in states.items() if layer.holds(state)} == {name} - {"none"}
        assert not layer.holds(None)


def test_without_a_layer_nothing_is_told_or_fitted() -> None:
    assert told("none", None, TIER) == []
    assert LAYERS["none"].answers_with(made()) == "the shared version, as before"
    for name in ("none", "tiered_head"):
        with pytest.raises(LearningError, match="nothing of this site's own is fitted"):
            LAYERS[name].fit(None)  # type: ignore[arg-type]  # whatever is asked


def test_a_tier_is_told_with_its_reason() -> None:
    (nothing,) = told("tiered_head", None)
    assert nothing == ("personal layer", "none until this site has trained for a round")
    layer, why = told("tiered_head", None, TIER)
    assert layer == ("personal layer", "advanced (upgrade, adaptation index 0.2500)")
    assert why == ("", "stable for 3 rounds")
    early, _ = told("tiered_head", None, DepthReport("base", "none", None, "round 1 of 11"))
    assert early == ("personal layer", "base (none)")


def test_what_is_fitted_is_told_for_the_version_that_answers() -> None:
    for name in ("query_encoder", "mixture"):
        ((_, nothing),) = told(name, None)
        assert nothing.startswith("nothing yet for the version that answers")
    assert told("query_encoder", PersonalState({}, {"kind": "query_encoder"})) == [
        ("query encoder", f"this site's own, for version {SHOWN}")
    ]


def test_a_mixture_is_told_with_its_share() -> None:
    facts = {"kind": "mixture", "share": 0.5, "untrained": False}
    half = f"50% of what this site learned alone, for version {SHOWN}"
    assert told("mixture", PersonalState({}, facts)) == [("mixture", half)]
    _, carried = told("mixture", PersonalState({}, {**facts, "carried": True}))
    assert carried == ("", "as found for an earlier version; found anew when the run is over")
    ((_, untrained),) = told("mixture", PersonalState({}, {**facts, "untrained": True}))
    assert untrained.startswith("the encoder as it came")


def test_what_a_fit_came_to_is_said_in_the_layers_words() -> None:
    answers = {name: layer.answers_with for name, layer in LAYERS.items()}
    assert answers["mixture"](made(share=0.25)) == (
        "a mixture, 25% of it what this site learned alone"
    )
    assert answers["mixture"](made(share=0.0, untrained=True)).startswith("the encoder as it came")
    assert answers["query_encoder"](made()) == "this site's own encoder of questions"
    assert answers["query_encoder"](made(changed=False)) == "the shared encoder, as before"


class Halved(Layer):
    """A layer that nobody has heard of: the site answers with half of what is shared."""

    kept = True
    fitted = True

    def fit(self, request: FitRequest) -> Fitted:
        """Half of it."""
        arrays = {self.name: request.shared * np.float32(0.5)}
        return Fitted(made(), PersonalState(arrays, {"kind": self.name}))

    def load(self, retriever: Retriever, shared: Float32, state: PersonalState | None) -> None:
        """Half of it, where it is kept."""
        retriever.load_vector(shared if state is None else state.arrays[self.name])


def test_a_new_layer_needs_its_object_and_two_lines_in_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings take it, jobs fit it, and passages are indexed and judged through it."""
    traits = PersonalTraits(owns_passages=True)
    monkeypatch.setitem(cast(dict[str, PersonalTraits], PERSONAL), "halved", traits)
    monkeypatch.setitem(cast(dict[str, Layer], LAYERS), "halved", Halved("halved"))
    assert RetrieverSettings.model_validate({"personal": "halved"}).personal == "halved"

    words = ["anchor", "barrel", "keeper", "the", "who"]
    spec = RetrieverSpec(
        encoder=str(small_encoder(tmp_path / "encoder", words=words)),
        max_tokens=32,
        device="cpu",
        personal="halved",
        personal_folder=str(tmp_path / "personal"),
    )
    library, versions, indexes = (tmp_path / name for name in ("library", "versions", "index"))
    documents = [Document(word, "", f"the {word} keeper", "train") for word in words[:2]]
    documents.append(Document("judge", "", "the keeper", "valid"))
    learning.ingest(spec, library, documents, [Pair("who the keeper", ("judge",), "valid")], 30)
    digest = learning.write_initial_version(spec, versions)
    before = learning.build_index(spec, library, versions, digest, indexes)
    assert before.name.startswith(digest.hex())

    personal.personalise(spec, library, versions, digest, TrainingOptions(), AskingTerms("exact"))
    after = learning.build_index(spec, library, versions, digest, indexes)
    assert after.name.startswith(embedded_by("halved", spec.personal_folder, digest).hex())
    assert after != before
    retriever = retriever_for(spec)
    load_serving(spec, retriever, versions, digest)
    assert np.array_equal(retriever.vector(), retriever.initial_vector() * np.float32(0.5))
    judged = curve.judge_version(spec, library, versions, indexes, digest, 10)
    assert [one.kind for one in judged] == ["shared", "halved"]
