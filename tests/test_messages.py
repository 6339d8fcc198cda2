"""No field of any message gets past its bounds, and no bytes do more than be refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from peers import messages
from peers.bounds import COUNT_MAX
from peers.errors import RemoteProtocolError
from peers.messages import BLOB_BYTES, FRAME_BYTES, check, decode, one_line, parse
from proto import federation_pb2 as pb

DIGEST = b"\x07" * 32
CERTIFICATE = b"\x30" * 700


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
        generation=1, run_id="run-1", requested_by="alpha", target_round=3, plan=training()
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
    )


def vote(*, body: bool = True) -> pb.Vote:
    return pb.Vote(
        attempt=0,
        body=vote_body() if body else None,
        site="alpha",
        signature=b"\x30" * 72,
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


BODIES: dict[str, Callable[[], Message]] = {
    "run": run,
    "prepare": lambda: pb.Prepare(
        round=1, head_digest=DIGEST, run=run(), shape_digest=DIGEST, manifest_version=1
    ),
    "promise": lambda: pb.Promise(
        round=1,
        head_digest=DIGEST,
        accepted=pb.Accepted(value=vote_body()),
        num_examples=90,
        willing=True,
        shape_digest=DIGEST,
        certificate=CERTIFICATE,
    ),
    "nack": lambda: pb.Nack(round=1, attempt=1, promised_attempt=2),
    "behind": lambda: pb.Behind(round=2, head_round=0),
    "ahead": lambda: pb.Ahead(round=1, certificate=certificate()),
    "plan": lambda: pb.Plan(
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
        train_deadline_ms=60_000,
    ),
    "plan_answer": lambda: pb.PlanAnswer(round=1, reason="no, thank you"),
    "trained": lambda: pb.Trained(round=1, scale_exponents=[-126, 0, 127]),
    "scale": lambda: pb.Scale(round=1, scale_exponents=[1], contributors=["alpha", "beta"]),
    "apply": lambda: pb.Apply(
        round=1,
        contributors=["alpha", "beta"],
        sum_digest=DIGEST,
        scale_exponents=[0],
        rejected=["gamma"],
        nonces=[b"", bytes(16)],
    ),
    "challenge": lambda: pb.Challenge(round=1, challenge=bytes(32)),
    "proof": lambda: pb.Proof(round=1, answer=bytes(8)),
    "compare": lambda: pb.Compare(
        round=1, sites=["alpha", "beta"], products_digest=DIGEST, byzantine_sites=1
    ),
    "masking_order": lambda: pb.MaskingOrder(
        round=1,
        step=pb.OUTCOME,
        items=[pb.MaskingItem(site="alpha"), pb.MaskingItem(site="beta")],
        dropouts=["gamma"],
    ),
    "masking_answer": lambda: pb.MaskingAnswer(
        round=1, step=pb.SHARES, items=[pb.MaskingItem(site="beta", content=bytes(82))]
    ),
    "compared": lambda: pb.Compared(round=1, products=[1.0, -2.5, 9e30], imaginary=["beta"]),
    "accept": lambda: pb.Accept(round=1, value=vote_body()),
    "vote": vote,
    "commit": lambda: pb.Commit(certificate=certificate(), report=report()),
    "attempt_failed": lambda: pb.AttemptFailed(round=1, reason="the key did not come"),
}


def envelope(body: str) -> pb.Envelope:
    message = pb.Envelope(federation_id="med", sender="alpha", manifest_version=1)
    getattr(message, body).CopyFrom(BODIES[body]())
    return message


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


def test_every_field_of_the_protocol_has_a_rule() -> None:
    for name, descriptor in pb.DESCRIPTOR.message_types_by_name.items():
        rules = messages._RULES[getattr(pb, name)]
        assert set(rules) == {field.name for field in descriptor.fields}, name


def test_every_kind_of_object_has_a_bound() -> None:
    assert set(BLOB_BYTES) == set(pb.BlobKind.values()) - {pb.BLOB_KIND_UNSPECIFIED}


def test_every_message_has_a_good_example_here() -> None:
    assert set(BODIES) == {field.name for field in pb.Envelope.DESCRIPTOR.oneofs[0].fields}


@pytest.mark.parametrize("body", BODIES)
def test_good_messages_pass_and_survive_the_wire(body: str) -> None:
    message = envelope(body)
    assert parse(pb.Envelope, message.SerializeToString()).WhichOneof("body") == body


@pytest.mark.parametrize("make", [hello, push, pull])
def test_good_calls_pass(make: Callable[[], Message]) -> None:
    check(make())


# ---- one bad field at a time ----------------------------------------------------

# body, path inside it, bad value, what the error says
BAD: list[tuple[str, str, Any, str]] = [
    ("run", "run_id", "", "run.run_id is ''; expected [0-9a-z-]{1,36}"),
    ("run", "run_id", "Run", "run.run_id is 'Run'"),
    ("run", "requested_by", "-a", "run.requested_by is '-a'; expected [a-z0-9][a-z0-9-]{0,62}"),
    ("run", "requested_by", "a" * 64, "requested_by is 'aaa"),
    ("run", "generation", COUNT_MAX + 1, "generation is 4611686018427387905; expected 0 .. "),
    ("run", "plan.adapt", 0, "run.plan.adapt is 0; expected one of 1, 2"),
    ("run", "plan.adapt", 99, "run.plan.adapt is 99; expected one of 1, 2"),
    ("run", "plan.local_epochs", 101, "local_epochs is 101; expected 0 .. 100"),
    ("run", "plan.batch_size", 1, "batch_size is 1; expected 2 .. 4096"),
    ("run", "plan.batch_size", 4097, "batch_size is 4097; expected 2 .. 4096"),
    ("run", "plan.learning_rate", 0.0, "learning_rate is 0.0; expected above 0 .. 1"),
    ("run", "plan.learning_rate", 1.01, "learning_rate is 1.01"),
    ("run", "plan.learning_rate", math.nan, "learning_rate is nan"),
    ("run", "plan.temperature", 0.0, "temperature is 0.0; expected 0.001 .. 10"),
    ("run", "plan.temperature", math.inf, "temperature is inf"),
    ("run", "plan.hard_negatives", 65, "hard_negatives is 65; expected 0 .. 64"),
    ("run", "plan.bits", 10, "bits is 10; expected one of 8, 12, 16"),
    ("run", "plan.min_participants", 1, "min_participants is 1; expected 2 .. 256"),
    ("run", "plan.max_num_examples", 0, "max_num_examples is 0; expected 1 .. "),
    ("prepare", "round", 0, "prepare.round is 0; expected 1 .. "),
    ("prepare", "attempt", 2**32 - 1, "prepare.attempt is 4294967295"),
    ("prepare", "head_digest", b"", "prepare.head_digest is 0 bytes; expected 32 bytes"),
    ("prepare", "shape_digest", b"x" * 33, "shape_digest is 33 bytes; expected 32 bytes"),
    ("prepare", "run.plan.bits", 0, "Envelope.prepare.run.plan.bits is 0"),
    ("promise", "certificate", b"x" * 4097, "certificate is 4097 bytes; expected 0 .. 4096"),
    ("promise", "certificate", b"", "certificate is 0 bytes; expected 1 .. 4096 bytes"),
    ("promise", "reason", "x" * 501, "reason is 501 characters long; expected 0 .. 500"),
    ("promise", "reason", "\x1b[2J", r"reason is '\x1b[2J'; expected printable"),
    ("promise", "reason", "two\nlines", r"reason is 'two\nlines'; expected printable"),
    ("promise", "accepted.value.model_digest", b"x", "accepted.value.model_digest is 1 bytes"),
    ("nack", "promised_attempt", 1, "promised_attempt is 1; expected 2 .. "),
    ("plan", "key_dealer", "delta", "key_dealer is 'delta'; expected one of the participants"),
    ("plan", "train_deadline_ms", 999, "train_deadline_ms is 999; expected 1000 .. 86400000"),
    ("plan", "train_deadline_ms", 86_400_001, "train_deadline_ms is 86400001"),
    ("plan", "participants[1].num_examples", 0, "plan.participants[1].num_examples is 0"),
    ("plan", "participants[2].certificate", b"", "participants[2].certificate is 0 bytes"),
    ("plan", "participants[2].site", "alpha", "participants is not in ascending order"),
    ("trained", "scale_exponents[1]", 128, "scale_exponents[1] is 128; expected -126 .. 127"),
    ("trained", "scale_exponents[0]", -127, "scale_exponents[0] is -127"),
    ("scale", "contributors[0]", "gamma", "contributors is not in ascending order; expected"),
    ("scale", "contributors[0]", "beta", "contributors is not in ascending order"),
    ("run", "plan.mode", 2, "run.plan.mode is 2; expected one of 0, 1"),
    ("plan", "training.mode", pb.MASKING, "key_dealer is 'beta'; expected none in masking mode"),
    ("plan", "key_dealer", "", "key_dealer is ''; expected one of the participants"),
    ("masking_order", "step", 0, "masking_order.step is 0; expected one of 1, 2, 3, 4"),
    ("masking_order", "step", pb.SHARES, "items[0].content is 0 bytes; expected 82 bytes"),
    ("masking_order", "items[0].content", b"x", "items[0].content is 1 bytes; expected 0 bytes"),
    ("masking_order", "items[1].site", "alpha", "items is not in ascending order"),
    ("masking_order", "items[1].content", bytes(177), "content is 177 bytes; expected 0 .. 176"),
    ("masking_order", "dropouts[0]", "", "dropouts[0] is ''"),
    ("masking_answer", "step", pb.OPENING, "content is 82 bytes; expected 33 bytes"),
    ("masking_answer", "step", pb.KEYS, "content is 82 bytes; expected 97 .. 176 bytes"),
    ("masking_answer", "step", pb.OUTCOME, "content is 82 bytes; expected 1 .. 80 bytes"),
    ("masking_answer", "items[0].site", "Beta", "items[0].site is 'Beta'"),
    ("apply", "sum_digest", b"", "sum_digest is 0 bytes"),
    ("apply", "rejected[0]", "Gamma", "rejected[0] is 'Gamma'"),
    ("apply", "nonces[1]", bytes(17), "nonces[1] is 17 bytes; expected 0 .. 16 bytes"),
    ("apply", "nonces[1]", bytes(15), "nonces[1] is 15 bytes; expected 0 or 16 bytes"),
    ("challenge", "challenge", bytes(31), "challenge is 31 bytes; expected 32 bytes"),
    ("proof", "answer", bytes(9), "answer is 9 bytes; expected 8 bytes"),
    ("compare", "sites[0]", "beta", "sites is not in ascending order"),
    ("compare", "byzantine_sites", 65, "byzantine_sites is 65"),
    ("compared", "products[1]", math.nan, "products[1] is nan"),
    ("compared", "products[0]", 2.0**121, "products[0] is"),
    ("run", "plan.robust", 9, "robust is 9; expected one of"),
    ("commit", "report.rejections[0].reason", "x\n", "rejections[0].reason is"),
    ("vote", "signature", b"", "vote.signature is 0 bytes; expected 1 .. 80 bytes"),
    ("vote", "signature", b"x" * 81, "vote.signature is 81 bytes"),
    ("vote", "mean_loss", -1.0, "mean_loss is -1.0; expected 0 .. 1000"),
    ("vote", "site", "Alpha", "vote.site is 'Alpha'"),
    ("commit", "certificate.votes[0].site", "", "certificate.votes[0].site is ''"),
    ("commit", "report.phases[0].phase", "lunch", "phases[0].phase is 'lunch'; expected one of"),
    ("commit", "report.phases[0].seconds", -1.0, "phases[0].seconds is -1.0"),
    ("commit", "report.phases[0].seconds", math.nan, "phases[0].seconds is nan"),
]


def noised() -> pb.Envelope:
    """A plan with differential privacy."""
    message = envelope("plan")
    message.plan.training.privacy.CopyFrom(
        pb.PrivacyPlan(
            clip_norm=1.0,
            noise_multiplier=0.5,
            noise_floor=0.25,
            noise_decay=0.95,
            loss_threshold=1.0,
            first_round=1,
            colluders=1,
        )
    )
    message.plan.noise_multiplier, message.plan.clip_norm = 0.3, 1.0
    return message


# path inside a plan with noise, bad value, what the error says
BAD_NOISE: list[tuple[str, Any, str]] = [
    ("training.bits", 12, "training.bits is 12; expected one of 16"),
    ("training.privacy.clip_norm", 0.0, "clip_norm is 0.0; expected 1e-09 .. 1e+09"),
    ("training.privacy.clip_norm", math.nan, "clip_norm is nan"),
    ("training.privacy.noise_multiplier", 0.0, "noise_multiplier is 0.0; expected 0.001 .. 1000"),
    ("training.privacy.noise_floor", 0.6, "noise_floor is 0.6; expected 0.001 .. 0.5"),
    ("training.privacy.noise_decay", 0.0, "noise_decay is 0.0; expected above 0 .. 1"),
    ("training.privacy.noise_decay", 1.1, "noise_decay is 1.1"),
    ("training.privacy.loss_threshold", -1.0, "loss_threshold is -1.0"),
    ("training.privacy.first_round", 0, "first_round is 0"),
    ("training.privacy.colluders", 3, "colluders is 3; expected 0 .. 2"),
    ("training.privacy.clip_quantile", 0.001, "clip_quantile is 0.001; expected 0.01 .. 0.99"),
    ("noise_multiplier", 0.2, "plan.noise_multiplier is 0.2; expected 0.25 .. 0.5"),
    ("noise_multiplier", 0.6, "plan.noise_multiplier is 0.6; expected 0.25 .. 0.5"),
    ("noise_multiplier", 0.0, "plan.noise_multiplier is 0.0; expected 0.25 .. 0.5"),
    ("clip_norm", 0.0, "plan.clip_norm is 0.0; expected 1e-09"),
]


@pytest.mark.parametrize(("path", "value", "told"), BAD_NOISE)
def test_one_bad_field_of_noise_refuses_the_plan(path: str, value: Any, told: str) -> None:
    check(noised())
    message = noised()
    put(message.plan, path, value)
    assert told in complaint(message)


def test_a_plan_without_noise_names_none() -> None:
    for field in ("noise_multiplier", "clip_norm"):
        message = envelope("plan")
        setattr(message.plan, field, 0.5)
        assert f"plan.{field} is 0.5; expected 0 .. 0" in complaint(message)


def put(message: Any, path: str, value: Any) -> None:
    """``put(plan, "participants[1].site", "x")``: set one field deep inside."""
    *way, last = path.replace("[", ".[").split(".")
    for step in way:
        message = message[int(step[1:-1])] if step[0] == "[" else getattr(message, step)
    if last[0] == "[":
        message[int(last[1:-1])] = value
    else:
        setattr(message, last, value)


def complaint(message: Message) -> str:
    with pytest.raises(RemoteProtocolError) as error:
        check(message)
    return str(error.value)


@pytest.mark.parametrize(("body", "path", "value", "told"), BAD)
def test_one_bad_field_refuses_the_message(body: str, path: str, value: Any, told: str) -> None:
    message = envelope(body)
    put(getattr(message, body), path, value)
    assert told in complaint(message)


REQUIRED = [
    ("run", "plan"),
    ("prepare", "run"),
    ("ahead", "certificate"),
    ("plan", "training"),
    ("accept", "value"),
    ("vote", "body"),
    ("commit", "certificate"),
]


@pytest.mark.parametrize(("body", "part"), REQUIRED)
def test_a_missing_part_refuses_the_message(body: str, part: str) -> None:
    message = envelope(body)
    getattr(message, body).ClearField(part)
    assert complaint(message) == f"Envelope.{body}.{part} is missing; expected a value"


def test_an_envelope_without_a_body_is_refused() -> None:
    assert "body is missing" in complaint(pb.Envelope(federation_id="med", sender="alpha"))


def test_votes_in_a_certificate_have_no_bodies_of_their_own() -> None:
    message = envelope("ahead")
    message.ahead.certificate.votes[1].body.CopyFrom(vote_body())
    assert "votes[1].body is set; expected left empty here" in complaint(message)


def test_an_unwilling_site_needs_no_certificate_and_a_failed_one_no_exponents() -> None:
    unwilling, failed = envelope("promise"), envelope("trained")
    unwilling.promise.willing, unwilling.promise.certificate = False, b""
    failed.trained.failed = True
    del failed.trained.scale_exponents[:]
    check(unwilling)
    check(failed)
    failed.trained.failed = False
    assert "scale_exponents is 0 long; expected 1 .. 4096" in complaint(failed)


def test_lists_have_an_end() -> None:
    long = envelope("trained")
    long.trained.scale_exponents.extend([0] * 4096)
    assert "scale_exponents is 4099 long; expected 0 .. 4096" in complaint(long)
    many = envelope("ahead")
    many.ahead.certificate.votes.extend([vote(body=False)] * 255)
    assert "votes is 257 long; expected 1 .. 256" in complaint(many)
    alone = envelope("scale")
    del alone.scale.contributors[1:]
    assert "contributors is 1 long; expected 2 .. 256" in complaint(alone)


def test_dropouts_are_named_with_an_outcome_only() -> None:
    message = envelope("masking_order")
    message.masking_order.step = pb.OPENING
    for item in message.masking_order.items:
        item.content = bytes(70)
    assert "dropouts is set; expected dropouts with an outcome only" in complaint(message)


# body of the call, path, bad value, what the error says
BAD_CALLS: list[tuple[Callable[[], Message], str, Any, str]] = [
    (hello, "protocol_version", 0, "protocol_version is 0; expected 1 .. "),
    (hello, "software_version", "v" * 33, "software_version is 33 characters long"),
    (hello, "features[0]", "f" * 33, "features[0] is 33 characters long"),
    (hello, "federation_id", "", "federation_id is 0 characters long; expected 1 .. 63"),
    (hello, "sender", "", "sender is ''"),
    (push, "sender", "", "PushFrame.sender is ''"),
    (push, "federation_id", "", "PushFrame.federation_id is 0 characters long"),
    (push, "name.kind", 0, "name.kind is 0; expected one of 1, 2, 3, 4, 5, 6"),
    (push, "name.kind", 77, "name.kind is 77"),
    (push, "name.round", 0, "name.round is 0; expected 1 .. "),
    (push, "name.digest", DIGEST, "name.digest is 32 bytes; expected 0 bytes"),
    (push, "total_bytes", 8 * 2**20 + 1, "total_bytes is 8388609; expected 0 .. 8388608"),
    (push, "frame.offset", 5, "a later frame with a name"),
    (push, "frame.data", b"x" * (FRAME_BYTES + 1), "frame.data is 1048577 bytes"),
    (push, "frame.running_sha256", b"", "running_sha256 is 0 bytes; expected 32 bytes"),
    (pull, "name.digest", b"", "name.digest is 0 bytes; expected 32 bytes"),
    (pull, "name.attempt", 1, "name.attempt is 1; expected 0 .. 0"),
    (pull, "offset", COUNT_MAX + 1, "offset is 4611686018427387905"),
]


@pytest.mark.parametrize(("make", "path", "value", "told"), BAD_CALLS)
def test_one_bad_field_refuses_the_call(
    make: Callable[[], Message], path: str, value: Any, told: str
) -> None:
    message = make()
    put(message, path, value)
    assert told in complaint(message)


@pytest.mark.parametrize("size", [0, 1, FRAME_BYTES - 1])
def test_only_the_last_frame_may_be_less_than_full(size: int) -> None:
    message = push()
    message.frame.data = bytes(size)
    check(message)
    message.frame.last = False
    told = f"frame.data is {size} bytes; expected 1048576 bytes in all frames but the last"
    assert told in complaint(message)
    message.frame.data = bytes(FRAME_BYTES)
    check(message)


# ---- whatever comes ---------------------------------------------------------------

NUMBERS = {  # (body, path): bounds, both allowed
    ("run", "plan.local_epochs"): (0, 100),
    ("run", "plan.batch_size"): (2, 4096),
    ("run", "plan.hard_negatives"): (0, 64),
    ("run", "plan.min_participants"): (2, 256),
    ("plan", "train_deadline_ms"): (1000, 86_400_000),
}


@pytest.mark.parametrize(("body", "path"), NUMBERS)
@given(value=st.integers(0, 2**32 - 1))
def test_a_number_passes_exactly_within_its_bounds(body: str, path: str, value: int) -> None:
    message = envelope(body)
    put(getattr(message, body), path, value)
    low, high = NUMBERS[body, path]
    if low <= value <= high:
        check(message)
    else:
        assert f"{path} is {value}; expected {low} .. {high}" in complaint(message)


DIGESTS = [(body, path) for body, path, _, told in BAD if "_digest is" in told]


@pytest.mark.parametrize(("body", "path"), DIGESTS)
@given(value=st.binary(max_size=70).filter(lambda value: len(value) != 32))
def test_a_digest_has_32_bytes(body: str, path: str, value: bytes) -> None:
    message = envelope(body)
    put(getattr(message, body), path, value)
    assert f"{path} is {len(value)} bytes; expected 32 bytes" in complaint(message)


@given(value=st.floats().filter(lambda value: not 0 < value <= 1))
def test_a_learning_rate_is_a_number_above_0_up_to_1(value: float) -> None:
    message = envelope("run")
    message.run.plan.learning_rate = value
    assert "learning_rate is" in complaint(message)


@given(value=st.text(max_size=70))
def test_a_site_id_that_passes_is_one(value: str) -> None:
    message = envelope("vote")
    message.vote.site = value.encode("utf-8", "ignore").decode()
    try:
        check(message)
    except RemoteProtocolError as error:
        assert "vote.site is" in str(error)
        assert str(error).isprintable()
    else:
        assert 1 <= len(value) <= 63
        assert set(value) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


KINDS = [pb.Envelope, pb.HelloRequest, pb.HelloReply, pb.PushFrame, pb.PullRequest, pb.Frame]


@given(kind=st.sampled_from(KINDS), raw=st.binary(max_size=300))
def test_random_bytes_are_refused_or_pass_and_nothing_else(kind: type[Message], raw: bytes) -> None:
    try:
        parse(kind, raw)
    except RemoteProtocolError as error:
        assert str(error).isprintable()


@given(
    body=st.sampled_from(sorted(BODIES)),
    position=st.integers(0, 4000),
    replacement=st.binary(max_size=4),
)
def test_damaged_messages_are_refused_or_pass_and_nothing_else(
    body: str, position: int, replacement: bytes
) -> None:
    raw = envelope(body).SerializeToString()
    position %= len(raw)
    damaged = raw[:position] + replacement + raw[position + len(replacement) :]
    try:
        parse(pb.Envelope, damaged)
    except RemoteProtocolError as error:
        assert str(error).isprintable()


def test_bytes_that_are_no_message_are_told_so() -> None:
    with pytest.raises(RemoteProtocolError, match="4 bytes that are no Envelope of protocol"):
        decode(pb.Envelope, b"\xff" * 4)


@given(text=st.text(max_size=1200))
def test_any_text_becomes_one_that_passes(text: str) -> None:
    message = envelope("attempt_failed")
    message.attempt_failed.reason = one_line(text)
    check(message)
