"""Files that are kept, over the control socket: what is asked for, what is refused, who learns."""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import io
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from PIL import Image

from daemon.library.catalogue.originals import folder_of
from proto import control_pb2 as control
from tests.daemon.control.test_export import Site, site
from tests.daemon.library.readers.pdf_files import HEIGHT, SENTENCE, WIDTH, lines, made
from tests.daemon.rounds.test_driver import collection_of

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(120),
    pytest.mark.slow,  # it imports torch for its workers
]
SECRET = b"A text that only its owner has."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def keeping(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    async with site(tmp_path_factory.mktemp("control") / "a", keeping=True) as one:
        yield one


def document(name: str, text: str = "The door is green.", source: str = "") -> control.Document:
    return control.Document(id=name, text=text, source=source or f"/srv/{name}")


def offer(name: str, content: bytes, size: int = 0) -> control.IngestRequest:
    told = control.OfferedOriginal(
        document_id=name, digest=sha256(content).digest(), size=size or len(content)
    )
    return control.IngestRequest(offered=[told])


def piece(name: str, content: bytes) -> control.IngestRequest:
    return control.IngestRequest(pieces=[control.OriginalPiece(document_id=name, content=content)])


async def ingest(at: Site, *requests: control.IngestRequest) -> list[control.IngestProgress]:
    """The answers, to these requests first."""

    async def all_of_them() -> AsyncIterator[control.IngestRequest]:
        for request in requests:
            yield request

    return [step async for step in at.stub.Ingest(all_of_them())]


async def original(at: Site, name: str) -> bytes:
    parts = [part async for part in at.stub.Original(control.OriginalRequest(id=name))]
    content = b"".join(part.content for part in parts)
    assert (parts[0].size, parts[0].digest) == (len(content), sha256(content).digest())
    assert not any(part.size or part.digest for part in parts[1:])
    return content


async def refusal(at: Site, name: str, page: int = 0) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        if page:
            await page_image(at, name, page)
        else:
            await original(at, name)
    return refused.value.code(), refused.value.details() or ""


async def page_image(at: Site, name: str, page: int, dpi: int = 72) -> Image.Image:
    request = control.PageImageRequest(id=name, page=page, dpi=dpi)
    content = b"".join([part.content async for part in at.stub.PageImage(request)])
    return Image.open(io.BytesIO(content))


async def kept(at: Site, name: str, content: bytes) -> None:
    batch = control.IngestRequest(documents=[document(name)])
    steps = await ingest(at, batch, offer(name, content), piece(name, content))
    assert list(steps[1].originals_wanted) == [name]
    assert steps[-1].originals_kept == 1


def left_over(at: Site) -> list[str]:
    """What lies in the folder and is nobody's."""
    folder = folder_of(collection_of(at.driver).library_path)
    return [one.name for one in folder.iterdir() if len(one.name) != 64]


async def test_a_file_is_asked_for_once(keeping: Site) -> None:
    await kept(keeping, "once.txt", SECRET)
    assert await original(keeping, "once.txt") == SECRET
    batch = control.IngestRequest(documents=[document("once.txt")])
    steps = await ingest(keeping, batch, offer("once.txt", SECRET))
    assert steps[0].keeps_originals
    assert list(steps[1].originals_wanted) == []
    steps = await ingest(keeping, batch, offer("once.txt", b"other bytes"))
    assert list(steps[1].originals_wanted) == ["once.txt"]
    assert await original(keeping, "once.txt") == SECRET, "nothing of the other has come"


async def test_to_know_a_digest_is_no_right_to_the_bytes(keeping: Site) -> None:
    await kept(keeping, "owner.txt", SECRET)
    batch = control.IngestRequest(documents=[document("thief.txt")])
    steps = await ingest(keeping, batch, offer("thief.txt", SECRET))
    assert list(steps[1].originals_wanted) == ["thief.txt"], "all of it is to be shown"
    code, told = await refusal(keeping, "thief.txt")
    assert (code, "is not kept" in told) == (grpc.StatusCode.FAILED_PRECONDITION, True)
    wrong = bytes(len(SECRET))
    steps = await ingest(keeping, batch, offer("thief.txt", SECRET), piece("thief.txt", wrong))
    assert list(steps[2].errors) == [
        "the file of thief.txt is not kept: it changed while it was sent: ingest it again"
    ]
    assert "is not kept" in (await refusal(keeping, "thief.txt"))[1]
    assert left_over(keeping) == []


async def test_documents_beside_files_are_taken_and_the_files_told(keeping: Site) -> None:
    both = control.IngestRequest(documents=[document("both.txt")])
    both.MergeFrom(offer("both.txt", SECRET))
    step, *_, last = await ingest(keeping, both)
    assert (last.documents_new, last.originals_kept) == (1, 0)
    assert list(step.errors) == ["files come behind their documents: send them in another request"]


async def test_more_than_was_offered_is_not_taken(keeping: Site) -> None:
    batch = control.IngestRequest(documents=[document("long.txt")])
    long = bytes(2000)
    for sent in (piece("long.txt", long), piece("long.txt", bytes((1 << 20) + 1))):
        steps = await ingest(keeping, batch, offer("long.txt", b"x", size=1000), sent, sent)
        assert "more was sent than was offered" in steps[2].errors[0]
        assert not steps[3].errors, "it is told once"
    huge = (4 << 30) + 1
    steps = await ingest(keeping, batch, offer("long.txt", b"x", size=huge))
    assert not steps[1].originals_wanted
    assert left_over(keeping) == []


async def test_a_file_of_another_documents_name_replaces_nothing(keeping: Site) -> None:
    await kept(keeping, "rules.txt", SECRET)
    other = document("rules.txt", "Another text.", source="/elsewhere/rules.txt")
    batch = control.IngestRequest(documents=[other])
    steps = await ingest(keeping, batch, offer("rules.txt", b"new"), piece("rules.txt", b"new"))
    assert "is here from /srv/rules.txt" in steps[0].errors[0]
    assert list(steps[1].originals_wanted) == []
    assert await original(keeping, "rules.txt") == SECRET
    # Nor where its text is the same: its pages might show another one.
    batch = control.IngestRequest(documents=[document("rules.txt", source="/elsewhere/rules.txt")])
    steps = await ingest(keeping, batch, offer("rules.txt", b"new"), piece("rules.txt", b"new"))
    assert (steps[0].documents_unchanged, list(steps[1].originals_wanted)) == (1, [])
    assert await original(keeping, "rules.txt") == SECRET
    unasked = control.IngestRequest(documents=[document("b.txt")])
    steps = await ingest(keeping, unasked, offer("rules.txt", b"x"), piece("rules.txt", b"x"))
    assert list(steps[1].originals_wanted) == [], "its document is not of this batch"
    assert await original(keeping, "rules.txt") == SECRET


async def test_an_ingest_that_breaks_off_leaves_no_half_file(keeping: Site) -> None:
    half = asyncio.Event()

    async def requests() -> AsyncIterator[control.IngestRequest]:
        yield control.IngestRequest(documents=[document("half.txt"), document("whole.txt")])
        yield offer("half.txt", SECRET)
        yield piece("half.txt", SECRET[:5])
        half.set()
        await asyncio.Event().wait()

    call = keeping.stub.Ingest(requests())
    answers = aiter(call)
    for _ in range(3):
        await anext(answers)
    assert left_over(keeping) != []
    call.cancel()
    async with asyncio.timeout(60):  # until the daemon has seen that nobody sends any more
        while left_over(keeping):
            await asyncio.sleep(0.05)
    assert "is not kept" in (await refusal(keeping, "half.txt"))[1]


async def test_equal_files_are_stored_once_and_go_with_the_last(keeping: Site) -> None:
    collection = collection_of(keeping.driver)
    before = len(list(folder_of(collection.library_path).iterdir()))
    equal = b"equal bytes"
    for name in ("e1.txt", "e2.txt"):
        await kept(keeping, name, equal)
    assert len(list(folder_of(collection.library_path).iterdir())) == before + 1
    await collection.remove(["e1.txt"])
    assert await original(keeping, "e2.txt") == equal
    await collection.remove(["e2.txt"])
    assert len(list(folder_of(collection.library_path).iterdir())) == before


async def test_what_has_no_file_says_why(keeping: Site) -> None:
    documents = [
        document("m.eml"),
        document("m.eml/list.pdf"),
        control.Document(id="record-7", text="A record."),
        document("bare.txt"),
        control.Document(id="exported.txt", text="As an export has it."),
    ]
    await ingest(keeping, control.IngestRequest(documents=documents))
    for name, told in {
        "m.eml/list.pdf": "it was attached to another\nAsk for 'm.eml', which it came with",
        "record-7": "it was a record in a file of records",
        "bare.txt": "it came when fedd kept none or by a file of records (an export), or what was",
        "exported.txt": "by a file of records (an export)",
    }.items():
        code, details = await refusal(keeping, name)
        assert (code, told in details) == (grpc.StatusCode.FAILED_PRECONDITION, True), details
    assert await refusal(keeping, "bare") == (
        grpc.StatusCode.INVALID_ARGUMENT, "no document 'bare' here\nIs it 'bare.txt'?",
    )  # fmt: skip


async def test_a_page_is_drawn_in_its_size(keeping: Site, tmp_path: Path) -> None:
    pdf = made(tmp_path / "a.pdf", *[lambda canvas: lines(canvas, [SENTENCE])] * 2).read_bytes()
    await kept(keeping, "in/a.pdf", pdf)
    image = await page_image(keeping, "in/a.pdf", 2, dpi=144)
    assert image.format == "PNG"
    assert image.size == pytest.approx((WIDTH * 2, HEIGHT * 2), abs=1)
    assert len(image.getcolors(1 << 20) or []) > 1, "it is not blank"
    code, told = await refusal(keeping, "in/a.pdf", page=3)
    assert (code, told) == (
        grpc.StatusCode.INVALID_ARGUMENT, "'in/a.pdf' has 2 pages, and none is number 3",
    )  # fmt: skip


async def test_what_has_no_pages_or_damaged_ones_is_not_drawn(keeping: Site) -> None:
    await kept(keeping, "plain.txt", SECRET)
    code, told = await refusal(keeping, "plain.txt", page=1)
    assert (code, "has no pages that can be drawn" in told) == (
        grpc.StatusCode.INVALID_ARGUMENT, True,
    )  # fmt: skip
    await kept(keeping, "page.pdf", b"<script>alert(1)</script>")
    code, told = await refusal(keeping, "page.pdf", page=1)
    assert (code, "not a PDF" in told) == (grpc.StatusCode.FAILED_PRECONDITION, True)


async def test_bytes_that_are_gone_are_told_and_asked_for_again(keeping: Site) -> None:
    await kept(keeping, "gone.txt", b"soon gone")
    folder = folder_of(collection_of(keeping.driver).library_path)
    (folder / sha256(b"soon gone").hexdigest()).unlink()
    code, told = await refusal(keeping, "gone.txt")
    assert (code, "can't be read in the state folder" in told) == (
        grpc.StatusCode.FAILED_PRECONDITION, True,
    )  # fmt: skip
    await kept(keeping, "gone.txt", b"soon gone")
    assert await original(keeping, "gone.txt") == b"soon gone"


async def test_who_took_a_file_is_on_record_and_not_which(keeping: Site) -> None:
    await kept(keeping, "audited.txt", SECRET)
    await original(keeping, "audited.txt")
    await refusal(keeping, "audited.txt", page=1)
    entries = "".join(part.read_text() for part in keeping.audit.iterdir()).replace(" ", "")
    for action in ("original", "page-image"):
        assert f'"action":"{action}"' in entries
    assert f'"bytes":{len(SECRET)}' in entries
    assert '"originals":1' in entries
    assert "audited" not in entries
    assert sha256(SECRET).hexdigest() not in entries


async def test_where_none_are_kept_none_are_asked_for(tmp_path: Path) -> None:
    async with site(tmp_path / "a") as none:
        batch = control.IngestRequest(documents=[document("a.txt")])
        steps = await ingest(none, batch, offer("a.txt", SECRET), piece("a.txt", SECRET))
        assert not any(step.keeps_originals or step.originals_wanted for step in steps)
        assert not folder_of(collection_of(none.driver).library_path).exists()
        _, told = await refusal(none, "a.txt")
        assert "fedd keeps none here\nSet library.keep_originals = true" in told
