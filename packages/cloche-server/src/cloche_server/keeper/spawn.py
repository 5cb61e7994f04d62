"""A child in its own cgroup, user namespace (two ids) and mount namespace, which then becomes the engine.

The order is fixed by the kernel: cgroup first (later nobody may move it), then the namespaces, then the keeper writes
the maps, then the child takes its ids. If the keeper dies in between, the child reads end-of-file and exits.

A bare program gets all the other namespaces too, and nothing is left to it: a child of the child becomes it, because a pid
namespace is only for children; the one between says who that is and exits.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from cloche_server.keeper import kernel, points
from cloche_server.keeper.cgroups import Cgroup, put
from cloche_server.keeper.loop import Readable, Wait

NOBODY: Final = 65534
READY_S: Final = 10.0
FAILED: Final = b"x"
BARE_NAMESPACES: Final = (
    kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWCGROUP
)
_EXIT_ORPHANED: Final = 120
_EXIT_FAILED: Final = 121


@dataclass(frozen=True)
class Program:
    """What the child becomes."""

    argv: tuple[str, ...]
    env: dict[str, str]
    meminfo: str | None
    file_bytes_max: int
    stdin: int
    stderr: int
    open_files: int | None = None
    bare: bool = False
    read_only: bool = False


class SpawnFailed(Exception):
    """The child did not get as far as its namespaces."""


def fork_gated(program: Program, cgroup: Cgroup | None) -> tuple[int, Gate]:
    """(pid, its gate): the child waits behind the gate, in its cgroup and unmapped namespaces."""
    ready_in, ready_out = os.pipe2(os.O_CLOEXEC)
    go_in, go_out = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        os.close(go_out)
        _become(program, cgroup, ready_out, go_in)
    os.close(ready_out)
    os.close(go_in)
    return pid, Gate(pid, ready_in, go_out)


class Gate:
    """The keeper's side of a child that waits for its maps."""

    def __init__(self, pid: int, ready_in: int, go_out: int) -> None:
        self._pid = pid
        self._ready_in = ready_in
        self._go_out = go_out

    def open(self, host_id: int) -> Generator[Wait, Any, None]:
        """Write the two-id maps, then let the child go on. `host_id` is as the keeper's namespace counts."""
        try:
            if not (yield Readable(self._ready_in, READY_S)) or os.read(self._ready_in, 1) != b"u":
                raise SpawnFailed("the child did not reach its namespaces (user namespaces forbidden, cgroup full?)")
            points.reached("keeper.boot.maps")
            for name in ("uid_map", "gid_map"):
                put(f"/proc/{self._pid}/{name}", f"0 {host_id} 1\n{NOBODY} {host_id + 1} 1\n")
            os.write(self._go_out, b"g")
        except BaseException:
            self.close()
            raise

    def executed(self) -> Generator[Wait, Any, int]:
        """The pid of a bare program, once it was executed: its end of the pipe is closed by that."""
        said = b""
        while (yield Readable(self._ready_in, READY_S)):
            piece = os.read(self._ready_in, 64)
            if not piece and said.isdigit():
                return int(said)
            if not piece or piece == FAILED:
                break
            said += piece
        raise SpawnFailed("the program was not executed")

    def close(self) -> None:
        for fd in (self._ready_in, self._go_out):
            if fd >= 0:
                os.close(fd)
        self._ready_in = self._go_out = -1


def _become(program: Program, cgroup: Cgroup | None, ready_out: int, go_in: int) -> NoReturn:
    """In the child. Never returns into the keeper's code, whatever happens."""
    code, stderr = _EXIT_FAILED, program.stderr
    try:
        if cgroup is not None:
            cgroup.enter()
        kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
        os.write(ready_out, b"u")
        if os.read(go_in, 1) != b"g":
            code = _EXIT_ORPHANED
            os._exit(code)
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_SLAVE)
        if program.read_only:
            kernel.make_read_only("/")
        if program.meminfo is not None:
            kernel.mount(program.meminfo, "/proc/meminfo", None, kernel.MS_BIND)
        resource.setrlimit(resource.RLIMIT_FSIZE, (program.file_bytes_max, program.file_bytes_max))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if program.open_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (program.open_files, program.open_files))
        if program.bare:
            _strip(ready_out)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        null = os.open("/dev/null", os.O_WRONLY)
        os.dup2(program.stdin, 0)
        os.dup2(null, 1)
        os.dup2(program.stderr, 2)
        stderr = 2
        os.closerange(3, ready_out)
        os.closerange(ready_out + 1, 1 << 20)
        os.chdir("/")
        os.execve(program.argv[0], program.argv, program.env)
    except BaseException as error:  # the child must not unwind into the keeper
        os.write(stderr, f"spawn: {error}\n".encode()[:500])
        os.write(ready_out, FAILED)
    finally:
        os._exit(code)


def _strip(ready_out: int) -> None:
    """Returns in a child that is alone in its namespaces, is the second of the two ids, and has no capability."""
    kernel.unshare(BARE_NAMESPACES)
    pid = os.fork()
    if pid != 0:
        os.write(ready_out, str(pid).encode())
        os._exit(0)
    kernel.empty_bounding_set()
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)  # leaving uid 0 empties the other sets
    kernel.forbid_new_privileges()


def kill_ids(host_id: int) -> None:
    """SIGKILL for every process of this sandbox's two ids: a child takes each id in turn and signals all it may."""
    for one in (host_id, host_id + 1):
        pid = os.fork()
        if pid == 0:
            try:
                os.setgroups([])
                os.setresgid(one, one, one)
                os.setresuid(one, one, one)
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                os._exit(0)  # nobody there
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
