"""What a person sees at one real daemon, whose two peers are not there."""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import json
import signal
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing, suppress
from hashlib import sha256
from pathlib import Path

import grpc.aio
import pytest
import pytest_asyncio
import torch
import transformers
from PIL import Image

from daemon.fedctl.demo.sites import BUNDLED
from proto import control_pb2 as control
from tests.benchmarks.answers.test_marked import ANSWERS
from tests.daemon.learning.test_options import give_validation_pairs
from tests.daemon.library.readers.pdf_files import HEIGHT, WIDTH, lines, made
from tests.live.models.test_another_encoder import again
from tests.live.test_operations import fedctl, started
from tests.support.federation import LiveFederation, LiveSite

pytestmark = [
    pytest.mark.federation,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]


PROMPTS = {"query": "query: ", "passage": "passage: "}  # as E5 says it of itself


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that the daemon watches."""
    return tmp_path_factory.mktemp("watched")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(
    tmp_path_factory: pytest.TempPathFactory, folder: Path
) -> AsyncIterator[LiveFederation]:
    async with LiveFederation.start(
        tmp_path_factory.mktemp("alone"),
        ["elm"],
        without=["fir", "oak"],
        tables={
            "retriever": {"personal": "mixture"},
            "library": {"folders": {"watched": str(folder)}, "scan_s": 1, "keep_originals": True},
        },
        read_as={"config_sentence_transformers.json": {"prompts": PROMPTS}},
    ) as federation:
        give_validation_pairs(federation.sites["elm"].corpus)
        await federation.ingest_all()
        yield federation


@pytest.fixture
def site(live: LiveFederation) -> LiveSite:
    return live.sites["elm"]


async def test_a_start_tells_what_it_waits_for(site: LiveSite) -> None:
    steps = [
        "settings read",
        "starting",
        "loading the encoder",
        "opening the library",
        "verifying the audit log",
        "ready",
    ]
    found = [site.log.find(step) for step in steps]
    assert -1 not in found
    assert found == sorted(found)
    assert "opening the index" in site.log


async def shown(site: LiveSite, *words: str) -> str:
    """What is printed, whatever the terminal's width."""
    code, out, err = await fedctl(site, *words)
    assert code == 0, err
    return " ".join(out.split())


async def test_status_shows_a_refused_reload_until_one_goes_well(site: LiveSite) -> None:
    manifest = site.folder / "manifest.json"
    good = manifest.read_bytes()
    manifest.write_text("{")
    site.process.send_signal(signal.SIGHUP)
    async with asyncio.timeout(60):
        while "a reload was refused" not in (told := (await site.status()).last_error):
            await asyncio.sleep(0.1)
    assert f"stay: {manifest}: the manifest is not JSON" in told
    manifest.write_bytes(good)
    site.process.send_signal(signal.SIGHUP)
    async with asyncio.timeout(60):
        while (await site.status()).last_error:
            await asyncio.sleep(0.1)


async def test_pairs_that_came_again_are_told_and_counted_once(
    site: LiveSite, tmp_path: Path
) -> None:
    train = (await site.status()).pairs_train
    names = ["anchor-winch", "beacon-lamp", "anchor-winch", "nowhere"]
    lines = [{"query": f"where is the {n}?", "positives": [f"elm/{n}"]} for n in names]
    pairs = tmp_path / "pairs_train.jsonl"
    pairs.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, out, err = await fedctl(site, "ingest", str(pairs))
    assert code == 3, err
    assert "pairs name 'elm/nowhere', and no document here is called so" in err
    assert "4 pairs read, 3 kept (1 repeats another's question and documents), of which 2" in out
    assert (await site.status()).pairs_train == train + 2
    _, out, _ = await fedctl(site, "ingest", str(pairs), "--json")
    told = json.loads(out)
    assert [told[n] for n in ("pairs_read", "pairs", "pairs_repeated", "pairs_usable")] == [
        4, 3, 1, 2,
    ]  # fmt: skip


def asked_of(name: str) -> control.IngestRequest:
    pair = control.Pair(query=f"who looks after {name}?", positives=[f"elm/{name}"], split="test")
    return control.IngestRequest(pairs=[pair])


async def test_a_pair_that_comes_in_two_batches_is_counted_once(site: LiveSite) -> None:
    async def batches() -> AsyncIterator[control.IngestRequest]:
        for name in ("anchor-winch", "beacon-lamp", "anchor-winch"):
            yield asked_of(name)

    last = [step async for step in site.stub.Ingest(batches(), timeout=60)][-1]
    assert (last.pairs, last.pairs_repeated, last.pairs_usable) == (2, 1, 2)


async def test_one_ingest_at_a_time_and_the_other_is_told(site: LiveSite, tmp_path: Path) -> None:
    async def one_batch_and_no_end() -> AsyncIterator[control.IngestRequest]:
        yield asked_of("anchor-winch")
        await asyncio.Event().wait()

    first = site.stub.Ingest(one_batch_and_no_end(), timeout=60)
    assert (await anext(aiter(first))).pairs == 1
    (tmp_path / "note.txt").write_text("The winch is oiled in spring.")
    code, _, err = await fedctl(site, "ingest", str(tmp_path / "note.txt"))
    assert (code, "an ingest that began " in err) == (1, True), err
    assert "under way an ingest that began" in await shown(site, "status")
    first.cancel()
    async with asyncio.timeout(60):  # until the daemon has seen that nobody waits any more
        while (await fedctl(site, "ingest", str(tmp_path / "note.txt")))[0] != 0:
            await asyncio.sleep(0.1)


def holding(word: bytes, folder: Path) -> set[str]:
    """Files in which it stands, in whatever letters."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {file.name for file in files if word in file.read_bytes().lower()}


async def test_a_removed_document_is_in_no_file_and_no_answer(
    site: LiveSite, tmp_path: Path
) -> None:
    state, indexes = site.folder / "state", site.folder / "state" / "index"
    (tmp_path / "vault.md").write_text(
        "# The quaxolith\n\nThe quaxolith lies behind the green door. It is gilded each winter."
    )
    pair = {"query": "where does the quaxolith lie?", "positives": ["vault.md"]}
    (tmp_path / "pairs_train.jsonl").write_text(json.dumps(pair) + "\n")
    await shown(site, "ingest", str(tmp_path))
    await shown(site, "pairs", "build", "--how", "titles")
    assert "vault.md" in await shown(site, "ask", "where does the quaxolith lie?")
    assert "It is gilded each winter." in await shown(site, "documents", "show", "vault.md")
    found = {name.partition("-")[0] for name in holding(b"quaxolith", state)}
    kept = sha256((tmp_path / "vault.md").read_bytes()).hexdigest()
    assert found == {"library.sqlite3", "made_pairs.jsonl", kept}
    before = {index.name for index in indexes.iterdir()}
    status = json.loads(await shown(site, "status", "--json"))
    assert (status["index_recall"], status["counted"]["hanse_questions"] >= 1) == (1.0, True)

    removed = json.loads(await shown(site, "documents", "remove", "vault.md", "--yes", "--json"))
    assert (removed["documents"], removed["pairs"], removed["done"]) == (1, 1, True)
    assert holding(b"quaxolith", state) == set()
    assert before.isdisjoint(index.name for index in indexes.iterdir()), "made without it"
    assert "vault.md" not in await shown(site, "ask", "where does the quaxolith lie?")
    assert "vault.md" not in await shown(site, "documents", "list")
    assert "removed text" not in await shown(site, "status")
    with closing(sqlite3.connect(state / "library.sqlite3", isolation_level=None)) as library:
        library.execute("UPDATE removal SET rewritten = 0")  # as where the disk was full
    assert "removed text may still be in the library's file" in await shown(site, "status")
    entries = await shown(site, "audit", "show", "--state-dir", str(state), "--json")
    assert '"action": "remove"' in entries
    code, _, err = await fedctl(site, "documents", "show", "vault.md")
    assert (code, "no document 'vault.md' here" in err) == (2, True), err
    await shown(site, "pairs", "drop", "--all")


async def test_what_is_named_and_not_here_has_one_exit_code(site: LiveSite, tmp_path: Path) -> None:
    for words in (
        "rounds show 99",
        "audit acknowledge 99 --yes",
        "documents show nope",
        "documents original nope --out OUT/nope",
        "documents page nope 1 --out OUT/nope.png",
        "documents remove nope --yes",
        "documents remove --below nope/ --yes",
        "documents export nope --out OUT/nope.jsonl",
        "search --collection nope what?",
        "site expel nope --ca OUT",
        "manifest show OUT/nope.json",
        "rounds verify --authority OUT/nope.crt",
        "ingest OUT/nope.txt",
        "audit verify OUT/nope.jsonl",
    ):
        code, _, err = await fedctl(site, *words.replace("OUT", str(tmp_path)).split())
        assert code == 2, f"{words}: {code}: {err}"


async def until_answered(site: LiveSite, question: str, said: str, *, there: bool = True) -> None:
    """Ask until the answer says it, or says it no longer."""
    async with asyncio.timeout(90):
        while True:
            asked = control.AskRequest(question=question, top_k=2)
            answered = await site.stub.Ask(asked, timeout=60)
            if (said in answered.answer) is there:
                return
            await asyncio.sleep(0.2)


async def test_a_watched_file_appears_changes_and_vanishes(site: LiveSite, folder: Path) -> None:
    question, file = "which zephyrine is kept in the loft?", folder / "in" / "loft.md"
    file.parent.mkdir()
    (folder / "other.txt").write_text("Another file stays where it is.")
    (folder / "bad.docx").write_text("no archive")
    (folder / "link.txt").symlink_to(folder / "other.txt")
    file.write_text("# The loft\n\nThe zephyrine kept in the loft is scarlet.")
    await until_answered(site, question, "scarlet")
    assert "watched/in/loft.md" in await shown(site, "documents", "list", "--below", "watched/")
    file.write_text("# The loft\n\nThe zephyrine kept in the loft is emerald now.")
    await until_answered(site, question, "emerald")
    await until_answered(site, question, "scarlet", there=False)

    told = json.loads(await shown(site, "documents", "folders", "--json"))["folders"]
    assert [(one["name"], one["files"], one["refused"]) for one in told] == [("watched", 3, 1)]
    (warning,) = json.loads(await shown(site, "status", "--json"))["warnings"]
    assert "1 not read, or not whole, the first bad.docx: " in warning
    assert [one["path"] for one in told[0]["not_read"]] == ["bad.docx"]
    assert told[0]["links"] == 1
    assert site.log.count("links in a watched folder are not followed") == 1
    file.unlink()
    await until_answered(site, question, "emerald", there=False)
    assert holding(b"zephyrine", site.folder / "state" / "index") == set()

    file.parent.rmdir()
    away = await asyncio.to_thread(folder.rename, folder.with_name("away"))
    gone = "not there (any more); nothing that was read from it is removed"
    async with asyncio.timeout(60):
        while not any(gone in warning for warning in (await site.status()).warnings):
            await asyncio.sleep(0.2)
    await asyncio.to_thread(away.rename, folder)
    async with asyncio.timeout(60):
        while any(gone in warning for warning in (await site.status()).warnings):
            await asyncio.sleep(0.2)
    assert "watched/other.txt" in await shown(site, "documents", "list")
    state = str(site.folder / "state")
    entries = await shown(site, "audit", "show", "--state-dir", state, "--json")
    assert '"documents_removed": 1' in entries
    assert "loft" not in entries


async def test_a_search_finds_what_an_answer_is_made_of(site: LiveSite) -> None:
    question = "who looks after the anchor winch of elm?"
    answered = await site.stub.Ask(control.AskRequest(question=question, top_k=4), timeout=60)
    asked = control.SearchRequest(question=question, top_k=4, explain=True)
    found = await site.stub.Search(asked, timeout=60)
    assert [p.passage_id for p in found.passages] == [p.passage_id for p in answered.passages]
    for passage in found.passages:
        why = passage.explanation
        assert passage.score == pytest.approx(why.cosine + why.title_part + why.words_part)
    assert "winch" in found.passages[0].explanation.words
    out = await shown(site, "search", question, "--explain", "--top-k", "1")
    place = found.passages[0].explanation.meaning_place
    assert f"meaning: place {place}" in out
    state = str(site.folder / "state")
    entries = await shown(site, "audit", "show", "--state-dir", state, "--json")
    assert '"action": "search"' in entries
    assert question not in entries
    code, _, err = await fedctl(site, "search", " ")
    assert (code, "the question is blank" in err) == (2, True), err


async def test_a_passage_is_as_near_as_plain_transformers_have_it(
    live: LiveFederation, site: LiveSite
) -> None:
    """Before any training the head leaves the encoder's vectors as they are."""
    question = "who looks after the anchor winch?"
    reply = await site.stub.Search(
        control.SearchRequest(question=question, top_k=3, explain=True), timeout=60
    )
    texts = [
        found.text if found.text.startswith(found.title) else f"{found.title}\n{found.text}"
        for found in reply.passages
    ]
    read = ["query: " + question, *(f"passage: {text}" for text in texts)]
    asked, *told = await asyncio.to_thread(plain_vectors, live.encoder, read)
    assert [found.explanation.cosine for found in reply.passages] == pytest.approx(
        [float(asked @ one) for one in told], abs=1e-5
    )


def plain_vectors(encoder: Path, texts: list[str]) -> torch.Tensor:
    """The mean over tokens of what the model makes of each text, of length 1."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder)
    model = transformers.AutoModel.from_pretrained(encoder).eval()
    vectors = []
    for text in texts:
        tokens = tokenizer(text, truncation=True, max_length=64, return_tensors="pt")
        with torch.inference_mode():
            vectors.append(model(**tokens).last_hidden_state[0].mean(dim=0))
    return torch.nn.functional.normalize(torch.stack(vectors), dim=-1)


async def test_nobody_is_sent_to_fit_what_is_being_fitted(site: LiveSite) -> None:
    advice = "nothing yet for the version that answers: made when a run is over, or by fedctl"
    assert advice in await shown(site, "learning")
    fitting = await started(site, "personalise", "--local-epochs", "100")
    async with asyncio.timeout(60):
        # Not by a command: until that has started it may be over.
        while not (reply := await site.stub.Learning(control.LearningRequest())).being_fitted:
            await asyncio.sleep(0.02)
    assert [(fact.name, fact.value) for fact in reply.facts] == [
        ("this site's own", "being fitted now")
    ]
    _, err = await asyncio.wait_for(fitting.communicate(), 120)
    assert fitting.returncode == 0, err
    assert "being fitted" not in await shown(site, "learning")


async def test_an_evaluation_says_of_what_this_version_is_a_mixture(site: LiveSite) -> None:
    await shown(site, "personalise")
    share = (await site.stub.Learning(control.LearningRequest())).own_share
    told = f"mixture {share:.0%} of what this site learned alone, for version "
    assert told in await shown(site, "eval", "--split", "test")
    (fact,) = json.loads(await shown(site, "eval", "--json"))["facts"]
    assert fact["name"] == "mixture"


async def test_nought_is_a_choice_and_no_gap(site: LiveSite) -> None:
    words = ["--local-epochs", "0", "--hard-negatives", "0", "--robust", "norm"]
    train = ["train", "--rounds", "1", "--detach", "--json", *words, "--byzantine-sites", "0"]
    code, _, err = await fedctl(site, *train, "--clip", "1", "--colluders", "0")
    assert (code, "holds against 0 sites that pool what they know" in err) == (1, True)
    plan = json.loads(await shown(site, *train))["run"]["plan"]
    assert (plan["local_epochs"], plan["hard_negatives"], plan["byzantine_sites"]) == (0, 0, 0)
    assert plan["batch_size"] == 32, "what was not chosen is as in the settings"
    await shown(site, "train", "--stop")


async def test_who_does_not_answer_is_named_also_while_nothing_else_happens(
    live: LiveFederation, site: LiveSite
) -> None:
    watching = await started(site, "train", "--rounds", "1")

    async def until_told(silent: str) -> None:
        assert watching.stderr is not None
        async with asyncio.timeout(40):  # a phase waits for 60 seconds
            line = b""
            while f"no answer from {silent}: `fedctl peers` says why" not in line.decode():
                line = await watching.stderr.readline()
                assert line, f"it ended before it told of {silent}"

    await until_told("fir, oak")
    fir = await live.launch("fir")
    await until_told("oak")
    await fir.terminate()
    await until_told("fir, oak")
    watching.send_signal(signal.SIGINT)
    await watching.communicate()


async def test_a_text_that_is_there_twice_is_found_once(site: LiveSite, tmp_path: Path) -> None:
    rule = (
        "Boats longer than nine metres are moored at the outer pier, by two lines, in any weather."
    )
    for name, text in (("rules.txt", rule), ("draft.txt", f"{rule.upper()}\n")):
        (tmp_path / name).write_text(text)
    code, _, err = await fedctl(site, "ingest", str(tmp_path), "--collection", "harbour")
    assert code == 0, err
    for command in ("ask", "search"):
        out = await shown(site, command, "Where are boats longer than nine metres moored?")
        assert ("harbour/rules.txt" in out) + ("harbour/draft.txt" in out) == 2
        assert "also, or nearly so, in: harbour/" in out
    assert "also, or nearly so, in: harbour/draft.txt" in await shown(
        site, "documents", "show", "harbour/rules.txt"
    )
    code, _, err = await fedctl(site, "documents", "remove", "harbour/draft.txt", "--yes")
    assert code == 0, err
    assert "the same, or nearly so, still stands in: harbour/rules.txt" in err
    assert "nearly so" not in await shown(site, "documents", "show", "harbour/rules.txt")


async def test_after_a_kill_the_index_of_before_answers_at_once(
    live: LiveFederation, site: LiveSite, tmp_path: Path
) -> None:
    """A document came, and its index hangs, as one that takes hours does."""
    version = (await site.status()).index_digest
    killed = await again(live, "elm", fault="index:write=hang")
    (tmp_path / "bilge.txt").write_text("The bilge is pumped dry at noon.")
    ingesting = await started(killed, "ingest", str(tmp_path / "bilge.txt"))
    async with asyncio.timeout(60):  # at a start all passages wait, until the index is open
        while (status := await killed.status()).passages_waiting != 1 or not status.index_digest:
            await asyncio.sleep(0.05)
    killed.process.send_signal(signal.SIGKILL)
    await ingesting.communicate()
    elm = await again(live, "elm", fault="index:write=hang")
    async with asyncio.timeout(60):
        while not (status := await elm.status()).index_digest:
            await asyncio.sleep(0.05)
    assert (status.index_digest, status.passages_waiting) == (version, 1)
    answer = await elm.stub.Ask(control.AskRequest(question="When is the bilge pumped dry?"))
    assert answer.citations[0].document_id == "bilge.txt", "found by words"
    elm.process.send_signal(signal.SIGKILL)
    await again(live, "elm")


# ---- files that are kept; these tests come last, for they start the daemon again -----------


def pdf_at(path: Path, text: str) -> bytes:
    """A file of two pages; what is in it stands in no other file of these bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made(path, lambda _: None, lambda canvas: lines(canvas, [text]), title=f"Plan: {text}")
    return path.read_bytes()


async def test_equal_files_are_kept_once_until_the_last_is_removed(
    site: LiveSite, tmp_path: Path
) -> None:
    state, out = site.folder / "state", tmp_path / "out"
    content = pdf_at(tmp_path / "in" / "one.pdf", "The zyxomma hangs in the north tower.")
    (tmp_path / "in" / "two.pdf").write_bytes(content)
    out.mkdir()
    await shown(site, "ingest", str(tmp_path / "in"), "--collection", "plans")
    kept = sha256(content).hexdigest()
    some = content[len(content) // 2 :][:40].lower()
    assert holding(some, state) == {kept}, "once, for both"
    assert f"its file is kept: {len(content) / 1024:.1f} KiB" in await shown(
        site, "documents", "show", "plans/one.pdf"
    )

    await shown(site, "documents", "original", "plans/two.pdf", "--out", str(out / "two.pdf"))
    assert (out / "two.pdf").read_bytes() == content
    words = ["documents", "page", "plans/one.pdf"]
    await shown(site, *words, "2", "--dpi", "72", "--out", str(out / "page.png"))
    with Image.open(out / "page.png") as image:
        assert (image.format, image.size) == ("PNG", (round(WIDTH + 0.5), round(HEIGHT + 0.5)))
        assert len(image.getcolors(1 << 20) or []) > 1, "not blank"
    code, _, err = await fedctl(site, *words, "3", "--out", str(out / "none.png"))
    assert (code, "'plans/one.pdf' has 2 pages, and none is number 3" in err) == (2, True), err
    code, _, err = await fedctl(site, *words, "1", "--out", str(out / "page.png"))
    assert (code, "is there already" in err) == (2, True), err

    await shown(site, "documents", "remove", "plans/one.pdf", "--yes")
    assert holding(some, state) == {kept}, "the other document has it"
    code, _, err = await fedctl(site, *words, "1", "--out", str(out / "none.png"))
    assert (code, "no document 'plans/one.pdf' here" in err) == (2, True), err
    await shown(site, "documents", "remove", "plans/two.pdf", "--yes")
    image_bytes = (out / "page.png").read_bytes()
    for gone in (some, b"zyxomma", image_bytes[60:100].lower(), kept.encode()):
        assert holding(gone, state) == set()
    assert not (state / "originals" / kept).exists()
    entries = await shown(site, "audit", "show", "--state-dir", str(state), "--json")
    assert '"action": "original"' in entries
    assert '"action": "page-image"' in entries
    assert "plans/" not in entries


async def until_kept(site: LiveSite, document: str) -> int:
    """Its bytes, once its file is kept."""
    async with asyncio.timeout(90):
        while True:
            request = control.ShowDocumentRequest(id=document)
            try:
                if size := (await site.stub.ShowDocument(request, timeout=60)).original_bytes:
                    return size
            except grpc.aio.AioRpcError as error:
                assert "no document" in (error.details() or "")
            await asyncio.sleep(0.2)


async def test_files_of_a_watched_folder_are_kept_until_they_vanish(
    site: LiveSite, folder: Path, tmp_path: Path
) -> None:
    (folder / "index.txt").write_text("Plans of the yard.")  # an empty folder may be a lost disk
    content = pdf_at(folder / "plans" / "crane.pdf", "The wyvern crane lifts nine tons.")
    assert await until_kept(site, "watched/plans/crane.pdf") == len(content)
    out = tmp_path / "crane.pdf"
    await shown(site, "documents", "original", "watched/plans/crane.pdf", "--out", str(out))
    assert out.read_bytes() == content
    (folder / "plans" / "crane.pdf").unlink()
    async with asyncio.timeout(90):
        while holding(b"wyvern", site.folder / "state"):
            await asyncio.sleep(0.2)
    kept = site.folder / "state" / "originals" / sha256(content).hexdigest()
    assert not kept.exists()


async def ready(site: LiveSite) -> LiveSite:
    """It, once it answers."""
    async with asyncio.timeout(60):
        while True:
            with suppress(grpc.aio.AioRpcError):  # it is still starting
                await site.status()
                return site
            await asyncio.sleep(0.1)


async def test_after_a_kill_nothing_is_kept_that_no_document_has(
    live: LiveFederation, site: LiveSite, folder: Path, tmp_path: Path
) -> None:
    """Killed between naming a file's bytes and referring to them, and with an upload half done."""
    kept = site.folder / "state" / "originals"
    before = {one.name for one in kept.iterdir()}
    await site.terminate()
    killed = await live.launch("elm", fault="originals:named=kill")
    content = pdf_at(tmp_path / "in" / "mast.pdf", "The quillon mast is stepped in spring.")
    async with asyncio.timeout(60):
        while (await fedctl(killed, "ingest", str(tmp_path / "in")))[0] != 4 or (
            killed.process.returncode is None
        ):
            await asyncio.sleep(0.1)
    assert {one.name for one in kept.iterdir()} == {*before, sha256(content).hexdigest()}
    (kept / ".new-sent.0123456789abcdef").write_bytes(b"half a file")
    again = await ready(await live.launch("elm"))
    assert {one.name for one in kept.iterdir()} == before
    await shown(again, "ingest", str(tmp_path / "in"))
    assert {one.name for one in kept.iterdir()} == {*before, sha256(content).hexdigest()}


async def test_what_is_kept_stays_where_no_more_is(
    live: LiveFederation, site: LiveSite, tmp_path: Path
) -> None:
    await site.terminate()
    live.settings["library"]["keep_originals"] = False
    site = await ready(await live.launch("elm"))
    pdf_at(tmp_path / "in" / "keel.pdf", "The keel is of oak.")
    await shown(site, "ingest", str(tmp_path / "in"))
    out = str(tmp_path / "x.pdf")
    code, _, err = await fedctl(site, "documents", "original", "keel.pdf", "--out", out)
    assert (code, "fedd keeps none here" in err) == (1, True), err
    assert "Set library.keep_originals = true" in err
    await shown(site, "documents", "original", "mast.pdf", "--out", out)
    pdf_at(tmp_path / "in" / "mast.pdf", "The mast has been replaced.")
    await shown(site, "ingest", str(tmp_path / "in"), "--replace")
    code, _, err = await fedctl(site, "documents", "original", "mast.pdf", "--out", out, "--force")
    assert (code, "fedd keeps none here" in err) == (1, True), err
    assert holding(b"quillon", site.folder / "state" / "originals") == set()


# ---- answers, judged at home ---------------------------------------------------------------


def with_marked_answers(folder: Path) -> int:
    """A site's documents and test questions of the demo, right answers as a reader marked them."""
    demo = BUNDLED / "ostrey"
    marked = {
        one["query"]: one
        for one in map(json.loads, ANSWERS.read_text("utf-8").splitlines())
        if one["site"] == "ostrey" and one["sentences"]
    }
    pairs = map(json.loads, (demo / "pairs_test.jsonl").read_text("utf-8").splitlines())
    (folder / "documents.jsonl").write_bytes((demo / "documents.jsonl").read_bytes())
    (folder / "pairs_test.jsonl").write_text(
        "".join(
            json.dumps(pair | {"answers": one["sentences"], "qtype": "marked"}) + "\n"
            if (one := marked.get(pair["query"]))
            else json.dumps(pair) + "\n"
            for pair in pairs
        ),
        "utf-8",
    )
    return len(marked)


async def test_answers_are_judged_as_people_get_them(site: LiveSite, tmp_path: Path) -> None:
    marked = with_marked_answers(tmp_path)
    assert json.loads(await shown(site, "ingest", str(tmp_path), "--json"))["problems"] == []
    judged = json.loads(await shown(site, "eval", "--answers", "--json"))
    of_the_corpus = sum(pair.split == "test" for pair in site.corpus.pairs)
    assert (judged["split"], judged["questions"]) == ("test", marked + of_the_corpus)
    assert judged["generator"] == "extractive"
    assert judged["without_answer"] >= 40 - marked, "and those that other tests brought"
    assert judged["missing"] == [] or judged["missing"][0]["metric"] == "meteor"
    labels = {one["value"]: one for one in judged["by_label"]}
    assert labels["marked"]["questions"] == marked
    found = {one["metric"]: one["mean"] for one in labels["marked"]["figures"]}
    cited = 0
    for line in (tmp_path / "pairs_test.jsonl").read_text("utf-8").splitlines():
        pair = json.loads(line)
        if "answers" in pair:
            reply = await site.stub.Ask(control.AskRequest(question=pair["query"]), timeout=60)
            cited += pair["doc_id"] in {one.document_id for one in reply.citations}
    assert found["cites-r"] == pytest.approx(cited / marked)
    assert 0.0 < found["rouge-l-f"] < 1.0
    out = await shown(site, "documents", "export", "--out", str(tmp_path / "all.jsonl"), "--json")
    assert json.loads(out)["documents"] >= 50
    exported = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert sum(one.get("qtype") == "marked" for one in exported) == marked
    audited = "".join(part.read_text() for part in (site.folder / "state/audit").iterdir())
    assert '"evaluate-answers"' in audited
    assert "marked" not in audited


async def test_a_split_without_right_answers_is_told_how_to_get_them(site: LiveSite) -> None:
    code, out, err = await fedctl(site, "eval", "--answers", "--split", "valid")
    assert (code, out) == (2, "")
    assert "of split valid here" in err
    assert 'give pairs an "answer"' in err


async def test_an_evaluation_of_answers_that_is_given_up_asks_no_more(site: LiveSite) -> None:
    judging = await started(site, "eval", "--answers", "--split", "train")
    entries = site.folder / "state" / "audit"

    def said(outcome: str) -> int:
        lines = "".join(part.read_text() for part in entries.iterdir()).splitlines()
        asked = [one for one in map(json.loads, lines) if one["action"] == "evaluate-answers"]
        return sum(one["outcome"] == outcome for one in asked)

    before = said("begun")
    async with asyncio.timeout(60):
        while said("begun") == before:
            await asyncio.sleep(0.01)
    judging.send_signal(signal.SIGINT)
    await asyncio.wait_for(judging.wait(), 60)
    assert judging.returncode in (130, 3, 0), "some, or all, may have been asked by then"
    async with asyncio.timeout(60):
        while said("begun") != said("done") + said("refused or failed"):
            await asyncio.sleep(0.01)
    assert json.loads(await shown(site, "ask", "who?", "--json"))["question"] == "who?"
