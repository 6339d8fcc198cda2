"""Real institutions: the federation must find their passages better than before.

Needs the MedQuAD folders (HANSE_DATA, or a `shared/data` beside the project);
skips with the reason where they are absent. The test pairs' topics are in none
of the training pairs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("HANSE_DATA", ROOT.parent / "shared" / "data")) / "medquad"
SITES = ("nhlbi", "niddk", "ninds")


@pytest.mark.data
@pytest.mark.federation
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(not DATA.is_dir(), reason=f"no data at {DATA} (set HANSE_DATA)")
def test_three_institutes_find_their_passages_better_after_a_few_rounds() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "daemon.fedctl", "demo", "--json",
         "--data", str(DATA), "--sites", ",".join(SITES), "--rounds", "4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    gains = [site["after"]["mrr_at_10"] - site["before"]["mrr_at_10"] for site in told["sites"]]
    print({site["id"]: (site["before"], site["after"]) for site in told["sites"]})
    assert sum(gains) / len(gains) >= 0.08
    assert min(gains) > 0
    assert len({one["coordinator"] for one in told["rounds"]}) == 3
