"""`Secrets`: what the node uses. Set, list and remove for an operator; leases for sandboxes, which end with them.

A lease that changes (a minted value was renewed, the operator set or removed the secret) is told to `changed`; the end of a
sandbox to `ended`, at once. Both are the interceptor's: what it is not told it does not have.
"""

from __future__ import annotations

import asyncio
import builtins
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

from cloche.wire.errors import ClocheError, error
from cloche.wire.ids import is_id
from cloche.wire.secrets import SecretView, SetSecret
from cloche_server.secrets import leases as leasing
from cloche_server.secrets.binding import Asker, Binding, bind, check_value
from cloche_server.secrets.box import Box
from cloche_server.secrets.hidden import Hidden
from cloche_server.secrets.leases import Hold, Lease
from cloche_server.secrets.minting import from_http
from cloche_server.secrets.placeholders import Placeholders, new_placeholder
from cloche_server.secrets.sealed import PlaceholderFiles, SealedFiles
from cloche_server.secrets.sources import from_command, from_file

KEY_FILE: Final = "secrets.key"
LEASES_MAX: Final = 64
"""Of one sandbox."""
SOURCES_AT_ONCE_MAX: Final = 16
TRIES_MAX: Final = 3
SOURCES: Final = {"file": from_file, "command": from_command, "http": from_http}
Spawn = Callable[[Coroutine[Any, Any, Any], str], "asyncio.Task[Any]"]
Told = Callable[[str, str | None, str, str, dict[str, Any]], None]
"""Kind, sandbox, owner, tenant, detail: a line of the journal."""


class Secrets:
    """One for a node. `directory` is in the state directory; `config_dir`, which has the key, is elsewhere."""

    def __init__(
        self,
        directory: Path,
        config_dir: Path,
        *,
        spawn: Spawn | None = None,
        told: Told = lambda _kind, _sandbox, _owner, _tenant, _detail: None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.box = Box(config_dir / KEY_FILE, directory / "key.id")
        self.changed: Callable[[str, tuple[Lease, ...]], None] = lambda _sandbox, _leases: None
        self.ended: Callable[[str], None] = lambda _sandbox: None
        self._files = SealedFiles(directory, self.box)
        self._placeholders = PlaceholderFiles(directory / "placeholders")
        self._spawn = spawn or (lambda work, name: asyncio.get_running_loop().create_task(work, name=name))
        self._told = told
        self._clock = clock
        self._wall = wall
        self._holds: dict[str, Hold] = {}
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._leasing: set[str] = set()
        self._writing = asyncio.Lock()
        self._asking = asyncio.Semaphore(SOURCES_AT_ONCE_MAX)
        self._changes = 0

    # --- for an operator ----------------------------------------------------------------------------

    async def set(self, asker: Asker, name: str, asked: SetSecret) -> SecretView:
        """New, or in the place of the one before: sandboxes that hold it go on with the new value."""
        binding = bind(asker, name, asked, now=self._wall())
        value = _given(asked)
        try:
            async with self._writing:
                self._told("secret.set", None, binding.owner, binding.tenant, _detail(binding))
                await asyncio.to_thread(self._files.write, binding, value)
                self._changes += 1
        finally:
            if value is not None:
                value.wipe()
        holding = self._holding(binding.tenant, binding.owner, name)
        await asyncio.gather(*(self._replace(hold, name) for hold in holding))
        return binding.view(len(self._holding(binding.tenant, binding.owner, name)))

    async def list(self, asker: Asker) -> builtins.list[SecretView]:
        """The asker's own; an administrator sees all."""
        found = await asyncio.to_thread(lambda: builtins.list(self._files.bindings()))
        return [
            each.view(len(self._holding(each.tenant, each.owner, each.name)))
            for each in sorted(found, key=lambda each: (each.owner, each.name))
            if asker.is_admin or (each.owner, each.tenant) == (asker.owner, asker.tenant)
        ]

    async def remove(self, asker: Asker, name: str) -> SecretView:
        """Sandboxes that hold it lose it at once. Answers what it was."""
        binding, value = await self._read(asker.tenant, asker.owner, name)
        value.wipe()
        async with self._writing:
            self._told("secret.removed", None, asker.owner, asker.tenant, {"name": name})
            self._files.remove(asker.tenant, asker.owner, name)
            self._changes += 1
        holding = self._holding(asker.tenant, asker.owner, name)
        for hold in holding:
            hold.put(leasing.dead(hold.leases[name]))
            self._tell(hold)
        return binding.view(len(holding))

    # --- for sandboxes ------------------------------------------------------------------------------

    async def lease(
        self, owner: str, tenant: str, names: Sequence[str], *, sandbox: str, lineage: str
    ) -> tuple[Lease, ...]:
        """All of them or none. Also after a restart of the daemon: the placeholders are the ones that were given out."""
        wanted = builtins.list(dict.fromkeys(names))
        if len(wanted) > LEASES_MAX:
            raise error("invalid_request", f"A sandbox holds at most {LEASES_MAX} secrets.")
        if not wanted:
            return ()
        assert sandbox not in self._holds, "leased once"
        self._leasing.add(sandbox)
        hold = Hold(sandbox, tenant, owner, lineage)
        try:
            await self._fill(hold, wanted)
            if sandbox not in self._leasing:  # it ended meanwhile
                raise error("sandbox_ended", f"Sandbox {sandbox} ended before it had its secrets.")
        except BaseException:
            hold.wipe()
            raise
        finally:
            self._leasing.discard(sandbox)
        self._holds[sandbox] = hold
        self._tell_of("secret.leased", hold, {"names": wanted})
        if hold.next_s(self._clock()) is not None:
            self._tasks[sandbox] = self._spawn(self._keep(hold), f"secrets of {sandbox}")
        return tuple(hold.leases.values())

    def leases(self, sandbox: str) -> tuple[Lease, ...]:
        """As they are now. Ask again instead of keeping them: a value that was replaced is wiped."""
        hold = self._holds.get(sandbox)
        return () if hold is None else tuple(hold.leases.values())

    def hosts_of(self, owner: str, tenant: str, names: Sequence[str]) -> tuple[str, ...]:
        """Which hosts these secrets are bound to, before anything is fetched. `secret_not_found` names the one."""
        hosts: dict[str, None] = {}
        for name in names:
            found = self._files.read(tenant, owner, name)
            if found is None:
                raise _not_found(name)
            found[1].wipe()
            hosts |= dict.fromkeys(found[0].hosts)
        return tuple(hosts)

    def placeholders(self, lineage: str, names: Sequence[str]) -> Placeholders | None:
        """For the gate, and for the environment inside (`.by_name`), whether or not the values are there. None: no names."""
        return Placeholders(self._placeholders_of(lineage, names)) if names else None

    def release(self, sandbox: str) -> None:
        """At the sandbox's end. Nothing is waited for: when it returns the values are gone here, and `ended` was told."""
        self._leasing.discard(sandbox)
        hold = self._holds.pop(sandbox, None)
        if hold is None:
            return
        task = self._tasks.pop(sandbox, None)
        if task is not None:
            task.cancel()
        names = builtins.list(hold.leases)
        hold.wipe()
        self.ended(sandbox)
        self._tell_of("secret.released", hold, {"names": names})

    def forget_lineage(self, lineage: str) -> None:
        """With its last sandbox; a new one has other placeholders."""
        self._placeholders.remove(lineage)

    def keep_lineages(self, live: Collection[str]) -> None:
        """After adoption: placeholders of lineages that ended while no daemon was there."""
        for lineage in self._placeholders.lineages():
            if lineage not in live:
                self._placeholders.remove(lineage)

    def close(self) -> None:
        """The daemon stops: values are wiped here; sandboxes live on, and the next daemon leases anew."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()
        for hold in self._holds.values():
            hold.wipe()
        self._holds.clear()

    # --- values -------------------------------------------------------------------------------------

    async def _read(self, tenant: str, owner: str, name: str) -> tuple[Binding, Hidden]:
        found = await asyncio.to_thread(self._files.read, tenant, owner, name)
        if found is None:
            raise _not_found(name)
        return found

    async def _fill(self, hold: Hold, names: Sequence[str]) -> None:
        """All sources at once. When the operator changed something meanwhile, again: nobody starts with what is past."""
        placeholders = self._placeholders_of(hold.lineage, names)
        for _ in range(TRIES_MAX):
            seen = self._changes
            bindings = [await self._read(hold.tenant, hold.owner, name) for name in names]
            values = await asyncio.gather(*map(self._value, bindings), return_exceptions=True)
            now = self._clock()
            for (binding, _given), value in zip(bindings, values, strict=True):
                if isinstance(value, Hidden):
                    hold.put(leasing.made(binding, placeholders[binding.name], value, now))
            for value in values:
                if isinstance(value, BaseException):
                    raise value
            if seen == self._changes:
                return
        raise error("conflict", "The secrets change too fast to be leased.")

    async def _value(self, found: tuple[Binding, Hidden]) -> Hidden:
        """From where the binding says; so many sources at a time for the whole node."""
        binding, given = found
        if binding.origin.kind == "value":
            return given
        given.wipe()
        async with self._asking:
            return await SOURCES[binding.origin.kind](binding)

    async def _keep(self, hold: Hold) -> None:
        """Renews what is minted, as long as the hold is there."""
        while (wait_s := hold.next_s(self._clock())) is not None:
            await asyncio.sleep(wait_s)
            for lease in hold.due(self._clock()):
                await self._renew(hold, lease)
            if self._holds.get(hold.sandbox) is hold:
                self._tell(hold)

    async def _renew(self, hold: Hold, lease: Lease) -> None:
        try:
            fresh = await self._minted(hold, lease)
        except ClocheError as failed:
            fresh = leasing.not_renewed(lease, self._clock())
            detail = {"name": lease.name, "code": failed.code, "why": failed.message, "is_dead": fresh.is_dead}
            self._tell_of("secret.not_renewed", hold, detail)
        else:
            self._tell_of("secret.renewed", hold, {"name": lease.name})
        self._put(hold, lease, fresh)

    async def _minted(self, hold: Hold, lease: Lease) -> Lease:
        binding, given = await self._read(hold.tenant, hold.owner, lease.name)
        return leasing.made(binding, lease.placeholder, await self._value((binding, given)), self._clock())

    async def _replace(self, hold: Hold, name: str) -> None:
        """The operator set it anew. If the new one cannot be had, the old one ends all the same."""
        lease = hold.leases[name]
        try:
            fresh = await self._minted(hold, lease)
        except ClocheError as failed:
            fresh = leasing.dead(lease, renew_at=self._clock() + leasing.AGAIN_DEAD_S)
            self._tell_of("secret.not_renewed", hold, {"name": name, "code": failed.code, "why": failed.message})
        if self._put(hold, lease, fresh):
            self._tell(hold)
            self._restart(hold)

    def _put(self, hold: Hold, before: Lease, fresh: Lease) -> bool:
        """Not when the sandbox ended or somebody else was faster; then what was brought is wiped."""
        if self._holds.get(hold.sandbox) is hold and hold.leases.get(before.name) is before:
            hold.put(fresh)
            return True
        if fresh.value is not before.value:
            fresh.value.wipe()
        return False

    def _restart(self, hold: Hold) -> None:
        """A new time to wait for."""
        task = self._tasks.pop(hold.sandbox, None)
        if task is not None:
            task.cancel()
        if hold.next_s(self._clock()) is not None:
            self._tasks[hold.sandbox] = self._spawn(self._keep(hold), f"secrets of {hold.sandbox}")

    def _holding(self, tenant: str, owner: str, name: str) -> builtins.list[Hold]:
        return [
            hold
            for hold in self._holds.values()
            if (hold.tenant, hold.owner) == (tenant, owner) and name in hold.leases
        ]

    def _tell_of(self, kind: str, hold: Hold, detail: dict[str, Any]) -> None:
        self._told(kind, hold.sandbox, hold.owner, hold.tenant, detail)

    def _tell(self, hold: Hold) -> None:
        self.changed(hold.sandbox, tuple(hold.leases.values()))

    def _placeholders_of(self, lineage: str, names: Sequence[str]) -> dict[str, str]:
        assert is_id(lineage, "lineage"), "paths are made of our own ids"
        known = self._placeholders.read(lineage)
        missing = [name for name in names if name not in known]
        if missing:
            known |= {name: new_placeholder() for name in missing}
            self._placeholders.write(lineage, known)
        return {name: known[name] for name in names}


def _not_found(name: str) -> ClocheError:
    return error("secret_not_found", f"There is no secret {name[:80]!r}.", detail={"secret": name[:80]})


def _given(asked: SetSecret) -> Hidden | None:
    if asked.source.value is None:
        return None
    value = Hidden(asked.source.value.get_secret_value().encode())
    why = check_value(value.view())
    if why is not None:
        value.wipe()
        raise error("invalid_request", f"The value cannot be used: {why}.")
    return value


def _detail(binding: Binding) -> dict[str, Any]:
    """For the journal: what is bound to what, without the value and without where it comes from."""
    kinds = [spot.kind for spot in binding.places]
    return {"name": binding.name, "source": binding.origin.kind, "hosts": list(binding.hosts), "places": kinds}
