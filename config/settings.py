"""What the operator chooses: the tables of one TOML file (`config.loading` reads it).

What every option does, and what goes wrong when it is off, stands in ``fedd.example.toml``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from config import control_socket
from config.answering import AnsweringAxes
from config.kinds import (
    Beginnings,
    Bind,
    Bits,
    EncoderName,
    FilePath,
    Folders,
    GroupName,
    IndexAddress,
    LayerNames,
    LevelName,
    Levels,
    ModeName,
    PageUrl,
    PersonalName,
    Pooling,
    Prompt,
    RuleName,
    SiteId,
    SocketPath,
    WriterName,
    available_cores,
)
from config.recipes import (
    DEFAULT_ENCODER,
    DEFAULT_RECIPE,
    RECIPES,
    DepthAxes,
    GeneratorAxes,
    LearningAxes,
    RecipeName,
    RetrieverAxes,
    StepOptions,
    TrainingAxes,
)
from config.tables import Section, as_in, planned
from proto import bounds

LARGEST_MULTIPLIER = bounds.of("PrivacyPlan", "noise_multiplier").most


class SiteSettings(Section):
    """``[site]``: who this is and where it keeps what it must not lose."""

    id: SiteId | None = None  # None: as the certificate says
    state_dir: FilePath = Path("/var/lib/hanse")


class IdentitySettings(Section):
    """``[identity]``: certificates and the signed list of sites."""

    directory: FilePath = Path("identity")
    manifest: FilePath = Path("manifest.json")
    adopt_manifests: bool = True

    @property
    def authority(self) -> Path:
        """Certificate of the federation's authority."""
        return self.directory / "ca.crt"

    @property
    def certificate(self) -> Path:
        """Certificate of this site."""
        return self.directory / "site.crt"

    @property
    def key(self) -> Path:
        """Private key of this site, mode 0600."""
        return self.directory / "site.key"


class NetworkSettings(Section):
    """``[network]``: where peers reach the daemon on this machine."""

    bind: Bind = "0.0.0.0:7443"  # all interfaces: peers are elsewhere, mutual TLS stands guard


class LimitsSettings(Section):
    """``[limits]``: what one peer may take of this site, and all of them together."""

    requests_per_s: float = Field(50.0, ge=1, le=100_000)
    burst: int = Field(200, ge=10, le=1_000_000)
    streams: int = Field(32, ge=8, le=10_000)
    pulls_per_minute: float = Field(240.0, ge=1, le=1_000_000)
    push_copies: int = Field(4, ge=2, le=1000)
    connections: int = Field(1000, ge=16, le=1_000_000)


class ControlSettings(Section):
    """``[control]``: where fedctl reaches the daemon."""

    socket: SocketPath = control_socket.PATH
    group: GroupName | None = None  # None: the daemon's


class GatewaySettings(Section):
    """``[gateway]``: what people's programs ask of this site with tokens, over HTTP (`fedgate`).

    `fedd` reads the first four and ``upload_mib``, `fedgate` all but the group and the people.
    """

    enabled: bool = False
    socket: SocketPath = control_socket.QUESTIONS_PATH
    group: GroupName | None = None  # None: the daemon's
    people: FilePath | None = None  # None: nobody signs in elsewhere
    listen: Bind = "127.0.0.1:8080"
    tls_certificate: FilePath | None = None
    tls_key: FilePath | None = None
    url: PageUrl | None = None  # None: citations in programs name passages and open nowhere
    requests: int = Field(16, ge=1, le=1000)
    upload_mib: int = Field(64, ge=0, le=1024)


@planned("encoder")
class RetrieverSettings(Section, RetrieverAxes):  # type: ignore[misc]  # frozen by its config
    """``[retriever]``: the encoder and how it is adapted; equal at all sites."""

    encoder: EncoderName = DEFAULT_ENCODER
    personal: PersonalName = RECIPES[DEFAULT_RECIPE].personal
    lora_rank: int = Field(8, ge=1, le=256)
    lora_alpha: int = Field(16, ge=1, le=1024)
    max_tokens: int = Field(256, ge=16, le=512)
    query_prompt: Prompt | None = None  # of these four None: as the encoder's makers say
    passage_prompt: Prompt | None = None
    query_pooling: Pooling | None = None
    passage_pooling: Pooling | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"


class NextRetrieverSettings(Section):
    """``[next_retriever]``: the encoder that is to follow that of ``[retriever]``."""

    encoder: EncoderName | None = None  # None: none is
    max_tokens: int = Field(256, ge=16, le=512)
    query_prompt: Prompt | None = None
    passage_prompt: Prompt | None = None
    query_pooling: Pooling | None = None
    passage_pooling: Pooling | None = None


class GeneratorSettings(Section, GeneratorAxes):  # type: ignore[misc]  # frozen by its config
    """``[generator]``: the language model that the sites train together, and how."""

    base_model: FilePath | None = None  # None: this site trains none
    lora_targets: LayerNames = ()
    personal: Literal["none", "mixture"] = "none"
    personal_epochs: int = Field(4, ge=1, le=100)
    min_triples: int = Field(8, ge=1, le=1_000_000)
    local_epochs: int = as_in("TrainingPlan", "local_epochs", 1)
    batch_size: int = as_in("TrainingPlan", "batch_size", 8)
    learning_rate: float = as_in("TrainingPlan", "learning_rate", 2e-4)


class LibrarySettings(Section):
    """``[library]``: folders that the daemon reads by itself, by collection, and what it keeps."""

    keep_originals: bool = False
    folders: Folders = Field({})
    vanished: Literal["remove", "keep"] = "remove"
    scan_s: float = Field(60.0, ge=1, le=86_400)


class IndexSettings(Section):
    """``[index]``: what searches passages by meaning, and where."""

    engine: Literal["hnswlib", "milvus"] = "hnswlib"
    uri: IndexAddress | None = None
    token_file: FilePath | None = None
    ca_file: FilePath | None = None
    cert_file: FilePath | None = None
    key_file: FilePath | None = None


@planned("top_k")
class RetrievalSettings(Section, AnsweringAxes):  # type: ignore[misc]  # frozen by its config
    """``[retrieval]``: how documents are cut, and what an answer is made of and by whom."""

    passage_tokens: int = Field(220, ge=32, le=510)
    top_k: int = as_in("AskRequest", "top_k", 8, least=1)
    cross_encoder: FilePath | None = None
    language_model: WriterName | None = None  # None: there is none


@planned("min_pairs", "TrainingPlan")
class TrainingSettings(Section, TrainingAxes):  # type: ignore[misc]  # frozen by its config
    """``[training]``: what this site agrees to, and the plan that it proposes itself.

    ``willing``, ``max_local_epochs`` and ``min_pairs`` are this site's policy;
    the rest fills a plan when ``fedctl train`` is typed here.
    """

    willing: bool = True
    max_local_epochs: int = as_in("TrainingPlan", "local_epochs", 20)
    min_pairs: int = Field(8, ge=2, le=1_000_000)
    bits: Bits = 16
    mode: ModeName = "ckks"
    min_participants: int = 3
    max_num_examples: int = 100_000


@planned("recipe", "LearningPlan")
class LearningSettings(Section, StepOptions, LearningAxes):  # type: ignore[misc]  # frozen by its config
    """``[learning]``: the recipe, and what is chosen otherwise, in plans proposed here."""

    recipe: RecipeName = DEFAULT_RECIPE


class DepthSettings(Section, DepthAxes):  # type: ignore[misc]  # frozen by its config
    """``[depth]``: the tiers of this site's personal layer.

    As in pFedRAG's Table 8, but for ``kd_learning_rate`` (0.1 there; decision 0018).
    """

    tell_complexity: bool = False


class PairsSettings(Section):
    """``[pairs]``: what this site learns from, and what writes questions about its documents."""

    learn_from: Literal["supplied", "supplied+made", "made"] = "supplied"
    writer: WriterName | None = None  # None: there is none
    domain: Literal["general", "medical", "financial", "legal", "technical"] = "general"


class EvaluationSettings(Section):
    """``[evaluation]``: how each new version is judged at this site."""

    curve_questions: int = Field(500, ge=0, le=100_000)


class PrivacySettings(Section):
    """``[privacy]``: what this site's updates may tell, over all rounds together."""

    required: bool = False
    epsilon: float | None = Field(None, gt=0, le=1_000_000)  # None: no budget
    delta: float = Field(1e-5, ge=1e-12, le=0.01)
    colluders: int = as_in("PrivacyPlan", "colluders", 1)
    # None: whatever the budget leaves
    least_noise: float | None = as_in("PrivacyPlan", "noise_multiplier", None)
    max_noise: float = as_in("PrivacyPlan", "noise_multiplier", LARGEST_MULTIPLIER)


class RobustSettings(Section):
    """``[robust]``: which updates may be in the sum, in plans that are proposed here."""

    rule: RuleName = "none"
    required: bool = False
    byzantine_sites: int = as_in("TrainingPlan", "byzantine_sites", 1)


class NegativesSettings(Section):
    """``[negatives]``: embeddings that sites give one another to tell answers from others.

    ``answer`` to ``collections`` are this site's policy towards others that ask; the
    rest is how it asks itself. ``noise`` and ``bits`` concern both.
    """

    answer: bool = False
    levels: Levels = ("bucket",)
    queries_per_round: int = Field(20_000, ge=1, le=1_000_000_000)
    top_n: int = as_in("NegativesRequest", "top_n", 10)
    collections: Beginnings = ()
    noise: float = as_in("AuditEmbeddingsRequest", "noises", 0.05)
    bits: int = Field(8, ge=1, le=64)
    ask: bool = True
    level: LevelName = "bucket"
    select: Literal["all", "random", "nearest"] = "all"
    sites: int = Field(3, ge=1, le=256)
    deadline_s: float = Field(5.0, ge=0.1, le=300)


class RoundsSettings(Section):
    """``[rounds]``: how long a round waits, in seconds, and how much of the past is kept."""

    phase_deadline_s: float = Field(120.0, ge=1, le=86_400)
    train_deadline_s: float = Field(3600.0, ge=1, le=86_400)
    attempt_growth: float = Field(1.5, ge=1, le=10)
    heartbeat_s: float = Field(10.0, ge=0.1, le=3600)
    keep_versions: int = Field(5, ge=2, le=10_000)


class WorkersSettings(Section):
    """``[workers]``: the processes that compute."""

    threads: int = Field(default_factory=available_cores, ge=1, le=1024)
    processes: int = Field(1, ge=1, le=64)
    precision: Literal["float32", "bfloat16"] = "float32"
    idle_stop_s: float = Field(600.0, ge=1, le=86_400)


class LogSettings(Section):
    """``[log]``: what is written to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"


class Settings(Section):
    """All settings of one site. `load` makes it."""

    site: SiteSettings
    identity: IdentitySettings
    network: NetworkSettings
    limits: LimitsSettings
    control: ControlSettings
    gateway: GatewaySettings
    retriever: RetrieverSettings
    next_retriever: NextRetrieverSettings
    generator: GeneratorSettings
    library: LibrarySettings
    index: IndexSettings
    retrieval: RetrievalSettings
    training: TrainingSettings
    learning: LearningSettings
    depth: DepthSettings
    pairs: PairsSettings
    evaluation: EvaluationSettings
    privacy: PrivacySettings
    robust: RobustSettings
    negatives: NegativesSettings
    rounds: RoundsSettings
    workers: WorkersSettings
    log: LogSettings


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Settings.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}
