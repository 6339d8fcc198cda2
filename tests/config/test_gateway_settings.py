"""``[gateway]``: what would give tokens or answers away is refused when the file is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.kinds import on_this_machine
from config.loading import SettingsError, load
from config.settings import GatewaySettings

TLS = 'tls_certificate = "g.crt"\ntls_key = "g.key"\n'


def read(folder: Path, text: str) -> GatewaySettings:
    (folder / "fedd.toml").write_text(f"[gateway]\n{text}\n")
    return load(folder / "fedd.toml").gateway


def test_nothing_is_served_unless_somebody_says_so(tmp_path: Path) -> None:
    assert not read(tmp_path, "").enabled


@pytest.mark.parametrize(
    ("listen", "here"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("[::ffff:10.0.0.1]:1", False),
        ("127.0.0.1.example.org:1", False),
        ("localhost.example.org:1", False),
        ("192.168.1.2:1", False),
    ],
)
def test_only_this_machine_is_asked_in_the_clear(tmp_path: Path, listen: str, here: bool) -> None:
    assert on_this_machine(listen) == here
    assert read(tmp_path, f'listen = "{listen}"\n{TLS}').listen == listen
    if here:
        assert read(tmp_path, f'listen = "{listen}"').listen == listen
    else:
        with pytest.raises(SettingsError, match="must not cross a network in the clear"):
            read(tmp_path, f'listen = "{listen}"')


@pytest.mark.parametrize("lacking", ["tls_certificate", "tls_key"])
def test_a_certificate_and_its_key_come_together(tmp_path: Path, lacking: str) -> None:
    said = "\n".join(line for line in TLS.splitlines() if not line.startswith(lacking))
    with pytest.raises(SettingsError, match=rf"gateway\.{lacking} = nothing"):
        read(tmp_path, said)


def test_the_administrators_socket_is_no_socket_of_questions(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"another path than control\.socket"):
        read(tmp_path, 'socket = "/run/hanse/fedd.sock"')
    example = (Path(__file__).parents[2] / "config" / "fedd.example.toml").read_text()
    assert "who\n# may enter that is to administer the site" in example
