"""Answers in a real browser while a language model writes them, and people who do not wait."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx2 as httpx
import pytest

from tests.daemon.gateway.gates import Gate
from tests.daemon.gateway.pages.browsers import (
    NEEDS_CHROMIUM,
    Page,
    ask,
    check_accessible,
    opened,
    sign_in,
)
from tests.daemon.gateway.pages.conftest import KEEL, browsing
from tests.daemon.process.model_server import BREAK, ModelServer
from tests.support.lines import until

pytestmark = [
    pytest.mark.federation,
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(300),
    NEEDS_CHROMIUM,
]

FIRST = "The jetty gauge and the keel block rust. [1]"
SECOND = "Replace the hawser rope."
SAID = ["The jetty gauge and the keel block rust [{n}]. ", "Nobody in Mongolia rusts [{n}]. "]
SAID += ["Replace the hawser rope [{n}]. ", "That is all."]


def as_told(prompt: str) -> list[str]:
    """The pieces, with the number that the passage about the keel has in this prompt."""
    number = re.findall(r"<passage (\d+)>(?:(?!</passage).)*jetty gauge", prompt, re.S)
    return [piece.replace("{n}", number[0] if number else "99") for piece in SAID]


@pytest.fixture
def slow(written: ModelServer) -> ModelServer:
    """The model, which writes a piece whenever it is let."""
    written.script = as_told
    written.hold()
    return written


async def send(page: Page) -> None:
    """The question about the keel, sent; what comes is not waited for."""
    await page.get_by_label("Your question").fill(KEEL)
    await page.get_by_role("button", name="Ask").click(no_wait_after=True)


async def sees_the_first(page: Page, slow: ModelServer) -> None:
    slow.let(2)  # the first, and what shows that it has ended
    await page.get_by_text(FIRST).wait_for()


async def test_a_statement_is_seen_before_the_next_is_written(
    gate: Gate, chromium: Any, slow: ModelServer
) -> None:
    async with opened(chromium, gate) as page:
        await sign_in(page, await gate.token("ask", "search"))
        await send(page)
        await page.get_by_role("heading", name="Searching").wait_for()
        await sees_the_first(page, slow)
        assert await page.get_by_role("heading", name="Being written").is_visible()
        assert await page.locator("#answer").count() == 0
        assert await page.locator("[aria-live=polite]").inner_text() == FIRST
        assert await page.get_by_role("button", name="Ask").is_hidden()
        assert await page.get_by_label("Your question").input_value() == KEEL
        await check_accessible(page, "an answer that is being written")
        slow.let()
        await page.locator("#answer").wait_for()
        text = await page.locator("#answer .answer").inner_text()
        assert SECOND in text
        assert "Mongolia" not in text
        assert await page.locator("#answer .cite").count() == 2
        assert "2 statements were taken out" in await page.locator("#answer").inner_text()
        assert await page.get_by_role("heading", name="Passages found").is_visible()
        assert await page.get_by_role("status").inner_text() == "Answer"
        assert await page.get_by_role("button", name="Stop").is_hidden()
        assert await page.evaluate("document.activeElement.textContent") == "Ask"
        assert page.url == f"{gate.url}/"
        await ask(page, KEEL)
        assert SECOND in await page.locator("#answer .answer").inner_text(), "and once more"


async def test_without_scripts_the_page_comes_when_all_is_written(
    gate: Gate, chromium: Any, slow: ModelServer
) -> None:
    async with opened(chromium, gate, java_script_enabled=False) as page:
        await sign_in(page, await gate.token("ask"))
        await send(page)
        await asyncio.to_thread(slow.begun.acquire)
        slow.let(3)
        assert await page.get_by_text(FIRST).count() == 0
        slow.let()
        await page.locator("#answer").wait_for()
        text = await page.locator("#answer .answer").inner_text()
        assert (SECOND in text, "Mongolia" in text) == (True, False)
        assert page.url == f"{gate.url}/ask"


async def test_who_stops_keeps_the_text_and_frees_the_model(
    gate: Gate, chromium: Any, slow: ModelServer
) -> None:
    """By keyboard alone: the button that one has pressed has become the one that stops."""
    async with opened(chromium, gate) as page:
        await sign_in(page, await gate.token("ask"))
        await page.keyboard.type(KEEL)
        await page.keyboard.press("Tab")
        await page.keyboard.press("Enter")
        await sees_the_first(page, slow)
        assert await page.evaluate("document.activeElement.textContent") == "Stop"
        await page.keyboard.press("Enter")
        assert await asyncio.to_thread(slow.hung_up.acquire, timeout=60)
        await page.get_by_role("heading", name="Stopped: not all of an answer").wait_for()
        assert await page.locator(".answer").inner_text() == FIRST
        assert await page.get_by_role("status").inner_text() == "Stopped"
        assert await page.get_by_label("Your question").input_value() == KEEL
        assert await page.evaluate("document.activeElement.textContent") == "Ask"
        await check_accessible(page, "an answer that was stopped")
        slow.let()
        await page.keyboard.press("Enter")
        await page.locator("#answer").wait_for()
        assert SECOND in await page.locator("#answer .answer").inner_text()


async def test_who_closes_the_page_frees_the_model(
    gate: Gate, chromium: Any, slow: ModelServer
) -> None:
    async with opened(chromium, gate) as page:
        await sign_in(page, await gate.token("ask"))
        await send(page)
        await sees_the_first(page, slow)
        await page.close()
        assert await asyncio.to_thread(slow.hung_up.acquire, timeout=60)


async def test_a_model_that_breaks_off_is_told_beside_what_it_wrote(
    gate: Gate, chromium: Any, written: ModelServer
) -> None:
    written.script = lambda prompt: [*as_told(prompt)[:2], BREAK]
    async with opened(chromium, gate) as page:
        await sign_in(page, await gate.token("ask"))
        await ask(page, KEEL)
        text = await page.locator("#answer").inner_text()
        assert "The answer ends before its end, for the language model did" in text
        assert "rust." in text


# ---- what is refused ---------------------------------------------------------------


@pytest.mark.parametrize("scripts", [True, False], ids=["with scripts", "without scripts"])
async def test_a_busy_site_says_so_and_keeps_the_question(
    gate: Gate, chromium: Any, slow: ModelServer, scripts: bool
) -> None:
    token = await gate.token("ask")
    async with (
        browsing(gate, token) as other,
        opened(chromium, gate, java_script_enabled=scripts) as page,
    ):
        await sign_in(page, token)
        before = [
            asyncio.create_task(other.post("/ask", data={"question": KEEL})) for _ in range(2)
        ]
        await asyncio.to_thread(slow.begun.acquire)
        await until_waiting(gate, 2)
        await send(page)
        assert "try again in a moment" in await page.get_by_role("alert").inner_text()
        assert await page.get_by_label("Your question").input_value() == KEEL
        if scripts:  # axe is one
            await check_accessible(page, "a busy site")
        slow.let()
        assert {one.status_code for one in await asyncio.gather(*before)} == {200}
        await ask(page, KEEL)
        assert SECOND in await page.locator("#answer .answer").inner_text()


async def until_waiting(gate: Gate, questions: int) -> None:
    """Until so many are answered or wait, as fedd tells who monitors it."""
    line = f"\nhanse_questions_waiting {questions}.0\n"
    async with httpx.AsyncClient(base_url=gate.url) as client, asyncio.timeout(60):
        while line not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("scripts", [True, False], ids=["with scripts", "without scripts"])
async def test_who_is_signed_out_meanwhile_signs_in_and_has_the_question(
    gate: Gate, chromium: Any, written: ModelServer, scripts: bool
) -> None:
    written.script = as_told
    token = await gate.token("ask", name=f"leaving-{scripts}".lower())
    async with opened(chromium, gate, java_script_enabled=scripts) as page:
        await sign_in(page, token)
        await gate.revoke(f"leaving-{scripts}".lower())
        await send(page)
        assert "is revoked" in await page.get_by_role("alert").inner_text()
        assert await page.get_by_role("button", name="Sign out").count() == 0
        if scripts:  # axe is one
            await check_accessible(page, "signed out meanwhile")
        await sign_in(page, await gate.token("ask"))
        assert await page.get_by_label("Your question").input_value() == KEEL
        await page.get_by_role("button", name="Ask").click()
        await page.locator("#answer").wait_for()
        assert SECOND in await page.locator("#answer .answer").inner_text()


async def test_who_is_revoked_while_it_is_written_is_told_so(
    gate: Gate, chromium: Any, slow: ModelServer
) -> None:
    token = await gate.token("ask", name="leaving-late")
    async with opened(chromium, gate) as page:
        await sign_in(page, token)
        await send(page)
        await sees_the_first(page, slow)
        await gate.revoke("leaving-late")
        slow.let()
        assert "is revoked" in await page.get_by_role("alert").inner_text()
        await sign_in(page, await gate.token("ask"))
        assert await page.get_by_label("Your question").input_value() == KEEL


async def test_a_site_that_is_gone_is_told_and_the_question_kept(
    gate: Gate, chromium: Any, written: ModelServer
) -> None:
    written.script = as_told
    async with opened(chromium, gate) as page:
        await sign_in(page, await gate.token("ask"))
        await page.context.set_offline(True)
        await send(page)
        alert = await page.get_by_role("alert").inner_text()
        assert "The connection to this site broke off: ask again in a moment" in alert
        assert await page.get_by_role("heading", name="Broken off").is_visible()
        await check_accessible(page, "a site that is gone")
        await page.context.set_offline(False)
        assert await page.get_by_label("Your question").input_value() == KEEL
        await page.get_by_role("button", name="Ask").click()
        await page.locator("#answer").wait_for()
        assert SECOND in await page.locator("#answer .answer").inner_text()


# ---- what a script may -------------------------------------------------------------


async def test_no_script_makes_html_of_what_it_was_told(
    gate: Gate, chromium: Any, slow: ModelServer
) -> None:
    """The browser itself refuses HTML that is made of strings, but in the one place for it."""
    async with opened(chromium, gate, bypass_csp=False) as page:
        await sign_in(page, await gate.token("ask"))
        told = await page.evaluate(
            "() => { try { document.querySelector('main').innerHTML = '<b>taken</b>' }"
            " catch (error) { return error.name } }"
        )
        assert told == "TypeError"
        assert await page.locator("main b").count() == 0
        await send(page)
        await sees_the_first(page, slow)
        await page.evaluate("document.querySelector('.answer').append('<b>taken</b>')")
        assert await page.locator("main b").count() == 0
        await until(lambda: bool(slow.asked), within=60)
