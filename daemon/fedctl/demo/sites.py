"""The demo's sites: their folders, their settings, and their daemons as processes.

Everything is made by the same functions as a real federation's, with one
difference: here one person holds the authority and all the sites.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import daemon
from config import control_socket
from daemon.fedctl.commands.federation.authority import make_authority, sign_site
from daemon.fedctl.commands.federation.manifest import new_manifest
from daemon.fedctl.commands.federation.site import install_site, make_site
from daemon.fedctl.terminal.files import write_whole
from daemon.fedctl.terminal.output import CommandError, Exit

FEDERATION = "hanse-demo"
BUNDLED = Path(__file__).with_name("corpus")
# A sum of two updates tells each of the two the other's (design: threat model).
FEWEST_SITES = 3

# The demo trains with the defaults of config/settings.py. What is written here, table by
# table, overrides them: {"training": {"local_epochs": 2}}.
OVERRIDES: dict[str, dict[str, object]] = {}

_OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOG_LINES_SHOWN = 15
STOP_WITHIN_S = 15.0


@dataclass(frozen=True)
class SiteCorpus:
    """What one site has: files of documents and of question-passage pairs."""

    site: str
    files: tuple[Path, ...]
    question: str  # the query of its first test pair
    answered_in: frozenset[str] = frozenset()  # document ids; that pair's positives


@dataclass(frozen=True)
class HouseWord:
    """A word that only the institutions understand, and what it means."""

    term: str
    forms: frozenset[str]  # in lower case, as they stand in texts
    means: str


@dataclass(frozen=True)
class DemoSite:
    """One site's place under the work folder."""

    id: str
    folder: Path
    socket: Path
    port: int
    questions: Path | None = None  # the socket behind its gateway; None: it has none
    gateway_port: int = 0

    @property
    def settings(self) -> Path:
        """Its fedd.toml."""
        return self.folder / "fedd.toml"

    @property
    def gateway(self) -> str:
        """The address of its gateway."""
        return f"http://127.0.0.1:{self.gateway_port}"


# ---- corpora ----------------------------------------------------------------


def find_corpora(data: Path | None, sites: Sequence[str] | None) -> list[SiteCorpus]:
    """The corpora to use, bundled ones unless ``data`` is given.

    Raises CommandError that lists everything that is missing.
    """
    root = data or BUNDLED
    if not root.is_dir():
        raise CommandError(f"there is no folder {root}", "Check --data", exit_code=Exit.USAGE)
    if sites is None:
        if data is not None:
            raise CommandError(
                "which folders are the sites?", "Add --sites a,b,c", exit_code=Exit.USAGE
            )
        sites = sorted(p.name for p in root.iterdir() if (p / "pairs_test.jsonl").is_file())
    if len(sites) < FEWEST_SITES or len(set(sites)) < len(sites):
        raise CommandError(
            f"a federation has at least {FEWEST_SITES} different sites, got {', '.join(sites)}",
            "With two, each could read the other's update out of the sum",
            exit_code=Exit.USAGE,
        )
    missing = [str(root / site / name) for site in sites for name in _missing(root / site)]
    if missing:
        raise CommandError(
            f"missing: {', '.join(missing)}",
            "Each site's folder holds documents.jsonl (or .jsonl.gz), pairs_train.jsonl and "
            "pairs_test.jsonl, and may hold pairs_valid.jsonl",
            exit_code=Exit.USAGE,
        )
    return [_corpus(site, root / site) for site in sites]


def _missing(folder: Path) -> list[str]:
    missing = [f for f in ("pairs_train.jsonl", "pairs_test.jsonl") if not (folder / f).is_file()]
    return missing if _documents(folder) else ["documents.jsonl", *missing]


def _documents(folder: Path) -> Path | None:
    candidates = (folder / "documents.jsonl", folder / "documents.jsonl.gz")
    return next((path for path in candidates if path.is_file()), None)


def _corpus(site: str, folder: Path) -> SiteCorpus:
    documents = _documents(folder)
    assert documents is not None  # noqa: S101 -- find_corpora has looked
    pairs = [folder / f"pairs_{split}.jsonl" for split in ("train", "valid", "test")]
    there = (path for path in pairs if path.is_file())  # the demo can do without pairs_valid
    return SiteCorpus(site, (documents, *there), *_first_question(pairs[-1]))


def _first_question(pairs: Path) -> tuple[str, frozenset[str]]:
    """The query, and the ids of the documents that answer it, if they are told."""
    try:
        with pairs.open(encoding="utf-8") as lines:
            pair = json.loads(next(lines))
            return str(pair["query"]), frozenset(map(str, pair.get("positives") or ()))
    except (StopIteration, ValueError, KeyError, TypeError) as error:
        raise CommandError(
            f"{pairs} does not start with a pair",
            'Expected lines like {"query": "…", "positives": ["…"]}',
            exit_code=Exit.USAGE,
        ) from error


def find_glossary(data: Path | None) -> list[HouseWord]:
    """The house words of the corpora, to be explained beneath answers; none without the file.

    Raises CommandError where the file is there and makes no sense.
    """
    path = (data or BUNDLED) / "glossary.jsonl"
    if not path.is_file():
        return []
    try:
        entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [
            HouseWord(
                str(entry["term"]),
                frozenset(str(form).lower() for form in entry["forms"]),
                str(entry["means"]),
            )
            for entry in entries
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandError(
            f"{path} is no glossary",
            'Expected lines like {"term": "…", "forms": ["…"], "means": "…"}',
            exit_code=Exit.USAGE,
        ) from error


# ---- folders, certificates, settings ----------------------------------------


def provision(
    work: Path, sites: Sequence[str], sockets: Path, *, opened: bool = False
) -> list[DemoSite]:
    """Make the authority, each site's key, certificate and settings, and the signed manifest.

    ``opened``: the first site has a gateway.
    """
    *ports, gateway_port = free_ports(len(sites) + 1)
    placed = [
        DemoSite(site, work / site, _socket(work / site / "fedd.sock", sockets / f"{n}.sock"), port)
        for n, (site, port) in enumerate(zip(sites, ports, strict=True))
    ]
    if opened:
        questions = _socket(placed[0].folder / "questions.sock", sockets / "questions.sock")
        placed[0] = replace(placed[0], questions=questions, gateway_port=gateway_port)
    authority = work / "authority"
    make_authority(authority, FEDERATION)
    manifest = new_manifest(
        authority,
        addresses={site.id: f"127.0.0.1:{site.port}" for site in placed},
        faulty_sites=1,
    )
    for site in placed:
        identity = site.folder / "identity"
        make_site(identity, FEDERATION, site.id)
        certificate = sign_site(authority, identity / "site.csr", expect_site=site.id)
        install_site(identity, certificate, (authority / "ca.crt").read_bytes())
        write_whole(site.folder / "manifest.json", manifest)
        write_whole(site.settings, _settings(site, len(placed)).encode())
    return placed


def _socket(wanted: Path, short: Path) -> Path:
    """In the site's folder; in a short one where the kernel's limit asks for that."""
    wanted = wanted.absolute()
    fits = len(os.fsencode(wanted)) <= control_socket.LONGEST_PATH
    return wanted if fits else short


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody listens on just now.

    A daemon binds its port seconds later: so it is none of those from which the kernel takes
    one for whoever calls somebody meanwhile.
    """
    lowest = int(_OUTGOING.read_text().split()[0])
    ports: list[int] = []
    for port in secrets.SystemRandom().sample(range(lowest // 2, lowest), lowest // 2):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise CommandError(f"no {count} free ports on this machine", "Stop what listens on so many.")


def _settings(site: DemoSite, sites: int) -> str:
    """The site's fedd.toml; relative paths in it start at its folder."""
    threads = max(1, len(os.sched_getaffinity(0)) // sites)
    tables: dict[str, dict[str, object]] = {
        "site": {"id": site.id, "state_dir": "state"},
        "identity": {"directory": "identity", "manifest": "manifest.json"},
        # Loopback only: a demo is nobody else's business.
        "network": {"bind": f"127.0.0.1:{site.port}"},
        "control": {"socket": str(site.socket)},
        # The sites share one machine, which they would not do elsewhere.
        "rounds": {"heartbeat_s": 1.0},
        "workers": {"threads": threads},
    }
    if site.questions is not None:
        listen = f"127.0.0.1:{site.gateway_port}"
        gateway = {"enabled": True, "socket": str(site.questions), "listen": listen}
        tables["gateway"] = gateway
    lines = []
    for table in dict.fromkeys([*tables, *OVERRIDES]):
        options = tables.get(table, {}) | OVERRIDES.get(table, {})
        lines.append(f"[{table}]")
        # JSON's strings, numbers and booleans are TOML's, too.
        lines += [
            f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in options.items()
        ]
        lines.append("")
    return "\n".join(lines)


# ---- processes --------------------------------------------------------------


@dataclass(frozen=True)
class RunningDaemon:
    """A fedd, or a gateway before it, that we started and will stop."""

    site: DemoSite
    process: asyncio.subprocess.Process
    program: str = "fedd"

    @property
    def log(self) -> Path:
        """What it writes."""
        return _log(self.site, self.program)

    def failure(self, what: str) -> CommandError:
        """The error to tell when it died or does not get ready: the end of its log, and where."""
        name = "daemon" if self.program == "fedd" else "gateway"
        return CommandError(f"the {name} of {self.site.id} {what}", f"Its log is {self.log}")


# What each program is, as `python -m` starts it.
_MODULES = {"fedd": "daemon.main", "fedgate": "daemon.gateway.main"}


def _log(site: DemoSite, program: str) -> Path:
    return site.folder / f"{program}.log"


@asynccontextmanager
async def running(
    sites: Sequence[DemoSite], program: str = "fedd"
) -> AsyncIterator[list[RunningDaemon]]:
    """Start the daemons; stop them all on the way out, whatever happened."""
    daemons: list[RunningDaemon] = []
    try:
        for site in sites:
            daemons.append(await _start(site, program))
        yield daemons
    finally:
        await asyncio.gather(*(stop(one) for one in daemons))


async def _start(site: DemoSite, program: str) -> RunningDaemon:
    environment = {
        name: value
        for name, value in os.environ.items()
        # Those would make three daemons report to one supervisor, or share a socket.
        if name not in ("NOTIFY_SOCKET", "HANSE_SOCKET")
    }
    # fedctl may have been started from anywhere; the daemons use the same code as it does.
    code = str(Path(daemon.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(
        [code, *filter(None, [environment.get("PYTHONPATH")])]
    )
    # What one leaves that has to be killed goes with the demo's own folder.
    environment["TMPDIR"] = str(site.socket.parent)
    with _log(site, program).open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            _MODULES[program],
            "--config",
            str(site.settings.absolute()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # `-m` looks for modules in the working folder first: none are in the site's.
            cwd=site.folder,
            env=environment,
            # A Ctrl-C at the terminal reaches us alone; we then stop them in order.
            start_new_session=True,
        )
    return RunningDaemon(site, process, program)


async def stop(running_daemon: RunningDaemon) -> None:
    """SIGTERM, patience, SIGKILL to it and its workers."""
    process = running_daemon.process
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), STOP_WITHIN_S)
    except TimeoutError:
        # It leads a group of its own (start_new_session), and is not reaped yet,
        # so the number cannot belong to anyone else.
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def log_tail(log: Path, lines: int = LOG_LINES_SHOWN) -> str:
    """The last lines of a log."""
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 64 * 1024))
        text = file.read().decode(errors="replace")
    return "\n".join(text.splitlines()[-lines:])


def short_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder with a short name for sockets (mode 0700)."""
    return tempfile.TemporaryDirectory(prefix="hanse-", dir="/tmp")
