"""What is asked over the control socket is within its bounds, or no method sees it."""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from config.loading import load
from daemon.control.context import _RULES, WithinBounds
from daemon.control.library import _first_time, _Lost, _with_errors
from daemon.control.library_messages import parsed, waiting_of
from daemon.control.training import TrainingCalls
from daemon.control.unparsed import TooManyParts, count_parts
from daemon.library.folders import Folder
from daemon.library.readers.documents import (
    MAX_ID,
    MAX_QUERY_BYTES,
    MAX_SPANS,
    MAX_TEXT_BYTES,
    MAX_TITLE,
    Pair,
)
from proto import control_pb2 as control
from proto import control_pb2_grpc as rpc

NAN = float("nan")


class Reached(rpc.ControlServicer):
    """Stands where fedd's methods do, and notes what came through."""

    def __init__(self) -> None:
        self.seen: list[Message] = []

    async def Train(self, request: Any, _context: Any) -> control.TrainReply:
        self.seen.append(request)
        return control.TrainReply()

    async def Privacy(self, request: Any, _context: Any) -> control.PrivacyReply:
        self.seen.append(request)
        return control.PrivacyReply()

    async def AuditEmbeddings(
        self, request: Any, _context: Any
    ) -> AsyncIterator[control.AuditEmbeddingsProgress]:
        self.seen.append(request)
        for step in ("texts", "done"):
            yield control.AuditEmbeddingsProgress(step=step)

    async def Ingest(
        self, requests: AsyncIterator[control.IngestRequest], _context: Any
    ) -> AsyncIterator[control.IngestProgress]:
        async for request in requests:
            self.seen.append(request)
            yield control.IngestProgress()


@asynccontextmanager
async def served(servicer: Any, folder: Path) -> AsyncIterator[rpc.ControlAsyncStub]:
    server = grpc.aio.server(interceptors=[WithinBounds()])
    rpc.add_ControlServicer_to_server(servicer, server)
    server.add_insecure_port(f"unix:{folder}/socket")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{folder}/socket") as channel:
        yield rpc.ControlStub(channel)
    await server.stop(0)


@pytest.fixture
async def reached(tmp_path: Path) -> AsyncIterator[tuple[Reached, rpc.ControlAsyncStub]]:
    servicer = Reached()  # type: ignore[abstract]  # what is not here answers: unimplemented
    async with served(servicer, tmp_path) as stub:
        yield servicer, stub


async def ask(stub: Any, request: Message) -> list[Any]:
    call = getattr(stub, type(request).__name__.removesuffix("Request"))(request)
    return [reply async for reply in call] if hasattr(call, "__aiter__") else [await call]


Train, Privacy = control.TrainRequest, control.PrivacyRequest
Audit, Search = control.AuditEmbeddingsRequest, control.SearchRequest


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (Train(), "rounds is 0; expected 1 .. 10000"),
        (Train(rounds=10_001), "rounds is 10001; expected 1 .. 10000"),
        (Train(rounds=1, epsilon=NAN), "epsilon is nan; expected 0 .. 1e+06"),
        (Train(rounds=1, choices=["a=b"] * 65), "choices is 65 long; expected 0 .. 64"),
        (Train(rounds=1, choices=["a=1\nb=2"]), "choices[0] is 'a=1\\nb=2'; expected printable"),
        (Train(rounds=1, choices=["a=" + "[" * 200]), "choices[0] is 202 characters long"),
        (Privacy(rounds=10_001), "rounds is 10001"),
        (Privacy(noise_multiplier=-1), "noise_multiplier is -1.0; expected 0 .. 1000"),
        (control.AskRequest(top_k=101), "top_k is 101; expected 0 .. 100"),
        (Search(begins="x" * 513), "begins is 513 characters long"),
        (Search(collection="x" * 102), "collection is 102 characters long"),
        (Search(author="x" * 1001), "author is 1001 characters long"),
        (Search(since="2024-5-1"), "since is '2024-5-1'; expected a day as 2024-05-31"),
        (Search(until="2024-05-01T00"), "until is '2024-05-01T00'"),
        (Search(language="deu"), "language is 'deu'; expected two small letters, as en or de"),
        (Search(tags=["x"] * 51), "tags is 51 long; expected 0 .. 50"),
        (Search(tags=[""]), "tags[0] is 0 characters long"),
        (Audit(noises=[NAN]), "noises[0] is nan; expected 0.001 .. 100"),
        (Audit(epsilons=[1, 0]), "epsilons[1] is 0.0; expected 0.01 .. 1e+06"),
        (Audit(bits=[257]), "bits[0] is 257; expected 1 .. 256"),
        (Audit(minutes=NAN), "minutes is nan; expected 0 .. 1440"),
        (Audit(show=21), "show is 21; expected 0 .. 20"),
    ],
)
async def test_what_is_out_of_bounds_reaches_no_method(
    reached: tuple[Reached, rpc.ControlAsyncStub], request_: Message, why: str
) -> None:
    servicer, stub = reached
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ask(stub, request_)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert why in str(refused.value.details())
    assert servicer.seen == []


@pytest.mark.parametrize("wish", [{"recipe": "nix"}, {"choices": ["foo=1"]}])
async def test_a_choice_that_there_is_not_is_an_invalid_argument(
    tmp_path: Path, wish: dict[str, Any]
) -> None:
    settings = tmp_path / "fedd.toml"
    settings.write_text("")
    settings_read = load(settings)
    driver = SimpleNamespace(model="retriever")
    around = SimpleNamespace(
        driver=driver, driver_of=lambda _: driver, audit=None, settings=settings_read
    )
    calls: Any = TrainingCalls
    async with served(calls(around, "uid:0"), tmp_path) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match=r"no recipe|no choice") as refused:
            await stub.Train(Train(rounds=1, **wish))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


LIES: list[dict[str, Any]] = [
    {"author": "a" * (MAX_TITLE + 1)},
    {"author": "a\x1b]0;title\x07"},
    {"author": " a"},
    {"date": "2023-02-29"},
    {"date": "2023-2-1"},
    {"date": "today"},
    {"date": "２０２３-01-01"},
    {"language": "english"},
    {"language": "EN"},
]


def test_each_document_and_pair_has_its_bounds() -> None:
    """A row of many megabytes would slow down every look into the library from then on."""
    request = control.IngestRequest(
        documents=[
            control.Document(id="x", title="t" * (MAX_TITLE + 1), text="x"),
            control.Document(id="x", title="t", text="x" * (MAX_TEXT_BYTES + 1)),
            control.Document(id="x", text="x", spans=[control.Span(end=1)] * (MAX_SPANS + 1)),
            control.Document(id="good", title="t" * MAX_TITLE, text="x"),
            *(control.Document(id="y", text="x", **said) for said in LIES),
            control.Document(id="z", text="x", tags=control.Tags(tags=map(str, range(51)))),
            control.Document(id="z", text="x", tags=control.Tags(tags=["x" * 101])),
            control.Document(id="z", text="x", tags=control.Tags(tags=["a\nb"])),
        ],
        pairs=[
            control.Pair(query="q" * (MAX_QUERY_BYTES + 1), positives=["x"], split="train"),
            control.Pair(query="q" * MAX_QUERY_BYTES, positives=["x"], split="train"),
            control.Pair(query="q", positives=["x", "y" * (MAX_ID + 1)], split="train"),
            *(
                control.Pair(query="q", positives=["x"], split="test", reference=said)
                for said in (
                    control.Reference(answers=["x"] * 21),
                    control.Reference(answers=["x" * ((8 << 10) + 1)]),
                    control.Reference(answers=["x", " "]),
                    control.Reference(qtype="q" * 65),
                    control.Reference(reasoning="a\nb"),
                )
            ),
        ],
    )
    documents, pairs, errors = parsed(request)
    assert [document.id for document in documents] == ["good"]
    assert len(pairs) == 1
    assert len(errors) == 5 + len(LIES) + 3 + 5
    assert errors[2] == "document x: more than 100,000 spans: cut it"


@pytest.mark.parametrize(
    "spans",
    [
        [(0, 3), (7, 8)],  # "two" is in none
        [(4, 7), (0, 3)],
        [(0, 5), (4, 8)],
        [(0, 9)],
        [(0, 8, "poem")],
        [(0, 8, "text", (0.0, 0.0, 1.5, 1.0))],
        [(0, 8, "text", (0.0,))],
    ],
)
def test_blocks_follow_one_another_and_leave_nothing_out(spans: list[tuple[Any, ...]]) -> None:
    names = ("begin", "end", "kind", "place")
    told = [
        control.Span(**{"kind": "text", **dict(zip(names, one, strict=False))}) for one in spans
    ]
    good = [control.Span(kind="text", begin=b, end=e) for b, e in ((0, 3), (4, 8))]
    documents = [
        control.Document(id=n, text="one two.", spans=s) for n, s in (("x", told), ("y", good))
    ]
    taken, _, errors = parsed(control.IngestRequest(documents=documents))
    assert [document.id for document in taken] == ["y"]
    (error,) = errors
    assert error.startswith("document x: its spans don't lie in its text one after another")


@pytest.mark.slow
def test_of_pairs_without_a_document_so_many_are_kept_in_mind() -> None:
    """A stream may go on for as long as it likes."""
    lost, told = _Lost(), set[int]()
    for batch in range(4):
        names = [(f"{batch}-{number}", "absent") for number in range(100_000)]
        pairs = [Pair("q" * 100, positives, "train") for positives in names]
        assert _first_time(pairs, told) == pairs
        lost.add(pairs)
    assert (len(lost.sought), lost.given_up) == (1 << 17, 400_000 - (1 << 17))
    assert lost.sought[0] == Pair("", ("0-0", "absent"))
    full = set(range(1 << 20))
    assert _first_time(pairs, full) == _first_time(pairs, full) == pairs
    assert len(full) == 1 << 20


def test_a_batch_of_nothing_but_errors_is_answered_within_bounds() -> None:
    errors = [f"line {number}" for number in range(2500)]
    told = _with_errors(control.IngestProgress(), errors).errors
    assert told == [*errors[:1000], "and 1500 more of this batch"]


async def test_a_call_that_there_is_not_is_unimplemented(tmp_path: Path) -> None:
    server = grpc.aio.server(interceptors=[WithinBounds()])
    server.add_insecure_port(f"unix:{tmp_path}/socket")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/socket") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rpc.ControlStub(channel).Train(Train(rounds=1))
    await server.stop(0)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("items", ["documents", "pairs"])
async def test_a_batch_of_many_empty_items_is_refused_before_it_is_looked_into(
    reached: tuple[Reached, rpc.ControlAsyncStub], items: str
) -> None:
    """Five million of them fit a message, and cost the daemon two gigabytes and a minute."""
    servicer, stub = reached
    kind = {"documents": control.Document, "pairs": control.Pair}[items]
    fields: list[dict[str, Any]] = [{items: [kind()] * n} for n in (10_000, 10_001)]
    good, many = (control.IngestRequest(**one) for one in fields)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in stub.Ingest(iter([good, many])):
            pass
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"{items} is 10001 long; expected 0 .. 10000" in str(refused.value.details())
    assert servicer.seen == [good]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["documents", "spans", "tags", "ids"])
async def test_a_request_of_many_empty_parts_is_refused_before_it_is_parsed(
    reached: tuple[Reached, rpc.ControlAsyncStub], where: str
) -> None:
    """Two bytes each on the wire, and a hundred times that in memory."""
    servicer, stub = reached
    tags = control.Tags(tags=[""] * 600_000)
    many: dict[str, Message] = {
        "documents": control.IngestRequest(documents=[control.Document()] * 600_000),
        "spans": control.IngestRequest(
            documents=[control.Document(spans=[control.Span()] * 300_000)] * 2
        ),
        "tags": control.IngestRequest(documents=[control.Document(tags=tags)]),
        "ids": control.RemoveDocumentsRequest(ids=[""] * 600_000),
    }
    request: Any = many[where]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        if where == "ids":
            async for _ in stub.RemoveDocuments(request):
                pass
        else:
            async for _ in stub.Ingest(iter([request])):
                pass
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "more than 500,000 parts in a request" in str(refused.value.details())
    assert servicer.seen == []


@given(st.binary(max_size=200))
def test_any_bytes_are_counted_or_refused(raw: bytes) -> None:
    kind = control.IngestRequest.DESCRIPTOR
    with suppress(TooManyParts):
        assert 0 <= count_parts(raw, kind) <= len(raw)


def test_as_many_parts_as_a_document_may_have_are_let_through() -> None:
    spans = [control.Span(begin=n, end=n + 1, place=[0, 0, 1, 1]) for n in range(1000)]
    request = control.IngestRequest(
        documents=[control.Document(id="a", spans=spans, tags=control.Tags(tags=["b"] * 5))]
    )
    assert count_parts(request.SerializeToString(), request.DESCRIPTOR) == 1 + 1 + 1000 + 1 + 5


def test_an_id_may_have_any_characters_of_a_files_name() -> None:
    """What is here by such a name has to be shown and removed by it."""
    name = "Report\N{NO-BREAK SPACE}2024\n\x1b[2J.pdf"
    for request in (
        control.ShowDocumentRequest(id=name),
        control.OriginalRequest(id=name),
        control.PageImageRequest(id=name, page=1, dpi=100),
        control.RemoveDocumentsRequest(ids=[name]),
        control.ListDocumentsRequest(begins=name, after=name, limit=1),
        control.ListWaitingRequest(begins=name, after=name, limit=1),
        control.ExportDocumentsRequest(begins=name, ids=[name]),
        control.SearchRequest(question="a", begins=name),
    ):
        for field, rule in _RULES[request.DESCRIPTOR.name].items():
            rule(field, getattr(request, field))


async def test_what_is_within_its_bounds_is_answered(
    reached: tuple[Reached, rpc.ControlAsyncStub],
) -> None:
    servicer, stub = reached
    good = [Train(rounds=10_000, epsilon=8), Privacy(), Audit(noises=[0.001], bits=[256], show=20)]
    answers = [await ask(stub, request) for request in good]
    assert [len(answer) for answer in answers] == [1, 1, 2]
    batches = [control.IngestRequest(), control.IngestRequest()]
    assert len([step async for step in stub.Ingest(iter(batches))]) == 2
    assert servicer.seen == [*good, *batches]


def test_what_comes_from_elsewhere_is_not_put_where_a_folder_is_watched() -> None:
    """The folder's next look would replace it, and nobody would know."""
    watched = [Folder("contracts", Path("/srv/contracts"))]
    documents = [
        control.Document(id=name, text="one two.", source=source)
        for name, source in (
            ("contracts/lease.txt", "/home/ada/lease.txt"),
            ("contracts/lease.txt", "/srv/contracts/lease.txt"),
            ("contracts-2/lease.txt", "/home/ada/lease.txt"),
            ("contracts/lease.txt", "/srv/contracts/../ada/lease.txt"),
        )
    ]
    taken, _, errors = parsed(control.IngestRequest(documents=documents), watched)
    assert [document.source for document in taken] == [
        *("/srv/contracts/lease.txt", "/home/ada/lease.txt")
    ]
    assert (
        errors
        == [
            "document contracts/lease.txt: contracts is the collection of the watched folder "
            "/srv/contracts: put it there, or give another --collection"
        ]
        * 2
    )
    pages = control.WaitingPages(
        document_id="contracts/scan.pdf", pages="1", source="/home/ada/scan.pdf"
    )
    waiting, errors = waiting_of(control.IngestRequest(waiting=[pages]), watched)
    assert (waiting, len(errors)) == ([], 1)
    assert "contracts is the collection of the watched folder" in errors[0]
