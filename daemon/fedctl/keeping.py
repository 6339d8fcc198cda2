"""fedctl site expel, site renew: what comes after the founding of a federation.

`expel` is the keeper's: it needs the authority's key and no daemon, so it works from
wherever the keeper is. One site that installs the new manifest is enough; the others
take it from there (docs/decisions/0008).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from daemon.fedctl import setup
from daemon.fedctl.options import command
from daemon.fedctl.output import CommandError, Exit, Session


def join() -> None:
    """Put these commands beside those of setup.py."""
    setup.site_app.command("expel")(site_expel)
    setup.site_app.command("renew")(site_renew)


@command
def site_expel(
    session: Session,
    site: Annotated[str, typer.Argument(metavar="ID", help="The site to expel.")],
    ca: setup.Authority,
    previous: Annotated[
        Path, typer.Option(metavar="FILE", help="The newest manifest that sites have.")
    ],
    out: setup.Out,
    remove: Annotated[
        bool, typer.Option("--remove", help="Strike it off, in the place of disabling it.")
    ] = False,
    standing_still: Annotated[
        bool, typer.Option("--standing-still", help="As for `manifest sign`; rarely needed here.")
    ] = False,
) -> None:
    """Sign a manifest that shuts a site out: at every site that has it, at once.

    Its connections are closed, its calls refused, and the round under way goes on without
    it. Its votes in committed rounds stay valid. `manifest sign --enable ID` lets it in again.
    """
    before = setup.read_file(previous)
    _check_takes_part(setup.verified(before, ca / "ca.crt"), site)
    content = setup.new_manifest(
        ca,
        addresses={},
        previous=before,
        enabled={} if remove else {site: False},
        remove=[site] if remove else [],
        standing_still=standing_still,
    )
    setup.write_whole(out, content)
    manifest = setup.verified(content, ca / "ca.crt")
    plain = {"expelled": site, **setup.plain_manifest(manifest), "file": str(out)}
    facts: dict[str, Any] = {
        "expelled": site,
        "federation": manifest.federation_id,
        "version": manifest.version,
        "stay": ", ".join(manifest.enabled_ids),
        "file": str(out),
    }
    setup.tell(
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


@command
def site_renew(
    session: Session,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The site's identity folder.")],
    new_key: Annotated[
        bool, typer.Option("--new-key", help="For a new key; the old one stays until `install`.")
    ] = False,
) -> None:
    """Write a new request for this site's certificate; the daemon goes on with the old one."""
    from crypto.identity import renew_site

    with setup.refusing():
        renew_site(directory, new_key=new_key)
    request = directory / "site.csr"
    setup.tell(
        session,
        {"request": str(request), "new_key": new_key},
        f"Send {request} to the federation's authority, which signs it (fedctl ca sign). Then:",
        f"fedctl site install {directory} --certificate site.crt --authority ca.crt",
        "systemctl reload fedd",
    )
