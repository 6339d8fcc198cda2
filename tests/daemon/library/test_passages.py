"""Documents to passages: whole sentences, a kept budget, nothing lost."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.library.passages import (
    CountTokens,
    Piece,
    SentenceSplitter,
    passage_ids,
    sentences,
    split_ranges,
)
from daemon.library.readers.documents import Block, Document, Kind, Span, joined


def words(text: str) -> int:
    return len(text.split())


def letters(text: str) -> int:
    """Tokens of a tokeniser that spells: unlike words, they add up to more than the whole."""
    return len(text) + 2


def split_text(text: str, budget: int, count: CountTokens) -> list[str]:
    return [text[begin:end] for begin, end in split_ranges(text, budget, count)]


TEXT = (
    "Dr. Brandt weighed 3.5 tons of rope, i.e. two coils. It held! Did it? "
    "J. R. Harms signed the list (see Fig. 2). He left."
)


def test_sentences_end_where_a_reader_would_end_them() -> None:
    assert sentences(TEXT) == [
        "Dr. Brandt weighed 3.5 tons of rope, i.e. two coils.",
        "It held!",
        "Did it?",
        "J. R. Harms signed the list (see Fig. 2).",
        "He left.",
    ]


def test_a_sentence_ends_by_the_rules_of_its_language() -> None:
    text = "Er wurde am 12. März 2024 gem. § 5 Abs. 2 abgelehnt. Die Frist ist bzw. war um."
    first, second = sentences(text, "de")
    assert first.endswith("abgelehnt.") and second.startswith("Die Frist")
    assert len(sentences(text)) > 2  # as English is cut
    assert sentences("One. Two.", "xx") == ["One.", "Two."]  # nobody knows that one


def test_a_passage_ends_by_the_rules_of_its_documents_language() -> None:
    text = "Der Antrag wurde am 12. März gestellt. Er wurde am 3. Juni genehmigt."
    german = [piece.text for piece in cut(Document("d", "", text, language="de"), 8)]
    assert german == ["Der Antrag wurde am 12. März gestellt.", "Er wurde am 3. Juni genehmigt."]


def test_lines_of_a_list_and_headings_stand_alone() -> None:
    text = "On deck\n\n- a winch\n- two pumps\n\nThe hold is\ndry."
    assert sentences(text) == ["On deck", "- a winch", "- two pumps", "The hold is\ndry."]


def test_what_fits_the_budget_is_one_passage() -> None:
    assert split_text(f"\n{TEXT} ", words(TEXT), words) == [TEXT]
    assert split_text(f"\n{TEXT} ", letters(TEXT), letters) == [TEXT]


def test_what_does_not_fit_is_cut_after_a_sentence_into_like_parts() -> None:
    text = " ".join(f"Plank number {n} is sound." for n in range(9))  # 45 words
    parts = split_text(text, 20, words)
    assert [words(part) for part in parts] == [15, 15, 15]
    assert all(part.endswith("is sound.") for part in parts)


def test_a_sentence_over_the_budget_is_cut_between_words() -> None:
    text = " ".join(f"w{n}" for n in range(100))
    parts = split_text(text, 7, words)
    assert all(words(part) <= 7 for part in parts)
    assert " ".join(parts) == text


def test_a_word_over_the_budget_is_cut_between_characters() -> None:
    parts = split_text("x" * 1000, 30, letters)
    assert all(letters(part) <= 30 for part in parts)
    assert "".join(parts) == "x" * 1000


def test_a_blank_document_has_no_passage() -> None:
    assert split_text(" \n\t ", 10, words) == []


def test_a_budget_below_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 token, not 0"):
        SentenceSplitter(words, 0)


def test_another_budget_is_another_way_of_splitting() -> None:
    assert SentenceSplitter(words, 10).name != SentenceSplitter(words, 11).name
    assert SentenceSplitter(words, 60)(Document("d", "", TEXT)) == [Piece(TEXT, 0, len(TEXT))]


def test_ids_survive_edits_elsewhere_and_tell_equals_apart() -> None:
    before = passage_ids("log.txt", ["one", "two", "one"])
    after = passage_ids("log.txt", ["new", "two", "one"])
    assert len(set(before)) == 3
    assert before[1] == after[1]
    assert before[0] == after[2]
    assert re.fullmatch(r"log\.txt@[0-9a-f]{16}\.1", before[2])
    assert before != passage_ids("other.txt", ["one", "two", "one"])


def test_a_long_text_without_a_full_stop_takes_no_time() -> None:
    started = time.process_time()
    parts = split_text("timber " * 30_000, 200, words)
    assert time.process_time() - started < 2.0
    assert sum(words(part) for part in parts) == 30_000


prose = st.lists(
    st.one_of(
        st.text(alphabet="abcdef AB.!?\n,é漢。", max_size=40),
        st.sampled_from(["It is so. ", "Dr. A. B. c. ", "- item\n", "\n\n", "Why?! "]),
    ),
    max_size=30,
).map("".join)


@settings(deadline=None)
@given(
    st.one_of(prose, st.text(max_size=200)),
    st.integers(1, 40),
    st.sampled_from([0, 1]),
    st.sampled_from(["", "de", "fr", "ja", "xx"]),
)
def test_nothing_is_lost_and_the_budget_is_kept(
    text: str, budget: int, way: int, language: str
) -> None:
    count = (words, letters)[way]
    parts = [text[a:b] for a, b in split_ranges(text, budget, count, language)]
    assert "".join("".join(parts).split()) == "".join(text.split())
    assert all(part == part.strip() and part for part in parts)
    assert all(count(part) <= budget or len(part) == 1 for part in parts)


@settings(deadline=None)
@given(prose)
def test_every_sentence_within_the_budget_stays_whole(text: str) -> None:
    parts = split_text(text, 12, words)
    for sentence in sentences(text):
        if words(sentence) <= 12:
            assert any(sentence in part for part in parts)


def made_of(*blocks: Block) -> Document:
    text, spans = joined(blocks)
    return Document("d", "Yard rules", text, spans=spans)


def cut(document: Document, budget: int) -> list[Piece]:
    pieces = SentenceSplitter(words, budget)(document)
    assert all(piece.text == document.text[piece.begin : piece.end] for piece in pieces)
    return pieces


def test_a_heading_stands_above_its_passages_and_in_none() -> None:
    document = made_of(
        Block("heading", "Of ropes"),
        Block("text", "Coil them dry."),
        Block("text", "Tar them yearly."),
        Block("heading", "Of sails"),
        Block("heading", "Jibs"),
        Block("text", "Fold them."),
        Block("heading", "Annex"),
    )
    assert [(piece.text, piece.context) for piece in cut(document, 20)] == [
        ("Coil them dry.\n\nTar them yearly.", "Of ropes"),
        ("Fold them.", "Of sails\nJibs"),
    ]


def test_headings_alone_are_a_text() -> None:
    assert [piece.text for piece in cut(made_of(Block("heading", "Closed")), 20)] == ["Closed"]


def test_a_long_table_is_cut_between_rows_below_its_header() -> None:
    rows = ["Rope\tTons\tPrice", *(f"No. {n}\t{n}.5\t{n}00 marks" for n in range(9))]
    document = made_of(Block("heading", "Prices", page=7), Block("table", "\n".join(rows), page=7))
    pieces = cut(document, 20)
    assert "\n".join(piece.text for piece in pieces) == "\n".join(rows)
    assert pieces[0].context == "Prices"
    assert {piece.context for piece in pieces[1:]} == {"Prices\nRope\tTons\tPrice"}
    assert {(piece.kind, piece.page) for piece in pieces} == {("table", 7)}
    assert all(words(piece.text) + words(piece.context) <= 20 + 1 for piece in pieces)


def test_a_title_in_a_row_of_its_own_is_above_the_header() -> None:
    rows = ["Annual sales", "Region\tTons\tPrice", *(f"North {n}\t{n}\t{n}0" for n in range(12))]
    pieces = cut(made_of(Block("table", "\n".join(rows))), 20)
    assert {piece.context for piece in pieces[1:]} == {"Annual sales\nRegion\tTons\tPrice"}
    assert "\n".join(piece.text for piece in pieces) == "\n".join(rows)


def test_a_table_of_one_column_has_its_first_row_above_it() -> None:
    rows = ["Ropes that are tarred", *(f"No. {n} of the north yard" for n in range(12))]
    pieces = cut(made_of(Block("table", "\n".join(rows))), 20)
    assert {piece.context for piece in pieces[1:]} == {"Ropes that are tarred"}


def test_a_passage_knows_its_page_and_covers_its_blocks_there() -> None:
    document = made_of(
        Block("text", "First of all.", page=1, place=(0.1, 0.2, 0.5, 0.3)),
        Block("text", "Second.", page=1, place=(0.05, 0.3, 0.4, 0.4), ocr=True),
        Block("text", "Third, overleaf, at last.", page=2, place=(0.1, 0.1, 0.9, 0.2)),
    )
    whole, overleaf = cut(document, 20)
    assert (whole.ocr, overleaf.ocr) == (True, False), "a part of it that OCR read is enough"
    assert (whole.page, whole.place) == (1, (0.05, 0.2, 0.5, 0.4))
    assert overleaf.text == "Third, overleaf, at last.", "a passage is of one page"
    assert (overleaf.page, overleaf.place) == (2, (0.1, 0.1, 0.9, 0.2))


def test_what_stands_below_a_heading_that_ocr_read_is_marked() -> None:
    document = made_of(
        Block("heading", "Tariff: 2,940 crowns", page=1, ocr=True),
        Block("text", "The ferry pays it.", page=1),
        Block("heading", "Of boats", page=2),
        Block("text", "Boats pay nothing.", page=2),
    )
    assert [piece.ocr for piece in cut(document, 20)] == [True, False]


def test_a_heading_goes_on_overleaf_above_text_and_above_no_table() -> None:
    document = made_of(
        Block("heading", "Of ropes", 1),
        Block("text", "Coil them dry.", 1),
        Block("text", "Tar them yearly.", 2),
        Block("table", "Rope\tTons\nNo. 1\t4", 2),
    )
    assert [(piece.page, piece.context) for piece in cut(document, 20)] == [
        (1, "Of ropes"), (2, "Of ropes"), (2, ""),
    ]  # fmt: skip


kinds = st.sampled_from(["text", "heading", "table", "figure"])
blocks = st.lists(
    st.builds(Block, kinds, st.text(alphabet="ab .\n\té", min_size=1, max_size=60)), max_size=8
)


@settings(deadline=None)
@given(blocks, st.integers(1, 12))
def test_all_but_headings_is_in_the_passages_in_order(parts: list[Block], budget: int) -> None:
    pieces = cut(made_of(*parts), budget)
    told = "".join("".join(piece.text for piece in pieces).split())
    if all(part.kind == "heading" for part in parts):
        assert told == "".join("".join(part.text for part in parts).split())
    else:
        wanted = [part.text for part in parts if part.kind != "heading"]
        assert told == "".join("".join(wanted).split())
    ends = [0, *(piece.end for piece in pieces)]
    assert all(piece.begin >= end for piece, end in zip(pieces, ends, strict=False))


def test_headings_without_end_are_not_repeated_in_each_passage() -> None:
    many = [Block("heading", f"{number} " + "x" * 300) for number in range(1000)]
    text, spans = joined([*many, Block("text", TEXT)])
    pieces = SentenceSplitter(words, 10)(Document("a", "", text, spans=spans))
    assert pieces
    assert {piece.context.count("\n") + 1 for piece in pieces} == {6}
    assert pieces[0].context.rpartition("\n")[2].startswith("999 x")


@pytest.mark.slow
def test_a_passage_is_placed_without_a_look_at_all_others() -> None:
    """A hundred thousand paragraphs, in a second and not in a minute."""
    many = [Block("text", "The winch is greased.", page) for page in range(1, 100_001)]
    text, spans = joined(many)
    begun = time.process_time()
    pieces = SentenceSplitter(words, 60)(Document("a", "", text, spans=spans))
    assert time.process_time() - begun < 6
    assert [piece.page for piece in pieces[:3]] == [1, 2, 3]


@pytest.mark.parametrize(
    ("kind", "row"),
    [("table", "\u200d\t\u200d\n"), ("text", "x\n"), ("text", "\u200d. "), ("table", "x\n")],
)
def test_what_is_counted_grows_with_the_text_alone(kind: Kind, row: str) -> None:
    """Rows without tokens never fill a passage, and short lines many times over."""

    def counted(rows: int) -> int:
        text, counted = row * rows + "word " * 150, 0

        def count_tokens(part: str) -> int:
            nonlocal counted
            counted += len(part)
            return sum(word.isalnum() for word in part.split())

        document = Document("a", "", text, spans=(Span(kind, 0, len(text)),))
        SentenceSplitter(count_tokens, 100)(document)
        return counted

    assert counted(8000) < 3 * counted(4000) < 3 * 200 * 4000 * len(row)


@pytest.mark.parametrize("text", ["[" * 300_000, "x y " * 75_000, "\u0301" * 300_000])
def test_a_long_text_without_sentences_is_never_counted_whole(text: str) -> None:
    counted: list[int] = []

    def count(piece: str) -> int:
        counted.append(len(piece))
        return len(piece.split()) + piece.count("[")

    ranges = split_ranges(text, 100, count)
    assert max(counted) <= 32 * 100
    assert sum(counted) < 12 * len(text)
    assert ranges[-1][1] == len(text.rstrip())
