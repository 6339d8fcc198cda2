"""How a language model writes, by the paper that it is from."""

from __future__ import annotations

from pathlib import Path

from config.loading import load
from tests.config.test_settings import refusals, write


def test_decoding_is_as_a_paper_says_and_each_part_can_be_chosen(tmp_path: Path) -> None:
    """pFedRAG, appendix D.3; FedE4RAG, section VI-C."""
    parts = ("new_tokens", "sampling_temperature", "top_p", "sampling_top_k", "repetition_penalty")

    def chosen(text: str) -> list[float]:
        found = load(write(tmp_path, f"[retrieval]\n{text}")).retrieval
        return [getattr(found, name) for name in parts]

    assert chosen('decoding = "pfedrag"') == [128, 0.4, 0.9, 50, 1.2]
    assert chosen('decoding = "fede4rag"') == chosen("") == [512, 0.1, 0.9, 0, 1.0]
    assert chosen('decoding = "pfedrag"\nsampling_temperature = 0.0') == [128, 0.0, 0.9, 50, 1.2]
    for wrong in ('"gpt"', "7", "[]"):
        [line] = refusals(tmp_path, f"[retrieval]\ndecoding = {wrong}")
        assert "retrieval.decoding" in line and '"fede4rag"' in line.replace("'", '"')
