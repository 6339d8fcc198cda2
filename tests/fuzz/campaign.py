"""All targets in turn, each for its share of the time, and a table of what came of it."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.table import CORPUS, Target

WORK = Path(".fuzz")  # what a run finds, and goes on from; not in the repository

_HANG_S = 20  # of wall-clock time: the machine may be busy
_MEMORY_MIB = 768
_REPORT_S = 30.0
_STATE = re.compile(r"#(\d+)\s.*cov: (\d+) ft: (\d+) corp: (\d+)/.*?(?:rss: (\d+)Mb)?$")
_PEAK = re.compile(r"stat::peak_rss_mb:\s+(\d+)")


@dataclass
class Outcome:
    """What libFuzzer said of one target."""

    target: str
    seconds: float = 0.0
    inputs: int = 0
    coverage: int = 0
    features: int = 0
    corpus: int = 0
    peak_mib: int = 0
    findings: list[Path] = field(default_factory=list)
    failed: bool = False

    @property
    def state(self) -> str:
        rate = self.inputs / max(self.seconds, 0.001)
        return (
            f"{self.inputs:>10,}  {rate:>8,.0f}  {self.corpus:>6}  {self.coverage:>5}  "
            f"{self.features:>6}  {self.peak_mib:>5}  {len(self.findings):>8}"
        )

    def read(self, log: str) -> None:
        for line in log.splitlines():
            if match := _STATE.match(line):
                self.inputs, self.coverage, self.features, self.corpus = map(
                    int, match.groups()[:4]
                )
                self.peak_mib = max(self.peak_mib, int(match[5] or 0))
            elif match := _PEAK.match(line):
                self.peak_mib = max(self.peak_mib, int(match[1]))


def run(targets: Sequence[Target], seconds: float) -> int:
    """1 if anything was found; the inputs lie in the work folder, and how to replay is printed."""
    share = max(1, round(seconds / len(targets)))
    print(f"{len(targets)} targets, {share} s each; what they find: {WORK}/", flush=True)
    outcomes = [_fuzz(target, share) for target in targets]
    print("\ntarget           inputs  inputs/s  corpus  edges  features  MiB  findings")
    for outcome in outcomes:
        print(f"{outcome.target:12} {outcome.state}")
    total = sum(outcome.inputs for outcome in outcomes)
    spent = sum(outcome.seconds for outcome in outcomes)
    print(f"{total:,} inputs in {spent / 60:.1f} minutes")
    for outcome in outcomes:
        for path in outcome.findings:
            print(f"replay: python -m tests.fuzz replay {outcome.target} {path}")
        if outcome.failed and not outcome.findings:
            print(f"{outcome.target} ended without a word: see {_log_of(outcome.target)}")
    return int(any(outcome.failed for outcome in outcomes))


def _log_of(target: str) -> Path:
    return WORK / f"{target}.log"


def _fuzz(target: Target, seconds: int) -> Outcome:
    folder, findings = WORK / target.name, WORK / "findings" / target.name
    for needed in (folder, findings):
        needed.mkdir(parents=True, exist_ok=True)
    known = set(findings.iterdir())
    words = [sys.executable, "-m", "tests.fuzz.engine", target.name]
    words += [str(folder), str(CORPUS / target.name)]
    words += [f"-max_total_time={seconds}", f"-timeout={_HANG_S}", f"-rss_limit_mb={_MEMORY_MIB}"]
    words += [f"-artifact_prefix={findings}/", "-print_final_stats=1", "-reload=0"]
    outcome, log = Outcome(target.name), _log_of(target.name)
    began = reported = time.monotonic()
    with log.open("wb") as told, subprocess.Popen(words, stdout=told, stderr=told) as process:
        while process.poll() is None:
            time.sleep(0.2)
            outcome.seconds = time.monotonic() - began
            if time.monotonic() - reported > _REPORT_S:
                reported = time.monotonic()
                _report(outcome, log)
    outcome.failed = process.returncode != 0
    outcome.findings = sorted(set(findings.iterdir()) - known)
    _report(outcome, log)
    return outcome


def _report(outcome: Outcome, log: Path) -> None:
    outcome.read(log.read_text(encoding="utf-8", errors="replace"))
    print(f"{outcome.target:12} {outcome.seconds:>5.0f} s {outcome.state}", flush=True)
