"""fedctl demo: what it needs, what it makes, and that it leaves nothing behind."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from config.loading import load
from crypto.identity.site import Identity
from crypto.identity.trust import Trust
from daemon.fedctl.demo import sites as demo_sites
from daemon.fedctl.demo.opened import opened, show_open
from daemon.fedctl.demo.outcome import DemoOutcome, SiteAnswer, SiteOutcome, opening, show_outcome
from daemon.fedctl.demo.sites import (
    DemoSite,
    HouseWord,
    RunningDaemon,
    find_corpora,
    find_glossary,
    provision,
)
from daemon.fedctl.main import main
from daemon.fedctl.terminal.connection import connected
from daemon.fedctl.terminal.output import CommandError, Exit
from peers.wire.manifest import parse_signed
from proto.control_pb2 import AskReply, Citation, EvaluateReply, StatusReply
from tests.support.canned_daemon import CannedDaemon

ROOT = Path(__file__).parents[3]
SITES = ("canal", "harbour", "weir")


def write_corpora(folder: Path, sites: tuple[str, ...] = SITES) -> Path:
    """Small corpora on different things, as `--data` takes them."""
    for number, site in enumerate(sites):
        (folder / site).mkdir(parents=True)
        subjects = [f"{site} {part}" for part in ("gate", "wall", "pump", "sluice", "bridge")]
        documents: list[dict[str, object]] = []
        pairs: list[dict[str, object]] = []
        for turn in range(4):
            for subject in subjects:
                key = f"{subject}-{turn}".replace(" ", "-")
                text = f"The {subject} was built in {1800 + 10 * turn + number}. It needs paint."
                documents.append({"id": key, "title": f"{subject} {turn}", "text": text})
                pairs.append({"query": f"When was {subject} {turn} built?", "positives": [key]})
        _write_lines(folder / site / "documents.jsonl", documents)
        for split, part in (("train", pairs[:12]), ("valid", pairs[12:14]), ("test", pairs[14:])):
            _write_lines(folder / site / f"pairs_{split}.jsonl", part)
    return folder


def _write_lines(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def sockets() -> Iterator[Path]:
    with demo_sites.short_folder() as folder:
        yield Path(folder)


# ---- corpora ----------------------------------------------------------------


def test_data_folders_are_found(tmp_path: Path) -> None:
    write_corpora(tmp_path)
    found = find_corpora(tmp_path, ["weir", "canal", "harbour"])
    assert [corpus.site for corpus in found] == ["weir", "canal", "harbour"]
    assert found[0].question == "When was weir bridge 2 built?"
    assert found[0].answered_in == {"weir-bridge-2"}
    assert [file.name for file in found[0].files] == [
        "documents.jsonl",
        "pairs_train.jsonl",
        "pairs_valid.jsonl",
        "pairs_test.jsonl",
    ]


def test_compressed_documents_are_found(tmp_path: Path) -> None:
    write_corpora(tmp_path)
    plain = tmp_path / "weir" / "documents.jsonl"
    plain.with_suffix(".jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    assert find_corpora(tmp_path, SITES)[2].files[0].name == "documents.jsonl.gz"


def test_a_site_without_validation_pairs_will_do(tmp_path: Path) -> None:
    write_corpora(tmp_path)
    (tmp_path / "weir" / "pairs_valid.jsonl").unlink()
    assert "pairs_valid.jsonl" not in [f.name for f in find_corpora(tmp_path, SITES)[2].files]


def test_everything_missing_is_told_at_once(tmp_path: Path) -> None:
    write_corpora(tmp_path, ("canal", "weir"))
    (tmp_path / "weir" / "pairs_test.jsonl").unlink()
    (tmp_path / "canal" / "documents.jsonl").unlink()
    with pytest.raises(CommandError) as refused:
        find_corpora(tmp_path, SITES)
    assert refused.value.exit_code == Exit.USAGE
    for missing in ("canal/documents.jsonl", "harbour/pairs_train.jsonl", "weir/pairs_test.jsonl"):
        assert missing in refused.value.cause


@pytest.mark.parametrize("sites", [["canal", "weir"], ["canal", "canal", "weir"], None])
def test_sites_that_are_no_federation(tmp_path: Path, sites: list[str] | None) -> None:
    with pytest.raises(CommandError) as refused:
        find_corpora(write_corpora(tmp_path), sites)
    assert refused.value.exit_code == Exit.USAGE


def test_pairs_that_are_none(tmp_path: Path) -> None:
    write_corpora(tmp_path)
    for content in ("", "not JSON\n", '{"question": "?"}\n', "[]\n"):
        (tmp_path / "weir" / "pairs_test.jsonl").write_text(content)
        with pytest.raises(CommandError, match="does not start with a pair"):
            find_corpora(tmp_path, SITES)


@pytest.mark.skipif(not demo_sites.BUNDLED.is_dir(), reason="no bundled corpus in this tree")
def test_the_bundled_corpus_is_complete() -> None:
    assert len(find_corpora(None, None)) == 3


def test_a_glossary_is_read_and_may_be_absent(tmp_path: Path) -> None:
    assert find_glossary(tmp_path) == []
    entry: dict[str, object] = {
        "term": "G17",
        "forms": ["g17", "G17s"],
        "means": "a badge",
        "plain_words": ["badge"],
    }
    _write_lines(tmp_path / "glossary.jsonl", [entry])
    assert find_glossary(tmp_path) == [HouseWord("G17", frozenset({"g17", "g17s"}), "a badge")]
    assert len(find_glossary(None)) == 27


def test_a_glossary_that_is_none(tmp_path: Path) -> None:
    for content in ("not JSON\n", '{"term": "G17"}\n', "[]\n", "1\n"):
        (tmp_path / "glossary.jsonl").write_text(content)
        with pytest.raises(CommandError, match="is no glossary"):
            find_glossary(tmp_path)


# ---- what is shown ----------------------------------------------------------

GLOSSARY = (
    HouseWord("Heron", frozenset({"heron", "herons"}), "a repair"),
    HouseWord("Lantern", frozenset({"lantern"}), "the security desk"),
    HouseWord("Anvil", frozenset({"anvil"}), "the generators"),
)


def _reply(answer: str, *documents: str) -> AskReply:
    """An answer from the first of these documents, best first."""
    cited = Citation(number=1, document_id=documents[0], title=f"About {documents[0]}")
    return AskReply(
        answer=f"{answer} [1]",
        citations=[cited],
        passages=[Citation(document_id=one) for one in documents],
    )


def _answer(*, before: AskReply, after: AskReply) -> SiteAnswer:
    return SiteAnswer("weir", "Who mends it?", frozenset({"right"}), before, after)


def _printed(outcome: DemoOutcome, width: int = 80) -> str:
    written = io.StringIO()
    show_outcome(Console(file=written, width=width), outcome)
    return written.getvalue()


def test_the_opening_says_in_two_lines_what_is_shown() -> None:
    for glossary in (GLOSSARY, ()):
        lines = opening("3 fictional hospitals", glossary).splitlines()
        assert len(lines) == 2
        assert max(map(len, lines)) <= 100
        assert lines[0].startswith("3 fictional hospitals train")
    assert "Heron, Lantern, Anvil" in opening("3 sites", GLOSSARY)


def test_answers_stand_side_by_side_above_their_house_words() -> None:
    before = _reply("The cat sleeps.", "wrong", "other", "right")
    after = _reply("Raise two Herons.", "right", "wrong")
    site = SiteOutcome(
        "weir", EvaluateReply(questions=7), EvaluateReply(questions=7), StatusReply()
    )
    outcome = DemoOutcome(sites=[site], answers=[_answer(before=before, after=after)])
    outcome.glossary, outcome.seconds = GLOSSARY, {"federation": 1.0}
    lines = _printed(outcome).splitlines()
    assert any("before training" in line and "after training" in line for line in lines)
    assert any("The cat sleeps. [1]" in line and "Raise two Herons. [1]" in line for line in lines)
    assert any("[1] About wrong" in line and "[1] About right" in line for line in lines)
    assert any("3rd of the 3 pass" in one and "1st of the 2 pass" in one for one in lines)
    assert any(line.split() == ["Heron", "a", "repair"] for line in lines)
    assert not any("security desk" in line for line in lines)  # nobody has met that word


def test_a_right_document_that_was_not_found_has_no_rank() -> None:
    answer = _answer(before=_reply("No.", "wrong"), after=_reply("Yes.", "right"))
    plain = answer.plain(GLOSSARY)
    assert plain["before"]["rank"] is None
    assert plain["rank"] == 1
    assert plain["house_words"] == {}
    outcome = DemoOutcome(answers=[answer], seconds={"federation": 1.0})
    assert "right document: not in the 1 passages" in _printed(outcome)


# ---- folders ----------------------------------------------------------------


def test_sites_are_provisioned_as_by_hand(tmp_path: Path, sockets: Path) -> None:
    placed = provision(tmp_path, SITES, sockets)
    trust = Trust.from_pem((tmp_path / "authority" / "ca.crt").read_bytes())
    assert len({site.port for site in placed}) == len(SITES)
    for site in placed:
        settings = load(site.settings)
        assert settings.network.bind == f"127.0.0.1:{site.port}"  # and nothing but loopback
        assert settings.control.socket == site.socket
        assert settings.site.state_dir == site.folder / "state"
        files = settings.identity
        identity = Identity.load(files.certificate, files.key, files.authority)
        assert identity.site_id == settings.site.id == site.id
        manifest = parse_signed(files.manifest.read_bytes(), trust)
        assert manifest.enabled_ids == SITES
        assert manifest.site(site.id).address == settings.network.bind


def test_sites_share_the_cores(tmp_path: Path, sockets: Path) -> None:
    placed = provision(tmp_path, SITES, sockets)
    threads = [load(site.settings).workers.threads for site in placed]
    assert sum(threads) <= max(len(SITES), len(os.sched_getaffinity(0)))


def test_overrides_reach_the_settings(
    tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = {"training": {"local_epochs": 2}, "workers": {"threads": 1}, "log": {}}
    monkeypatch.setattr(demo_sites, "OVERRIDES", overrides)
    for site in provision(tmp_path, SITES, sockets):
        assert load(site.settings).training.local_epochs == 2


def test_a_deep_work_folder_still_gets_sockets(tmp_path: Path, sockets: Path) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    for site in provision(deep, SITES, sockets):
        assert len(os.fsencode(site.socket)) <= 107
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(site.socket))


def test_an_occupied_work_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_corpora(tmp_path / "data")
    words = ["demo", "--data", str(data), "--sites", ",".join(SITES), "--work", str(data)]
    assert main(words) == Exit.USAGE
    assert "is not empty" in capsys.readouterr().err
    assert sorted(path.name for path in data.iterdir()) == list(SITES)  # nothing of it touched


# ---- processes --------------------------------------------------------------


@pytest.mark.slow
async def test_a_daemon_that_ignores_sigterm_is_killed_with_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_sites, "STOP_WITHIN_S", 0.3)
    stubborn = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], "
        "stdout=subprocess.DEVNULL); "
        "print(child.pid, flush=True); time.sleep(60)"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", stubborn, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    worker = int(await process.stdout.readline())
    await demo_sites.stop(RunningDaemon(DemoSite("s", tmp_path, tmp_path / "s", 1), process))
    assert process.returncode == -signal.SIGKILL
    assert _gone(worker)


def _gone(pid: int, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def _daemons_of(work: Path) -> list[psutil.Process]:
    """Processes that were started with settings below this folder, and their children."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(word.startswith(str(work)) for word in process.info["cmdline"] or ()):
            with suppress(psutil.NoSuchProcess):
                found += [process, *process.children(recursive=True)]
    return found


@pytest.mark.federation
def test_a_daemon_that_dies_is_told_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_sites, "OVERRIDES", {"training": {"bits": 9}})
    data, work = write_corpora(tmp_path / "data"), tmp_path / "work"
    words = ["demo", "--data", str(data), "--sites", ",".join(SITES), "--work", str(work)]
    assert main(words) == Exit.FAILED
    err = capsys.readouterr().err
    assert "training.bits = 9" in err  # what the daemon said
    assert any(str(work / site / "fedd.log") in err for site in SITES)
    assert "ended by itself" in err
    assert "Traceback" not in err
    assert _daemons_of(work) == []


@pytest.mark.federation
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_what_was_started(
    tmp_path: Path, sockets: Path, number: signal.Signals
) -> None:
    data = write_corpora(tmp_path / "data")
    with subprocess.Popen(
        [sys.executable, "-m", "daemon.fedctl", "demo", "--json",
         "--data", str(data), "--sites", ",".join(SITES)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(sockets)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        assert "starting 3 daemons" in process.stderr.readline()
        deadline = time.monotonic() + 240
        # Each with at least one worker: then there is something to be left behind.
        while len(_daemons_of(sockets)) < 2 * len(SITES):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(number)
        process.send_signal(number)  # the impatient press it twice
        out, err = process.communicate(timeout=240)
    assert process.returncode == Exit.INTERRUPTED
    assert "Traceback" not in err
    assert json.loads(out)["error"].startswith("interrupted")
    assert _daemons_of(sockets) == []
    assert list(sockets.glob("hanse*")) == []


def _typed(command: str) -> str:
    """What a command that the demo printed prints, pasted into a shell."""
    ran = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize(
    ("documents", "collection"),
    [
        ({"tarrow/locks", "tarrow/gates/2026"}, "tarrow"),
        ({"tarrow/locks", "weir/gates"}, ""),
        ({"tarrow/locks", "zebra"}, ""),
        ({"locks", "tarrow/gates"}, ""),
        ({"x" * 101 + "/locks"}, ""),
    ],
    ids=["in one", "in two", "one in none", "the first in none", "no name of any"],
)
async def test_the_token_brings_files_where_one_collection_is_all_there_is(
    daemon: CannedDaemon, path: Path, documents: set[str], collection: str
) -> None:
    daemon.documents = documents
    with socket.create_server(("127.0.0.1", 0)) as gateway:
        site = DemoSite("tarrow", path.parent, path, 1, gateway_port=gateway.getsockname()[1])
        async with connected(path) as stub:
            one = await opened(site, stub, "Why do locks leak?")
    asked = daemon.asked[-1]
    assert (one.collection, list(asked.collections)) == (
        collection,
        [collection] * bool(collection),
    )
    assert set(asked.scopes) == {"ask", "search"} | ({"upload"} if collection else set())
    assert one.plain()["collection"] == collection
    written = io.StringIO()
    show_open(Console(file=written, width=200), one, 3)
    assert ("Upload, into tarrow or below it" in written.getvalue()) == bool(collection)


@pytest.mark.federation
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_stays_open_until_somebody_ends_it(tmp_path: Path, sockets: Path) -> None:
    """What it prints can be pasted, and nothing is left behind."""
    data = write_corpora(tmp_path / "data")
    with subprocess.Popen(
        [sys.executable, "-m", "daemon.fedctl", "demo", "--open",
         "--data", str(data), "--sites", ",".join(SITES), "--rounds", "1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(sockets)},
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "notes").open("w"),
        text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        printed = list[str]()
        while not printed or "As the site's operator" not in printed[-1]:
            printed.append(process.stdout.readline())
            assert printed[-1], (tmp_path / "notes").read_text()
        printed.append(process.stdout.readline())
        chat, tool, settings, stdio, operator = (
            line for line in printed if line.startswith(("curl", "{", "HANSE_TOKEN", "fedctl"))
        )
        assert json.loads(_typed(chat))["choices"][0]["message"]["content"]
        found = json.loads(_typed(tool))["result"]["structuredContent"]["passages"]
        assert found[0]["document_id"].startswith("canal")
        server = json.loads(settings)["mcpServers"]["hanse"]
        assert server["url"].endswith("/mcp")
        assert _typed(f"{stdio.strip()} < /dev/null") == "", "an agent that hangs up at once"
        assert "[1]" in _typed(operator)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=240)
    assert (process.returncode, rest) == (Exit.OK, "")
    assert "stopped every daemon" in (tmp_path / "notes").read_text()
    assert _daemons_of(sockets) == []
    assert list(sockets.glob("hanse*")) == []


@pytest.mark.federation
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_story(tmp_path: Path, sockets: Path) -> None:
    """From another folder, with the true encoder, as a person would type it."""
    data = write_corpora(tmp_path / "data")
    ran = subprocess.run(
        [sys.executable, "-m", "daemon.fedctl", "demo", "--json",
         "--data", str(data), "--sites", ",".join(SITES), "--rounds", "3"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(sockets)},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert [site["id"] for site in told["sites"]] == list(SITES)
    for site in told["sites"]:
        for moment in ("before", "after"):
            assert set(site[moment]) == {"mrr_at_10", "recall_at_10"}
            assert 0 < site[moment]["mrr_at_10"] <= 1
        assert site["bytes_sent"] > 0
        assert site["bytes_received"] > 0
    assert [one["round"] for one in told["rounds"]] == [1, 2, 3]
    assert len({one["coordinator"] for one in told["rounds"]}) == 3
    for one in told["rounds"]:
        assert one["contributors"] == list(SITES)
        assert one["key_dealer"] in SITES
        assert one["key_dealer"] != one["coordinator"]
        assert len(bytes.fromhex(one["model_digest"])) == 32
        assert one["seconds"]["train"] > 0
    assert [answer["site"] for answer in told["answers"]] == list(SITES)
    for answer in told["answers"]:
        assert answer["answer"]
        assert answer["citations"][0]["document_id"].startswith(answer["site"])
        assert answer["before"]["answer"]
        assert set(answer["before"]) == {"answer", "citations", "rank"}
        assert answer["house_words"] == {}  # there is no glossary in that folder
    assert told["seconds_to_federation"] > 0
    assert list(sockets.glob("hanse*")) == []
    assert _daemons_of(sockets) == []
