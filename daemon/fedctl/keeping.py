"""fedctl site expel, renew, forget-round, ca rotate, adopt: what comes with the years.

`expel` is the keeper's: it needs the authority's key and no daemon, so it works from
wherever the keeper is. One site that installs the new manifest is enough; the others
take it from there (docs/decisions/0008).
"""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from daemon.fedctl import setup
from daemon.fedctl.options import command
from daemon.fedctl.output import CommandError, Exit, Session, confirm, short

_SETTINGS = Path("/etc/hanse/fedd.toml")
_WHAT_IT_MEANS = (
    "It forgets what this site has promised, stated, locked and voted in the round under way, and "
    "the run; committed rounds, versions, manifests and the privacy ledger stay. What it has "
    "signed in that round still counts: it asks its peers at its next start, and what none of "
    "them remembers counts towards faulty_sites. So forget at one site at a time, and start it "
    "while the others run"
)


def join() -> None:
    """Put these commands beside those of setup.py."""
    setup.site_app.command("expel")(site_expel)
    setup.site_app.command("renew")(site_renew)
    setup.site_app.command("forget-round")(site_forget_round)
    setup.ca_app.command("rotate")(ca_rotate)
    setup.ca_app.command("adopt")(ca_adopt)


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
        expelling=True,
    )
    manifest = setup.write_manifest(out, content, ca)
    plain = {"expelled": site, **setup.plain_manifest(manifest), "file": str(out)}
    facts: dict[str, Any] = {
        "expelled": site,
        "federation": manifest.federation_id,
        "version": f"{manifest.version}, digest {short(manifest.digest.hex())}",
        "stay": ", ".join(manifest.enabled_ids),
        "rounds": setup.what_it_bears(plain),
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
    from crypto.identity.site import renew_site

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


@command
def site_forget_round(
    session: Session,
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
    from daemon.process.telemetry import configure_logging

    state = _state_dir(session)
    _check_state(state)
    if not yes and not sums:
        _confirm(session)
    configure_logging("warning")  # to stderr: the result is alone on stdout
    round_ = _forget_round(state, sums=sums)
    if sums:
        setup.tell(
            session,
            {"forgotten": f"how many sums of round {round_} each site's update was in"},
            "Do the same at the other sites, then:",
            "systemctl start fedd",
            as_json={"round": round_, "state_dir": str(state)},
        )
        return
    setup.tell(
        session,
        {"forgotten": f"all that this site has said in round {round_}, and the run"},
        "Start it while its peers run, so that it hears from them what they remember:",
        "systemctl start fedd",
        "Let a round be committed (fedctl rounds) before you forget one anywhere again.",
        as_json={"round": round_, "state_dir": str(state)},
    )


def _state_dir(session: Session) -> Path:
    from config.settings import SettingsError, load

    try:
        return load(session.config or _SETTINGS).site.state_dir
    except SettingsError as error:
        raise CommandError(str(error), exit_code=Exit.USAGE) from error


def _check_state(state: Path) -> None:
    """Raises CommandError unless a daemon of this user has left its state there."""
    try:
        (state / "state.sqlite3").stat()
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


def _forget_round(state: Path, *, sums: bool) -> int:
    """Under the state's lock, with an entry before it and one behind it; the round's number."""
    from daemon.state.audit import AuditLog
    from daemon.state.audit_format import HEAD_FILE, AuditError
    from daemon.state.state_lock import StateError, locked
    from daemon.state.store import StoreError

    actor = f"uid:{os.getuid()}"
    try:
        with locked(state), closing(AuditLog(state / "audit", head_file=state / HEAD_FILE)) as log:
            what = "sums" if sums else "all"
            log.write(actor, "forget-round", "begun", what=what)
            try:
                round_ = _forget_sums(state) if sums else _forget(state)
            except (StoreError, OSError):
                log.write(actor, "forget-round", "refused or failed", what=what)
                raise
            log.write(actor, "forget-round", "done", what=what, round=round_)
    except (StateError, StoreError, AuditError, OSError) as error:
        raise CommandError(str(error)) from error
    return round_


def _forget_sums(state: Path) -> int:
    from daemon.state.store import Store

    with closing(Store(state / "state.sqlite3")) as store:
        return store.forget_sums()


def _forget(state: Path) -> int:
    from daemon.state.store import Store

    with closing(Store(state / "state.sqlite3")) as store:
        # First this site's integers of the round: those that were in a sum must be in no
        # other one. Without them it draws anew, and books that.
        if (kept := state / "kept").exists():
            shutil.rmtree(kept)
        return store.forget_round()


@command
def ca_rotate(
    session: Session,
    old: Annotated[Path, typer.Argument(metavar="OLD", help="The authority's folder.")],
    new: Annotated[
        Path, typer.Argument(metavar="NEW", help="A folder for its successor, or of `ca adopt`.")
    ],
    days: Annotated[int, typer.Option(min=1, help="How long the new one is valid.")] = 3650,
    window: Annotated[
        int, typer.Option(metavar="DAYS", min=1, help="How long certificates of both are good.")
    ] = 90,
) -> None:
    """Let a new authority follow the old one, which vouches for it; both are good for a while."""
    from crypto.identity.site import rotate_authority

    with setup.refusing():
        end: datetime = rotate_authority(old, new, days=days, window_days=window)
    certificate = new / "ca.crt"
    plain = {
        "directory": str(new),
        "certificate": str(certificate),
        "fingerprint_sha256": setup.fingerprint(setup.read_file(certificate)),
        "previous_fingerprint_sha256": setup.fingerprint(setup.read_file(old / "ca.crt")),
        "both_until": end.isoformat(timespec="seconds"),
    }
    setup.tell(
        session,
        plain,
        f"1. Send {certificate} to every site. There, with the certificate that it has:",
        "   fedctl site install DIR --certificate DIR/site.crt --authority ca.crt",
        "   systemctl reload fedd",
        f"   Until all have it, sign with --ca {old}: a site without it believes nothing else.",
        f"2. Then sign with --ca {new}: a manifest, and each site's next request",
        f"   (fedctl site renew), before {end:%Y-%m-%d}. Destroy {old / 'ca.key'} after that.",
    )


@command
def ca_adopt(
    session: Session,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for it.")],
    federation: Annotated[str, typer.Option(metavar="NAME", help="The federation's id.")],
    certificate: Annotated[
        Path, typer.Option(metavar="FILE", help="Its certificate, then what issued it, in PEM.")
    ],
    key: Annotated[Path, typer.Option(metavar="FILE", help="Its private key, mode 0600.")],
) -> None:
    """Use an authority that was made elsewhere, if it is what a federation needs."""
    from crypto.identity.site import adopt_authority

    with setup.refusing():
        adopt_authority(directory, federation, setup.read_file(certificate), key)
    installed = directory / "ca.crt"
    plain = {
        "federation": federation,
        "directory": str(directory),
        "certificate": str(installed),
        "fingerprint_sha256": setup.fingerprint(setup.read_file(installed)),
    }
    setup.tell(session, plain, "It signs sites and manifests like one of `fedctl ca init`.")
