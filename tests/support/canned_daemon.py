"""A control server with canned replies: real gRPC on a real Unix socket, no daemon behind it.

with canned_daemon(socket) as daemon:
    daemon.training = [progress(round=1, phase="train"), ...]
    main(["--socket", str(socket), "train", "--attach"])
    daemon.asked            # what fedctl sent
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc

from daemon.control.library_messages import prompts_message
from proto import control_pb2 as control
from proto import federation_pb2 as federation
from proto.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server
from tests.support.canned_replies import (
    DIGEST,
    audited_embeddings,
    audited_memory,
    committed_round,
    fitting_steps,
    how_it_learns,
    judged_answers,
    judged_retrieval,
    judged_versions,
    judging_steps,
    progress,
    stored,
)

COPIES = control.Copies(first=[control.Copy(document_id="old/d1", page=7)], count=3)
RUN = federation.Run(generation=1, run_id="r-1", requested_by="north", target_round=2)


class CannedDaemon(ControlServicer):
    """Answers every call, and remembers what it was asked."""

    people_fault = ""  # of the file of people who sign in elsewhere
    noted = control.AskReply()  # how an answer came about
    generator = control.GeneratorStatus()  # of the language model that is trained together

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.site = "north"
        self.empty = False  # nothing is here, so nothing is found
        self.full_after: int | None = None  # batches of an ingest
        self.unusable = 0  # of the pairs that are ingested
        self.repeated = 0  # of them, likewise
        self.training_pairs = 70
        self.proposals: list[control.Proposal] = []  # by id
        self.run = federation.Run.FromString(RUN.SerializeToString())
        self.refusal = ""  # when set, every call is refused with it, and
        self.refused_as = grpc.StatusCode.FAILED_PRECONDITION
        self.ingest_errors: list[str] = []
        self.documents = {"manuals/lift.txt", "manuals/lock.txt", "rules.md"}
        self.folders: list[control.WatchedFolder] = []
        self.waiting: list[control.WaitingDocument] = []
        self.originals: dict[str, bytes] | None = None  # files by document; None: not kept
        self.cut = 0  # bytes that are missing at the end of a file that is given out
        self.exporting: Callable[[str, Any], object] = lambda _name, _context: None
        self.learning = how_it_learns()
        self.privacy = control.PrivacyReply(
            unit="this site",
            delta=1e-5,
            epsilon_spent=2.5,
            epsilon_budget=8.0,
            epsilon_left=5.5,
            updates_noised=3,
            updates_bare=1,
            further_rounds=1,
            further_multiplier=2.0,
            further_cost=0.75,
            further_fits=True,
            least_multiplier=0.9,
            last_multiplier=2.0,
        )
        self.exposed = audited_embeddings()
        self.building: Iterable[control.BuildPairsProgress] = [
            control.BuildPairsProgress(done=3, total=44),
            control.BuildPairsProgress(
                done=44,
                total=44,
                finished=True,
                made=60,
                repeated=2,
                lost=26,
                seconds=1.5,
                learn_from="supplied",
                training_pairs=12,
            ),
        ]
        self.evaluating: Iterable[control.EvaluateProgress] = [
            control.EvaluateProgress(step="index"),
            control.EvaluateProgress(step="encoder", done=64, total=128),
            control.EvaluateProgress(step="encoder", done=128, total=128),
            control.EvaluateProgress(step="questions"),
        ]
        self.judged: control.EvaluateReply | None = judged_retrieval()
        self.judging: Iterable[control.EvaluateAnswersProgress] = judging_steps()
        self.judged_answers: control.EvaluateAnswersReply | None = judged_answers()
        self.judged_before: control.EvaluateAnswersReply | None = None  # and then given up
        self.left = threading.Event()  # who built pairs, or evaluated, is gone
        self.breaks: list[control.AuditBreak] = []
        self.rounds = [committed_round(1), committed_round(2)]
        self.training = [
            progress(round=1, phase="train", fraction=0.5, head_round=0),
            progress(round=1, phase="committed", loss=1.25, head_round=1),
            progress(round=2, phase="train", head_round=1, coordinator="east"),
            progress(round=2, phase="committed", loss=1.0, head_round=2, finished=True),
        ]
        self.personalising = fitting_steps()

    def _hear(self, request: Any, context: Any) -> None:
        self.asked.append(request)
        if self.refusal:
            context.abort(self.refused_as, self.refusal)

    def CreateToken(self, request: Any, context: Any) -> control.CreateTokenReply:
        self._hear(request, context)
        token = control.AccessToken(
            name=request.name,
            scopes=request.scopes,
            expires_unix_s=86_400 * request.days,
            collections=request.collections,
            all_documents=not request.collections,
        )
        empty = [one for one in request.collections if one == "later"]
        return control.CreateTokenReply(secret="hanse_told-once", token=token, empty=empty)

    def ChangeToken(self, request: Any, context: Any) -> control.ChangeTokenReply:
        self._hear(request, context)
        token = control.AccessToken(
            name=request.name,
            scopes=request.scopes or ["ask"],
            collections=request.collections,
            all_documents=request.all_documents,
        )
        empty = [one for one in request.collections if one == "later"]
        return control.ChangeTokenReply(token=token, empty=empty)

    def ListTokens(self, request: Any, context: Any) -> control.ListTokensReply:
        self._hear(request, context)
        kept: dict[str, Any] = {"scopes": ["ask"], "expires_unix_s": 2**33}
        return control.ListTokensReply(
            tokens=[
                control.AccessToken(
                    name="chat", last_used="2026-05-31", all_documents=True, **kept
                ),
                control.AccessToken(name="old", **(kept | {"expires_unix_s": 86_400})),
                control.AccessToken(
                    name="spare", revoked_unix_s=86_400, collections=["hr"], **kept
                ),
            ],
            people=True,
            people_fault=self.people_fault,
            issuers=[
                control.IdentityProvider(
                    name="clinic", issuer="https://sso.example", groups=2, keys=["2026-a", "2026-b"]
                )
            ],
            speakers=[control.IdentityProvider(name="chat", issuer="open-webui", groups=1)],
            blocked=[control.BlockedPerson(name="oidc:clinic:ann", since_unix_s=86_400)],
        )

    def BlockPerson(self, request: Any, context: Any) -> control.BlockPersonReply:
        self._hear(request, context)
        return control.BlockPersonReply()

    def RevokeToken(self, request: Any, context: Any) -> control.RevokeTokenReply:
        self._hear(request, context)
        return control.RevokeTokenReply(token=control.AccessToken(name=request.name))

    def Status(self, request: Any, context: Any) -> control.StatusReply:
        self._hear(request, context)
        return control.StatusReply(
            site=self.site,
            federation_id="hanse-test",
            software_version="0.1.0",
            head_round=2,
            model_digest=DIGEST,
            index_digest=DIGEST,
            wanted_digest=DIGEST,
            documents=0 if self.empty else 40,
            passages=0 if self.empty else 44,
            index_recall=0.9871,
            index_engine="hnswlib",
            pairs_valid=6,
            pairs_test=14,
            peers_connected=1,
            peers_total=2,
            resident_bytes=300 << 20,
            phase="idle",
            run=self.run,
            audit_breaks=self.breaks,
            last_error="round 2.0: east [did not answer]\x1b[31m",
            generator=self.generator,
        )

    def AcknowledgeBreaks(self, request: Any, context: Any) -> control.AcknowledgeBreaksReply:
        self._hear(request, context)
        return control.AcknowledgeBreaksReply(breaks=self.breaks)

    def Peers(self, request: Any, context: Any) -> control.PeersReply:
        self._hear(request, context)
        east = control.Peer(site="east", address="h:1", connected=True, clock_offset_ms=-12)
        west = control.Peer(site="west", address="h:2", last_contact_s=-1, last_error="refused")
        accused = control.Accused(
            site="west",
            signed="two votes of one attempt",
            first_seen_unix_ms=1_760_000_000_000,
            remedy="expel it",
        )
        return control.PeersReply(peers=[east, west], accused=[accused])

    def Rounds(self, request: Any, context: Any) -> control.RoundsReply:
        self._hear(request, context)
        found = [r for r in self.rounds if r.certificate.body.round >= request.first]
        return control.RoundsReply(rounds=found[-request.limit :])

    def Chain(self, request: Any, context: Any) -> Iterator[control.ChainPart]:
        self._hear(request, context)
        yield control.ChainPart(certificates=[r.certificate for r in self.rounds])

    def Ingest(self, request_iterator: Any, context: Any) -> Iterator[control.IngestProgress]:
        documents = pairs = 0
        for number, request in enumerate(request_iterator):
            self._hear(request, context)
            if number == self.full_after:
                context.abort(self.refused_as, "the disk is full\nfree space on it")
            documents += len(request.documents)
            pairs += len(request.pairs)
            so_far = control.IngestProgress(documents_new=documents, pairs=pairs)
            if self.originals is not None:
                so_far.keeps_originals = True
                wanted = (o for o in request.offered if not self._has(o.document_id, o.digest))
                so_far.originals_wanted.extend(o.document_id for o in wanted)
                for piece in request.pieces:
                    kept = self.originals.get(piece.document_id, b"")
                    self.originals[piece.document_id] = kept + piece.content
            yield so_far
        pairs -= self.repeated
        so_far = control.IngestProgress(
            documents_new=documents,
            pairs=pairs,
            pairs_repeated=self.repeated,
            passages_total=documents,
            index_total=documents,
            index_built=documents,
        )
        so_far.errors.extend(self.ingest_errors)
        yield so_far
        del so_far.errors[:]
        so_far.passages_embedded, so_far.done = documents, True
        so_far.pairs_usable = pairs - self.unusable
        if self.unusable:
            so_far.unknown_document, so_far.known_document = "[lift]", "lift.txt"
        yield so_far

    def _has(self, document_id: str, digest: bytes) -> bool:
        return sha256((self.originals or {}).get(document_id, b"")).digest() == digest

    def Original(self, request: Any, context: Any) -> Iterator[control.FilePart]:
        self._hear(request, context)
        yield from self._file((self.originals or {})[request.id])

    def PageImage(self, request: Any, context: Any) -> Iterator[control.FilePart]:
        self._hear(request, context)
        yield from self._file(b"\x89PNG")

    def _file(self, content: bytes) -> Iterator[control.FilePart]:
        half, end = len(content) // 2, len(content) - self.cut
        yield control.FilePart(
            content=content[:half], size=len(content), digest=sha256(content).digest()
        )
        yield control.FilePart(content=content[half:end])

    def ListDocuments(self, request: Any, context: Any) -> control.ListDocumentsReply:
        self._hear(request, context)
        found = [n for n in self.documents if n.startswith(request.begins) and n > request.after]
        page = [stored(name) for name in sorted(found)[: request.limit]]
        return control.ListDocumentsReply(documents=page)

    def ListWaiting(self, request: Any, context: Any) -> control.ListWaitingReply:
        self._hear(request, context)
        begin = [one for one in self.waiting if one.id.startswith(request.begins)]
        found = [one for one in begin if one.id > request.after]
        return control.ListWaitingReply(documents=found[: request.limit])

    def ShowDocument(self, request: Any, context: Any) -> control.ShowDocumentReply:
        self._hear(request, context)
        shown = [
            control.ShownPassage(
                text="Locks leak.",
                context="Of locks",
                kind="text",
                page=3,
                copies=COPIES,
                ocr=True,
            ),
            control.ShownPassage(text="Part\tTons\nSill\t2", kind="table", page=4),
        ]
        page = shown[request.after :][:1]  # long ones come in parts
        return control.ShowDocumentReply(document=stored(request.id), passages=page)

    def Folders(self, request: Any, context: Any) -> control.FoldersReply:
        self._hear(request, context)
        return control.FoldersReply(folders=self.folders, vanished="remove", scan_s=60)

    def ExportDocuments(self, request: Any, context: Any) -> Iterator[control.ExportDocumentsPart]:
        self._hear(request, context)
        ids = [name for name in request.ids or sorted(self.documents) if name in self.documents]
        names = [name for name in ids if name.startswith(request.begins)]
        yield control.ExportDocumentsPart(
            total=len(names), unknown=[name for name in request.ids if name not in ids]
        )
        for name in names:
            self.exporting(name, context)
            document = control.Document(
                id=name, title=f"Of {name}", text="Locks leak.\n", date="2024-05-31"
            )
            document.spans.add(kind="text", begin=0, end=11, ocr=True)
            document.tags.tags.append("wet")
            yield control.ExportDocumentsPart(documents=[document])
        pair = control.Pair(query="Warum läuft es?", positives=names, split="valid")
        yield control.ExportDocumentsPart(pairs=[pair] if names else [])

    def RemoveDocuments(
        self, request: Any, context: Any
    ) -> Iterator[control.RemoveDocumentsProgress]:
        self._hear(request, context)
        gone = self.documents & {*request.ids}
        self.documents -= gone
        state = control.RemoveDocumentsProgress(
            documents=len(gone), passages=2 * len(gone), pairs=1, unknown=set(request.ids) - gone
        )
        state.alike.extend(one for one in sorted(self.documents) if "rules.md" in gone)
        yield state
        state.done = True
        yield state

    def Ask(self, request: Any, context: Any) -> control.AskReply:
        self._hear(request, context)
        if self.empty:
            return control.AskReply(model_digest=DIGEST)
        cited = control.Citation(
            number=1,
            document_id="d1",
            passage_id="d1#0",
            title="Locks",
            text="Locks leak.",
            page=3,
            copies=COPIES,
            ocr=True,
        )
        reply = control.AskReply(answer="Locks leak. [1]", citations=[cited], passages=[cited])
        reply.MergeFrom(self.noted)
        return reply

    def Search(self, request: Any, context: Any) -> control.SearchReply:
        self._hear(request, context)
        if self.empty:
            return control.SearchReply(words_weight=0.1, title_weight=0.2)
        found = control.FoundPassage(
            document_id="d1",
            passage_id="d1#0",
            title="Locks\x1b[31m",
            text="Locks leak.",
            score=0.865,
            copies=COPIES,
        )
        new = control.FoundPassage(document_id="d2", passage_id="d2#0", text="Gates.", score=0.54)
        if request.explain:
            found.explanation.CopyFrom(
                control.RankExplanation(
                    meaning_place=2,
                    cosine=0.625,
                    title_share=0.75,
                    title_words=["locks"],
                    words_place=1,
                    words_share=0.9,
                    words=["locks", "leak"],
                    title_part=0.15,
                    words_part=0.09,
                    indexed=True,
                    level="sentence",
                    cross_score=-1.5,
                    place_before=3,
                )
            )
            new.explanation.CopyFrom(
                control.RankExplanation(
                    cosine=0.5, words_place=2, words_share=0.4, words_part=0.04, level="passage"
                )
            )
        return control.SearchReply(
            passages=[found, new], words_weight=0.1, title_weight=0.2, weighed_by=40
        )

    def Evaluate(self, request: Any, context: Any) -> Iterator[control.EvaluateProgress]:
        self._hear(request, context)
        context.add_callback(self.left.set)
        yield from self.evaluating
        if self.judged is not None:
            self.judged.split = request.split or "test"
            yield control.EvaluateProgress(step="done", result=self.judged)

    def EvaluateAnswers(
        self, request: Any, context: Any
    ) -> Iterator[control.EvaluateAnswersProgress]:
        self._hear(request, context)
        context.add_callback(self.left.set)
        if request.so_far:
            if self.judged_before is None:
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no question was answered")
            yield control.EvaluateAnswersProgress(step="done", result=self.judged_before)
            return
        yield from self.judging
        if self.judged_answers is not None:
            self.judged_answers.split = request.split or "test"
            yield control.EvaluateAnswersProgress(step="done", result=self.judged_answers)

    def ListPrompts(self, request: Any, context: Any) -> control.ListPromptsReply:
        self._hear(request, context)
        return prompts_message("auto", "extractive")

    def TestPrompt(self, request: Any, context: Any) -> control.TestPromptReply:
        self._hear(request, context)
        return control.TestPromptReply(
            name="novel",
            guessed_by="begins with a word: 'Who'",
            text="<passage 1> [b]Locks\nQuestion: Who?",
            passages=1,
            found=2,
            tokens=30,
            answer="Mags does. [1]" if request.run else "",
            dropped=int(request.run),
        )

    def BuildPairs(self, request: Any, context: Any) -> Iterator[control.BuildPairsProgress]:
        self._hear(request, context)
        context.add_callback(self.left.set)
        yield from self.building

    def MadePairs(self, request: Any, context: Any) -> control.MadePairsReply:
        self._hear(request, context)
        told = control.MadePair(
            kind="cloze", query="Why [bold]leak?\x1b[31m", texts=["Locks\nleak."], documents=["d1"]
        )
        answered = control.MadePair(
            kind="written",
            query="What leaks?",
            texts=["Locks leak.", "Lochs leak."],
            documents=["d1", "d2"],
            answers=["", "Lochs\x1b[31m do."],
        )
        return control.MadePairsReply(
            kinds=[
                control.MadeKind(kind="cloze", pairs=60, usable=58),
                control.MadeKind(kind="written", pairs=5, usable=4, answered=3),
            ],
            examples=[told, answered] if request.examples else [],
            learn_from="supplied+made",
            supplied=12,
            training_pairs=self.training_pairs,
            triples=control.TripleCounts(supplied=7, made=3, to_distil=2),
        )

    def DropPairs(self, request: Any, context: Any) -> control.MadePairsReply:
        self._hear(request, context)
        return control.MadePairsReply(learn_from="supplied", supplied=12, training_pairs=12)

    def ListProposals(self, request: Any, context: Any) -> control.ListProposalsReply:
        self._hear(request, context)
        behind = [one for one in self.proposals if one.id > request.after]
        return control.ListProposalsReply(proposals=behind[: request.limit])

    def DecideProposals(self, request: Any, context: Any) -> control.DecideProposalsReply:
        self._hear(request, context)
        named = [*request.accept, *request.reject]
        here = {one.id for one in self.proposals}
        self.proposals = [one for one in self.proposals if one.id not in named]
        return control.DecideProposalsReply(
            accepted=len(here & {*request.accept}),
            rejected=len(here & {*request.reject}),
            forgotten=2 if request.forget_token else 0,
            waiting=len(self.proposals),
            unknown=[one for one in named if one not in here],
        )

    @cached_property
    def generator_curve(self) -> control.LearningCurveReply:
        """What is told of the generator's versions."""
        return judged_versions()

    def LearningCurve(self, request: Any, context: Any) -> control.LearningCurveReply:
        self._hear(request, context)
        if request.model == "generator":
            return self.generator_curve
        judged = [(0, "shared", 0.0), (1, "shared", 0.125), (2, "shared", 0.25)]
        judged.append((2, "mixture", 0.5))
        return control.LearningCurveReply(
            points=[
                control.CurvePoint(
                    round=n,
                    model_digest=DIGEST,
                    metric=metric,
                    value=value,
                    questions=20,
                    kind=kind,
                    own_digest=b"" if kind == "shared" else DIGEST,
                )
                for n, kind, value in judged
                for metric in ("mrr@10", "map")
            ],
            missing="the newest version has not been indexed yet",
        )

    def Train(self, request: Any, context: Any) -> control.TrainReply:
        self._hear(request, context)
        return control.TrainReply(run=RUN)

    def Learning(self, request: Any, context: Any) -> control.LearningReply:
        self._hear(request, context)
        return self.learning

    def Personalise(self, request: Any, context: Any) -> Iterator[control.PersonaliseProgress]:
        self._hear(request, context)
        yield from self.personalising

    def Privacy(self, request: Any, context: Any) -> control.PrivacyReply:
        self._hear(request, context)
        return self.privacy

    def StopTraining(self, request: Any, context: Any) -> control.TrainReply:
        self._hear(request, context)
        return control.TrainReply(run=RUN)

    def AuditEmbeddings(
        self, request: Any, context: Any
    ) -> Iterator[control.AuditEmbeddingsProgress]:
        self._hear(request, context)
        yield control.AuditEmbeddingsProgress(step="exact", fraction=0.5)
        yield control.AuditEmbeddingsProgress(step="done", fraction=1, result=self.exposed)

    def AuditMemory(self, request: Any, context: Any) -> Iterator[control.AuditMemoryProgress]:
        self._hear(request, context)
        yield control.AuditMemoryProgress(step="base model", fraction=0.5)
        yield control.AuditMemoryProgress(step="done", fraction=1, result=audited_memory())

    def WatchTraining(self, request: Any, context: Any) -> Iterator[control.TrainingProgress]:
        self._hear(request, context)
        yield from self.training


@contextmanager
def canned_daemon(socket: Path) -> Iterator[CannedDaemon]:
    """Serve at the socket until the block ends."""
    daemon = CannedDaemon()
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.max_receive_message_length", -1)])
    add_ControlServicer_to_server(daemon, server)
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    try:
        yield daemon
    finally:
        server.stop(grace=None).wait()
