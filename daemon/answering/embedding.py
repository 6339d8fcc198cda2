"""What an answer embeds: the question once, and of sentences only those it meets first.

A retriever with a frozen encoder needs a sentence's features, which are the same in every
version; they are kept on the disk (`daemon.library.sentence_features`) and go through the
version's own layers at each question. One that trains its encoder makes another vector of a
sentence in each version; the latest are remembered while that one is open.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

import numpy as np
import structlog

from crypto.arrays import Float32
from daemon.library.contents import Passage, embedding_text
from daemon.library.sentence_features import SentenceFeatures, SentenceFeaturesError

if TYPE_CHECKING:
    from daemon.learning.retriever.encoder import Encoder
    from daemon.learning.retriever.retriever import Retriever

log = structlog.get_logger()

_REMEMBERED = 20_000  # sentences of a trained encoder: 31 MB with 384 values each


@dataclass(frozen=True)
class Sentence:
    """A sentence of a passage, or a row of its table; ``position``: in it, from 0.

    ``last``: the passage has none behind it that an answer would look at.
    """

    passage: Passage
    position: int
    text: str
    last: bool = False

    @property
    def embedding_text(self) -> str:
        """What the encoder reads: with what stands above it, "it" still says what it is.

        A row of a table has its header there: without it the header was nearer to many questions.
        """
        return embedding_text(self.passage.title, self.text, self.passage.above(self.text))


class SentenceEmbedder(Protocol):
    """Embeds sentences as a model version does."""

    def __call__(self, sentences: Sequence[Sentence], /) -> Float32:
        """[n, d], rows of length 1; those of a passage stand together, from its first on."""

    def of_passages(self, passages: Sequence[Passage], /) -> list[Float32] | None:
        """[n, d] of all sentences of each passage; None where that takes any encoding."""

    def close(self) -> None:
        """Close its files; it is of no use afterwards."""


class QuestionEmbedder:
    """Embeds a question as a model version does, once for all that an answer needs of it."""

    def __init__(self, retriever: Retriever) -> None:
        self._retriever = retriever
        self._last: tuple[str, Float32] | None = None

    def __call__(self, question: str) -> Float32:
        """[d], of length 1."""
        if self._last is None or self._last[0] != question:
            self._last = question, self._retriever.embed_queries([question])[0]
        return self._last[1]


class KeptSentences:
    """Of a frozen encoder: features from the disk, those that are not there encoded and kept."""

    def __init__(self, retriever: Retriever, kept: SentenceFeatures | None) -> None:
        """``kept`` None: nothing is kept, for its file can't be had."""
        self._retriever = retriever
        self._kept = kept

    def __call__(self, sentences: Sequence[Sentence], /) -> Float32:
        """As in `SentenceEmbedder`. No trouble with the disk keeps an answer from its sentences."""
        passages = [list(some) for _, some in groupby(sentences, key=lambda one: one.passage.rowid)]
        if not passages:
            return np.zeros((0, self._retriever.encoder.dimension), np.float32)
        try:
            features = features_of(self._retriever.encoder, self._kept, passages)
        except SentenceFeaturesError as error:
            log.warning("sentences are encoded at each question from here on", cause=str(error))
            self.close()
            self._kept = None
            features = features_of(self._retriever.encoder, None, passages)
        return self._retriever.embed_passages([], features)

    def of_passages(self, passages: Sequence[Passage], /) -> list[Float32] | None:
        """As in `SentenceEmbedder`: None until the background has read all of them."""
        contents = [passage.content for passage in passages]
        if self._kept is None or not contents:
            return None
        try:
            found = self._kept.of_whole(self._retriever.encoder.digest, contents)
        except SentenceFeaturesError as error:
            log.warning("passages are not ranked by sentences", cause=str(error))
            return None
        if any(content not in found for content in contents):
            return None
        features = [found[content] for content in contents]
        ends = np.cumsum([len(some) for some in features])[:-1]
        return np.split(self._retriever.embed_passages([], np.concatenate(features)), ends)

    def close(self) -> None:
        """Close the file."""
        if self._kept is not None:
            self._kept.close()


class RememberedSentences:
    """Of an encoder that is trained: the vectors that were asked for last, in memory."""

    def __init__(self, retriever: Retriever, most: int = _REMEMBERED) -> None:
        """``most`` sentences are remembered."""
        self._retriever = retriever
        self._most = most
        self._vectors: OrderedDict[str, Float32] = OrderedDict()  # that used last stands last

    def __call__(self, sentences: Sequence[Sentence], /) -> Float32:
        """As in `SentenceEmbedder`."""
        texts = [sentence.embedding_text for sentence in sentences]
        if not texts:
            return np.zeros((0, self._retriever.encoder.dimension), np.float32)
        missing = [text for text in dict.fromkeys(texts) if text not in self._vectors]
        new = self._retriever.embed_passages(missing) if missing else ()
        known = self._vectors | dict(zip(missing, new, strict=True))
        for text in texts:
            self._vectors[text] = known[text]
            self._vectors.move_to_end(text)
        while len(self._vectors) > self._most:
            self._vectors.popitem(last=False)
        return np.stack([known[text] for text in texts])

    def of_passages(self, passages: Sequence[Passage], /) -> list[Float32] | None:
        """None: what is remembered is what questions met, and no passage is known whole."""

    def close(self) -> None:
        """Nothing is open."""


def features_of(
    encoder: Encoder, kept: SentenceFeatures | None, passages: Sequence[Sequence[Sentence]]
) -> Float32:
    """[n, d] what the encoder makes of the first sentences of each passage, in that order.

    Those that are not kept are encoded in one go, and kept. All are rounded to float16, so
    that an answer does not depend on what was asked before. Raises SentenceFeaturesError.
    """
    texts = [[sentence.embedding_text for sentence in some] for some in passages]
    contents = [some[0].passage.content for some in passages]
    whole = [some[-1].last for some in passages]
    known = [
        _known(encoder, kept, content, some) for content, some in zip(contents, texts, strict=True)
    ]
    pairs = list(zip(texts, known, strict=True))
    missing = [text for some, there in pairs for text in some[len(there) :]]
    encoded = encoder.encode(missing, side=encoder.reading.passage)
    encoded = encoded.astype(np.float16).astype(np.float32)
    features = []
    for content, (some, there), last in zip(contents, pairs, whole, strict=True):
        lacking = len(some) - len(there)
        joined = np.concatenate([there, encoded[:lacking]])
        encoded = encoded[lacking:]
        if lacking and kept is not None:
            kept.put(encoder.digest, content, some, joined, whole=last)
        features.append(joined)
    return np.concatenate(features)


def _known(
    encoder: Encoder, kept: SentenceFeatures | None, content: bytes, texts: Sequence[str]
) -> Float32:
    known = kept.get(encoder.digest, content, texts) if kept is not None else ()
    return np.asarray(known, np.float32).reshape(len(known), encoder.dimension)
