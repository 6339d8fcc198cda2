"""Attacks on identity: forged, expired and damaged certificates, signatures and seals."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.identity.authority import create_authority, sign_request, sign_with_authority
from crypto.identity.keys import IdentityError
from crypto.identity.site import create_site
from crypto.identity.trust import Trust
from tests.crypto.identity.forgery import (
    DAY,
    DNS,
    NOW,
    URI,
    Federation,
    Name,
    enrol,
    forged_certificate,
    found,
    self_signed,
)


@pytest.fixture(scope="module")
def fed(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return found(tmp_path_factory.mktemp("federation"))


# ---- whom a certificate names -------------------------------------------------------


def test_an_expired_certificate_is_refused(fed: Federation) -> None:
    with pytest.raises(IdentityError, match="expired"):
        fed.trust.site_of(fed.alpha.certificate_der, at=fed.alpha.not_after + timedelta(seconds=1))


def test_a_certificate_that_is_not_yet_valid_is_refused(fed: Federation) -> None:
    with pytest.raises(IdentityError, match=r"not valid before.*clock"):
        fed.trust.site_of(fed.alpha.certificate_der, at=NOW - DAY)


def test_a_certificate_is_valid_where_the_clock_is_four_minutes_behind(
    fed: Federation,
) -> None:
    behind = datetime.now(UTC) - timedelta(minutes=4)
    assert fed.trust.site_of(fed.alpha.certificate_der, at=behind) == "alpha"


def test_the_moment_may_be_given_in_any_time_zone(fed: Federation) -> None:
    there = fed.alpha.not_after.astimezone(timezone(timedelta(hours=9)))
    assert fed.trust.site_of(fed.alpha.certificate_der, at=there) == "alpha"
    with pytest.raises(IdentityError, match="expired"):
        fed.trust.site_of(fed.alpha.certificate_der, at=there + timedelta(seconds=2))


def test_a_vote_of_long_ago_can_still_be_verified(tmp_path: Path) -> None:
    create_authority(tmp_path / "ca", "med", now=NOW - 300 * DAY)
    create_site(tmp_path / "a", "med", "a")
    request = (tmp_path / "a" / "site.csr").read_bytes()
    old = sign_request(tmp_path / "ca", request, days=10, now=NOW - 200 * DAY)
    trust = Trust.from_pem((tmp_path / "ca" / "ca.crt").read_bytes())
    assert trust.site_of(old, at=None) == "a"
    with pytest.raises(IdentityError, match="expired"):
        trust.site_of(old, at=NOW)


def test_a_certificate_of_another_authority_of_the_same_name_is_refused(
    fed: Federation, tmp_path: Path
) -> None:
    create_authority(tmp_path / "ca", "med")  # the same federation id, another key
    impostor = enrol(tmp_path, "alpha")
    for at in (NOW, None):
        with pytest.raises(IdentityError, match="not issued by this federation's authority"):
            fed.trust.site_of(impostor.certificate_der, at=at)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (None, "no subject alternative name|is refused"),
        ([DNS], "names \\[\\]"),
        ([URI, x509.UniformResourceIdentifier("hanse://med/site/alpha"), DNS], "expected one"),
        ([x509.UniformResourceIdentifier("hanse://other/site/mallory"), DNS], "federation 'other'"),
        ([URI, DNS, x509.DNSName("alpha.med.hanse.internal")], "also has the names"),
        ([URI, x509.DNSName("*.med.hanse.internal")], "also has the names"),
        ([URI, DNS, x509.DNSName("hanse://med/site/mallory")], "."),
        ([x509.UniformResourceIdentifier("https://med/site/mallory"), DNS], "expected one"),
        ([x509.UniformResourceIdentifier("hanse://med/site/mallory\n"), DNS], "."),
    ],
)
def test_a_certificate_with_wrong_names_is_refused_though_it_is_signed(
    fed: Federation, names: list[Name] | None, expected: str
) -> None:
    with pytest.raises(IdentityError, match=expected):
        fed.trust.site_of(forged_certificate(fed.authority, names), at=NOW)


def test_the_forge_makes_acceptable_certificates_when_nothing_is_wrong(fed: Federation) -> None:
    """The control of the test above: what it refuses, it refuses for the names."""
    assert fed.trust.site_of(forged_certificate(fed.authority, [URI, DNS]), at=NOW) == "mallory"


def test_a_certificate_for_other_uses_or_of_an_authority_is_no_site(fed: Federation) -> None:
    mail = forged_certificate(fed.authority, [URI, DNS], usage=ExtendedKeyUsageOID.EMAIL_PROTECTION)
    sub_authority = forged_certificate(fed.authority, [URI, DNS], is_authority=True)
    for certificate in (mail, sub_authority, fed.alpha.authority_pem):
        with pytest.raises(IdentityError):
            fed.trust.site_of(certificate, at=NOW)


def test_a_certificate_over_an_rsa_key_is_refused(fed: Federation) -> None:
    key = rsa.generate_private_key(65537, 2048).public_key()
    with pytest.raises(IdentityError, match="not P-256"):
        fed.trust.site_of(forged_certificate(fed.authority, [URI, DNS], public_key=key), at=NOW)


def test_a_sites_certificate_is_no_authority(fed: Federation) -> None:
    with pytest.raises(IdentityError, match="authority"):
        Trust.from_pem(fed.alpha.certificate_pem)


@pytest.mark.parametrize(("is_authority", "path_length"), [(False, None), (True, None), (True, 1)])
def test_a_self_signed_certificate_that_certifies_others_is_no_authority(
    is_authority: bool, path_length: int | None
) -> None:
    uri = x509.UniformResourceIdentifier("hanse://med/authority")
    with pytest.raises(IdentityError, match="path length 0"):
        Trust.from_pem(self_signed(uri, x509.BasicConstraints(is_authority, path_length)))


def test_an_authority_without_a_federation_is_refused() -> None:
    for uri in (URI, x509.UniformResourceIdentifier("hanse://Med/authority")):
        with pytest.raises(IdentityError, match="the authority names"):
            Trust.from_pem(self_signed(uri, x509.BasicConstraints(True, 0)))


def test_two_certificates_in_one_file_are_refused(fed: Federation) -> None:
    with pytest.raises(IdentityError, match=r"expected one X\.509 certificate"):
        fed.trust.site_of(fed.alpha.certificate_pem + fed.beta.certificate_pem, at=NOW)


@pytest.mark.parametrize("size", [0, 4097, 100_000])
def test_certificates_of_absurd_size_are_refused_before_they_are_parsed(
    fed: Federation, size: int
) -> None:
    with pytest.raises(IdentityError, match="bytes"):
        fed.trust.site_of(b"\x30" * size, at=NOW)


ANYTHING = settings(max_examples=150, deadline=None)


@pytest.mark.slow
@ANYTHING
@given(garbage=st.binary(max_size=300) | st.binary(max_size=200).map(lambda b: b"-----BEGIN" + b))
def test_garbage_never_raises_anything_but_our_error(fed: Federation, garbage: bytes) -> None:
    for parse in (
        lambda: fed.trust.site_of(garbage, at=None),
        lambda: Trust.from_pem(garbage),
        lambda: sign_request(fed.authority, garbage),
        lambda: fed.trust.verify(fed.alpha.certificate_der, garbage, b"payload", at=None),
        lambda: fed.alpha.unseal(garbage, b""),
        lambda: fed.alpha.unseal(b"\x01" + garbage, b""),
    ):
        with pytest.raises(IdentityError):
            parse()


# 0x25 turns the tag of a URI into that of a kind of name the library does not know.
MASKS = (0x01, 0x25, 0x80, 0xFF)


def changed(raw: bytes, signature: bytes) -> Iterator[bytes]:
    """All variants of ``raw`` with one byte changed by one of the masks.

    Left out is the byte before the signature, which says how many bits of it
    are unused: the library does not compare it, and it changes no content.
    """
    for position in range(len(raw)):
        if position != len(raw) - len(signature) - 1:
            for mask in MASKS:
                yield raw[:position] + bytes([raw[position] ^ mask]) + raw[position + 1 :]


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
def test_a_changed_byte_anywhere_in_a_certificate_is_refused(fed: Federation) -> None:
    der = fed.alpha.certificate_der
    for certificate in changed(der, x509.load_der_x509_certificate(der).signature):
        with pytest.raises(IdentityError):
            fed.trust.site_of(certificate, at=None)


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
def test_a_changed_byte_anywhere_in_an_authority_is_refused(fed: Federation) -> None:
    authority = x509.load_pem_x509_certificate(fed.alpha.authority_pem)
    for certificate in changed(authority.public_bytes(Encoding.DER), authority.signature):
        with pytest.raises(IdentityError):
            Trust.from_pem(certificate)


@pytest.mark.slow
def test_a_changed_byte_anywhere_in_a_request_is_refused(fed: Federation) -> None:
    request = x509.load_pem_x509_csr((fed.alpha_dir / "site.csr").read_bytes())
    for der in changed(request.public_bytes(Encoding.DER), request.signature):
        lines = base64.encodebytes(der)
        pem = b"-----BEGIN CERTIFICATE REQUEST-----\n%b-----END CERTIFICATE REQUEST-----\n" % lines
        with pytest.raises(IdentityError):
            sign_request(fed.authority, pem, expect_site="alpha")


# ---- signatures -----------------------------------------------------------------------


def test_a_signature_names_its_site(fed: Federation) -> None:
    signature = fed.alpha.sign(b"payload")
    assert len(signature) <= 80
    assert fed.trust.verify(fed.alpha.certificate_der, signature, b"payload", at=NOW) == "alpha"


def test_a_signature_is_not_anothers_nor_over_other_bytes(fed: Federation) -> None:
    signature = fed.alpha.sign(b"payload")
    for certificate, payload in (
        (fed.beta.certificate_der, b"payload"),
        (fed.alpha.certificate_der, b"payloae"),
    ):
        with pytest.raises(IdentityError, match="the signature is not by"):
            fed.trust.verify(certificate, signature, payload, at=NOW)


def test_a_site_does_not_sign_for_the_authority(fed: Federation) -> None:
    fed.trust.verify_authority(sign_with_authority(fed.authority, b"manifest"), b"manifest")
    with pytest.raises(IdentityError, match="not by the authority"):
        fed.trust.verify_authority(fed.alpha.sign(b"manifest"), b"manifest")


# ---- sealing --------------------------------------------------------------------------


def test_what_is_sealed_for_a_site_that_site_reads(fed: Federation) -> None:
    for form in (fed.beta.certificate_der, fed.beta.certificate_pem):
        sealed = fed.trust.seal_for(form, b"round key", b"round 1")
        assert fed.beta.unseal(sealed, b"round 1") == b"round key"


def test_what_is_sealed_for_another_site_cannot_be_read(fed: Federation) -> None:
    sealed = fed.trust.seal_for(fed.beta.certificate_der, b"round key", b"round 1")
    with pytest.raises(IdentityError, match="cannot unseal"):
        fed.alpha.unseal(sealed, b"round 1")


def test_what_was_sealed_for_one_attempt_cannot_be_passed_off_in_another(fed: Federation) -> None:
    sealed = fed.trust.seal_for(fed.beta.certificate_der, b"round key", b"round 1 attempt 0")
    for associated in (b"round 1 attempt 1", b"", b"round 1 attempt 0 "):
        with pytest.raises(IdentityError, match="another context"):
            fed.beta.unseal(sealed, associated)


def test_what_was_sealed_for_another_certificate_of_a_key_cannot_be_read(
    tmp_path: Path,
) -> None:
    create_authority(tmp_path / "ca", "med")
    old = enrol(tmp_path, "alpha")
    renewed = sign_request(tmp_path / "ca", (tmp_path / "alpha/site.csr").read_bytes())
    trust = Trust.from_pem(old.authority_pem)
    with pytest.raises(IdentityError, match="another certificate"):
        old.unseal(trust.seal_for(renewed, b"round key", b""), b"")


def test_nothing_is_sealed_for_a_stranger(fed: Federation, tmp_path: Path) -> None:
    create_authority(tmp_path / "ca", "med")
    stranger = enrol(tmp_path, "beta")
    with pytest.raises(IdentityError, match="not issued"):
        fed.trust.seal_for(stranger.certificate_der, b"round key", b"")
