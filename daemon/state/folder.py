"""Where what a site keeps lies below its state folder, and how the parts of a round are tidied."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from crypto.durable import clear
from daemon.state.audit_format import HEAD_FILE

_DRAWS_KEPT = 4


@dataclass(frozen=True)
class StateFolder:
    """The only home of these names; ``root`` is the operator's ``site.state_dir``.

    ``spool`` is emptied at each start, ``arriving`` is not: what a peer has sent
    half of a version is gone on with after a restart. ``kept`` outlives attempts and
    restarts, too: this site's integers of the round under way (daemon/jobs/sums/kept_integers.py).
    """

    root: Path

    @property
    def generator_in_use(self) -> Path:
        """Which version of the generator answers (`daemon.learning.generator.in_use`)."""
        return self.root / "generator" / "in_use.json"

    def of_model(self, model: str) -> StateFolder:
        """Where the rounds of another model than the retriever keep what they keep."""
        return StateFolder(self.root / model)

    @property
    def store(self) -> Path:
        """The database of rounds (daemon/state/store.py)."""
        return self.root / "state.sqlite3"

    @property
    def privacy(self) -> Path:
        """The ledger of privacy that was spent."""
        return self.root / "privacy.sqlite3"

    @property
    def tokens(self) -> Path:
        """What is known of people's tokens (daemon/state/tokens.py)."""
        return self.root / "tokens.sqlite3"

    @property
    def attempts(self) -> Path:
        """The log of attempts, for people."""
        return self.root / "attempts.sqlite3"

    @property
    def audit(self) -> Path:
        """The folder of the audit log's segments."""
        return self.root / "audit"

    @property
    def audit_head(self) -> Path:
        """The head of the audit log, beside it."""
        return self.root / HEAD_FILE

    @property
    def library(self) -> Path:
        """The database of documents, passages and pairs; files that are kept lie beside it.

        See daemon/library/catalogue/originals.py.
        """
        return self.root / "library.sqlite3"

    @property
    def sentences(self) -> Path:
        """The cache of what the frozen encoder says of sentences."""
        return self.root / "sentences.sqlite3"

    @property
    def index(self) -> Path:
        """The folder of dense indexes, one a version."""
        return self.root / "index"

    @property
    def versions(self) -> Path:
        """The folder of model versions."""
        return self.root / "versions"

    @property
    def personal(self) -> Path:
        """The folder of what is the site's own of a model."""
        return self.root / "personal"

    @property
    def made_pairs(self) -> Path:
        """The pairs that were made of the site's own documents."""
        return self.root / "made_pairs.jsonl"

    @property
    def proposals(self) -> Path:
        """What people say answers a question, until an operator has looked (daemon/pairs)."""
        return self.root / "proposals.jsonl"

    @property
    def residual(self) -> Path:
        """What rounding has left out of this site's updates so far."""
        return self.root / "residual.npy"

    @property
    def incoming(self) -> Path:
        """The folder of peers' uploads under way."""
        return self.root / "spool" / "incoming"

    @property
    def arriving(self) -> Path:
        """The folder of what is fetched from peers."""
        return self.root / "spool" / "arriving"

    @property
    def spool(self) -> Path:
        """The folder of attempts' files."""
        return self.root / "spool" / "attempts"

    def empty_spool(self) -> None:
        """What a crash left in the spool belongs to an attempt that is over for us."""
        clear(self.spool)
        self.spool.mkdir(parents=True, mode=0o700)
        self.kept.mkdir(parents=True, mode=0o700, exist_ok=True)

    @property
    def kept(self) -> Path:
        """The folder of this site's integers of the round under way."""
        return self.root / "kept"

    def kept_integers(self, round_: int, draw: int) -> Path:
        """Where this site's integers of a round are kept, by the attempt that drew them."""
        return self.kept / f"{round_}-{draw}.npy"

    def kept_draws(self, round_: int) -> list[int]:
        """The attempts of a round of which integers are kept, the earliest first."""
        names = (path.stem.partition("-")[2] for path in self.kept.glob(f"{round_}-*.npy"))
        return sorted(int(name) for name in names)

    def thin_kept(self, round_: int, needed: set[int]) -> None:
        """A round that fails again and again must not fill the disk with what it drew."""
        for draw in self.kept_draws(round_)[:-_DRAWS_KEPT]:
            if draw not in needed:
                self.kept_integers(round_, draw).unlink(missing_ok=True)

    def forget_kept(self, head_round: int) -> None:
        """No round up to this one is summed again."""
        for path in self.kept.glob("[0-9]*-*.npy"):
            if int(path.name.partition("-")[0]) <= head_round:
                path.unlink(missing_ok=True)
