"""The table of generators, and the setting that chooses one."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.loading import SettingsError, load
from daemon.answering.generators import GENERATORS, USUAL
from daemon.main import check_names


def test_what_the_settings_say_unasked_is_in_the_table(tmp_path: Path) -> None:
    path = tmp_path / "fedd.toml"
    path.write_text("")
    settings = load(path)
    assert settings.retrieval.generator == USUAL
    assert USUAL in GENERATORS
    check_names(path, settings)


def test_a_generator_that_is_not_there_is_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "fedd.toml"
    path.write_text('[retrieval]\ngenerator = "oracle"\n')
    with pytest.raises(SettingsError, match=r'retrieval\.generator = "oracle": expected one of'):
        check_names(path, load(path))
