"""Signatures in cosign's format ("simple signing"), by keys that the policy names. Nothing but the registry is asked.

The policy is `trust.toml`:

    default = "accept"                      # or "refuse": what no rule speaks of

    [keys]                                  # PEM: ECDSA P-256, Ed25519, RSA of 2048 bits or more
    release = "keys/release.pub"            # relative to this file

    [[rule]]                                # the longest prefix wins
    prefix = "registry.example/team"        # whole parts of the canonical name
    keys = ["release"]
    require = "any"                         # or "all" of them
    identity = "repository"                 # the signature must be for this repository; "any" (default): for the digest

    [[rule]]
    prefix = "registry.example/old"
    action = "accept"                       # or "refuse"; instead of keys

What is checked is the digest that the image's name meant: for an image of several platforms that of its index, which
names the others by their digests. Deliberately absent: certificates by a CA (Fulcio), transparency logs (Rekor), and
cosign's newer bundles; they need the network, or roots of trust that are not the user's own.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import tomllib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa

from cloche.wire.errors import ClocheError, error
from cloche_server.images.manifest import LAYERS_MAX, MANIFEST_BYTES_MAX, parse_descriptor
from cloche_server.images.reference import Reference, check_digest, parse, shown
from cloche_server.images.registry import Registry
from cloche_server.images.settings import Reader, bad_file, read_text
from cloche_server.images.strict import strict_json

FILE: Final = "trust.toml"
KEY_BYTES_MAX: Final = 64 * 1024
RULES_MAX: Final = 1000
SIGNATURES_MAX: Final = 64
PAYLOAD_BYTES_MAX: Final = 64 * 1024
SIGNATURE_CHARS_MAX: Final = 16 * 1024
RSA_BITS_MIN: Final = 2048
SIGNATURE_TYPE: Final = "cosign container image signature"
PAYLOAD_MEDIA_TYPE: Final = "application/vnd.dev.cosign.simplesigning.v1+json"
ANNOTATION: Final = "dev.cosignproject.cosign/signature"

Key = ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey | rsa.RSAPublicKey
Action = Literal["accept", "refuse"]


@dataclass(frozen=True)
class Signature:
    """Signed bytes, and the signature over them."""

    payload: bytes
    signature: bytes


FetchSignatures = Callable[[Reference, str], Awaitable[Sequence[Signature]]]
"""The signatures that are kept for a digest of a reference's repository; none is an empty list."""


@dataclass(frozen=True)
class Rule:
    """What images below `prefix` need. Without keys, `action` decides."""

    prefix: str
    keys: tuple[str, ...] = ()
    require: Literal["any", "all"] = "any"
    identity: Literal["any", "repository"] = "any"
    action: Action = "accept"

    def covers(self, ref: Reference) -> bool:
        return f"{ref.registry}/{ref.repository}/".startswith(f"{self.prefix}/")


@dataclass(frozen=True)
class TrustPolicy:
    """The whole file. Without one everything is accepted."""

    default: Action = "accept"
    keys: dict[str, Key] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()

    def rule(self, ref: Reference) -> Rule:
        fitting = [rule for rule in self.rules if rule.covers(ref)]
        return max(fitting, key=lambda rule: len(rule.prefix), default=Rule("", action=self.default))


async def verify(
    policy: TrustPolicy, ref: Reference, digest: str, fetch_signatures: FetchSignatures
) -> tuple[str, ...]:
    """The names of the rule's keys that signed the digest; `signature_missing` or `signature_invalid` otherwise."""
    check_digest(digest)
    rule = policy.rule(ref)
    if not rule.keys:
        if rule.action == "refuse":
            raise error("signature_missing", f"The trust policy refuses {shown(ref.familiar)}.")
        return ()
    signatures = await fetch_signatures(ref, digest)
    if not signatures:
        raise error("signature_missing", f"{shown(ref.familiar)} ({digest}) is not signed.")
    reasons: list[str] = []
    signed = set()
    for signature in signatures[:SIGNATURES_MAX]:
        wrong = wrong_claim(signature.payload, ref, digest, rule)
        names = [] if wrong else [name for name in rule.keys if is_signed(policy.keys[name], signature)]
        signed.update(names)
        if not names:
            reasons.append(wrong or "it is by no key of the policy")
    missing = [name for name in rule.keys if name not in signed]
    if not signed or (rule.require == "all" and missing):
        raise error(
            "signature_invalid",
            f"{shown(ref.familiar)} ({digest}) is not signed by {', '.join(missing)}.",
            detail={"missing_keys": missing, "signatures": reasons[:8]},
        )
    return tuple(name for name in rule.keys if name in signed)


def wrong_claim(payload: bytes, ref: Reference, digest: str, rule: Rule) -> str | None:
    """Why the payload does not speak of this image."""
    try:
        critical = _table(strict_json(payload, PAYLOAD_BYTES_MAX, "signature"), "critical")
        claimed = _table(critical, "image").get("docker-manifest-digest")
        identity = _table(critical, "identity").get("docker-reference")
    except ClocheError as refused:
        return refused.message
    if critical.get("type") != SIGNATURE_TYPE:
        return "it is not a signature of an image"
    if claimed != digest:
        return "it is for another digest"
    if rule.identity == "repository" and not _is_for(identity, ref):
        return "it is for another repository"
    return None


def is_signed(key: Key, signature: Signature) -> bool:
    """One way a kind of key: nothing in the signature chooses an algorithm."""
    try:
        if isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature.signature, signature.payload, ec.ECDSA(hashes.SHA256()))
        elif isinstance(key, rsa.RSAPublicKey):
            key.verify(signature.signature, signature.payload, padding.PKCS1v15(), hashes.SHA256())
        else:
            key.verify(signature.signature, signature.payload)
    except InvalidSignature:
        return False
    return True


def signature_tag(digest: str) -> str:
    """Where cosign keeps the signatures of a digest: a tag of the same repository."""
    return check_digest(digest).replace(":", "-", 1) + ".sig"


def signatures_of(registry: Registry) -> FetchSignatures:
    """Signatures as the registry has them. Each payload has the hash that its manifest names; nothing else is checked."""

    async def fetch(ref: Reference, digest: str) -> list[Signature]:
        where = ref.tagged(signature_tag(digest))
        try:
            _, body = await registry.resolve(where)
        except ClocheError as missing:
            if missing.code == "image_not_found":
                return []
            raise
        return [await _signature(registry, where, layer) for layer in _signature_layers(body)]

    return fetch


def load_policy(path: Path) -> TrustPolicy:
    """A file that is not there is an error: the caller knows whether there should be one."""
    return parse_policy(read_text(path), path)


def parse_policy(text: str, path: Path = Path(FILE)) -> TrustPolicy:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as raised:
        raise bad_file(path, None, str(raised)) from None
    reader = Reader(path, text)
    reader.only(document, {"default", "keys", "rule"}, "")
    keys = {}
    for name in reader.get(document, "keys", dict, {}):
        keys[name] = _key(reader, name, reader.get(document["keys"], name, str, ""))
    tables = reader.get(document, "rule", list, [])
    if len(tables) > RULES_MAX:
        raise reader.bad("rule", f"is there more than {RULES_MAX} times")
    rules = tuple(_rule(reader, table, keys) for table in tables)
    if len({rule.prefix for rule in rules}) != len(rules):
        raise reader.bad("rule", "has a prefix twice")
    return TrustPolicy(reader.one_of(document, "default", ("accept", "refuse")), keys, rules)


def _rule(reader: Reader, table: object, known: dict[str, Key]) -> Rule:
    if not isinstance(table, dict):
        raise reader.bad("rule", "is not a table")
    reader.only(table, {"prefix", "keys", "require", "identity", "action"}, "rule")
    prefix = reader.get(table, "prefix", str, "")
    keys = tuple(reader.strings(table, "keys"))
    for name in keys:
        if name not in known:
            raise reader.bad(name, "is not in [keys]")
    if bool(keys) == ("action" in table):
        raise reader.bad(prefix or "rule", "needs either keys or an action")
    try:
        whole = parse(f"{prefix}/any/name")
    except ClocheError as refused:
        raise reader.bad(prefix, f"is not the start of an image's name ({refused.message})") from None
    if f"{whole.registry}/{whole.repository}" != f"{prefix}/any/name":
        raise reader.bad(prefix, "does not start with the host of a registry")
    return Rule(
        prefix,
        keys,
        reader.one_of(table, "require", ("any", "all")),
        reader.one_of(table, "identity", ("any", "repository")),
        reader.one_of(table, "action", ("accept", "refuse")),
    )


def _key(reader: Reader, name: str, file: str) -> Key:
    path = reader.path.parent / file
    try:
        data = read_text(path, KEY_BYTES_MAX).encode()
        key = serialization.load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        raise reader.bad(name, f"is not a public key in PEM: {path}") from None
    if isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name == "secp256r1":
        return key
    if isinstance(key, ed25519.Ed25519PublicKey) or (
        isinstance(key, rsa.RSAPublicKey) and key.key_size >= RSA_BITS_MIN
    ):
        return key
    raise reader.bad(name, f"is not ECDSA P-256, Ed25519 or RSA of at least {RSA_BITS_MIN} bits")


def _signature_layers(body: bytes) -> list[dict[str, Any]]:
    layers = strict_json(body, MANIFEST_BYTES_MAX, "manifest").get("layers")
    if not isinstance(layers, list) or len(layers) > min(SIGNATURES_MAX, LAYERS_MAX):
        raise error("signature_invalid", f"The signatures are not a list of at most {SIGNATURES_MAX}.")
    return [each for each in layers if isinstance(each, dict) and each.get("mediaType") == PAYLOAD_MEDIA_TYPE]


async def _signature(registry: Registry, where: Reference, layer: dict[str, Any]) -> Signature:
    descriptor = parse_descriptor(layer, PAYLOAD_BYTES_MAX, "signature")
    annotations = layer.get("annotations")
    text = annotations.get(ANNOTATION) if isinstance(annotations, dict) else None
    try:
        if not isinstance(text, str) or len(text) > SIGNATURE_CHARS_MAX:
            raise ValueError("no signature")
        signature = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise error("signature_invalid", "A signature is not base64 of a usual length.") from None
    async with aclosing(registry.blob(where, descriptor)) as parts:
        payload = b"".join([part async for part in parts])
    if f"sha256:{hashlib.sha256(payload).hexdigest()}" != descriptor.digest:
        raise error("image_corrupt", "The payload of a signature has another digest than its manifest says.")
    return Signature(payload, signature)


def _table(table: dict[str, Any], name: str) -> dict[str, Any]:
    found = table.get(name)
    if not isinstance(found, dict):
        raise error("signature_invalid", f"it has no {name}")
    return found


def _is_for(identity: object, ref: Reference) -> bool:
    try:
        claimed = parse(identity if isinstance(identity, str) else "")
    except ClocheError:
        return False
    return (claimed.registry, claimed.repository) == (ref.registry, ref.repository)
