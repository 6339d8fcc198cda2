"""No field of any message gets past its bounds, and no bytes do more than be refused."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from peers.wire import messages, signed_bounds
from peers.wire.bounds import COUNT_MAX, rule_of
from peers.wire.errors import RemoteProtocolError
from peers.wire.messages import BLOB_BYTES, FRAME_BYTES, check, decode, one_line, parse
from proto import federation_pb2 as pb
from tests.support.good_messages import (
    BODIES,
    DIGEST,
    SIGNED,
    commitment,
    envelope,
    example,
    exponents,
    hello,
    masked_statement,
    plan,
    products,
    pull,
    push,
    restated,
    run,
    signed,
    statement,
    vote,
    vote_body,
)


def test_every_field_of_the_protocol_has_a_rule() -> None:
    for name, descriptor in pb.DESCRIPTOR.message_types_by_name.items():
        rules = messages._RULES[getattr(pb, name)]
        assert set(rules) == {field.name for field in descriptor.fields}, name


def test_a_field_that_does_not_say_what_it_may_hold_has_no_rule() -> None:
    """Options of fields are read when the daemon starts: one that is forgotten starts none."""
    file = FileDescriptorProto(name="silent.proto", package="silent", syntax="proto3")
    message = file.message_type.add(name="Silent")
    kinds = [FieldDescriptorProto.TYPE_UINT64, FieldDescriptorProto.TYPE_DOUBLE]
    kinds += [FieldDescriptorProto.TYPE_STRING, FieldDescriptorProto.TYPE_BYTES]
    for number, kind in enumerate(kinds, start=1):
        message.field.add(name=f"field_{number}", number=number, type=kind, label=1)
    pool = DescriptorPool()
    pool.Add(file)
    for field in pool.FindMessageTypeByName("silent.Silent").fields:
        with pytest.raises(TypeError, match="has no bounds"):
            rule_of(field)


def test_every_kind_of_object_has_a_bound() -> None:
    assert set(BLOB_BYTES) == set(pb.BlobKind.values()) - {pb.BLOB_KIND_UNSPECIFIED}


def test_every_message_has_a_good_example_here() -> None:
    assert set(BODIES) == {field.name for field in pb.Envelope.DESCRIPTOR.oneofs[0].fields}


@pytest.mark.parametrize("body", BODIES)
def test_good_messages_pass_and_survive_the_wire(body: str) -> None:
    message = envelope(body)
    assert parse(pb.Envelope, message.SerializeToString()).WhichOneof("body") == body


@pytest.mark.parametrize("name", SIGNED)
def test_good_contents_of_signatures_pass(name: str) -> None:
    check(SIGNED[name]())


@pytest.mark.parametrize("make", [hello, push, pull])
def test_good_calls_pass(make: Callable[[], Message]) -> None:
    check(make())


# ---- one bad field at a time ----------------------------------------------------

# message, path inside it, bad value, what the error says
BAD: list[tuple[str, str, Any, str]] = [
    ("Run", "run_id", "", "Run.run_id is ''; expected [0-9a-z-]{1,36}"),
    ("Run", "run_id", "Run", "run_id is 'Run'"),
    ("Run", "requested_by", "-a", "requested_by is '-a'; expected [a-z0-9][a-z0-9-]{0,62}"),
    ("Run", "requested_by", "a" * 64, "requested_by is 'aaa"),
    ("Run", "federation_id", "", "federation_id is 0 characters long"),
    ("Run", "generation", COUNT_MAX + 1, "generation is 4611686018427387905; expected 0 .. "),
    ("Run", "plan.adapt", 0, "Run.plan.adapt is 0; expected one of 1, 2"),
    ("Run", "plan.adapt", 99, "Run.plan.adapt is 99; expected one of 1, 2"),
    ("Run", "plan.local_epochs", 101, "local_epochs is 101; expected 0 .. 100"),
    ("Run", "plan.batch_size", 1, "batch_size is 1; expected 2 .. 4096"),
    ("Run", "plan.batch_size", 4097, "batch_size is 4097; expected 2 .. 4096"),
    ("Run", "plan.learning_rate", 0.0, "learning_rate is 0.0; expected above 0 .. 1"),
    ("Run", "plan.learning_rate", 1.01, "learning_rate is 1.01"),
    ("Run", "plan.learning_rate", math.nan, "learning_rate is nan"),
    ("Run", "plan.temperature", 0.0, "temperature is 0.0; expected 0.001 .. 10"),
    ("Run", "plan.temperature", math.inf, "temperature is inf"),
    ("Run", "plan.hard_negatives", 65, "hard_negatives is 65; expected 0 .. 64"),
    ("Run", "plan.bits", 10, "bits is 10; expected one of 8, 12, 16"),
    ("Run", "plan.min_participants", 1, "min_participants is 1; expected 2 .. 256"),
    ("Run", "plan.max_num_examples", 0, "max_num_examples is 0; expected 1 .. "),
    ("Run", "plan.mode", 2, "Run.plan.mode is 2; expected one of 0, 1"),
    ("Run", "plan.robust", 9, "robust is 9; expected one of"),
    ("run", "run.body", b"", "run.run.body is 0 bytes; expected 1 .. 1048576"),
    ("run", "run.body", bytes(2**20 + 1), "run.run.body is 1048577 bytes"),
    ("run", "run.site", "Alpha", "run.run.site is 'Alpha'"),
    ("run", "run.signature", b"", "run.run.signature is 0 bytes; expected 1 .. 80 bytes"),
    ("run", "run.certificate", bytes(4097), "run.run.certificate is 4097 bytes"),
    ("prepare", "round", 0, "prepare.round is 0; expected 1 .. "),
    ("prepare", "attempt", 2**32 - 1, "prepare.attempt is 4294967295; expected 0 .. 4294967294"),
    ("prepare", "head_digest", b"", "prepare.head_digest is 0 bytes; expected 32 bytes"),
    ("prepare", "shape_digest", b"x" * 33, "shape_digest is 33 bytes; expected 32 bytes"),
    ("Promise", "attempt", 2**32 - 1, "Promise.attempt is 4294967295"),
    ("Promise", "round", 0, "Promise.round is 0; expected 1 .. "),
    ("Promise", "num_examples", COUNT_MAX + 1, "num_examples is 4611686018427387905"),
    ("Promise", "reason", "x" * 501, "reason is 501 characters long; expected 0 .. 500"),
    ("Promise", "reason", "\x1b[2J", r"reason is '\x1b[2J'; expected printable"),
    ("Promise", "reason", "two\nlines", r"reason is 'two\nlines'; expected printable"),
    ("Promise", "complexity", math.nan, "complexity is nan"),
    ("Promise", "complexity", 1e7, "complexity is 10000000.0; expected 0 .. 1e+06"),
    ("Promise", "run_digest", b"", "run_digest is 0 bytes; expected 32 bytes"),
    ("Promise", "manifest_digest", b"", "manifest_digest is 0 bytes; expected 32 bytes"),
    ("Promise", "lock.model_digest", b"x", "lock.model_digest is 1 bytes; expected 32 bytes"),
    ("Promise", "lock.attempt", 2**32 - 1, "lock.attempt is 4294967295"),
    ("Promise", "stated.digest", b"x", "stated.digest is 1 bytes; expected 32 bytes"),
    ("promised", "lock.root", bytes(2**20 + 1), "promised.lock.root is 1048577 bytes"),
    ("promised", "lock.proof[0].site", "beta", "lock.proof is not in ascending order"),
    ("bundle", "promises[0].site", "beta", "bundle.promises is not in ascending order"),
    ("bundle", "promises[2].site", "beta", "bundle.promises is not in ascending order"),
    ("bundle", "promises[1].body", b"", "bundle.promises[1].body is 0 bytes"),
    ("Plan", "key_dealer", "delta", "key_dealer is 'delta'; expected one of the participants"),
    ("Plan", "key_dealer", "", "key_dealer is ''; expected one of the participants"),
    ("Plan", "training.mode", pb.MASKING, "key_dealer is 'beta'; expected none in masking mode"),
    ("Plan", "participants[1].num_examples", 0, "Plan.participants[1].num_examples is 0"),
    ("Plan", "participants[2].certificate", b"", "participants[2].certificate is 0 bytes"),
    ("Plan", "participants[2].certificate", bytes(4097), "4097 bytes; expected 1 .. 4096 bytes"),
    ("Plan", "participants[2].site", "alpha", "participants is not in ascending order"),
    ("Plan", "full_weight", 0, "full_weight is 0; expected 1 .. "),
    ("Plan", "faulty_sites", 257, "faulty_sites is 257; expected 0 .. 256"),
    ("Plan", "draw", 2**32 - 1, "draw is 4294967295"),
    ("Plan", "coordinator", "", "coordinator is ''"),
    ("Plan", "most_complexity", math.nan, "most_complexity is nan"),
    ("Plan", "least_complexity", 2.0, "most_complexity is 0.0; expected 2 .. 1e+06"),
    ("Exponents", "scale_exponents[1]", 128, "scale_exponents[1] is 128; expected -126 .. 127"),
    ("Exponents", "scale_exponents[0]", -127, "scale_exponents[0] is -127"),
    ("Exponents", "plan_digest", b"", "plan_digest is 0 bytes; expected 32 bytes"),
    ("scale", "exponents[0].site", "gamma", "scale.exponents is not in ascending order"),
    ("scale", "exponents[0].site", "beta", "scale.exponents is not in ascending order"),
    ("Contribution", "upload_digest", b"", "upload_digest is 0 bytes; expected 32 bytes"),
    ("Contribution", "nonce", bytes(17), "nonce is 17 bytes; expected 0 .. 16 bytes"),
    ("KeyCommitment", "secret_digest", bytes(31), "secret_digest is 31 bytes; expected 32 bytes"),
    ("Statement", "kind", 0, "kind is 0; expected one of 1, 2, 3"),
    ("Statement", "sum_digest", b"", "sum_digest is 0 bytes; expected 32 bytes"),
    ("Statement", "bundle_digest", b"", "bundle_digest is 0 bytes; expected 32 bytes"),
    ("Statement", "contributions[1].site", "alpha", "contributions is not in ascending order"),
    ("Statement", "rejected[0]", "Gamma", "rejected[0] is 'Gamma'"),
    ("Statement", "scale_exponents[0]", 128, "scale_exponents[0] is 128"),
    ("Statement", "roster_digest", DIGEST, "roster_digest is 32 bytes; expected 0 bytes"),
    ("Statement", "root_digest", DIGEST, "root_digest is 32 bytes; expected 0 bytes"),
    ("Statement", "question_digest", b"x", "question_digest is 1 bytes; expected 32 bytes"),
    ("Statement", "byzantine_sites", 1, "byzantine_sites is set; expected left empty but in a"),
    ("Statement", "plan.full_weight", 0, "Statement.plan.full_weight is 0"),
    ("Question", "byzantine_sites", 65, "byzantine_sites is 65"),
    ("Question", "sum_digest", b"", "sum_digest is 0 bytes; expected 32 bytes"),
    ("Masked", "roster_digest", b"", "roster_digest is 0 bytes; expected 32 bytes"),
    ("Masked", "dropouts[0]", "", "dropouts[0] is ''"),
    ("Restated", "model_digest", b"", "model_digest is 0 bytes; expected 32 bytes"),
    ("Restated", "root_digest", b"", "root_digest is 0 bytes; expected 32 bytes"),
    ("Restated", "sum_digest", DIGEST, "sum_digest is set; expected left empty where nothing"),
    ("state", "statement", b"", "state.statement is 0 bytes; expected 1 .. 1048576 bytes"),
    ("state", "statement", bytes(2**20 + 1), "state.statement is 1048577 bytes"),
    ("stated", "statement_digest", b"", "statement_digest is 0 bytes; expected 32 bytes"),
    ("stated", "signature.signature", bytes(81), "signature.signature is 81 bytes"),
    ("certified", "certificate.statement", b"", "certificate.statement is 0 bytes"),
    ("certified", "certificate.signatures[1].site", "alpha", "signatures is not in ascending"),
    ("Products", "products[1]", math.nan, "products[1] is nan"),
    ("Products", "products[0]", 2.0**121, "products[0] is"),
    ("Products", "imaginary[0]", "", "imaginary[0] is ''"),
    ("challenge", "challenge", bytes(31), "challenge is 31 bytes; expected 32 bytes"),
    ("proof", "answer", bytes(9), "answer is 9 bytes; expected 8 bytes"),
    ("masking_order", "step", 0, "masking_order.step is 0; expected one of 1, 2"),
    ("masking_order", "step", pb.OPENING, "masking_order.step is 3; expected one of 1, 2"),
    ("masking_order", "step", pb.KEYS, "items[0].content is 82 bytes; expected 97 .. 176 bytes"),
    ("masking_order", "items[0].content", b"x", "items[0].content is 1 bytes; expected 82 bytes"),
    ("masking_order", "items[1].site", "alpha", "items is not in ascending order"),
    ("masking_order", "items[1].content", bytes(177), "content is 177 bytes; expected 0 .. 176"),
    ("masking_answer", "step", pb.OPENING, "content is 82 bytes; expected 33 bytes"),
    ("masking_answer", "step", pb.KEYS, "content is 82 bytes; expected 97 .. 176 bytes"),
    ("masking_answer", "step", 4, "step is 4; expected one of 1, 2, 3"),
    ("masking_answer", "items[0].site", "Beta", "items[0].site is 'Beta'"),
    ("openings", "opened[0].site", "beta", "openings.opened is not in ascending order"),
    ("openings", "opened[1].items[0].content", bytes(34), "is 34 bytes; expected 33 bytes"),
    ("Applied", "mean_loss", math.nan, "Applied.mean_loss is nan; expected 0 .. 1000"),
    ("Applied", "mean_loss", 1001.0, "mean_loss is 1001.0"),
    ("Applied", "next_clip_norm", math.inf, "next_clip_norm is inf"),
    ("Applied", "model_digest", b"", "model_digest is 0 bytes; expected 32 bytes"),
    ("vote", "signature", b"", "vote.signature is 0 bytes; expected 1 .. 80 bytes"),
    ("vote", "signature", b"x" * 81, "vote.signature is 81 bytes"),
    ("vote", "mean_loss", -1.0, "mean_loss is -1.0; expected 0 .. 1000"),
    ("vote", "site", "Alpha", "vote.site is 'Alpha'"),
    ("vote", "body.rules", 1, "vote.body.rules is 1; expected one of 0, 2"),
    ("vote", "body.rules", 0, "vote.body.manifest_digest is 32 bytes; expected 0 bytes"),
    ("vote", "body.statement_digest", b"", "statement_digest is 0 bytes; expected 32 bytes"),
    ("vote", "body.mean_loss", math.nan, "vote.body.mean_loss is nan"),
    ("vote", "body.contributors[0]", "beta", "contributors is not in ascending order"),
    ("commit", "certificate.votes[0].site", "", "certificate.votes[0].site is ''"),
    ("commit", "report.phases[0].phase", "lunch", "phases[0].phase is 'lunch'; expected one of"),
    ("commit", "report.phases[0].seconds", -1.0, "phases[0].seconds is -1.0"),
    ("commit", "report.phases[0].seconds", math.nan, "phases[0].seconds is nan"),
    ("commit", "report.rejections[0].reason", "x\n", "rejections[0].reason is"),
    ("evidence", "kind", 0, "evidence.kind is 0; expected one of 1, 2, 3, 4"),
    ("evidence", "second.site", "", "evidence.second.site is ''"),
    ("recall", "round", 0, "recall.round is 0; expected 1 .. "),
    ("remembered", "promise.promise.signature", b"", "promise.promise.signature is 0 bytes"),
    ("Ended", "reason", "x" * 501, "reason is 501 characters long"),
    ("Ended", "attempt", 2**32 - 1, "attempt is 4294967295"),
]


def noised() -> pb.Plan:
    """A plan with differential privacy."""
    message = plan()
    message.training.privacy.CopyFrom(
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
    message.noise_multiplier, message.clip_norm = 0.3, 1.0
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
    ("noise_multiplier", 0.2, "Plan.noise_multiplier is 0.2; expected 0.25 .. 0.5"),
    ("noise_multiplier", 0.6, "Plan.noise_multiplier is 0.6; expected 0.25 .. 0.5"),
    ("noise_multiplier", 0.0, "Plan.noise_multiplier is 0.0; expected 0.25 .. 0.5"),
    ("clip_norm", 0.0, "Plan.clip_norm is 0.0; expected 1e-09"),
]


@pytest.mark.parametrize(("path", "value", "told"), BAD_NOISE)
def test_one_bad_field_of_noise_refuses_the_plan(path: str, value: Any, told: str) -> None:
    check(noised())
    message = noised()
    put(message, path, value)
    assert told in complaint(message)


def test_a_plan_without_noise_names_none() -> None:
    for field in ("noise_multiplier", "clip_norm"):
        message = plan()
        setattr(message, field, 0.5)
        assert f"Plan.{field} is 0.5; expected 0 .. 0" in complaint(message)


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


@pytest.mark.parametrize(("name", "path", "value", "told"), BAD)
def test_one_bad_field_refuses_the_message(name: str, path: str, value: Any, told: str) -> None:
    message, part = example(name)
    put(part, path, value)
    assert told in complaint(message)


REQUIRED = [
    ("Run", "plan"),
    ("Plan", "training"),
    ("Statement", "plan"),
    ("Statement", "commitment"),
    ("run", "run"),
    ("prepare", "run"),
    ("prepare", "promise"),
    ("promised", "promise"),
    ("bundle", "run"),
    ("key_committed", "commitment"),
    ("contributed", "contribution"),
    ("stated", "signature"),
    ("certified", "certificate"),
    ("compared", "products"),
    ("applied", "applied"),
    ("proven", "lock"),
    ("ahead", "certificate"),
    ("vote", "body"),
    ("commit", "certificate"),
    ("ended", "ended"),
    ("evidence", "first"),
    ("evidence", "second"),
]


@pytest.mark.parametrize(("name", "field"), REQUIRED)
def test_a_missing_part_refuses_the_message(name: str, field: str) -> None:
    message, part = example(name)
    part.ClearField(field)
    assert f".{field} is missing; expected " in complaint(message)


@pytest.mark.parametrize("field", sorted(signed_bounds._OF_A_SUM))
def test_nothing_of_a_sum_is_in_a_statement_of_an_earlier_version(field: str) -> None:
    """It would be signed along, and nobody would have checked it."""
    whole, message = masked_statement(), restated()
    if field in ("commitment", "question_digest", "answers"):
        whole = statement()
    if field == "byzantine_sites":
        whole = statement(pb.QUESTION)
    value = getattr(whole, field)
    if isinstance(value, int | bytes):
        setattr(message, field, value)
    elif isinstance(value, Message):
        getattr(message, field).CopyFrom(value)
    else:
        getattr(message, field).extend(value)
    assert f"{field} is set; expected left empty where nothing is summed" in complaint(message)


def test_a_key_and_masks_are_not_stated_together() -> None:
    message = masked_statement()
    message.commitment.CopyFrom(signed(commitment()))
    assert "commitment is set; expected one with a round key" in complaint(message)


def test_under_the_rules_of_old_nothing_of_today_is_voted_on() -> None:
    message = envelope("vote")
    body = message.vote.body
    body.rules, body.manifest_digest, body.statement_digest = 0, b"", b""
    assert "mean_loss is set; expected left empty under the rules of old" in complaint(message)
    body.mean_loss = 0.0
    check(message)


def test_an_envelope_without_a_body_is_refused() -> None:
    assert "body is missing" in complaint(pb.Envelope(federation_id="med", sender="alpha"))


def test_votes_in_a_certificate_have_no_bodies_of_their_own() -> None:
    message = envelope("ahead")
    message.ahead.certificate.votes[1].body.CopyFrom(vote_body())
    assert "votes[1].body is set; expected left empty here" in complaint(message)


def test_a_failed_training_has_no_exponents() -> None:
    failed = envelope("trained")
    failed.trained.ClearField("exponents")
    check(failed)


def test_lists_have_an_end() -> None:
    long = exponents()
    long.scale_exponents.extend([0] * 4096)
    assert "scale_exponents is 4099 long; expected 1 .. 4096" in complaint(long)
    del long.scale_exponents[:]
    assert "scale_exponents is 0 long; expected 1 .. 4096" in complaint(long)
    many = envelope("ahead")
    many.ahead.certificate.votes.extend([vote(body=False)] * 255)
    assert "votes is 257 long; expected 1 .. 256" in complaint(many)
    crowd = envelope("bundle")
    crowd.bundle.promises.extend([crowd.bundle.promises[0]] * 254)
    assert "promises is 257 long; expected 1 .. 256" in complaint(crowd)
    alone = vote_body()
    del alone.contributors[1:]
    assert "contributors is 1 long; expected 2 .. 256" in complaint(alone)
    few = products()
    del few.products[1:]
    assert "products is 1 long; expected 3 .. 2080" in complaint(few)
    lone = plan()
    del lone.participants[1:]
    assert "participants is 1 long; expected 2 .. 256" in complaint(lone)


# body of the call, path, bad value, what the error says
BAD_CALLS: list[tuple[Callable[[], Message], str, Any, str]] = [
    (hello, "protocol_version", 0, "protocol_version is 0; expected 1 .. "),
    (hello, "software_version", "v" * 33, "software_version is 33 characters long"),
    (hello, "features[0]", "f" * 33, "features[0] is 33 characters long"),
    (hello, "federation_id", "", "federation_id is 0 characters long; expected 1 .. 80"),
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


@pytest.mark.parametrize("field", ["federation_id", "sender", "name", "total_bytes"])
def test_a_later_frame_says_nothing_of_its_object_again(field: str) -> None:
    message, first = pb.PushFrame(frame=push().frame), push()
    message.frame.offset = FRAME_BYTES
    check(message)
    message.MergeFrom(pb.PushFrame(**{field: getattr(first, field)}))
    assert "a later frame with a name" in complaint(message)


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

NUMBERS = {  # (message, path): bounds, both allowed
    ("Run", "plan.local_epochs"): (0, 100),
    ("Run", "plan.batch_size"): (2, 4096),
    ("Run", "plan.hard_negatives"): (0, 64),
    ("Run", "plan.min_participants"): (2, 256),
    ("Plan", "faulty_sites"): (0, 256),
    ("Promise", "attempt"): (0, 2**32 - 2),
}


@pytest.mark.parametrize(("name", "path"), NUMBERS)
@given(value=st.integers(0, 2**32 - 1))
def test_a_number_passes_exactly_within_its_bounds(name: str, path: str, value: int) -> None:
    message, part = example(name)
    put(part, path, value)
    low, high = NUMBERS[name, path]
    if low <= value <= high:
        check(message)
    else:
        assert f"{path} is {value}; expected {low} .. {high}" in complaint(message)


DIGESTS = [(name, path) for name, path, _, told in BAD if "expected 32 bytes" in told]


@pytest.mark.parametrize(("name", "path"), DIGESTS)
@given(value=st.binary(max_size=70).filter(lambda value: len(value) not in (0, 32)))
def test_a_digest_has_32_bytes(name: str, path: str, value: bytes) -> None:
    message, part = example(name)
    put(part, path, value)
    assert f"{path} is {len(value)} bytes; expected " in complaint(message)


@given(value=st.floats().filter(lambda value: not 0 < value <= 1))
def test_a_learning_rate_is_a_number_above_0_up_to_1(value: float) -> None:
    message = run()
    message.plan.learning_rate = value
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


KINDS: list[type[Message]] = [
    *(pb.Envelope, pb.HelloRequest, pb.HelloReply, pb.PushFrame, pb.PullRequest, pb.Frame),
    *dict.fromkeys(type(make()) for make in SIGNED.values()),
]


@given(kind=st.sampled_from(KINDS), raw=st.binary(max_size=300))
def test_random_bytes_are_refused_or_pass_and_nothing_else(kind: type[Message], raw: bytes) -> None:
    try:
        parse(kind, raw)
    except RemoteProtocolError as error:
        assert str(error).isprintable()


@given(
    name=st.sampled_from([*sorted(BODIES), *SIGNED]),
    position=st.integers(0, 40_000),
    replacement=st.binary(max_size=4),
)
def test_damaged_messages_are_refused_or_pass_and_nothing_else(
    name: str, position: int, replacement: bytes
) -> None:
    message, _ = example(name)
    raw = message.SerializeToString()
    position %= len(raw)
    damaged = raw[:position] + replacement + raw[position + len(replacement) :]
    try:
        parse(type(message), damaged)
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


def parts_of(message: Message) -> Iterator[Message]:
    """The message and every message in it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if isinstance(value, Sequence) else [value]:
                yield from parts_of(part)


@pytest.mark.parametrize("body", BODIES)
def test_nothing_that_is_not_known_is_in_any_part_of_a_message(body: str) -> None:
    """It would be kept, signed and passed on with the rest, at any length."""
    for place in range(len(list(parts_of(envelope(body))))):
        message = envelope(body)
        list(parts_of(message))[place].MergeFromString(b"\xa2\x06\x01x")
        with pytest.raises(RemoteProtocolError, match="larger than its fields"):
            check(message)


@pytest.mark.parametrize("unknown", [b"\x7b\x7c", b"\x7b" * 90 + b"\x7c" * 90, b"\x78\x00"])
def test_a_million_unknown_fields_are_not_looked_at_one_by_one(unknown: bytes) -> None:
    """Each would be an object of Python's: some seconds of the event loop, for 2 MiB."""
    raw = unknown * ((2 << 20) // len(unknown))
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match="Envelope is larger than its fields"):
            parse(pb.Envelope, raw)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 4 << 20, "its bytes once more, and not its fields"
