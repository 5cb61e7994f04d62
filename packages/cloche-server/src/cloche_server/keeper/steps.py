"""Making and unmaking a sandbox: one list of named steps, each with its undo.

Undoing runs every undo in reverse and each is idempotent, so the same code serves a failed boot, `kill`, and a successor
that finds only the record.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cloche_server.engines.plan import Places, Plan
from cloche_server.engines.spec import WITH_ENVIRONMENT, BadSpec, SandboxSpec
from cloche_server.keeper import points
from cloche_server.keeper.loop import Sleep
from cloche_server.keeper.process import POLL_S, end_process, start_process
from cloche_server.keeper.sandboxes import EngineCommand, House, Making, Sandbox, Steps, cgroup_of, command_of
from cloche_server.keeper.verbs import Refusal

REMOVE_S: Final = 10.0
CHANNEL_BUFFER_BYTES: Final = 1 << 20


def boot(house: House, sandbox: Sandbox, spec: SandboxSpec) -> Steps:
    """All steps; on failure everything is undone before the exception goes on."""
    making: Making | None = None
    try:
        command = command_of(spec.engine)
        house.view.forget_removed()
        places = Places(
            engine=house.view.engine(spec.engine),
            work=house.view.work(spec.id),
            image=_image(house, spec),
            empty=house.view.empty,
            beside=house.view.beside,
        )
        plan = _plan(command, spec, places)
        sandbox.channel, guest_end = _channel()
        making = Making(spec, plan, guest_end)
        for step in STEPS:
            points.reached(f"keeper.boot.{step.name}")
            yield from step.do(house, sandbox, making)
        points.reached("keeper.boot.done")
    except BaseException:
        yield from undo(house, sandbox)
        raise
    finally:
        if making is not None:
            making.guest_end.close()


def _image(house: House, spec: SandboxSpec) -> str:
    is_root = spec.image_file and spec.engine not in WITH_ENVIRONMENT
    return house.view.image(spec.image_file) if is_root else ""


def _plan(command: EngineCommand, spec: SandboxSpec, places: Places) -> Plan:
    try:
        return command.plan(spec, places)
    except BadSpec as error:  # within the bounds of every spec, but not of this engine
        raise Refusal("bad_spec", str(error)) from None


def undo(house: House, sandbox: Sandbox) -> Steps:
    """Nothing of it is left afterwards; raises when something could not be removed (the record then stays)."""
    for step in reversed(STEPS):
        points.reached(f"keeper.undo.{step.name}")
        yield from step.undo(house, sandbox)
    sandbox.close()
    sandbox.undone = True
    house.view.forget_removed()


def _channel() -> tuple[socket.socket, socket.socket]:
    ours, guest = socket.socketpair()
    for end in (ours, guest):
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, CHANNEL_BUFFER_BYTES)
    return ours, guest


# ------------------------------------------------------------------------------ record


def _write_record(house: House, sandbox: Sandbox, making: Making) -> Steps:
    house.records.write(sandbox.record)
    yield from ()


def _remove_record(house: House, sandbox: Sandbox) -> Steps:
    house.records.remove(sandbox.id)
    yield from ()


# ------------------------------------------------------------------------- directories


def _make_directories(house: House, sandbox: Sandbox, making: Making) -> Steps:
    work = f"{house.work}/{sandbox.id}"
    os.mkdir(work, 0o755)
    for name in making.plan.private_dirs:
        os.mkdir(f"{work}/{name}", 0o700)
        os.chown(f"{work}/{name}", sandbox.host_id, sandbox.host_id)
    for name, content in making.plan.files.items():
        parent = os.path.dirname(f"{work}/{name}")
        if parent != work:
            os.makedirs(parent, 0o755, exist_ok=True)
        fd = os.open(f"{work}/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
        try:
            os.write(fd, content)
        finally:
            os.close(fd)
    yield from ()


def _remove_directories(house: House, sandbox: Sandbox) -> Steps:
    remove_tree(f"{house.work}/{sandbox.id}")
    yield from ()


def remove_tree(path: str) -> None:
    """By directory descriptors, so that no link leads out of it."""
    try:
        for _, directories, files, fd in os.fwalk(path, topdown=False, follow_symlinks=False):
            for name in files:
                os.unlink(name, dir_fd=fd)
            for name in directories:
                try:
                    os.rmdir(name, dir_fd=fd)
                except NotADirectoryError:
                    os.unlink(name, dir_fd=fd)
        os.rmdir(path)
    except FileNotFoundError:
        return


# ----------------------------------------------------------------------------- cgroups


def _make_cgroups(house: House, sandbox: Sandbox, making: Making) -> Steps:
    cgroup = cgroup_of(house, sandbox)
    if cgroup is not None:
        cgroup.make(making.spec)
    yield from ()


def _remove_cgroups(house: House, sandbox: Sandbox) -> Steps:
    cgroup = cgroup_of(house, sandbox)
    if cgroup is None:
        return
    sandbox.oom_kills = max(sandbox.oom_kills, cgroup.oom_kills())
    for _ in range(int(REMOVE_S / POLL_S)):
        if cgroup.remove():
            return
        yield Sleep(POLL_S)
    raise OSError(errno.EBUSY, f"cgroup {cgroup.main} stays busy")


@dataclass(frozen=True)
class Step:
    """A name, and two functions that can be called again without harm."""

    name: str
    do: Callable[[House, Sandbox, Making], Steps]
    undo: Callable[[House, Sandbox], Steps]


STEPS: Final = (
    Step("record", _write_record, _remove_record),
    Step("directories", _make_directories, _remove_directories),
    Step("cgroups", _make_cgroups, _remove_cgroups),
    Step("process", start_process, end_process),
)
