"""fedctl site: a site's key and certificate, its expulsion, and what to do about a damaged round.

The functions without a session are the same steps for programs; the demo uses them.
`expel` is the keeper's: it needs the authority's key and no daemon, so it works from
wherever the keeper is. One site that installs the new manifest is enough; the others
take it from there (docs/decisions/0008).
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from daemon.fedctl.commands.federation.manifest import (
    new_manifest,
    plain_manifest,
    verified,
    what_it_bears,
    write_manifest,
)
from daemon.fedctl.terminal.connection import settings_of
from daemon.fedctl.terminal.files import fingerprint, read_file, refusing
from daemon.fedctl.terminal.options import MODELS, Authority, Model, Out, an_id, command
from daemon.fedctl.terminal.output import CommandError, Exit, Session, confirm, short, tell

topic = typer.Typer(name="site", help="This site's key and certificate.")
_SETTINGS = Path("/etc/hanse/fedd.toml")
_WHAT_IT_MEANS = (
    "It forgets what this site has promised, stated, locked and voted in the round under way, and "
    "the run; committed rounds, versions, manifests and the privacy ledger stay. What it has "
    "signed in that round still counts: it asks its peers at its next start, and what none of "
    "them remembers counts towards faulty_sites. So forget at one site at a time, and start it "
    "while the others run"
)


def make_site(directory: Path, federation: str, site: str) -> None:
    """A new site: site.key (0600) and site.csr."""
    from crypto.identity.site import create_site

    with refusing():
        create_site(directory, federation, site)


def install_site(directory: Path, certificate: bytes, authority: bytes) -> None:
    """Put certificate and authority beside the site's key, once they prove to belong there."""
    from crypto.identity.site import install

    with refusing():
        install(directory, certificate, authority)


@topic.command("init")
@command
def site_init(
    session: Session,
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="The site's identity folder, e.g. /etc/hanse/identity."),
    ],
    federation: Annotated[str, an_id("NAME", help="The federation's id")],
    site: Annotated[str, an_id("ID", help="This site's id")],
) -> None:
    """Make this site's key, which never leaves it, and a request for its certificate."""
    make_site(directory, federation, site)
    request = directory / "site.csr"
    plain = {"site": site, "federation": federation, "request": str(request)}

    tell(
        session,
        plain,
        f"Send {request} (never site.key) to the federation's authority.",
        "It answers with site.crt and ca.crt. Then:",
        f"fedctl site install {directory} --certificate site.crt --authority ca.crt",
    )


@topic.command("install")
@command
def site_install(
    session: Session,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The site's identity folder.")],
    certificate: Annotated[Path, typer.Option(metavar="FILE", help="site.crt, as signed.")],
    authority: Annotated[Path, typer.Option(metavar="FILE", help="The authority's ca.crt.")],
) -> None:
    """Install this site's certificate, after every check that a peer would make."""
    install_site(directory, read_file(certificate), read_file(authority))
    plain = _identity(directory)

    tell(
        session,
        plain,
        "Once manifest.json is here: start fedd, or, if it runs, systemctl reload fedd",
    )


@topic.command("show")
@command
def site_show(
    session: Session,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The site's identity folder.")],
) -> None:
    """Show who this site is: federation, fingerprint, until when."""
    tell(session, _identity(directory))


def _identity(directory: Path) -> dict[str, Any]:
    from crypto.identity.site import Identity

    with refusing():
        identity = Identity.load(
            directory / "site.crt", directory / "site.key", directory / "ca.crt"
        )
    return {
        "site": identity.site_id,
        "federation": identity.federation_id,
        "fingerprint_sha256": fingerprint(identity.certificate_pem),
        "authority_fingerprint_sha256": fingerprint(identity.authority_pem),
        "expires": identity.not_after.isoformat(timespec="seconds"),
        "days_left": (identity.not_after - datetime.now(UTC)).days,
    }


@topic.command("expel")
@command
def site_expel(
    session: Session,
    site: Annotated[str, typer.Argument(metavar="ID", help="The site to expel.")],
    ca: Authority,
    previous: Annotated[
        Path, typer.Option(metavar="FILE", help="The newest manifest that sites have.")
    ],
    out: Out,
    remove: Annotated[
        bool, typer.Option("--remove", help="Strike it off, in the place of disabling it.")
    ] = False,
) -> None:
    """Sign a manifest that shuts a site out: at every site that has it, at once.

    Its connections are closed, its calls refused, and the round under way goes on without
    it. Its votes in committed rounds stay valid. `manifest sign --enable ID` lets it in again.
    """
    _check_takes_part(verified(previous, ca / "ca.crt"), site)
    content = new_manifest(
        ca,
        addresses={},
        previous=previous,
        enabled={} if remove else {site: False},
        remove=[site] if remove else [],
        expelling=True,
    )
    manifest = write_manifest(out, content, ca)
    plain = {"expelled": site, **plain_manifest(manifest), "file": str(out)}
    facts: dict[str, Any] = {
        "expelled": site,
        "federation": manifest.federation_id,
        "version": f"{manifest.version}, digest {short(manifest.digest.hex())}",
        "stay": ", ".join(manifest.enabled_ids),
        "rounds": what_it_bears(plain),
        "file": str(out),
    }
    tell(
        session,
        facts,
        "At one site, better at two: put it in the place of the manifest file, and",
        "systemctl reload fedd",
        "The others take it from there within a heartbeat; `fedctl peers` shows who has it.",
        as_json=plain,
    )


def _check_takes_part(manifest: Any, site: str) -> None:
    """Raises CommandError unless there is something to expel."""
    listed = {entry.id for entry in manifest.sites}
    if site not in listed:
        raise CommandError(
            f"manifest {manifest.version} has no site {site}",
            f"It lists {', '.join(sorted(listed))}",
            exit_code=Exit.USAGE,
        )
    if not manifest.enabled(site):
        raise CommandError(
            f"{site} takes no part in manifest {manifest.version} already",
            "Install that one wherever `fedctl peers` shows an older one",
        )


@topic.command("renew")
@command
def site_renew(
    session: Session,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The site's identity folder.")],
    new_key: Annotated[
        bool, typer.Option("--new-key", help="For a new key; the old one stays until `install`.")
    ] = False,
) -> None:
    """Write a new request for this site's certificate; the daemon goes on with the old one."""
    from crypto.identity.site import renew_site

    with refusing():
        renew_site(directory, new_key=new_key)
    request = directory / "site.csr"
    tell(
        session,
        {"request": str(request), "new_key": new_key},
        f"Send {request} to the federation's authority, which signs it (fedctl ca sign). Then:",
        f"fedctl site install {directory} --certificate site.crt --authority ca.crt",
        "systemctl reload fedd",
    )


# ---- a damaged round ------------------------------------------------------------


@topic.command("forget-round")
@command
def site_forget_round(
    session: Session,
    model: Model = MODELS[0],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    sums: Annotated[
        bool, typer.Option("--sums", help="Only count from zero whose updates were in its sums.")
    ] = False,
) -> None:
    """Bring a site back whose record of the round under way is damaged or absurd.

    The daemon must be stopped. It forgets what this site has promised, stated, locked and
    voted in the round under way, and the run; no committed round and no version is lost.
    With --sums all that stays: a site that says that its update is in too many sums takes
    part again, when this was done at every site. It may be done at all of them at once.
    """
    from daemon.state.forget_round import NotForgotten, forget_round

    state = settings_of(session.config or _SETTINGS).site.state_dir
    other = "" if model == MODELS[0] else model
    _check_state(state / other)
    if not yes and not sums:
        _confirm(session)
    try:
        round_ = forget_round(state, other, sums=sums)
    except NotForgotten as error:
        raise CommandError(str(error)) from error
    if sums:
        tell(
            session,
            {"forgotten": f"how many sums of round {round_} each site's update was in"},
            "Do the same at the other sites, then:",
            "systemctl start fedd",
            as_json={"model": model, "round": round_, "state_dir": str(state)},
        )
        return
    tell(
        session,
        {"forgotten": f"all that this site has said in round {round_}, and the run"},
        "Start it while its peers run, so that it hears from them what they remember:",
        "systemctl start fedd",
        f"Let a round be committed (fedctl rounds --model {model}) before you forget one anywhere "
        "again.",
        as_json={"model": model, "round": round_, "state_dir": str(state)},
    )


def _check_state(state: Path) -> None:
    """Raises CommandError unless a daemon of this user has left its state there."""
    from daemon.state.folder import StateFolder

    try:
        StateFolder(state).store.stat()
        owner = state.stat().st_uid
    except OSError as error:
        raise CommandError(
            f"no state of a daemon in {state}: {error.strerror}",
            "Name the daemon's settings (--config)",
            exit_code=Exit.USAGE,
        ) from error
    # Files that another user makes there would keep the daemon from starting.
    if owner != os.geteuid():
        raise CommandError(
            f"{state} belongs to user {owner}, and this is user {os.geteuid()}",
            "Run it as the daemon's user: sudo -u hanse fedctl site forget-round",
        )


def _confirm(session: Session) -> None:
    """Raises CommandError unless a person at a terminal agrees."""
    confirm(session, _WHAT_IT_MEANS, "Forget the round under way?", "nothing was forgotten")
