"""The site's pages, for people without any program for it: what a browser asks, and is shown.

Everything works without a script; with it an answer is seen while it is written. What is asked is
in the body of a form and never in an address, which ends in histories and logs.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from daemon.gateway.conversation import cited_at
from daemon.gateway.event_stream import EventStream, event
from daemon.gateway.fedd import Fedd, Sent
from daemon.gateway.pages import federation, session, views
from daemon.gateway.pages.forms import FormError, SearchForm, read_form, search_form
from daemon.gateway.pages.rendering import FILE_HEADERS, Rendering
from daemon.gateway.refusals import Refusal
from proto.control_pb2 import AskReply
from proto.notes import notes_of
from proto.questions_pb2 import ProposeRequest, SourceReply, Upload, WhoamiReply

Turn = Callable[[str], AbstractContextManager[None]]
ReadBody = Callable[[Request], Awaitable[bytes]]
Bring = Callable[[Request, str], Awaitable[Upload]]

_DPI: Final = 110  # of a page's image: A4 in 910 x 1290 pixels, which can be read
_ROUNDS: Final = 100  # the newest, of which a look-on shows the curve
_PIECE: Final = 64 << 10  # bytes; each has its time to be taken
_OTHER_PATHS: Final = ("/v1/", "/health", "/metrics")
_WAY_BACK: Final = re.compile(r"/source\?[\w.~%&=+-]{1,4000}", re.ASCII)
_PLACE: Final = re.compile(r"[0-9]{1,8}", re.ASCII)
_HEADINGS: Final = {
    403: "Not for this token",
    404: "Not here",
    405: "Not asked like this",
    429: "Too many at once",
    503: "Not now",
    504: "No answer in time",
}


class Page(NamedTuple):
    """One of those that the head of each page leads to."""

    scope: str  # that a token needs for it
    path: str
    name: str  # as people read it


PAGES: Final = (
    Page("ask", "/", "Ask"),
    Page("search", "/search", "Search"),
    Page("upload", "/upload", "Upload"),
    Page("view", "/federation", "Federation"),
)
"""In the order in which they are shown; who signs in is led to the first that is for them."""


@dataclass(frozen=True)
class Person:
    """Who is signed in: what their token is called and for, and until when."""

    credential: str
    site: str
    name: str
    until: str  # a day
    scopes: frozenset[str]

    @property
    def pages(self) -> list[Page]:
        """Those that their token is for."""
        return [one for one in PAGES if one.scope in self.scopes]

    @classmethod
    def of(cls, credential: str, who: WhoamiReply) -> Person:
        """As fedd says of a credential."""
        until = datetime.fromtimestamp(who.expires_unix_s, UTC).date().isoformat()
        return cls(credential, who.site, who.name, until, frozenset(who.scopes))


class Pages:
    """Answers browsers by asking fedd, with the token of whoever is signed in."""

    def __init__(self, fedd: Fedd, turn: Turn, body_of: ReadBody, bring: Bring) -> None:
        """``turn``: one of those that wait for fedd. ``body_of``: a body, bounded.

        ``bring``: passes the file in a body on, with a credential.
        """
        self._fedd = fedd
        self._turn = turn
        self._body_of = body_of
        self._bring = bring
        self._rendering = Rendering()

    def routes(self) -> list[Route]:
        """What is answered, and how it is asked."""
        return [
            Route("/", self.home, methods=["GET"]),
            Route("/sign-in", self.sign_in, methods=["POST"]),
            Route("/sign-out", self.sign_out, methods=["POST"]),
            Route("/ask", self.ask, methods=["POST"]),
            Route("/ask/stream", self.stream, methods=["POST"]),
            Route("/search", self.search_page, methods=["GET"]),
            Route("/search", self.search, methods=["POST"]),
            Route("/propose", self.propose, methods=["POST"]),
            Route("/federation", self.federation, methods=["GET"]),
            Route("/upload", self.upload_page, methods=["GET"]),
            Route("/upload", self.upload, methods=["POST"]),
            Route("/source", self.source, methods=["GET"]),
            Route("/source/page", self.page_image, methods=["GET"]),
            Route("/source/original", self.original, methods=["GET"]),
            Route(f"{self._rendering.folder}/{{name}}", self.static, methods=["GET"]),
            *(
                Route(path, self.home_instead, methods=["GET"])
                for path in ("/ask", "/ask/stream", "/propose", "/sign-in", "/sign-out")
            ),
        ]

    @staticmethod
    def is_for(request: Request) -> bool:
        """Whether a browser asks for a page, rather than a program for an answer."""
        path = request.url.path
        return not path.startswith(_OTHER_PATHS) and "text/html" in request.headers.get(
            "accept", ""
        )

    def refused(self, request: Request, error: Exception) -> Response:
        """A page that says why there is no other, and what to do."""
        if not isinstance(error, HTTPException):
            error = Refusal(500, "the gateway failed at this; its log says where")
        if error.status_code == 401:
            return self._signed_out(request, error.detail)
        person = getattr(request.state, "asks", None)
        if person is not None and error.status_code != 403:
            return self._ask_page(person, request.state.question, refusal=error)
        cause = "there is no such page here" if error.detail == "Not Found" else error.detail
        page = self._problem(error.status_code, cause)
        page.headers.update(error.headers or {})
        return page

    # ---- in and out --------------------------------------------------------------

    async def home(self, request: Request) -> Response:
        """Where one asks; or signs in first."""
        if not session.credential_of(request):
            return self._rendering.page("sign_in.html", 200, **_signing_in(request, ""))
        person = await self._person(request)
        if "ask" in person.scopes:
            return self._ask_page(person)
        if person.pages:
            return RedirectResponse(person.pages[0].path, 303)
        cause = f"the token {person.name!r} is for nothing that this page has"
        return self._problem(403, cause, person)

    async def home_instead(self, _request: Request) -> Response:
        """For who opens an address anew to which a form was sent."""
        return RedirectResponse("/", 303)

    async def sign_in(self, request: Request) -> Response:
        """The browser keeps the token, if it is one."""
        told = await self._form(request)
        request.state.question = question = told.get("question", "")
        if fault := session.fault_of(told.get("token", "")):
            raise Refusal(401, fault)
        token = session.token_in(told["token"])
        credential = f"Bearer {token}"
        person = Person.of(credential, await self._fedd.whoami(credential))
        to = told.get("to", "")
        reply: Response = RedirectResponse(to if _WAY_BACK.fullmatch(to) else "/", 303)
        if question and "ask" in person.scopes:  # which was refused for the token before
            reply = self._ask_page(person, question)
        session.sign_in(request, reply, token)
        return reply

    async def sign_out(self, request: Request) -> Response:
        """The browser forgets the token, and what it was shown."""
        _check_own_page(request)
        reply = RedirectResponse("/", 303, {"clear-site-data": '"cache"'})
        session.sign_out(reply)
        return reply

    # ---- questions ---------------------------------------------------------------

    async def ask(self, request: Request) -> Response:
        """An answer with its citations; what was asked stays in its field."""
        person, question = await self._asked(request)
        with self._turn(person.credential):
            reply = await self._fedd.ask(question, person.credential)
        return self._ask_page(person, question, reply)

    async def stream(self, request: Request) -> Response:
        """The same, for our script: the answer's text as it is written, then the page of `ask`."""
        person, question = await self._asked(request)

        def ended_by(error: Exception) -> bytes:
            return _page_event(self.refused(request, error))

        return EventStream(self._parts(person, question), ended_by)

    async def _parts(self, person: Person, question: str) -> AsyncGenerator[bytes, None]:
        with self._turn(person.credential):
            async with aclosing(self._fedd.stream(question, person.credential)) as parts:
                async for part in parts:
                    if part.HasField("whole"):
                        yield _page_event(self._ask_page(person, question, part.whole))
                        return
                    yield event({"text": part.text})

    async def search_page(self, request: Request) -> Response:
        """Where one searches."""
        person = await self._person(request)
        if "search" not in person.scopes:
            raise Refusal(403, f"the token {person.name!r} needs the scope 'search' for this")
        return self._search_page(person, SearchForm())

    async def search(self, request: Request) -> Response:
        """Passages, best first."""
        asked = search_form(await self._form(request))
        person = await self._person(request)
        try:
            with self._turn(person.credential):
                reply = await self._fedd.search(asked.request(), person.credential)
        except Refusal as refusal:
            if refusal.status_code in (401, 403):
                raise
            return self._search_page(person, asked, refusal=refusal)
        return self._search_page(person, asked, views.found(reply.passages))

    async def propose(self, request: Request) -> Response:
        """That a passage answers what was asked, or does not: in a tab of its own.

        The answer stays in the other one, which holds what no address has.
        """
        told = await self._form(request)
        person, said = await self._person(request), told.get("answers", "")
        if said not in ("yes", "no"):
            raise Refusal(400, "say whether the passage answers the question: yes or no")
        wanted = ProposeRequest(
            question=told.get("question", ""),
            document_id=told.get("document", ""),
            passage_id=told.get("passage", ""),
            answers=said == "yes",
        )
        with self._turn(person.credential):
            await self._fedd.propose(wanted, person.credential)
        return self._rendering.page(
            "noted.html", 200, person=person, here="", answers=wanted.answers
        )

    # ---- files that people bring ---------------------------------------------------

    async def upload_page(self, request: Request) -> Response:
        """Where one brings a file, and sees what became of those before."""
        person = await self._person(request)
        return await self._upload_page(person, request.query_params.get("collection", "")[:100])

    async def upload(self, request: Request) -> Response:
        """A file that becomes a document of the site; who opens the page anew brings it once."""
        _check_own_page(request)
        person = await self._person(request)
        try:
            await self._bring(request, person.credential)
        except Refusal as refusal:
            if refusal.status_code in (401, 403):
                raise
            return await self._upload_page(person, _collection_of(request), refusal)
        return RedirectResponse(f"/upload?collection={quote(_collection_of(request))}", 303)

    async def _upload_page(
        self, person: Person, collection: str, refusal: Refusal | None = None
    ) -> Response:
        """``collection``: in which the last was to lie; the next is likely to."""
        reply = await self._fedd.uploads(person.credential)
        page = self._rendering.page(
            "upload.html",
            200 if refusal is None else refusal.status_code,
            here="upload",
            person=person,
            told=views.uploads(reply, linked="search" in person.scopes),
            collection=collection,
            cause="" if refusal is None else refusal.detail,
        )
        return _with_headers_of(refusal, page)

    # ---- the federation ----------------------------------------------------------

    async def federation(self, request: Request) -> Response:
        """What is running, the rounds, the peers, the curve: for who looks on."""
        person = await self._person(request)
        with self._turn(person.credential):
            reply = await self._fedd.view(_ROUNDS, person.credential)
        told = federation.shown(reply, time.time())
        return self._rendering.page("federation.html", 200, here="view", person=person, seen=told)

    # ---- sources -----------------------------------------------------------------

    async def source(self, request: Request) -> Response:
        """A passage in its document, with the sentence that was cited, and its page's image."""
        person, told = await self._person(request), request.query_params
        document_id, passage_id = _document_of(told), told.get("passage", "")
        with self._turn(person.credential):
            reply = await self._fedd.source(document_id, passage_id, person.credential)
        return self._source_page(person, document_id, reply, told)

    async def page_image(self, request: Request) -> Response:
        """The image of a page."""
        person, told = await self._person(request), request.query_params
        number = _number(told.get("page", ""))
        _check_get(request)
        with self._turn(person.credential):
            sent = await self._fedd.page_image(_document_of(told), number, _DPI, person.credential)
        return _sent(sent, "image/png")

    async def original(self, request: Request) -> Response:
        """The file that a document was read from, to be kept and not to be shown.

        No browser opens it here: what is in it is its author's, and no page of the site's.
        """
        person, document_id = await self._person(request), _document_of(request.query_params)
        _check_get(request)
        with self._turn(person.credential):
            source = await self._fedd.source(document_id, "", person.credential)
            sent = await self._fedd.original(document_id, person.credential)
        reply = _sent(sent, "application/octet-stream")
        reply.headers["content-disposition"] = _attached(source.file_name)
        return reply

    async def static(self, request: Request) -> Response:
        """The stylesheet, the script, the icon."""
        file = self._rendering.file(request.path_params["name"])
        if file is None:
            raise HTTPException(404)
        return file

    # ---- what is shown -----------------------------------------------------------

    def _ask_page(
        self,
        person: Person,
        question: str = "",
        reply: AskReply | None = None,
        refusal: HTTPException | None = None,
    ) -> Response:
        told: dict[str, Any] = {"sources": [], "passages": [], "runs": []}
        if reply is not None:
            cited = [one["url_citation"] for one in cited_at(reply)]
            marks = [(one["start_index"], one["end_index"]) for one in cited]
            told = {
                "notes": notes_of(reply),
                "runs": views.answer_runs(reply, marks),
                "sources": views.cited(reply, linked="search" in person.scopes),
                "passages": views.retrieved(reply, linked="search" in person.scopes),
            }
        page = self._rendering.page(
            "ask.html",
            200 if refusal is None else refusal.status_code,
            here="ask",
            person=person,
            question=question,
            reply=reply,
            cause="" if refusal is None else refusal.detail,
            **told,
        )
        return _with_headers_of(refusal, page)

    def _search_page(
        self,
        person: Person,
        asked: SearchForm,
        passages: list[views.ShownPassage] | None = None,
        refusal: Refusal | None = None,
    ) -> Response:
        page = self._rendering.page(
            "search.html",
            200 if refusal is None else refusal.status_code,
            here="search",
            person=person,
            asked=asked,
            passages=passages,
            cause="" if refusal is None else refusal.detail,
        )
        return _with_headers_of(refusal, page)

    def _source_page(
        self, person: Person, document_id: str, reply: SourceReply, told: QueryParams
    ) -> Response:
        ends = [told.get(name, "") for name in ("from", "to")]
        at = [int(end) for end in ends if _PLACE.fullmatch(end)]
        shown = []
        for place, one in enumerate(reply.passages, start=1):
            here = place == reply.place
            mark = views.mark_in(one.text, *at) if here and len(at) == 2 else None
            text = views.shown_text(one.text, one.context, one.kind, mark)
            shown.append({"here": here, "text": text, "ocr": one.ocr})
        found = reply.passages[reply.place - 1] if reply.place else None
        page = found.page if found is not None else 0
        image = f"/source/page?document={quote(document_id, safe='')}&page={page}"
        original = f"/source/original?document={quote(document_id, safe='')}"
        around = [
            views.source_link(document_id, reply.passages[end].id) if reply.passages else ""
            for end in (0, -1)
        ]
        return self._rendering.page(
            "source.html",
            200,
            here="source",
            person=person,
            document_id=document_id,
            title=reply.title or document_id,
            source=reply,
            passages=shown,
            page=page,
            rectangle=None if found is None else views.rectangle_of(found),
            image=image if page and reply.has_pages else "",
            download=original if reply.file_name and "originals" in person.scopes else "",
            gone="passage" in told and not reply.place,
            earlier=around[0],
            later=around[1],
        )

    def _problem(self, status: int, cause: str, person: Person | None = None) -> Response:
        heading = _HEADINGS.get(status, "Something went wrong")
        told = {"person": person, "here": "", "heading": heading, "cause": cause}
        return self._rendering.page("problem.html", status, **told)

    def _signed_out(self, request: Request, cause: str) -> Response:
        page = self._rendering.page("sign_in.html", 401, **_signing_in(request, cause))
        # A link of another site comes without the cookie, and must not end what it began.
        if session.credential_of(request):
            session.sign_out(page)
        return page

    # ---- who asks ----------------------------------------------------------------

    async def _form(self, request: Request) -> dict[str, str]:
        """The fields of a form that a page of ours has sent; Refusal for any other."""
        _check_own_page(request)
        try:
            return read_form(request, await self._body_of(request))
        except FormError as error:
            raise Refusal(400, str(error)) from None

    async def _asked(self, request: Request) -> tuple[Person, str]:
        """Who asks what; kept with the request, so that no refusal loses a question."""
        request.state.question = (await self._form(request)).get("question", "")
        request.state.asks = await self._person(request)
        return request.state.asks, request.state.question

    async def _person(self, request: Request) -> Person:
        """Who is signed in; Refusal where nobody is, or fedd refuses their token."""
        credential = session.credential_of(request)
        if not credential:
            raise Refusal(401, "you are not signed in, or not any more")
        return Person.of(credential, await self._fedd.whoami(credential))


def _collection_of(request: Request) -> str:
    """Of a file that was brought, as far as that was read."""
    return str(getattr(request.state, "collection", ""))


def _check_own_page(request: Request) -> None:
    if not session.is_own_page(request):
        cause = "this form was not sent by this site's own page: open the page, and send it there"
        raise Refusal(403, cause, unread=True)


def _signing_in(request: Request, cause: str) -> dict[str, Any]:
    """What the page to sign in is made of: where it leads to, if a link of ours was followed.

    A question that was asked meanwhile stays in it.
    """
    to = f"{request.url.path}?{request.url.query}" if request.method == "GET" else ""
    to = to if _WAY_BACK.fullmatch(to) else ""
    again = to if session.came_from_elsewhere(request) else ""
    question = getattr(request.state, "question", "")
    told = {"cause": cause, "to": to, "again": again, "question": question}
    return {"person": None, "here": "", **told}


def _page_event(page: Response) -> bytes:
    """The last event of a stream."""
    return event({"page": str(page.body, "utf-8")})


def _with_headers_of(refusal: HTTPException | None, page: Response) -> Response:
    if refusal is not None:
        page.headers.update(refusal.headers or {})
    return page


def _document_of(told: QueryParams) -> str:
    document_id = told.get("document", "")
    if not document_id:
        raise Refusal(404, "this address names no document")
    return document_id


def _number(text: str) -> int:
    if not _PLACE.fullmatch(text) or not int(text):
        raise Refusal(404, "this address names no page: they are numbered from 1")
    return int(text)


def _check_get(request: Request) -> None:
    """A file is not made and sent for who wants its headers alone."""
    if request.method != "GET":
        raise Refusal(405, "ask for this with GET")


def _sent(sent: Sent, media_type: str) -> StreamingResponse:
    async def pieces() -> AsyncIterator[bytes]:
        async for piece in sent.pieces:
            for begin in range(0, len(piece), _PIECE):
                yield piece[begin : begin + _PIECE]

    headers = {**FILE_HEADERS, "content-length": str(sent.size)}
    return StreamingResponse(pieces(), media_type=media_type, headers=headers)


def _attached(name: str) -> str:
    """Content-Disposition with a file's name (RFC 6266), whatever signs are in it."""
    plain = re.sub(r"[^\w.() -]", "_", name, flags=re.ASCII)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(name, safe='')}"
