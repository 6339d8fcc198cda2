"""OpenAI's own client, of any major version: an answer with citations, a stream, vectors.

Run by `python -m tests.daemon.gateway.clients` in an environment that has nothing of ours:
the address, a token and a question are its words; a line of JSON is what it says.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import openai


def main(gateway: str, token: str, question: str, *_stdio: str) -> None:
    url = f"{gateway}/v1"
    client = openai.OpenAI(base_url=url, api_key=token)
    asked: Any = {"model": "hanse", "messages": [{"role": "user", "content": question}]}
    message: Any = client.chat.completions.create(**asked).choices[0].message
    streamed: list[Any] = [
        e for e in client.chat.completions.create(**asked, stream=True) if e.choices
    ]
    pieces = [event.choices[0].delta for event in streamed]
    vectors = client.embeddings.create(model="hanse-embedding", input=[question, "else"]).data
    annotations = message.model_dump()["annotations"]
    assert "".join(piece.content or "" for piece in pieces) == message.content
    assert pieces[-1].model_dump()["annotations"] == annotations
    print(
        json.dumps(
            {
                "version": openai.__version__,
                "answer": message.content,
                "cited": [one["url_citation"] for one in annotations],
                "vectors": [len(one.embedding) for one in vectors],
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
