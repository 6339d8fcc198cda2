"""A federation's language model: its vector in three configurations, and how examples are read."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from daemon.learning.generator.encoding import (
    IGNORED,
    Batch,
    Example,
    Lesson,
    encoded,
    padded_share,
)
from daemon.learning.generator.generator import Generator
from daemon.learning.language_model import LanguageModelError
from daemon.learning.options import LearningError, TrainingError
from daemon.state.versions import VersionError
from tests.daemon.learning.generator.lessons import (
    KINDS,
    SAID,
    answer_loss,
    lessons_of,
    loaded,
    made,
    some_tokens,
)

CONFIGURATIONS = ("lora", "lora_server", "full")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: made(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


def test_a_generator_starts_as_its_base_model(folders: dict[str, Path]) -> None:
    for kind in ("t5", "llama"):
        losses = {
            adapt: answer_loss(one, lessons_of(one))
            for adapt in CONFIGURATIONS
            for one in [loaded(folders[kind], adapt=adapt)]
        }
        assert losses["lora"] == losses["lora_server"] == losses["full"]


@pytest.mark.parametrize("adapt", CONFIGURATIONS)
def test_a_vector_is_loaded_as_it_was_given(folders: dict[str, Path], adapt: str) -> None:
    one, other = (loaded(folders["t5"], adapt=adapt) for _ in range(2))
    start = one.initial_vector()
    assert start.tobytes() == other.initial_vector().tobytes() == one.vector().tobytes()
    moved = start + np.random.default_rng(1).normal(0, 0.1, start.shape).astype(np.float32)
    other.load_vector(moved)
    assert other.vector().tobytes() == moved.tobytes()
    assert answer_loss(other, lessons_of(other)) != answer_loss(one, lessons_of(one))
    with pytest.raises(VersionError, match="values"):
        one.load_vector(start[:-1])


def test_vectors_hold_factors_of_queries_and_values(folders: dict[str, Path]) -> None:
    groups = {kind: dict(loaded(path).shape_manifest.groups) for kind, path in folders.items()}
    ends = {
        kind: {name.partition(".lora_")[0].rpartition(".")[2] for name in names}
        for kind, names in groups.items()
    }
    assert ends == {"t5": {"q", "v"}, "gpt2": {"c_attn"}, "llama": {"q_proj", "v_proj"}}
    # T5: attention of the encoder, of the decoder, and from one to the other; A and B of each.
    assert len(groups["t5"]) == 3 * 2 * 2
    chosen = loaded(folders["llama"], lora_targets=("up_proj", "layers.0.self_attn.o_proj"))
    assert len(chosen.shape_manifest.groups) == (2 + 1) * 2


def test_words_and_norms_stay_as_they_are_where_factors_are_exchanged(
    folders: dict[str, Path],
) -> None:
    names = {
        name for name, _ in loaded(folders["llama"], adapt="lora_server").shape_manifest.groups
    }
    assert names
    assert not [name for name in names if "lm_head" in name or "embed" in name or "norm" in name]
    chosen = loaded(folders["llama"], adapt="lora_server", lora_targets=("q_proj", "v_proj"))
    assert len(chosen.shape_manifest.groups) == 2 * 2 * 2


def test_layers_that_are_not_there_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(LearningError, match="ends with 'query'"):
        loaded(folders["t5"], lora_targets=("q", "query"))
    with pytest.raises(LearningError, match="no linear layers in a 'gpt2'"):
        loaded(folders["gpt2"], adapt="lora_server")


def test_other_bases_and_adaptations_never_add_up(folders: dict[str, Path], tmp_path: Path) -> None:
    same, reworded, retrained = (tmp_path / name for name in ("same", "reworded", "retrained"))
    for path in (same, reworded):
        shutil.copytree(folders["llama"], path)
    template = "{% for turn in messages %}{{ turn['content'] }}{% endfor %}"
    (reworded / "chat_template.jinja").write_text(template)
    torch.manual_seed(1)
    made(retrained, "llama")
    weights = loaded(retrained, adapt="full").language_model.model
    with torch.no_grad():
        next(iter(weights.parameters())).add_(1e-3)
    weights.save_pretrained(retrained, safe_serialization=True)

    def digest(path: Path = folders["llama"], **chosen: Any) -> bytes:
        return loaded(path, **chosen).shape_manifest.digest

    assert digest() == digest(same) == digest(prompt_tokens=32) == digest(lora_dropout=0.1)
    others = [digest(reworded), digest(retrained), digest(lora_rank=4), digest(lora_alpha=32)]
    others += [digest(adapt="full"), digest(adapt="lora_server"), digest(lora_targets=("k_proj",))]
    assert len({digest(), *others}) == 8


def test_what_is_not_read_from_safetensors_is_not_read(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(folders["t5"], tmp_path / "pickled")
    (tmp_path / "pickled/model.safetensors").rename(tmp_path / "pickled/pytorch_model.bin")
    with pytest.raises(LanguageModelError, match="holds no"):
        loaded(tmp_path / "pickled")


def test_a_model_drops_nothing_that_the_federation_did_not_choose(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders["gpt2"], tmp_path / "dropping")
    config = json.loads((folder / "config.json").read_text())
    assert config["resid_pdrop"] > 0
    one = loaded(folder)
    (batch,) = one.batches(lessons_of(one)[:2], 2)
    with one.training(1):
        first, second = one.loss(batch).item(), one.loss(batch).item()
    assert first == second
    dropping = loaded(folder, lora_dropout=0.5)
    dropping.load_vector(dropping.initial_vector() + np.float32(0.1))
    with dropping.training(1):
        first, second = dropping.loss(batch).item(), dropping.loss(batch).item()
    assert first != second


# ---- what is learned ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_lesson_ends_where_the_model_is_to_stop(folders: dict[str, Path], kind: str) -> None:
    one = loaded(folders[kind])
    language, end = one.language_model, one.language_model.tokenizer.eos_token_id
    for example, lesson in zip(SAID, lessons_of(one), strict=True):
        assert lesson.prompt == tuple(language.prompt_ids(example.prompt)), "as it is asked later"
        assert lesson.answer[-1] == end
        written = language.tokenizer.decode(lesson.answer[:-1])
        assert written.strip() == example.answer


@pytest.mark.parametrize("kind", KINDS)
def test_only_answers_are_learned(folders: dict[str, Path], kind: str) -> None:
    one = loaded(folders[kind], adapt="full")
    lessons = lessons_of(one)
    wanted = sum(len(lesson.answer) for lesson in lessons)
    made_batches = one.batches(lessons, 4)
    assert sum(batch.answered for batch in made_batches) == wanted
    answers = {token for lesson in lessons for token in lesson.answer}
    for batch in made_batches:
        assert {*batch.labels[batch.labels != IGNORED].tolist()} <= answers
        # What fills a row up is never looked at.
        loss = one.loss(batch).item()
        if kind != "t5":
            tokens = torch.where(batch.mask == 0, 7, batch.tokens)
            assert one.loss(replace(batch, tokens=tokens)).item() == loss


def test_the_loss_is_the_models_own(folders: dict[str, Path]) -> None:
    for kind in KINDS:
        one = loaded(folders[kind])
        lesson, language = lessons_of(one)[3], one.language_model
        end = language.tokenizer.eos_token
        theirs = language.surprise(SAID[3].prompt, f"{language.behind(SAID[3].answer)}{end}")
        assert answer_loss(one, [lesson]) == pytest.approx(theirs, rel=1e-5)


lengths = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6)), min_size=1, max_size=9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapt", ["lora", "full"])
def test_many_answers_behind_one_prompt_lose_what_each_does_alone(
    folders: dict[str, Path], kind: str, adapt: str
) -> None:
    generator = loaded(folders[kind], adapt=adapt)
    start = generator.initial_vector()
    moved = np.random.default_rng(0).normal(0, 0.1, start.shape).astype(np.float32)
    generator.load_vector(start + moved)
    chance = np.random.default_rng(2)
    prompt = some_tokens(chance, 11)
    lessons = [Lesson(prompt, some_tokens(chance, 1 + n % 7)) for n in range(70)]
    with torch.inference_mode():
        alone = [generator.loss(generator.batches([one], 1)[0]).item() for one in lessons]
    np.testing.assert_allclose(generator.losses(lessons), alone, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(lengths=lengths, seed=st.integers(0, 99), size=st.integers(1, 9))
def test_examples_of_one_row_never_see_each_other(
    generators: dict[str, Generator],
    kind: str,
    lengths: list[tuple[int, int]],
    seed: int,
    size: int,
) -> None:
    one, chance = generators[kind], np.random.default_rng(seed)
    lessons = [
        Lesson(some_tokens(chance, asked), some_tokens(chance, said)) for asked, said in lengths
    ]

    def gradient(parts: list[Batch]) -> tuple[float, torch.Tensor]:
        loss = torch.stack([one.loss(part) for part in parts]).sum()
        grads = torch.autograd.grad(loss, one.parameters())
        return loss.item(), torch.cat([grad.flatten() for grad in grads])

    together, alone = one.batches(lessons, size), [one.batches([each], 1)[0] for each in lessons]
    loss, grad = gradient(together)
    expected, wanted = gradient(alone)
    assert loss == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(grad, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))


@pytest.fixture(scope="module")
def generators(folders: dict[str, Path]) -> dict[str, Generator]:
    """Moved a little: with B at zero, A would have no gradient."""
    found = {}
    for kind, path in folders.items():
        found[kind] = one = loaded(path)
        chance = np.random.default_rng(1)
        start = one.initial_vector()
        one.load_vector(start + chance.normal(0, 0.2, start.shape).astype(np.float32))
    return found


def test_short_examples_share_rows_where_the_model_keeps_them_apart(
    generators: dict[str, Generator],
) -> None:
    assert {kind: one.packs for kind, one in generators.items()} == {
        "t5": False,
        "gpt2": True,
        "llama": True,
    }
    lessons = [Lesson((9,) * 20, (9,) * 4), *[Lesson((9,) * 5, (9,) * 3)] * 6]
    (packed,) = generators["llama"].batches(lessons, 7)
    assert packed.tokens.shape == (3, 24)
    assert padded_share([packed]) == 0.0
    (apart,) = generators["t5"].batches(lessons, 7)
    assert apart.tokens.shape == (7, 20)


def test_a_model_that_mixes_them_up_gets_a_row_for_each(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that reads positions, and attends to all that stands before."""
    from transformers.models.llama import modeling_llama

    def to_all(**given: Any) -> None:
        del given

    monkeypatch.setattr(modeling_llama, "create_causal_mask", to_all)
    assert not loaded(folders["llama"]).packs


# ---- texts that are too long, or none ------------------------------------------------------


def test_an_answer_is_cut_and_has_no_end_then(folders: dict[str, Path]) -> None:
    one = loaded(folders["llama"])
    end = one.language_model.tokenizer.eos_token_id
    taken = encoded(
        one.language_model, [SAID[0], Example("what?", "the pump needs oil " * 9)], 64, 16
    )
    assert taken.cut == 1
    short, long = taken.lessons
    assert (len(long.answer), short.answer[-1] == end, end in long.answer) == (16, True, False)


def test_a_prompt_that_is_too_long_is_left_out_and_counted(folders: dict[str, Path]) -> None:
    one = loaded(folders["t5"])
    said = [*SAID, Example("why? " * 200, "so"), Example("why?", "  "), Example("", "so")]
    taken = encoded(one.language_model, said, 64, 16)
    assert (len(taken.lessons), taken.left_out) == (len(SAID), 3)
    with pytest.raises(
        TrainingError, match=r"none of this site's 1 .*raise generator.prompt_tokens"
    ):
        encoded(one.language_model, said[-3:-2], 64, 16)
    with pytest.raises(TrainingError, match="none of this site's 0 "):
        encoded(one.language_model, [], 64, 16)


def test_more_than_the_model_reads_is_refused_with_what_to_lower(
    folders: dict[str, Path],
) -> None:
    one = loaded(folders["gpt2"])
    with pytest.raises(TrainingError, match=r"room for a prompt of 1008 .*lower generator.prompt"):
        encoded(one.language_model, SAID, 1009, 16)
