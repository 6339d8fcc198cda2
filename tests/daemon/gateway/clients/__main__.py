"""`make test-clients`: each client that people have asks a real site, and gets citations.

python -m tests.daemon.gateway.clients .venv/.clients-openai-3 .venv/.clients-mcp-2
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.daemon.gateway.gates import Gate, gateway, listening
from tests.support.federation import LiveFederation

_HERE = Path(__file__).parent
_QUESTION = "who looks after the anchor winch of elm?"


# How an agent's program starts ours; the token is in its environment.
_STDIO = (sys.executable, "-m", "daemon.fedctl", "mcp", "--gateway")
_SCRIPTS = {"openai": "openai_sdk.py", "langchain": "langchain.py", "mcp": "mcp_sdk.py"}
_CITED = re.compile(r"\[\d+\]")


async def main(environments: list[Path]) -> int:
    """0: all were answered."""
    with tempfile.TemporaryDirectory(prefix="hanse-") as folder:
        root, tables = Path(folder), listening()
        async with LiveFederation.start(
            root, ["elm"], without=["fir", "oak"], tables=tables
        ) as live:
            await live.ingest_all()
            async with gateway(live.sites["elm"]) as gate:
                token = await gate.token("ask", "search", "embed")
                asking = [asyncio.to_thread(_asks, one, gate, token) for one in environments]
                told = [await one for one in [*asking, asyncio.to_thread(_curls, gate, token)]]
                return told.count(False)


def _asks(environment: Path, gate: Gate, token: str) -> bool:
    """Whether the client of that environment is answered, with citations."""
    name = environment.name.removeprefix(".clients-")
    words = [gate.url, token, _QUESTION, *_STDIO]
    script = _HERE / _SCRIPTS[name.partition("-")[0]]
    done = subprocess.run(
        [environment / "bin" / "python", "-I", script, *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        print(f"{name}: failed\n{done.stderr}")
        return False
    told: dict[str, Any] = json.loads(done.stdout)
    cited = [told["answer"][one["start_index"] : one["end_index"]] for one in told["cited"]]
    return _shown(f"{name} ({told['version']})", told["answer"], cited)


def _curls(gate: Gate, token: str) -> bool:
    """Whether curl is: the answer, what is found, and the agents' tool, each with what it takes."""
    call = {"name": "ask", "arguments": {"question": _QUESTION}}
    asked: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {
            "model": "hanse",
            "messages": [{"role": "user", "content": _QUESTION}],
        },
        "/v1/search": {"question": _QUESTION, "top_k": 1},
        "/mcp": {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call},
    }
    told = []
    for path, body in asked.items():
        words = ("-H", f"Authorization: Bearer {token}", "--json", json.dumps(body))
        done = subprocess.run(
            ["curl", "-sS", "--fail-with-body", "--max-time", "60", f"{gate.url}{path}", *words],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            print(f"curl: {path} failed\n{done.stderr}{done.stdout}")
            return False
        told.append(json.loads(done.stdout))
    answer = told[0]["choices"][0]["message"]["content"]
    found = told[1]["passages"][0]["text"]
    same = told[2]["result"]["structuredContent"]["answer"] == answer
    return _shown("curl", answer, _CITED.findall(answer)) and same and "anchor winch" in found


def _shown(name: str, answer: str, cited: list[str]) -> bool:
    print(f"{name}: {answer!r} cites {' '.join(cited) or 'nothing'}")
    return "anchor winch" in answer and bool(cited) and all(map(_CITED.fullmatch, cited))


if __name__ == "__main__":
    sys.exit(asyncio.run(main([Path(word).absolute() for word in sys.argv[1:]])))
