"""Attacks on keys: files that others can read, exchanged contents, seals and signatures changed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.identity import keys
from crypto.identity.keys import IdentityError, read_bounded, write_new

ALPHA, BETA = keys.new_key(), keys.new_key()


# ---- files ----------------------------------------------------------------------


@pytest.fixture
def no_umask() -> object:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("no_umask")
@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_the_mode_of_a_new_file_does_not_depend_on_the_umask(tmp_path: Path, mode: int) -> None:
    write_new(tmp_path / "file", b"content", mode, remedy="")
    keys.replace(tmp_path / "other", b"content", mode)
    for name in ("file", "other"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode


def test_what_exists_is_not_overwritten_not_even_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("real", "link", "dangling"):
        with pytest.raises(IdentityError, match="exists and is not overwritten: move it away"):
            write_new(tmp_path / name, b"new", 0o600, remedy="move it away")
    assert (tmp_path / "real").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "link", "real"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(IdentityError, match=r"cannot write .*file.* choose a folder"):
        write_new(tmp_path / "file" / "site.key", b"", 0o600, remedy="")
    with pytest.raises(IdentityError, match=r"cannot write .*folder"):
        (tmp_path / "folder").mkdir()
        keys.replace(tmp_path / "folder", b"", 0o600)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o777])
def test_any_right_of_others_makes_a_private_file_unreadable_to_us(
    tmp_path: Path, mode: int
) -> None:
    path = tmp_path / "site.key"
    path.write_bytes(keys.key_pem(ALPHA))
    path.chmod(mode)
    with pytest.raises(IdentityError, match=f"mode {mode:04o}, expected 0600"):
        keys.read_key(path, "")
    assert read_bounded(path, 1000, remedy="")  # as a public file it is fine
    path.chmod(0o400)
    assert keys.key_pem(keys.read_key(path, "")) == keys.key_pem(ALPHA)


def test_a_file_over_its_bound_is_refused_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "ca.crt"
    path.write_bytes(b"x" * 100)
    assert len(read_bounded(path, 100, remedy="")) == 100
    with pytest.raises(IdentityError, match="larger than 99 bytes"):
        read_bounded(path, 99, remedy="")


@pytest.mark.parametrize("name", ["", "/dev/zero"])
def test_what_is_no_file_is_not_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(IdentityError, match="not a regular file"):
        read_bounded(tmp_path / name, 100, remedy="")


# ---- keys -------------------------------------------------------------------------


@pytest.mark.parametrize("other", [ec.generate_private_key(ec.SECP384R1()), ed25519])
def test_a_key_of_another_kind_is_refused(other: object) -> None:
    key = ed25519.Ed25519PrivateKey.generate() if other is ed25519 else other
    assert isinstance(key, ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey)
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    with pytest.raises(IdentityError, match="not a P-256 key"):
        keys.parse_key(pem, Path("site.key"))
    with pytest.raises(IdentityError, match="not P-256"):
        keys.p256(key.public_key(), "the request")


def test_a_key_with_a_password_is_refused_as_fedd_has_nobody_to_ask() -> None:
    pem = ALPHA.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"password"),
    )
    with pytest.raises(IdentityError, match="without a password"):
        keys.parse_key(pem, Path("site.key"))


@settings(deadline=None)
@given(garbage=st.binary(max_size=300))
def test_garbage_is_no_key_and_raises_nothing_but_our_error(garbage: bytes) -> None:
    for pem in (garbage, b"-----BEGIN PRIVATE KEY-----\n" + garbage):
        with pytest.raises(IdentityError):
            keys.parse_key(pem, Path("site.key"))


def test_a_signature_of_other_bytes_another_key_or_too_long_is_refused() -> None:
    signature = keys.sign(ALPHA, b"payload")
    keys.check_signature(ALPHA.public_key(), signature, b"payload", "alpha")
    for key, changed, payload in (
        (ALPHA, signature, b"payloae"),
        (BETA, signature, b"payload"),
        (ALPHA, signature[:-1], b"payload"),
        (ALPHA, b"", b"payload"),
        (ALPHA, signature + bytes(80), b"payload"),
    ):
        with pytest.raises(IdentityError, match="alpha"):
            keys.check_signature(key.public_key(), changed, payload, "alpha")


# ---- seals ------------------------------------------------------------------------


@settings(deadline=None)
@given(plaintext=st.binary(max_size=2000), context=st.binary(max_size=100))
def test_the_recipient_reads_what_was_sealed(plaintext: bytes, context: bytes) -> None:
    sealed = keys.seal(ALPHA.public_key(), plaintext, context)
    assert keys.unseal(ALPHA, sealed, context) == plaintext
    assert len(sealed) == len(plaintext) + 82
    assert len(plaintext) < 5 or plaintext not in sealed


def test_another_key_or_another_context_reads_nothing() -> None:
    sealed = keys.seal(ALPHA.public_key(), b"round key", b"context")
    for key, context in (
        (BETA, b"context"),
        (ALPHA, b"contexu"),
        (ALPHA, b""),
        (ALPHA, b"context "),
    ):
        with pytest.raises(IdentityError, match="cannot unseal"):
            keys.unseal(key, sealed, context)


def test_a_flipped_bit_anywhere_in_a_seal_is_noticed() -> None:
    sealed = keys.seal(ALPHA.public_key(), b"round key", b"context")
    for position in range(len(sealed)):
        changed = bytearray(sealed)
        changed[position] ^= 1 << position % 8
        with pytest.raises(IdentityError):
            keys.unseal(ALPHA, bytes(changed), b"context")
    for length in range(len(sealed)):
        with pytest.raises(IdentityError):
            keys.unseal(ALPHA, sealed[:length], b"context")


def test_two_seals_of_the_same_bytes_have_nothing_in_common() -> None:
    one, two = (keys.seal(ALPHA.public_key(), bytes(64), b"") for _ in range(2))
    assert one[1:66] != two[1:66]
    assert one[66:] != two[66:]


def test_a_seal_of_a_later_version_says_so() -> None:
    sealed = keys.seal(ALPHA.public_key(), b"round key", b"")
    with pytest.raises(IdentityError, match=r"version 02.*one release"):
        keys.unseal(ALPHA, b"\x02" + sealed[1:], b"")


@settings(deadline=None)
@given(garbage=st.binary(max_size=200))
def test_garbage_is_no_seal_and_raises_nothing_but_our_error(garbage: bytes) -> None:
    for sealed in (garbage, b"\x01" + garbage, b"\x01\x04" + bytes(64) + garbage):
        with pytest.raises(IdentityError):
            keys.unseal(ALPHA, sealed, b"")
