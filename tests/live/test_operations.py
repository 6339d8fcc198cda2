"""A day of an operator: three real daemons that adapt by LoRA, and fedctl beside them."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio

from crypto.identity.authority import create_authority
from proto import control_pb2 as control
from tests.daemon.pairs.test_pair_writers import about, completion, serving
from tests.support.federation import LiveFederation, LiveSite

pytestmark = [
    pytest.mark.federation,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

SITES = ["elm", "fir", "oak"]


class Writer(NamedTuple):
    """A language model's server, of few ideas; its third query waits until it may go on.

    What it answers is half invented; ``broken``: it answers nothing. ``held``: questions that
    wait, too.
    """

    url: str
    asked: list[dict[str, object]]
    go_on: threading.Event
    broken: threading.Event
    held: set[str]


@pytest.fixture(scope="module")
def writer() -> Iterator[Writer]:
    go_on, broken = threading.Event(), threading.Event()
    count, held = itertools.count(1), set[str]()

    def write(body: dict[str, object]) -> tuple[int, bytes]:
        if broken.is_set():
            return 500, b"out of memory"
        asked = str(body["messages"][0]["content"])  # type: ignore[index]
        if found := re.search(r"<passage 1>.*\n(.*?\.)\s", asked):
            if any(question in asked for question in held):
                go_on.wait(200)
            more = "Pirates own it [1]. [Read on](http://evil.example) [1]."
            status, data = completion(f"{found[1][:-1]} [1]. {more}")
            reply = json.loads(data)
            if body.get("logprobs"):
                reply["choices"][0]["logprobs"] = {"content": [{"logprob": -0.5}] * 3}
            return status, json.dumps(reply).encode()
        if next(count) == 3:
            go_on.wait(60)
        return completion(f"1. {about(body)}")

    with serving(write) as (url, asked):
        yield Writer(url, asked, go_on, broken, held)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(
    tmp_path_factory: pytest.TempPathFactory, writer: Writer
) -> AsyncIterator[LiveFederation]:
    root = tmp_path_factory.mktemp("operations")
    (root / "elm").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(root / "elm" / "notify"))
        systemd.setblocking(False)
        tables = {
            "pairs": {"writer": f"{writer.url}#m"},
            "retriever": {"passage_pooling": "mean"},  # and questions as its makers say
        }
        async with LiveFederation.start(
            *(root, SITES),
            adapt="lora",
            tables=tables,
            own={
                "fir": {
                    "retrieval": {
                        "generator": "openai",
                        "language_model": f"{writer.url}#m",
                        "decoding": "pfedrag",
                        "answer_within_s": 100.0,  # it is hung up on before, on a busy machine too
                    }
                }
            },
            read_as=BY_FIRST_TOKEN,
        ) as federation:
            told = systemd.recv(4096).decode()
            assert told.startswith("READY=1\nSTATUS=site elm, round 0")
            await federation.ingest_all()
            yield federation
        assert systemd.recv(4096).decode().startswith("STOPPING=1")


# As BGE says it of itself.
BY_FIRST_TOKEN = {
    "modules.json": [
        {"idx": n, "name": str(n), "path": f"{n}_{kind}" if n else "", "type": f"s.models.{kind}"}
        for n, kind in enumerate(("Transformer", "Pooling", "Normalize"))
    ],
    "1_Pooling/config.json": {"word_embedding_dimension": 32, "pooling_mode_cls_token": True},
}


async def started(site: LiveSite, *words: str) -> asyncio.subprocess.Process:
    """The command as a person types it, running."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "daemon.fedctl",
        "--socket",
        str(site.folder / "fedd.sock"),
        *words,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def fedctl(site: LiveSite, *words: str) -> tuple[int, str, str]:
    """The command to its end: exit code, stdout, stderr."""
    process = await started(site, *words)
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def test_systemd_is_told_when_the_daemon_is_ready(live: LiveFederation) -> None:
    """The fixture has received READY=1 from elm; the others found no socket and say so."""
    assert "systemd not notified" in live.sites["fir"].log
    assert "systemd not notified" not in live.sites["elm"].log


async def test_questions_are_answered_while_a_lora_run_goes_on(live: LiveFederation) -> None:
    site = live.sites["oak"]
    before = (await site.status()).index_digest
    running = asyncio.create_task(live.train("fir", rounds=2))
    answered: list[bytes] = []
    while not running.done():
        reply = await site.stub.Ask(
            control.AskRequest(question="who looks after the anchor winch of oak?"), timeout=60
        )
        assert reply.citations
        answered.append(reply.model_digest)
    await running
    assert answered[0] == before, "the old version answers until the new one is indexed"
    rounds = await site.rounds()
    known = {before, *(r.certificate.body.model_digest for r in rounds)}
    assert set(answered) <= known
    assert len({(await s.status()).model_digest for s in live.sites.values()}) == 1


async def test_rounds_are_shown_as_they_were(live: LiveFederation) -> None:
    code, out, _ = await fedctl(live.sites["elm"], "rounds", "--json")
    assert code == 0
    rounds = json.loads(out)["rounds"]
    assert [r["round"] for r in rounds] == [1, 2]
    assert rounds[0]["shared_values"] == live.sites["elm"].shared_values()
    assert rounds[0]["committed_unix_ms"] > 1_700_000_000_000
    assert rounds[0]["signed_by"]
    code, out, _ = await fedctl(live.sites["elm"], "peers", "--json")
    peers = json.loads(out)["peers"]
    assert [peer["site"] for peer in peers] == ["fir", "oak"]
    assert all(peer["connected"] and peer["head_round"] <= 2 for peer in peers)
    assert all(peer["round_trip_ms"] > 0 for peer in peers)
    expiry = (await live.sites["fir"].status()).certificate_expires_unix_s
    assert peers[0]["certificate_expires_unix_s"] == expiry


async def test_bad_input_costs_only_itself(live: LiveFederation, tmp_path: Path) -> None:
    """The transcript of a careless ingest, against the real daemon."""
    site = live.sites["fir"]
    before = (await site.status()).documents
    (tmp_path / "good.txt").write_text("The boathouse key hangs behind the tide table.")
    (tmp_path / "binary.txt").write_bytes(b"\x7fELF\0\0\1")
    (tmp_path / "empty.md").write_bytes(b"")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 du port")
    with (tmp_path / "records.jsonl").open("w") as records:
        records.write('{"id": "fir/r1", "title": "Tides", "text": "High water is at noon."}\n')
        records.write('{"id": "fir/r2", "title": "broken\n')
        records.write('{"id": "fir/r3", "title": "Ebb", "text": "Low water is at six."}\n')
    with (tmp_path / "long.jsonl").open("wb") as long:
        long.write(b'{"id": "fir/long", "text": "')
        for _ in range(64):
            long.write(b"x" * (16 << 20))  # 1 GiB without a line's end
        long.write(b'"}\n{"id": "fir/r4", "title": "Slack", "text": "Slack water is brief."}\n')
    code, out, err = await fedctl(site, "ingest", str(tmp_path), "--json")
    assert code == 3, err
    told = json.loads(out)
    causes = {(Path(p["path"]).name, p["line"]): p["cause"] for p in told["problems"]}
    assert set(causes) == {
        ("binary.txt", None),
        ("empty.md", None),
        ("records.jsonl", 2),
        ("long.jsonl", 1),
    }
    assert told["documents_new"] == 5
    assert (await site.status()).documents == before + 5
    found = ("where does the boathouse key hang?", "--top-k", "100", "--json")
    code, out, _ = await fedctl(site, "search", *found)
    assert code == 0
    assert any("boathouse" in passage["text"] for passage in json.loads(out)["passages"])


async def test_pairs_whose_documents_are_not_here_are_told(
    live: LiveFederation, tmp_path: Path
) -> None:
    site, train = live.sites["fir"], (await live.sites["fir"].status()).pairs_train
    pairs = tmp_path / "first" / "pairs_train.jsonl"  # read before the document that it names
    pairs.parent.mkdir()
    lines = [
        {"query": f"who mends the {name}?", "positives": [name]}
        for name in ("lift", "second/lift.txt")
    ]
    pairs.write_text(json.dumps(lines[0]))
    code, out, err = await fedctl(site, "ingest", str(pairs), "--json")
    told = json.loads(out)
    assert (code, told["pairs"], told["pairs_usable"]) == (3, 1, 0), err
    assert (told["unknown_document"], told["known_document"]) == ("lift", "")
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "lift.txt").write_text("The smith of the upper basin mends the lift.")
    pairs.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, out, err = await fedctl(site, "ingest", str(tmp_path))
    assert code == 3, err
    assert "pairs name 'lift', and no document here is called so: is it 'second/lift.txt'?" in err
    assert "2 pairs, of which 1 can be used: 1 names documents that are not here" in out
    assert "(first: 'lift'; is it 'second/lift.txt'?)" in out
    assert (await site.status()).pairs_train == train + 1


async def test_fedctl_errors_are_one_line_with_cause_and_remedy(live: LiveFederation) -> None:
    site = live.sites["elm"]
    code, _, err = await fedctl(site, "ask", "   ")
    assert code in (1, 2)
    assert len(err.strip().splitlines()) == 1
    code, _, err = await fedctl(site, "train", "--stop")
    assert code == 1
    assert "no run is under way" in err
    code, _, err = await fedctl(site, "eval", "--split", "valid")
    assert code == 1
    assert "Traceback" not in err


async def test_a_run_can_be_detached_watched_again_and_stopped(live: LiveFederation) -> None:
    site, other = live.sites["elm"], live.sites["oak"]
    code, out, _ = await fedctl(site, "train", "--rounds", "200", "--detach", "--json")
    assert code == 0
    target = json.loads(out)["run"]["target_round"]
    watching = await started(other, "train", "--attach", "--json")
    assert watching.stdout is not None
    seen = [json.loads(await watching.stdout.readline())]
    while seen[-1]["target_round"] != target:  # until it shows this run
        seen.append(json.loads(await watching.stdout.readline()))
    code, _, _ = await fedctl(other, "train", "--stop")
    assert code == 0
    rest, _ = await asyncio.wait_for(watching.communicate(), 60)
    assert watching.returncode == 3, "it ended before its last round"
    out = rest.decode()
    last = json.loads(out.splitlines()[-1])
    assert last["finished"]
    assert last["head_round"] < target
    await asyncio.sleep(1)
    heads = {(await s.status()).head_round for s in live.sites.values()}
    assert len(heads) == 1


async def test_a_build_that_ctrl_c_ended_loses_nothing_that_was_written(
    live: LiveFederation, writer: Writer
) -> None:
    site, asked = live.sites["elm"], writer.asked
    building = await started(site, "pairs", "build", "--how", "written", "--json")
    async with asyncio.timeout(60):
        while len(asked) < 3:
            await asyncio.sleep(0.01)
    building.send_signal(signal.SIGINT)
    told, _ = await building.communicate()
    assert (building.returncode, json.loads(told)["error"]) == (130, "interrupted")
    writer.go_on.set()
    code, out, _ = await fedctl(site, "pairs", "--json")
    assert (code, json.loads(out)["kinds"]) == (0, [])
    code, out, err = await fedctl(site, "pairs", "build", "--how", "written", "--json")
    assert code == 0, err
    built = json.loads(out)
    assert (built["finished"], built["learn_from"], built["training_pairs"]) == (
        True, "supplied", 12,
    )  # fmt: skip
    prompts = [str(body["messages"]) for body in asked]
    assert len(prompts) == len(set(prompts)) == built["total"], "each passage once"
    code, out, _ = await fedctl(site, "pairs", "show", "--examples", "2", "--json")
    shown = json.loads(out)
    assert shown["kinds"] == [
        {"kind": "written", "pairs": built["made"], "usable": built["made"], "answered": 0}
    ]
    assert all(d.startswith("elm/") for e in shown["examples"] for d in e["documents"])
    assert (await fedctl(site, "pairs", "drop", "--all"))[0] == 0


async def test_documents_of_an_ingest_that_was_broken_off_are_embedded(
    live: LiveFederation,
) -> None:
    """They are stored, and by words alone they are found at once; by meaning a moment later."""
    site = live.sites["fir"]
    late = control.Document(id="fir/late", title="Late", text="Zinc lanterns hang in the loft.")
    root = site.folder / "state" / "index"

    def indexed() -> int:
        names = [path.read_text() for path in root.glob("*/index.json")]
        return max((json.loads(name)["count"] for name in names), default=0)

    async def one_batch_and_no_end() -> AsyncIterator[control.IngestRequest]:
        yield control.IngestRequest(documents=[late])
        await asyncio.Event().wait()

    before = indexed()
    call = site.stub.Ingest(one_batch_and_no_end(), timeout=60)
    assert (await anext(aiter(call))).documents_new == 1
    call.cancel()
    async with asyncio.timeout(60):
        while indexed() != before + 1:
            await asyncio.sleep(0.1)


async def test_versions_are_judged_beside_the_encoder_before_training(
    live: LiveFederation,
) -> None:
    site = live.sites["oak"]
    code, out, err = await fedctl(site, "eval", "--json")
    assert code == 0, err
    judged = json.loads(out)
    assert (judged["split"], judged["questions"]) == ("test", 4)
    assert {f["ranking"] for f in judged["figures"]} == {"bm25", "vanilla", "dense", "fused"}
    code, out, _ = await fedctl(site, "eval", "--history", "--json")
    assert (code, json.loads(out)["points"]) == (0, [])
    assert "no pairs of split valid" in json.loads(out)["missing"]
    asked = control.Pair(
        query="who looks after the oar lock of oak?", positives=["oak/oar-lock"], split="valid"
    )

    async def pairs() -> AsyncIterator[control.IngestRequest]:
        yield control.IngestRequest(pairs=[asked])

    last = [step async for step in site.stub.Ingest(pairs(), timeout=60)][-1]
    assert (last.done, last.pairs, last.pairs_usable) == (True, 1, 1)
    assert last.unknown_document == ""
    head = (await site.status()).head_round
    async with asyncio.timeout(60):
        while not (points := await curve_of(site, "mrr@10")):
            await asyncio.sleep(0.1)
    await live.train("oak", rounds=1)
    async with asyncio.timeout(60):
        while len(points) < 2:
            await asyncio.sleep(0.1)
            points = await curve_of(site, "mrr@10")
    assert [(point["round"], point["questions"]) for point in points] == [(head, 1), (head + 1, 1)]
    assert points[-1]["model_digest"] == (await site.status()).model_digest.hex()


async def curve_of(site: LiveSite, metric: str) -> list[dict[str, object]]:
    _, out, _ = await fedctl(site, "eval", "--history", "--metric", metric, "--json")
    points: list[dict[str, object]] = json.loads(out)["points"]
    return points


async def test_the_chain_is_verified_by_someone_who_trusts_only_the_authority(
    live: LiveFederation, tmp_path: Path
) -> None:
    site = live.sites["fir"]
    authority = live.federation.authority / "ca.crt"
    code, out, err = await fedctl(site, "rounds", "verify", "--authority", str(authority), "--json")
    assert code == 0, err
    verified = json.loads(out)
    status = await site.status()
    assert verified["rounds"] == status.head_round
    assert verified["head_digest"] == status.model_digest.hex()
    assert verified["manifests"] == [1]
    create_authority(tmp_path / "other", live.federation.federation_id)
    stranger = tmp_path / "other" / "ca.crt"
    code, _, err = await fedctl(site, "rounds", "verify", "--authority", str(stranger))
    assert code == 1
    assert "the chain breaks after round 0" in err


async def test_a_written_answer_is_what_its_documents_say_or_is_stood_in_for(
    live: LiveFederation, writer: Writer
) -> None:
    fir = live.sites["fir"]
    question = "who looks after the keel block of fir?"
    code, out, err = await fedctl(fir, "ask", question)
    assert code == 0, err
    assert re.fullmatch(r"(The wardens of fir|A worn) [\w ]+\. \[1\]", out.splitlines()[0]), out
    assert "the language model did not answer" not in out
    assert "evil" not in out and "Pirates" not in out
    assert "2 statements were taken out: what they cite does not support them" in out
    assert "answers are extracted" not in " ".join((await fir.status()).warnings)
    writer.broken.set()
    try:
        code, out, err = await fedctl(fir, "ask", question)
        assert code == 0, err
        cause = f"the language model at {writer.url} answered 500: see its own log"
        assert f"for the language model did not answer: {cause}" in out
        told = json.loads((await fedctl(fir, "ask", question, "--json"))[1])
        assert (told["instead"], told["citations"][0]["number"]) == (cause, 1)
        assert f"answers are extracted, not written: {cause}" in (await fir.status()).warnings
    finally:
        writer.broken.clear()


async def test_a_prompt_is_shown_as_the_model_is_sent_it(
    live: LiveFederation, writer: Writer
) -> None:
    fir, asked = live.sites["fir"], len(writer.asked)
    words = ("prompts", "test", "auto", "--question", "who looks after the keel block of fir?")
    code, out, err = await fedctl(fir, *words, "--json")
    assert code == 0, err
    shown = json.loads(out)
    assert (shown["name"], shown["answer"], len(writer.asked)) == ("novel", "", asked)
    assert shown["guessed_by"] == "begins with a word that asks for one thing: 'who'"
    assert shown["text"].count("<passage ") >= shown["passages"] > 0
    code, out, err = await fedctl(fir, *words, "--run")
    assert code == 0, err
    sent = writer.asked[-1]
    assert sent["messages"] == [{"role": "user", "content": shown["text"]}]
    # As pFedRAG has it: the site's settings say so.
    assert (sent["max_tokens"], sent["temperature"], sent["top_k"]) == (128, 0.4, 50)
    assert (sent["repetition_penalty"], sent["repeat_penalty"]) == (1.2, 1.2)
    assert "[1]" in out and "Pirates" not in out.removeprefix(shown["text"])
    assert "2 statements were taken out: what they cite does not support them." in out
    code, _, err = await fedctl(fir, "prompts", "test", "rhyme", "--question", "who?")
    assert (code, "there is no prompt 'rhyme'" in err) == (2, True), err


async def test_an_evaluation_that_is_given_up_shows_what_it_has_and_goes_on(
    live: LiveFederation, writer: Writer, tmp_path: Path
) -> None:
    """Ctrl-C while the model writes to its third question: it is hung up on, and asked again."""
    fir, part = live.sites["fir"], tmp_path / "part.jsonl"
    queries = [pair.query for pair in fir.corpus.pairs if pair.split == "test"]
    writer.go_on.clear()
    writer.held.add(queries[2])
    judging = await started(fir, "eval", "--answers", "--save", str(part), "--json")
    async with asyncio.timeout(60):
        while not any(queries[2] in str(body["messages"]) for body in writer.asked):
            await asyncio.sleep(0.01)
    judging.send_signal(signal.SIGINT)
    told, failed = await asyncio.wait_for(judging.communicate(), 90)
    writer.go_on.set()
    assert judging.returncode == 3, failed
    partial = json.loads(told)
    assert (partial["questions"], partial["pairs"]) == (2, len(queries))
    assert partial["partial"] == "it was given up"
    kept = [json.loads(line) for line in part.read_text("utf-8").splitlines()]
    assert [one["question"] for one in kept[1:]] == queries[:2]
    assert part.stat().st_mode & 0o777 == 0o600
    code, out, err = await fedctl(fir, "eval", "--answers", "--json")
    assert code == 0, err
    judged = json.loads(out)
    assert (judged["questions"], judged["asked_before"], judged["partial"]) == (len(queries), 2, "")
    figures = {one["metric"]: one for one in judged["figures"]}
    assert figures["ppl-written"]["mean"] == pytest.approx(math.exp(0.5))
    assert "ppl-reference" not in figures, "a server tells of its own words alone"
    measured = [str(body["messages"]) for body in writer.asked if body.get("logprobs")]
    times = [sum(query in one for one in measured) for query in queries]
    assert times == [1, 1, 2, *[1] * len(queries[3:])]
    status = json.loads((await fedctl(fir, "status", "--json"))[1])
    assert status["counted"]["hanse_answers_given"] >= 1
    assert status["abstention_pairs"] == 0, "no validation pairs here: general questions"


async def test_a_failed_attempt_says_why_and_at_whose_side(live: LiveFederation) -> None:
    """Last in this file: one site goes away, and a run that needs three can't go on."""
    number = (await live.sites["elm"].status()).head_round + 1
    # Not the next coordinator: two minutes of patience would pass before anybody fails.
    asked, gone = (live.sites[SITES[(number + turn) % 3]] for turn in (0, 2))
    assert await gone.terminate() == 0
    code, _, _ = await fedctl(asked, "train", "--rounds", "1", "--detach")
    assert code == 0
    failed: list[dict[str, object]] = []
    async with asyncio.timeout(90):
        while not failed:
            await asyncio.sleep(0.5)
            code, out, _ = await fedctl(asked, "rounds", "show", str(number), "--json")
            assert code == 0
            attempts = json.loads(out)["attempts"]
            failed = [a for a in attempts if a["outcome"] == "failed"]
    assert f"{gone.id}: did not answer" in str(failed[0]["reason"])
    assert "the plan needs 3" in str(failed[0]["reason"])
    assert f"{gone.id}: did not answer" in (await asked.status()).last_error
    code, out, _ = await fedctl(asked, "rounds", "show", "1", "--json")
    shown = json.loads(out)
    assert [a["outcome"] for a in shown["attempts"]] == ["committed"]
    assert shown["attempts"][0]["bytes_sent"] > 0
