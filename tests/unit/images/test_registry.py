"""The client against real registries: Debian's docker-registry on loopback, plain, with TLS, with logins."""

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from cloche.wire.errors import ClocheError
from cloche_server.images.auth import Credentials, Login
from cloche_server.images.manifest import (
    DOCKER_MANIFEST,
    OCI_INDEX,
    OCI_MANIFEST,
    Descriptor,
    Index,
    Manifest,
    choose,
    parse_config,
    parse_manifest,
)
from cloche_server.images.reference import Reference, parse
from cloche_server.images.registry import Registry
from cloche_server.images.settings import HostSettings, RegistrySettings, Timeouts
from tests.unit.images.pushing import Pushed, push, push_index, sha256, tar_of
from tests.unit.images.registries import (
    IDENTITY_TOKEN,
    PASSWORD,
    USER,
    Ca,
    RunningRegistry,
    TokenServer,
    can_run,
    running,
    token_server,
)

pytestmark = pytest.mark.skipif(not can_run(), reason="needs Debian's docker-registry")

QUICK = Timeouts(connect_s=5, silence_s=5, retries=2, backoff_s=0.01)
ALICE = Login(USER, PASSWORD)
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRegistry]:
    with running(tmp_path_factory.mktemp("plain")) as started:
        yield started


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRegistry]:
    with running(tmp_path_factory.mktemp("private"), basic=True) as started:
        yield started


@pytest.fixture(scope="module")
def tokens() -> Iterator[TokenServer]:
    with token_server() as started:
        yield started


@pytest.fixture(scope="module")
def bearer(tmp_path_factory: pytest.TempPathFactory, tokens: TokenServer) -> Iterator[RunningRegistry]:
    with running(tmp_path_factory.mktemp("bearer"), tokens=tokens) as started:
        yield started


def client(login: Login | None = None, **hosts: HostSettings) -> Registry:
    settings = RegistrySettings(timeouts=QUICK, hosts={name.replace("_", ":"): host for name, host in hosts.items()})
    return Registry(settings, Credentials(login, use_files=False))


async def whole(registry: Registry, ref: Reference, descriptor: Descriptor, offset: int = 0) -> bytes:
    async with aclosing(registry.blob(ref, descriptor, offset)) as parts:
        return b"".join([part async for part in parts])


async def pulled(registry: Registry, ref: Reference) -> tuple[Descriptor, bytes, list[bytes]]:
    """Digest, config and layers of an image, each with the hash that it should have."""
    async with registry:
        top, body = await registry.resolve(ref)
        assert top.digest == sha256(body)
        assert top.size == len(body)
        document = parse_manifest(body, top.media_type)
        if isinstance(document, Index):
            _, body = await registry.manifest(ref, choose(document, "linux/amd64").digest)
            document = parse_manifest(body, None)
        assert isinstance(document, Manifest)
        blobs = [await whole(registry, ref, each) for each in (document.config, *document.layers)]
        assert [sha256(blob) for blob in blobs] == [each.digest for each in (document.config, *document.layers)]
    return top, blobs[0], blobs[1:]


async def failure(registry: Registry, ref: Reference) -> ClocheError:
    with pytest.raises(ClocheError) as raised:
        await pulled(registry, ref)
    assert PASSWORD not in str(raised.value)
    return raised.value


@pytest.mark.req("IMG-1")
async def test_by_tag_and_by_digest(plain: RunningRegistry) -> None:
    image = push(plain, "team/app", "v1", [tar_of({"a": b"1"}), tar_of({"b": b"2"})], {"Cmd": ["/a"]})
    for name in ("team/app:v1", f"team/app@{image.digest}", f"team/app:gone@{image.digest}"):
        top, config, layers = await pulled(client(), parse(f"{plain.host}/{name}"))
        assert (top, config, layers) == (
            Descriptor(OCI_MANIFEST, image.digest, len(image.body)),
            image.config,
            image.blobs,
        )
    assert parse_config(config).cmd == ("/a",)


@pytest.mark.req("IMG-1")
async def test_an_index_of_several_platforms(plain: RunningRegistry) -> None:
    names = ("linux/arm64/v8", "linux/amd64", "linux/s390x")
    images = {name: push(plain, "team/multi", None, [tar_of({"a": name.encode()})], platform=name) for name in names}
    index = push_index(plain, "team/multi", "v1", images)
    top, config, layers = await pulled(client(), parse(f"{plain.host}/team/multi:v1"))
    assert (top.digest, top.media_type) == (index.digest, OCI_INDEX)
    assert layers == images["linux/amd64"].blobs
    assert parse_config(config).architecture == "amd64"


@pytest.mark.req("IMG-1")
async def test_what_another_tool_wrote_in_dockers_own_format(plain: RunningRegistry) -> None:
    image = push(plain, "team/oci", "v1", [tar_of({"a": b"other tool"})])
    source, target = (f"docker://{plain.host}/team/{name}:v1" for name in ("oci", "docker"))
    flags = ["--src-tls-verify=false", "--dest-tls-verify=false", "--format", "v2s2", "--insecure-policy"]
    subprocess.run(["skopeo", *flags[4:], "copy", *flags[:4], source, target], check=True, capture_output=True)
    top, _, layers = await pulled(client(), parse(f"{plain.host}/team/docker:v1"))
    assert top.media_type == DOCKER_MANIFEST
    assert layers == image.blobs


@pytest.mark.req("IMG-1")
async def test_a_tag_that_moves_does_not_mix_two_images(plain: RunningRegistry) -> None:
    old = push(plain, "team/moves", "v1", [tar_of({"a": b"old"})])
    ref = parse(f"{plain.host}/team/moves:v1")
    async with client() as registry:
        top, _ = await registry.resolve(ref)
        new = push(plain, "team/moves", "v1", [tar_of({"a": b"new"})])
        assert new.digest != old.digest == top.digest
        _, body = await registry.manifest(ref, top.digest)
        document = parse_manifest(body, None)
        assert isinstance(document, Manifest)
        assert await whole(registry, ref, document.layers[0]) == old.blobs[0]
        again, _ = await registry.resolve(ref)
        assert again.digest == new.digest
        assert (await registry.resolve(ref.pinned(old.digest)))[1] == old.body


@pytest.mark.parametrize("name", ["team/app:missing", "team/missing:v1", f"team/app@sha256:{'0' * 64}"])
async def test_what_is_not_there(plain: RunningRegistry, name: str) -> None:
    push(plain, "team/app", "v1", [tar_of({"a": b"1"})])
    found = await failure(client(), parse(f"{plain.host}/{name}"))
    assert found.code == "image_not_found"
    assert found.detail == {}


@pytest.mark.req("IMG-1")
async def test_with_a_login(private: RunningRegistry) -> None:
    image = push(private, "team/secret", "v1", [tar_of({"a": b"secret"})])
    ref = parse(f"{private.host}/team/secret:v1")
    top, _, layers = await pulled(client(ALICE), ref)
    assert (top.digest, layers) == (image.digest, image.blobs)
    for login, word in [(None, "asks for a login"), (Login(USER, "wrong"), "may not")]:
        found = await failure(client(login), ref)
        assert found.code == "registry_denied"
        assert word in found.message


@pytest.mark.req("IMG-1")
async def test_with_a_login_from_a_file(private: RunningRegistry, tmp_path: Path) -> None:
    push(private, "team/secret", "v1", [tar_of({"a": b"secret"})])
    path = tmp_path / "auth.json"
    credentials = Credentials(environ={"REGISTRY_AUTH_FILE": str(path)})
    path.write_text(json.dumps({"auths": {private.host: {"username": USER, "password": PASSWORD}}}))
    await pulled(Registry(RegistrySettings(timeouts=QUICK), credentials), parse(f"{private.host}/team/secret:v1"))


@pytest.mark.req("IMG-1")
async def test_with_tokens(bearer: RunningRegistry, tokens: TokenServer) -> None:
    image = push(bearer, "team/token", "v1", [tar_of({"a": b"1"}), tar_of({"b": b"2"})])
    ref = parse(f"{bearer.host}/team/token:v1")
    tokens.seen.clear()
    top, _, layers = await pulled(client(ALICE), ref)
    assert (top.digest, layers) == (image.digest, image.blobs)
    assert len(tokens.seen) == 1  # one token for a manifest and three blobs
    assert tokens.seen[0]["scope"] == "repository:team/token:pull"
    assert tokens.seen[0]["account"] == USER
    await pulled(client(Login("", "", IDENTITY_TOKEN)), ref)
    assert tokens.seen[1]["grant_type"] == "refresh_token"
    assert tokens.seen[1]["authorization"] is None
    for login in (None, Login(USER, "wrong"), Login("", "", "wrong")):
        assert (await failure(client(login), ref)).code == "registry_denied"
    tokens.seen.clear()
    async with client(ALICE) as registry:
        await asyncio.gather(*(registry.resolve(ref) for _ in range(4)))
    assert len(tokens.seen) == 1  # one for all who ask at the same time


@pytest.mark.req("IMG-1")
async def test_a_public_repository_of_a_registry_with_tokens(bearer: RunningRegistry, tokens: TokenServer) -> None:
    image = push(bearer, "team/public", "v1", [tar_of({"a": b"1"})])
    tokens.public.add("team/public")
    assert (await pulled(client(), parse(f"{bearer.host}/team/public:v1")))[0].digest == image.digest


@pytest.mark.req("IMG-1")
async def test_a_token_that_runs_out_is_fetched_anew(bearer: RunningRegistry, tokens: TokenServer) -> None:
    image = push(bearer, "team/token", "v1", [tar_of({"a": b"1"})])
    ref = parse(f"{bearer.host}/team/token:v1")
    tokens.seen.clear()
    tokens.seconds = -100  # out of date for the registry, which allows a minute; the client keeps it for a while
    try:
        async with client(ALICE) as registry:
            with pytest.raises(ClocheError, match="may not be read"):
                await registry.resolve(ref)
            tokens.seconds = 300
            assert (await registry.resolve(ref))[0].digest == image.digest
    finally:
        tokens.seconds = 300
    assert len(tokens.seen) == 2


@pytest.mark.req("IMG-1")
async def test_tls_by_an_authority_of_our_own(tmp_path: Path) -> None:
    ca, other = Ca.make(tmp_path), Ca.make(tmp_path, "Other CA")
    with running(tmp_path, ca=ca) as registry:
        image = push(registry, "app", "v1", [tar_of({"a": b"1"})])
        for host in (registry.host, registry.host.replace("127.0.0.1", "localhost")):
            trusting = client(**{host.replace(":", "_"): HostSettings(ca_file=ca.file)})
            assert (await pulled(trusting, parse(f"{host}/app:v1")))[0].digest == image.digest
        ref = parse(f"{registry.host}/app:v1")
        for settings in (
            {},
            {registry.host: HostSettings(insecure=True)},
            {registry.host: HostSettings(ca_file=other.file)},
        ):
            found = await failure(client(**{name.replace(":", "_"): each for name, each in settings.items()}), ref)
            assert found.code == "registry_unreachable"
            assert "is not trusted" in found.message
            assert "ca_file" in found.message
        for bad in (tmp_path / "missing.pem", tmp_path / "log"):
            found = await failure(client(**{registry.host.replace(":", "_"): HostSettings(ca_file=bad)}), ref)
            assert f"ca_file {bad} cannot be used" in found.message


@pytest.mark.req("IMG-1")
async def test_mirrors_in_order_and_then_the_registry(
    plain: RunningRegistry, private: RunningRegistry, tmp_path: Path
) -> None:
    image = push(plain, "library/python", "3.12-slim", [tar_of({"a": b"1"})])
    ref = parse("python:3.12-slim")
    mirrors = ("http://127.0.0.1:1", private.url, f"{plain.url}/")
    settings = RegistrySettings(
        timeouts=QUICK, hosts={ref.registry: HostSettings(mirrors=tuple(m.rstrip("/") for m in mirrors))}
    )
    registry = Registry(settings, Credentials(ALICE, use_files=False))
    assert (await pulled(registry, ref))[0].digest == image.digest

    only = push(private, "only", "here", [tar_of({"a": b"1"})])
    host = HostSettings(mirrors=(plain.url, "http://127.0.0.1:1"))
    assert (await pulled(client(ALICE, **{private.host.replace(":", "_"): host}), parse(f"{private.host}/only:here")))[
        0
    ].digest == only.digest
    found = await failure(client(ALICE, **{private.host.replace(":", "_"): host}), parse(f"{private.host}/nowhere:x"))
    assert found.code == "image_not_found"
    assert set(found.detail["mirrors"]) == {plain.url, "http://127.0.0.1:1"}


async def test_nobody_listens() -> None:
    found = await failure(client(), parse("127.0.0.1:1/app:v1"))
    assert found.code == "registry_unreachable"
    assert "no connection" in found.message


async def test_a_name_without_address() -> None:
    found = await failure(client(), parse("registry.invalid/app:v1"))
    assert found.code == "registry_unreachable"
    assert "has no address" in found.message


@contextlib.asynccontextmanager
async def cutting(upstream: str, cut_after: int, cuts: int) -> AsyncIterator[str]:
    """A forwarder that breaks the first `cuts` connections once they have carried `cut_after` bytes of answers."""
    host, _, port = upstream.partition(":")
    left = cuts
    tasks: set[asyncio.Task[object]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal left
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        up_reader, up_writer = await asyncio.open_connection(host, int(port))
        asking = asyncio.create_task(_carry(reader, up_writer))
        carried = 0
        try:
            while part := await up_reader.read(65536):
                writer.write(part)
                await writer.drain()
                carried += len(part)
                if carried > cut_after and left > 0:
                    left -= 1
                    writer.transport.abort()
                    return
        except OSError:
            pass  # the client went away
        finally:
            asking.cancel()
            writer.close()
            up_writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert left == 0, "the connection was never cut"


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while part := await reader.read(65536):
            writer.write(part)
            await writer.drain()


@pytest.fixture(scope="module")
def large(plain: RunningRegistry) -> Pushed:
    return push(plain, "team/large", "v1", [os.urandom(12 * MIB)], compress=False)


@pytest.mark.req("IMG-1")
async def test_an_interrupted_layer_goes_on(plain: RunningRegistry, large: Pushed) -> None:
    # More cuts than retries: what brings something does not count as a failure.
    async with cutting(plain.host, 2 * MIB, cuts=5) as host:
        top, _, layers = await pulled(client(), parse(f"{host}/team/large:v1"))
    assert top.digest == large.digest
    assert layers == large.blobs


@pytest.mark.req("IMG-1")
async def test_a_connection_that_always_breaks_is_given_up(plain: RunningRegistry, large: Pushed) -> None:
    async with cutting(plain.host, 64 * 1024, cuts=3) as host:
        found = await failure(client(), parse(f"{host}/team/large:v1"))
    assert found.code == "registry_unreachable"
    assert "broke" in found.message


@pytest.mark.req("IMG-1")
@pytest.mark.parametrize("offset", [0, 1, 5 * MIB, 12 * MIB - 1, 12 * MIB])
async def test_from_any_offset(plain: RunningRegistry, large: Pushed, offset: int) -> None:
    layer = Descriptor("x", sha256(large.blobs[0]), len(large.blobs[0]))
    async with client() as registry:
        assert await whole(registry, parse(f"{plain.host}/team/large:v1"), layer, offset) == large.blobs[0][offset:]


async def test_a_reader_that_leaves_early_and_three_at_once(plain: RunningRegistry, large: Pushed) -> None:
    layer = Descriptor("x", sha256(large.blobs[0]), len(large.blobs[0]))
    ref = parse(f"{plain.host}/team/large:v1")
    async with client() as registry:
        async with aclosing(registry.blob(ref, layer)) as parts:
            assert await anext(parts)
        found = await asyncio.gather(*(whole(registry, ref, layer, offset) for offset in (0, 7, 100)))
    assert found == [large.blobs[0][offset:] for offset in (0, 7, 100)]


@pytest.mark.req("IMG-1")
async def test_a_manifest_that_was_changed_in_the_registry(plain: RunningRegistry) -> None:
    image = push(plain, "team/changed", "v1", [tar_of({"a": b"1"})])
    path = plain.blob_file(image.digest)
    path.write_bytes(path.read_bytes().replace(b'"schemaVersion"', b'"schemaversion"'))
    for name in ("team/changed:v1", f"team/changed@{image.digest}"):
        assert (await failure(client(), parse(f"{plain.host}/{name}"))).code == "image_corrupt"
