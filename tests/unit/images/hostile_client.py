"""One request of the client to a server that misbehaves."""

import asyncio
import os
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

import pytest

from cloche.wire.errors import ClocheError
from cloche_server.images.auth import Credentials, Login
from cloche_server.images.manifest import Descriptor
from cloche_server.images.reference import parse
from cloche_server.images.registry import Registry
from cloche_server.images.settings import HostSettings, RegistrySettings, Timeouts
from tests.unit.images.hostile_server import Answer, Asked, HostileServer, digest_of, hostile, manifest_of

QUICK = Timeouts(connect_s=5, silence_s=10, retries=2, backoff_s=0.01)
ALICE = Login("alice", "pass-of-alice")
BLOB = os.urandom(300_000)
LAYER = Descriptor("x", digest_of(BLOB), len(BLOB))
MANIFEST = manifest_of()


def says(*answers: bytes) -> Answer:
    """One after another, the last again and again; an answer without length is closed behind it."""
    left = list(answers)

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(left.pop(0) if len(left) > 1 else left[0])

    return answer


async def client_of(
    server: HostileServer, what: str = "manifest", *, login: Login | None = ALICE, offset: int = 0,
    hosts: Mapping[str, HostSettings] | None = None, times: Timeouts = QUICK, digest: str | None = None,
) -> bytes:  # fmt: skip
    """The manifest of app:v1, or the blob."""
    ref = parse(f"{server.host}/app:v1" + (f"@{digest}" if digest else ""))
    settings = RegistrySettings(timeouts=times, hosts=hosts or {})
    async with Registry(settings, Credentials(login, use_files=False)) as registry:
        if what == "manifest":
            return (await registry.resolve(ref))[1]
        async with aclosing(registry.blob(ref, LAYER, offset)) as parts:
            return b"".join([part async for part in parts])


async def fails(answer: Answer, what: str = "manifest", **kw: Any) -> ClocheError:
    async with hostile(answer) as server:
        with pytest.raises(ClocheError) as raised:
            await client_of(server, what, **kw)
    assert raised.value.message.isprintable()
    assert ALICE.password not in f"{raised.value} {raised.value.detail}"
    return raised.value
