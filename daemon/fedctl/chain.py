"""fedctl rounds verify: the whole history, checked by someone who trusts only the authority.

The daemon is asked for certificates and manifests and believed in nothing: each
manifest must be signed by the authority, each round voted for by a quorum of the
manifest of its time (where a majority decided, by one), each round's parent be the
version before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from daemon.fedctl.connection import connected, run, socket_path
from daemon.fedctl.options import command
from daemon.fedctl.output import CommandError, Exit, Session, short
from daemon.fedctl.setup import read_file

if TYPE_CHECKING:
    from crypto.identity.site import Trust
    from peers.wire.manifest import FederationManifest


@dataclass
class Verified:
    """What has been verified so far."""

    rounds: int = 0
    genesis: bytes = b""
    head: bytes = b""
    manifests: tuple[int, ...] = ()

    def plain(self) -> dict[str, Any]:
        """For machines."""
        return {
            "rounds": self.rounds,
            "genesis_digest": self.genesis.hex(),
            "head_digest": self.head.hex(),
            "manifests": list(self.manifests),
        }


@command
def verify(
    session: Session,
    authority: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The authority's ca.crt.",
            show_default="the one of the settings (--config)",
        ),
    ] = None,
) -> None:
    """Verify every committed round, from the first: signatures, quorums, and no gap."""
    from crypto.identity.site import IdentityError, Trust

    try:
        trust = Trust.from_pem(read_file(authority or _configured(session)))
    except IdentityError as error:
        raise CommandError(str(error)) from error
    verified = run(_verify(session, trust))
    session.result(verified.plain(), lambda console: console.print(_in_words(verified)))


def _configured(session: Session) -> Path:
    if session.config is None:
        raise CommandError(
            "whom do you trust?",
            "Name the authority's certificate (--authority ca.crt), or the settings (--config)",
            exit_code=Exit.USAGE,
        )
    from config.settings import SettingsError, load

    try:
        return load(session.config).identity.authority
    except SettingsError as error:
        raise CommandError(str(error), exit_code=Exit.USAGE) from error


async def _verify(session: Session, trust: Trust) -> Verified:
    from peers.wire.certificates import CertificateError, verify_chain
    from peers.wire.manifest import ManifestError, parse_signed
    from proto.control_pb2 import ChainRequest

    verified = Verified()
    manifests: dict[int, FederationManifest] = {}
    async with connected(socket_path(session)) as daemon:
        async for part in daemon.Chain(ChainRequest(first=1)):
            try:
                for signed in part.manifests:
                    manifest = parse_signed(signed, trust)
                    manifests[manifest.version] = manifest
                if not part.certificates:
                    continue
                if not verified.rounds:
                    # Nothing signs the version before the first round: it is named, not proved.
                    verified.genesis = part.certificates[0].body.parent_digest
                verify_chain(
                    list(part.certificates),
                    trust,
                    manifests.get,
                    verified.head or verified.genesis,
                    first_round=verified.rounds + 1,
                )
            except (CertificateError, ManifestError) as error:
                raise CommandError(
                    f"the chain breaks after round {verified.rounds}: {error}",
                    "Verify at another site too; do not train on this one until it is known why",
                ) from error
            verified.rounds += len(part.certificates)
            verified.head = part.certificates[-1].body.model_digest
    verified.manifests = tuple(sorted(manifests))
    return verified


def _in_words(verified: Verified) -> str:
    if not verified.rounds:
        return "No round is committed here yet: there is nothing to verify."
    return (
        f"{verified.rounds} rounds verified, without a gap: from version "
        f"{short(verified.genesis.hex())} to {short(verified.head.hex())}, "
        f"under manifests {', '.join(map(str, verified.manifests))}."
    )
