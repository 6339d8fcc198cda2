"""People bring files: who may, what becomes of them, and what comes of those who mean ill."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from reportlab.pdfgen.canvas import Canvas

from proto import control_pb2 as control
from tests.daemon.gateway.gates import Gate
from tests.daemon.gateway.pages.browsers import (
    NEEDS_CHROMIUM,
    check_accessible,
    opened,
    sign_in,
)
from tests.daemon.gateway.pages.conftest import MANUAL, browsing
from tests.daemon.library.readers.pdf_files import lines, made
from tests.live.test_operations import fedctl

pytestmark = [
    pytest.mark.federation,
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(300),
]

MIB = 1 << 20


async def a_token(gate: Gate, name: str, *scopes: str, of: tuple[str, ...] = ()) -> str:
    """A token of some collections; of none: of all."""
    request = control.CreateTokenRequest(name=name, scopes=scopes, days=1, collections=of)
    return (await gate.site.stub.CreateToken(request, timeout=30)).secret


async def brought(
    gate: Gate,
    token: str,
    name: str,
    content: bytes | str,
    collection: str = "inbox",
    **fields: str,
) -> httpx.Response:
    """As `curl -F collection=… -F file=@…` brings it."""
    async with httpx.AsyncClient(base_url=gate.url, timeout=120) as client:
        return await client.post(
            "/v1/documents",
            data={"collection": collection} | fields,
            files={"file": (name, content)},
            headers={"authorization": f"Bearer {token}"},
        )


async def listed(gate: Gate, token: str) -> list[dict[str, Any]]:
    """What the token has brought, when all of it has come to an end."""
    headers = {"authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=gate.url, timeout=60, headers=headers) as client:
        while True:
            told = (await client.get("/v1/documents")).json()["documents"]
            if all(one["state"] in ("searchable", "unchanged", "refused") for one in told):
                return list(told)
            await asyncio.sleep(0.1)


async def found(gate: Gate, token: str, question: str) -> list[str]:
    """Ids of documents, best first."""
    async with httpx.AsyncClient(base_url=gate.url, timeout=60) as client:
        reply = await client.post(
            "/v1/search",
            json={"question": question},
            headers={"authorization": f"Bearer {token}"},
        )
    return [one["document_id"] for one in reply.json()["passages"]]


def made_of(text: str) -> bytes:
    """A PDF that says this."""
    with tempfile.TemporaryDirectory() as folder:
        made(path := Path(folder) / "a.pdf", lambda canvas: lines(canvas, [text]))
        return path.read_bytes()


def message(reply: httpx.Response) -> str:
    return str(reply.json()["error"]["message"])


def left(gate: Gate) -> list[str]:
    """Files that arrived and became nothing."""
    folder = gate.site.folder / "state" / "originals"
    return [one.name for one in folder.iterdir() if "brought" in one.name]


async def nothing_is_left(gate: Gate) -> None:
    while left(gate):  # who was refused is told so first
        await asyncio.sleep(0.05)


def audited(gate: Gate) -> list[tuple[str, str]]:
    """Actor and outcome of what was brought."""
    folder = gate.site.folder / "state" / "audit"
    rows = [json.loads(line) for f in sorted(folder.glob("*.jsonl")) for line in f.open()]
    return [(row["actor"], row["outcome"]) for row in rows if row["action"] == "upload"]


# ---- what becomes of it ----------------------------------------------------------------


async def test_what_is_brought_is_found_cited_and_kept(gate: Gate, tmp_path: Path) -> None:
    def sheet(canvas: Canvas) -> None:
        lines(canvas, ["The capstan pawl is greased with tallow on Mondays."])

    made(tmp_path / "pawl.pdf", sheet, title="Capstan pawl")
    content = (tmp_path / "pawl.pdf").read_bytes()
    token = await a_token(gate, "ines", "search", "originals", "upload")
    reply = await brought(gate, token, "pawl.pdf", content)
    assert reply.status_code in (200, 202), reply.text
    assert reply.json()["document_id"] == "inbox/pawl.pdf"
    (one,) = await listed(gate, token)
    assert (one["state"], one["bytes"], one["cause"]) == ("searchable", len(content), "")
    assert (await found(gate, token, "capstan pawl tallow"))[0] == "inbox/pawl.pdf"
    async with browsing(gate, token) as client:
        kept = await client.get("/source/original?document=inbox/pawl.pdf")
    assert kept.content == content
    await nothing_is_left(gate)
    assert audited(gate)[-2:] == [("token:ines", "begun"), ("token:ines", "done")]


async def test_the_same_again_is_unchanged_and_another_needs_a_word(gate: Gate) -> None:
    token = await a_token(gate, "again", "search", "upload")
    assert (await brought(gate, token, "oar.md", "The oar is of ash.")).status_code == 200
    assert (await brought(gate, token, "oar.md", "The oar is of ash.")).json()["state"] == (
        "unchanged"
    )
    other = await brought(gate, token, "oar.md", "The oar is of spruce.")
    assert (other.status_code, "there is another document" in message(other)) == (422, True)
    replaced = await brought(gate, token, "oar.md", "The oar is of spruce.", replace="yes")
    assert replaced.json()["state"] in ("stored", "searchable")
    states = [one["state"] for one in await listed(gate, token)]
    assert states == ["searchable", "refused", "unchanged", "searchable"]


async def test_what_an_operator_ingested_is_replaced_by_nobody(gate: Gate) -> None:
    token = await a_token(gate, "overwriter", "upload")
    reply = await brought(gate, token, "manual.pdf", b"%PDF-", "deck", replace="yes")
    assert reply.status_code == 422
    text = await brought(gate, token, "empty-handed.txt", "The cook lies.", "deck", replace="yes")
    assert (text.status_code, "nobody brought it" in message(text)) == (422, True)
    shown = await gate.site.stub.ShowDocument(control.ShowDocumentRequest(id=MANUAL), timeout=60)
    assert shown.document.source.endswith("files/manual.pdf")


async def test_a_scan_that_waits_for_ocr_keeps_its_name(gate: Gate) -> None:
    waits = control.WaitingPages(
        document_id="inbox/scan.pdf", pages="1 to 3", source="/srv/scan.pdf"
    )

    async def batch() -> AsyncIterator[control.IngestRequest]:
        yield control.IngestRequest(waiting=[waits])

    async for _ in gate.site.stub.Ingest(batch(), timeout=120):
        pass
    token = await a_token(gate, "scanner", "upload")
    for fields in ({}, {"replace": "yes"}):
        reply = await brought(gate, token, "scan.pdf", made_of("A tide table."), **fields)
        assert reply.status_code == 422, reply.text
    listed_ = control.ListWaitingRequest(begins="inbox/scan.pdf", limit=10)
    still = (await gate.site.stub.ListWaiting(listed_, timeout=60)).documents
    assert [one.pages for one in still] == ["1 to 3"]


async def test_a_letter_goes_with_what_is_attached(gate: Gate) -> None:
    def letter(*names: str) -> str:
        parts = "".join(
            f"--b\r\nContent-Type: text/plain\r\nContent-Disposition: attachment; "
            f'filename="{name}"\r\n\r\nThe {name} of the bosun.\r\n'
            for name in names
        )
        head = 'From: a@b.example\r\nSubject: Stores\r\nContent-Type: multipart/mixed; boundary="b"'
        return f"{head}\r\n\r\n--b\r\n\r\nStores of the bosun.\r\n{parts}--b--\r\n"

    token = await a_token(gate, "bosun", "upload")
    await brought(gate, token, "stores.eml", letter("whistle.txt", "lantern.txt"))
    assert {one["state"] for one in await listed(gate, token)} == {"searchable"}
    before = await gate.site.stub.ListDocuments(
        control.ListDocumentsRequest(begins="inbox/stores.eml", limit=10), timeout=60
    )
    ids = [one.id for one in before.documents]
    assert len(ids) == 3, ids
    await brought(gate, token, "stores.eml", letter("lantern.txt"), replace="yes")
    await listed(gate, token)
    after = await gate.site.stub.ListDocuments(
        control.ListDocumentsRequest(begins="inbox/stores.eml", limit=10), timeout=60
    )
    assert [one.id for one in after.documents] == [one for one in ids if "whistle" not in one]
    code, _, told = await fedctl(gate.site, "documents", "remove", "inbox/stores.eml", "--yes")
    assert (code, "what was in it stays: inbox/stores.eml/lantern.txt" in told) == (0, True)


# ---- who may ---------------------------------------------------------------------------


async def test_a_token_brings_into_its_collections_alone(gate: Gate) -> None:
    token = await a_token(gate, "clerk", "upload", of=("inbox/clerk", "scans"))
    for collection in ("inbox", "inbox/clerks", "deck", "inbox/clerk/../other", "scans//2", "/"):
        reply = await brought(gate, token, "a.txt", "A.", collection)
        assert reply.status_code == 400, (collection, reply.text)
    assert (await brought(gate, token, "a.txt", "A bollard.", "inbox/clerk/2026")).is_success
    told = await listed(gate, token)
    assert [one["document_id"] for one in told] == ["inbox/clerk/2026/a.txt"]
    for number, same in enumerate(("scans/", "/scans", " scans ")):  # as people type it
        reply = await brought(gate, token, f"{number}.txt", "A cleat.", same)
        assert reply.json()["document_id"] == f"scans/{number}.txt"


async def test_without_the_scope_nothing_is_taken(gate: Gate) -> None:
    token = await a_token(gate, "reader", "ask", "search")
    assert (await brought(gate, token, "a.txt", "A.")).status_code == 403
    assert (await brought(gate, "hanse_made_up", "a.txt", "A.")).status_code == 401
    with suppress(httpx.TransportError):  # hung up on, and perhaps told why
        assert (await brought(gate, token, "a.txt", b"a" * (100 * MIB))).status_code == 403
    await nothing_is_left(gate)


async def test_who_is_revoked_while_it_comes_has_brought_nothing(gate: Gate) -> None:
    token = await a_token(gate, "leaver", "upload")
    revoked = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        head, _, tail = a_form("leaver.txt", b"The leaver was here.").partition(b"was")
        yield head
        while not left(gate):
            await asyncio.sleep(0.05)
        await gate.revoke("leaver")
        revoked.set()
        yield b"was" + tail

    size = len(a_form("leaver.txt", b"The leaver was here."))
    async with httpx.AsyncClient(base_url=gate.url, timeout=60) as client:
        reply = await client.post(
            "/v1/documents", content=slowly(), headers=a_head(token) | {"content-length": str(size)}
        )
    assert revoked.is_set()
    assert reply.status_code in (401, 422), reply.text
    everything = await a_token(gate, "finder", "search")
    assert "inbox/leaver.txt" not in await found(gate, everything, "The leaver was here.")


# ---- who means ill -----------------------------------------------------------------------


BOUNDARY = "hanse-test"


def a_form(name: str, content: bytes, **fields: str) -> bytes:
    """As it travels."""
    told = {"collection": "inbox"} | fields
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{key}"\r\n\r\n{value}\r\n'
        for key, value in told.items()
    ]
    file = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
    return "".join([*parts, file]).encode() + content + f"\r\n--{BOUNDARY}--\r\n".encode()


def a_head(token: str) -> dict[str, str]:
    return {
        "authorization": f"Bearer {token}",
        "content-type": f"multipart/form-data; boundary={BOUNDARY}",
    }


@pytest.mark.parametrize(
    "name",
    [
        "../../fedd.toml",
        "..",
        ".hidden.txt",
        "a\\b.txt",
        "tool.exe",
        "pairs.jsonl",
        "no-ending",
        "bell\x07.txt",
        "right\u202eto-left.txt",
        "x" * 200 + ".txt",
    ],
)
async def test_names_that_lead_elsewhere_are_refused(gate: Gate, name: str) -> None:
    token = gate.tokens.get("namer") or await gate.token("upload", name="namer")
    async with httpx.AsyncClient(base_url=gate.url, timeout=60) as client:
        reply = await client.post(
            "/v1/documents", content=a_form(name, b"The text."), headers=a_head(token)
        )
    assert reply.status_code == 400, reply.text
    await nothing_is_left(gate)


async def test_too_large_a_file_is_refused_with_its_bound(gate: Gate) -> None:
    token = await a_token(gate, "heavy", "upload")
    reply = await brought(gate, token, "big.txt", b"word " * (13 * MIB))
    assert (reply.status_code, "at most 64 MiB" in message(reply)) == (413, True)
    just = await brought(gate, token, "big.txt", b"\0" * (64 * MIB + 100))
    assert (just.status_code, "at most 64 MiB" in message(just)) == (400, True)
    await nothing_is_left(gate)


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"", "empty"), (b"%PDF-1.7 and no more", ""), (b"PK\x03\x04" + bytes(100), "")],
)
async def test_a_file_that_can_t_be_read_says_why_and_stays_nowhere(
    gate: Gate, content: bytes, why: str
) -> None:
    token = gate.tokens.get("broken") or await gate.token("upload", name="broken")
    for name in ("broken.pdf", "broken.docx"):
        reply = await brought(gate, token, name, content)
        assert reply.status_code in (400, 422), reply.text
        assert message(reply)
        assert why in message(reply)
        assert str(gate.site.folder) not in reply.text, "no path of the site"
    await nothing_is_left(gate)


async def test_who_hangs_up_in_the_midst_leaves_nothing(gate: Gate) -> None:
    token = await a_token(gate, "hasty", "upload")
    form = a_form("hasty.txt", b"word " * 40_000)
    head = "".join(f"{key}: {value}\r\n" for key, value in a_head(token).items())
    sent = f"POST /v1/documents HTTP/1.1\r\nhost: x\r\n{head}content-length: {len(form)}\r\n\r\n"
    before = len([one for one in audited(gate) if one == ("token:hasty", "refused or failed")])
    _, writer = await asyncio.open_connection(gate.host, gate.port)
    writer.write(sent.encode() + form[: len(form) // 2])
    await writer.drain()
    while not left(gate):
        await asyncio.sleep(0.05)
    writer.transport.abort()
    await nothing_is_left(gate)
    while len([x for x in audited(gate) if x == ("token:hasty", "refused or failed")]) == before:
        await asyncio.sleep(0.05)
    assert await listed(gate, token) == []


async def test_one_token_does_not_keep_others_from_bringing(gate: Gate) -> None:
    greedy, other = await a_token(gate, "greedy", "upload"), await a_token(gate, "next", "upload")
    form = a_form("held.txt", b"word " * 1000)
    head = "".join(f"{key}: {value}\r\n" for key, value in a_head(greedy).items())
    sent = f"POST /v1/documents HTTP/1.1\r\nhost: x\r\n{head}content-length: {len(form)}\r\n\r\n"
    writers = []
    for _ in range(4):
        _, writer = await asyncio.open_connection(gate.host, gate.port)
        writer.write(sent.encode() + form[:400])
        writers.append(writer)
    while len(left(gate)) < 4:
        await asyncio.sleep(0.05)
    one_more = await brought(gate, greedy, "more.txt", "More.")
    assert (one_more.status_code, one_more.headers["retry-after"]) == (429, "5")
    assert (await brought(gate, other, "other.txt", "The other binnacle.")).is_success
    for writer in writers:
        writer.transport.abort()
    await nothing_is_left(gate)


async def test_a_page_of_another_site_brings_nothing(gate: Gate) -> None:
    token = await a_token(gate, "victim", "upload")
    async with browsing(gate, token) as client:
        with suppress(httpx.TransportError):  # hung up on, and perhaps told why
            reply = await client.post(
                "/upload",
                data={"collection": "inbox"},
                files={"file": ("a.txt", b"A.")},
                headers={"sec-fetch-site": "cross-site"},
            )
            assert reply.status_code == 403
    assert await listed(gate, token) == []


async def test_bodies_without_a_length_or_a_form_are_refused(gate: Gate) -> None:
    token = await a_token(gate, "odd", "upload")

    async def chunks() -> AsyncIterator[bytes]:
        yield a_form("a.txt", b"A.")

    async with httpx.AsyncClient(base_url=gate.url, timeout=60, headers=a_head(token)) as client:
        with suppress(httpx.TransportError):  # likewise
            assert (await client.post("/v1/documents", content=chunks())).status_code == 411
        for body in (b"", b"no form", a_form("a.txt", b"A.")[:-10]):
            reply = await client.post("/v1/documents", content=body)
            assert reply.status_code in (400, 411), (body, reply.text)
        json_ = await client.post("/v1/documents", json={}, headers={"content-type": "text/json"})
        assert (json_.status_code, "curl -F" in message(json_)) == (400, True)
    await nothing_is_left(gate)


# ---- in a browser ------------------------------------------------------------------------


@NEEDS_CHROMIUM
@pytest.mark.parametrize("scripts", [True, False], ids=["with scripts", "without scripts"])
async def test_a_person_brings_a_file_and_sees_what_came_of_it(
    gate: Gate, chromium: Any, tmp_path: Path, scripts: bool
) -> None:
    who = f"visitor-{scripts}".lower()
    token = await a_token(gate, who, "search", "upload", of=(who,))
    (tmp_path / "sextant.md").write_text("# Sextant\n\nThe sextant hangs behind the helm.\n")
    (tmp_path / "large.md").write_bytes(b"x" * (65 * MIB))
    async with opened(chromium, gate, java_script_enabled=scripts) as page:
        await sign_in(page, token)
        await page.get_by_role("link", name="Upload").click()
        assert await page.get_by_label("Collection").input_value() == who
        await page.locator("#file").set_input_files(tmp_path / "sextant.md")
        await page.get_by_role("button", name="Upload").click()
        one = page.locator(".brought li").first
        await one.wait_for()
        while "can be found" not in await one.inner_text() or "moment" in await one.inner_text():
            await page.goto("/upload")
        if scripts:
            await check_accessible(page, "an upload")
            await page.locator("#file").set_input_files(tmp_path / "large.md")
            assert await page.locator("#file").evaluate("one => one.validationMessage") == (
                "At most 64 MiB"
            )
        await one.get_by_role("link", name=f"{who}/sextant.md").click()
        assert "behind the helm" in await page.locator("main").inner_text()
        await page.goto("/upload")
        await page.get_by_label("Collection").fill(f"{who}/2026")
        await page.locator("#file").set_input_files(tmp_path / "sextant.md")
        await page.get_by_role("button", name="Upload").click()
        await page.get_by_text(f"{who}/2026/sextant.md").first.wait_for()
        (tmp_path / "sextant.md").write_text("Another sextant.")
        assert await page.get_by_label("Collection").input_value() == f"{who}/2026", "as before"
        await page.locator("#file").set_input_files(tmp_path / "sextant.md")
        await page.get_by_role("button", name="Upload").click()
        await page.locator(".doubt").first.wait_for()
        assert "choose another name" in await page.get_by_role("alert").inner_text()
        assert "choose another name" in await page.locator(".brought").inner_text()
