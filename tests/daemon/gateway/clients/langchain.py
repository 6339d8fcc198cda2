"""LangChain's OpenAI integration: an answer with citations, a stream, vectors. As openai_sdk.py."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Any

from langchain_openai import ChatOpenAI, OpenAIEmbeddings


def main(gateway: str, token: str, question: str, *_stdio: str) -> None:
    url = f"{gateway}/v1"
    chat: Any = ChatOpenAI(model="hanse", base_url=url, api_key=token)
    message = chat.invoke(question)
    streamed = "".join(str(piece.content) for piece in chat.stream(question))
    # Its message has the marks and not what they cite, which OpenAI's client beneath it has.
    asked: Any = {"model": "hanse", "messages": [{"role": "user", "content": question}]}
    sources = chat.root_client.chat.completions.create(**asked).choices[0].message.annotations
    # Without the fourth option it sends numbers of OpenAI's own tokens instead of texts.
    embeddings: Any = OpenAIEmbeddings(
        model="hanse-embedding",
        base_url=url,
        api_key=token,
        check_embedding_ctx_length=False,
        chunk_size=64,
    )
    vectors = [embeddings.embed_query(question), *embeddings.embed_documents(["else"])]
    assert streamed == message.content
    print(
        json.dumps(
            {
                "version": version("langchain-openai"),
                "answer": message.content,
                "cited": [one.url_citation.model_dump() for one in sources],
                "vectors": [len(one) for one in vectors],
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
