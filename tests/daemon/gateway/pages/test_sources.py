"""Answers, searches and the files behind them, of a real site as a browser is sent them."""

from __future__ import annotations

import io
import json
import re
from html import unescape
from typing import Any

import pytest
from PIL import Image

from tests.daemon.gateway.gates import Gate
from tests.daemon.gateway.pages.conftest import HOSTILE, KEEL, MANUAL, NOTICE, RUST, browsing

pytestmark = [
    pytest.mark.federation,
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(300),
]


def links_in(page: str) -> list[str]:
    return [unescape(one) for one in re.findall(r'href="(/source[^"]*)"', page)]


def audited(gate: Gate, name: str) -> list[dict[str, Any]]:
    entries = [
        json.loads(line)
        for path in sorted((gate.site.folder / "state" / "audit").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return [entry for entry in entries if entry["actor"] == f"token:{name}"]


async def test_a_citation_leads_to_the_sentence_on_its_page(gate: Gate) -> None:
    async with browsing(gate, await gate.token("ask", "search")) as client:
        page = await client.post("/ask", data={"question": KEEL})
        assert page.status_code == 200
        broken = RUST.replace("keel block", "keel\nblock")
        assert f"<mark>{RUST}</mark>" in page.text or f"<mark>{broken}</mark>" in page.text
        link = next(one for one in links_in(page.text) if "from=" in one)
        assert "jetty" not in link, "no word of a document is in an address"
        source = await client.get(link)
        assert source.status_code == 200
        marked = re.findall("<mark>(.*?)</mark>", source.text, re.DOTALL)
        assert [" ".join(one.split()) for one in marked] == [RUST]
        assert "page 2" in source.text
        assert "<rect " in source.text
        assert "Download" not in source.text, "the token is not for that"
        assert str(gate.site.folder.parent) not in source.text, "where the file lay is not told"


async def test_a_token_that_only_asks_gets_sentences_and_no_passages(gate: Gate) -> None:
    async with browsing(gate, await gate.token("ask")) as client:
        page = await client.post("/ask", data={"question": KEEL})
        assert page.status_code == 200
        assert "jetty gauge" in page.text
        assert 'id="source-1"' in page.text
        assert "Passages found" not in page.text
        assert not links_in(page.text)
        assert 'href="/search"' not in page.text
        for path in ("/search", f"/source?document={MANUAL}"):
            assert (await client.get(path)).status_code == 403
        assert (await client.post("/search", data={"question": KEEL})).status_code == 403


async def test_a_search_takes_filters_and_says_which_make_no_sense(gate: Gate) -> None:
    async with browsing(gate, await gate.token("search")) as client:
        page = await client.post("/search", data={"question": KEEL, "collection": "deck"})
        assert page.status_code == 200
        assert "Keel rust" in page.text
        assert all("document=deck%2F" in link for link in links_in(page.text))
        both = {"question": KEEL, "collection": "elm", "title": "winch", "language": ""}
        page = await client.post("/search", data=both)
        assert {link.partition("&")[0] for link in links_in(page.text)} == {
            "/source?document=elm%2Fanchor-winch"
        }
        for wrong in (
            {"language": "english"},
            {"since": "last week"},
            {"collection": "attic"},
            {"title": "x" * 1001},
            {"question": " "},
            {"question": "x" * 20_000},
        ):
            page = await client.post("/search", data={"question": KEEL} | wrong)
            assert page.status_code == 400, wrong
            assert 'role="alert"' in page.text
        assert (await client.get("/")).headers["location"] == "/search"


async def test_what_documents_say_is_text_on_every_page(gate: Gate) -> None:
    question = "who keeps the signal flags of the bridge?"
    async with browsing(gate, await gate.token("ask", "search")) as client:
        answer = await client.post("/ask", data={"question": question})
        found = await client.post("/search", data={"question": question, "collection": "deck"})
        source = await client.get("/source", params={"document": HOSTILE})
        for page in (answer, found, source):
            assert page.status_code == 200
            assert "onclick=x" in page.text, "it is shown"
            assert not re.search(r"<b onclick|<img src=x|<script>", page.text)


async def test_a_page_s_image_comes_as_an_image_and_runs_nothing(gate: Gate) -> None:
    async with browsing(gate, await gate.token("search")) as client:
        reply = await client.get("/source/page", params={"document": MANUAL, "page": "2"})
        assert (reply.status_code, reply.headers["content-type"]) == (200, "image/png")
        assert "sandbox" in reply.headers["content-security-policy"]
        assert Image.open(io.BytesIO(reply.content)).size == pytest.approx((910, 1287), abs=2)
        for page, status in (("0", 404), ("", 404), ("x", 404), ("3", 400), ("99999999", 400)):
            asked = {"document": MANUAL, "page": page}
            assert (await client.get("/source/page", params=asked)).status_code == status
        wrong = await client.get("/source/page", params={"document": HOSTILE, "page": "1"})
        assert (wrong.status_code, "only a PDF has" in wrong.text) == (400, True)


async def test_an_original_is_to_keep_and_never_to_show(gate: Gate) -> None:
    files = gate.site.folder.parent / "files"
    async with browsing(gate, await gate.token("search", "originals", name="keeper")) as client:
        for document, name, content in (
            (MANUAL, "manual.pdf", (files / "manual.pdf").read_bytes()),
            (HOSTILE, "notice.html.txt", NOTICE.encode()),
        ):
            source = await client.get("/source", params={"document": document})
            link = next(one for one in links_in(source.text) if "original" in one)
            reply = await client.get(link)
            assert (reply.status_code, reply.content) == (200, content)
            assert reply.headers["content-type"] == "application/octet-stream"
            told = reply.headers["content-disposition"]
            assert told == f"attachment; filename=\"{name}\"; filename*=UTF-8''{name}"
            assert reply.headers["content-security-policy"].startswith(
                "default-src 'none'; sandbox"
            )
            assert reply.headers["x-content-type-options"] == "nosniff"
        assert (await client.head(link)).status_code == 405
        missing = {"document": "elm/anchor-winch"}
        reply = await client.get("/source/original", params=missing)
        assert (reply.status_code, "is not kept" in reply.text) == (503, True)
    of_it = [(one["action"], one["outcome"], one["objects"]) for one in audited(gate, "keeper")]
    assert ("original", "done", {"bytes": len(NOTICE)}) in of_it
    assert NOTICE[:40] not in json.dumps(of_it)


async def test_files_go_to_tokens_for_them_alone(gate: Gate) -> None:
    async with browsing(gate, await gate.token("search", name="looker")) as client:
        reply = await client.get("/source/original", params={"document": MANUAL})
        assert (reply.status_code, "needs the scope" in reply.text) == (403, True)
    assert ("original", {"cause": "scope"}) in [
        (one["action"], one["objects"]) for one in audited(gate, "looker")
    ]


@pytest.mark.parametrize("path", ["/source", "/source/page", "/source/original"])
async def test_a_document_that_is_not_there_tells_of_no_other(gate: Gate, path: str) -> None:
    async with browsing(gate, await gate.token("search", "originals")) as client:
        for wrong in (
            "deck/manual.pd",
            "deck/manual.pdf/",
            "DECK/manual.pdf",
            "nothing",
            "x" * 512,
        ):
            reply = await client.get(path, params={"document": wrong, "page": "1"})
            assert reply.status_code == 404
            assert f"No document &#39;{wrong}&#39; here" in reply.text
            assert "manual.pdf" not in reply.text.replace(wrong, "")
        for wrong in ("", "x" * 513):
            reply = await client.get(path, params={"document": wrong, "page": "1"})
            assert reply.status_code in (400, 404)


async def test_a_passage_that_is_gone_is_said_and_the_document_shown(gate: Gate) -> None:
    async with browsing(gate, await gate.token("search")) as client:
        told = {"document": MANUAL, "passage": f"{MANUAL}@0000000000000000.7", "from": "1"}
        page = await client.get("/source", params=told | {"to": "9"})
        assert page.status_code == 200
        assert "has changed since it was cited" in page.text
        assert "What is written here" in page.text
        assert "<mark>" not in page.text


@pytest.mark.parametrize(
    "ends", [("9", "1"), ("0", "999999"), ("-1", "5"), ("1", "x"), ("1", "9" * 30), ("", "")]
)
async def test_a_mark_that_makes_no_sense_marks_nothing(gate: Gate, ends: tuple[str, str]) -> None:
    async with browsing(gate, await gate.token("search")) as client:
        found = await client.post("/search", data={"question": KEEL, "collection": "deck"})
        link = links_in(found.text)[0]
        page = await client.get(f"{link}&from={ends[0]}&to={ends[1]}")
        assert (page.status_code, "<mark>" in page.text) == (200, False)


async def test_what_the_documents_do_not_answer_is_said(gate: Gate) -> None:
    async with browsing(gate, await gate.token("ask", "search")) as client:
        page = await client.post("/ask", data={"question": "capital of mongolia"})
        assert page.status_code == 200
        assert "The documents do not answer this." in page.text
        assert "Nearest passages" in page.text
        assert 'id="source-1"' not in page.text


async def test_no_token_and_no_question_of_a_page_is_in_any_file(gate: Gate) -> None:
    async with browsing(gate, await gate.token("ask", "search")) as client:
        for path in ("/ask", "/search"):
            assert (await client.post(path, data={"question": "zorblax?"})).status_code == 200
    for file in gate.site.folder.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert b"zorblax" not in content, file
            assert not [one for one in gate.tokens.values() if one[6:].encode() in content], file
