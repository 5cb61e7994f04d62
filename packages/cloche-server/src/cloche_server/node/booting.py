"""Making a sandbox: engine, agent, bind, first command. Set-up and undo are one stack.

Fast because nothing waits that need not: the agent handles frames in order, so the first command goes out while `bind` is
still under way. Only the engine's helper processes must be gone before it (`seal`, which runs beside `bind`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Final

from cloche.wire.commands import StartCommand
from cloche.wire.errors import TABLE, ClocheError, error
from cloche.wire.sandboxes import CreateSandbox
from cloche_server import points
from cloche_server.channel import Channel, ChannelError, JsonObject, OperationFailed, Stream, WrongGeneration, unwrap
from cloche_server.channel.frames import PAYLOAD_BYTES_MAX, encode_json
from cloche_server.engines.contract import Engine, EngineError
from cloche_server.images.service import Root
from cloche_server.node.context import Context
from cloche_server.node.guest_text import escaped
from cloche_server.node.records import isolation_of
from cloche_server.node.sandbox import Sandbox
from cloche_server.node.way import PROXY_PORT, send_trust

HELLO_S: Final = 30.0
BIND_S: Final = 30.0
ENTROPY_BYTES: Final = 64
ENVIRONMENT_BYTES_MAX: Final = PAYLOAD_BYTES_MAX - 24_576
"""The rest is for the other fields, and for the variables that a sandbox is given."""
TMP_FRACTION: Final = 4
"""A `noexec` /tmp is a tmpfs of this part of the memory."""


async def boot(context: Context, sandbox: Sandbox, engine: Engine, root: Root, request: CreateSandbox) -> None:
    """Until the sandbox is ready and its first command is open. On any failure nothing of it is left."""
    try:
        async with AsyncExitStack() as undo:
            await _boot(context, sandbox, engine, root, request, undo)
            undo.pop_all()
    except EngineError as bad:
        raise error(_public(bad.code), f"The sandbox could not be started: {escaped(str(bad))}") from bad
    except WrongGeneration as bad:
        raise error(bad.reason, f"The agent in image {root.name!r} speaks {escaped(bad.detail)}.") from bad
    except (ChannelError, TimeoutError, OSError) as bad:
        raise error("create_failed", f"The guest did not come up: {escaped(str(bad) or type(bad).__name__)}.") from bad


async def _boot(
    context: Context, sandbox: Sandbox, engine: Engine, root: Root, request: CreateSandbox, undo: AsyncExitStack
) -> None:
    preparing = asyncio.ensure_future(sandbox.way.prepare())  # leases and certificates, if any, while the engine boots
    undo.push_async_callback(_stop, preparing)
    context.spares.want()
    instance = await engine.boot(sandbox.record.spec().check())
    undo.push_async_callback(instance.kill)
    points.reached("node.create.after_boot")
    await instance.start()
    points.reached("node.create.after_start")
    async with asyncio.timeout(HELLO_S):
        channel = await Channel.fresh(
            instance.channel, guest_open=sandbox.way.guest_open, budget=context.budget, on_lost=sandbox.lost
        )
    undo.callback(channel.close, "create_failed")
    points.reached("node.create.after_hello")
    inside = await preparing
    bind = channel.open("bind", bind_fields(sandbox, root, request, inside.env), sink=_Answer())
    seal = asyncio.ensure_future(instance.seal())
    undo.push_async_callback(_stop, seal)
    sandbox.record.isolation = isolation_of(instance.isolation())
    sandbox.attach(instance, channel)
    undo.callback(sandbox.detach)
    send_open = None
    await asyncio.sleep(0)  # `bind` and `seal` are on their way while the first command is written down
    if inside.trust:
        async with asyncio.timeout(BIND_S):
            await _bound(bind)
            await send_trust(channel, inside.trust)
    if isinstance(request.command, StartCommand):
        _, send_open = sandbox.prepare_command(request.command, first_key(sandbox.id))
    async with asyncio.timeout(BIND_S):
        await seal  # before any byte of the caller's program can run
        if send_open is not None:
            send_open()
        if not inside.trust:
            await _bound(bind)
    points.reached("node.create.after_bind")
    context.store.save_sandbox(sandbox.record)
    sandbox.journal("sandbox.running", {"pid": instance.pid})
    sandbox.ready()


async def _bound(bind: Stream) -> None:
    try:
        unwrap(await bind.result)
    except OperationFailed as refused:
        raise _refused(refused) from refused
    bind.confirm()


def _refused(refused: OperationFailed) -> ClocheError:
    if refused.code == "no_such_user":
        return error("no_such_user", f"The image has no such user: {escaped(refused.message)}")
    return error("create_failed", f"The agent could not prepare the guest: {escaped(str(refused))}")


async def _stop(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait([task])


def bind_fields(sandbox: Sandbox, root: Root, request: CreateSandbox, ours: Mapping[str, str]) -> JsonObject:
    """Identity, environment and randomness: what makes this guest this sandbox."""
    record, limits = sandbox.record, request.limits
    fields: JsonObject = {
        "hostname": record.name or record.id,
        "machine_id": os.urandom(16).hex(),
        "entropy": os.urandom(ENTROPY_BYTES).hex(),
        "env": {**root.env, "CLOCHE_SANDBOX_ID": record.id, **ours, **request.env},
        "egress": {"proxy_port": PROXY_PORT},
        "tmp": {
            "noexec": request.noexec_tmp,
            "size_bytes": limits.memory_bytes // TMP_FRACTION if request.noexec_tmp else None,
        },
        "root_read_only": False,
        "limits": {"processes": limits.processes, "open_files": limits.open_files},
    }
    if record.user is not None:
        fields["user"] = record.user
    return fields


def check_environment(root: Root, request: CreateSandbox) -> None:
    """It is bound in one frame; an image may say as much as it likes."""
    size = len(encode_json({**root.env, **request.env}))
    if size > ENVIRONMENT_BYTES_MAX:
        code = "image_refused" if len(encode_json(root.env)) > ENVIRONMENT_BYTES_MAX else "too_large"
        detail = {"reason": "environment"}
        raise error(code, f"The environment has {size} bytes; {ENVIRONMENT_BYTES_MAX} is the most.", detail=detail)


def first_key(sandbox: str) -> str:
    """The first command's key, so that its id is known before anything is started."""
    return f"first {sandbox}"


def _public(code: str) -> str:
    return code if code in TABLE else "create_failed"


class _Answer:
    """A sink for an operation that sends no bytes."""

    def opened(self, info: JsonObject) -> None: ...

    def data(self, view: memoryview) -> None: ...

    def eof(self, offset: int) -> None: ...

    def end(self, result: JsonObject) -> None: ...

    def credit(self, consumed: int, limit: int) -> None: ...

    def lost(self, reason: str) -> None: ...
