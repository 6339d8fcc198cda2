"""What people's programs get of a real gateway before a real daemon: OpenAI's client, and curl."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from prometheus_client.parser import text_string_to_metric_families

from daemon.process.metrics import METRICS
from tests.daemon.gateway.gates import Gate

pytestmark = [
    pytest.mark.federation,
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(300),
]

WINCH = "who looks after the anchor winch of elm?"


def client(gate: Gate, token: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gate.url}/v1", api_key=token, max_retries=0)


def asking(*said: str) -> list[ChatCompletionMessageParam]:
    """A conversation: the user's messages, and something that was answered between them."""
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": "Be brief."}]
    for text in said:
        messages += [
            {"role": "user", "content": text},
            {"role": "assistant", "content": "Something. [1]"},
        ]
    return messages[:-1]


async def curl(gate: Gate, path: str, *words: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body."""
    process = await asyncio.create_subprocess_exec(
        *("curl", "-si", "--max-time", "60", f"{gate.url}{path}", *words),
        stdout=asyncio.subprocess.PIPE,
    )
    told, _ = await process.communicate()
    head, _, body = told.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(first.split()[1]), headers, body


# ---- answers -----------------------------------------------------------------------


async def test_openai_s_client_gets_an_answer_with_citations(gate: Gate) -> None:
    asked = client(gate, await gate.token("ask"))
    reply = await asked.chat.completions.create(model="hanse", messages=asking(WINCH))
    (choice,) = reply.choices
    text, cited = choice.message.content or "", choice.message.annotations or []
    assert "anchor winch" in text
    assert choice.finish_reason == "stop"
    assert cited
    for one in cited:
        where = one.url_citation
        assert text[where.start_index : where.end_index].startswith("[")
    assert cited[0].url_citation.title == "Anchor Winch at elm"
    assert cited[0].url_citation.url.startswith("hanse:/documents/elm/anchor-winch?")
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert (await asked.models.list()).data[0].id == reply.model


async def test_a_stream_is_the_same_answer_with_citations_at_its_end(gate: Gate) -> None:
    asked = client(gate, await gate.token("ask"))
    whole = await asked.chat.completions.create(model="hanse", messages=asking(WINCH))
    events = [
        event
        async for event in await asked.chat.completions.create(
            model="hanse",
            messages=asking(WINCH),
            stream=True,
            stream_options={"include_usage": True},
        )
    ]
    said = [event.choices[0] for event in events if event.choices]
    assert "".join(one.delta.content or "" for one in said) == whole.choices[0].message.content
    last: Any = said[-1].delta
    told = whole.choices[0].message.annotations or []
    assert last.annotations == [one.model_dump() for one in told]
    assert [one.finish_reason for one in said if one.finish_reason] == ["stop"]
    assert events[-1].usage == whole.usage
    assert len({event.id for event in events}) == 1


async def test_without_being_asked_a_stream_tells_no_usage(gate: Gate) -> None:
    token = await gate.token("ask")
    body = json.dumps({"model": "hanse", "messages": asking(WINCH), "stream": True})
    status, headers, told = await curl(
        gate, "/v1/chat/completions", "-H", f"Authorization: Bearer {token}", "-d", body
    )
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    events = told.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all("choices" in json.loads(one.removeprefix("data: ")) for one in events[:-2])
    assert "usage" not in told.decode()


async def test_a_question_that_goes_on_is_asked_with_the_one_before(gate: Gate) -> None:
    asked = client(gate, await gate.token("ask"))
    alone = await asked.chat.completions.create(model="hanse", messages=asking("and who?"))
    both = await asked.chat.completions.create(model="hanse", messages=asking(WINCH, "and who?"))
    assert "anchor winch" in (both.choices[0].message.content or "")
    assert alone.usage is not None
    assert both.usage is not None
    assert alone.usage.prompt_tokens == 2
    assert both.usage.prompt_tokens == len(WINCH.split()) + 2


async def test_a_chat_program_s_errands_are_not_answered_from_documents(gate: Gate) -> None:
    asked = client(gate, await gate.token("ask"))
    task = f"### Task:\nSuggest 3-5 follow-up questions …\n<chat_history>{WINCH}</chat_history>"
    reply = await asked.chat.completions.create(model="hanse", messages=asking(task))
    told = json.loads(reply.choices[0].message.content or "")
    assert (told["follow_ups"], told["tags"]) == ([], [])
    assert not reply.choices[0].message.annotations
    with pytest.raises(openai.AuthenticationError):
        await client(gate, "wrong").chat.completions.create(model="hanse", messages=asking(task))


async def test_text_in_parts_is_asked_and_pictures_are_refused(gate: Gate) -> None:
    asked = client(gate, await gate.token("ask"))
    reply = await asked.chat.completions.create(
        model="hanse", messages=[{"role": "user", "content": [{"type": "text", "text": WINCH}]}]
    )
    assert "anchor winch" in (reply.choices[0].message.content or "")
    picture: Any = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]
    with pytest.raises(openai.BadRequestError, match="only text"):
        await asked.chat.completions.create(
            model="hanse", messages=[{"role": "user", "content": picture}]
        )


# ---- vectors -----------------------------------------------------------------------


async def test_embeddings_as_numbers_and_as_base64(gate: Gate) -> None:
    asked = client(gate, await gate.token("embed"))
    texts = ["anchor winch", "beacon lamp", "anchor winch"]
    decoded = await asked.embeddings.create(model="hanse-embedding", input=texts)
    numbers = await asked.embeddings.create(
        model="hanse-embedding", input=texts, encoding_format="float"
    )
    raw = await asked.embeddings.create(
        model="hanse-embedding", input=texts, encoding_format="base64"
    )
    rows = [one.embedding for one in decoded.data]
    for row, other in zip(rows, numbers.data, strict=True):
        assert row == pytest.approx(other.embedding)
    assert rows[0] == pytest.approx(rows[2], abs=1e-6)
    assert rows[0] != pytest.approx(rows[1], abs=1e-3)
    assert sum(value * value for value in rows[0]) == pytest.approx(1, abs=1e-4)
    packed: Any = raw.data[0].embedding
    octets = base64.b64decode(packed)
    assert struct.unpack(f"<{len(octets) // 4}f", octets) == pytest.approx(rows[0])
    single = await asked.embeddings.create(model="hanse-embedding", input="anchor winch")
    assert len(single.data) == 1


async def test_a_length_that_vectors_do_not_have_is_refused(gate: Gate) -> None:
    asked = client(gate, await gate.token("embed"))
    with pytest.raises(openai.BadRequestError, match="leave dimensions out"):
        await asked.embeddings.create(model="hanse-embedding", input="x", dimensions=7)
    for wrong in ([], ["x"] * 65):
        with pytest.raises(openai.BadRequestError, match="texts"):
            await asked.embeddings.create(model="hanse-embedding", input=wrong)


# ---- what is refused ---------------------------------------------------------------


async def test_errors_are_what_openai_s_client_knows(gate: Gate) -> None:
    ask, embed = await gate.token("ask"), await gate.token("embed")
    with pytest.raises(openai.AuthenticationError, match="no such token"):
        await client(gate, "wrong").models.list()
    with pytest.raises(openai.PermissionDeniedError, match="needs the scope 'ask'"):
        await client(gate, embed).chat.completions.create(model="hanse", messages=asking(WINCH))
    with pytest.raises(openai.PermissionDeniedError, match="needs the scope 'embed'"):
        await client(gate, ask).embeddings.create(model="hanse-embedding", input="x")
    with pytest.raises(openai.NotFoundError, match="no model of that name"):
        await client(gate, ask).chat.completions.create(model="gpt-5", messages=asking(WINCH))
    with pytest.raises(openai.BadRequestError, match="longer than 16 KiB"):
        long = asking("x" * 20_000)
        await client(gate, ask).chat.completions.create(model="hanse", messages=long)
    with pytest.raises(openai.BadRequestError, match="no question"):
        await client(gate, ask).chat.completions.create(model="hanse", messages=asking(" "))


async def test_a_token_sees_the_models_that_it_is_for(gate: Gate) -> None:
    for scopes in (("ask",), ("embed",), ("metrics",), ("ask", "embed")):
        listed = await client(gate, await gate.token(*scopes)).models.list()
        models = [one.id for one in listed.data]
        known = {"ask": "hanse", "embed": "hanse-embedding"}
        assert models == [known[one] for one in scopes if one in known]
        assert {one.owned_by for one in listed.data} <= {"elm"}


async def test_what_is_not_there_is_said_in_openai_s_form(gate: Gate) -> None:
    for path in (
        "/index.html",
        "/v1",
        "/v1/completions",
        "/v1/files",
        "/docs",
        "/v1/models/../../etc",
    ):
        status, headers, body = await curl(gate, path, "--path-as-is")
        assert (status, headers["content-type"]) == (404, "application/json")
        assert json.loads(body)["error"]["code"] == "not_found"
    status, _, body = await curl(gate, "/v1/models", "-X", "DELETE")
    assert (status, json.loads(body)["error"]["code"]) == (405, "method_not_allowed")


# ---- for who watches ---------------------------------------------------------------


async def test_health_says_ok(gate: Gate) -> None:
    status, headers, body = await curl(gate, "/health")
    assert (status, json.loads(body)) == (200, {"status": "ok"})
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["content-security-policy"].startswith("default-src 'none'")
    assert "server" not in headers
    assert not [name for name in headers if name.startswith("access-control-")]


async def test_metrics_are_what_prometheus_reads(gate: Gate) -> None:
    status, headers, body = await curl(gate, "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {one.name: one for one in text_string_to_metric_families(body.decode())}
    assert set(families) == {metric.name for metric in METRICS}
    status_of_fedd = await gate.site.status()
    read = {name: one.samples[0].value for name, one in families.items()}
    assert read["hanse_documents"] == status_of_fedd.documents
    assert families["hanse_questions"].type == "counter"
    assert read["hanse_questions"] >= 0
