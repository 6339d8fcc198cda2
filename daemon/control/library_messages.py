"""Documents, passages, what is found and judged as messages of control.proto, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from os.path import normpath
from typing import Any, Final, cast

from google.protobuf.descriptor import Descriptor

from daemon.answering.abstention import Abstention
from daemon.answering.generator import Citation, GeneratedAnswer
from daemon.answering.prompts.kinds import FOR, OTHERWISE, RULES
from daemon.answering.prompts.prompts import slots_of, text_of
from daemon.evaluation import abstention, answers
from daemon.evaluation.intervals import Interval
from daemon.jobs.answering import Searched
from daemon.jobs.answers import MeanFigure
from daemon.jobs.prompts import TriedPrompt
from daemon.learning.generator.in_use import InUse
from daemon.library.catalogue.filters import Filters
from daemon.library.catalogue.near_duplicates import Copies
from daemon.library.catalogue.waiting import StoredWaiting
from daemon.library.contents import Passage, StoredDocument
from daemon.library.folders import Folder
from daemon.library.readers.bounds import fault_of, on_one_line
from daemon.library.readers.documents import (
    MAX_ID,
    MAX_PAGES_NAMED,
    MAX_SOURCE,
    MAX_SPANS,
    Document,
    Kind,
    Pair,
    Place,
    Reference,
    Span,
    Waiting,
)
from daemon.library.store import Library
from daemon.services.answer_evaluation import (
    FAILED_TOLD,
    AbstentionJudged,
    AnswerEvaluation,
    AskedPair,
)
from daemon.services.folders import FolderState
from proto import control_pb2 as control

_LESS_IS_BETTER = (*answers.LOWER_IS_BETTER, *abstention.LOWER_IS_BETTER)
_LONGEST_TOLD = 200  # characters of a question that failed
PASSAGES_SHOWN: Final = 500  # of a document at a time: each may repeat long headings


def parsed(
    request: control.IngestRequest, watched: Sequence[Folder] = ()
) -> tuple[list[Document], list[Pair], list[str]]:
    """Documents and pairs of a batch; what is out of bounds is refused by name, the rest kept.

    So is what is not of a folder that is ``watched``, and would lie in its collection.
    """
    documents: list[Document] = []
    pairs: list[Pair] = []
    errors: list[str] = []
    for item in request.documents:
        if len(item.spans) > MAX_SPANS:  # each takes more room here than in the message
            errors.append(f"document {item.id}: more than {MAX_SPANS:,} spans: cut it")
        elif folder := _other_folder(item.id, item.source, watched):
            errors.append(_lies_in(item.id, folder))
        elif fault := fault_of(document := _document(item)):
            errors.append(fault)
        else:
            documents.append(document)
    for told in request.pairs:
        if fault := fault_of(pair := _pair(told)):
            errors.append(fault)
        else:
            pairs.append(pair)
    return documents, pairs, errors


def _pair(told: control.Pair) -> Pair:
    known = None
    if told.HasField("reference"):
        said = told.reference
        known = Reference(tuple(said.answers), said.qtype, said.reasoning)
    return Pair(told.query, tuple(told.positives), told.split, known)


def _other_folder(document_id: str, source: str, watched: Sequence[Folder]) -> Folder | None:
    """The watched folder in whose collection it would lie, though it is no file of that."""
    for folder in watched:
        of_it = normpath(source).startswith(f"{folder.path}/")  # "..": it only passes by there
        if document_id.startswith(f"{folder.name}/") and not of_it:
            return folder
    return None


def _lies_in(document_id: str, folder: Folder) -> str:
    return (
        f"document {document_id}: {folder.name} is the collection of the watched folder "
        f"{folder.path}: put it there, or give another --collection"
    )


def waiting_of(
    request: control.IngestRequest, watched: Sequence[Folder] = ()
) -> tuple[list[Waiting], list[str]]:
    """As `parsed`: what of a batch waits for OCR."""
    taken, errors = [], []
    for told in request.waiting:
        one = Waiting(told.document_id, on_one_line(told.pages), told.source)
        if not 1 <= len(one.document_id) <= MAX_ID or len(one.source) > MAX_SOURCE:
            errors.append(f"waiting pages: an id has 1 to {MAX_ID} characters, a source less")
        elif not 1 <= len(one.pages) <= MAX_PAGES_NAMED:
            errors.append(f"waiting pages: 1 to {MAX_PAGES_NAMED} characters name them")
        elif folder := _other_folder(one.document_id, one.source, watched):
            errors.append(_lies_in(one.document_id, folder))
        else:
            taken.append(one)
    return taken, errors


def _document(item: control.Document) -> Document:
    return Document(
        id=item.id,
        title=item.title,
        text=item.text,
        split=item.split,
        spans=tuple(map(_span, item.spans)),
        source=item.source,
        author=item.author,
        date=item.date,
        language=item.language,
        tags=tuple(dict.fromkeys(item.tags.tags)) if item.HasField("tags") else None,
    )


def _span(span: control.Span) -> Span:
    place = cast(Place, tuple(span.place)) if span.place else None
    return Span(cast(Kind, span.kind), span.begin, span.end, span.page, place, span.ocr)


def filters_of(request: control.SearchRequest) -> Filters:
    """What a search asks of documents."""
    asked = {one.name: getattr(request, one.name) for one in fields(Filters)}
    return Filters(**{**asked, "tags": tuple(request.tags)})


def stored_message(document: StoredDocument) -> control.StoredDocument:
    """A document as it is listed."""
    return control.StoredDocument(**asdict(document))


def waiting_message(one: StoredWaiting) -> control.WaitingDocument:
    """What waits for OCR, as it is listed."""
    return control.WaitingDocument(
        id=one.document_id,
        pages=one.pages,
        source=one.source,
        read_again=bool(one.folder) and not one.cause,
        cause=one.cause,
    )


def document_message(document: Document) -> control.Document:
    """A whole document, as an ingest takes it."""
    told = control.Document(
        id=document.id,
        title=document.title,
        text=document.text,
        split=document.split,
        spans=[
            control.Span(**(vars(span) | {"place": span.place or ()})) for span in document.spans
        ],
        author=document.author,
        date=document.date,
        language=document.language,
    )
    if document.tags:
        told.tags.tags.extend(document.tags)
    return told


def exported_documents(documents: Sequence[Document]) -> control.ExportDocumentsPart:
    """Whole documents. It may take a second: of one with 100,000 blocks a third."""
    return control.ExportDocumentsPart(documents=map(document_message, documents))


def pair_message(pair: Pair) -> control.Pair:
    """A pair, as an ingest takes it."""
    known = None if pair.reference is None else control.Reference(**asdict(pair.reference))
    return control.Pair(
        query=pair.query, positives=pair.positives, split=pair.split, reference=known
    )


def passage_messages(
    request: control.ShowDocumentRequest, library: Library
) -> list[control.ShownPassage]:
    """The next of a document's passages, with what says nearly the same."""
    passages = library.passages_of(request.id)[request.after :][:PASSAGES_SHOWN]
    copies = library.near.copies({one.rowid: () for one in passages})
    return [_shown(one, copies.get(one.rowid)) for one in passages]


def _shown(passage: Passage, copies: Copies | None) -> control.ShownPassage:
    return control.ShownPassage(
        text=passage.text,
        context=passage.context,
        kind=passage.kind,
        page=passage.page,
        copies=_copies(copies),
        ocr=passage.ocr,
    )


def _copies(copies: Copies | None) -> control.Copies | None:
    return None if copies is None else control.Copies(**asdict(copies))


def folder_message(
    state: FolderState, refused: int, told: list[tuple[str, str]]
) -> control.WatchedFolder:
    """Of what was not read, files that are remembered first."""
    looked = state.looked
    not_read = [*told, *((one.name, one.cause) for one in looked.not_read)]
    return control.WatchedFolder(
        name=state.folder.name,
        path=str(state.folder.path),
        files=looked.seen,
        waiting=len(looked.memory.waiting),
        other_kinds=looked.other_kinds,
        links=looked.links,
        refused=refused + looked.not_read_count,
        not_read=[
            control.FileNotRead(path=_utf8(name), cause=_utf8(cause)) for name, cause in not_read
        ],
        looked_unix_ms=state.looked_unix_ms,
        look_seconds=looked.seconds,
        trouble=_utf8(state.trouble),
        reading=state.reading,
    )


def _utf8(text: str) -> str:
    """A file's name need not be UTF-8; a message's text has to."""
    return text.encode(errors="replace").decode()


def answer_fields(answer: GeneratedAnswer, message: Descriptor) -> dict[str, Any]:
    """What a message tells of an answer: those of its fields that answers have, too, by name.

    So a field that both have is told without a word here.
    """
    told: dict[str, Any] = {"answer": answer.text, "abstained": not answer.citations}
    told["by_ocr"] = [one.number for one in answer.citations if one.ocr]
    for name, value in vars(answer).items():
        of_citations = name in ("citations", "passages")
        told[name] = [*map(citation_message, value)] if of_citations else value
    return {name: value for name, value in told.items() if name in message.fields_by_name}


def citation_message(citation: Citation) -> control.Citation:
    """A citation of an answer, or a passage that it could be made of."""
    return control.Citation(**asdict(citation))


def prompts_message(in_force: str, generator: str) -> control.ListPromptsReply:
    """The prompts as their files have them, and the rule of auto; reads files."""
    return control.ListPromptsReply(
        prompts=[
            control.PromptFile(
                name=kind, slots=slots_of(kind), text=text_of(kind), **{"for": questions}
            )
            for kind, questions in FOR.items()
        ],
        in_force=in_force,
        generator=generator,
        rules=[
            *(f"{rule.kind}: a question that {rule.says}" for rule in RULES),
            f"{OTHERWISE}: any other",
        ],
    )


def tried_message(tried: TriedPrompt) -> control.TestPromptReply:
    """A filled prompt, and the answer where it was wanted."""
    reply = control.TestPromptReply.DESCRIPTOR
    answered = {} if tried.answer is None else answer_fields(tried.answer, reply)
    filled = tried.filled  # its text and its passages, which answers have others of
    told = answered | {"text": filled.text, "passages": filled.given, "tokens": filled.tokens}
    return control.TestPromptReply(**told, found=tried.found)


def told_threshold(abstention: Abstention) -> float:
    """The evidence below which no question is answered; NaN where every one is."""
    return abstention.threshold if math.isfinite(abstention.threshold) else math.nan


def found_messages(searched: Searched, explain: bool) -> list[control.FoundPassage]:
    """``explain``: with how each passage came to its place."""
    told = []
    for ranked, words, title_words in zip(
        searched.passages, searched.words, searched.title_words, strict=True
    ):
        passage = ranked.passage
        found = control.FoundPassage(
            document_id=passage.document_id,
            passage_id=passage.id,
            title=passage.title,
            text=passage.text,
            score=ranked.score,
            context=passage.context,
            kind=passage.kind,
            page=passage.page,
            copies=_copies(ranked.copies),
            ocr=passage.ocr,
        )
        if explain and ranked.explanation is not None:
            found.explanation.CopyFrom(
                control.RankExplanation(
                    **asdict(ranked.explanation), words=words, title_words=title_words
                )
            )
        told.append(found)
    return told


def answers_judged(judged: AnswerEvaluation) -> control.EvaluateAnswersReply:
    """What an evaluation of answers came to; of abstention with the first generator's alone."""
    others = [answers_judged(one) for one in judged.compared]
    for other in others:
        other.ClearField("abstention")
    values = judged.writer.values or InUse()
    return control.EvaluateAnswersReply(
        pairs=judged.pairs,
        questions=judged.questions,
        asked_before=judged.asked_before,
        partial=judged.partial,
        failed=[
            control.FailedQuestions(
                cause=cause,
                questions=len(pairs),
                first=[
                    f"{pair.query[:_LONGEST_TOLD]} ({pair.positives[0]})"
                    for pair in pairs[:FAILED_TOLD]
                ],
            )
            for cause, pairs in sorted(judged.failed.items(), key=lambda one: -len(one[1]))
        ],
        without_answer=judged.without_answer,
        unanswered=judged.unanswered,
        split=judged.split,
        generator=judged.writer.name,
        generator_digest=bytes.fromhex(values.version),
        generator_round=judged.writer.round,
        generator_share=values.share,
        stood_in=[
            control.StoodIn(cause=cause, questions=questions)
            for cause, questions in sorted(judged.stood_in.items(), key=lambda one: -one[1])
        ],
        compared=others,
        over_first=_answer_figures(judged.over_first),
        model_digest=judged.model_digest,
        seconds=judged.seconds,
        figures=_answer_figures(judged.figures),
        by_label=[
            control.LabelFigures(
                label=one.label,
                value=one.value,
                questions=one.questions,
                figures=_answer_figures(one.figures),
            )
            for one in judged.by_label
        ],
        missing=[
            control.MissingFigure(metric=name, cause=cause)
            for name, cause in judged.missing.items()
        ],
        abstention=abstention_judged(judged.abstention),
    )


def abstention_judged(judged: AbstentionJudged) -> control.AbstentionFigures:
    """How well it is told what the documents answer."""
    return control.AbstentionFigures(
        threshold=told_threshold(judged.by),
        fitted_on=judged.by.questions,
        questions=judged.questions,
        split=judged.split,
        figures=_answer_figures(judged.figures),
        missing=judged.cause,
    )


def answer_judged(one: AskedPair) -> control.JudgedAnswer:
    """A pair, and what it was answered with."""
    known = one.pair.reference or Reference()
    return control.JudgedAnswer(
        question=one.pair.query,
        references=known.answers,
        documents=one.pair.positives,
        **answer_fields(one.answered, control.JudgedAnswer.DESCRIPTOR),
        qtype=known.qtype,
        reasoning=known.reasoning,
    )


def _answer_figures(intervals: Mapping[str, Interval]) -> list[control.AnswerFigure]:
    return [
        control.AnswerFigure(
            metric=metric,
            mean=f.mean,
            low=f.low,
            high=f.high,
            lower_is_better=metric in _LESS_IS_BETTER,
            questions=f.questions if isinstance(f, MeanFigure) else 0,
        )
        for metric, f in intervals.items()
    ]
