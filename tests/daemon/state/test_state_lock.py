"""One daemon per state: a second one changes nothing, and a killed one leaves no lock."""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import fcntl
import hashlib
import os
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from daemon.state.audit_format import segments
from daemon.state.state_lock import LOCK_FILE, StateError, StateInUse, locked
from tests.daemon.state.entries import entries
from tests.support import warm
from tests.support.authority import free_port
from tests.support.federation import LiveFederation, LiveSite

Listing = dict[str, tuple[int, int, str]]


def listing(folder: Path) -> Listing:
    """Everything below a folder: when it was changed, how long it is, what is in it."""
    found = [folder, *folder.rglob("*")]
    return {
        str(path.relative_to(folder)): (
            (status := path.stat()).st_mtime_ns,
            status.st_size if path.is_file() else 0,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in found
    }


def has_open(pid: int, path: Path) -> bool:
    """Whether a process has a descriptor of that file."""
    return any(one.readlink() == path for one in Path(f"/proc/{pid}/fd").iterdir())


# ---- the lock ---------------------------------------------------------------


def test_the_folder_is_made_and_names_its_holder(tmp_path: Path) -> None:
    folder = tmp_path / "var" / "state"
    with locked(folder):
        assert (folder / LOCK_FILE).read_text() == f"{os.getpid()}\n"
    assert (folder / LOCK_FILE).read_text() == ""
    with locked(folder):
        pass


def test_a_second_one_is_refused_under_any_name_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "state")
    with locked(tmp_path / "state"):
        before = listing(tmp_path)
        for name in ("state", "link"):
            with (
                pytest.raises(StateInUse, match=rf"process {os.getpid()}\).*{tmp_path / name}"),
                locked(tmp_path / name),
            ):
                pass
        assert listing(tmp_path) == before


@pytest.mark.slow
def test_the_number_of_a_killed_daemon_is_not_taken_for_the_holders(
    tmp_path: Path,
) -> None:
    """Between having the lock and writing one's number the file says what it said before."""
    with subprocess.Popen(["true"]) as gone:
        pass
    (tmp_path / LOCK_FILE).write_text(f"{gone.pid}\n")
    with (tmp_path / LOCK_FILE).open("r+b", buffering=0) as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        first.truncate(0)
        with pytest.raises(StateInUse, match="process of unknown number"), locked(tmp_path):
            pass
        first.write(f"{os.getpid()}\n".encode())
        with pytest.raises(StateInUse, match=f"process {os.getpid()}"), locked(tmp_path):
            pass


def test_a_folder_that_cannot_be_made_is_said_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match=r"check \[site\] state_dir"), locked(tmp_path / "file/a"):
        pass


# ---- real daemons -----------------------------------------------------------


@asynccontextmanager
async def lonely(root: Path) -> AsyncIterator[LiveFederation]:
    """A federation of three of which one runs."""
    async with LiveFederation.start(root, ["elm"], without=["fir", "oak"]) as live:
        yield live


async def second(settings: Path) -> tuple[int, str]:
    """Another daemon with these settings, to its end: exit code, what it said."""
    words = ["--config", str(settings)]
    with tempfile.TemporaryFile() as log:
        process = await warm.started("daemon.main", words, log=log, env=os.environ)
        try:
            code = await asyncio.wait_for(process.wait(), 60)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        log.seek(0)
        return code, log.read().decode()


def elsewhere(site: LiveSite) -> Path:
    """The site's settings with another port and another control socket."""
    lines = (site.folder / "fedd.toml").read_text().splitlines()
    other = {"bind": f"127.0.0.1:{free_port()}", "socket": "other.sock"}
    path = site.folder / "other.toml"
    path.write_text(
        "\n".join(
            f'{key} = "{other[key]}"' if (key := line.partition(" ")[0]) in other else line
            for line in lines
        )
    )
    return path


async def refused(site: LiveSite) -> None:
    """Twice a second daemon, on the same port and on another one: each changes nothing."""
    state = site.folder / "state"
    before = listing(state)
    for settings in (site.folder / "fedd.toml", elsewhere(site)):
        code, told = await second(settings)
        assert code == os.EX_CONFIG, told
        assert f"another fedd (process {site.process.pid}) uses the state folder {state}" in told
        assert "stop that one, or give this one a folder of its own" in told
        assert "Traceback" not in told
        assert listing(state) == before


def verified(site: LiveSite) -> list[str]:
    """Every action in the audit log, whose chain is whole."""
    return [entry["action"] for entry in entries(segments(site.folder / "state" / "audit"))]


@pytest.mark.federation
async def test_a_second_daemon_changes_nothing_once_the_first_is_ready(tmp_path: Path) -> None:
    async with lonely(tmp_path) as live:
        site = live.sites["elm"]
        await site.ingest()
        # What it had spooled was emptied, once.
        spooled = site.folder / "state" / "spool" / "attempts" / "1-1" / "update"
        spooled.parent.mkdir(parents=True)
        spooled.write_bytes(b"of the attempt under way")
        await refused(site)
        assert (await site.status()).documents == len(site.corpus.documents)
        assert verified(site).count("start") == 1
        assert await site.terminate() == 0
        assert verified(site)[-1] == "stop"
        assert (site.folder / "state" / LOCK_FILE).read_text() == ""


@pytest.mark.federation
async def test_a_second_daemon_changes_nothing_before_the_first_is_ready(tmp_path: Path) -> None:
    async with lonely(tmp_path) as live:
        await live.sites["elm"].terminate()
        site = await live.launch("elm")
        lock = site.folder / "state" / LOCK_FILE
        async with asyncio.timeout(60):
            while lock.read_text() != f"{site.process.pid}\n":
                await asyncio.sleep(0.005)
        os.killpg(site.process.pid, signal.SIGSTOP)
        try:
            assert site.log.count('"event": "ready"') == 1, "that of the daemon before"
            await refused(site)
        finally:
            os.killpg(site.process.pid, signal.SIGCONT)
        await live.until_connected()
        assert site.log.count('"event": "ready"') == 2
        assert verified(site) == ["start", "stop", "start"]


@pytest.mark.federation
async def test_a_killed_daemon_leaves_no_lock_though_its_workers_live_on(tmp_path: Path) -> None:
    async with lonely(tmp_path) as live:
        site = live.sites["elm"]
        await site.ingest()  # so that there are workers
        assert has_open(site.process.pid, site.folder / "state" / LOCK_FILE)
        children = psutil.Process(site.process.pid).children(recursive=True)
        assert len(children) > 2
        for child in children:
            assert not has_open(child.pid, site.folder / "state" / LOCK_FILE)
        for child in children:  # or they would end with it
            child.suspend()
        try:
            site.process.kill()
            await site.process.wait()
            await live.launch("elm")
            await live.until_connected()
            assert all(child.is_running() for child in children)
        finally:
            for child in children:
                child.kill()
        assert verified(live.sites["elm"]).count("start") == 2


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """What it names would be emptied."""
    key = tmp_path / "site.key"
    key.write_text("a key")
    state = tmp_path / "state"
    state.mkdir()
    (state / "fedd.lock").symlink_to(key)
    with pytest.raises(StateError, match="cannot use the folder"), locked(state):
        pass
    assert key.read_text() == "a key"
