"""People say what answers a question; an operator looks, and only then it is a pair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from daemon.fedctl.transfer.sending import Naming, send
from tests.daemon.gateway.gates import Gate
from tests.daemon.gateway.pages.conftest import KEEL, MANUAL, browsing
from tests.live.test_operations import fedctl

pytestmark = [
    pytest.mark.federation,
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(300),
]


async def shown(gate: Gate, *words: str) -> Any:
    code, out, err = await fedctl(gate.site, *words, "--json")
    assert code == 0, err
    return json.loads(out)


async def ingested(gate: Gate, folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        (folder / f"{name}.md").write_text(text)
    sent = await send(gate.site.stub, [folder], lambda _: None, Naming("hold/"))
    assert not sent.problems


def files_with(word: bytes, folder: Path) -> set[str]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {file.name for file in files if word in file.read_bytes().lower()}


def a_vote(question: str, document: str, **more: str) -> dict[str, str]:
    return {"question": question, "document": document, "passage": "", "answers": "yes"} | more


async def posted(gate: Gate, token: str, form: dict[str, str], **headers: str) -> httpx.Response:
    async with browsing(gate, token) as client:
        return await client.post("/propose", data=form, headers=headers)


async def test_a_yes_is_a_validation_pair_once_the_operator_says_so(
    gate: Gate, tmp_path: Path
) -> None:
    await ingested(gate, tmp_path, hatch="The starboard hatch is painted ochre.")
    token = await gate.token("ask", "search", "propose", name="ada")
    question = "What colour is the starboard hatch?"
    async with browsing(gate, token) as client:
        page = (await client.post("/search", data={"question": question})).text
        assert 'action="/propose"' in page
        form = page[page.index('action="/propose"') :]
        passage = form.partition('name="passage" value="')[2].partition('"')[0]
        assert passage.startswith("hold/hatch.md"), "the passage is named"
        reply = await client.post(
            "/propose", data=a_vote(question, "hold/hatch.md", passage=passage)
        )
    assert (reply.status_code, "Noted" in reply.text) == (200, True)
    before = (await gate.site.status()).pairs_valid
    (one,) = (await shown(gate, "pairs", "review"))["proposals"]
    assert (one["question"], one["document_id"]) == (question, "hold/hatch.md")
    assert one["passage"] == "The starboard hatch is painted ochre."
    assert [(vote["token"], vote["answers"]) for vote in one["votes"]] == [("ada", True)]
    assert (await shown(gate, "pairs", "list"))["proposals"] == 1
    decided = await shown(gate, "pairs", "review", "--accept", one["id"])
    assert (decided["accepted"], decided["waiting"]) == (1, 0)
    assert (await gate.site.status()).pairs_valid == before + 1
    assert (await shown(gate, "pairs", "review"))["proposals"] == []
    exported = tmp_path / "out.jsonl"
    await shown(gate, "documents", "export", "hold/hatch.md", "--out", str(exported))
    pairs = [line for line in map(json.loads, exported.open()) if "query" in line]
    assert [(pair["query"], pair["split"]) for pair in pairs] == [(question, "valid")]
    state = str(gate.site.folder / "state")
    _, log, _ = await fedctl(gate.site, "audit", "show", "--state-dir", state, "--json")
    assert '"token:ada"' in log
    assert '"decide-proposals"' in log
    for word in ("starboard", "hatch", question):
        assert word not in log
        assert word not in gate.site.log + gate.log


async def test_what_is_rejected_or_whose_document_goes_is_in_no_file(
    gate: Gate, tmp_path: Path
) -> None:
    state = gate.site.folder / "state"
    await ingested(gate, tmp_path, keel="The keel is oak.", mast="The mast is pine.")
    token = await gate.token("propose", name="bob")
    for question, document in (
        ("is the xylopyra oak?", "hold/keel.md"),
        ("is the yttrocran pine?", "hold/mast.md"),
        ("is the zwieback oak?", "hold/keel.md"),
    ):
        reply = await posted(gate, token, a_vote(question, document, answers="no"))
        assert reply.status_code == 200, reply.text
    ids = {
        one["question"]: one["id"] for one in (await shown(gate, "pairs", "review"))["proposals"]
    }
    assert files_with(b"xylopyra", state) == {"proposals.jsonl"}
    code, out, _ = await fedctl(
        gate.site, "pairs", "review", "--accept", ids["is the zwieback oak?"]
    )
    assert (code, "nobody says that the document answers it" in " ".join(out.split())) == (3, True)
    await shown(gate, "pairs", "review", "--reject", ids["is the xylopyra oak?"])
    assert files_with(b"xylopyra", state) == set()
    await shown(gate, "documents", "remove", "hold/mast.md", "--yes")
    assert files_with(b"yttrocran", state) == set()
    assert files_with(b"zwieback", state) == {"proposals.jsonl"}
    told = await shown(gate, "pairs", "review", "--forget", "bob")
    assert (told["forgotten"], told["waiting"]) == (1, 0)
    assert files_with(b"zwieback", state) == set()
    counted = json.loads((await fedctl(gate.site, "status", "--json"))[1])["counted"]
    assert counted["hanse_votes_against"] >= 3


async def test_a_program_says_it_under_v1(gate: Gate) -> None:
    secret = await gate.token("propose", name="script")
    headers = {"authorization": f"Bearer {secret}"}
    async with httpx.AsyncClient(base_url=gate.url, headers=headers, timeout=60) as client:
        said = {"question": KEEL, "document_id": MANUAL, "answers": True}
        assert (await client.post("/v1/feedback", json=said)).status_code == 204
        for wrong in ({"answers": "yes"}, {"document_id": ""}, {"more": 1}):
            assert (await client.post("/v1/feedback", json=said | wrong)).status_code == 400
        gone = await client.post("/v1/feedback", json=said | {"document_id": "nowhere"})
        assert (gone.status_code, "no document 'nowhere' here" in gone.text) == (404, True)
        other = {"passage_id": "deck/manual.pdf@0.0"}
        assert (await client.post("/v1/feedback", json=said | other)).status_code == 400
    (one,) = (await shown(gate, "pairs", "review"))["proposals"]
    assert (one["question"], one["passage_id"]) == (KEEL, "")
    await shown(gate, "pairs", "review", "--reject", one["id"])


async def test_who_may_not_propose_sees_no_form_and_is_refused(gate: Gate) -> None:
    token = await gate.token("ask", "search")
    async with browsing(gate, token) as client:
        page = (await client.post("/ask", data={"question": KEEL})).text
        assert "/propose" not in page
        refused = await client.post("/propose", data=a_vote(KEEL, MANUAL))
        assert (refused.status_code, "needs the scope" in refused.text) == (403, True)
        assert (await client.get("/propose")).status_code == 303
    assert (await shown(gate, "pairs", "review"))["proposals"] == []


@pytest.mark.parametrize("site", ["cross-site", "same-site", "none"])
async def test_another_site_s_form_proposes_nothing(gate: Gate, site: str) -> None:
    token = await gate.token("propose")
    refused = await posted(gate, token, a_vote(KEEL, MANUAL), **{"sec-fetch-site": site})
    assert refused.status_code == 403
    unclear = await posted(gate, token, a_vote(KEEL, MANUAL, answers="maybe"))
    assert unclear.status_code == 400
    assert (await shown(gate, "pairs", "review"))["proposals"] == []
