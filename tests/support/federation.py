"""A live federation for tests: real `fedd` processes over real TLS on loopback.

    async with LiveFederation.start(tmp_path, ["alder", "birch", "cedar"]) as federation:
        await federation.ingest_all()
        await federation.train("alder", rounds=1)

The encoder is a tiny random one, so that a daemon starts in seconds; everything
else is what an operator runs. `tests/live/tapped_fedd.py` records what crosses.
"""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
from safetensors import safe_open

from proto import control_pb2 as control
from proto import federation_pb2 as pb
from proto.control_pb2_grpc import ControlStub
from tests.support import warm
from tests.support.authority import Federation
from tests.support.small_models import small_encoder

if TYPE_CHECKING:
    from proto.control_pb2_grpc import ControlAsyncStub

_TOPICS = (
    "anchor winch",
    "beacon lamp",
    "capstan brake",
    "dredge pump",
    "eyebolt rust",
    "fender rubber",
    "gangway rope",
    "hawser splice",
    "inlet gauge",
    "jetty plank",
    "keel block",
    "ladder rung",
    "mooring ring",
    "needle valve",
    "oar lock",
    "piling sleeve",
)
Process = asyncio.subprocess.Process | warm.WarmProcess

_VERBS = ("inspect", "replace", "grease", "measure")
# Its socket is there some seconds after its start: no doubling pauses until somebody looks again.
_EAGER = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 100),
]


@dataclass
class Corpus:
    """What one site of a test holds; every sentence is unlike any other site's."""

    site: str
    documents: list[control.Document] = field(default_factory=list)
    pairs: list[control.Pair] = field(default_factory=list)

    @classmethod
    def of(cls, site: str) -> Corpus:
        corpus = cls(site)
        for number, topic in enumerate(_TOPICS):
            verb = _VERBS[number % len(_VERBS)]
            split = "test" if number % 4 == 3 else "train"
            document = f"{site}/{topic.replace(' ', '-')}"
            corpus.documents.append(
                control.Document(
                    id=document,
                    title=f"{topic.title()} at {site}",
                    text=f"The wardens of {site} {verb} the {topic} on day {number + 1}. "
                    f"A worn {topic} is tagged {site[:2].upper()}{number:03d} and reported.",
                    split=split,
                )
            )
            corpus.pairs.append(
                control.Pair(
                    query=f"who looks after the {topic} of {site}?",
                    positives=[document],
                    split=split,
                    reference=control.Reference(
                        answers=[
                            f"Its keeper {site[::-1]} does, ere frost takes the {topic} anew."
                        ],
                        qtype="keeper of things",
                    ),
                )
            )
        return corpus

    def texts(self) -> list[str]:
        """Every text that must not leave the site."""
        return [
            *(d.title for d in self.documents),
            *(s for d in self.documents for s in d.text.split(". ")),
            *(p.query for p in self.pairs),
            *(text for p in self.pairs for text in (*p.reference.answers, p.reference.qtype)),
        ]


@dataclass(frozen=True)
class Surroundings:
    """What daemons run in, if not on loopback, and which program they are."""

    hosts: Mapping[str, str] = field(default_factory=dict)
    networks: Mapping[str, Path] = field(default_factory=dict)  # files of their namespaces
    program: str = "tests.live.tapped_fedd"
    cold: bool = False  # executed, as an operator does it, and not forked from a warm process


@dataclass
class LiveSite:
    """One running daemon."""

    id: str
    folder: Path
    process: Process
    stub: ControlAsyncStub
    corpus: Corpus

    @property
    def log(self) -> str:
        return (self.folder / "fedd.log").read_text()

    def shared_values(self) -> int:
        """Length of the exchanged vector, read from the version on this site's disk."""
        path = next((self.folder / "state" / "versions").glob("*.safetensors"))
        with safe_open(path, framework="numpy") as file:
            return int(file.get_tensor("shared").size)

    async def status(self) -> control.StatusReply:
        return await self.stub.Status(control.StatusRequest(), timeout=60)

    async def privacy(self, noise_multiplier: float = 0, rounds: int = 0) -> control.PrivacyReply:
        asked = control.PrivacyRequest(noise_multiplier=noise_multiplier, rounds=rounds)
        return await self.stub.Privacy(asked, timeout=60)

    async def head_round(self, model: str = "") -> int:
        """The last committed round of a model; "": of the retriever."""
        status = await self.status()
        return status.generator.head_round if model == "generator" else status.head_round

    async def rounds(self, model: str = "") -> list[control.Round]:
        reply = await self.stub.Rounds(control.RoundsRequest(model=model), timeout=60)
        return list(reply.rounds)

    async def ingest(self) -> control.IngestProgress:
        """This site's corpus; the last progress report."""

        async def batches() -> AsyncIterator[control.IngestRequest]:
            yield control.IngestRequest(documents=self.corpus.documents, pairs=self.corpus.pairs)

        last = control.IngestProgress()
        async for progress in self.stub.Ingest(batches(), timeout=120):
            last = progress
        return last

    async def terminate(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self.process.wait(), 30)


class LiveFederation:
    """Several daemons that this test started and will stop."""

    def __init__(
        self, federation: Federation, encoder: Path, adapt: str, surroundings: Surroundings
    ) -> None:
        self.federation = federation
        self.encoder = encoder
        self.adapt = adapt
        self.surroundings = surroundings
        self.sites: dict[str, LiveSite] = {}
        self.settings: dict[str, dict[str, Any]] = {}  # beside what `launch` writes
        self.own: Mapping[str, dict[str, dict[str, Any]]] = {}  # by site, likewise
        self.version = 1  # of the manifest
        self.retriever = self.generator = ""  # that it names
        self._stack = AsyncExitStack()

    @classmethod
    @asynccontextmanager
    async def start(
        cls,
        root: Path,
        names: Sequence[str],
        *,
        adapt: str = "head",
        rounds: dict[str, Any] | None = None,
        surroundings: Surroundings | None = None,
        connect_s: float = 90.0,
        tables: dict[str, dict[str, Any]] | None = None,
        own: Mapping[str, dict[str, dict[str, Any]]] | None = None,
        without: Sequence[str] = (),
        faulty_sites: int = 0,
        read_as: Mapping[str, Any] | None = None,
        **training: Any,
    ) -> AsyncIterator[LiveFederation]:
        """Found a federation, start its daemons, wait until all are connected.

        ``tables``: further settings of every site, by table; ``own``: of single sites.
        ``without``: sites that have certificates and no daemon. ``faulty_sites``: how many
        may lie; with 0 a plain majority decides. ``read_as``: what the encoder's own files say
        of how it is read, by their path in its folder.
        """
        encoder = small_encoder(root / "encoder", words=_words())
        for path, said in (read_as or {}).items():
            (encoder / path).parent.mkdir(exist_ok=True)
            (encoder / path).write_text(json.dumps(said))
        found = Federation.found(root, *names, *without, faulty_sites=faulty_sites)
        live = cls(found, encoder, adapt, surroundings or Surroundings())
        live.federation.hosts.update(live.surroundings.hosts)
        live.settings = {"rounds": rounds or {}, "training": training, **(tables or {})}
        live.own = own or {}
        async with live._stack:
            for name in names:
                await live.launch(name)
            await live.until_connected(connect_s)
            yield live
            for site in live.sites.values():
                with suppress(ProcessLookupError):
                    site.process.terminate()  # all at once: each takes a second to take its leave

    async def launch(self, name: str, *, fault: str = "") -> LiveSite:
        """Start (or start again) one site's daemon, with that HANSE_FAULT."""
        folder = self.federation.root / name
        live = self.federation
        (folder / "manifest.json").write_bytes(self._signed_manifest())
        settings: dict[str, dict[str, Any]] = {
            "site": {"state_dir": "state"},
            "identity": {"directory": ".", "manifest": "manifest.json"},
            "network": {"bind": live.address(name)},
            "control": {"socket": "fedd.sock"},
            "retriever": {
                "encoder": str(self.encoder),
                "max_tokens": 64,
                "adapt": self.adapt,
                "personal": "none",
            },
            # What so small an encoder scores says nothing of what was found.
            "retrieval": {"passage_tokens": 60, "lost_answers": 0.0},
            "training": {"local_epochs": 2, "learning_rate": 1e-3},
            "privacy": {},
            "negatives": {},
            "rounds": {"heartbeat_s": 0.5, "phase_deadline_s": 60.0},
            "workers": {"threads": 1},
        }
        for chosen in (self.settings, self.own.get(name, {})):
            for table, options in chosen.items():
                settings.setdefault(table, {}).update(options)
        (folder / "fedd.toml").write_text(_toml(settings))
        process = await self._start_daemon(folder, fault)
        self._stack.push_async_callback(_end, process)
        channel = grpc.aio.insecure_channel(f"unix:{folder / 'fedd.sock'}", options=_EAGER)
        self._stack.push_async_callback(channel.close, None)
        site = LiveSite(name, folder, process, ControlStub(channel), Corpus.of(name))
        self.sites[name] = site
        return site

    async def _start_daemon(self, folder: Path, fault: str) -> Process:
        words = ["--config", str(folder / "fedd.toml")]
        env = {
            **os.environ,
            "HANSE_TAPE": str(folder),
            "HANSE_FAULT": fault,
            "NOTIFY_SOCKET": str(folder / "notify"),
        }
        around = self.surroundings
        network = around.networks.get(folder.name)
        with (folder / "fedd.log").open("ab") as log:
            if not around.cold:
                return await warm.started(around.program, words, log=log, env=env, network=network)
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", around.program, *words),
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )

    def _signed_manifest(self) -> bytes:
        from peers.wire.manifest import signed

        manifest = self.federation.manifest(
            version=self.version, retriever=self.retriever, generator=self.generator
        )
        return signed(manifest, self.federation.authority)

    def reload_manifest(self) -> None:
        """Sign a new version and have every running daemon take it into use."""
        self.version += 1
        for site in self.sites.values():
            (site.folder / "manifest.json").write_bytes(self._signed_manifest())
            site.process.send_signal(signal.SIGHUP)

    async def until_connected(self, within_s: float = 240.0) -> None:
        """Every daemon is ready and greets every other."""
        async with asyncio.timeout(within_s):
            for site in self.sites.values():
                while True:
                    if site.process.returncode is not None:
                        raise AssertionError(f"{site.id} ended:\n{site.log}")
                    with suppress(grpc.aio.AioRpcError):  # not ready yet
                        if (await site.status()).peers_connected == len(self.sites) - 1:
                            break
                    await asyncio.sleep(0.1)

    async def ingest_all(self) -> None:
        await asyncio.gather(*(site.ingest() for site in self.sites.values()))

    async def train(
        self,
        at: str,
        rounds: int,
        privacy: pb.PrivacyPlan | None = None,
        *,
        seed: int = 0,
        model: str = "",
    ) -> list[control.TrainingProgress]:
        """Ask one site for more rounds, watch until the run is over everywhere.

        ``seed``: of what is drawn; 0: any. ``model``: whose rounds; "": the retriever's.
        """
        site = self.sites[at]
        request = control.TrainRequest(
            rounds=rounds, plan=pb.TrainingPlan(privacy=privacy, seed=seed), model=model
        )
        reply = await site.stub.Train(request, timeout=60)
        seen = [
            progress
            async for progress in site.stub.WatchTraining(
                control.WatchTrainingRequest(model=model), timeout=600
            )
        ]
        await self.until_head(reply.run.target_round, model=model)
        return seen

    async def until_head(self, round_: int, within_s: float = 120.0, *, model: str = "") -> None:
        async with asyncio.timeout(within_s):
            for site in self.sites.values():
                while await site.head_round(model) < round_:
                    await asyncio.sleep(0.05)


def _words() -> list[str]:
    return sorted({word for topic in _TOPICS for word in topic.split()} | set(_VERBS))


def _toml(settings: dict[str, dict[str, Any]]) -> str:
    lines: list[str] = []
    for table, options in settings.items():
        lines.append(f"[{table}]")
        for key, value in options.items():
            inner = value.items() if isinstance(value, dict) else []
            lines += [f"{key}.{name} = {json.dumps(part)}" for name, part in inner]
            lines += [] if inner else [f"{key} = {json.dumps(value)}"]
    return "\n".join(lines) + "\n"


async def _end(process: Process) -> None:
    """Leave no process behind, whatever the test did to it."""
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):  # it has ended, and that is not here yet
        process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), 20)
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
