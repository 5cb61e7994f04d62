"""Signatures in cosign's format: what a policy lets pass, and that nothing else does."""

import base64
import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa

from cloche.wire.errors import ClocheError
from cloche_server.images.auth import Credentials
from cloche_server.images.reference import DEFAULT_REGISTRY, Reference, parse
from cloche_server.images.registry import Registry
from cloche_server.images.settings import RegistrySettings, Timeouts
from cloche_server.images.trust import (
    Signature,
    TrustPolicy,
    load_policy,
    parse_policy,
    signature_tag,
    signatures_of,
    verify,
)
from tests.unit.images.pushing import Pusher, push, push_signatures, sha256, tar_of
from tests.unit.images.registries import RunningRegistry, can_run, running

REF = parse("registry.example/team/app:v1")
DIGEST, OTHER = "sha256:" + "a" * 64, "sha256:" + "b" * 64
PrivateKey = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey


def payload(digest: str = DIGEST, name: str = "registry.example/team/app", **changes: Any) -> bytes:
    """As cosign writes it."""
    critical = {
        "identity": {"docker-reference": name},
        "image": {"docker-manifest-digest": digest},
        "type": "cosign container image signature",
        **changes,
    }
    return json.dumps({"critical": critical, "optional": None}, separators=(",", ":")).encode()


def signed(key: PrivateKey, data: bytes) -> Signature:
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return Signature(data, key.sign(data, ec.ECDSA(hashes.SHA256())))
    if isinstance(key, rsa.RSAPrivateKey):
        return Signature(data, key.sign(data, padding.PKCS1v15(), hashes.SHA256()))
    return Signature(data, key.sign(data))


@dataclass
class Keys:
    """Keys of every kind, their public halves in files."""

    directory: Path
    p256: ec.EllipticCurvePrivateKey
    ed25519: ed25519.Ed25519PrivateKey
    rsa: rsa.RSAPrivateKey

    def policy(self, rules: str, default: str = "accept") -> TrustPolicy:
        names = "".join(f'{name} = "{name}.pub"\n' for name in ("p256", "ed25519", "rsa"))
        path = self.directory / "trust.toml"
        path.write_text(f'default = "{default}"\n[keys]\n{names}\n{rules}')
        return load_policy(path)


def write_public(directory: Path, name: str, key: Any) -> None:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    (directory / f"{name}.pub").write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, form))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    directory = tmp_path_factory.mktemp("keys")
    made = Keys(
        directory,
        ec.generate_private_key(ec.SECP256R1()),
        ed25519.Ed25519PrivateKey.generate(),
        rsa.generate_private_key(65537, 2048),
    )
    for name in ("p256", "ed25519", "rsa"):
        write_public(directory, name, getattr(made, name))
    return made


def has(*signatures: Signature) -> Any:
    async def fetch(ref: Reference, digest: str) -> Sequence[Signature]:
        assert digest == DIGEST
        return signatures

    return fetch


async def never(ref: Reference, digest: str) -> Sequence[Signature]:
    raise AssertionError("no signature is needed")


def rule(names: str, more: str = "", prefix: str = "registry.example/team") -> str:
    quoted = ", ".join(f'"{name}"' for name in names.split())
    return f'[[rule]]\nprefix = "{prefix}"\nkeys = [{quoted}]\n{more}\n'


async def code(policy: TrustPolicy, *signatures: Signature) -> str:
    with pytest.raises(ClocheError) as raised:
        await verify(policy, REF, DIGEST, has(*signatures))
    assert raised.value.message.isprintable()
    return raised.value.code


@pytest.mark.req("IMG-1")
@pytest.mark.parametrize("name", ["p256", "ed25519", "rsa"])
async def test_a_signature_by_a_named_key(keys: Keys, name: str) -> None:
    policy = keys.policy(rule(name))
    good = signed(getattr(keys, name), payload())
    assert await verify(policy, REF, DIGEST, has(good)) == (name,)
    for other in {"p256", "ed25519", "rsa"} - {name}:
        assert await code(policy, signed(getattr(keys, other), payload())) == "signature_invalid"
    changed = Signature(good.payload.replace(b"null", b"{}"), good.signature)
    assert await code(policy, changed) == "signature_invalid"
    for wrong in (b"", b"\0" * 64, good.signature[:-1], good.signature + b"\0", b"x" * 10_000):
        assert await code(policy, Signature(good.payload, wrong)) == "signature_invalid"


@pytest.mark.req("IMG-1")
async def test_no_signature(keys: Keys) -> None:
    assert await code(keys.policy(rule("p256"))) == "signature_missing"


@pytest.mark.req("IMG-1")
async def test_any_and_all(keys: Keys) -> None:
    one, two = signed(keys.p256, payload()), signed(keys.rsa, payload())
    assert await verify(keys.policy(rule("rsa p256")), REF, DIGEST, has(one)) == ("p256",)
    assert await verify(keys.policy(rule("rsa p256")), REF, DIGEST, has(one, two)) == ("rsa", "p256")
    both = keys.policy(rule("rsa p256", 'require = "all"'))
    assert await verify(both, REF, DIGEST, has(one, two)) == ("rsa", "p256")
    assert await code(both, one) == "signature_invalid"
    assert await code(both, one, one) == "signature_invalid"
    bad = Signature(payload(OTHER), b"x")
    assert await verify(keys.policy(rule("p256")), REF, DIGEST, has(bad, one)) == ("p256",)


@pytest.mark.req("IMG-1")
@pytest.mark.parametrize(
    "data",
    [
        payload(OTHER),
        payload(DIGEST.upper()),
        payload(type="atomic container signature"),
        payload(type=None),
        payload(image={}),
        payload(image=None),
        payload(identity=None),
        b"{}",
        b"[]",
        b"",
        b"\xff",
        b'{"critical":{}}',
        payload()[:-1] + b',"critical":{}}',
        payload() + b" " * 65536,
    ],
)
async def test_a_good_signature_over_something_else(keys: Keys, data: bytes) -> None:
    assert await code(keys.policy(rule("p256")), signed(keys.p256, data)) == "signature_invalid"


@pytest.mark.req("IMG-1")
async def test_a_signature_for_another_repository(keys: Keys) -> None:
    strict, loose = (keys.policy(rule("p256", f'identity = "{word}"')) for word in ("repository", "any"))
    for name, is_same in [
        ("registry.example/team/app", True),
        ("registry.example/team/app:v7", True),
        ("registry.example/team/other", False),
        ("other.example/team/app", False),
        ("team/app", False),
        ("", False),
        ("registry.example/team/App", False),
    ]:
        given = signed(keys.p256, payload(name=name))
        assert await verify(loose, REF, DIGEST, has(given)) == ("p256",)
        if is_same:
            assert await verify(strict, REF, DIGEST, has(given)) == ("p256",)
        else:
            assert await code(strict, given) == "signature_invalid"


@pytest.mark.req("IMG-1")
async def test_which_rule_counts(keys: Keys) -> None:
    open_below = '[[rule]]\nprefix = "registry.example/team/open"\naction = "accept"\n'
    closed = '[[rule]]\nprefix = "closed.example"\naction = "refuse"\n'
    host = rule("rsa", prefix="registry.example")
    policy = keys.policy(rule("p256") + open_below + closed + host)
    for name, wanted in [
        ("registry.example/team/app", ("p256",)),
        ("registry.example/team", ("p256",)),
        ("registry.example/teams/app", ("rsa",)),
        ("registry.example/other", ("rsa",)),
        ("registry.example:5000/team/app", ()),
        ("registry.example/team/open/x", ()),
        ("registry.example/team/opener", ("p256",)),
        ("python", ()),
    ]:
        assert policy.rule(parse(name)).keys == wanted
    assert await verify(policy, parse("registry.example/team/open/x"), DIGEST, never) == ()
    assert await verify(TrustPolicy(), REF, DIGEST, never) == ()
    for refusing, name in [(policy, "closed.example/x"), (keys.policy("", "refuse"), "python")]:
        with pytest.raises(ClocheError) as raised:
            await verify(refusing, parse(name), DIGEST, never)
        assert raised.value.code == "signature_missing"


def test_the_default_registry_is_written_in_full(keys: Keys) -> None:
    policy = keys.policy(rule("p256", prefix=f"{DEFAULT_REGISTRY}/library"))
    assert policy.rule(parse("python")).keys == ("p256",)
    assert policy.rule(parse("team/app")).keys == ()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("x = 1", "'x' is not known"),
        ("default = 'maybe'", "one of: accept, refuse"),
        ("default = ]", "line 1"),
        ("[keys]\na = 1", "a text"),
        ("[keys]\na = 'missing.pub'", "cannot be read"),
        ("[keys]\na = 'junk.pub'", "not a public key"),
        ("[keys]\na = 'p384.pub'", "ECDSA P-256"),
        ("[keys]\na = 'short.pub'", "2048"),
        ("rule = 1", "a list"),
        ("rule = [1]", "a table"),
        ("[[rule]]\nprefix = 'a.example'", "either keys or an action"),
        ("[[rule]]\nprefix = 'a.example'\nkeys = ['b']", "not in [keys]"),
        ("[[rule]]\nprefix = 'a.example'\nkeys = []\naction='accept'\nx=1", "'x' is not known"),
        ("[[rule]]\nprefix = 'a.example'\naction='maybe'", "one of"),
        ("[[rule]]\nprefix = 'python'\naction='accept'", "host of a registry"),
        ("[[rule]]\nprefix = 'a.example/'\naction='accept'", "start of an image"),
        ("[[rule]]\nprefix = 'a.example/App'\naction='accept'", "start of an image"),
        ("[[rule]]\naction='accept'", "start of an image"),
        ("[[rule]]\nprefix='a.example'\naction='accept'\n[[rule]]\nprefix='a.example'\naction='refuse'", "twice"),
    ],
)
def test_a_wrong_policy_is_refused(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "junk.pub").write_text("-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n")
    write_public(tmp_path, "p384", ec.generate_private_key(ec.SECP384R1()))
    write_public(tmp_path, "short", rsa.generate_private_key(65537, 1024))
    with pytest.raises(ClocheError) as raised:
        parse_policy(text, tmp_path / "trust.toml")
    assert raised.value.code == "invalid_request"
    assert word in raised.value.message
    assert str(tmp_path) in raised.value.message


# ------------------------------------------------------------------------ from a registry


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRegistry]:
    if not can_run():
        pytest.skip("needs Debian's docker-registry")
    with running(tmp_path_factory.mktemp("registry")) as started:
        yield started


async def verified(registry: RunningRegistry, policy: TrustPolicy, ref: Reference) -> tuple[str, ...]:
    settings = RegistrySettings(timeouts=Timeouts(retries=0))
    async with Registry(settings, Credentials.nobody()) as client:
        top, _ = await client.resolve(ref)
        return await verify(policy, ref, top.digest, signatures_of(client))


@pytest.mark.req("IMG-1")
async def test_signatures_of_a_registry(keys: Keys, registry: RunningRegistry, tmp_path: Path) -> None:
    """The signature is made by openssl, as `cosign sign --key` makes it: DER of ECDSA over SHA-256, in base64."""
    image = push(registry, "team/app", "v1", [tar_of({"a": b"1"})])
    ref = parse(f"{registry.host}/team/app:v1")
    policy = keys.policy(rule("p256", 'identity = "repository"', prefix=registry.host))
    with pytest.raises(ClocheError) as raised:
        await verified(registry, policy, ref)
    assert raised.value.code == "signature_missing"

    private = tmp_path / "cosign.key"
    form = serialization.PrivateFormat.PKCS8
    private.write_bytes(keys.p256.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    data = payload(image.digest, f"{registry.host}/team/app")
    argv = ["openssl", "dgst", "-sha256", "-sign", str(private)]
    signature = subprocess.run(argv, input=data, capture_output=True, check=True).stdout
    pushed = push_signatures(registry, "team/app", image.digest, [(data, base64.b64encode(signature).decode())])
    assert await verified(registry, policy, ref) == ("p256",)

    # The same signature under the tag of another image does not speak of it.
    other = push(registry, "team/app", "v2", [tar_of({"a": b"2"})])
    with Pusher(registry, "team/app") as pusher:
        pusher.manifest(json.loads(pushed.body), signature_tag(other.digest))
    with pytest.raises(ClocheError) as raised:
        await verified(registry, policy, parse(f"{registry.host}/team/app:v2"))
    assert raised.value.code == "signature_invalid"
    assert "another digest" in str(raised.value.detail)


@pytest.mark.req("IMG-1")
@pytest.mark.parametrize("text", ["", "%%%", "x" * 20_000, base64.b64encode(b"junk").decode()])
async def test_annotations_that_are_no_signature(keys: Keys, registry: RunningRegistry, text: str) -> None:
    image = push(registry, f"team/bad{len(text)}", "v1", [tar_of({"a": b"1"})])
    push_signatures(registry, f"team/bad{len(text)}", image.digest, [(payload(image.digest), text)])
    policy = keys.policy(rule("p256", prefix=registry.host))
    with pytest.raises(ClocheError) as raised:
        await verified(registry, policy, parse(f"{registry.host}/team/bad{len(text)}:v1"))
    assert raised.value.code == "signature_invalid"


@pytest.mark.req("IMG-1")
async def test_a_payload_that_was_changed_in_the_registry(keys: Keys, registry: RunningRegistry) -> None:
    image = push(registry, "team/changed", "v1", [tar_of({"a": b"1"})])
    data = payload(image.digest)
    text = base64.b64encode(signed(keys.p256, data).signature).decode()
    push_signatures(registry, "team/changed", image.digest, [(data, text)])
    registry.blob_file(sha256(data)).write_bytes(data.replace(b"null", b"NULL"))
    with pytest.raises(ClocheError) as raised:
        await verified(
            registry, keys.policy(rule("p256", prefix=registry.host)), parse(f"{registry.host}/team/changed:v1")
        )
    assert raised.value.code == "image_corrupt"
