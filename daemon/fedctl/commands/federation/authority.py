"""fedctl ca: the federation's authority, made, used, followed by another. No daemon is needed.

The functions without a session are the same steps for programs; the demo uses them.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from crypto.identity import MAX_DAYS
from daemon.fedctl.terminal.files import fingerprint, read_file, refusing, write_whole
from daemon.fedctl.terminal.options import Authority, Out, an_id, command
from daemon.fedctl.terminal.output import Session, tell

topic = typer.Typer(name="ca", help="The federation's authority: make it, and sign sites with it.")

Days = Annotated[
    int, typer.Option(min=1, max=MAX_DAYS, help="For how many days what is signed is valid.")
]


def make_authority(directory: Path, federation: str, *, days: int = 3650) -> None:
    """A new authority: ca.key (0600) and ca.crt."""
    from crypto.identity.authority import create_authority

    with refusing():
        create_authority(directory, federation, days=days)


def sign_site(
    authority: Path, request: Path, *, expect_site: str | None = None, days: int = 365
) -> bytes:
    """A certificate (PEM) for a site's request."""
    from crypto.identity.authority import sign_request

    with refusing():
        return sign_request(authority, read_file(request), expect_site=expect_site, days=days)


@topic.command("init")
@command
def ca_init(
    session: Session,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for it.")],
    federation: Annotated[str, an_id("NAME", help="The federation's id")],
    days: Days = 3650,
) -> None:
    """Make the federation's authority. Whoever has its key decides who belongs: keep it offline."""
    make_authority(directory, federation, days=days)
    certificate = directory / "ca.crt"
    plain = {
        "federation": federation,
        "directory": str(directory),
        "certificate": str(certificate),
        "fingerprint_sha256": fingerprint(read_file(certificate)),
    }

    tell(
        session,
        plain,
        f"Next, at each site: fedctl site init DIR --federation {federation} --site ID",
        f"then here: fedctl ca sign site.csr --ca {directory} --out site.crt --site ID",
        "and once all are known: fedctl manifest sign, whose manifest.json every site gets",
    )


@topic.command("sign")
@command
def ca_sign(
    session: Session,
    request: Annotated[Path, typer.Argument(metavar="REQUEST.csr", help="A site's site.csr.")],
    ca: Authority,
    out: Out,
    site: Annotated[
        str | None,
        typer.Option(metavar="ID", help="The site whose request it must be; recommended."),
    ] = None,
    days: Days = 365,
) -> None:
    """Sign a site's request. Know from the site itself that the request is its own."""
    from crypto.identity.trust import Trust

    certificate = sign_site(ca, request, expect_site=site, days=days)
    with refusing():
        trust = Trust.from_pem(read_file(ca / "ca.crt"))
        named = trust.site_of(certificate, at=datetime.now(UTC))
    write_whole(out, certificate)
    plain = {
        "site": named,
        "federation": trust.federation_id,
        "certificate": str(out),
        "fingerprint_sha256": fingerprint(certificate),
    }

    tell(
        session,
        plain,
        f"Send {out} and {ca / 'ca.crt'} to the site. There:",
        f"fedctl site install DIR --certificate {out.name} --authority ca.crt",
        "It also needs manifest.json with this site in it (fedctl manifest sign)",
    )


@topic.command("rotate")
@command
def ca_rotate(
    session: Session,
    old: Annotated[Path, typer.Argument(metavar="OLD", help="The authority's folder.")],
    new: Annotated[
        Path, typer.Argument(metavar="NEW", help="A folder for its successor, or of `ca adopt`.")
    ],
    days: Days = 3650,
    window: Annotated[
        int, typer.Option(min=1, max=MAX_DAYS, help="For how many days both are good.")
    ] = 90,
) -> None:
    """Let a new authority follow the old one, which vouches for it; both are good for a while."""
    from crypto.identity.authority import rotate_authority

    with refusing():
        end: datetime = rotate_authority(old, new, days=days, window_days=window)
    certificate = new / "ca.crt"
    plain = {
        "directory": str(new),
        "certificate": str(certificate),
        "fingerprint_sha256": fingerprint(read_file(certificate)),
        "previous_fingerprint_sha256": fingerprint(read_file(old / "ca.crt")),
        "both_until": end.isoformat(timespec="seconds"),
    }
    tell(
        session,
        plain,
        f"1. Send {certificate} to every site. There, with the certificate that it has:",
        "   fedctl site install DIR --certificate DIR/site.crt --authority ca.crt",
        "   systemctl reload fedd",
        f"   Until all have it, sign with --ca {old}: a site without it believes nothing else.",
        f"2. Then sign with --ca {new}: a manifest, and each site's next request",
        f"   (fedctl site renew), before {end:%Y-%m-%d}. Destroy {old / 'ca.key'} after that.",
    )


@topic.command("adopt")
@command
def ca_adopt(
    session: Session,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for it.")],
    federation: Annotated[str, an_id("NAME", help="The federation's id")],
    certificate: Annotated[
        Path, typer.Option(metavar="FILE", help="Its certificate, then what issued it, in PEM.")
    ],
    key: Annotated[Path, typer.Option(metavar="FILE", help="Its private key, mode 0600.")],
) -> None:
    """Use an authority that was made elsewhere, if it is what a federation needs."""
    from crypto.identity.authority import adopt_authority

    with refusing():
        adopt_authority(directory, federation, read_file(certificate), key)
    installed = directory / "ca.crt"
    plain = {
        "federation": federation,
        "directory": str(directory),
        "certificate": str(installed),
        "fingerprint_sha256": fingerprint(read_file(installed)),
    }
    tell(session, plain, "It signs sites and manifests like one of `fedctl ca init`.")
