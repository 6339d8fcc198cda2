"""People at a real browser, Debian's Chromium; skipped without it, or without what drives it.

async with opened(chromium, gate) as page:
    await sign_in(page, token)
    await ask(page, "Which ropes are tarred?")
"""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

import pytest

from tests.daemon.gateway.gates import Gate

CHROMIUM = shutil.which("chromium")
_DRIVER = importlib.util.find_spec("playwright") is not None
NEEDS_CHROMIUM = pytest.mark.skipif(
    CHROMIUM is None or not _DRIVER,
    reason="Debian's chromium or playwright (extra `dev`) is not installed",
)
Page = Any  # of playwright, which need not be there


@asynccontextmanager
async def launched() -> AsyncIterator[Any]:
    """A browser with an empty profile, which asks nobody for anything of its own."""
    from playwright.async_api import async_playwright

    words = (
        *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    )
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=words)
        yield browser
        await browser.close()


@asynccontextmanager
async def opened(chromium: Any, gate: Gate, **options: Any) -> AsyncIterator[Page]:
    """A new person's page. Whatever it loads is of the gateway, and its policy refuses nothing."""
    context = await chromium.new_context(base_url=gate.url, **options)
    asked, told = list[str](), list[str]()
    context.on("request", lambda request: asked.append(request.url))
    context.on("console", lambda message: told.append(message.text))
    page = await context.new_page()
    await page.goto("/")
    try:
        yield page
    finally:
        await context.close()
    assert [one for one in asked if not one.startswith(gate.url)] == []
    assert [one for one in told if "Content Security Policy" in one] == []


async def sign_in(page: Page, token: str) -> None:
    await page.get_by_label("Token", exact=True).fill(token)
    await page.get_by_role("button", name="Sign in").click()
    await page.get_by_role("button", name="Sign out").wait_for()


async def ask(page: Page, question: str) -> None:
    await page.get_by_label("Your question").fill(question)
    await page.get_by_role("button", name="Ask").click()
    await page.locator("#answer").wait_for()


async def followed(page: Page, link: Any) -> Page:
    """The tab that a link opens."""
    async with page.context.expect_page() as coming:
        await link.click()
    tab = await coming.value
    await tab.wait_for_load_state()
    return tab


async def check_accessible(page: Page, what: str) -> None:
    """axe-core finds nothing, in light and dark, on a wide and on a narrow screen."""
    await page.evaluate(
        await asyncio.to_thread((files("axe_playwright_python") / "axe.min.js").read_text)
    )
    for scheme in ("light", "dark"):
        await page.emulate_media(color_scheme=scheme)
        for width in (1280, 400):
            await page.set_viewport_size({"width": width, "height": 900})
            found = await page.evaluate("axe.run()")
            assert len(found["passes"]) > 10
            wrong = [
                (one["id"], [(node["html"], node["failureSummary"]) for node in one["nodes"]])
                for one in found["violations"]
            ]
            assert not wrong, f"{what}, {scheme}, {width} px"
            wide = await page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{what} is wider than a screen of {width} px"
