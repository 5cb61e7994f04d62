"""A create, from the request to a running sandbox: admission, record, journal, boot. Failing leaves nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from cloche.wire.commands import StartCommand
from cloche.wire.errors import ClocheError, error
from cloche.wire.ids import new_id
from cloche.wire.sandboxes import CreateSandbox
from cloche_server import points
from cloche_server.api.backend import Caller
from cloche_server.engines.contract import Engine
from cloche_server.images.service import Images, Root
from cloche_server.node import admission, booting
from cloche_server.node.admission import Ask, Use, Watermarks
from cloche_server.node.context import Context
from cloche_server.node.keys import command_of_key, request_sha256
from cloche_server.node.lifecycle import Cause, Life, Why
from cloche_server.node.records import SandboxRecord
from cloche_server.node.roster import Roster
from cloche_server.node.sandbox import Sandbox
from cloche_server.node.users import check_user
from cloche_server.node.way import Plan

ENGINE_OF = {"any": "gvisor", "gvisor": "gvisor", "microvm": "qemu"}


@dataclass
class Maker:
    """What a create needs of the node."""

    context: Context
    roster: Roster
    images: Callable[[], Images]
    default_image: Callable[[], str]
    engines: Mapping[str, Engine]
    marks: Watermarks
    use: Callable[[], Use]
    on_ended: Callable[[Sandbox], None]
    boot_id: str
    _cleaning: asyncio.Task[Any] | None = None

    async def create(self, caller: Caller, request: CreateSandbox, key: str | None) -> Sandbox | SandboxRecord:
        wanted = request_sha256(request.model_dump_json())
        known = await self._known(caller, key, wanted)
        if known is not None:
            return known
        engine = self._engine(request)
        name = request.image or self.default_image()
        root = await self.images().ensure(name, owner=caller.owner, pull=request.pull)
        plan = await self.context.ways.plan(caller, request)
        with self.images().holding(root):
            points.reached("node.create.after_image")
            known = await self._known(
                caller, key, wanted
            )  # a repeat that waited for the same image may have been first
            if known is not None:
                return known
            return await self.create_from(caller, request, root, engine, plan, key=key, wanted=wanted)

    async def create_from(
        self,
        caller: Caller,
        request: CreateSandbox,
        root: Root,
        engine: Engine,
        plan: Plan,
        *,
        key: str | None = None,
        wanted: str | None = None,
    ) -> Sandbox:
        """From a root that is there. Until the record exists nothing here waits, so a key or a name is given once."""
        request = request.model_copy(update={"command": first_command(request, root)})
        check_user(request.user or root.user)
        booting.check_environment(root, request)
        if request.name is not None:
            self.roster.check_name(caller, request.name)
        self._admit(Ask(request.limits.disk_bytes, request.limits.memory_bytes))
        sandbox = self._journalled(caller, request, key, wanted, root, engine, plan)
        boot = booting.boot(self.context, sandbox, engine, root, request)
        sandbox.boot_task = self.context.spawn(boot, f"boot {sandbox.id}", quiet=True)
        try:
            await asyncio.wait([sandbox.boot_task])
        except asyncio.CancelledError:
            if key is None:  # the caller left, and without a key he cannot ask again
                sandbox.end(Cause(Why.KILLED, by=caller.owner, detail="the caller left during create"))
            else:
                self.context.spawn(self._settled(sandbox), f"create {sandbox.id}", quiet=True)
            raise
        await self._settled(sandbox)
        return sandbox

    def _admit(self, ask: Ask) -> None:
        """For want of disk, what nobody needs of images goes: whoever tries again finds room, or the operator is told."""
        try:
            admission.admit(self.use(), ask, self.marks)
        except ClocheError as full:
            if full.detail.get("watermark") == "disk" and (self._cleaning is None or self._cleaning.done()):
                self._cleaning = self.context.spawn(self._clean(), "image gc")
            raise

    async def _clean(self) -> None:
        done = await self.images().gc()
        self.context.log.info("image gc, for want of disk", bytes=done.bytes, images=len(done.images))

    async def _known(self, caller: Caller, key: str | None, wanted: str) -> Sandbox | SandboxRecord | None:
        while key is not None and (known := self.roster.by_key(caller, key)) is not None:
            if not isinstance(known, Sandbox) or not known.is_undone:
                return await self._again(known, wanted)
            await asyncio.shield(known.ended)  # one that a dead daemon had begun: gone in a moment, and forgotten
        return None

    async def _settled(self, sandbox: Sandbox) -> None:
        """The boot task is over or will be: its failure becomes the sandbox's end, and the caller's error."""
        task = sandbox.boot_task
        assert task is not None
        await asyncio.wait([task])
        bad = None if task.cancelled() else task.exception()
        if bad is None and not task.cancelled():
            sandbox.boot_task = None
            return
        sandbox.end(Cause(Why.CREATE_FAILED, detail=str(bad)[:300] if bad else None))
        end = await asyncio.shield(sandbox.ended)
        if isinstance(bad, ClocheError):
            raise bad
        if bad is not None:
            raise error("create_failed", f"The sandbox could not be made ({type(bad).__name__}).") from bad
        raise error(
            "create_failed",
            f"The sandbox ended while it was being made: {end.reason.value} {end.detail or ''}".rstrip() + ".",
        )

    async def _again(self, known: Sandbox | SandboxRecord, wanted: str) -> Sandbox | SandboxRecord:
        record = known.record if isinstance(known, Sandbox) else known
        if record.request_sha256 != wanted:
            raise error("idempotency_conflict", "This Idempotency-Key was used for a different sandbox.")
        if isinstance(known, Sandbox) and known.boot_task is not None:
            await self._settled(known)
        return known

    def _engine(self, request: CreateSandbox) -> Engine:
        engine = self.engines.get(ENGINE_OF[request.isolation])
        if engine is None:
            here = sorted(self.engines)
            raise error(
                "isolation_unavailable", f"This node has no engine for {request.isolation!r}.", detail={"engines": here}
            )
        return engine

    def _journalled(
        self,
        caller: Caller,
        request: CreateSandbox,
        key: str | None,
        wanted: str | None,
        root: Root,
        engine: Engine,
        plan: Plan,
    ) -> Sandbox:
        clock, sandbox_id = self.context.clock, new_id("sandbox")
        life = Life.begin(clock.boot_ns(), request.ttl_s, request.idle_timeout_s)
        first = command_of_key(sandbox_id, booting.first_key(sandbox_id)) if request.command is not None else None
        record = SandboxRecord(
            id=sandbox_id,
            tenant=caller.tenant,
            owner=caller.owner,
            lineage=new_id("lineage"),
            name=request.name,
            labels=request.labels,
            image=root.name,
            image_file=root.file,
            image_digest=root.digest,
            engine=engine.name,
            limits=request.limits.model_dump(),
            privileges=request.privileges,
            user=request.user or root.user,
            workdir=request.workdir or root.workdir,
            created_ns=life.created_ns,
            created_at=clock.wall_s(),
            ttl_deadline_ns=life.ttl_deadline_ns,
            idle_timeout_s=request.idle_timeout_s,
            retain_s=request.retain_s,
            boot_id=self.boot_id,
            key=key,
            request_sha256=wanted,
            first_command=first,
            end_with_command=request.end_with_command and first is not None,
            egress=plan.stored,
        )
        self.context.store.add_sandbox(record)
        sandbox = Sandbox(self.context, record, life, self.on_ended, plan)
        try:
            sandbox.journal(
                "sandbox.creating",
                {
                    "image": root.digest,
                    "image_name": root.name,
                    "engine": engine.name,
                    "request_sha256": wanted,
                    "limits": record.limits,
                    "lineage": record.lineage,
                    "policy": plan.policy.digest,
                },
            )
            points.reached("node.create.after_journal")
        except OSError as bad:  # a full disk, for example: nothing was started, and nobody was told of it
            self.context.store.remove_sandbox(sandbox_id)
            raise error("create_failed", f"The sandbox could not be recorded: {bad}") from bad
        self.roster.add(sandbox)
        return sandbox


def first_command(request: CreateSandbox, root: Root) -> StartCommand | None:
    """Docker's rule: entrypoint, then what the caller gave or the image's cmd. An entrypoint of the caller's drops the cmd."""
    if request.command is None:
        return None
    entrypoint = root.entrypoint if request.entrypoint is None else request.entrypoint
    cmd = root.cmd if request.entrypoint is None else ()
    argv = [*entrypoint, *(request.command.argv or cmd)]
    if not argv:
        raise error(
            "invalid_request",
            f"The image {root.name!r} does not say what to run.",
            fix="Give a command: cloche run IMAGE -- CMD",
        )
    try:
        return StartCommand.model_validate({**request.command.model_dump(), "argv": argv})
    except ValidationError:  # the caller's part of it was checked when it came
        reason = {"reason": "entrypoint"}
        raise error("image_refused", f"The command of image {root.name!r} is too long.", detail=reason) from None
