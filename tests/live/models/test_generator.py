"""Five live daemons train two models beside each other; one of them lacks the generator's base.

Over TLS, with CKKS. One is killed in the midst of generator rounds and comes back, one joins when
some are committed. What is committed is the same everywhere, in both logs.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from daemon.state.versions import is_sound
from peers.wire.certificates import verify_chain
from peers.wire.manifest import NamedModel, log_id
from proto import control_pb2 as control
from tests.live.models.test_another_encoder import again
from tests.live.tapped_fedd import read_tape
from tests.live.test_operations import fedctl
from tests.support.federation import Corpus, LiveFederation, LiveSite
from tests.support.small_models import small_generator

pytestmark = [pytest.mark.federation, pytest.mark.slow, pytest.mark.timeout(1200)]

SITES = ["alder", "birch", "cedar", "dogwood", "elm"]
WITNESS = "elm"  # has no base model
PERSONAL = "birch"  # keeps a half of its own
GENERATOR = "generator"
UNSUPPORTED = "nothing of what the language model wrote is supported by what it cites"


@asynccontextmanager
async def federation(
    root: Path, names: Sequence[str] = SITES, *, without: Sequence[str] = ()
) -> AsyncIterator[LiveFederation]:
    """One whose manifest names a generator, which all but the witness have."""
    texts = [text for name in SITES for text in Corpus.of(name).texts()]
    base = small_generator(root / "writer", "t5", texts)
    table = {
        "base_model": str(base),
        "min_triples": 4,
        "learning_rate": 1e-2,
        "prompt_tokens": 4096,  # it has a token for many a letter
        "answer_tokens": 16,
    }
    own = {name: {GENERATOR: table} for name in SITES if name != WITNESS}
    own["alder"]["retrieval"] = {"generator": "federated"}  # it answers with what is trained
    own[PERSONAL] = {GENERATOR: {**table, "personal": "mixture"}}
    async with LiveFederation.start(
        root, names, without=without, faulty_sites=1, own=own, min_participants=3
    ) as live:
        if PERSONAL in live.sites:
            corpus = live.sites[PERSONAL].corpus
            corpus.pairs.extend(to_judge_by(corpus))
        await live.ingest_all()
        status = (await live.sites["alder"].status()).generator
        assert "names no generator" in status.why_not
        live.generator = status.own
        live.reload_manifest()
        for name in names:
            await until_told(live.sites[name], "restart fedd")
            await again(live, name)
        await live.until_connected()
        yield live


def to_judge_by(corpus: Corpus) -> list[control.Pair]:
    asked = [pair for pair in corpus.pairs if pair.split == "train"]
    return [
        control.Pair(
            query=f"{how} {pair.query}",
            positives=pair.positives,
            split="valid",
            reference=pair.reference,
        )
        for how in ("tell us:", "and now:")
        for pair in asked
    ]


async def until_personalised(site: LiveSite, version: bytes) -> control.GeneratorStatus:
    async with asyncio.timeout(300):
        while (its := (await site.status()).generator).personalised_digest != version:
            await asyncio.sleep(0.05)
    return its


async def until_told(site: LiveSite, why_not: str) -> None:
    async with asyncio.timeout(60):
        while why_not not in (await site.status()).generator.why_not:
            await asyncio.sleep(0.05)


async def verified(live: LiveFederation, site: LiveSite, model: str) -> bytes:
    """Every round of a model is what its manifests' quorums voted for; the newest version."""
    log = log_id(live.federation.federation_id, model or "retriever")
    manifests = {
        version: live.federation.manifest(
            version=version, generator=live.generator if version > 1 else ""
        ).of_log(log)
        for version in range(1, live.version + 1)
    }
    certificates = [one.certificate for one in await site.rounds(model)]
    verify_chain(
        certificates,
        live.federation.trust,
        manifests.get,
        certificates[0].body.parent_digest,
        first_round=1,
    )
    return certificates[-1].body.model_digest


async def all_agree(live: LiveFederation, model: str) -> bytes:
    heads = {name: await verified(live, site, model) for name, site in live.sites.items()}
    assert len(set(heads.values())) == 1, heads
    return heads["alder"]


def versions_of(site: LiveSite) -> Path:
    return site.folder / "state" / GENERATOR / "versions"


def personal_of(site: LiveSite) -> list[Path]:
    return sorted((site.folder / "state" / GENERATOR / "personal").glob("*"))


async def test_two_models_are_trained_beside_each_other(tmp_path: Path) -> None:
    async with federation(tmp_path) as live:
        named = NamedModel.parse(live.generator)
        await asyncio.gather(live.train("alder", 2), live.train("birch", 2, model=GENERATOR))
        retriever, generator = [await all_agree(live, model) for model in ("", GENERATOR)]
        assert retriever != generator
        (first, _) = await live.sites["alder"].rounds(GENERATOR)
        body = first.certificate.body
        assert body.parent_digest == named.first
        assert list(body.contributors) == [name for name in SITES if name != WITNESS]
        # Who lacks the base model has the version all the same, and says what it lacks.
        witness = live.sites[WITNESS]
        assert is_sound(versions_of(witness), generator, named.digest)
        assert "generator.base_model" in (await witness.status()).generator.why_not
        # One of them has trained on alone behind the run, and no other knows.
        its = await until_personalised(live.sites[PERSONAL], generator)
        assert (its.judged_digest, its.personal) == (generator, "mixture")
        assert its.perplexity <= its.base_perplexity
        code, out, err = await fedctl(
            live.sites[PERSONAL], "personalise", "--model", GENERATOR, "--json"
        )
        assert code == 0, err
        told = json.loads(out)
        assert (told["model"], told["model_digest"]) == (GENERATOR, generator.hex())
        assert 0 < told["own_perplexity"] < told["shared_perplexity"]
        halves = [half.read_bytes()[-4096:] for half in personal_of(live.sites[PERSONAL])]
        assert halves, "a half that does better"
        # And nothing that anybody asks, answers or reads has crossed.
        tapes = b"".join(raw for s in live.sites.values() for *_, raw in read_tape(s.folder))
        texts = [text for site in live.sites.values() for text in site.corpus.texts()]
        assert b"med.generator" in tapes
        assert not [text for text in texts if text.encode() in tapes]
        assert not [half for half in halves if half in tapes]
        assert not [half for name in SITES[:1] for half in personal_of(live.sites[name])]
        await its_versions_are_judged(live.sites["alder"], generator)
        code, _, err = await fedctl(witness, "learning", "--model", GENERATOR)
        assert (code, "Name its base model under [generator]" in err) == (1, True)
        code, _, err = await fedctl(witness, "eval", "--answers", "--generator", "base")
        assert (code, "has no base model to answer with" in err) == (1, True)
        losses = [one.report.mean_loss for one in await live.sites["alder"].rounds(GENERATOR)]
        assert losses[1] < losses[0], "it learns to answer"


async def its_versions_are_judged(site: LiveSite, newest: bytes) -> None:
    """By round, once there are enough questions of the site's own; and asked for answers."""
    code, _, err = await fedctl(site, "learning", "--model", GENERATOR)
    assert (code, "10 validation questions with answers" in err) == (1, True)
    pairs = [
        control.Pair(
            query=f"pray, {pair.query}",
            positives=pair.positives,
            split="valid",
            reference=pair.reference,
        )
        for pair in site.corpus.pairs
        if pair.split == "train"
    ]
    async for _ in site.stub.Ingest(iter([control.IngestRequest(pairs=pairs)]), timeout=60):
        pass
    async with asyncio.timeout(300):
        asked = control.LearningCurveRequest(model=GENERATOR)
        while (await site.stub.LearningCurve(asked)).unjudged:
            await asyncio.sleep(0.2)
    code, out, err = await fedctl(site, "learning", "--model", GENERATOR, "--json")
    assert code == 0, err
    curve = json.loads(out)["curve"]
    nats = {one["round"]: one["value"] for one in curve["points"] if one["metric"] == "nats"}
    assert sorted(nats) == [0, 1, 2], "the base model first"
    assert nats[2] != nats[0]
    digests = {one["round"]: one["model_digest"] for one in curve["points"]}
    assert (digests[2], curve["answering_digest"] in digests.values()) == (newest.hex(), True)
    words = ("eval", "--answers", "--split", "valid", "--generator", "base", "--generator", "2")
    code, out, err = await fedctl(site, *words, "--json")
    assert code == 0, err
    base = json.loads(out)
    (other,) = base["compared"]
    assert (base["generator"], base["generator_digest"]) == ("base", "")
    assert (other["generator"], other["generator_round"]) == ("federated", 2)
    assert other["generator_digest"] == newest.hex()
    perplexities = [
        {one["metric"]: one["mean"] for one in each["figures"]} for each in (base, other)
    ]
    ratio = {one["metric"]: one["mean"] for one in other["over_first"]}["ppl-reference"]
    assert ratio == pytest.approx(
        perplexities[1]["ppl-reference"] / perplexities[0]["ppl-reference"]
    )
    assert ratio != 1.0
    code, _, err = await fedctl(site, "eval", "--answers", "--generator", "7")
    assert (code, "has no round 7: its newest here is 2" in err) == (1, True)
    for shown in (("learning", "--model", GENERATOR), words):
        code, out, _ = await fedctl(site, *shown)
        print(out)


@pytest.mark.parametrize(
    "fault",
    [
        "train:before=kill",
        pytest.param("hideupdate:after=kill", marks=pytest.mark.endurance),
        pytest.param("applysum:before=kill", marks=pytest.mark.endurance),
        pytest.param("applysum:after=kill", marks=pytest.mark.endurance),
        "send.vote:before=kill",
        pytest.param("adopt:before=kill", marks=pytest.mark.endurance),
    ],
)
async def test_a_site_dies_in_a_generator_round_and_another_joins_late(
    tmp_path: Path, fault: str
) -> None:
    present = [name for name in SITES if name != "dogwood"]
    async with federation(tmp_path, present, without=["dogwood"]) as live:
        await again(live, "cedar", fault=fault)
        await live.until_connected()
        asked = control.TrainRequest(rounds=2, model=GENERATOR)
        await live.sites["alder"].stub.Train(asked, timeout=30)
        assert await live.sites["cedar"].process.wait() == -9, live.sites["cedar"].log
        await again(live, "cedar")
        # An attempt that waits in vain takes its time.
        await live.until_head(2, 600, model=GENERATOR)
        late = await again(live, "dogwood")
        await late.ingest()
        await live.until_head(2, model=GENERATOR)
        await all_agree(live, GENERATOR)
        await live.train("dogwood", 1, model=GENERATOR)
        await all_agree(live, GENERATOR)
        last = (await late.rounds(GENERATOR))[-1]
        assert "dogwood" in last.certificate.body.contributors


def validation() -> Corpus:
    """By which versions are judged; nobody learns from it."""
    corpus = Corpus.of("ferry")
    for document in corpus.documents:
        document.split = "valid"
    for pair in corpus.pairs:
        pair.split = "valid"
    return corpus


async def test_a_version_is_taken_into_use_while_people_ask(tmp_path: Path) -> None:
    async with federation(tmp_path, ["alder", "birch", "cedar"]) as live:
        alder, enough = live.sites["alder"], validation()
        questions = [pair.query for pair in alder.corpus.pairs]
        alder.corpus = enough
        await alder.ingest()
        used: list[bytes] = []  # by the answer of each question, or by one just before

        async def ask_on(first: int) -> None:
            while used.count(b"") == len(used) or len(used) < 20:
                question = questions[(first + len(used)) % len(questions)]
                digest = (await alder.status()).generator.answering_digest
                reply = await alder.stub.Ask(control.AskRequest(question=question), timeout=120)
                assert reply.passages and (reply.answer or reply.abstained)
                # What an untrained model writes is not supported, as it should be.
                assert reply.instead in ("", UNSUPPORTED), reply.instead
                used.append(digest)

        async with asyncio.timeout(600), asyncio.TaskGroup() as group:
            for first in range(2):
                group.create_task(ask_on(first))
            group.create_task(live.train("birch", 2, model=GENERATOR))
        status = (await alder.status()).generator
        assert used[0] == b"" and used[-1]
        assert status.judged_by == len(enough.pairs) and status.perplexity < status.base_perplexity
        assert not [line for line in alder.log.splitlines() if '"error"' in line]


async def test_a_damaged_round_of_the_generator_is_forgotten_alone(tmp_path: Path) -> None:
    async with federation(tmp_path) as live:
        cedar = live.sites["cedar"]
        await live.train("alder", 1)
        await cedar.terminate()
        with closing(sqlite3.connect(cedar.folder / "state" / GENERATOR / "state.sqlite3")) as db:
            db.execute("UPDATE protocol SET state = x'ff'")
            db.commit()
        cedar = await live.launch("cedar")
        assert await asyncio.wait_for(cedar.process.wait(), 60) == 2
        assert "with --model generator where this file is the generator's" in cedar.log
        config = ("--config", str(cedar.folder / "fedd.toml"))
        command = ("site", "forget-round", "--yes", "--json", "--model", GENERATOR, *config)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "daemon.fedctl", *command), stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
        assert (process.returncode, json.loads(out)["round"]) == (0, 1)
        await live.launch("cedar")
        await live.until_connected()
        await live.train("birch", 1, model=GENERATOR)
        await all_agree(live, GENERATOR)
        await all_agree(live, "")
        last = (await live.sites["cedar"].rounds(GENERATOR))[-1]
        assert "cedar" in last.certificate.body.contributors
