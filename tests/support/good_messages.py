"""A good message of each kind, as it passes the door; tests spoil one field of it at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from peers.wire import signed_bounds
from proto import federation_pb2 as pb

DIGEST = b"\x07" * 32
CERTIFICATE = b"\x30" * 60


def training() -> pb.TrainingPlan:
    return pb.TrainingPlan(
        adapt=pb.HEAD,
        local_epochs=1,
        batch_size=32,
        learning_rate=1e-4,
        temperature=0.05,
        hard_negatives=4,
        seed=2**64 - 1,
        bits=16,
        min_participants=3,
        max_num_examples=10_000,
    )


def run() -> pb.Run:
    return pb.Run(
        generation=1,
        run_id="run-1",
        requested_by="alpha",
        target_round=3,
        plan=training(),
        federation_id="med",
    )


def plan() -> pb.Plan:
    return pb.Plan(
        round=1,
        parent_digest=DIGEST,
        participants=[
            pb.Participant(site=site, num_examples=1, certificate=CERTIFICATE)
            for site in ("alpha", "beta", "gamma")
        ],
        key_dealer="beta",
        training=training(),
        shape_digest=DIGEST,
        manifest_version=1,
        coordinator="alpha",
        faulty_sites=1,
        bundle_digest=DIGEST,
        full_weight=1,
    )


def signature(site: str = "alpha") -> pb.Signature:
    return pb.Signature(site=site, signature=b"\x30" * 70, certificate=CERTIFICATE)


def signed(message: Message, site: str = "alpha") -> pb.Signed:
    return pb.Signed(
        body=message.SerializeToString(),
        site=site,
        signature=b"\x30" * 70,
        certificate=CERTIFICATE,
    )


def promise() -> pb.Promise:
    return pb.Promise(
        federation_id="med",
        manifest_digest=DIGEST,
        manifest_version=1,
        round=1,
        attempt=2,
        run_digest=DIGEST,
        parent_digest=DIGEST,
        shape_digest=DIGEST,
        num_examples=90,
        willing=True,
        lock=pb.LockName(attempt=1, root_digest=DIGEST, model_digest=DIGEST),
        stated=pb.StatedName(attempt=1, digest=DIGEST),
        incarnation=bytes(16),
    )


def contribution() -> pb.Contribution:
    return pb.Contribution(
        plan_digest=DIGEST, scale_digest=DIGEST, upload_digest=DIGEST, nonce=bytes(16)
    )


def commitment() -> pb.KeyCommitment:
    return pb.KeyCommitment(plan_digest=DIGEST, public_digest=DIGEST, secret_digest=DIGEST)


def products() -> pb.Products:
    return pb.Products(question_digest=DIGEST, products=[1.0, -2.5, 9e30], imaginary=["beta"])


def statement(kind: pb.StatementKind.ValueType = pb.SUM) -> pb.Statement:
    return pb.Statement(
        federation_id="med",
        manifest_digest=DIGEST,
        manifest_version=1,
        round=1,
        parent_digest=DIGEST,
        run_digest=DIGEST,
        bundle_digest=DIGEST,
        kind=kind,
        plan=plan(),
        scale_exponents=[0, -3],
        contributions=[signed(contribution(), site) for site in ("alpha", "beta")],
        rejected=["gamma"],
        sum_digest=DIGEST,
        commitment=signed(commitment(), "beta"),
        question_digest=DIGEST if kind == pb.SUM else b"",
        answers=[signed(products(), "beta")] if kind == pb.SUM else [],
        byzantine_sites=1 if kind == pb.QUESTION else 0,
    )


def masked_statement() -> pb.Statement:
    made = statement()
    made.plan.training.mode, made.plan.key_dealer = pb.MASKING, ""
    made.roster_digest, made.question_digest = DIGEST, b""
    made.ClearField("commitment")
    made.ClearField("answers")
    made.dropouts.append("gamma")
    return made


def restated() -> pb.Statement:
    made = statement()
    for field in signed_bounds._OF_A_SUM:
        made.ClearField(field)  # type: ignore[arg-type]
    made.kind, made.root_digest, made.model_digest = pb.RESTATED, DIGEST, DIGEST
    return made


def applied() -> pb.Applied:
    return pb.Applied(root_digest=DIGEST, model_digest=DIGEST, mean_loss=0.5)


def certificate_of_statement() -> pb.StatementCertificate:
    return pb.StatementCertificate(
        statement=statement().SerializeToString(), signatures=[signature(), signature("beta")]
    )


def lock() -> pb.Lock:
    return pb.Lock(
        certificate=certificate_of_statement(),
        proof=[signed(applied()), signed(applied(), "beta")],
    )


def vote_body() -> pb.VoteBody:
    return pb.VoteBody(
        federation_id="med",
        round=1,
        parent_digest=DIGEST,
        model_digest=DIGEST,
        contributors=["alpha", "beta"],
        manifest_version=1,
        plan_digest=DIGEST,
        rules=2,
        manifest_digest=DIGEST,
        statement_digest=DIGEST,
        mean_loss=0.5,
    )


def vote(*, body: bool = True) -> pb.Vote:
    return pb.Vote(
        attempt=0,
        body=vote_body() if body else None,
        site="alpha",
        signature=b"\x30" * 70,
        certificate=CERTIFICATE,
        mean_loss=math.nan,
    )


def certificate() -> pb.Certificate:
    return pb.Certificate(body=vote_body(), votes=[vote(body=False)] * 2, unix_ms=1)


def report() -> pb.RoundReport:
    return pb.RoundReport(
        round=1,
        coordinator="alpha",
        contributors=["alpha", "beta"],
        phases=[pb.PhaseTime(phase="train", seconds=1.5)],
        shared_values=10,
        mean_loss=0.5,
        rejections=[pb.Rejection(site="gamma", reason="norm 9 is 14 MADs above the median 2")],
    )


def promised() -> pb.Promised:
    return pb.Promised(promise=signed(promise()), lock=lock(), stated=signed(statement()))


def ended() -> pb.Ended:
    return pb.Ended(federation_id="med", round=1, reason="the key did not come")


def exponents() -> pb.Exponents:
    return pb.Exponents(plan_digest=DIGEST, scale_exponents=[-126, 0, 127])


# What travels in an envelope of its own.
BODIES: dict[str, Callable[[], Message]] = {
    "run": lambda: pb.RunWish(run=signed(run())),
    "prepare": lambda: pb.Prepare(
        round=1,
        head_digest=DIGEST,
        run=signed(run()),
        shape_digest=DIGEST,
        manifest_version=1,
        promise=promised(),
    ),
    "promised": promised,
    "behind": lambda: pb.Behind(round=2, head_round=0),
    "ahead": lambda: pb.Ahead(round=1, certificate=certificate()),
    "bundle": lambda: pb.Bundle(
        round=1,
        run=signed(run()),
        promises=[signed(promise(), site) for site in ("alpha", "beta", "gamma")],
        lock=lock(),
    ),
    "plan_answer": lambda: pb.PlanAnswer(round=1, reason="no, thank you"),
    "key_committed": lambda: pb.KeyCommitted(round=1, commitment=signed(commitment())),
    "trained": lambda: pb.Trained(round=1, exponents=signed(exponents())),
    "scale": lambda: pb.Scale(
        round=1, exponents=[signed(exponents(), site) for site in ("alpha", "beta")]
    ),
    "contributed": lambda: pb.Contributed(round=1, contribution=signed(contribution())),
    "state": lambda: pb.State(round=1, statement=statement().SerializeToString()),
    "stated": lambda: pb.Stated(round=1, statement_digest=DIGEST, signature=signature()),
    "certified": lambda: pb.Certified(round=1, certificate=certificate_of_statement()),
    "compared": lambda: pb.Compared(round=1, products=signed(products())),
    "challenge": lambda: pb.Challenge(round=1, challenge=bytes(32)),
    "proof": lambda: pb.Proof(round=1, answer=bytes(8)),
    "masking_order": lambda: pb.MaskingOrder(
        round=1,
        step=pb.SHARES,
        items=[pb.MaskingItem(site=site, content=bytes(82)) for site in ("alpha", "beta")],
    ),
    "masking_answer": lambda: pb.MaskingAnswer(
        round=1, step=pb.SHARES, items=[pb.MaskingItem(site="beta", content=bytes(82))]
    ),
    "openings": lambda: pb.Openings(
        round=1,
        opened=[
            pb.Opened(site=site, items=[pb.MaskingItem(site="gamma", content=bytes(33))])
            for site in ("alpha", "beta")
        ],
    ),
    "applied": lambda: pb.AppliedSum(round=1, applied=signed(applied())),
    "proven": lambda: pb.Proven(round=1, lock=lock()),
    "vote": vote,
    "commit": lambda: pb.Commit(certificate=certificate(), report=report()),
    "attempt_failed": lambda: pb.AttemptFailed(round=1, reason="the key did not come"),
    "ended": lambda: pb.EndedAttempt(ended=signed(ended())),
    "evidence": lambda: pb.Evidence(
        kind=pb.TWO_PROMISES, first=signed(promise()), second=signed(promise())
    ),
    "recall": lambda: pb.Recall(round=1),
    "remembered": lambda: pb.Remembered(
        round=1, promise=promised(), statement=signed(statement()), vote=vote(), lock=lock()
    ),
}

# What is signed as bytes inside of them, and read where it is used.
SIGNED: dict[str, Callable[[], Message]] = {
    "Run": run,
    "Promise": promise,
    "Plan": plan,
    "KeyCommitment": commitment,
    "Exponents": exponents,
    "Contribution": contribution,
    "Statement": statement,
    "Question": lambda: statement(pb.QUESTION),
    "Masked": masked_statement,
    "Restated": restated,
    "Products": products,
    "Applied": applied,
    "Ended": ended,
}


def envelope(body: str) -> pb.Envelope:
    message = pb.Envelope(federation_id="med", sender="alpha", manifest_version=1)
    getattr(message, body).CopyFrom(BODIES[body]())
    return message


def example(name: str) -> tuple[Message, Any]:
    """A good message, and the part of it that a path begins in."""
    if name in SIGNED:
        made = SIGNED[name]()
        return made, made
    whole = envelope(name)
    return whole, getattr(whole, name)


def hello() -> pb.HelloRequest:
    return pb.HelloRequest(
        protocol_version=1,
        software_version="1.2.3",
        features=["ckks"],
        federation_id="med",
        sender="alpha",
    )


def push() -> pb.PushFrame:
    return pb.PushFrame(
        federation_id="med",
        sender="alpha",
        name=pb.BlobName(kind=pb.SEALED_CONTEXT, round=1),
        total_bytes=3,
        frame=pb.Frame(data=b"abc", running_sha256=DIGEST, last=True),
    )


def pull() -> pb.PullRequest:
    name = pb.BlobName(kind=pb.MODEL_VERSION, digest=DIGEST)
    return pb.PullRequest(federation_id="med", sender="alpha", name=name, offset=3)
