"""People rate answers of several settings, blind; what came of it is theirs to read."""

from __future__ import annotations

import builtins
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon.fedctl.commands.evaluation.rating import alpha
from daemon.fedctl.commands.evaluation.saved import save
from daemon.fedctl.main import main
from daemon.fedctl.terminal.output import Exit

QUESTIONS = ("Who?", "Where?", "When?")


def kept(folder: Path, name: str, *answers: str) -> Path:
    rows = [
        {"question": one, "references": ["right"], "answer": said, "citations": [
            {"number": 1, "title": "", "document_id": "d", "text": "[b]quoted"}]}
        for one, said in zip(QUESTIONS, answers, strict=True)
    ]  # fmt: skip
    save(folder / name, {"generator": name}, rows, replace=False)
    return folder / name


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Two settings: of their three answers one is the same."""
    first = kept(tmp_path, "plain.jsonl", "a bad one", "so so", "the same")
    second = kept(tmp_path, "better.jsonl", "a good one", "so and so", "the same")
    files = ["--rate", str(first), "--rate", str(second)]
    return ["eval", *files, "--ratings", str(tmp_path / "ratings.jsonl")]


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    said: Iterator[str] = iter(lines)

    def answered(_: str = "") -> str:
        line = next(said, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr(builtins, "input", answered)


def rated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> str:
    """Rates what is asked by what it says, and gives back the screen."""
    goods = {"a good one": "9", "a bad one": "3", "so so": "5", "so and so": "6", "the same": "7"}
    screen = ""

    def answered(_: str = "") -> str:
        nonlocal screen
        screen += capsys.readouterr().out
        return goods[screen.rpartition("Answer: ")[2].partition("\n")[0]]

    monkeypatch.setattr(builtins, "input", answered)
    assert main(words) == Exit.OK
    return screen + capsys.readouterr().out


def test_each_answer_is_rated_once_and_nothing_says_whose_it_is(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = rated(monkeypatch, capsys, [*words, "--rater", "ann"])
    assert screen.count("Answer: ") == 5, "the same answer of both once"
    assert "9-10 right, complete" in screen and "[1] d: [b]quoted" in screen
    place = Path(words[-1])
    assert place.stat().st_mode & 0o777 == 0o600
    for name in ("plain", "better"):
        assert name not in screen and name not in place.read_text()
    capsys.readouterr()
    assert main([*words, "--results", "--json"]) == Exit.OK
    found = json.loads(capsys.readouterr().out)
    assert [(one["setting"], one["mean"]) for one in found["settings"]] == [
        ("plain", 5.0), ("better", pytest.approx(22 / 3)),
    ]  # fmt: skip
    assert found["pairs"] == [
        {"setting": "better", "against": "plain", "wins": 2, "ties": 1, "losses": 0}
    ]
    assert (found["raters"], found["agreement"]) == (["ann"], None)


def test_who_stops_goes_on_where_it_was(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "11", "x", "", "7", "q")
    assert main([*words, "--rater", "ann"]) == Exit.PARTLY
    out = capsys.readouterr().out
    assert "ann has rated 1 of 5 answers." in out
    assert out.count("A whole number from 1 to 10.") == 3
    typed(monkeypatch, "8")  # and then the terminal is closed
    assert main([*words, "--rater", "ann"]) == Exit.PARTLY
    out = capsys.readouterr().out
    assert "2 of 5" in out and "1 of 5" not in out
    assert "ann has rated 2 of 5 answers." in out
    typed(monkeypatch, *"56789")
    assert main([*words, "--rater", "bob"]) == Exit.OK, "another one begins anew"


def test_raters_that_differ_agree_less(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rater in ("ann", "bob"):
        rated(monkeypatch, capsys, [*words, "--rater", rater])
    main([*words, "--results"])
    assert "Krippendorff's alpha of the raters: 1.00" in capsys.readouterr().out
    typed(monkeypatch, *"13975")
    assert main([*words, "--rater", "cyd"]) == Exit.OK
    capsys.readouterr()
    main([*words, "--results", "--json"])
    assert json.loads(capsys.readouterr().out)["agreement"] < 1.0


def test_alpha_is_krippendorffs() -> None:
    """By hand: Do = (4 * 2 * 1 / 1) / 8 = 1; De by all ordered pairs of the eight values."""
    units = [[1, 2], [2, 3], [3, 4], [4, 5]]
    values = [value for unit in units for value in unit]
    between = sum((a - b) ** 2 for a in values for b in values) / (8 * 7)
    assert alpha(units) == pytest.approx(1 - 1 / between)
    assert alpha([[1, 1], [5, 5], [9]]) == 1.0
    assert alpha([[5, 5], [5, 5]]) is None, "nobody told anything apart"
    assert alpha([[1], [2]]) is None
    assert alpha([]) is None


def test_what_can_not_be_rated_is_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*said: str) -> str:
        assert main([*said]) == Exit.USAGE
        return capsys.readouterr().err

    assert "two files of different names" in refused(*words[:3], *words[5:])
    assert "nothing says where ratings are kept" in refused(*words[:5])
    assert "a person rates at a terminal" in refused(*words, "--json")
    assert "are two different questions" in refused(*words, "--answers")
    other = tmp_path / "ratings.jsonl"
    for text in ("x", '{"answer": "a", "rater": "b", "score": 11}', "[]", '{"score": true}'):
        other.write_text(text)
        assert "holds something that is no rating" in refused(*words, "--results")


@pytest.mark.parametrize(
    "row",
    [
        {"question": "q", "answer": "a", "references": ["r"]},
        {"question": "q", "answer": "a", "references": 5, "citations": []},
        {"question": "q", "answer": "a", "references": [], "citations": [{"text": "t"}]},
        {"question": 1, "answer": "a", "references": [], "citations": []},
    ],
)
def test_a_saved_row_that_nothing_here_wrote_is_refused(
    words: list[str], row: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    saved = Path(words[2])
    begin = saved.read_text(encoding="utf-8").splitlines()[0]
    saved.write_text(f"{begin}\n{json.dumps(row)}\n", encoding="utf-8")
    assert main(words) == Exit.USAGE
    assert "holds no answers of an evaluation" in capsys.readouterr().err
