"""`Interception`: an interceptor for each tenant that needs one, told what it must know and nothing else.

Started at first need; after its death started again at the next need, later and later when it dies at once; ended when nobody
used it for a while. The leases of live sandboxes are held here. A process is told of a sandbox, and of its lineage's authority, before
the sandbox's first connection through it: so a new process knows what it needs, and no more.
"""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from cloche.wire.errors import ClocheError, error
from cloche_server.egress.interception import interpreter
from cloche_server.egress.interception.environment import Environment, Progress, nobody
from cloche_server.egress.interception.link import CONNECTIONS_MAX, Link, Started
from cloche_server.egress.interception.messages import TOLD_BYTES_MAX, told
from cloche_server.egress.interception.trust import Trust, roots, trust_for
from cloche_server.egress.services import InterceptedConnection, Who
from cloche_server.logs import Log
from cloche_server.policy.model import Target
from cloche_server.secrets.leases import Lease

if TYPE_CHECKING:
    from cloche_server.egress.interception.authority import Authorities, Box

IDLE_S: Final = 600.0
LIVED_S: Final = 10.0
"""One that lived so long did not die of its start."""
AGAIN_S: Final = 0.25
AGAIN_S_MAX: Final = 5.0
"""Connections wait for the next try, so it must not be far."""
DIRECTORY: Final = "interceptor"
LINEAGES: Final = "lineages"

_log = Log()


class Starter(Protocol):
    """Starts a process behind its walls; `interceptor_missing` when that fails."""

    async def __call__(self, *, tenant: str, environment: str) -> Started: ...


@dataclass
class _Tenant:
    """One tenant's process."""

    link: Link | None = None
    starting: asyncio.Task[Link] | None = None
    deaths: int = 0
    not_before: float = 0.0


@dataclass
class _Box:
    """A live sandbox."""

    who: Who
    leases: tuple[Lease, ...] = field(default=(), repr=False)


class Interception:
    """Made once per node. `extra_roots` says which file of certificates the organisation has, for upstream servers and guests."""

    def __init__(
        self,
        *,
        directory: Path,
        start: Starter,
        box: Box,
        extra_roots: Callable[[], Path | None] = lambda: None,
        environment: Environment | None = None,
        progress: Progress | None = None,
        idle_s: float = IDLE_S,
    ) -> None:
        self._start = start
        self._environment = environment or Environment(directory / DIRECTORY, interpreter.find())
        self._lineages = directory / LINEAGES
        self._box = box
        self._extra_roots = extra_roots
        self._roots: tuple[object, bytes] | None = None
        self._progress = progress or _logged
        self._idle_s = idle_s
        self._sandboxes: dict[str, _Box] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._links: set[Link] = set()
        self._idling: asyncio.TimerHandle | None = None
        self._is_closed = False

    @cached_property
    def _authorities(self) -> Authorities:
        from cloche_server.egress.interception.authority import Authorities  # x509: only what is looked into needs it

        return Authorities(self._lineages, self._box)

    # ------------------------------------------------------------------ what the node uses

    def problem(self) -> str | None:
        """Why no interceptor can run here; None when there is none, or it was not tried yet."""
        return self._environment.problem()

    def state(self) -> str:
        """For a person: `ready`, `not made`, or why there can be none."""
        return self.problem() or ("ready" if self._environment.is_ready else "not made")

    async def prepare(self, who: Who, *, max_age_s: float = 0.0, progress: Progress = nobody) -> Trust:
        """For a sandbox that needs interception, before its first command. The process is started meanwhile."""

        def tell(line: str) -> None:
            self._progress(line)
            progress(line)

        await self._environment.ready(tell)
        authority = self._authorities.of(who.lineage, max_age_s=max_age_s)
        self._sandboxes.setdefault(who.sandbox, _Box(who))
        self._warm(who.tenant)
        return await asyncio.to_thread(trust_for, authority.certificate, self._upstream_roots())

    def sandbox(self, who: Who, leases: Sequence[Lease]) -> None:
        """What a live sandbox holds now; replaces what was said before. `secret_unavailable` when it is too much."""
        box = _Box(who, tuple(leases))
        _sandbox_message(box)
        self._sandboxes[who.sandbox] = box
        link = self._living(who.tenant)
        if link is not None and who.sandbox in link.sandboxes:
            self._tell_sandbox(link, box)

    def forget(self, sandbox: str) -> None:
        """It ended: its secrets go at once, and the authority with the lineage's last one."""
        found = self._sandboxes.pop(sandbox, None)
        if found is None:
            return
        lineage, tenant = found.who.lineage, found.who.tenant
        link = self._living(tenant)
        if link is not None:
            link.tell({"t": "forget", "id": sandbox})
            link.sandboxes.discard(sandbox)
        if all(each.who.lineage != lineage for each in self._sandboxes.values()):
            self._authorities.remove(lineage)
            if link is not None and lineage in link.lineages:
                link.lineages.discard(lineage)
                link.tell({"t": "forget_lineage", "lineage": lineage})

    def keep_lineages(self, lineages: set[str]) -> None:
        """After adoption: authorities of sandboxes that are no more are removed."""
        if self._lineages.is_dir():
            self._authorities.keep_only(lineages)

    async def close(self) -> None:
        """The daemon stops: no process stays."""
        self._is_closed = True
        if self._idling is not None:
            self._idling.cancel()
        await self._environment.close()
        starting = [each.starting for each in self._tenants.values() if each.starting is not None]
        for task in starting:
            task.cancel()
        if starting:
            await asyncio.wait(starting)
        await asyncio.gather(*(link.end("the daemon stops") for link in tuple(self._links)))

    # ------------------------------------------------------------------ what a gate uses

    async def open(
        self, gate_side: InterceptedConnection, who: Who, target: Target, *, tls: bool, rule: str
    ) -> socket.socket:
        """The host's end of one connection through the tenant's process. `interceptor_missing` when there is none."""
        link = await self._link_of(who.tenant)
        if link.connections >= CONNECTIONS_MAX:
            raise error("overloaded", f"The interceptor has {CONNECTIONS_MAX} connections already.")
        box = self._sandboxes.get(who.sandbox)
        if box is None:  # or a connection that waited would bring the authority of a dead lineage back
            raise error(
                "interceptor_missing",
                f"{who.sandbox} is not prepared for interception, or has ended.",
                detail={"reason": "not_prepared"},
            )
        if who.sandbox not in link.sandboxes:
            self._tell_sandbox(link, box)
        try:
            return link.open(gate_side, who.sandbox, who.lineage, target, tls=tls, rule=rule)
        except ConnectionError as bad:
            raise _died(str(bad)) from bad

    # ------------------------------------------------------------------------- processes

    def _living(self, tenant: str) -> Link | None:
        found = self._tenants.get(tenant)
        return None if found is None or found.link is None or found.link.is_over else found.link

    async def _link_of(self, tenant: str) -> Link:
        link = self._living(tenant)
        return link if link is not None else await asyncio.shield(self._starting(tenant))

    def _starting(self, tenant: str) -> asyncio.Task[Link]:
        if self._is_closed:
            raise _died("the daemon stops")
        state = self._tenants.setdefault(tenant, _Tenant())
        if state.starting is None or state.starting.done():
            state.starting = asyncio.create_task(self._begin(tenant, state), name="interceptor start")
            state.starting.add_done_callback(_seen)
        return state.starting

    def _warm(self, tenant: str) -> None:
        if self._living(tenant) is None:
            self._starting(tenant)

    async def _begin(self, tenant: str, state: _Tenant) -> Link:
        name = await self._environment.ready(self._progress)
        wait_s = state.not_before - time.monotonic()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        started = await self._start(tenant=tenant, environment=name)
        link = Link(started, lambda link, ending: self._ended(state, link, ending), self._hide)
        self._links.add(link)
        state.link = link
        try:
            link.tell({"t": "trust", "pem": self._upstream_roots().decode()})
            await link.ready()
        except (ConnectionError, TimeoutError) as bad:
            raise _died(str(bad) or "it did not begin") from bad
        except BaseException:
            await asyncio.shield(link.end("nobody waits for it"))
            raise
        self._watch_idle()
        return link

    def _ended(self, state: _Tenant, link: Link, ending: asyncio.Task[None]) -> None:
        ending.add_done_callback(lambda _: self._links.discard(link))
        if state.link is link:
            state.link = None
        now = time.monotonic()
        state.deaths = 1 if now - link.begun_at >= LIVED_S else state.deaths + 1
        state.not_before = now if state.deaths == 1 else now + min(AGAIN_S_MAX, AGAIN_S * 2 ** (state.deaths - 2))

    def _watch_idle(self) -> None:
        if self._idling is None and not self._is_closed:
            self._idling = asyncio.get_running_loop().call_later(self._idle_s / 4, self._end_idle)

    def _end_idle(self) -> None:
        self._idling = None
        now = time.monotonic()
        for state in self._tenants.values():
            link = state.link
            if link is not None and link.connections == 0 and now - link.used_at >= self._idle_s:
                state.link = None
                task = asyncio.create_task(link.end("nobody used it"), name="interceptor end")
                task.add_done_callback(_seen)
                state.deaths, state.not_before = 0, 0.0
        if self._links:
            self._watch_idle()

    # ------------------------------------------------------------------ what it is told

    def _tell_sandbox(self, link: Link, box: _Box) -> None:
        who = box.who
        if who.lineage not in link.lineages:
            authority = self._authorities.of(who.lineage)
            key = {"cert": authority.certificate.decode(), "key": authority.key.decode()}
            link.tell({"t": "authority", "lineage": who.lineage, **key})
            link.lineages.add(who.lineage)
        link.tell(_sandbox_message(box))
        link.sandboxes.add(who.sandbox)

    def _hide(self, text: str) -> str:
        """Its last words go into the daemon's log, where no value may be."""
        for box in self._sandboxes.values():
            for lease in box.leases:
                value = _value(lease)
                text = text.replace(value.decode(errors="replace"), f"<{lease.name}>") if value else text
        return text

    def _upstream_roots(self) -> bytes:
        """As the organisation's file is now; a process that runs is told of a change."""
        extra = self._extra_roots()
        state = None if extra is None else (extra, *_stamp(extra))
        if self._roots is None or self._roots[0] != state:
            self._roots = (state, roots(extra))
            for link in self._links:
                link.tell({"t": "trust", "pem": self._roots[1].decode()})
        return self._roots[1]


def _stamp(path: Path) -> tuple[int, int, int]:
    """Of a file that is there; `roots` says what is wrong with one that is not."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0, 0
    return found.st_mtime_ns, found.st_size, found.st_ino


def _sandbox_message(box: _Box) -> dict[str, Any]:
    secrets = [_secret(lease) for lease in box.leases]
    message = {"t": "sandbox", "id": box.who.sandbox, "lineage": box.who.lineage, "secrets": secrets}
    try:
        told(message)
    except ValueError:
        text = f"The secrets of {box.who.sandbox} are too long together: the interceptor takes {TOLD_BYTES_MAX} bytes."
        raise error("secret_unavailable", text, fix="Give the sandbox fewer or shorter secrets.") from None
    return message


def _value(lease: Lease) -> bytes | None:
    try:
        return lease.value.reveal()
    except RuntimeError:  # wiped
        return None


def _secret(lease: Lease) -> dict[str, Any]:
    """A value that was wiped meanwhile (its end is on the way) is bound to nothing: its placeholder is refused everywhere."""
    value, hosts = _value(lease), list(lease.hosts)
    if value is None:
        value, hosts = os.urandom(32).hex().encode(), []
    return {
        "name": lease.name,
        "placeholder": lease.placeholder,
        "value": base64.b64encode(value).decode(),
        "hosts": hosts,
        "methods": None if lease.methods is None else list(lease.methods),
        "paths": None if lease.paths is None else list(lease.paths),
        "places": [place.model_dump(mode="json") for place in lease.places],
        "require": lease.require,
    }


def _died(why: str) -> ClocheError:
    return error(
        "interceptor_missing",
        f"The interceptor is not there: {why}.",
        detail={"reason": "died"},
        fix="Try again; if it stays so, see why: cloche node logs",
    )


def _logged(line: str) -> None:
    _log.info("interceptor environment", line=line)


def _seen(task: asyncio.Task[Any]) -> None:
    """A start that nobody waits for may fail: the next need tries again and says why."""
    if not task.cancelled() and (bad := task.exception()) is not None:
        _log.warning("no interceptor", message=str(bad))
