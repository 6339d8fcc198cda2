"""What a personal layer says of itself; as it stands here there is none.

A layer is one object in the table `daemon.personal.layers.LAYERS`. Whoever opens, trains,
indexes, serves or shows a retriever asks it, so that nobody else knows a layer by name.
Nothing here imports torch: the daemon's main process reads the table, too; what needs
torch is imported where a worker's job runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from config.recipes import PERSONAL
from crypto.arrays import Float32
from daemon.learning.options import DepthReport, LearningError, Personalised, TrainingOptions
from daemon.learning.retriever.peer_negatives import AskingTerms
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.personal.store import PersonalState, PersonalStore

if TYPE_CHECKING:
    from daemon.learning.retriever.encoder import Encoder
    from daemon.learning.retriever.retriever import Retriever
    from daemon.learning.retriever.training import TrainingSet
    from daemon.library.store import Library

Fact = tuple[str, str]  # a name and a value, for people; a value goes on where a name is empty

NOTHING_YET: Fact = (
    "this site's own",
    "nothing yet for the version that answers: made when a run is over, or by fedctl personalise",
)


@dataclass(frozen=True)
class LocalTraining:
    """A round's training at this site, as it has ended.

    ``before``: what the site kept of its own before the round; ``loss``: mean of the last
    epoch; ``seed``: of the round's draws.
    """

    library: Library
    retriever: Retriever
    before: PersonalState | None
    pairs: TrainingSet
    options: TrainingOptions
    loss: float
    seed: int


@dataclass(frozen=True)
class FitRequest:
    """What to fit to a site's pairs, and how: for the committed version ``model_digest``.

    ``retriever`` has that version loaded, whose vector [D] is ``shared``. ``disclosure``:
    what other sites may be asked.
    """

    spec: RetrieverSpec
    retriever: Retriever
    shared: Float32
    library_path: Path
    model_digest: bytes
    options: TrainingOptions
    disclosure: AskingTerms


@dataclass(frozen=True)
class Fitted:
    """What came of a fit: what the version answers with from now on.

    ``half``: of a mixture, what the next versions are mixed with until they have theirs.
    """

    made: Personalised
    state: PersonalState
    half: PersonalState | None = None


@dataclass(frozen=True)
class Serving:
    """The version that answers, what it has of the site's own, what the last round decided.

    ``state`` is None where it answers with nothing of the site's own.
    """

    version: bytes
    state: PersonalState | None
    report: DepthReport | None


class Layer:
    """A site's own layer; this one is none, and the others say where they differ.

    ``kept``: the site keeps something of its own for its versions, in a `PersonalStore`.
    ``fitted``: it is fitted to the site's pairs when a run is over (`fit`).
    ``trained_in_rounds``: a round trains it, and leaves it to the next one.
    ``pinned_by_index``: what a version answers with is decided when the version is
    indexed, and without it that version answers nowhere.
    """

    kept = False
    fitted = False
    trained_in_rounds = False
    pinned_by_index = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.traits = PERSONAL[name]

    # ---- how it opens --------------------------------------------------------------

    def on(self, encoder: Encoder, spec: RetrieverSpec) -> Retriever:
        """The adaptation of ``spec`` with this layer, on an encoder that is loaded already.

        Raises LearningError when they do not go together.
        """
        from daemon.learning.retriever.retriever import adapted

        return adapted(encoder, spec.adapt, rank=spec.lora_rank, alpha=spec.lora_alpha)

    # ---- how it learns -------------------------------------------------------------

    def before_training(
        self,
        retriever: Retriever,
        personal: PersonalState | None,
        library: Library,
        options: TrainingOptions,
    ) -> None:
        """Take up what the last round left, before a round trains; None: it left nothing."""

    def after_training(self, training: LocalTraining) -> PersonalState:
        """What a round leaves of the site's own, with what was decided about it."""
        del training
        return PersonalState({})

    def fit(self, request: FitRequest) -> Fitted:
        """Fit it to the site's pairs. Raises LearningError where there is nothing to fit."""
        del request
        raise LearningError(f"personal = {self.name!r}: nothing of this site's own is fitted")

    def is_finished(self, state: PersonalState) -> bool:
        """Whether what is kept for a version is what a fit for it leaves."""
        del state
        return True

    # ---- how it serves -------------------------------------------------------------

    def prepare(
        self, spec: RetrieverSpec, retriever: Retriever, versions: Path, model_digest: bytes
    ) -> None:
        """Decide what of the site's own a version is indexed with, until it has its own."""

    def holds(self, state: PersonalState | None) -> bool:
        """Whether what is kept for a version is of this layer; a setting may have changed."""
        return state is not None and state.facts.get("kind") == self.name

    def load(self, retriever: Retriever, shared: Float32, state: PersonalState | None) -> None:
        """Make a version [D] current as it answers, with what is kept for it.

        Raises LearningError when that is damaged; the retriever stays as it was then.
        """
        del state
        retriever.load_vector(shared)

    # ---- what it tells -------------------------------------------------------------

    def facts(self, serving: Serving) -> list[Fact]:
        """What `fedctl learning` shows of it."""
        del serving
        return []

    def report(self, store: PersonalStore) -> DepthReport | None:
        """What was decided about it in the last round; None where rounds decide nothing.

        Reads files; raises LearningError when one of them is damaged.
        """
        del store
        return None

    def answers_with(self, made: Personalised) -> str:
        """What questions are answered with after a fit, for people."""
        del made
        return "the shared version, as before"
