"""Attacks on enrolment: forged requests, borrowed keys, and files that are not what they say."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID

from crypto.identity.authority import create_authority, sign_request, sign_with_authority
from crypto.identity.keys import IdentityError
from crypto.identity.names import tls_name
from crypto.identity.site import Identity, create_site, install
from tests.crypto.identity.forgery import (
    DAY,
    DNS,
    NOW,
    URI,
    Federation,
    Name,
    enrol,
    forged_request,
    found,
    load,
)


@pytest.fixture(scope="module")
def fed(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return found(tmp_path_factory.mktemp("federation"))


# ---- enrolment ----------------------------------------------------------------


def test_a_site_enrols_and_is_known_by_its_certificate(fed: Federation) -> None:
    assert (fed.alpha.site_id, fed.alpha.federation_id) == ("alpha", "med")
    assert fed.trust.site_of(fed.alpha.certificate_der, at=NOW) == "alpha"
    assert fed.trust.site_of(fed.beta.certificate_pem, at=NOW) == "beta"
    assert fed.alpha.not_after > NOW + 364 * DAY


def test_a_certificate_says_what_tls_and_peers_look_for(fed: Federation) -> None:
    certificate = x509.load_der_x509_certificate(fed.alpha.certificate_der)
    value = certificate.extensions.get_extension_for_class
    names = value(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [tls_name("med", "alpha")]
    usages = value(x509.ExtendedKeyUsage).value
    assert set(usages) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    assert not value(x509.BasicConstraints).value.ca
    assert not value(x509.KeyUsage).value.key_cert_sign
    authority = x509.load_pem_x509_certificate(fed.alpha.authority_pem)
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value == (
        x509.BasicConstraints(ca=True, path_length=0)
    )
    assert value(x509.AuthorityKeyIdentifier).value.key_identifier == (
        authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest
    )


def test_private_keys_are_private_and_nothing_else_is_left_behind(tmp_path: Path) -> None:
    create_authority(tmp_path / "ca", "med")
    create_site(tmp_path / "a", "med", "a")
    for key in (tmp_path / "ca" / "ca.key", tmp_path / "a" / "site.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"ca.key", "ca.crt", "site.key", "site.csr"}


def test_an_existing_key_is_never_overwritten(fed: Federation) -> None:
    keys = fed.authority / "ca.key", fed.alpha_dir / "site.key"
    before = [key.read_bytes() for key in keys]
    with pytest.raises(IdentityError, match="not overwritten"):
        create_authority(fed.authority, "med")
    with pytest.raises(IdentityError, match="not overwritten"):
        create_site(fed.alpha_dir, "med", "alpha")
    assert [key.read_bytes() for key in keys] == before


@pytest.mark.parametrize("bad", ["", "-a", "A", "a b", "a/b", "a.b", "a\n", "ä", "a" * 64])
def test_ids_that_would_not_fit_a_certificate_name_are_refused(tmp_path: Path, bad: str) -> None:
    with pytest.raises(IdentityError, match="is refused"):
        create_site(tmp_path, "med", bad)
    with pytest.raises(IdentityError, match="is refused"):
        create_authority(tmp_path, bad)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("site", ["a", "a" * 63, "0-"])
def test_every_allowed_id_can_be_enrolled(tmp_path: Path, site: str) -> None:
    create_authority(tmp_path / "ca", "f" * 63)
    assert enrol(tmp_path, site, "f" * 63).site_id == site


# ---- what the authority signs ---------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [
        [],
        [DNS],
        [URI],
        [URI, URI, DNS],
        [URI, x509.UniformResourceIdentifier("hanse://med/site/alpha"), DNS],
        [URI, DNS, x509.DNSName("alpha.med.hanse.internal")],
        [URI, x509.DNSName("alpha.med.hanse.internal")],
        [URI, x509.DNSName("hanse://med/site/mallory")],
        [URI, DNS, x509.RFC822Name("mallory@example.org")],
        [x509.UniformResourceIdentifier("hanse://other/site/mallory"), DNS],
        [x509.UniformResourceIdentifier("hanse://med/site/Mallory"), DNS],
        [x509.UniformResourceIdentifier("hanse://med/site/mallory/x"), DNS],
        [x509.UniformResourceIdentifier("hanse://med/authority")],
    ],
)
def test_a_request_with_forged_names_is_not_signed(fed: Federation, names: list[Name]) -> None:
    with pytest.raises(IdentityError, match="the request"):
        sign_request(fed.authority, forged_request(names))


def test_a_request_in_another_sites_name_is_caught_by_who_was_expected(
    fed: Federation,
) -> None:
    claim = [
        x509.UniformResourceIdentifier("hanse://med/site/alpha"),
        x509.DNSName("alpha.med.hanse.internal"),
    ]
    with pytest.raises(IdentityError, match="expected 'mallory'"):
        sign_request(fed.authority, forged_request(claim), expect_site="mallory")


def test_a_request_for_somebody_elses_key_is_not_signed(fed: Federation) -> None:
    request = x509.load_pem_x509_csr(forged_request([URI, DNS]))
    raw = bytearray(request.public_bytes(serialization.Encoding.DER))
    raw[-5] ^= 1  # in the signature, which proves that the key is held
    body = x509.load_der_x509_csr(bytes(raw)).public_bytes(serialization.Encoding.PEM)
    with pytest.raises(IdentityError):
        sign_request(fed.authority, body)


def test_a_request_for_an_rsa_key_is_not_signed(fed: Federation) -> None:
    """An RSA certificate would open the door to TLS 1.2 (docs/decisions/0002)."""
    key = rsa.generate_private_key(65537, 2048)
    request = (
        x509.CertificateSigningRequestBuilder(x509.Name([]))
        .add_extension(x509.SubjectAlternativeName([URI, DNS]), False)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )
    with pytest.raises(IdentityError, match="not P-256"):
        sign_request(fed.authority, request)


def test_a_site_is_never_certified_beyond_its_authority(tmp_path: Path) -> None:
    create_authority(tmp_path / "ca", "med", days=30)
    authority = x509.load_pem_x509_certificate((tmp_path / "ca" / "ca.crt").read_bytes())
    assert enrol(tmp_path, "alpha").not_after == authority.not_valid_after_utc


def test_an_expired_authority_signs_nothing(tmp_path: Path) -> None:
    create_authority(tmp_path / "ca", "med", days=30, now=NOW - 31 * DAY)
    create_site(tmp_path / "a", "med", "a")
    with pytest.raises(IdentityError, match="the authority expired"):
        sign_request(tmp_path / "ca", (tmp_path / "a" / "site.csr").read_bytes())


def test_an_authority_with_anothers_key_signs_nothing(tmp_path: Path) -> None:
    for name in ("ca", "other"):
        create_authority(tmp_path / name, "med")
    (tmp_path / "other" / "ca.key").rename(tmp_path / "ca" / "ca.key")
    with pytest.raises(IdentityError, match="another key"):
        sign_with_authority(tmp_path / "ca", b"manifest")


# ---- what a site installs and loads -----------------------------------------------


def test_a_certificate_for_another_sites_key_is_not_installed(
    fed: Federation, tmp_path: Path
) -> None:
    create_site(tmp_path, "med", "alpha")
    with pytest.raises(IdentityError, match="another key"):
        install(tmp_path, fed.alpha.certificate_pem, fed.alpha.authority_pem)
    assert not (tmp_path / "site.crt").exists()


def test_a_certificate_with_another_id_than_was_asked_for_is_not_installed(
    fed: Federation, tmp_path: Path
) -> None:
    create_site(tmp_path, "med", "gamma")
    key = serialization.load_pem_private_key((tmp_path / "site.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    renamed = sign_request(fed.authority, forged_request([URI, DNS], key))
    with pytest.raises(IdentityError, match="'mallory', expected 'gamma'"):
        install(tmp_path, renamed, fed.alpha.authority_pem)


def test_an_installed_authority_is_not_exchanged(tmp_path: Path) -> None:
    create_authority(tmp_path / "ca", "med")
    enrol(tmp_path, "alpha")
    create_authority(tmp_path / "impostor", "med")
    request = (tmp_path / "alpha" / "site.csr").read_bytes()
    certificate = sign_request(tmp_path / "impostor", request)
    before = (tmp_path / "alpha" / "ca.crt").read_bytes()
    with pytest.raises(IdentityError, match="another authority"):
        install(tmp_path / "alpha", certificate, (tmp_path / "impostor/ca.crt").read_bytes())
    assert (tmp_path / "alpha" / "ca.crt").read_bytes() == before


def test_a_renewed_certificate_is_installed_over_the_old_one(tmp_path: Path) -> None:
    create_authority(tmp_path / "ca", "med")
    old = enrol(tmp_path, "alpha")
    renewed = sign_request(tmp_path / "ca", (tmp_path / "alpha/site.csr").read_bytes(), days=700)
    install(tmp_path / "alpha", renewed, (tmp_path / "ca/ca.crt").read_bytes())
    assert load(tmp_path / "alpha").not_after > old.not_after


def test_a_key_that_others_could_read_is_not_loaded(tmp_path: Path) -> None:
    create_authority(tmp_path / "ca", "med")
    enrol(tmp_path, "alpha")
    (tmp_path / "alpha" / "site.key").chmod(0o640)
    with pytest.raises(IdentityError, match=r"others may read the private key.*chmod 600"):
        load(tmp_path / "alpha")


def test_key_and_certificate_of_different_sites_are_not_loaded_together(tmp_path: Path) -> None:
    create_authority(tmp_path / "ca", "med")
    enrol(tmp_path, "alpha")
    enrol(tmp_path, "beta")
    alpha, beta = tmp_path / "alpha", tmp_path / "beta"
    with pytest.raises(IdentityError, match="another key"):
        Identity.load(alpha / "site.crt", beta / "site.key", alpha / "ca.crt")


def test_missing_and_damaged_files_name_the_file_and_the_remedy(tmp_path: Path) -> None:
    create_authority(tmp_path / "ca", "med")
    enrol(tmp_path, "alpha")
    folder = tmp_path / "alpha"
    for name, remedy in (("site.crt", "fedctl site install"), ("site.key", "fedctl site init")):
        whole = (folder / name).read_bytes()
        for damaged in (whole[: len(whole) // 2], b"", b"\0" * 20_000):
            (folder / name).write_bytes(damaged)
            with pytest.raises(IdentityError):
                load(folder)
        (folder / name).unlink()
        with pytest.raises(IdentityError, match=rf"{name} is missing.*{remedy}"):
            load(folder)
        os.mkfifo(folder / name)  # must not hang
        with pytest.raises(IdentityError, match="not a regular file"):
            load(folder)
        (folder / name).unlink()
        (folder / name).write_bytes(whole)
        (folder / name).chmod(0o600)
    assert load(folder).site_id == "alpha"


def test_an_expired_identity_does_not_load_and_says_since_when(fed: Federation) -> None:
    with pytest.raises(IdentityError, match=r"expired on 2\d\d\d-.*fedctl site install"):
        load(fed.alpha_dir, now=fed.alpha.not_after + DAY)


def test_an_identity_does_not_print_its_key(fed: Federation) -> None:
    assert "PRIVATE" not in repr(fed.alpha)
    assert "PRIVATE" not in str(fed.alpha)
