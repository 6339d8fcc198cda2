"""What `make fuzz` runs, and what one does with what it finds. See --help."""

from __future__ import annotations

import argparse
import hashlib
import resource
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.campaign import WORK, run
from tests.fuzz.reach import keep
from tests.fuzz.table import CORPUS, TARGETS, Target


def main() -> int:
    """The exit status: 1 where something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="fuzz every target for its share of the time")
    running.add_argument("--minutes", type=float, default=10.0, help="for all targets together")
    running.add_argument("--only", nargs="*", choices=TARGETS, default=list(TARGETS))
    replaying = commands.add_parser("replay", help="give inputs to a target once more")
    replaying.add_argument("target", choices=TARGETS)
    replaying.add_argument("files", nargs="*", type=Path, help="the kept ones, if none is named")
    keeping = commands.add_parser("keep", help="take into the corpus what reaches more")
    keeping.add_argument("--only", nargs="*", choices=TARGETS, default=list(TARGETS))
    commands.add_parser("seeds", help="write honest inputs, where a target has no corpus")
    chosen = parser.parse_args()
    match chosen.command:
        case "run":
            return run([TARGETS[name] for name in chosen.only], chosen.minutes * 60)
        case "replay":
            return replay(TARGETS[chosen.target], chosen.files)
        case "keep":
            for name in chosen.only:
                keep(TARGETS[name], WORK / name)
        case "seeds":
            write_seeds()
    return 0


def replay(target: Target, files: Sequence[Path]) -> int:
    """Each file's verdict; 1 if one was a finding."""
    found = 0
    for path in files or target.files():
        try:
            verdict = "accepted" if target.take(path.read_bytes()) else "refused"
        except Exception:
            traceback.print_exc()
            verdict, found = "A FINDING", 1
        print(f"{verdict:9} {path}", flush=True)
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB")
    return found


def write_seeds() -> None:
    """Only where there is no corpus yet: signatures differ each time they are made."""
    for target in TARGETS.values():
        folder = CORPUS / target.name
        if not folder.exists():
            folder.mkdir(parents=True)
            for seed in target.seeds():
                (folder / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)


if __name__ == "__main__":
    sys.exit(main())
