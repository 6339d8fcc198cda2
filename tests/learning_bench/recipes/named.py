"""The daemon's recipes by name, with what each leaves personal; and what is compared.

A recipe's choices are those of `config.recipes`; rounds are the benchmark's. Where a
recipe trains the whole encoder, the tables on all sites show its head in place of it
(marked "head"), since that is what two processors can train; `adapt=None` leaves it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from config.recipes import RECIPES as DAEMONS
from config.recipes import Adapt, AloneAxes, DepthOptions
from config.settings import LearningSettings, TrainingSettings
from crypto.arrays import Float32
from crypto.privacy import NoiseTerms
from daemon.jobs import learning
from daemon.jobs import personal as personal_jobs
from daemon.learning.batches import training_seed
from daemon.learning.from_settings import options_from
from daemon.learning.retriever import training_data
from daemon.learning.retriever.mining import NEAR_DUPLICATE
from daemon.learning.retriever.peer_negatives import AskingTerms, same_above
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.store import Library
from daemon.pairs.training_set import training_set
from daemon.personal import held_out
from daemon.personal.store import PersonalState, PersonalStore
from daemon.personal.tuning import PersonalQueryRetriever, tune
from daemon.state.versions import write_version
from tests.learning_bench.corpora import Dense, Ranker
from tests.learning_bench.recipes.exchange import Exchange, Training
from tests.learning_bench.recipes.foreign import Sites
from tests.learning_bench.recipes.learning import (
    Learned,
    Part,
    learned,
    libraries_of,
    own_spec,
    retriever_of,
)
from tests.learning_bench.recipes.recipes import Outcome
from tests.learning_bench.worlds import World

Told = Callable[[str], None]

HEAD_RATE = 1e-4  # a head's, where a recipe gives the rate of a whole encoder
EPOCHS = 12  # of training at a site, over all rounds
STAGE_TWO_EPOCHS = 4
EXACT = AskingTerms("exact")


@dataclass(frozen=True)
class Named:
    """A recipe of the daemon's. ``adapt``: instead of its own; ``changes``: to its choices.

    ``personal`` False leaves out what is a site's own: the shared version alone, which
    is also what sites that took no part are given.
    """

    recipe: str
    name: str = ""
    adapt: Adapt | None = "head"
    epochs: int = EPOCHS
    changes: tuple[tuple[str, Any], ...] = ()
    stage_two: bool = True
    disclosure: AskingTerms | None = EXACT
    bits: int = 16
    exchange: Exchange = "ckks"
    noise: NoiseTerms | None = None
    depth: DepthOptions | None = None
    learns: bool = True

    @property
    def personal(self) -> bool:
        """See `Recipe`."""
        return self.stage_two and DAEMONS[self.recipe].personal != "none"

    @property
    def identity(self) -> dict[str, Any]:
        """See `Recipe`: the choices themselves, whatever they are called."""
        spec, training = self._choices(RetrieverSpec())
        tuned = spec.personal == "query_encoder"
        return {
            "kind": "named",
            "spec": [spec.adapt, spec.lora_rank, spec.lora_alpha, spec.personal],
            "own_rounds": self._own_rounds,
            "disclosure": asdict(self.disclosure) if self.disclosure and tuned else None,
            "stage_two_epochs": STAGE_TWO_EPOCHS if tuned else 0,
            **asdict(training),
        }

    def learn(
        self, world: World, part: Part, spec: RetrieverSpec, scratch: Path, tell: Told
    ) -> Outcome:
        """Rounds between all sites, then at each what is its own."""
        spec, training = self._choices(spec)
        libraries = libraries_of(world, part, scratch)
        if spec.personal == "tiered_head":
            training = _with_range(training, libraries)
        shared_spec = spec if spec.personal == "tiered_head" else replace(spec, personal="none")
        data = (world, part, libraries)
        run = learned(data, shared_spec, training, part.seed, scratch, tell)
        anywhere = Dense(retriever_of(replace(spec, personal="none")), run.vector)
        if spec.personal == "none" or not world.sites_ask:
            return Outcome({}, anywhere, run)
        started = time.monotonic()
        rankers: dict[str, Ranker] = {}
        for site, library in libraries.items():
            tell(f"personal: {site}")
            own = own_spec(spec, training.options, site, scratch)
            options = replace(training.options, seed=part.seed)
            if spec.personal == "tiered_head":
                rankers[site] = self._tiered(own, spec, run)
            elif spec.personal == "mixture":
                rankers[site] = self._mixed(own, spec, run, library, options, scratch)
            else:
                others = {name: path for name, path in libraries.items() if name != site}
                rankers[site] = self._tuned(spec, run, (site, library), others, options)
        run.seconds["personal"] = time.monotonic() - started
        return Outcome(rankers, anywhere, run)

    @property
    def _own_rounds(self) -> int:
        return DAEMONS[self.recipe].local_only_rounds if self.personal else 0

    def _choices(self, spec: RetrieverSpec) -> tuple[RetrieverSpec, Training]:
        """The retriever and the plan."""
        chosen = DAEMONS[self.recipe]
        if self.adapt == "head" and chosen.adapt != "head":
            chosen = replace(chosen, adapt="head", learning_rate=HEAD_RATE)
        elif self.adapt is not None:
            chosen = replace(chosen, adapt=self.adapt)
        chosen = replace(chosen, **dict(self.changes))
        if not self.stage_two:
            chosen = replace(chosen, personal="none")
        tables = chosen.settings
        options = options_from(
            TrainingSettings(**tables["training"]), LearningSettings(**tables["learning"])
        )
        if self.depth is not None:
            options = replace(options, depth=self.depth)
        training = Training(
            options,
            rounds=max(1, self.epochs // options.local_epochs),
            bits=self.bits,
            weighted=chosen.weigh == "num_examples",
            exchange=self.exchange,
            noise=self.noise,
        )
        spec = replace(spec, adapt=chosen.adapt, personal=chosen.personal)
        # A site's tiers follow what it chose itself, and no plan.
        return (spec if self.depth is None else replace(spec, depth=self.depth)), training

    def _tiered(self, own: RetrieverSpec, spec: RetrieverSpec, run: Learned) -> Ranker:
        retriever = retriever_of(spec)
        store = PersonalStore(Path(own.personal_folder), retriever.shape_manifest.digest)
        return Dense(retriever, run.vector, store.newest())

    def _mixed(
        self,
        own: RetrieverSpec,
        spec: RetrieverSpec,
        run: Learned,
        library: Path,
        options: Any,
        scratch: Path,
    ) -> Ranker:
        """By the daemon's own job."""
        plain = retriever_of(replace(spec, personal="none"))
        shape = plain.shape_manifest.digest
        digest, _ = write_version(scratch / "shared", shape, run.vector)
        alone = replace(own, alone=AloneAxes(self._own_rounds))
        personal_jobs.personalise(
            alone, library, scratch / "shared", digest, options, AskingTerms()
        )
        state = PersonalStore(Path(own.personal_folder), shape).serving(digest)
        assert state is not None
        return Dense(plain, state.arrays["mixture"])

    def _tuned(
        self,
        spec: RetrieverSpec,
        run: Learned,
        at: tuple[str, Path],
        others: dict[str, Path],
        options: Any,
    ) -> Ranker:
        """Stage 2 as the daemon's job has it, with the other sites' answers in place."""
        site, path = at
        retriever = retriever_of(spec)
        assert isinstance(retriever, PersonalQueryRetriever)
        retriever.load_vector(run.vector)
        options = replace(options, local_epochs=STAGE_TWO_EPOCHS, start_from="global")
        seed = training_seed(options.seed, 0, site)
        with Library.open(path) as library:
            pairs = training_set(library, retriever, options, spec)
            pairs, validation = held_out.set_apart(library, retriever, pairs, seed)
        fetch, alike = None, NEAR_DUPLICATE
        if self.disclosure is not None:
            alike = same_above(self.disclosure, retriever.encoder.dimension)
            passages = [_shared_passages(library, retriever) for library in others.values()]
            fetch = Sites(passages, self.disclosure, seed).fetch
        tune(retriever, pairs, options, seed, fetch, validation=validation, same_above=alike)
        own = PersonalState(retriever.personal_arrays())
        return Dense(retriever, run.vector, own)


def _shared_passages(path: Path, retriever: PersonalQueryRetriever) -> Float32:
    """What a site may answer with: its passages for training, as all sites embed them."""
    with Library.open(path) as library:
        passages = library.passages(split="train")
        features = training_data.passage_features(library, retriever, [p.rowid for p in passages])
    return retriever.embed_passages([p.embedding_text for p in passages], features)


def _with_range(training: Training, libraries: dict[str, Path]) -> Training:
    """With the lowest and the highest complexity among the sites (pFedRAG, Eq. 5)."""
    scores = [_complexity(path) for path in libraries.values()]
    depth = replace(training.options.depth, complexity_range=(min(scores), max(scores)))
    return replace(training, options=replace(training.options, depth=depth))


_complexities: dict[Path, float] = {}


def _complexity(path: Path) -> float:
    if path not in _complexities:
        _complexities[path] = learning.complexity(path)
    return _complexities[path]
