"""The site's own JSON: what scripts and agents ask of its documents, and what they are told."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from google.protobuf.message import Message
from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError
from pydantic_core import from_json

from daemon.gateway.conversation import cited_at
from daemon.gateway.refusals import Refusal, first_mistake
from proto import bounds
from proto import control_pb2 as control
from proto import questions_pb2 as questions
from proto.notes import notes_of


def _most(message: str, name: str) -> Any:
    """The bounds of a field as they stand in questions.proto; fedd holds them."""
    _, _, most = bounds.chosen(message, name)
    return most


# ---- what is asked -----------------------------------------------------------------


class Asked(BaseModel):
    """What is asked; fedd holds the bounds of texts."""

    model_config = ConfigDict(extra="forbid")


class Ask(Asked):
    """A question that wants an answer."""

    question: str = Field(min_length=1, description="One question, in a whole sentence.")


class Search(Asked):
    """A question that wants passages, of some documents or of all."""

    question: str = Field(min_length=1, description="What is looked for, as a question or words.")
    top_k: int = Field(
        0,
        ge=0,
        le=_most("SearchRequest", "top_k"),
        description="How many passages; 0: as many as the site uses for an answer.",
    )
    collection: str = Field("", description="Only documents that were ingested as this.")
    title: str = Field("", description="Only documents whose title has all of these words.")
    author: str = Field("", description="Only documents whose author has all of these words.")
    since: str = Field("", description="Only documents of this day (2024-05-31) or later.")
    until: str = Field("", description="Only documents of this day or earlier.")
    language: str = Field("", description="Only documents in it, as en or de (ISO 639-1).")
    # The first mistake is told, and no other is looked for.
    tags: Annotated[list[str], Field(fail_fast=True)] = Field(
        [], description="Only documents that have all of these."
    )


class GetPassage(Asked):
    """The id of a passage."""

    passage_id: str = Field(min_length=1, description="As `ask` or `search` told it.")


class Feedback(Asked):
    """Whether a document answers a question, as somebody says who has looked."""

    question: str = Field(min_length=1, description="As it was asked.")
    document_id: str = Field(min_length=1, description="As `ask` or `search` told it.")
    passage_id: str = Field("", description="Of the document, likewise; empty: all of it.")
    answers: StrictBool = Field(description="It does.")


A = TypeVar("A", bound=Asked)


def parsed(takes: type[A], body: bytes) -> A:
    """What is asked, of a body of JSON; Refusal as `read`."""
    try:
        asked = from_json(body)
    except ValueError:
        asked = None
    if not isinstance(asked, dict):
        raise Refusal(400, "the body: it must be one object of JSON")
    return read(takes, asked)


def read(takes: type[A], asked: dict[str, Any]) -> A:
    """What is asked; Refusal that names the first mistake, and repeats nothing of a value."""
    known = takes.model_fields
    if unknown := next((name for name in asked if name not in known), None):
        raise Refusal(400, f"nothing is called {unknown[:50]!r} here: there are {', '.join(known)}")
    try:
        return takes.model_validate(asked)
    except ValidationError as error:
        raise Refusal(400, first_mistake(error, "the request")) from None


# ---- what comes back ---------------------------------------------------------------


class Source(BaseModel):
    """What a passage is of."""

    document_id: str
    passage_id: str = Field(description="For `get_passage`.")
    title: str = Field(description="Of the document; may be empty.")
    page: int | None = Field(description="On which the passage begins; null: no pages.")
    kind: str = Field(description="Of the passage: text, table or figure.")
    context: str = Field(description="What stands above it: a heading, a table's header.")
    ocr: bool = Field(description="Some of it was read from a picture: compare it with the page.")


class Mark(BaseModel):
    """Characters of the answer."""

    start: int
    end: int


class Citation(Source):
    """A sentence that the answer rests on."""

    number: int = Field(description="The [n] in the answer.")
    sentence: str = Field(description="Of the document, that the answer rests on.")
    marks: list[Mark] = Field(description="Where its [n] stands in the answer, in characters.")
    unsupported: bool = Field(description="A statement cites it that it does not support.")


class Answer(BaseModel):
    """An answer with the sentences that it rests on."""

    answer: str = Field(description="With [n] behind each statement.")
    abstained: bool = Field(description="The documents do not answer this.")
    probability: float | None = Field(description="That they do, 0 to 1; null: not known here.")
    dropped: int = Field(description="Statements taken out, for what they cite has them not.")
    instead: str = Field(description="Why the language model did not answer; empty: it did.")
    cut_short: str = Field(description="Why it did not to the answer's end; empty: it did.")
    unread_language: str = Field(
        description="The question's, where it seems to be one that is not searched well; or empty."
    )
    by_ocr: list[int] = Field(description="The [n] whose passage was read from a picture.")
    notes: list[str] = Field(description="What of all this a person should know, in sentences.")
    citations: list[Citation]
    model_version: str = Field(description="Digest of the version that answered.")
    generator_version: str = Field(
        description="Of the generator trained together, the version that wrote it; empty: none did."
    )


class Copy(BaseModel):
    """A passage that says nearly the same."""

    document_id: str
    page: int | None


class Found(Source):
    """A passage that fits."""

    text: str
    score: float = Field(description="Greater is better; of this question alone.")
    also_in: list[Copy] = Field(description="Where nearly the same stands; the first few.")


class FoundPassages(BaseModel):
    """Passages for a question."""

    passages: list[Found] = Field(description="Best first.")
    model_version: str = Field(description="Digest of the version that was searched.")


class Place(BaseModel):
    """A part of a page, of its width and height from 0 to 1."""

    left: float
    top: float
    right: float
    bottom: float


class PassageRead(Source):
    """A passage, and what stands beside it."""

    text: str
    place: Place | None = Field(description="On its page; null: not known.")
    before: str | None = Field(description="Id of the passage in front of it; null: none.")
    after: str | None = Field(description="Id of the passage behind it; null: none.")


class Upload(BaseModel):
    """A file that somebody brought, and what became of it."""

    document_id: str = Field(description="What it is called, or is to be.")
    bytes: int
    unix_s: int = Field(description="When it came.")
    state: str = Field(
        description="waiting, reading, stored, searchable, unchanged (it is here already), refused."
    )
    cause: str = Field(description="Why it was refused, or what of it was not read; may be empty.")


class Uploads(BaseModel):
    """What may be brought, and what was."""

    documents: list[Upload] = Field(description="The newest first, of this token, since a start.")
    collections: list[str] | None = Field(description="Into which, or below; null: any.")
    most_bytes: int = Field(description="Of a file; 0: none is taken.")
    endings: list[str] = Field(description="Of names of files that are read.")


def _alike(kind: type[BaseModel], message: Message) -> dict[str, Any]:
    """What is said under the same name there: values, and lists of them."""
    fields = message.DESCRIPTOR.fields_by_name
    lists = {name for name, field in fields.items() if field.is_repeated}
    messages = {name for name, field in fields.items() if field.message_type is not None}
    same = [name for name in kind.model_fields if name in fields and name not in messages]
    told = {name: getattr(message, name) for name in same}
    return {name: [*value] if name in lists else value for name, value in told.items()}


def _source(of: control.Citation | control.FoundPassage | questions.PassageReply) -> dict[str, Any]:
    return {
        "document_id": of.document_id,
        "passage_id": of.passage_id,
        "title": of.title,
        "page": of.page or None,
        "kind": of.kind,
        "context": of.context,
        "ocr": of.ocr,
    }


def answer_of(reply: control.AskReply) -> Answer:
    """What fedd answers."""
    marks: dict[int, list[Mark]] = {}
    for one in cited_at(reply):
        start, end = (one["url_citation"][name] for name in ("start_index", "end_index"))
        marks.setdefault(int(reply.answer[start + 1 : end - 1]), []).append(
            Mark(start=start, end=end)
        )
    told = _alike(Answer, reply) | {"probability": reply.probability or None}
    return Answer(
        **told,
        notes=notes_of(reply),
        citations=[
            Citation(
                number=one.number,
                sentence=one.text,
                marks=marks.get(one.number, []),
                unsupported=one.unsupported,
                **_source(one),
            )
            for one in reply.citations
        ],
        model_version=reply.model_digest.hex(),
        generator_version=reply.generator_digest.hex(),
    )


def found_in(reply: control.SearchReply) -> FoundPassages:
    """What fedd found."""
    return FoundPassages(
        passages=[
            Found(
                text=one.text,
                score=one.score,
                also_in=[
                    Copy(document_id=copy.document_id, page=copy.page or None)
                    for copy in one.copies.first
                ],
                **_source(one),
            )
            for one in reply.passages
        ],
        model_version=reply.model_digest.hex(),
    )


def passage_of(reply: questions.PassageReply) -> PassageRead:
    """The passage that fedd tells."""
    sides = ("left", "top", "right", "bottom")
    return PassageRead(
        text=reply.text,
        place=Place(**dict(zip(sides, reply.place, strict=True))) if reply.place else None,
        before=reply.before or None,
        after=reply.after or None,
        **_source(reply),
    )


def brought(upload: questions.Upload) -> Upload:
    """What fedd says of a file."""
    return Upload(**_alike(Upload, upload))


def uploads_of(reply: questions.UploadsReply) -> Uploads:
    """What fedd says of files."""
    return Uploads(
        documents=[brought(one) for one in reply.uploads],
        collections=None if reply.all_documents else list(reply.collections),
        most_bytes=reply.most_bytes,
        endings=list(reply.endings),
    )
