"""Queries written by real language models: one behind a socket, one trained on the spot."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.jobs.pairs import PairPlan, build_pairs
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.passages import SentenceSplitter
from daemon.library.readers.documents import Document
from daemon.library.store import Library
from daemon.pairs import made
from daemon.pairs.made import PairError
from daemon.pairs.replies import Remembered
from daemon.pairs.writers import LocalModel, LocalServer
from daemon.pairs.writing import queries_of
from tests.support.small_models import Letters, small_encoder

Reply = Callable[[dict[str, object]], tuple[int, bytes]]


@contextmanager
def serving(reply: Reply) -> Iterator[tuple[str, list[dict[str, object]]]]:
    """A server of somebody else's on a loopback port; its address and what it was asked."""
    asked: list[dict[str, object]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append({"path": self.path, **body})
            status, data = reply(body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with suppress(ConnectionError):  # nobody waits for it any more
                self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def completion(text: object) -> tuple[int, bytes]:
    return 200, json.dumps({"choices": [{"message": {"content": text}}]}).encode()


def about(body: dict[str, object]) -> str:
    """The passage in a prompt."""
    messages = body["messages"]
    assert isinstance(messages, list)
    prompt: str = messages[0]["content"]
    return prompt.split("Passage: ")[1].split("\n")[0]


# ---- behind a socket --------------------------------------------------------------------------


def test_a_local_server_is_asked_in_the_common_language() -> None:
    with serving(lambda body: completion(f"what of {about(body)}")) as (url, asked):
        (reply,) = LocalServer(url, "tiny").write(["Passage: gout\n"])
    assert reply == "what of gout"
    assert asked[0]["path"] == "/v1/chat/completions"
    assert (asked[0]["model"], asked[0]["temperature"]) == ("tiny", 0)


@pytest.mark.parametrize(
    "url",
    [
        "http://192.168.0.7:80/v1",
        "http://models.example.org:80/v1",
        "http://127.0.0.1.example.org:80/v1",
        "http://127.0.0.1@example.org:80/v1",
        "https://127.0.0.1:443/v1",
        "http://0.0.0.0:80/v1",
        "http://127.0.0.1/v1",
        "file:///etc/passwd",
        "",
    ],
)
def test_a_passage_is_sent_to_this_machine_alone(url: str) -> None:
    with pytest.raises(PairError, match="no server on this machine"):
        LocalServer(url, "m")


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        ((500, b"out of memory"), "answered 500: see its own log"),
        ((302, b""), "answered 302"),
        ((200, b"not json"), "no chat completion"),
        ((200, b'{"choices": []}'), "no chat completion"),
        ((200, b"[" * 100_000), "no chat completion"),
        ((200, b" " * ((1 << 20) + 1)), "more than 1 MiB"),
    ],
)
def test_a_server_that_answers_nonsense_is_named(reply: tuple[int, bytes], cause: str) -> None:
    with serving(lambda _: reply) as (url, _), pytest.raises(PairError, match=cause):
        list(LocalServer(url, "m").write(["x"]))


def test_a_server_that_is_silent_or_gone_is_named() -> None:
    released = threading.Event()

    def silent(_: object) -> tuple[int, bytes]:
        released.wait(10)
        return completion("late")

    with serving(silent) as (url, _):
        with pytest.raises(PairError, match="did not answer"):
            list(LocalServer(url, "m", within_s=0.2).write(["x"]))
        released.set()
    with pytest.raises(PairError, match="did not answer"):
        list(LocalServer(url, "m").write(["x"]))


def test_a_reply_without_text_makes_no_query() -> None:
    with serving(lambda _: completion(None)) as (url, _):
        assert list(LocalServer(url, "m").write(["x"])) == [""]


def test_written_queries_take_the_round_trip_and_stay_with_what_is_learned(
    tmp_path: Path,
) -> None:
    """An obliging model, but for one passage, of which it asks about another."""
    texts = {
        "a": "amber ants always act",
        "b": "brown bees buzz by",
        "c": "clever cats can climb",
        "d": "dull dogs do dig",
        "e": "eager eels eat eggs",
    }
    spec = RetrieverSpec(
        encoder=str(small_encoder(tmp_path / "encoder", " ".join(texts.values()).split())),
        max_tokens=32,
    )
    library = tmp_path / "library.sqlite"
    with Library.open(library) as opened:
        opened.put_documents(
            [Document(n, "", t, "test" if n == "e" else "train") for n, t in texts.items()],
            splitter=SentenceSplitter(lambda text: len(text.split()), 100),
        )

    def write(body: dict[str, object]) -> tuple[int, bytes]:
        text = about(body)
        if text == texts["d"]:
            text = texts["a"]
        return completion(f"1. {text}\n2. {text.upper()}\n3. too short")

    plan = PairPlan(how="llm", a_passage=2, top_k=1)
    with serving(write) as (url, asked):
        counts = build_pairs(
            spec,
            library,
            tmp_path / "made.jsonl",
            PairPlan(**{**plan.__dict__, "model": f"{url}#m"}),
        )
    pairs = {pair.query: pair for pair in made.read(tmp_path / "made.jsonl")}
    assert set(pairs) == {texts[name] for name in "abc"}
    assert pairs[texts["a"]].documents == ("a",)
    assert {about(body) for body in asked} == {texts[name] for name in "abcd"}, "e is held out"
    assert (counts.passages, counts.made, counts.repeated, counts.lost) == (4, 3, 3, 2)


# ---- kept through interruptions ---------------------------------------------------------------


class Echo:
    """Says what it was asked, and counts."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def write(self, prompts: Sequence[str]) -> Iterator[str]:
        for prompt in prompts:
            self.asked.append(prompt)
            yield prompt.upper()


@pytest.mark.slow
@given(
    prompts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=6),
    cut=st.integers(1, 40),
)
@settings(max_examples=40, deadline=None)
def test_what_was_written_is_not_asked_for_again_wherever_a_crash_cut_it(
    prompts: list[str], cut: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, echo = Path(folder) / "replies.jsonl", Echo()
        replies = [prompt.upper() for prompt in prompts]
        assert list(Remembered(path, "m", lambda: echo).write(prompts)) == replies
        assert echo.asked == list(dict.fromkeys(prompts)), "each once"
        again = Echo()
        assert list(Remembered(path, "m", lambda: again).write(prompts)) == replies
        assert again.asked == []
        if prompts:
            path.write_bytes(path.read_bytes()[:-cut])
            assert list(Remembered(path, "m", lambda: again).write(prompts)) == replies
            assert again.asked == list(dict.fromkeys(prompts))[-len(again.asked) :]
            assert again.asked, "the last line was cut at least"
            assert list(Remembered(path, "m", Echo).write(prompts)) == replies


def test_another_model_is_asked_anew_and_a_long_reply_is_cut(tmp_path: Path) -> None:
    path, echo = tmp_path / "replies.jsonl", Echo()
    (first,) = Remembered(path, "m", lambda: echo).write(["x" * 20_000])
    (again,) = Remembered(path, "m", Echo).write(["x" * 20_000])
    assert first == again == "X" * 16_384
    assert not Remembered(path, "other", Echo).knows("x" * 20_000)


# ---- in this process --------------------------------------------------------------------------


def test_a_small_model_trained_on_the_spot_writes_queries(tmp_path: Path) -> None:
    """A real causal model, taught to ask about two passages, loaded from its folder."""
    lessons = {"gout hurts": "1. what does hurt so", "acne itches": "1. what may itch\n2. why"}
    writer = LocalModel.load(_taught(tmp_path / "model", lessons), new_tokens=24)
    replies = list(writer.write(list(lessons)))
    assert replies == list(lessons.values()), "the prompt is cut off, the end is the end"
    assert [queries_of(reply) for reply in replies] == [["what does hurt so"], ["what may itch"]]
    with pytest.raises(PairError, match="room for 40"):
        list(writer.write(["x" * 41]))


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PairError, match=r"no \*\.safetensors"):
        LocalModel.load(tmp_path)


def _taught(folder: Path, lessons: dict[str, str]) -> Path:
    """Train a GPT-2 of 20,000 weights until it answers each prompt by heart; its folder."""
    from transformers import GPT2Config, GPT2LMHeadModel  # seconds, of each of pytest's processes

    tokenizer = Letters().tokenizer
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=64,
        n_embd=32,
        n_layer=1,
        n_head=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config).eval()  # without dropout
        rows, labels = [], []
        for asked, reply in lessons.items():
            start = [tokenizer.bos_token_id, *tokenizer(asked)["input_ids"]]
            end = [*tokenizer(reply)["input_ids"], tokenizer.eos_token_id]
            rows.append(torch.tensor(start + end))
            labels.append(torch.tensor([-100] * len(start) + end))
        optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(r) for r in rows], True)
        target = torch.nn.utils.rnn.pad_sequence(labels, True, padding_value=-100)
        for _ in range(300):
            loss = model(input_ids=padded, attention_mask=mask, labels=target).loss
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            if loss.item() < 0.02:
                break
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
    return folder
