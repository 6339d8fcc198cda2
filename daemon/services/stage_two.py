"""Stage 2 from the settings: the desk that answers peers, and the one who asks them."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace

from config.settings import COMMON_PASSAGES, Settings
from daemon.learning.foreign import Disclosure
from daemon.learning.options import RetrieverDescription
from daemon.learning.recipes import options_from
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.process.workers import Worker
from daemon.rounds.driver import Node
from daemon.services.negatives import AnsweringDesk, AskOptions, own_secret
from daemon.services.personaliser import Personal, Personaliser
from daemon.state.audit import AuditLog
from daemon.state.store import StoreError
from peers.link.negatives import AnswerPolicy, Desk
from peers.link.transport import Transport


class StageTwo:
    """Makes the two of them for one site."""

    def __init__(
        self, settings: Settings, spec: RetrieverSpec, described: RetrieverDescription
    ) -> None:
        self._settings = settings
        self._spec = spec
        self._described = described

    async def desk(self, node: Node, sharing: Worker) -> AnsweringDesk:
        """Raises StoreError when the secret of the noise can't be read or made."""
        chosen = self._settings.negatives
        path = self._settings.site.state_dir / "negatives.key"
        try:
            secret = await asyncio.to_thread(own_secret, path)
        except OSError as error:
            raise StoreError(
                f"cannot use {path}: {error}; check its disk and its rights"
            ) from error
        policy = AnswerPolicy(
            answer=chosen.answer,
            levels=frozenset(chosen.levels),
            queries_per_round=chosen.queries_per_round,
            top_n=chosen.top_n,
            bits=chosen.bits,
            collections=chosen.collections,
        )
        personal = self._settings.retriever.personal
        return AnsweringDesk(
            Desk(
                policy,
                self._described.dimension,
                embedded_by="" if personal in COMMON_PASSAGES else personal,
            ),
            sharing,
            node.collection,
            noise=chosen.noise,
            secret=secret,
            head_round=lambda: node.protocol.head_round,
        )

    def personaliser(
        self, node: Node, learning: Worker, transport: Transport, audit: AuditLog
    ) -> Personaliser:
        """Trains as the settings say of training, on this site alone."""
        chosen, training = self._settings.negatives, self._settings.training
        seed = hashlib.sha256(node.identity.site_id.encode()).digest()
        return Personaliser(
            Personal(
                spec=self._spec,
                shape_digest=self._described.shape_manifest.digest,
                options=replace(
                    options_from(training, self._settings.learning),
                    seed=int.from_bytes(seed[:8], "little"),
                ),
                own_rounds=self._settings.learning.own_rounds,
                how=Disclosure(chosen.level, chosen.noise, chosen.bits, chosen.top_n),
                whom=AskOptions(chosen.select, chosen.sites, chosen.deadline_s, chosen.ask),
            ),
            learning=learning,
            collection=node.collection,
            protocol=node.protocol,
            transport=transport,
            audit=audit,
            federation_id=node.identity.federation_id,
        )
