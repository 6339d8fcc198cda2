"""The pages in a real browser, Debian's Chromium: by mouse, by keyboard alone, without scripts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from proto import control_pb2 as control
from tests.daemon.gateway.gates import Gate
from tests.daemon.gateway.pages.browsers import (
    NEEDS_CHROMIUM,
    Page,
    ask,
    check_accessible,
    followed,
    opened,
    sign_in,
)
from tests.daemon.gateway.pages.conftest import KEEL, MANUAL, RUST

NOT_ANSWERED = "capital of mongolia"
pytestmark = [
    pytest.mark.federation,
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(300),
    NEEDS_CHROMIUM,
]


async def sees_the_sentence(source: Page) -> None:
    """The document at the cited page, with the sentence marked and its place framed."""
    marked = await source.locator("mark").all_inner_texts()
    assert [" ".join(one.split()) for one in marked] == [RUST]
    where = await source.locator(".where").first.inner_text()
    assert where.startswith(f"{MANUAL}page 2Ada Lock"), "dots between them are the stylesheet's"
    image = source.get_by_role("img", name="Page 2 of Deck manual")
    assert await image.evaluate("async image => (await image.decode(), image.naturalWidth)") > 800
    sheet = await source.locator(".sheet").bounding_box()
    frame = await source.locator(".sheet rect").bounding_box()
    # The paragraph begins 100 points below the upper edge of 842 and 72 from the left of 595.
    assert (frame["y"] - sheet["y"]) / sheet["height"] == pytest.approx(0.11, abs=0.02)
    assert (frame["x"] - sheet["x"]) / sheet["width"] == pytest.approx(0.12, abs=0.02)


# ---- by mouse ----------------------------------------------------------------------


@pytest.mark.parametrize("scripts", [True, False], ids=["with scripts", "without scripts"])
async def test_a_person_asks_and_opens_what_is_cited(
    gate: Gate, chromium: Any, scripts: bool
) -> None:
    token = await gate.token("ask", "search", "originals")
    async with opened(chromium, gate, java_script_enabled=scripts) as page:
        await page.get_by_label("Token", exact=True).fill("hanse_wrong")
        await page.get_by_role("button", name="Sign in").click()
        assert "No such token here" in await page.get_by_role("alert").inner_text()
        await sign_in(page, token)
        await ask(page, KEEL)
        assert RUST in await page.locator("#answer").inner_text()
        assert await page.get_by_label("Your question").input_value() == KEEL
        assert page.url == f"{gate.url}/{'' if scripts else 'ask'}"
        assert "jetty" not in await page.title()
        await page.locator("#answer .cite").first.click()
        cited = page.locator("#source-1")
        assert page.url.endswith(f"/{'' if scripts else 'ask'}#source-1")
        assert [" ".join(one.split()) for one in await cited.locator("mark").all_inner_texts()] == [
            RUST
        ]
        if scripts:  # of a page that can run none nothing can be measured either
            source = await followed(page, cited.get_by_role("link", name="Deck manual"))
            await sees_the_sentence(source)
            async with source.expect_download() as coming:
                await source.get_by_role("link", name="Download the original").click()
            kept = await (await coming.value).path()
            original = gate.site.folder.parent / "files" / "manual.pdf"
            assert (kept.read_bytes(), (await coming.value).suggested_filename) == (
                original.read_bytes(),
                "manual.pdf",
            )
        await page.get_by_role("button", name="Sign out").click()
        await page.get_by_role("button", name="Sign in").wait_for()
        assert await page.context.cookies() == []


@pytest.mark.parametrize("scripts", [True, False], ids=["with scripts", "without scripts"])
async def test_a_person_says_what_answers_and_keeps_the_answer(
    gate: Gate, chromium: Any, scripts: bool
) -> None:
    token = await gate.token("ask", "search", "propose", name=f"thumbs-{scripts}".lower())
    async with opened(chromium, gate, java_script_enabled=scripts) as page:
        await sign_in(page, token)
        await ask(page, KEEL)
        cited = page.locator("#source-1")
        noted = await followed(page, cited.get_by_role("button", name="This answers it"))
        assert await noted.locator("h1").inner_text() == "Noted"
        assert "jetty" not in noted.url
        other = page.locator(".found article").nth(1)
        against = await followed(page, other.get_by_role("button", name="This does not"))
        assert "does not answer" in await against.locator("main").inner_text()
        assert RUST in await page.locator("#answer").inner_text(), "the answer stays"
    listed = await gate.site.stub.ListProposals(control.ListProposalsRequest(limit=100), timeout=60)
    said = [(one.document_id, vote.answers) for one in listed.proposals for vote in one.votes]
    assert (MANUAL, True) in said
    assert sorted(answers for _, answers in said) == [False, True]
    request = control.DecideProposalsRequest(forget_token=f"thumbs-{scripts}".lower())
    assert (await gate.site.stub.DecideProposals(request, timeout=60)).forgotten == 2


async def test_no_script_can_read_the_cookie(gate: Gate, chromium: Any) -> None:
    async with opened(chromium, gate) as page:
        await sign_in(page, await gate.token("ask"))
        (cookie,) = await page.context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        assert await page.evaluate("document.cookie") == ""


async def test_a_search_narrows_down_to_some_documents(gate: Gate, chromium: Any) -> None:
    async with opened(chromium, gate) as page:
        await sign_in(page, await gate.token("search"))
        await page.get_by_text("Only some documents").click()
        await page.get_by_label("Search for").fill(KEEL)
        await page.get_by_label("Collection").fill("deck")
        await page.get_by_label("Dated since").fill("2001-02-03")
        await page.get_by_role("button", name="Search").click()
        await page.get_by_label("Dated since").fill("")
        await page.get_by_role("button", name="Search").click()
        first = page.locator("#found article").first
        assert "Replace the hawser" in await first.inner_text()
        assert f"{MANUAL}" in await first.inner_text()
        source = await followed(page, first.get_by_role("link", name="Deck manual"))
        assert "The jetty gauge" in await source.locator(".here").inner_text()


async def test_what_a_document_says_runs_nowhere(gate: Gate, chromium: Any) -> None:
    async with opened(chromium, gate) as page:
        await sign_in(page, await gate.token("ask", "search"))
        await ask(page, "<script>document.title = 'taken'</script> signal flags of the bridge")
        assert "onclick=x" in await page.locator("main").inner_text()
        assert await page.locator("main b, main img, main script").count() == 0
        assert await page.title() == "Answer · Hanse"


# ---- by keyboard alone -------------------------------------------------------------


async def tabbed_to(page: Page, wanted: str) -> None:
    """Tab, until what has the focus is called so, and can be seen to have it."""
    for _ in range(60):
        await page.keyboard.press("Tab")
        name, outline = await page.evaluate(
            "() => { const e = document.activeElement; return [e.labels?.[0]?.innerText"
            " || e.getAttribute('aria-label') || e.innerText, getComputedStyle(e).outlineStyle] }"
        )
        if re.match(wanted, " ".join(name.split())):
            assert outline == "solid", f"nobody sees that {wanted} has the focus"
            return
    pytest.fail(f"Tab does not come to {wanted}")


async def test_all_of_it_is_done_by_keyboard_alone(gate: Gate, chromium: Any) -> None:
    token = await gate.token("ask", "search", "originals")
    async with opened(chromium, gate) as page:
        keys = page.keyboard
        await keys.type(token)  # the field has the focus
        await keys.press("Enter")
        await page.get_by_label("Your question").wait_for()
        await keys.type(KEEL)
        await keys.press("Enter")
        await page.locator("#answer").wait_for()
        await tabbed_to(page, "Source 1")  # the focus stayed in the field
        await keys.press("Enter")
        assert await page.evaluate("document.activeElement.id") == "source-1"
        await tabbed_to(page, "Deck manual")
        async with page.context.expect_page() as coming:
            await keys.press("Enter")
        source = await coming.value
        await source.wait_for_load_state()
        await sees_the_sentence(source)
        await tabbed_to(source, "Skip to the content")
        await source.keyboard.press("Enter")
        await tabbed_to(source, "Download the original")
        async with source.expect_download() as coming:
            await source.keyboard.press("Enter")
        assert (await coming.value).suggested_filename == "manual.pdf"
        await tabbed_to(source, "Search")
        await source.keyboard.press("Enter")
        await source.get_by_label("Search for").wait_for()
        await source.keyboard.type("hawser rope")
        await tabbed_to(source, "Only some documents")
        await source.keyboard.press("Enter")
        await tabbed_to(source, "Collection")
        await source.keyboard.type("deck")
        await source.keyboard.press("Enter")
        await source.locator("#found").wait_for()
        await tabbed_to(source, "Sign out")
        await source.keyboard.press("Enter")
        await source.get_by_label("Token", exact=True).wait_for()


async def test_a_question_is_sent_once_and_may_have_lines(gate: Gate, chromium: Any) -> None:
    async with opened(chromium, gate) as page:
        await sign_in(page, await gate.token("ask"))
        sent = list[str]()
        page.on("request", lambda one: sent.append(one.url) if one.method == "POST" else None)
        await page.keyboard.type("anchor")
        await page.keyboard.press("Shift+Enter")
        await page.keyboard.type("winch")
        async with page.expect_response("**/ask/stream"):
            await page.evaluate(
                "() => { const form = document.querySelector('form.ask');"
                " form.requestSubmit(); form.requestSubmit(); }"
            )
        await page.locator("#answer").wait_for()
        assert await page.get_by_label("Your question").input_value() == "anchor\nwinch"
        assert sent == [f"{gate.url}/ask/stream"]


# ---- for everybody -----------------------------------------------------------------


async def test_axe_finds_nothing_on_any_page(gate: Gate, chromium: Any) -> None:
    token = await gate.token("ask", "search", "originals", "propose")
    async with opened(chromium, gate) as page:
        await check_accessible(page, "sign in")
        await page.get_by_label("Token", exact=True).fill("hanse_wrong")
        await page.get_by_role("button", name="Sign in").click()
        await page.get_by_role("alert").wait_for()
        await check_accessible(page, "a wrong token")
        await sign_in(page, token)
        await check_accessible(page, "ask")
        await ask(page, KEEL)
        await check_accessible(page, "an answer")
        noted = await followed(page, page.get_by_role("button", name="This does not").first)
        await check_accessible(noted, "a vote")
        await ask(page, NOT_ANSWERED)
        assert "The documents do not answer this." in await page.locator("#answer").inner_text()
        await check_accessible(page, "no answer")
        await page.goto("/search")
        await check_accessible(page, "search")
        await page.get_by_label("Search for").fill(KEEL)
        await page.get_by_role("button", name="Search").click()
        await page.locator("#found").wait_for()
        await check_accessible(page, "what was found")
        link = page.get_by_role("link", name="Deck manual").first
        source = await followed(page, link)
        await check_accessible(source, "a source")
        await source.goto("/source?document=nothing")
        await check_accessible(source, "a document that is not there")
    name = next(name for name, secret in gate.tokens.items() if secret == token)
    forgotten = control.DecideProposalsRequest(forget_token=name)
    await gate.site.stub.DecideProposals(forgotten, timeout=60)


async def test_axe_would_find_what_is_wrong(gate: Gate, chromium: Any) -> None:
    async with opened(chromium, gate) as page:
        await page.evaluate("document.querySelector('label').remove()")
        with pytest.raises(AssertionError, match="sign in"):
            await check_accessible(page, "sign in")
