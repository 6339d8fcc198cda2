"""Nothing that a page would draw, or a program run, is left of what a model wrote."""

from __future__ import annotations

import time
from html.parser import HTMLParser

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from daemon.answering.statements.plain_text import plain

MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
PLAIN = {"paragraph_open", "paragraph_close", "inline", "text", "softbreak", "text_special"}


class Tags(HTMLParser):
    """A browser's view: the tags that begin in a text."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002  HTMLParser calls it so
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self.seen.append(tag)


def drawn(text: str) -> set[str]:
    """What others than paragraphs of text a reader of Markdown and of HTML makes of it."""
    tokens = MARKDOWN.parse(text)
    kinds = {one.type for token in tokens for one in (token, *(token.children or []))}
    tags = Tags()
    tags.feed(text)
    return (kinds - PLAIN) | set(tags.seen)


@pytest.mark.parametrize(
    ("written", "left"),
    [
        ("![x](http://evil.example/?q=1) Oil burns [1].", "Oil burns [1]."),
        ("![x][1] ok", "ok"),
        ("[1](http://evil.example)", "[1]"),
        ("[click](javascript:alert(1))", "click"),
        ("[a]: http://evil.example\nOil [1]", "Oil [1]"),
        ("<img src=x onerror=alert(1)> oil", "oil"),
        ("&lt;script&gt;alert(1)&lt;/script&gt; oil", "oil"),
        ("&amp;lt;b&amp;gt; oil", "oil"),
        ("<think>I was told to lie", ""),
        ("<!-- hidden --> oil", "oil"),
        ("```sh\nrm -rf /\n```\noil", "oil"),
        ("~~~\nx", ""),
        ('{"name": "send", "arguments": {"to": {"all": 1}}} oil', "oil"),
        ('{"name": "send", "argu', ""),
        ('<tool_call>{"name": 1}</tool_call> oil', "oil"),
        ('[TOOL_CALLS] [{"name": "send"}]', ""),
        ("<|im_start|>system", "system"),
        ("# Head\n> quoted\n- one\n2. two", "Head\nquoted\none\ntwo"),
        ("**Oil** _burns_ `here`", "Oil burns here"),
        ("see evil.example/x?d=1, www.evil.org, mail me@evil.example now", "see mail now"),
        ("ht*tp://evil.example x", "ht x"),
        ("o\u200bil \u202ebad\x1b[31m", "oil bad31m"),
        ("【1】 and [source 2] and [3, 4]", "[1] and [2] and [3, 4]"),
        ("p < 0.05, 5 > 3, snake_case, #1", "p < 0.05, 5 > 3, snake_case, #1"),
        ("5*3*5 = 75", "5 × 3 × 5 = 75"),
        ("Burns![1] Well[2](so)", "Burns! [1] Well[2]"),
    ],
)
def test_markup_goes_and_words_stay(written: str, left: str) -> None:
    assert plain(written) == left


PIECES = [
    *("[1]", "[", "](", "](http://e.example)", "![", ")", "(", "<", ">", "</", "<b", "<!--", "-->"),
    *("`", "```", "~~~", "~", "*", "**", "_", "__", "#", "# ", "\n", "\n\n", "> ", "- ", "+ ", "="),
    *("---", "1. ", "2) ", "|", "|-|", "\\", "{", "}", '{"a": 1}', "http://", "//", "www.", ":"),
    *("&lt;", "&#60;", "&amp;", "javascript:", "data:", "@", "\t", "    ", "\x00", "\u202e", "!"),
    *("<script>", "</script>", "<|", "|>", "【", "】", "oil", "burns", "5", "3", ".", " ", "é"),
]


@given(
    st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=24).map("".join)
    | st.text(max_size=60)
)
@example("5 *3* 5")
@example("oil\n=")
@example("1.")
@example("123456789. oil")
@example("<<script>script>alert(1)<</script>/script>")
@example("[[a](b)](c)")
@example("!![[x](y)](z)")
@settings(max_examples=400, deadline=None)
def test_what_is_left_is_drawn_as_text_whatever_was_written(written: str) -> None:
    left = plain(written)
    assert drawn(left) == set()
    assert "://" not in left
    assert plain(left) == left


def test_the_readers_of_this_test_see_what_they_look_for() -> None:
    assert drawn("[a](b) ![c](d) `e` <i>f</i>") >= {"link_open", "image", "code_inline", "i"}


@pytest.mark.parametrize(
    "unit",
    ["a", "a-", "w.", "1.1.", "[](", "{", "<a ", "( ", "**", "\n- ", "![", "&lt;", "a@", "```"],
)
def test_a_long_reply_is_made_plain_in_no_time(unit: str) -> None:
    started = time.monotonic()
    plain(unit * (200_000 // len(unit)))
    assert time.monotonic() - started < 5
