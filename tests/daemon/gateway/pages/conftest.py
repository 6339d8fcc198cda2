"""One real site whose gateway shows pages: a PDF, a web page that its author means ill with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import pytest_asyncio
from reportlab.pdfgen.canvas import Canvas

from daemon.fedctl.transfer.sending import Naming, send
from tests.daemon.gateway.gates import Gate, gateway, listening
from tests.daemon.gateway.pages.browsers import launched
from tests.daemon.library.readers.pdf_files import heading, lines, made
from tests.daemon.process.model_server import ModelServer, writing
from tests.support.federation import LiveFederation

MANUAL = "deck/manual.pdf"
HOSTILE = "deck/notice.html"
RUST = "The jetty gauge and the keel block rust."
# The encoder of tests knows no meaning: what is nearest a sentence is the sentence.
KEEL = f"deck manual: {RUST}"
NOTICE = (
    "<html><head><title>&lt;script&gt;document.title='taken'&lt;/script&gt;</title></head><body>"
    "<h1>&lt;img src=x onerror=document.title='taken'&gt;</h1>"
    "<p>The quartermaster keeps the &lt;b onclick=x&gt;signal flags&lt;/b&gt; of the bridge.</p>"
    "<script>document.title = 'taken'</script></body></html>"
)


def _first(canvas: Canvas) -> None:
    heading(canvas, "Deck manual", 72)
    lines(canvas, ["What is written here holds for all who work on deck.", "It is read yearly."])


def _second(canvas: Canvas) -> None:
    heading(canvas, "Keel rust", 72)
    lines(canvas, ["The jetty gauge and the keel", "block rust. Replace the hawser rope."])


def files_in(folder: Path) -> Path:
    """What is ingested as the collection `deck`."""
    folder.mkdir()
    made(folder / "manual.pdf", _first, _second, title="Deck manual", author="Ada Lock")
    (folder / "notice.html").write_text(NOTICE)
    (folder / "empty-handed.txt").write_text("The cook keeps no list of the spoons.")
    return folder


@pytest.fixture(scope="package")
def model() -> Iterator[ModelServer]:
    """What writes answers; it finds none, so that sentences of documents stand in."""
    with writing(_finds_nothing) as server:
        yield server


def _finds_nothing(_prompt: str) -> list[str]:
    return ["Nothing of all this says so."]


@pytest.fixture
def written(model: ModelServer) -> Iterator[ModelServer]:
    """The same for one test, which says what it writes and when."""
    model.asked.clear()
    yield model
    model.script = _finds_nothing
    model.let()


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def gate(tmp_path_factory: pytest.TempPathFactory, model: ModelServer) -> AsyncIterator[Gate]:
    """A site that keeps files, and says when its documents do not answer."""
    root = tmp_path_factory.mktemp("pages")
    asked = {"generator": "openai", "language_model": f"{model.url}#m", "answer_within_s": 100.0}
    tables = listening(requests=4) | {
        "library": {"keep_originals": True},
        "retrieval": {"lost_answers": 0.05, **asked},
    }
    async with AsyncExitStack() as stack:
        live = await stack.enter_async_context(
            LiveFederation.start(root, ["elm"], without=["fir", "oak"], tables=tables)
        )
        site = live.sites["elm"]
        await live.ingest_all()
        folder = files_in(root / "files")
        sent = await send(site.stub, [folder], lambda _: None, Naming("deck/"))
        assert not sent.problems
        yield await stack.enter_async_context(gateway(site))


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def chromium() -> AsyncIterator[Any]:
    """One browser for all of these."""
    async with launched() as browser:
        yield browser


def browsing(gate: Gate, token: str) -> httpx.AsyncClient:
    """A client that says what a browser says, signed in."""
    headers = {
        "accept": "text/html",
        "sec-fetch-site": "same-origin",
        "cookie": f"hanse={token}",
    }
    return httpx.AsyncClient(base_url=gate.url, headers=headers, timeout=60)
