"""What answers to fedctl are made with, and how each is checked, audited and refused.

A refusal is a status with one or two lines of text: the cause, and the remedy.
"""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before grpc, see there

# isort: split
import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from config.settings import Settings
from daemon.answering.answering import QuestionRefusedError
from daemon.control.unparsed import MOST_PARTS, TooManyParts, count_parts
from daemon.learning.options import EvaluationError, LearningError
from daemon.library.schema import LibraryError
from daemon.personal.store import PersonalStore
from daemon.process.telemetry import LoopLag
from daemon.process.workers import Worker, WorkerCrashed
from daemon.rounds.driver import Driver
from daemon.rounds.readiness import refresh
from daemon.services.answer_evaluation import AnswerJudge, NothingToCompareError
from daemon.services.collection import Collection, NotIndexedYet
from daemon.services.curve import Curve
from daemon.services.folders import WatchedFolders
from daemon.services.generator.generator import FederatedGenerator
from daemon.services.generator.memory_audit import MemoryAudit
from daemon.services.generator.personaliser import GeneratorPersonaliser
from daemon.services.inversion_audit import EmbeddingAudit
from daemon.services.library_changes import ChangeUnderWay, SilentError
from daemon.services.originals import KeptOriginals
from daemon.services.pair_maker import PairMaker
from daemon.services.personaliser import Personaliser
from daemon.services.rights import Rights, of_all
from daemon.state.audit import Action, AuditLog
from daemon.state.audit_format import AuditError
from daemon.state.people import lies_in
from daemon.state.privacy_ledger import LedgerError
from daemon.state.store import StoreError
from daemon.state.tokens import TokenError, TokenRefused, Tokens
from daemon.state.versions import VersionError
from peers.rounds.runs import RunRefused
from peers.wire.bounds import Rule, rule_for
from peers.wire.errors import RemoteProtocolError
from peers.wire.manifest import RETRIEVER, NamedModel
from proto import control_pb2 as control
from proto import control_pb2_grpc as rpc
from proto import questions_pb2 as questions
from proto.bounds import bounds_of

_REFUSALS = (
    RunRefused,
    NotIndexedYet,
    QuestionRefusedError,
    EvaluationError,
    LearningError,
    LibraryError,
    LedgerError,
    StoreError,
    VersionError,
    TokenError,
    TokenRefused,
    WorkerCrashed,
    ChangeUnderWay,
    SilentError,
)
CONTROL: ServiceDescriptor = control.DESCRIPTOR.services_by_name["Control"]
Context = grpc.aio.ServicerContext[Any, Any]

# The fields that say their bounds; the size of a message bounds the rest.
_RULES: dict[str, dict[str, Rule]] = {
    name: {
        field.name: rule_for(name, field.name)
        for field in message.fields
        if bounds_of(field).ByteSize()
    }
    for file in (control, questions)
    for name, message in file.DESCRIPTOR.message_types_by_name.items()
}


@dataclass(frozen=True)
class Services:
    """What runs beside rounds, as far as people start it or ask about it."""

    pairs: PairMaker
    curve: Curve
    embeddings: EmbeddingAudit
    memory: MemoryAudit
    personaliser: Personaliser
    own_generator: GeneratorPersonaliser
    folders: WatchedFolders
    originals: KeptOriginals
    answers: AnswerJudge


@dataclass(frozen=True)
class ProcessFigures:
    """Of this process and its workers; ``started``: by the monotonic clock, in seconds."""

    lag: LoopLag
    workers: tuple[Worker, ...]
    started: float


@dataclass(frozen=True)
class ServiceContext:
    """What the daemon knows about itself.

    ``drivers``: of the rounds of each model that is trained here, by its name, the retriever's
    among them. ``coming``: the retriever of ``[next_retriever]`` where that is not in use; None:
    none. ``generator``: as `driver_of` would need it, also where its rounds are not run.
    """

    drivers: Mapping[str, Driver]
    collection: Collection
    generator: FederatedGenerator
    settings: Settings
    coming: NamedModel | None
    personal: PersonalStore
    audit: AuditLog
    tokens: Tokens
    services: Services
    process: ProcessFigures

    @property
    def driver(self) -> Driver:
        """Of the retriever's rounds."""
        return self.drivers[RETRIEVER]

    def driver_of(self, model: str) -> Driver:
        """Of a model's rounds; "": the retriever's. Raises RunRefused where there are none."""
        driver = self.drivers.get(model or RETRIEVER)
        if driver is None:
            raise RunRefused(self.generator.why_no_rounds(self.driver.manifest))
        return driver

    async def refresh(self) -> None:
        """Documents or pairs have changed: what this site can contribute may be another thing."""
        await refresh(driver.readiness for driver in self.drivers.values())


class Caller:
    """Who calls, as the audit log has them: how what they ask for is recorded and refused."""

    def __init__(self, around: ServiceContext, actor: str) -> None:
        self._audit = around.audit
        self._around = around
        self.actor = actor

    @asynccontextmanager
    async def audited(
        self, context: Context, action: Action, **asked: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """As `AuditLog.span`; refused where it can't be recorded."""
        async with AsyncExitStack() as stack:
            span = self._audit.span(self.actor, action, **asked)
            try:
                found = await stack.enter_async_context(span)
            except AuditError as error:
                await refuse(context, str(error))
            yield found

    async def answered(self, context: Context, work: Awaitable[Any]) -> Any:
        """The result of ``work``; what it refuses is told to the person as it is."""
        try:
            return await work
        except _REFUSALS as refusal:
            senseless = isinstance(refusal, QuestionRefusedError | NothingToCompareError)
            await refuse(context, self.worded(refusal), senseless=senseless)

    def worded(self, refusal: Exception) -> str:
        """As the person is told it: who administers the site, all of it."""
        return str(refusal)

    async def check_sees(
        self, document_id: str, action: Action, context: Context, rights: Rights
    ) -> None:
        """The call ends where there is no such document for these rights, whatever there is else.

        In the same words for each: who asks learns of no document that they may not see, neither
        by a cause nor by what they may have meant. Who administers the site is told of these by
        what is asked.
        """
        if rights is of_all:
            return
        here = await self.may_see(document_id, context, rights)
        if here:
            known = self._around.collection.known([document_id])
            here = bool(await self.answered(context, known))
        if not here:
            async with self.audited(context, action):
                await refuse_unknown(document_id, context)

    async def may_see(self, document_id: str, context: Context, rights: Rights) -> bool:
        """Whether it is, or would be, a document of theirs."""

        async def looked_up() -> tuple[str, ...] | None:
            return rights()

        of = await self.answered(context, looked_up())
        return of is None or lies_in(document_id, of)


async def refuse_unknown(document_id: str, context: Context) -> NoReturn:
    """End the call, for whoever has rights to some documents alone."""
    await context.abort(grpc.StatusCode.NOT_FOUND, f"no document {document_id!r} here")


class Calls(rpc.ControlServicer):
    """What all topics of the control service share; whoever calls administers the site."""

    def __init__(self, around: ServiceContext, actor: str) -> None:
        self._around = around
        self._driver = around.driver
        self._audit = around.audit
        self._actor = actor
        self._caller = Caller(around, actor)
        self._audited, self._answered = self._caller.audited, self._caller.answered

    async def _driver_of(self, model: str, context: Context) -> Driver:
        """As `ServiceContext.driver_of`; the call ends where there is none."""
        try:
            return self._around.driver_of(model)
        except RunRefused as refusal:
            await refuse(context, str(refusal))


async def refuse(
    context: Context, cause: str, remedy: str = "", *, senseless: bool = False
) -> NoReturn:
    """End the call with the cause and, on a line of its own, the remedy.

    ``senseless``: it can't be asked for, however things stand here; to fedctl a usage error.
    """
    text = f"{cause}\n{remedy}" if remedy else cause
    status = grpc.StatusCode
    await context.abort(status.INVALID_ARGUMENT if senseless else status.FAILED_PRECONDITION, text)


class WithinBounds(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs alone
    """Refuses what is asked out of bounds, whichever method it is for.

    Of a stream each request when its method reads it; the method judges documents and pairs.
    """

    def __init__(self, service: ServiceDescriptor = CONTROL) -> None:
        self._kinds = {method.name: method.input_type for method in service.methods}

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """The handler of a call, behind the check."""
        handler = await continuation(handler_call_details)
        if handler is None:  # unknown to grpc, too
            return handler

        kind = self._kinds[handler_call_details.method.rpartition("/")[2]]

        async def answered(raw: bytes, context: Context) -> Any:
            return await handler.unary_unary(await _checked(kind, raw, context), context)

        async def streamed(raw: bytes, context: Context) -> AsyncIterator[Any]:
            request = await _checked(kind, raw, context)
            async for reply in handler.unary_stream(request, context):
                yield reply

        async def checked(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
            async for raw in requests:
                yield await _checked(kind, raw, context)

        async def conversed(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
            async for reply in handler.stream_stream(checked(requests, context), context):
                yield reply

        coded = (None, handler.response_serializer)  # bytes come, and are parsed when counted
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(conversed, *coded)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(streamed, *coded)
        return grpc.unary_unary_rpc_method_handler(answered, *coded)


async def _checked(kind: Descriptor, raw: bytes, context: Context) -> Message:
    """A request as it came, parsed if it is one that is meant; else it is refused."""
    try:
        await asyncio.to_thread(count_parts, raw, kind)
        request = await asyncio.to_thread(GetMessageClass(kind).FromString, raw)
    except TooManyParts:
        cause = f"more than {MOST_PARTS:,} parts in a request: send several"
        await refuse(context, cause, senseless=True)
    except DecodeError:
        await refuse(context, "not a request of this version of fedd", senseless=True)
    try:
        for name, rule in _RULES[request.DESCRIPTOR.name].items():
            rule(name, getattr(request, name))
    except RemoteProtocolError as error:
        await refuse(context, str(error), senseless=True)
    return request
