"""`make test-clients`: each client that people have asks a real site, and gets citations.

python -m tests.daemon.gateway.clients .venv/.clients-openai-3 .venv/.clients-langchain
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.daemon.gateway.gates import Gate, gateway, listening
from tests.support.federation import LiveFederation

_HERE = Path(__file__).parent
_QUESTION = "who looks after the anchor winch of elm?"


async def main(environments: list[Path]) -> int:
    """0: all were answered."""
    with tempfile.TemporaryDirectory(prefix="hanse-") as folder:
        root, tables = Path(folder), listening()
        async with LiveFederation.start(
            root, ["elm"], without=["fir", "oak"], tables=tables
        ) as live:
            await live.ingest_all()
            async with gateway(live.sites["elm"]) as gate:
                token = await gate.token("ask", "embed")
                return sum(
                    [not await asyncio.to_thread(_asks, one, gate, token) for one in environments]
                )


def _asks(environment: Path, gate: Gate, token: str) -> bool:
    script = _HERE / ("langchain.py" if "langchain" in environment.name else "openai_sdk.py")
    words = (f"{gate.url}/v1", token, _QUESTION)
    done = subprocess.run(
        [environment / "bin" / "python", "-I", script, *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        print(f"{environment.name}: failed\n{done.stderr}")
        return False
    told: dict[str, Any] = json.loads(done.stdout)
    cited = [told["answer"][one["start_index"] : one["end_index"]] for one in told["cited"]]
    good = bool(
        "anchor winch" in told["answer"] and cited and all(mark[0] == "[" for mark in cited)
    )
    name = f"{environment.name.removeprefix('.clients-')} ({told['version']})"
    print(f"{name}: {told['answer']!r} cites {' '.join(cited) or 'nothing'}")
    return good


if __name__ == "__main__":
    sys.exit(asyncio.run(main([Path(word).absolute() for word in sys.argv[1:]])))
