"""Attacks on an encrypted sum (`ckks` mode): who reads, replays, reorders or forges an update.

The jobs are those of a daemon's crypto worker. Each attack is tried twice: as it is,
where it must fail, and with one defence taken out, where it must succeed. What the
scheme does not defend against at all is here as well, named ``test_limit_...``: these
attacks succeed, and docs/security.md says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from crypto import quantize
from crypto.arrays import Int64
from crypto.ckks import sums
from crypto.ckks.parameters import CkksParameters, choose_parameters
from crypto.ckks.seal_library import Seal
from crypto.ckks.sum_proof import size_of_tags
from crypto.ckks.sums import DealtKey, RoundKey, RunningSum
from crypto.quantize import FRACTION_INTEGERS, CryptoError, pack, unpack
from daemon.jobs.sums import ckks as round_crypto
from daemon.jobs.sums.aggregation import CiphertextSum
from daemon.jobs.sums.sum_jobs import Credentials, JobContext
from daemon.process.workers import Worker
from daemon.rounds.events import EventQueue
from daemon.rounds.progress import ProgressBoard
from daemon.rounds.work import AttemptWork, Computing
from daemon.state.folder import StateFolder
from daemon.state.privacy_ledger import PrivacyBudget, PrivacyLedger
from daemon.state.versions import ShapeManifest
from peers.attempts import effects as do
from peers.attempts.ckks import DealKey
from peers.rounds.replica import Replica
from peers.wire import frames, vectors
from peers.wire.errors import RemoteProtocolError
from peers.wire.frames import ReceivedObject, receive_in_memory
from peers.wire.vectors import read_encrypted, write_encrypted
from proto import federation_pb2 as pb
from tests.attacks.programs.planting import without
from tests.simulation.network import World, coordinator
from tests.support.authority import Federation
from tests.support.strangers import framed

pytestmark = pytest.mark.attacks

SHAPE = ShapeManifest("attacked", (("a", (4000, 10)),))
SIZES = SHAPE.sizes
VALUES = SHAPE.total + FRACTION_INTEGERS
PARAMETERS = choose_parameters(3, 16)
_PRIME = 0x0FFFFFFFFFFF4001  # SEAL's 60-bit prime at N = 8192


# ---- the coordinator decrypts an update -----------------------------------------------------

AT = (7, 0)
COORDINATOR, DEALER, VICTIM = "alder", "birch", "cedar"


@dataclass
class Member:
    """One site's own code for an attempt, its crypto worker, and all that was pushed to it."""

    work: AttemptWork
    folder: Path
    got: list[tuple[str, int, bytes]] = field(default_factory=list)


@dataclass
class HandsOver:
    """The way to the other members: what is pushed is with them at once."""

    site: str
    members: dict[str, Member]

    async def push(self, to: str, name: pb.BlobName, source: Path | bytes) -> None:
        member = self.members[to]
        if isinstance(source, bytes):
            member.got.append((self.site, name.kind, source))
            await member.work.take_context(self.site, name, source)
        else:
            data = await asyncio.to_thread(source.read_bytes)
            member.got.append((self.site, name.kind, data))


@asynccontextmanager
async def members(
    root: Path, plan: pb.Plan, federation: Federation
) -> AsyncIterator[dict[str, Member]]:
    """All participants with the plan in hand; what one pushes, the other takes in."""
    found: dict[str, Member] = {}
    async with AsyncExitStack() as stack:
        for participant in plan.participants:
            site, folder = participant.site, root / participant.site

            worker = Worker(f"crypto-{site}", threads=1)
            stack.push_async_callback(worker.stop)
            state = StateFolder(folder)
            state.kept.mkdir(parents=True)
            ledger = PrivacyLedger(state.privacy)
            stack.callback(ledger.close)
            credentials = Credentials(federation.identity(site), federation.trust)
            peers = cast(Any, HandsOver(site, found))
            # Nobody runs the protocol, and nothing is trained: the update is given.
            events, nothing = EventQueue(), cast(Any, None)
            work = AttemptWork(
                JobContext(credentials, "med", worker, SHAPE, events.feed, peers),
                Computing(nothing, worker, nothing, folder),
                state,
                PrivacyBudget(ledger, worker, None, 1e-5),
                readiness=nothing,
                progress=ProgressBoard(lambda: (0, 0)),
            )
            await work.begin(*AT)
            work.take_plan(plan)
            found[site] = Member(work, state.spool / "7-0")
        yield found


def spied(attacker: Member, federation: Federation) -> Int64:
    """The integers of another site's update, by everything that was pushed to the attacker.

    Raises CryptoError when no context that it has opens them.
    """
    parameters = choose_parameters(3, 12)
    (update,) = (data for _, kind, data in attacker.got if kind == pb.ENCRYPTED_UPDATE)
    path = attacker.folder / "spied"
    path.write_bytes(update)
    identity, keys = federation.identity(COORDINATOR), []
    for sender, kind, data in attacker.got:
        if kind == pb.SEALED_CONTEXT:
            here = round_crypto.sealing_context(federation.federation_id, AT, sender, COORDINATOR)
            keys.append(identity.unseal(data, here))
        if kind == pb.PUBLIC_CONTEXT:  # as a secret one, from each polynomial that is in it
            header = sums._context_header(parameters, sums._SECRET)
            length = len(parameters.primes) * parameters.degree * 8
            keys += [header + data[14 + at : 14 + at + length] for at in (0, length)]
    refused = CryptoError("no key")
    for context in keys:
        key = RoundKey(parameters, context, secret=True)
        blocks = read_encrypted(path, parameters, VALUES, trailer=size_of_tags(2))
        rows = [key.decrypt(block) for block in blocks]
        try:
            return unpack(np.stack(rows), parameters.packing, VALUES)
        except CryptoError as error:
            refused = error
    raise refused


@pytest.mark.slow
@pytest.mark.parametrize("defended", [True, False], ids=["defended", "undefended"])
async def test_the_coordinator_decrypts_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defended: bool
) -> None:
    """Key dealer, key holder and coordinator as in a daemon, each with its own worker.

    The defence: the dealer hands the secret context to the participants without the
    coordinator. Without it the coordinator has the victim's integers, every one.
    """
    federation = Federation.found(tmp_path, COORDINATOR, DEALER, VICTIM)
    training = pb.TrainingPlan(bits=12)
    plan = pb.Plan(round=7, key_dealer=DEALER, coordinator=COORDINATOR, training=training)
    for site in (COORDINATOR, DEALER, VICTIM):
        certificate = federation.identity(site).certificate_der
        plan.participants.add(site=site, num_examples=1, certificate=certificate)
    if not defended:
        everybody = [participant.site for participant in plan.participants]
        monkeypatch.setattr(round_crypto, "holders_of", lambda *_: everybody)
    async with members(tmp_path / "sites", plan, federation) as sites:
        coordinates, victim = sites[COORDINATOR], sites[VICTIM]
        await sites[DEALER].work.carry_out(DealKey(plan, COORDINATOR))
        delta = np.random.default_rng(1).normal(size=SHAPE.total).astype(np.float32)
        np.save(victim.folder / "update.npy", np.append(delta, np.float32(0.5)))
        await victim.work.hide_update(do.HideUpdate(*AT, COORDINATOR, 1.0, (3,)))
        dropped = np.load(tmp_path / "sites" / VICTIM / "residual.npy.pending")
        sent = np.rint((delta.astype(np.float64) - dropped) * 2047 / 8)
        if defended:
            assert [kind for _, kind, _ in coordinates.got] == [
                pb.PUBLIC_CONTEXT,
                pb.ENCRYPTED_UPDATE,
            ]
            with pytest.raises(CryptoError, match="under another key"):
                spied(coordinates, federation)
        else:
            assert np.array_equal(spied(coordinates, federation)[: SHAPE.total], sent)


# ---- one process, several roles: attempts stand for sites -----------------------------------

HOLDER, SUMMING = (1, 0), (1, 1)
INTEGERS = np.random.default_rng(5).integers(-9000, 9000, (3, VALUES))


@dataclass
class Round:
    """One key holder's and one coordinator's jobs, and files of updates with known integers."""

    folder: Path
    dealt: DealtKey
    holder: RoundKey

    def update(self, name: str, integers: Int64, key: RoundKey | None = None) -> Path:
        key, path = key or self.holder, self.folder / name
        blocks = (key.encrypt(row) for row in pack(integers, key.parameters.packing))
        write_encrypted(path, key.parameters, integers.size, blocks)
        return path

    def summed(self, *updates: tuple[str, Path]) -> Int64:
        """What key holders decrypt when the coordinator adds these and follows the protocol.

        Without the proof that goes with it (decision 0014): what is tried here must fail
        before, or be harmless.
        """
        total = self.begin_sum()
        for site, path in updates:
            total.add_file(path, site)
        return self.decrypted(total)

    def begin_sum(self) -> CiphertextSum:
        return CiphertextSum(self.holder.parameters, VALUES)

    def decrypted(self, total: CiphertextSum) -> Int64:
        total.write(self.folder / "sum")
        return round_crypto._decrypt_sum(round_crypto._state(*HOLDER), self.folder / "sum", VALUES)


def begun(folder: Path, parameters: CkksParameters = PARAMETERS) -> Round:
    """A fresh attempt: a dealt key, held by a key holder and, its public part, the coordinator."""
    folder.mkdir(exist_ok=True)
    count, bits = parameters.packing.contributors, parameters.packing.bits
    dealt = round_crypto.deal_key(*HOLDER, count, bits)
    round_crypto.hold_context(*SUMMING, dealt.public, secret=False, contributors=count, bits=bits)
    return Round(folder, dealt, RoundKey(parameters, dealt.secret, secret=True))


@pytest.fixture
def honest(tmp_path: Path) -> Iterator[Round]:
    yield begun(tmp_path)
    for at in (HOLDER, SUMMING):
        round_crypto.forget(*at)


# ---- replays --------------------------------------------------------------------------------


def test_the_same_update_twice_in_one_attempt(
    honest: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sent_twice() -> Int64:
        a, b = honest.update("a", INTEGERS[0]), honest.update("b", INTEGERS[1])
        return honest.summed(("a", a), ("b", b), ("a", a))

    with pytest.raises(CryptoError, match="a is in the sum already"):
        sent_twice()
    without(monkeypatch, CiphertextSum, "add_file", "if contributor in self._contributors:")
    assert np.array_equal(sent_twice(), 2 * INTEGERS[0] + INTEGERS[1])


def test_another_update_in_its_place_while_the_first_is_taken_back(
    honest: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last block is malformed, and while it is added its sender uploads noughts.

    If these were what is taken back, the first blocks would stay in a sum that does not
    name their sender among its contributors.
    """

    def attacked() -> Int64:
        a, b, c = (honest.update(s, x) for s, x in zip("abc", INTEGERS, strict=True))
        noughts = honest.update("noughts", np.zeros(VALUES, np.int64))
        raw, seed = bytearray(a.read_bytes()), 64
        raw[-seed - 64 : -seed] = bad = b"\xff" * 64
        a.write_bytes(bytes(raw))

        def meanwhile(self: RunningSum, index: int, block: bytes) -> None:
            if block[-seed - 64 : -seed] == bad:
                noughts.rename(a)
            add(self, index, block)

        monkeypatch.setattr(RunningSum, "add", meanwhile)
        total = honest.begin_sum()
        for site, path in (("b", b), ("c", c)):
            total.add_file(path, site)
        with pytest.raises(CryptoError, match="the update of a was refused"):
            total.add_file(a, "a")
        return honest.decrypted(total)

    add = RunningSum.add
    assert np.array_equal(attacked(), INTEGERS[1] + INTEGERS[2])
    again = "blocks_of(open_vector(Path(file.name)), self._parameters, self._values, trailer)"
    text = "blocks_of(file, self._parameters, self._values, trailer)"
    without(monkeypatch, CiphertextSum, "_take_back", text, instead=again)
    extra, kept = attacked() - INTEGERS[1] - INTEGERS[2], 2 * PARAMETERS.packing.values_per_block
    assert np.array_equal(extra[:kept], INTEGERS[0][:kept])
    assert not extra[kept:].any()


async def test_a_second_upload_does_not_displace_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transport takes it, for until the first is in the sum an update is still due."""

    async def held_after_two(folder: Path) -> bytes:
        federation = Federation.found(folder / "federation", COORDINATOR, VICTIM)
        plan = pb.Plan(round=7, participants=[pb.Participant(site=COORDINATOR)])
        name = pb.BlobName(kind=pb.ENCRYPTED_UPDATE, round=AT[0], attempt=AT[1])
        async with members(folder / "sites", plan, federation) as sites:
            here = sites[COORDINATOR]
            for content in (b"first", b"second"):
                path = folder / content.decode()
                path.write_bytes(content)
                await here.work.arrived(VICTIM, name, ReceivedObject(len(content), b"", path=path))
                assert not path.exists()
            return (here.folder / f"hidden-{VICTIM}.bin").read_bytes()

    assert await held_after_two(tmp_path / "defended") == b"first"
    without(monkeypatch, AttemptWork, "arrived", "if sender in state.updates:")
    assert await held_after_two(tmp_path / "undefended") == b"second"


def test_an_update_of_another_attempt_is_not_even_received(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its name: the coordinator waits for this site's update, of this attempt, once."""
    world = World(sites=3, seed=1)
    world.train("a", rounds=1)
    leader = world.site(coordinator(world, 1))
    while leader._here.coordination is None or leader._here.coordination.phase != "aggregate":
        world.step()
    sender = next(site for site in "abc" if leader._here.coordination.expects_update(site))
    names = [
        pb.BlobName(kind=pb.ENCRYPTED_UPDATE, round=round_, attempt=attempt)
        for round_, attempt in ((1, 0), (1, 1), (2, 0))
    ]
    assert [leader.expects(sender, name) for name in names] == [True, False, False]
    monkeypatch.setattr(Replica, "is_current", lambda *_: True)
    assert [leader.expects(sender, name) for name in names] == [True, True, True]


def test_an_update_of_another_round_in_the_sum_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever calls it this round's: its sender, or the coordinator, who has kept it.

    The defence is the fresh key of each attempt. An attempt that is attacked so fails
    at all key holders; who did it, ciphertexts do not show.
    """

    def replayed(folder: Path) -> Int64:
        folder.mkdir()
        old = begun(folder / "old").update("kept", INTEGERS[0])
        now = begun(folder / "now")
        return now.summed(("a", old), ("b", now.update("b", INTEGERS[1])))

    with pytest.raises(CryptoError, match="under another key"):
        replayed(tmp_path / "defended")
    again = sums.deal(PARAMETERS)
    monkeypatch.setattr(round_crypto, "deal", lambda _: again)  # a dealer that keeps its key
    assert np.array_equal(replayed(tmp_path / "undefended"), INTEGERS[0] + INTEGERS[1])


# ---- reordered blocks -----------------------------------------------------------------------


def reordered(path: Path) -> Path:
    """An update with its first two blocks the other way round."""
    blocks = list(read_encrypted(path, PARAMETERS, VALUES))
    swapped = path.with_name(f"{path.name}-swapped")
    write_encrypted(swapped, PARAMETERS, VALUES, [blocks[1], blocks[0], *blocks[2:]])
    return swapped


def swapped_integers(integers: Int64) -> Int64:
    one = PARAMETERS.packing.values_per_block
    return np.concatenate([integers[one : 2 * one], integers[:one], integers[2 * one :]])


def test_blocks_that_their_sender_reorders_are_only_another_input(honest: Round) -> None:
    """No attack: it could as well have sent that vector, and there is no bound that it evades."""
    a, b = reordered(honest.update("a", INTEGERS[0])), honest.update("b", INTEGERS[1])
    total = honest.summed(("a", a), ("b", b))
    assert np.array_equal(total, swapped_integers(INTEGERS[0]) + INTEGERS[1])


async def test_blocks_that_somebody_on_the_way_reorders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind TLS, which already lets nobody in between: two frames in the other order."""
    content = np.random.default_rng(1).bytes((2 << 20) + 500)
    one, two, three = await framed(content)

    async def arriving() -> AsyncIterator[pb.Frame]:
        for frame in (two, one, three):
            yield frame

    async def arrives() -> bytes | None:
        return (await receive_in_memory(arriving(), limit=4 << 20)).data

    with pytest.raises(RemoteProtocolError, match="without gap or repeat"):
        await arrives()
    without(monkeypatch, frames._Intake, "_admit", "if frame.offset != self.size:")
    with pytest.raises(RemoteProtocolError, match=r"running SHA-256 .* does not match"):
        await arrives()
    text = "if digest.digest() != frame.running_sha256:"
    without(monkeypatch, frames._Intake, "_write", text)
    assert await arrives() == content[1 << 20 : 2 << 20] + content[: 1 << 20] + content[2 << 20 :]


# ---- another parameter set ------------------------------------------------------------------


def test_a_ciphertext_of_another_parameter_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encrypted for sums of three, it arrives in a sum of eight: same key, same length.

    Without the check it counts two to four times over, and nothing looks wrong. The
    check is against sites that disagree: one that forges the header as well has only
    sent another input.
    """
    eight = choose_parameters(8, 16)
    here = begun(tmp_path, eight)
    assert (eight.primes, eight.seeded_block) == (PARAMETERS.primes, PARAMETERS.seeded_block)
    header = sums._context_header(PARAMETERS, sums._SECRET)
    key = RoundKey(PARAMETERS, header + here.dealt.secret[len(header) :], secret=True)
    a, b = here.update("a", INTEGERS[0], key), here.update("b", INTEGERS[1])
    with pytest.raises(CryptoError, match="another round's parameters"):
        here.summed(("a", a), ("b", b))
    monkeypatch.setattr(CkksParameters, "identity", property(lambda _: bytes(8)))
    here = begun(tmp_path, eight)
    header = sums._context_header(PARAMETERS, sums._SECRET)
    key = RoundKey(PARAMETERS, header + here.dealt.secret[len(header) :], secret=True)
    a, b = here.update("a", INTEGERS[0], key), here.update("b", INTEGERS[1])
    counted, sent = here.summed(("a", a), ("b", b)) - INTEGERS[1], INTEGERS[0] != 0
    assert set(np.unique(counted[sent] / INTEGERS[0][sent])) == {2.0, 4.0}


# ---- malformed and non-canonical ciphertexts ---------------------------------------------------


def with_word(path: Path, change: Callable[[int], int]) -> Path:
    """An update in which the first residue of the first block is another word."""
    raw = bytearray(path.read_bytes())
    raw[30:38] = change(int.from_bytes(raw[30:38], "little")).to_bytes(8, "little")
    changed = path.with_name(f"{path.name}-changed")
    changed.write_bytes(bytes(raw))
    return changed


def test_a_residue_has_one_encoding(honest: Round, monkeypatch: pytest.MonkeyPatch) -> None:
    """x + q for x: the same ciphertext with another digest, if it were reduced on arrival."""
    a, b = honest.update("a", INTEGERS[0]), honest.update("b", INTEGERS[1])
    other = with_word(a, lambda word: word + _PRIME)
    with pytest.raises(CryptoError, match="the update of a was refused"):
        honest.summed(("a", other), ("b", b))
    load = Seal.load_block

    def lenient(self: Seal, empty: Any, block: bytes) -> Any:
        words = np.frombuffer(block[: len(block) // 4096 * 4096], "<u8") % np.uint64(_PRIME)
        return load(self, empty, words.tobytes() + block[words.nbytes :])

    monkeypatch.setattr(Seal, "load_block", lenient)
    assert np.array_equal(honest.summed(("a", other), ("b", b)), INTEGERS[0] + INTEGERS[1])


def test_bytes_behind_the_last_block(honest: Round, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something rides along, into the coordinator's spool, and changes nothing that is seen."""
    a, b = honest.update("a", INTEGERS[0]), honest.update("b", INTEGERS[1])
    a.write_bytes(a.read_bytes() + b"what nobody asked for")
    with pytest.raises(CryptoError, match="21 bytes follow the last block"):
        honest.summed(("a", a), ("b", b))
    without(monkeypatch, vectors, "_check_frame", "if position + trailer != end:")
    assert np.array_equal(honest.summed(("a", a), ("b", b)), INTEGERS[0] + INTEGERS[1])


def test_a_block_that_is_cut_short(honest: Round, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without both checks of its length it is made whole with the end of the block before it."""
    public = RoundKey(PARAMETERS, honest.dealt.public, secret=False)
    a, b = honest.update("a", INTEGERS[0], public), honest.update("b", INTEGERS[1])
    missing = 4096
    raw, at = bytearray(a.read_bytes()), 26 + 2 * (4 + PARAMETERS.full_block)
    raw[at : at + 4] = (PARAMETERS.full_block - missing).to_bytes(4, "little")
    a.write_bytes(bytes(raw[:-missing]))
    with pytest.raises(CryptoError, match="block 2 is cut short or has a length no block can have"):
        honest.summed(("b", b), ("a", a))
    without(monkeypatch, vectors, "_check_frame", "if length not in allowed or position > end:")
    with pytest.raises(CryptoError, match="an encrypted block has 126976 bytes"):
        honest.summed(("b", b), ("a", a))
    without(monkeypatch, Seal, "load", "if len(raw) != frame.size:")
    total = honest.begin_sum()
    total.add_file(a, "a")
    (*_, before, mended) = (total._total.block(i) for i in range(3))
    assert mended == bytes(raw[at + 4 : -missing]) + before[-missing:]


def test_a_seeded_block_with_another_seed(honest: Round, monkeypatch: pytest.MonkeyPatch) -> None:
    """Well-formed, so it is added; key holders then refuse the sum, whoever changed it.

    The defence: decrypted slots must be integers, and no larger than a sum can be.
    Without it noise becomes a model version. The attempt is lost either way.
    """

    def attacked() -> Int64:
        a, b = honest.update("a", INTEGERS[0]), honest.update("b", INTEGERS[1])
        raw = bytearray(a.read_bytes())
        raw[30 + PARAMETERS.polynomial] ^= 1  # of the first block's seed
        a.write_bytes(bytes(raw))
        return honest.summed(("a", a), ("b", b))

    with pytest.raises(CryptoError, match="the decrypted sum was refused"):
        attacked()
    monkeypatch.setattr(quantize, "_nearest_integers", lambda c, _: np.rint(c).astype(np.int64))
    text = "if max(flat.max(), -flat.min()) > packing.contributors * packing.limit:"
    without(monkeypatch, round_crypto, "unpack", text)
    one = PARAMETERS.packing.values_per_block
    wrong = attacked() != INTEGERS[0] + INTEGERS[1]
    assert wrong[:one].mean() > 0.99
    assert not wrong[one:].any()


def test_an_update_that_is_not_encrypted(honest: Round, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ciphertext whose second polynomial is nought: whoever sees it, reads it."""

    def bare() -> Path:
        path = honest.folder / "bare"
        words = np.random.default_rng(2).integers(0, 1 << 40, PARAMETERS.degree, dtype="<u8")
        block = words.tobytes() + bytes(PARAMETERS.polynomial)
        write_encrypted(path, PARAMETERS, VALUES, [block] * 3)
        return path

    b = honest.update("b", INTEGERS[1])
    with pytest.raises(CryptoError, match="it is not encrypted"):
        honest.summed(("b", b), ("a", bare()))
    without(monkeypatch, Seal, "load_block", "if empty.is_transparent():")
    total = honest.begin_sum()
    for site, path in (("b", b), ("a", bare())):
        total.add_file(path, site)
    assert total.contributors == {"a", "b"}


# ---- malformed contexts ---------------------------------------------------------------------


def hold(context: bytes, *, secret: bool) -> RoundKey:
    round_crypto.hold_context(*SUMMING, context, secret=secret, contributors=3, bits=16)
    return round_crypto._state(*SUMMING).key


def test_a_secret_context_where_the_coordinator_expects_the_public_one(
    honest: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dealer that confuses them, or conspires: the coordinator's own jobs do not take it."""
    with pytest.raises(CryptoError, match="expected a public one"):
        hold(honest.dealt.secret, secret=False)
    kind = len(sums._CONTEXT_MAGIC) + 1

    def whatever(parameters: CkksParameters, context: bytes, *, secret: bool) -> RoundKey:
        return RoundKey(parameters, context, secret=context[kind] == sums._SECRET)

    monkeypatch.setattr(round_crypto, "RoundKey", whatever)
    key = hold(honest.dealt.secret, secret=False)
    blocks = read_encrypted(honest.update("a", INTEGERS[0]), PARAMETERS, VALUES)
    rows = np.stack([key.decrypt(block) for block in blocks])
    assert np.array_equal(unpack(rows, PARAMETERS.packing, VALUES), INTEGERS[0])


def test_a_public_context_where_a_key_holder_expects_the_secret_one(
    honest: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it under the right header would load, and everybody who has it could decrypt."""
    with pytest.raises(CryptoError, match="expected a secret one"):
        hold(honest.dealt.public, secret=True)
    without(monkeypatch, sums, "_context_body", "if context[: len(expected)] != expected:")
    with pytest.raises(CryptoError, match="the secret context has 131072 bytes"):
        hold(honest.dealt.public, secret=True)
    without(monkeypatch, Seal, "load", "if len(raw) != frame.size:")
    block = hold(honest.dealt.public, secret=True).encrypt(np.zeros(4096, np.complex128))
    known = RoundKey(
        PARAMETERS,
        sums._context_header(PARAMETERS, sums._SECRET) + honest.dealt.public[14 : 14 + 65536],
        secret=True,
    )
    assert np.abs(known.decrypt(block)).max() < quantize.RESIDUAL_LIMIT


@pytest.mark.parametrize("contributors", [5, 64], ids=["other moduli", "same moduli"])
def test_a_context_of_other_parameters(
    honest: Round, monkeypatch: pytest.MonkeyPatch, contributors: int
) -> None:
    """Its moduli are not read at all: they follow from the plan, and so does its length."""
    bits = 12 if contributors == 5 else 16
    other = round_crypto.deal_key(9, 0, contributors, bits).public
    round_crypto.forget(9, 0)
    with pytest.raises(CryptoError, match="other parameters or another format version"):
        hold(other, secret=False)
    without(monkeypatch, sums, "_context_body", "if context[: len(expected)] != expected:")
    if choose_parameters(contributors, bits).primes != PARAMETERS.primes:
        with pytest.raises(CryptoError, match="the public context has 262144 bytes"):
            hold(other, secret=False)
        without(monkeypatch, Seal, "load", "if len(raw) != frame.size:")
    assert not hold(other, secret=False).can_decrypt  # taken


def test_a_context_that_is_too_large(honest: Round, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transport takes no more than 8 MiB of one; here not a byte too many is held."""
    large = honest.dealt.public + bytes(7 << 20)
    with pytest.raises(CryptoError, match="the public context has 7471104 bytes; expected 131072"):
        hold(large, secret=False)
    without(monkeypatch, Seal, "load", "if len(raw) != frame.size:")
    assert not hold(large, secret=False).can_decrypt  # taken, with whatever rode along
