"""An institution's identity provider and an Open WebUI, as a site hears of them: signed tokens.

clinic = Provider(folder)                     # clinic-jwks.json
nurses = {"nurses": grant("ask", collections=["open"])}
write_people(folder, issuers={"clinic": clinic.table(nurses)})
clinic.token("ann", ["nurses"], now_s)        # a bearer's
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

SECRET = "an-open-webui-and-a-site-share-this-secret"


def grant(*scopes: str, **of: Any) -> dict[str, Any]:
    """What a group may; of all documents, unless collections are named."""
    return {"scopes": [*scopes], **(of or {"all_documents": True})}


class Provider:
    """Keys of its own, a JWKS file, and tokens that it signs."""

    def __init__(self, folder: Path, name: str = "clinic", algorithm: str = "ES256") -> None:
        self.issuer = f"https://sso.example/realms/{name}"
        self.audience = "hanse"
        self.algorithm = algorithm
        self.file = folder / f"{name}-jwks.json"
        self.keys: dict[str, Any] = {}
        self.add("one")

    def add(self, kid: str) -> None:
        """One key more."""
        self.keys[kid] = {
            "RS": lambda: rsa.generate_private_key(65537, 2048),
            "PS": lambda: rsa.generate_private_key(65537, 2048),
            "ES": lambda: ec.generate_private_key(ec.SECP256R1()),
            "Ed": ed25519.Ed25519PrivateKey.generate,
        }[self.algorithm[:2]]()
        self.write()

    def drop(self, kid: str) -> None:
        """That key is out."""
        del self.keys[kid]
        self.write()

    def jwk(self, kid: str, **more: Any) -> dict[str, Any]:
        """A public key as it stands in the file."""
        public = self.keys[kid].public_key()
        kind: Any = {"R": RSAAlgorithm, "P": RSAAlgorithm, "E": ECAlgorithm}[self.algorithm[0]]
        kind = OKPAlgorithm if self.algorithm == "EdDSA" else kind
        told = kind.to_jwk(public, as_dict=True)
        told.pop("key_ops", None)
        return {**told, "kid": kid, "use": "sig", "alg": self.algorithm, **more}

    def write(self, *keys: dict[str, Any]) -> None:
        """The file anew, in one step, as an operator's timer does it."""
        whole = self.file.with_suffix(".new")
        told = keys or [self.jwk(kid) for kid in self.keys]
        whole.write_text(json.dumps({"keys": told}))
        whole.replace(self.file)

    def pem(self, kid: str = "one") -> bytes:
        """The public key as anybody may have it."""
        public = self.keys[kid].public_key()
        told: bytes = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        return told

    def table(self, groups: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """Its table of the operator's file."""
        return {
            "issuer": self.issuer,
            "audience": self.audience,
            "keys": self.file.name,
            "algorithms": [self.algorithm],
            **options,
            "groups": groups,
        }

    def claims(self, subject: str, groups: list[str], now_s: float) -> dict[str, Any]:
        """What a token of five minutes says."""
        return {
            "iss": self.issuer,
            "aud": self.audience,
            "sub": subject,
            "groups": groups,
            "iat": int(now_s),
            "nbf": int(now_s),
            "exp": int(now_s) + 300,
        }

    def token(
        self, subject: str, member: list[str], now_s: float, kid: str = "one", **other: Any
    ) -> str:
        """A signed token; ``other``: claims otherwise, without where it is None."""
        claims = {**self.claims(subject, member, now_s), **other}
        said = {name: value for name, value in claims.items() if value is not None}
        return self.signed(said, {"kid": kid}, kid)

    def signed(self, claims: dict[str, Any], header: dict[str, Any], kid: str = "one") -> str:
        """Whatever is said, signed."""
        return jwt.encode(claims, self.keys[kid], algorithm=self.algorithm, headers=header)


def spoken(subject: str, role: str, now_s: float, secret: str = SECRET, **other: Any) -> str:
    """What Open WebUI 0.12.4 says of who asks."""
    claims: dict[str, Any] = {
        "sub": subject,
        "email": "ann@example.org",
        "name": "Ann",
        "role": role,
    }
    claims |= {"iss": "open-webui", "iat": int(now_s), "exp": int(now_s) + 300, **other}
    return jwt.encode(claims, secret, algorithm="HS256")


def speaker(folder: Path, groups: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """A table of a token that speaks for people, and its secret beside it."""
    file = folder / "openwebui.secret"
    file.touch(mode=0o600)
    file.write_text(f"{SECRET}\n")
    return {"secret": file.name, **options, "groups": groups}


def write_people(
    folder: Path, *, issuers: Mapping[str, Any] | None = None, **speakers: Any
) -> Path:
    """The operator's file, in one step."""
    file, whole = folder / "people.toml", folder / "people.new"
    tables = {"issuers": issuers or {}, "speakers": speakers}
    whole.write_text("".join(_tables(tables)))
    whole.replace(file)
    return file


def _tables(tables: Mapping[str, Any], *above: str) -> list[str]:
    lines: list[str] = []
    for name, value in tables.items():
        if isinstance(value, Mapping):
            way = (*above, name)
            lines.append(f"[{'.'.join(json.dumps(one) for one in way)}]\n")
            lines += _tables(value, *way)
        else:
            lines.append(f"{name} = {json.dumps(value)}\n")
    return lines
