"""fedctl manifest: the signed list of the federation's sites. No daemon is needed.

The functions without a session are the same steps for programs; the demo uses them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from daemon.fedctl.terminal.files import read_file, refusing, write_whole
from daemon.fedctl.terminal.options import Authority, Out, command
from daemon.fedctl.terminal.output import CommandError, Exit, Session, columns, plain_text, short

if TYPE_CHECKING:
    from rich.console import Console

    from crypto.identity.trust import Trust
    from peers.wire.manifest import FederationManifest

topic = typer.Typer(name="manifest", help="The signed list of the federation's sites.")

NamedRetriever = Annotated[
    str | None,
    typer.Option(
        metavar="DIGEST:VALUES",
        help="What rounds train, as `fedctl status` shows it. Default: the previous one's.",
    ),
]
NamedGenerator = Annotated[
    str | None,
    typer.Option(
        metavar="DIGEST:VALUES:FIRST",
        help="The language model that is trained together, as `fedctl status` shows it at a "
        "site that has it; none: no more. Default: the previous one's.",
    ),
]


def new_manifest(
    authority: Path,
    *,
    addresses: Mapping[str, str],
    previous: Path | None = None,
    enabled: Mapping[str, bool] | None = None,
    remove: Sequence[str] = (),
    version: int | None = None,
    faulty_sites: int | None = None,
    retriever: str | None = None,
    generator: str | None = None,
    first_round_to_come: bool = False,
    expelling: bool = False,
) -> bytes:
    """A signed manifest: the previous one's sites with these changes, one version on.

    ``addresses`` adds sites or moves them; ``enabled`` says who takes part;
    ``faulty_sites``, how many may lie: by default what the previous one tolerates, or 1.
    ``retriever``: what rounds train, DIGEST:VALUES; by default what the previous one names;
    ``generator`` likewise, DIGEST:VALUES:FIRST, or "none".
    More than one step from the previous one is signed only with the ``first_round_to_come``:
    later no site would put it in force (peers/rounds/manifest_in_force.py). One under which no
    round can run, only when ``expelling``: a site is shut out even if those left then wait.
    """
    from peers.wire.manifest import FederationManifest, ManifestSite, NamedModel, signed

    trust = _trust(authority / "ca.crt")
    before = _parsed(previous, trust) if previous is not None else None
    with refusing(exit_code=Exit.USAGE):
        sites = {site.id: site for site in before.sites} if before else {}
        for site, address in addresses.items():
            was_enabled = sites[site].enabled if site in sites else True
            sites[site] = ManifestSite(site, address, was_enabled)
        for site, wanted in (enabled or {}).items():
            known = _known(sites, site)
            sites[site] = ManifestSite(known.id, known.address, wanted)
        for site in remove:
            del sites[_known(sites, site).id]
        if version is None:
            version = before.version + 1 if before else 1
        elif before and version <= before.version:
            raise CommandError(
                f"version {version} is not above the previous one, {before.version}",
                "Sites keep the manifest with the greatest version: leave --version out",
                exit_code=Exit.USAGE,
            )
        ordered = tuple(sites[site] for site in sorted(sites))
        if faulty_sites is None:
            faulty_sites = before.tolerated if before else 1
        named = before.retriever if before else None
        if retriever is not None:
            named = NamedModel.parse(retriever)
        writes = before.generator if before else None
        if generator is not None:
            writes = None if generator == "none" else NamedModel.parse(generator)
        new = FederationManifest(trust.federation_id, version, ordered, faulty_sites, named, writes)
    if before and not first_round_to_come:
        _check_one_step(before, new)
    if new.objection and not expelling:
        raise CommandError(new.objection, exit_code=Exit.USAGE)
    if not expelling:
        _check_addresses(new)
    with refusing():
        return signed(new, authority)


def _check_addresses(new: FederationManifest) -> None:
    """Raises CommandError where two sites that take part are to be reached at one address."""
    known: dict[str, str] = {}
    for site in new.sites:
        if not site.enabled:
            continue  # its host may have become another site's
        other = known.setdefault(site.address.lower(), site.id)
        if other != site.id:
            raise CommandError(
                f"{other} and {site.id} have one address, {site.address}: whoever answers there "
                "is one of them, and the other is never reached",
                f"Give each its own: --site {site.id}=HOST:PORT",
                exit_code=Exit.USAGE,
            )


def write_manifest(out: Path, content: bytes, ca: Path) -> FederationManifest:
    """Put a signed manifest into a file; refuses to put it in the place of one as new.

    Two manifests of one version split a federation: sites that have the one refuse the other.
    """
    from peers.wire.manifest import parse_signed

    trust = _trust(ca / "ca.crt")
    with refusing():
        manifest = parse_signed(content, trust)
    there = _signed_before(out, trust)
    if there and there.version >= manifest.version and there.digest != manifest.digest:
        raise CommandError(
            f"{out} holds another manifest, version {there.version} ({short(there.digest.hex())}), "
            f"and this would be version {manifest.version}: a site that has one of two different "
            "manifests of one version refuses the other",
            f"Start from it: --previous {out}. If no site has got it, delete it first",
        )
    write_whole(out, content)
    return manifest


def _signed_before(out: Path, trust: Trust) -> FederationManifest | None:
    """The manifest of this authority that is in the file already; None: nothing, or no such."""
    from peers.wire.manifest import ManifestError, parse_signed

    if not out.is_file():
        return None
    try:
        return parse_signed(read_file(out), trust)
    except ManifestError:
        return None  # another federation's, or no manifest: it may be replaced


def _check_one_step(before: FederationManifest, new: FederationManifest) -> None:
    """Quorums of lists that are two steps apart need not share an honest site."""
    refusal = new.step_from(before)
    if refusal:
        raise CommandError(
            refusal,
            "`fedctl rounds show` tells of a round who signed it. Or, if no round is committed "
            "yet: --before-first-round",
            exit_code=Exit.USAGE,
        )


def _known(sites: Mapping[str, Any], site: str) -> Any:
    if site not in sites:
        raise CommandError(
            f"the manifest has no site {site}",
            "Name it with --site ID=HOST:PORT, or give the --previous manifest that has it",
            exit_code=Exit.USAGE,
        )
    return sites[site]


@topic.command("sign")
@command
def manifest_sign(
    session: Session,
    ca: Authority,
    out: Out,
    site: Annotated[
        list[str] | None,
        typer.Option(metavar="ID=HOST:PORT", help="Add a site, or move it. Repeatable."),
    ] = None,
    disable: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Let a site no longer take part. Repeatable."),
    ] = None,
    enable: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Let it take part again. Repeatable.")
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Strike a site off. Repeatable.")
    ] = None,
    previous: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The manifest to start from.")
    ] = None,
    version: Annotated[
        int | None, typer.Option(min=1, help="Default: one more than the previous.")
    ] = None,
    faulty_sites: Annotated[
        int | None,
        typer.Option(
            metavar="F",
            min=0,
            help="How many sites may lie in any message at any time; F + 2 must take part, and "
            "more than 3 F if liars are not to stop rounds. Default: the previous one's, else 1. "
            "0: the federation counts on every site keeping to the protocol. A crash costs no "
            "more than before; a lying coordinator can split the history.",
        ),
    ] = None,
    retriever: NamedRetriever = None,
    generator: NamedGenerator = None,
    first_round_to_come: Annotated[
        bool,
        typer.Option(
            "--before-first-round",
            help="Let several sites come or go at once, or F change by more than one or with "
            "them: sites take such a manifest as long as they have committed no round. No run may "
            "be under way.",
        ),
    ] = False,
) -> None:
    """Sign the list of sites, and how many may lie: the previous one with changes, or a first.

    Send it to every site (identity.manifest in its settings) and reload the daemons.
    """
    switched = dict.fromkeys(enable or (), True) | dict.fromkeys(disable or (), False)
    content = new_manifest(
        ca,
        addresses=dict(_address(item) for item in site or ()),
        previous=previous,
        enabled=switched,
        remove=remove or (),
        version=version,
        faulty_sites=faulty_sites,
        retriever=retriever,
        generator=generator,
        first_round_to_come=first_round_to_come,
    )
    plain = {**plain_manifest(write_manifest(out, content, ca)), "file": str(out)}
    session.result(plain, lambda console: _show_manifest(console, plain))


@topic.command("show")
@command
def manifest_show(
    session: Session,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A manifest.json.")],
    authority: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The authority's certificate.",
            show_default="ca.crt beside FILE or in identity/ beside it",
        ),
    ] = None,
) -> None:
    """Verify a manifest's signature and show its sites; refuses one that is not the authority's."""
    manifest = verified(file, authority or _authority_near(file))
    plain = {**plain_manifest(manifest), "file": str(file)}
    session.result(plain, lambda console: _show_manifest(console, plain))


def _authority_near(manifest: Path) -> Path:
    read_file(manifest)  # where nobody may look, that is why there is no ca.crt
    folder = manifest.parent
    for candidate in (folder / "ca.crt", folder / "identity" / "ca.crt"):
        if candidate.is_file():
            return candidate
    raise CommandError(
        f"no ca.crt near {manifest} to verify it with",
        "Name the authority's certificate with --authority",
        exit_code=Exit.USAGE,
    )


def verified(file: Path, authority: Path) -> FederationManifest:
    """The manifest in a file; CommandError unless the authority of that ca.crt signed it."""
    return _parsed(file, _trust(authority))


def _parsed(file: Path, trust: Trust) -> FederationManifest:
    from peers.wire.manifest import parse_signed

    with refusing(file):
        return parse_signed(read_file(file), trust)


def _trust(authority: Path) -> Trust:
    from crypto.identity.trust import Trust

    with refusing(authority):
        return Trust.from_pem(read_file(authority))


def _address(item: str) -> tuple[str, str]:
    site, equals, address = item.partition("=")
    if not equals or not site or ":" not in address:
        raise CommandError(
            f"--site {item} is not ID=HOST:PORT",
            "For example --site north=hanse.north.example:7443",
            exit_code=Exit.USAGE,
        )
    return site, address


def plain_manifest(manifest: FederationManifest) -> dict[str, Any]:
    """For machines."""
    return {
        "federation": manifest.federation_id,
        "version": manifest.version,
        "digest": manifest.digest.hex(),
        "sites": [
            {"id": site.id, "address": site.address, "enabled": site.enabled}
            for site in manifest.sites
        ],
        "faulty_sites": manifest.tolerated,
        "quorum": manifest.quorum,
        "objection": manifest.objection,
        "retriever": str(manifest.retriever or ""),
        "generator": str(manifest.generator or ""),
    }


def _show_manifest(console: Console, plain: Mapping[str, Any]) -> None:
    summary = (
        f"{plain['federation']}, version {plain['version']}, digest {short(plain['digest'])}, "
        f"signature good: {plain['file']}"
    )
    console.print(plain_text(summary), soft_wrap=True)
    console.print(plain_text(what_it_bears(plain)), soft_wrap=True)
    if plain["retriever"]:
        console.print(plain_text(f"Rounds train retriever {plain['retriever']}."), soft_wrap=True)
    if plain["generator"]:
        text = f"Rounds of their own train generator {plain['generator']}."
        console.print(plain_text(text), soft_wrap=True)
    table = columns("site", "address", "takes part")
    for site in plain["sites"]:
        table.add_row(site["id"], plain_text(site["address"]), "yes" if site["enabled"] else "no")
    console.print(table)


def what_it_bears(plain: Mapping[str, Any]) -> str:
    """One line: who decides, how many sites may be down, and how many may lie at which price."""
    faulty, quorum = plain["faulty_sites"], plain["quorum"]
    sites = sum(site["enabled"] for site in plain["sites"])
    if plain["objection"]:
        return f"No round runs: {plain['objection']}."
    down = f"faulty_sites = {faulty}: {quorum} of {sites} decide; {sites - quorum} may be down"
    if faulty == 0:
        return (
            f"{down}, none may lie: the federation counts on every site keeping to the protocol. "
            "A crash costs no more than before; a lying coordinator can split the history."
        )
    # n > 3f: then a quorum is left, and more than f of it honest, when f are silent.
    live = (
        f"nor stop rounds (in ckks, of {2 * faulty + 2} participants or more)"
        if sites > 3 * faulty
        else f"but can stop rounds until expelled: for that not to be, {3 * faulty + 1} take part"
    )
    return f"{down}; {faulty} may lie and not split the history, {live}."
