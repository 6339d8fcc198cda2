"""Who is signed in, and whose form it was: a real gateway before the socket of questions."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from daemon.gateway.application import Gateway
from daemon.gateway.fedd import Fedd
from tests.daemon.questions.test_questions import DAY, Served, served

__all__ = ["served"]
HOST = "ask.example.org"
FORMS = ("/sign-in", "/sign-out", "/ask", "/ask/stream", "/search")


@pytest.fixture
async def application(served: Served) -> AsyncIterator[Any]:
    fedd = Fedd(Path(served.folder / "socket"))
    yield Gateway(fedd, 16).application()
    await fedd.close()


def browser(application: Any, scheme: str = "https", **headers: str) -> httpx.AsyncClient:
    """A client that says what a browser says of a form of the page's own."""
    usual = {"accept": "text/html", "sec-fetch-site": "same-origin"}
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=application),
        base_url=f"{scheme}://{HOST}",
        headers=usual | headers,
    )


def cookies_of(reply: httpx.Response) -> dict[str, str]:
    """By name, with all their attributes."""
    told = reply.headers.get_list("set-cookie")
    return {one.partition("=")[0]: one for one in told}


async def signed_in(client: httpx.AsyncClient, secret: str) -> httpx.Response:
    reply = await client.post("/sign-in", data={"token": secret})
    assert (reply.status_code, reply.headers["location"]) == (303, "/")
    return reply


# ---- in and out --------------------------------------------------------------------


async def test_who_signs_in_keeps_the_token_in_a_cookie_of_this_host_alone(
    served: Served, application: Any
) -> None:
    secret, _ = await served.tokens.create("reader", ["ask", "search"], 1)
    async with browser(application) as client:
        cookies = cookies_of(await signed_in(client, f"  {secret}\n"))
        assert set(cookies) == {"__Host-hanse"}
        attributes = cookies["__Host-hanse"].lower().split("; ")[1:]
        assert sorted(attributes) == ["httponly", "path=/", "samesite=strict", "secure"]
        page = await client.get("/")
        assert page.status_code == 200
        assert "reader" in page.text
        assert secret not in page.text


async def test_in_the_clear_on_this_machine_the_cookie_has_another_name(
    served: Served, application: Any
) -> None:
    secret, _ = await served.tokens.create("reader", ["ask"], 1)
    async with browser(application, "http") as client:
        cookies = cookies_of(await signed_in(client, secret))
        assert [*cookies] == ["hanse"]
        assert "secure" not in cookies["hanse"].lower()
        assert (await client.get("/")).status_code == 200
        cookies = cookies_of(
            await client.post(
                "/sign-in", data={"token": secret}, headers={"origin": f"https://{HOST}"}
            )
        )
        assert [*cookies] == ["__Host-hanse"], "a proxy before it speaks TLS"


async def test_over_tls_a_cookie_that_others_can_set_is_none(
    served: Served, application: Any
) -> None:
    secret, _ = await served.tokens.create("planted", ["ask"], 1)
    async with browser(application, cookie=f"hanse={secret}") as client:
        assert (await client.post("/ask", data={"question": "who?"})).status_code == 401


async def test_who_signs_out_has_the_browser_forget_it(served: Served, application: Any) -> None:
    secret, _ = await served.tokens.create("reader", ["ask"], 1)
    async with browser(application) as client:
        await signed_in(client, secret)
        reply = await client.post("/sign-out", data={})
        assert (reply.status_code, reply.headers["location"]) == (303, "/")
        assert reply.headers["clear-site-data"] == '"cache"'
        for cookie in cookies_of(reply).values():
            assert "Max-Age=0" in cookie
        assert not client.cookies
        assert (await client.post("/ask", data={"question": "who?"})).status_code == 401


async def test_a_signed_token_that_no_browser_keeps_is_said_to_be_one(application: Any) -> None:
    async with browser(application) as client:
        reply = await client.post("/sign-in", data={"token": f"{'a' * 2000}.{'b' * 2000}.c"})
    assert reply.status_code == 401
    assert "has 4,003 characters, and a browser keeps 3,800" in reply.text.lower()


@pytest.mark.parametrize("token", ["", "x", "hanse_nothing", "two words", "x" * 600, "<b>", "ä"])
async def test_what_is_no_token_is_refused_with_what_to_do(application: Any, token: str) -> None:
    async with browser(application) as client:
        reply = await client.post("/sign-in", data={"token": token})
        assert reply.status_code == 401
        assert re.search("no such token here|this is no token: paste", reply.text, re.IGNORECASE)
        assert 'role="alert"' in reply.text
        assert "fedctl tokens create" in reply.text
        assert "<b>" not in reply.text
        assert not client.cookies


@pytest.mark.parametrize("fault", ["revoked", "expired"])
async def test_a_token_of_the_past_is_said_and_forgotten(
    served: Served, application: Any, fault: str
) -> None:
    secret, _ = await served.tokens.create("reader", ["ask", "search"], 1)
    async with browser(application) as client:
        await signed_in(client, secret)
        if fault == "revoked":
            await served.tokens.revoke("reader")
        else:
            served.now[0] += DAY
        for asked in (client.get("/"), client.post("/ask", data={"question": "who?"})):
            client.cookies.set("__Host-hanse", secret, domain=HOST)
            reply = await asked
            assert reply.status_code == 401
            assert f"is {fault}: ask whoever administers this site for a token" in reply.text
            assert "Max-Age=0" in cookies_of(reply)["__Host-hanse"]
        again = await client.post("/sign-in", data={"token": secret})
        assert (again.status_code, f"is {fault}" in again.text) == (401, True)


async def test_a_token_for_something_else_is_told_what_it_lacks(
    served: Served, application: Any
) -> None:
    secret, _ = await served.tokens.create("counter", ["metrics"], 1)
    async with browser(application) as client:
        await signed_in(client, secret)
        page = await client.get("/")
        assert (page.status_code, "for nothing that this page has" in page.text) == (403, True)
        for asked, scope in (
            (client.post("/ask", data={"question": "who?"}), "ask"),
            (client.post("/ask/stream", data={"question": "who?"}), "ask"),
            (client.post("/search", data={"question": "who?"}), "search"),
            (client.get("/search"), "search"),
            (client.get("/source?document=a.pdf"), "search"),
            (client.get("/source/page?document=a.pdf&page=1"), "search"),
            (client.get("/source/original?document=a.pdf"), "search"),
        ):
            reply = await asked
            assert reply.status_code == 403
            assert f"needs the scope &#39;{scope}&#39;" in reply.text


async def test_a_link_to_a_source_leads_there_behind_the_sign_in(
    served: Served, application: Any
) -> None:
    secret, _ = await served.tokens.create("reader", ["search"], 1)
    link = "/source?document=a%2Fb.pdf&passage=a%2Fb.pdf%400&from=1&to=20"
    async with browser(application) as client:
        page = await client.get(link, headers={"sec-fetch-site": "cross-site"})
        assert page.status_code == 401
        there = link.replace("&", "&amp;")
        assert f'name="to" value="{there}"' in page.text
        assert f'<a href="{there}">go on' in page.text, "the browser kept the cookie back"
        assert "set-cookie" not in page.headers, "which would end the session in all its tabs"
        for to, location in (
            (link, link),
            ("//evil.example/source?document=a", "/"),
            ("https://evil.example/", "/"),
            ("/source?document=a\r\nset-cookie: x=y", "/"),
            ("/\\evil.example/source?x", "/"),
            ("/sign-out", "/"),
        ):
            reply = await client.post("/sign-in", data={"token": secret, "to": to})
            assert (reply.status_code, reply.headers["location"]) == (303, location)


@pytest.mark.parametrize("path", ["/ask", "/ask/stream"])
async def test_a_question_outlives_the_token_that_it_was_asked_with(
    served: Served, application: Any, path: str
) -> None:
    secret, _ = await served.tokens.create("reader", ["ask"], 1)
    other, _ = await served.tokens.create("other", ["ask"], 1)
    question = "Who tars <b>ropes</b>?"
    shown = "Who tars &lt;b&gt;ropes&lt;/b&gt;?"
    async with browser(application) as client:
        await signed_in(client, secret)
        await served.tokens.revoke("reader")
        page = await client.post(path, data={"question": question})
        assert page.status_code == 401
        assert f'name="question" value="{shown}"' in page.text
        page = await client.post("/sign-in", data={"token": "wrong", "question": question})
        assert f'name="question" value="{shown}"' in page.text
        page = await client.post("/sign-in", data={"token": other, "question": question})
        assert (page.status_code, f"data-enter>{shown}</textarea>" in page.text) == (200, True)
        assert [*cookies_of(page)] == ["__Host-hanse"]
    asked = [entry for entry in served.audited() if entry[0] == "token:other"]
    assert asked == [], "it is for the person to ask it"


# ---- forms of other sites ----------------------------------------------------------


OTHERS: list[dict[str, str]] = [
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"sec-fetch-site": "none"},
    {"sec-fetch-site": "cross-site", "origin": f"https://{HOST}"},
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": f"https://{HOST}.evil.example"},
    {"origin": f"https://{HOST}:8443"},
    {"origin": "https://["},
    {"origin": ""},
    {},
]


@pytest.mark.parametrize("path", [*FORMS, "/propose"])
@pytest.mark.parametrize("headers", OTHERS, ids=range(len(OTHERS)))
async def test_a_form_of_another_site_does_nothing(
    served: Served, application: Any, path: str, headers: dict[str, str]
) -> None:
    """As if the cookie had come all the same, as with a browser that knows no SameSite."""
    secret, _ = await served.tokens.create("reader", ["ask", "search"], 1)
    told = {"question": "who?", "token": secret}
    async with browser(application, cookie=f"__Host-hanse={secret}") as client:
        del client.headers["sec-fetch-site"]
        reply = await client.post(path, data=told, headers=headers)
        assert reply.status_code == 403
        assert "not sent by this site&#39;s own page" in reply.text
        assert not cookies_of(reply)
    assert served.audited() == []


@pytest.mark.parametrize("path", FORMS)
async def test_a_form_of_the_page_s_own_is_taken_from_older_browsers_too(
    served: Served, application: Any, path: str
) -> None:
    secret, _ = await served.tokens.create("reader", ["ask", "search"], 1)
    told = {"question": "who?", "token": secret}
    async with browser(application, cookie=f"__Host-hanse={secret}") as client:
        del client.headers["sec-fetch-site"]
        reply = await client.post(path, data=told, headers={"origin": f"https://{HOST}"})
        assert reply.status_code in (200, 303, 503), "nothing is indexed yet"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b'{"question": "who?"}', "application/json"),
        (b"question=who", "text/plain"),
        (b"question=who&question=what", "application/x-www-form-urlencoded"),
        (b"question=%ff%fe", "application/x-www-form-urlencoded"),
        (b"question=\xff", "application/x-www-form-urlencoded"),
        (b"&".join(b"f%d=x" % n for n in range(100)), "application/x-www-form-urlencoded"),
    ],
)
async def test_what_is_no_form_is_refused(
    served: Served, application: Any, body: bytes, kind: str
) -> None:
    secret, _ = await served.tokens.create("reader", ["ask"], 1)
    async with browser(application, cookie=f"__Host-hanse={secret}") as client:
        reply = await client.post("/ask", content=body, headers={"content-type": kind})
        assert reply.status_code == 400
    assert served.audited() == []


# ---- what a browser may do with a page ---------------------------------------------


async def test_every_page_lets_the_browser_load_our_own_files_alone(
    served: Served, application: Any
) -> None:
    secret, _ = await served.tokens.create("reader", ["ask", "search"], 1)
    async with browser(application) as client:
        pages = [await client.get("/"), await client.get("/nothing-here")]
        pages.append(await client.post("/sign-in", data={"token": "x"}))
        await signed_in(client, secret)
        pages += [await client.get("/"), await client.get("/search")]
        pages.append(await client.post("/ask", data={"question": "who?"}))
        for page in pages:
            policy = dict(
                one.partition(" ")[::2]
                for one in page.headers["content-security-policy"].split("; ")
            )
            assert {name: policy[name] for name in ("default-src", "base-uri")} == {
                "default-src": "'none'",
                "base-uri": "'none'",
            }
            assert policy["frame-ancestors"] == "'none'"
            assert policy.pop("require-trusted-types-for") == "'script'"
            assert policy.pop("trusted-types") == "page"
            assert set(policy.values()) == {"'none'", "'self'"}
            assert page.headers["referrer-policy"] == "same-origin", "or Origin would be null"
            assert page.headers["cache-control"] == "no-store"
            assert page.headers["x-content-type-options"] == "nosniff"
            assert "strict-transport-security" in page.headers
            for name in {*page.headers} - {"set-cookie"}:
                assert len(page.headers.get_list(name)) == 1, name
            assert not re.search(r"<style|style=|<script(?! src=)|\son\w+=|https?://", page.text)
        links = {
            link for page in pages for link in re.findall(r'(?:src|href)="([^"#]+)"', page.text)
        }
        for link in links:
            assert link.startswith("/")
            assert (await client.get(link)).status_code == 200
        static = [await client.get(link) for link in links if "static" in link]
        assert {one.headers["content-type"].partition(";")[0] for one in static} == {
            "text/css",
            "text/javascript",
            "image/svg+xml",
        }
        assert all("immutable" in one.headers["cache-control"] for one in static)
        folder = next(link for link in links if "static" in link).rpartition("/")[0]
        for wrong in ("/../page.css", "/%2e%2e%2fpages.py", "/page.html", "/"):
            assert (await client.get(f"{folder}{wrong}")).status_code == 404


async def test_what_is_not_there_is_told_in_the_form_of_who_asks(application: Any) -> None:
    async with browser(application) as client:
        page = await client.get("/nothing-here")
        assert (page.status_code, "there is no such page here" in page.text.lower()) == (404, True)
        told = await client.get("/nothing-here", headers={"accept": "*/*"})
        assert (told.status_code, told.json()["error"]["code"]) == (404, "not_found")
        told = await client.get("/v1/nothing-here")
        assert (told.status_code, told.json()["error"]["code"]) == (404, "not_found")


async def test_a_question_in_an_address_is_not_asked(served: Served, application: Any) -> None:
    secret, _ = await served.tokens.create("reader", ["ask", "search"], 1)
    async with browser(application) as client:
        await signed_in(client, secret)
        reply = await client.get("/ask?question=who")
        assert (reply.status_code, reply.headers["location"]) == (303, "/")
        assert (await client.get("/search?question=who")).status_code == 200
    assert served.audited() == []


async def test_what_was_asked_stays_in_its_field_and_stays_text(
    served: Served, application: Any
) -> None:
    secret, _ = await served.tokens.create("reader", ["ask", "search"], 1)
    hostile = "</textarea><script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
    async with browser(application) as client:
        await signed_in(client, secret)
        for path in ("/ask", "/ask/stream", "/search"):
            told = {"question": hostile, "collection": hostile, "title": hostile}
            reply = await client.post(path, data=told)
            assert reply.status_code in (400, 503)
            assert "&lt;script&gt;alert(1)" in reply.text
            assert "<script>" not in reply.text
            assert "<img src=x" not in reply.text
            title = re.search("<title>(.*)</title>", reply.text)
            assert title is not None
            assert "alert" not in title[1], "titles end in histories"
