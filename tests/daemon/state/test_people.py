"""Who signs in elsewhere, by files and signed tokens alone: attacks, and mistakes of operators."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
from pathlib import Path
from typing import Any

import jwt
import pytest

from config.loading import SettingsError
from config.people import Grant, Issuer, Speaker
from daemon.state.people import LONGEST_JWT, People, PeopleUnknown, SignInRefused
from tests.daemon.questions.people import (
    SECRET,
    Provider,
    grant,
    speaker,
    spoken,
    write_people,
)

NOW = 1_800_000_000.0
NURSES = {"nurses": grant("ask", collections=["open"])}


@pytest.fixture
def clinic(tmp_path: Path) -> Provider:
    return Provider(tmp_path)


@pytest.fixture
def people(tmp_path: Path, clinic: Provider) -> People:
    groups = {**NURSES, "board": grant("search", collections=["hr", "open/minutes"])}
    issuers = {"clinic": clinic.table(groups)}
    chat = speaker(tmp_path, {"user": grant("ask")})
    return People(write_people(tmp_path, issuers=issuers, chat=chat))


def refusal(people: People, token: str, now_s: float = NOW) -> str:
    with pytest.raises(SignInRefused) as refused:
        people.signed_in(token, now_s)
    return str(refused.value)


def encoded(part: Any) -> str:
    raw = part if isinstance(part, bytes) else json.dumps(part).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


# ---- who is let in, and as what -------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["RS256", "PS256", "ES256", "EdDSA"])
def test_a_signature_by_a_key_of_the_file_lets_somebody_in(tmp_path: Path, algorithm: str) -> None:
    clinic = Provider(tmp_path, algorithm=algorithm)
    people = People(write_people(tmp_path, issuers={"clinic": clinic.table(NURSES)}))
    ann = people.signed_in(clinic.token("ann", ["nurses", "cooks"], NOW), NOW)
    assert (ann.name, ann.may, ann.expires_s) == ("oidc:clinic:ann", {"ask": ("open",)}, NOW + 300)


def test_of_several_groups_each_scope_has_its_own_collections(
    people: People, clinic: Provider
) -> None:
    """One who asks of the wards and searches the board's files does not ask of these."""
    ann = people.signed_in(clinic.token("ann", ["nurses", "board"], NOW), NOW)
    assert ann.may == {"ask": ("open",), "search": ("hr", "open/minutes")}


def test_of_groups_with_one_scope_collections_come_together(
    tmp_path: Path, clinic: Provider
) -> None:
    groups = {
        "a": grant("ask", collections=["hr", "open/x"]),
        "b": grant("ask", collections=["open"]),
        "c": grant("ask"),
    }
    people = People(write_people(tmp_path, issuers={"clinic": clinic.table(groups)}))
    assert people.signed_in(clinic.token("x", ["a", "b"], NOW), NOW).may == {"ask": ("hr", "open")}
    assert people.signed_in(clinic.token("x", ["a", "c"], NOW), NOW).may == {"ask": None}


def test_groups_may_stand_within_another_claim(tmp_path: Path, clinic: Provider) -> None:
    table = clinic.table(NURSES, groups_claim=["realm_access", "roles"])
    people = People(write_people(tmp_path, issuers={"clinic": table}))
    token = clinic.token("ann", [], NOW, realm_access={"roles": ["nurses"]})
    assert people.signed_in(token, NOW).may == {"ask": ("open",)}
    assert "in no group" in refusal(people, clinic.token("ann", ["nurses"], NOW))


def test_what_keycloak_leaves_out_is_not_missed(people: People, clinic: Provider) -> None:
    token = clinic.token("ann", ["nurses"], NOW, nbf=None, aud=["account", "hanse"])
    assert people.signed_in(token, NOW).name == "oidc:clinic:ann"


# ---- attacks -------------------------------------------------------------------------


def test_a_token_without_a_signature_is_none(people: People, clinic: Provider) -> None:
    claims = clinic.claims("ann", ["nurses"], NOW)
    for alg in ("none", "None", "NONE", ""):
        header = encoded({"alg": alg, "kid": "one"})
        for end in ("", encoded(b"x")):
            assert refusal(people, f"{header}.{encoded(claims)}.{end}")


def test_the_public_key_is_no_secret_of_hs256(tmp_path: Path) -> None:
    clinic = Provider(tmp_path, algorithm="RS256")
    people = People(write_people(tmp_path, issuers={"clinic": clinic.table(NURSES)}))
    claims = encoded(clinic.claims("ann", ["nurses"], NOW))
    jwk = json.dumps(clinic.jwk("one")).encode()
    for secret in (clinic.pem(), clinic.pem().strip(), jwk):
        begin = f"{encoded({'alg': 'HS256', 'kid': 'one'})}.{claims}"
        made = hmac.new(secret, begin.encode(), hashlib.sha256).digest()
        assert "not signed as this site has it" in refusal(people, f"{begin}.{encoded(made)}")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"aud": "another"}, "not for this site"),
        ({"aud": None}, "does not say aud"),
        ({"iss": "https://evil.example"}, "no issuer"),
        ({"iss": None}, "no issuer"),
        ({"sub": None}, "does not say sub"),
        ({"sub": 7}, "signature"),
        ({"sub": "ann\nfedd"}, "sub is not"),
        ({"sub": "a" * 256}, "sub is not"),
        ({"sub": ""}, "sub is not"),
        ({"exp": None}, "does not say exp"),
        ({"iat": None}, "does not say iat"),
        ({"exp": "2100-01-01"}, "no time"),
        ({"exp": True}, "no time"),
        ({"exp": float("inf")}, "no time"),
        ({"exp": float("nan")}, "no time"),
        ({"exp": NOW - 30}, "expired"),
        ({"iat": NOW + 31}, "may not ask yet"),
        ({"nbf": NOW + 31}, "may not ask yet"),
        ({"exp": NOW + 13 * 3600}, "lives longer"),
        ({"iat": 0, "nbf": 0}, "lives longer"),
        ({"groups": []}, "in no group"),
        ({"groups": None}, "in no group"),
        ({"groups": {"nurses": True}}, "in no group"),
        ({"groups": [["nurses"]]}, "in no group"),
        ({"events": {}}, "notice"),
    ],
)
def test_what_a_token_says_has_to_be_right(
    people: People, clinic: Provider, said: dict[str, Any], why: str
) -> None:
    assert why in refusal(people, clinic.token("ann", ["nurses"], NOW, **said))


def test_half_a_minute_between_the_clocks_is_forgiven(people: People, clinic: Provider) -> None:
    token = clinic.token("ann", ["nurses"], NOW)
    assert people.signed_in(token, NOW - 30)
    assert people.signed_in(token, NOW + 329)
    assert "expired" in refusal(people, token, NOW + 330)


@pytest.mark.parametrize("key", ["jku", "x5u", "jwk", "x5c"])
def test_keys_that_a_token_brings_along_are_not_looked_at(
    people: People, clinic: Provider, tmp_path: Path, key: str
) -> None:
    """Signed by the stranger's own key, which the header names."""
    (tmp_path / "evil").mkdir()
    evil = Provider(tmp_path / "evil")
    brought = {"jku": evil.file.as_uri(), "x5u": evil.file.as_uri()}
    brought |= {"jwk": evil.jwk("one"), "x5c": [encoded(evil.pem())]}  # type: ignore[dict-item]
    claims = clinic.claims("ann", ["nurses"], NOW)
    forged = evil.signed(claims, {"kid": "one", key: brought[key]})
    assert "signature is wrong" in refusal(people, forged)
    forged = evil.signed(claims, {"kid": str(evil.file), key: brought[key]})
    assert "no key" in refusal(people, forged)
    real = clinic.signed(claims, {"kid": "one", key: brought[key]})
    assert people.signed_in(real, NOW).name == "oidc:clinic:ann"


def test_a_key_of_one_issuer_signs_for_no_other(tmp_path: Path, clinic: Provider) -> None:
    bank = Provider(tmp_path, "bank")
    bank.add("two")
    issuers = {"clinic": clinic.table(NURSES), "bank": bank.table({"nurses": grant("search")})}
    people = People(write_people(tmp_path, issuers=issuers))
    claims = clinic.claims("ann", ["nurses"], NOW)
    assert "no key" in refusal(people, bank.signed(claims, {"kid": "two"}, "two"))
    assert "signature" in refusal(people, bank.signed(claims, {"kid": "one"}))
    assert people.signed_in(bank.token("ann", ["nurses"], NOW), NOW).name == "oidc:bank:ann"


@pytest.mark.parametrize(
    "header",
    [
        {"kid": None},
        {"kid": 7},
        {"kid": ["one"]},
        {"kid": "../../etc/passwd"},
        {"kid": "one", "crit": ["exp"]},
        {"kid": "one", "typ": "logout+jwt"},
        {"kid": "one", "zip": "DEF"},
    ],
)
def test_a_header_of_another_kind_is_refused(
    people: People, clinic: Provider, header: dict[str, Any]
) -> None:
    claims = encoded(clinic.claims("ann", ["nurses"], NOW))
    begin = f"{encoded({'alg': 'ES256', **header})}.{claims}"
    signs = jwt.algorithms.ECAlgorithm(jwt.algorithms.ECAlgorithm.SHA256)
    signature = signs.sign(begin.encode(), clinic.keys["one"])
    assert refusal(people, f"{begin}.{encoded(signature)}")


def test_what_is_no_token_is_refused_before_it_is_read(people: People, clinic: Provider) -> None:
    token = clinic.token("ann", ["nurses"], NOW)
    deep = f"{encoded(b'[' * 6000)}.{encoded(b'[' * 100)}.x"
    long = clinic.token("ann", ["x" * LONGEST_JWT], NOW)
    more = (token + "=", token + "\n", f" {token}", f"{token}.{token}", "..", "a.b.c", "", "é.é.é")
    for one in ("x" * (1 << 20), long, deep, token[:-2], *more):
        assert refusal(people, one)
    inner = f"{token.split('.')[0]}.{encoded(b'[' * 5000)}.{token.split('.')[2]}"
    assert refusal(people, inner)
    assert refusal(people, f"{token.split('.')[0]}.{encoded(b'9' * 5000)}.x")


# ---- a program that asks for people ---------------------------------------------------


def test_a_program_says_for_whom_it_asks(people: People) -> None:
    ann = people.spoken_for("chat", spoken("u-1", "user", NOW), NOW)
    assert (ann.name, ann.may) == ("token:chat:u-1", {"ask": None})
    assert people.speaks("chat")
    assert not people.speaks("other")


@pytest.mark.parametrize(
    ("token", "why"),
    [
        (spoken("u-1", "user", NOW, secret="another secret of somebody else's, long"), "signature"),
        (spoken("u-1", "user", NOW, iss="closed-webui"), "iss"),
        (spoken("u-1", "pending", NOW), "in no group"),
        (spoken("u-1", "user", NOW - 331), "expired"),
        (spoken("u-1", "user", NOW, exp=int(NOW) + 7200), "lives longer"),
        (spoken("u 1", "user", NOW), "sub is not"),
        (jwt.encode({"sub": "u-1"}, "", algorithm="none"), "refused|no signed|HS256"),
        (jwt.encode({"sub": "u-1"}, SECRET * 2, algorithm="HS512"), "HS256"),
    ],
)
def test_what_a_program_says_has_to_be_signed_for_it(people: People, token: str, why: str) -> None:
    with pytest.raises(SignInRefused, match=why):
        people.spoken_for("chat", token, NOW)


def test_a_program_s_signature_is_no_sign_in(people: People, clinic: Provider) -> None:
    assert refusal(people, spoken("u-1", "user", NOW, iss=clinic.issuer, aud="hanse"))
    with pytest.raises(SignInRefused):
        people.spoken_for("chat", clinic.token("ann", ["nurses"], NOW), NOW)


# ---- files that change ----------------------------------------------------------------


def test_a_new_key_is_taken_and_one_that_is_out_is_refused(
    people: People, clinic: Provider
) -> None:
    before = clinic.token("ann", ["nurses"], NOW)
    assert people.signed_in(before, NOW)
    clinic.add("two")
    assert people.signed_in(clinic.token("ann", ["nurses"], NOW, "two"), NOW)
    clinic.drop("one")
    assert "whoever administers the site brings" in refusal(people, before)
    assert [one.keys for one in people.issuers()] == [("two",)]


def test_a_file_that_can_t_be_used_lets_nobody_in(
    people: People, clinic: Provider, tmp_path: Path
) -> None:
    token = clinic.token("ann", ["nurses"], NOW)
    whole = (tmp_path / "people.toml").read_text()
    (tmp_path / "people.toml").write_text(whole.replace('"issuers"', '"isuers"'))
    for _ in range(2):
        with pytest.raises(PeopleUnknown, match="isuers"):
            people.signed_in(token, NOW)
    assert "isuers" in people.fault()
    assert people.speaks("chat"), "a program that asked for people is not suddenly anybody"
    (tmp_path / "people.toml").write_text(whole)
    assert people.signed_in(token, NOW)
    assert people.fault() == ""


def test_a_file_that_is_gone_lets_nobody_in(people: People, clinic: Provider) -> None:
    clinic.file.unlink()
    with pytest.raises(PeopleUnknown, match="No such file"):
        people.signed_in(clinic.token("ann", ["nurses"], NOW), NOW)


def broken(folder: Path, clinic: Provider, **options: Any) -> str:
    with pytest.raises(SettingsError) as error:
        People(write_people(folder, issuers={"clinic": clinic.table(NURSES, **options)}))
    return str(error.value)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"algorithms": ["none"]}, "issuers.clinic.algorithms"),
        ({"algorithms": ["HS256"]}, "by a private key"),
        ({"algorithms": []}, "issuers.clinic.algorithms"),
        ({"algorithms": ["RS256"]}, "no key with a kid that verifies RS256"),
        ({"issuer": ""}, "issuers.clinic.issuer"),
        ({"longest_hours": 48}, "issuers.clinic.longest_hours = 48"),
        ({"url": "https://sso"}, "issuers.clinic.url"),
        ({"keys": "nowhere.json"}, "No such file"),
    ],
)
def test_an_option_out_of_bounds_is_told_by_its_name(
    tmp_path: Path, clinic: Provider, options: dict[str, Any], why: str
) -> None:
    assert why in broken(tmp_path, clinic, **options)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"scopes": ["ask"]}, "collections, or all_documents"),
        (grant("ask", collections=["x"], all_documents=True), "collections, or all_documents"),
        (grant("ask", collections=[]), "collections, or all_documents"),
        (grant("ask", collections=["/"]), "names of collections"),
        (grant("train"), "ask, search"),
        (grant(), "ask, search"),
        (grant("metrics", collections=["x"]), "figures are of all documents"),
        (grant("ask", "view", collections=["x"]), "figures are of all documents"),
    ],
)
def test_what_a_group_may_has_to_be_said(
    tmp_path: Path, clinic: Provider, given: dict[str, Any], why: str
) -> None:
    with pytest.raises(SettingsError, match=why):
        People(write_people(tmp_path, issuers={"clinic": clinic.table({"nurses": given})}))


def test_two_tables_of_one_issuer_are_refused(tmp_path: Path, clinic: Provider) -> None:
    tables = {"a": clinic.table(NURSES), "b": clinic.table(NURSES)}
    with pytest.raises(SettingsError, match=r"issuers\.b\.issuer"):
        People(write_people(tmp_path, issuers=tables))


def test_a_file_of_keys_holds_public_keys_alone(tmp_path: Path) -> None:
    clinic = Provider(tmp_path, algorithm="RS256")
    weak = encoded(bytes([1]) + bytes(125) + bytes([1]))  # 1,009 bits
    usable = clinic.jwk("one")
    for keys, why in (
        ([usable, {"kty": "oct", "k": "c2VjcmV0", "kid": "s"}], "a private key or a secret"),
        ([{**usable, "d": "AQAB"}], "a private key or a secret"),
        ([usable, usable], "one kid"),
        ([{**usable, "use": "enc"}], "no key with a kid"),
        ([{**usable, "alg": "RSA-OAEP"}], "no key with a kid"),
        ([{**usable, "key_ops": ["encrypt"]}], "no key with a kid"),
        ([{**usable, "kid": None}], "no key with a kid"),
        ([{**usable, "n": weak}], "2048 to 8192 bits"),
        ([{**usable, "e": "AQAAAAAAAAAB"}], "2048 to 8192 bits|can't be read"),
        ([{**usable, "n": "é"}], "can't be read"),
        ([{**usable, "kid": str(n)} for n in range(101)], "at most 100"),
    ):
        clinic.write(*keys)
        with pytest.raises(SettingsError, match=why):
            People(write_people(tmp_path, issuers={"clinic": clinic.table(NURSES)}))
    clinic.file.write_text("[]")
    assert "no JWKS" in broken(tmp_path, clinic)
    clinic.file.write_text("[" * 100_000)
    assert "no JWKS" in broken(tmp_path, clinic)
    clinic.file.write_text(" " * (1 << 20))
    assert "more than" in broken(tmp_path, clinic)


def test_a_secret_that_others_may_read_is_refused(tmp_path: Path) -> None:
    table = speaker(tmp_path, {"user": grant("ask")})
    file = tmp_path / "openwebui.secret"
    for mode in (0o640, 0o604):
        file.chmod(mode)
        with pytest.raises(SettingsError, match="others may read it"):
            People(write_people(tmp_path, chat=table))
    file.chmod(0o600)
    file.write_text("too short")
    with pytest.raises(SettingsError, match="less than 32 bytes"):
        People(write_people(tmp_path, chat=table))
    os.truncate(file, 0)
    with pytest.raises(SettingsError, match="less than 32 bytes"):
        People(write_people(tmp_path, chat=table))


def test_the_example_can_be_used_as_it_is(tmp_path: Path) -> None:
    """With the files that it names; and all that can be written is in it."""
    example = (Path(__file__).parents[3] / "config" / "people.example.toml").read_text()
    clinic = Provider(tmp_path, algorithm="RS256")
    speaker(tmp_path, {})
    (tmp_path / "people.toml").write_text(example)
    people = People(tmp_path / "people.toml")
    assert [one.name for one in people.issuers()] == ["clinic"]
    assert people.speaks("openwebui")
    token = clinic.token(
        "ann", ["/staff/board"], NOW, iss="https://sso.clinic.example/realms/staff"
    )
    assert people.signed_in(token, NOW).may["originals"] is None
    written = "\n".join(line.removeprefix("# ") for line in example.splitlines())
    options = {*Issuer.model_fields, *Speaker.model_fields, *Grant.model_fields} - {"groups"}
    assert [one for one in options if f"\n{one} = " not in written] == []
