"""Real language models, taught on the spot to answer from the demo's documents with a citation.

Both kinds that transformers knows, with a tokenizer of their own: one from text to text (T5) and
a causal one (Llama) with a template for conversations. They know a few questions by heart; all
else is as with a large one: loaded from a folder, prompted, sampled, checked.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from daemon.answering import transformers_model
from daemon.answering.generator import (
    AS_SET,
    Asking,
    FilledPrompt,
    GeneratedAnswer,
    Generator,
    Told,
)
from daemon.answering.options import AnsweringOptions
from daemon.answering.prompts.prompts import prompt
from daemon.answering.statements.support import Wording
from daemon.answering.written import WrittenGenerator
from daemon.jobs import answering
from daemon.learning.language_model import LanguageModel, LanguageModelError
from daemon.library.contents import Passage
from daemon.library.passages import sentences
from daemon.library.search import Ranked
from daemon.process import workers
from daemon.process.chat_client import Sampling
from daemon.process.workers import GivenUp
from tests.support.small_models import small, tokenizer_of

pytestmark = pytest.mark.slow  # it loads transformers and trains

CORPUS = Path(answering.__file__).parents[1] / "fedctl" / "demo" / "corpus" / "tarrow"
LESSONS = 4
OPTIONS: dict[str, Any] = {"prompt": "novel", "prompt_tokens": 900, "new_tokens": 64}
TURNS = (
    "{% for turn in messages %}<|user|>{{ turn['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|answer|>{% endif %}"
)


@dataclass(frozen=True)
class Lesson:
    """A question of the demo, two passages, and the sentence of the right one with its [n]."""

    question: str
    passages: list[Ranked]
    answer: str
    document: str


def lessons() -> list[Lesson]:
    documents = {one["id"]: one for one in _rows("documents.jsonl")}
    names = list(documents)
    made: list[Lesson] = []
    for number, pair in enumerate(_rows("pairs_train.jsonl")[: 3 * LESSONS : 3]):
        (name, *_) = pair["positives"]
        other = names[(names.index(name) + 7) % len(names)]
        order = [name, other] if number % 2 else [other, name]
        passages = [
            Ranked(
                Passage(
                    n, f"p{n}", one, documents[one]["title"], _begin(documents[one]["text"]), page=n
                ),
                1 / n,
            )
            for n, one in enumerate(order, start=1)
        ]
        asked = Wording.of(pair["query"]).stems
        right = order.index(name)
        best = max(
            sentences(passages[right].passage.text),
            key=lambda one: len(Wording.of(one).stems & asked),
        )
        made.append(Lesson(pair["query"], passages, f"{best[:-1]} [{right + 1}].", name))
    return made


def _rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (CORPUS / name).read_text().splitlines()]


def _begin(text: str) -> str:
    return " ".join(sentences(text)[:2])


def asked(lesson: Lesson) -> str:
    passages = [one.passage for one in lesson.passages]
    text, given = prompt("novel", lesson.question, passages, 10_000, len)
    assert given == 2
    return text


@contextmanager
def one_thread() -> Iterator[None]:
    """Several wait for one another longer than they work, where others work, too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def taught(folder: Path, kind: str) -> Path:
    """Trained until it knows the answers by heart; its folder."""
    taken = lessons()
    texts = [asked(one) for one in taken]
    tokenizer = tokenizer_of([*texts, *(one.answer for one in taken)])
    if kind == "llama":
        tokenizer.chat_template = TURNS
    with torch.random.fork_rng(), one_thread():
        torch.manual_seed(1)
        model = small(kind, tokenizer).train()
        read = LanguageModel(model, tokenizer)
        rows = [torch.tensor(read.prompt_ids(text)) for text in texts]
        ends = [
            torch.tensor([*tokenizer(one.answer)["input_ids"], tokenizer.eos_token_id])
            for one in taken
        ]
        if kind == "llama":
            labels = [
                torch.cat([torch.full_like(row, -100), end])
                for row, end in zip(rows, ends, strict=True)
            ]
            rows = [torch.cat(both) for both in zip(rows, ends, strict=True)]
        else:
            labels = ends
        padded = torch.nn.utils.rnn.pad_sequence(rows, True, tokenizer.pad_token_id)
        target = torch.nn.utils.rnn.pad_sequence(labels, True, -100)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], True)
        optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
        for _ in range(300):
            loss = model(input_ids=padded, attention_mask=mask, labels=target).loss
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            if loss.item() < 0.02:
                break
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["t5", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return taught(tmp_path_factory.mktemp(request.param), request.param)


class Silent:
    """Stands in with nothing, so that a test sees who answered."""

    def filled(self, _kind: str, _question: str, _passages: Sequence[Ranked]) -> FilledPrompt:
        return FilledPrompt("", 0, 0)

    def generate(
        self,
        question: str,
        passages: Sequence[Ranked],
        how: Asking = AS_SET,  # noqa: ARG002
        told: Told | None = None,  # noqa: ARG002
    ) -> GeneratedAnswer:
        return GeneratedAnswer(f"nothing for {question!r} of {len(passages)} passages", ())


def generator(folder: Path, otherwise: Generator, **options: Any) -> WrittenGenerator:
    chosen = AnsweringOptions(
        generator="transformers",
        language_model=str(folder),
        device="cpu",
        **{**OPTIONS, "answer_within_s": 100.0, **options},
    )
    return WrittenGenerator(lambda: transformers_model.model(chosen), otherwise, chosen)


def test_it_copies_the_right_sentence_and_cites_it(folder: Path) -> None:
    writing = generator(folder, Silent())
    for lesson in lessons():
        given = writing.generate(lesson.question, lesson.passages)
        assert not given.instead, given.text
        assert given == writing.generate(lesson.question, lesson.passages), "the same each time"
        sentence, _ = lesson.answer.rsplit(" [", 1)
        assert given.text == f"{sentence}. [1]"
        (citation,) = given.citations
        assert citation.document_id == lesson.document
        assert citation.text == f"{sentence}."


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao: install hanse[eight-bit]")
def test_in_eight_bits_it_copies_them_too_in_a_fourth_of_the_memory(folder: Path) -> None:
    whole, small = LanguageModel.load(folder), LanguageModel.load(folder, eight_bit=True)
    assert linear_bytes(small) < 0.3 * linear_bytes(whole)
    writing = generator(folder, Silent(), eight_bit=True)
    for lesson in lessons():
        given = writing.generate(lesson.question, lesson.passages)
        sentence, _ = lesson.answer.rsplit(" [", 1)
        assert (given.text, given.instead) == (f"{sentence}. [1]", "")


@pytest.mark.skipif(find_spec("torchao") is not None, reason="torchao is installed")
def test_without_what_keeps_eight_bits_it_is_said_how_to_get_it(folder: Path) -> None:
    with pytest.raises(LanguageModelError, match=r"install hanse\[eight-bit\]"):
        LanguageModel.load(folder, eight_bit=True)


def linear_bytes(model: LanguageModel) -> int:
    """Of the weights of all linear layers, scales included."""
    layers = [one for one in model.model.modules() if isinstance(one, torch.nn.Linear)]
    parts = [getattr(one.weight, "tensor_data_names", None) for one in layers]
    assert layers
    return sum(
        sum(getattr(one.weight, name).nbytes for name in names) if names else one.weight.nbytes
        for one, names in zip(layers, parts, strict=True)
    )


def test_what_it_can_not_do_in_time_or_in_its_room_is_refused(folder: Path) -> None:
    model = LanguageModel.load(folder)
    text = asked(lessons()[0])
    assert model.count(text) > 100
    assert {"<pad>", "<s>", "</s>", "<|end|>"} <= set(model.special_tokens)
    with pytest.raises(LanguageModelError, match="took more than"):
        model.write(text, Sampling(64), within_s=1e-9)
    if model.room(64) < 1024:
        with pytest.raises(LanguageModelError, match=r"a prompt has .* the model room for 960"):
            model.write("oil " * 2000, Sampling(64))
        with pytest.raises(LanguageModelError, match=r"no room for a prompt beside 1024"):
            model.write(text, Sampling(1024))


def test_it_is_heard_while_it_writes_and_stops_where_nobody_waits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = LanguageModel.load(folder), asked(lessons()[0])
    heard: list[str] = []
    whole = model.write(text, Sampling(64), told=heard.append)
    assert heard[-1] == whole
    assert len(heard) > 10
    assert all(whole.startswith(one) for one in heard)
    few: list[str] = []

    def hear(so_far: str) -> None:
        few.append(so_far)
        if len(few) == 3:  # as a worker's thread hears it
            monkeypatch.setattr(workers, "_given_up", workers._call)

    with pytest.raises(GivenUp):
        model.write(text, Sampling(64), told=hear)
    assert few == heard[:3]


def test_what_was_learned_by_heart_is_foretold_better_than_what_was_not(folder: Path) -> None:
    """The one that is right is as if written; of several the likeliest counts."""
    writing, model = generator(folder, Silent()), LanguageModel.load(folder)
    one, other = lessons()[:2]
    how = Asking(measured=True, references=(other.answer, one.answer))
    given = writing.generate(one.question, one.passages, how)
    assert given.likelihood is not None and given.likelihood.written is not None
    assert given.likelihood.written < 0.5
    assert given.likelihood.reference is not None
    assert given.likelihood.reference < model.surprise(asked(one), other.answer)
    assert writing.generate(one.question, one.passages).likelihood is None, "nobody asked"


def test_surprise_is_the_model_s_own_loss_over_the_text_alone(folder: Path) -> None:
    model = LanguageModel.load(folder)
    text, said = asked(lessons()[0]), " whale oil " * 40
    ids = model.prompt_ids(text)
    more = model.tokenizer(said, add_special_tokens=False)["input_ids"]
    assert len(more) > 64, "more than are looked at together"
    if model.to_text:
        rows, labels = torch.tensor([ids]), torch.tensor([more])
    else:
        rows, labels = torch.tensor([ids + more]), torch.tensor([[-100] * len(ids) + more])
    loss = model.model(input_ids=rows, labels=labels).loss
    assert model.surprise(text, said) == pytest.approx(float(loss), rel=1e-4)
    with pytest.raises(LanguageModelError, match="no token to foretell"):
        model.surprise(text, "")


def test_only_the_likeliest_token_is_drawn_where_one_may_be(folder: Path) -> None:
    model = LanguageModel.load(folder)
    text = asked(lessons()[0])
    greedy = model.write(text, Sampling(12))
    assert model.write(text, Sampling(12, 2.0, 1.0, top_k=1, seed=1)) == greedy
    if not model.to_text:  # to the other kind the prompt's words are none that stand there
        assert model.write(text, Sampling(12, repetition=2.0)) != greedy, "of the passage's words"


def test_a_draw_is_of_its_seed_and_leaves_others_alone(folder: Path) -> None:
    model = LanguageModel.load(folder)
    wild = Sampling(12, temperature=2.0, top_p=1.0, seed=3)
    torch.manual_seed(5)
    undisturbed = torch.rand(1)
    torch.manual_seed(5)
    drawn = [model.write("lamp", wild) for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert torch.rand(1) == undisturbed
    other = [model.write("lamp", Sampling(12, 2.0, 1.0, seed=seed)) for seed in range(8)]
    assert len(set(other)) > 1


def test_what_lacks_weights_or_brings_code_is_refused(folder: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied)
    weights = load_file(copied / "model.safetensors")
    gone = next(name for name in weights if "layers.0" in name or "block.0" in name)
    save_file(
        {name: one for name, one in weights.items() if name != gone},
        copied / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(LanguageModelError, match="was not trained to write"):
        LanguageModel.load(copied)
    ran = tmp_path / "ran"
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "stranger"
    config["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (copied / "config.json").write_text(json.dumps(config))
    (copied / "code.py").write_text(f"open({str(ran)!r}, 'w').write('x')\n")
    with pytest.raises(LanguageModelError, match="cannot load the language model"):
        LanguageModel.load(copied)
    assert not ran.exists()
