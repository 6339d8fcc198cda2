"""fedctl prompts as a person and a script see it."""

from __future__ import annotations

import json

from daemon.fedctl.terminal.output import Exit
from tests.daemon.fedctl.test_pairs import Said, daemon, lines, said
from tests.support.canned_daemon import CannedDaemon

__all__ = ["daemon", "said"]  # fixtures


def test_prompts_are_listed_with_the_rule_that_chooses(said: Said) -> None:
    code, out, err = said("prompts", "list")
    assert (code, err) == (0, "")
    rows = [line.split() for line in lines(out)]
    assert ["medical", "passages,", "question", "medical", "ones,"] in [row[:5] for row in rows]
    assert "auto (in force): of these the first that fits" in out
    assert "metric: a question that asks for a number" in out
    assert "extractive: no language model is asked" in " ".join(out.split())
    plain = json.loads(said("prompts", "list", "--json")[1])
    assert plain["prompts"][0]["name"] == "general"


def test_a_prompt_is_shown_with_its_slots(said: Said) -> None:
    code, out, _ = said("prompts", "show", "novel")
    assert (code, "$passages" in out, "Question: $question" in out) == (0, True, True)
    code, _, err = said("prompts", "show", "poem")
    assert (code, "Use one of: general, domain" in err) == (Exit.USAGE, True)


def test_what_would_be_sent_is_shown_and_then_the_answer(said: Said, daemon: CannedDaemon) -> None:
    words = ("prompts", "test", "auto", "--question", "Who?", "--documents", "d1")
    code, out, _ = said(*words)
    assert code == 0
    asked = daemon.asked[-1]
    assert (asked.name, list(asked.documents), asked.run) == ("auto", ["d1"], False)
    assert "<passage 1> [b]Locks" in out
    text = " ".join(out.split())
    assert "Prompt novel, for it begins with a word: 'Who': 1 of 2 passages, 30 tokens." in text
    assert "Mags does" not in out
    text = " ".join(said(*words, "--run")[1].split())
    assert "Mags does. [1]" in text
    assert "1 statement was taken out: what it cites does not support it." in text
