"""The step with a process in it: start an engine, know who it is, end it, and find it again after a keeper's death.

An engine is either left behind by its command (runsc: the state file names its processes) or is the command itself
(QEMU). Either way it counts as started when its control socket takes a connection. A bare one (the converter) has none: it
counts as started when it was executed.
"""

from __future__ import annotations

import errno
import os
import select
import socket
from typing import Final

from cloche_server.keeper import kernel, points, spawn
from cloche_server.keeper.loop import Exit, Readable, Sleep
from cloche_server.keeper.records import Record, boot_id, start_time
from cloche_server.keeper.sandboxes import House, Making, Sandbox, Steps, cgroup_of, command_of
from cloche_server.keeper.verbs import Refusal

CREATE_S: Final = 30.0
DEATH_S: Final = 30.0
POLL_S: Final = 0.002
REASON_BYTES_MAX: Final = 2000
LOG_BYTES_MAX: Final = 64 * 1024


def start_process(house: House, sandbox: Sandbox, making: Making) -> Steps:
    plan = making.plan
    errors_in, errors_out = _log() if plan.bare else os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    gate: spawn.Gate | None = None
    try:
        pid, gate = spawn.fork_gated(_program(house, sandbox, making, errors_out), cgroup_of(house, sandbox))
        os.close(errors_out)
        house.loop.expect(pid)
        sandbox.command_pidfd = os.pidfd_open(pid)
        making.guest_end.close()
        try:
            yield from gate.open(sandbox.host_id)
        except spawn.SpawnFailed as error:
            raise Refusal("engine_failed", f"{error} {_reason(errors_in)}") from None
        points.reached("keeper.boot.spawned")
        if plan.bare:
            yield from _wait_executed(house, sandbox, gate, pid, errors_in)
            sandbox.control = socket.socket(fileno=os.dup(errors_in))
        elif plan.state is None:
            yield from _wait_direct(house, sandbox, pid, errors_in)
        else:
            yield from _wait_created(pid, errors_in)
            _know_created(house, sandbox, plan.state)
            sandbox.control = connect_control(house, sandbox)
    finally:
        os.close(errors_in)
        if gate is not None:
            gate.close()
    os.close(sandbox.command_pidfd)
    sandbox.command_pidfd = -1
    points.reached("keeper.boot.created")
    cgroup = cgroup_of(house, sandbox)
    if cgroup is not None:
        cgroup.limit_cpu(making.spec)
    sandbox.record = sandbox.record.changed(phase="live")
    house.records.write(sandbox.record)


def _program(house: House, sandbox: Sandbox, making: Making, errors_out: int) -> spawn.Program:
    plan = making.plan
    return spawn.Program(
        argv=plan.argv,
        env=plan.env,
        meminfo=None if plan.meminfo is None else f"{house.view.work(sandbox.id)}/{plan.meminfo}",
        file_bytes_max=plan.file_bytes_max,
        stdin=making.guest_end.fileno(),
        stderr=errors_out,
        open_files=plan.open_files,
        bare=plan.bare,
        read_only=plan.read_only,
    )


def _log() -> tuple[int, int]:
    """A bounded place for last words: what is full takes no more, and nobody waits for it."""
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOG_BYTES_MAX // 2)  # the kernel doubles it
    for end in (ours, theirs):
        end.setblocking(False)
    return ours.detach(), theirs.detach()


def _wait_executed(house: House, sandbox: Sandbox, gate: spawn.Gate, command: int, errors_in: int) -> Steps:
    try:
        pid = yield from gate.executed()
    except spawn.SpawnFailed as error:
        raise Refusal("engine_failed", f"{error}: {_reason(errors_in)}") from None
    yield from _wait_created(command, errors_in)
    _know(house, sandbox, pid)


def _wait_direct(house: House, sandbox: Sandbox, pid: int, errors_in: int) -> Steps:
    """The command is the engine: started when it takes a control connection, failed when it ends before."""
    sandbox.pidfd = os.dup(sandbox.command_pidfd)
    sandbox.record = sandbox.record.changed(pid=pid, start_time=start_time(pid) or 0)
    for _ in range(int(CREATE_S / POLL_S)):
        if (yield Readable(sandbox.command_pidfd, POLL_S)):
            raise Refusal("engine_failed", f"the engine ended at once: {_reason(errors_in)}")
        try:
            sandbox.control = connect_control(house, sandbox)
        except Refusal:  # not listening yet
            continue
        # It listens before it has opened its files, and greets after: nothing is read here, only waited for.
        if (yield Readable(sandbox.control.fileno(), CREATE_S)) and not _is_hung_up(sandbox.control):
            return
        break
    raise Refusal("engine_failed", f"the engine did not begin: {_reason(errors_in)}")


def _is_hung_up(control: socket.socket) -> bool:
    poll = select.poll()
    poll.register(control, 0)
    return bool(poll.poll(0))


def _wait_created(pid: int, errors_in: int) -> Steps:
    status = yield Exit(pid, CREATE_S)
    if status is None:
        raise Refusal("engine_failed", f"the engine was not ready after {CREATE_S:.0f} s")
    if status != 0:
        raise Refusal("engine_failed", f"the engine's command ended with status {status}: {_reason(errors_in)}")


def _reason(errors_in: int) -> str:
    """What a failed command said. No guest code has run when it is read."""
    try:
        return os.read(errors_in, REASON_BYTES_MAX).decode(errors="replace").strip()
    except BlockingIOError:
        return ""


def _know_created(house: House, sandbox: Sandbox, state: str) -> None:
    """Who the engine's processes are: named by its own state file, believed only if they are our children."""
    command = command_of(sandbox.record.engine)
    with open(f"{house.work}/{sandbox.id}/{state}", "rb") as file:
        text = file.read(command.STATE_BYTES_MAX)
    try:
        pid, helper = command.engine_pids(text)
    except ValueError as error:
        raise Refusal("engine_failed", str(error)) from None
    _know(house, sandbox, pid)
    if helper:
        sandbox.helper_pidfd = _pidfd_of_child(helper)
        sandbox.record = sandbox.record.changed(helper_pid=helper, helper_start_time=start_time(helper) or 0)


def _know(house: House, sandbox: Sandbox, pid: int) -> None:
    house.loop.expect(pid)
    sandbox.pidfd = _pidfd_of_child(pid)
    started = start_time(pid)
    if started is None:
        raise Refusal("engine_failed", "the engine died while it was created")
    sandbox.record = sandbox.record.changed(pid=pid, start_time=started)


def _pidfd_of_child(pid: int) -> int:
    try:
        pidfd = os.pidfd_open(pid)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        raise Refusal("engine_failed", f"process {pid} is not the keeper's") from None
    except ProcessLookupError:
        raise Refusal("engine_failed", f"process {pid} died while the sandbox was created") from None
    return pidfd


def end_helper(house: House, sandbox: Sandbox) -> Steps:
    if sandbox.helper_pidfd >= 0:
        kernel.send_kill(sandbox.helper_pidfd)
        yield from _wait_death(sandbox.helper_pidfd)
        os.close(sandbox.helper_pidfd)
        sandbox.helper_pidfd = -1
    house.loop.reap()


def end_process(house: House, sandbox: Sandbox) -> Steps:
    if sandbox.pidfd >= 0:
        kernel.send_kill(sandbox.pidfd)
    yield from end_helper(house, sandbox)
    if sandbox.pidfd >= 0:
        yield from _wait_death(sandbox.pidfd)
        house.loop.reap()
    sandbox.status = house.loop.take_status(sandbox.record.pid)
    yield from _end_others(house, sandbox)


def _end_others(house: House, sandbox: Sandbox) -> Steps:
    """Whatever else has the sandbox's ids: after a boot that failed or was cut short, or without a cgroup."""
    cgroup = cgroup_of(house, sandbox)
    if cgroup is not None and sandbox.pidfd >= 0 and not cgroup.pids():
        return
    for _ in range(int(DEATH_S / POLL_S)):
        spawn.kill_ids(sandbox.host_id)
        house.loop.reap()
        if cgroup is None or not cgroup.pids():
            return
        yield Sleep(POLL_S)
    raise OSError(errno.EBUSY, f"processes of {sandbox.id} do not die")


def _wait_death(pidfd: int) -> Steps:
    if not (yield Readable(pidfd, DEATH_S)):
        raise OSError(errno.EBUSY, "a process did not die of SIGKILL")


def kill_booting(sandbox: Sandbox) -> None:
    """End the command of a boot in progress; the boot then fails and undoes itself."""
    if sandbox.command_pidfd >= 0:
        kernel.send_kill(sandbox.command_pidfd)


def recover(record: Record) -> Sandbox:
    """A predecessor's sandbox. Its process is held again only if it is the very same one."""
    sandbox = Sandbox(record)
    if record.phase == "live" and record.boot_id == boot_id():
        sandbox.pidfd = _same_process(record.pid, record.start_time)
        sandbox.helper_pidfd = _same_process(record.helper_pid, record.helper_start_time)
    return sandbox


def _same_process(pid: int, started: int) -> int:
    if pid == 0:
        return -1
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return -1
    if start_time(pid) != started:  # read after the pidfd was opened: it is this process or none
        os.close(pidfd)
        return -1
    return pidfd


def connect_control(house: House, sandbox: Sandbox) -> socket.socket:
    """Connected without blocking and never read here: what comes from it is a sentry's word."""
    relative = command_of(sandbox.record.engine).control_path(sandbox.id)
    if relative is None:
        raise Refusal("no_control", f"{sandbox.record.engine} has no control socket")
    parent = f"{house.work}/{sandbox.id}/{os.path.dirname(relative)}"
    try:
        directory = os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise Refusal("no_control", f"the control socket's directory: {error.strerror}") from None
    control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        control.connect(f"/proc/self/fd/{directory}/{os.path.basename(relative)}")
    except OSError as error:
        control.close()
        raise Refusal("no_control", f"the control socket refused: {error.strerror}") from None
    finally:
        os.close(directory)
    return control
