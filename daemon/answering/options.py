"""How a site answers, as its operator chose: plain values that any process may hold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from config.answering import AnsweringAxes
from daemon.learning.generator.in_use import InUse
from daemon.learning.generator.spec import GeneratorSpec


@dataclass(frozen=True)
class FederatedWriter:
    """What ``generator = "federated"`` writes with.

    ``versions``: the folder of the generator's versions; ``in_use``: the file that says which
    (`daemon.learning.generator.in_use`). ``values``: these whatever the file says, as in
    `daemon.answering.generator.Asking`.
    """

    spec: GeneratorSpec
    versions: Path
    in_use: Path
    values: InUse | None = None


@dataclass(frozen=True)
class AnsweringOptions(AnsweringAxes):
    """Options of ``[retrieval]`` by their names.

    ``generator``: of `GENERATORS`; it is given all of these. ``level``: as in
    `daemon.library.levels`.

    ``cross_encoder``: the folder of a model that ranks the ``cross_encoder_depth`` best passages
    anew (`daemon.answering.cross_encoder`); "": none does.
    ``language_model``: the folder, or URL#NAME, of what writes; "": nothing does. ``device``: as
    the retriever's. ``federated``: of ``[generator]``; None: it has no base model.

    ``lost_answers``: the share of questions with an answer that may be refused
    (`daemon.answering.abstention`); 0: none is, however little was found.
    """

    cross_encoder: str = ""
    language_model: str = ""
    device: str = "auto"
    federated: FederatedWriter | None = None


AS_USUAL = AnsweringOptions()
