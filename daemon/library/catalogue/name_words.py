"""The words of a title, or of an author's name: small letters and digits, without accents."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

_RUN = re.compile(r"[^\W_]+")  # letters and digits
# Inside a run words end where a small letter meets a capital, and at numbers of three
# digits or more: "2023Q2" is 2023 and q2, "AmericanExpress" two words, "10K" one.
BOUNDARY = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=\d{3})(?=[^\W\d_])|(?<=[^\W\d_])(?=\d{3})")


def name_words(name: str) -> frozenset[str]:
    """The words of a title, in small letters and without accents; none where it has none.

    ``3M_2018_10K`` has 3m, 2018 and 10k. A run of letters and digits that is cut further
    is a word, too.
    """
    return frozenset(word.casefold() for run in runs(name) for word in (run, *BOUNDARY.split(run)))


def runs(text: str) -> Sequence[str]:
    """Letters and digits without accents (NFKD, combining marks left out)."""
    decomposed = unicodedata.normalize("NFKD", text)
    plain = "".join(letter for letter in decomposed if not unicodedata.combining(letter))
    return _RUN.findall(plain)
