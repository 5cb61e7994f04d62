"""The client against registries that misbehave on purpose: each is bounded, and ends in a named error or the right bytes."""

import asyncio
import time
import tracemalloc
from contextlib import aclosing

import pytest

from cloche.wire.errors import ClocheError
from cloche_server.images.auth import Credentials
from cloche_server.images.manifest import OCI_MANIFEST, Descriptor
from cloche_server.images.reference import parse
from cloche_server.images.registry import Registry
from cloche_server.images.settings import RegistrySettings, Timeouts
from tests.unit.images.hostile_client import BLOB, LAYER, MANIFEST, QUICK, client_of, fails, says
from tests.unit.images.hostile_server import Asked, digest_of, hostile, reply

# ------------------------------------------------------------------------------ manifests


@pytest.mark.req("IMG-1")
@pytest.mark.parametrize(
    ("answer", "code", "word"),
    [
        (reply(200, MANIFEST, {"docker-content-digest": "sha256:" + "0" * 64}), "image_corrupt", "calls a manifest"),
        (reply(200, b" " * (4 * 1024 * 1024 + 1)), "registry_unreachable", "more than 4194304 bytes"),
        (reply(200, MANIFEST, {"content-type": "application/vnd.oci.image.index.v1+json"}), "image_refused", "sent as"),
        (reply(200, b"<html>"), "image_refused", "not valid JSON"),
        (reply(200, MANIFEST, {"content-encoding": "gzip"}), "registry_unreachable", "compressed"),
        (reply(204), "registry_unreachable", "answered 204"),
        (reply(300), "registry_unreachable", "answered 300"),
        (reply(400), "registry_unreachable", "answered 400"),
        (reply(403), "registry_denied", "may not be read"),
        (reply(404), "image_not_found", "has no v1"),
        (reply(500), "registry_unreachable", "answered 500"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * 300_000 + b"\r\n\r\n", "registry_unreachable", "broke"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n", "registry_unreachable", "broke"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello", "registry_unreachable", "broke"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"f" * 21 + b"\r\n", "registry_unreachable", "broke"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "registry_unreachable", "broke"),
    ],
)  # fmt: skip
async def test_wrong_answers_for_a_manifest(answer: bytes, code: str, word: str) -> None:
    found = await fails(says(answer))
    assert found.code == code
    assert word in found.message


@pytest.mark.req("IMG-1")
async def test_a_manifest_by_digest_must_have_it() -> None:
    good = reply(200, MANIFEST, {"content-type": OCI_MANIFEST})
    async with hostile(says(good)) as server:
        assert await client_of(server, digest=digest_of(MANIFEST)) == MANIFEST
    for headers in (
        {},
        {"docker-content-digest": "sha256:" + "1" * 64},
        {"docker-content-digest": digest_of(MANIFEST)},
    ):
        found = await fails(says(reply(200, MANIFEST, headers)), digest="sha256:" + "1" * 64)
        assert found.code == "image_corrupt"


@pytest.mark.req("IMG-1")
async def test_a_tags_digest_is_that_of_the_bytes() -> None:
    async with hostile(says(reply(200, MANIFEST, {"docker-content-digest": "sha512:" + "0" * 128}))) as server:
        async with Registry(RegistrySettings(timeouts=QUICK), Credentials.nobody()) as registry:
            top, _ = await registry.resolve(parse(f"{server.host}/app:v1"))
    assert top == Descriptor(OCI_MANIFEST, digest_of(MANIFEST), len(MANIFEST))


async def test_an_error_in_between_is_repeated_and_a_refusal_is_not() -> None:
    async with hostile(says(reply(503), reply(500), reply(200, MANIFEST))) as server:
        assert await client_of(server) == MANIFEST
        assert len(server.asked) == 3
    for status, count in [(500, 3), (404, 1), (403, 1), (400, 1)]:
        async with hostile(says(reply(status))) as server:
            with pytest.raises(ClocheError):
                await client_of(server)
            assert len(server.asked) == count


async def test_come_back_later() -> None:
    async with hostile(says(reply(429, headers={"retry-after": "1"}), reply(200, MANIFEST))) as server:
        began = time.monotonic()
        assert await client_of(server) == MANIFEST
        assert time.monotonic() - began >= 1
    for value in ("Fri, 31 Dec 2099 23:59:59 GMT", "-5", "1e9", "٣", ""):
        async with hostile(
            says(reply(429, headers={"retry-after": value.encode().decode("latin-1")}), reply(200, MANIFEST))
        ) as server:
            assert await client_of(server) == MANIFEST
    began = time.monotonic()
    found = await fails(says(reply(429, headers={"retry-after": "9" * 30})))
    assert time.monotonic() - began < 5
    assert found.code == "registry_unreachable"
    assert found.retry_after_s == 86400


@pytest.mark.req("IMG-1")
@pytest.mark.parametrize(
    "part",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        reply(200, MANIFEST)[:-5],
        reply(200, MANIFEST, length=len(MANIFEST) + 1),
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffffffff\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
    ],
)
async def test_silence_is_not_waited_for(part: bytes) -> None:
    began = time.monotonic()
    found = await fails(says(part), times=Timeouts(connect_s=1, silence_s=0.3, retries=0))
    assert found.code == "registry_unreachable"
    assert "in time" in found.message
    assert time.monotonic() - began < 5


@pytest.mark.req("IMG-1")
@pytest.mark.parametrize("part", [b"x-a: b\r\n", b"x"])
async def test_a_head_that_comes_drop_by_drop(part: bytes) -> None:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.05)  # sleep: the slowness is what is tested

    began = time.monotonic()
    found = await fails(answer, times=Timeouts(connect_s=0.5, silence_s=0.3, retries=0))
    assert "in time" in found.message
    assert time.monotonic() - began < 5


# ---------------------------------------------------------------------------------- blobs


def from_start(asked: Asked) -> bytes:
    return reply(200, BLOB)


def part(asked: Asked, start: int | None = None, total: str = str(len(BLOB)), body: bytes | None = None) -> bytes:
    start = asked.start if start is None else start
    body = BLOB[start:] if body is None else body
    return reply(206, body, {"content-range": f"bytes {start}-{len(BLOB) - 1}/{total}"})


@pytest.mark.req("IMG-1")
async def test_a_server_that_knows_no_ranges() -> None:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(from_start(asked))

    for offset in (0, 1, 70_000, len(BLOB) - 1):
        async with hostile(answer) as server:
            assert await client_of(server, "blob", offset=offset) == BLOB[offset:]
            assert ("range" in server.asked[0].headers) == bool(offset)


@pytest.mark.req("IMG-1")
async def test_a_server_that_answers_another_part() -> None:
    for wrong in ("bytes 5-299999/300000", "bytes 100-299999/999", "bytes 100-200/300000", "lines 100-2/3", ""):

        async def answer(asked: Asked, writer: asyncio.StreamWriter, wrong: str = wrong) -> None:
            ranged = "range" in asked.headers
            writer.write(reply(206, BLOB[5:], {"content-range": wrong}) if ranged else from_start(asked))

        async with hostile(answer) as server:
            assert await client_of(server, "blob", offset=100) == BLOB[100:]
            assert len(server.asked) == 2  # the second time without a range


@pytest.mark.req("IMG-1")
async def test_short_bodies_go_on_where_they_stopped() -> None:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        whole = part(asked) if asked.start else from_start(asked)
        writer.write(whole[: len(whole) - len(BLOB) // 3] if asked.start < 200_000 else whole)
        writer.close()

    async with hostile(answer) as server:
        assert await client_of(server, "blob") == BLOB
        assert [each.start for each in server.asked] == [0, 200_000]


@pytest.mark.req("IMG-1")
async def test_an_endless_body_is_cut() -> None:
    sent = 0

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + BLOB)
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()
            sent += 65536

    async with hostile(answer) as server:
        tracemalloc.start()
        assert await client_of(server, "blob") == BLOB
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert sent < 16 * 1024 * 1024
    assert peak < 32 * 1024 * 1024


@pytest.mark.req("IMG-1")
@pytest.mark.parametrize(
    ("answer", "code", "word"),
    [
        (reply(200, BLOB + b"x"), "image_corrupt", "300001 bytes"),
        (reply(200, BLOB[:-1]), "image_corrupt", "299999 bytes"),
        (reply(200, BLOB, length=10**18), "image_corrupt", "1000000000000000000 bytes"),
        (reply(200, BLOB, length=10**30), "registry_unreachable", "broke"),
        (reply(416), "image_corrupt", "shorter"),
        (reply(404), "image_not_found", "missing"),
        (reply(200, BLOB, {"content-encoding": "gzip"}), "registry_unreachable", "compressed"),
    ],
)
async def test_wrong_answers_for_a_blob(answer: bytes, code: str, word: str) -> None:
    found = await fails(says(answer), "blob")
    assert found.code == code
    assert word in found.message


@pytest.mark.req("IMG-1")
async def test_a_body_that_comes_too_slowly_is_given_up() -> None:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(reply(200, length=len(BLOB)))
        for each in BLOB:
            writer.write(bytes([each]))
            await writer.drain()
            await asyncio.sleep(0.05)  # sleep: the slowness is what is tested

    began = time.monotonic()
    found = await fails(answer, "blob", times=Timeouts(silence_s=0.4, rate_window_s=0.4, retries=1, backoff_s=0.01))
    assert "bytes a second" in found.message
    assert time.monotonic() - began < 10


@pytest.mark.req("IMG-1")
async def test_a_slow_reader_is_not_taken_for_a_slow_server() -> None:
    async with hostile(says(reply(200, BLOB))) as server:
        ref = parse(f"{server.host}/app:v1")
        times = Timeouts(silence_s=10, rate_window_s=0.3, rate_min_bytes_s=10**9)
        async with Registry(RegistrySettings(timeouts=times), Credentials.nobody()) as registry:
            async with aclosing(registry.blob(ref, LAYER)) as parts:
                found = bytearray()
                async for each in parts:
                    found += each
                    await asyncio.sleep(0.15)  # sleep: the reader's slowness is what is tested
        assert found == BLOB
        assert len(server.asked) == 1
