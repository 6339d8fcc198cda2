"""What `fedctl documents show` asks for, in parts: a long document does not fit a message."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemon.control import library_messages as messages
from daemon.library.passages import SentenceSplitter
from daemon.library.readers.documents import Document
from daemon.library.store import Library
from proto import control_pb2 as control


def test_a_long_document_is_shown_part_by_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "PASSAGES_SHOWN", 2)
    said = ["Hemp is tarred.", "Flax is woven.", "Oak is felled.", "Tin is cast.", "Ale is drunk."]
    with Library.open(tmp_path / "library.sqlite3") as library:
        splitter = SentenceSplitter(lambda text: len(text.split()), 3)
        library.put_documents([Document("yard", "", " ".join(said))], splitter=splitter)
        shown: list[str] = []
        parts = []
        while True:
            request = control.ShowDocumentRequest(id="yard", after=len(shown))
            part = [one.text for one in messages.passage_messages(request, library)]
            if not part:
                break
            parts.append(len(part))
            shown += part
    assert (shown, parts) == (said, [2, 2, 1])
