"""A cgroup per sandbox, version 1 or 2: limits as data, made and removed by the keeper, read by the daemon.

The memory limit is without swap. `pids.max` is only the net (crossing it kills the sentry); the guest's own limit on
processes is RLIMIT_NPROC, set by the agent. An interceptor has no guest: its `pids.max` is what the spec says. A process
enters before it leaves its user namespace: nobody can move it later.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from cloche_server.engines.spec import WITH_ENVIRONMENT, SandboxSpec

CPU_PERIOD_US: Final = 100_000
PIDS_FACTOR: Final = 4
PIDS_MORE: Final = 64
V1_CONTROLLERS: Final = ("memory", "pids", "cpu", "cpuacct")
V2: Final = "unified"


@dataclass(frozen=True)
class Write:
    """One value for one file; one that is not `required` may be missing on this kernel."""

    controller: str
    file: str
    value: str
    required: bool = True
    late: bool = False
    """Written when the engine stands and no guest code has run yet: the engine's own start is not slowed down."""


def limits(version: int, spec: SandboxSpec) -> Iterator[Write]:
    """What to write, in order, for this spec."""
    quota_us = max(1000, round(spec.cpus * CPU_PERIOD_US))
    pids = spec.processes if spec.engine in WITH_ENVIRONMENT else PIDS_FACTOR * spec.processes + PIDS_MORE
    if version == 1:
        yield Write("memory", "memory.limit_in_bytes", str(spec.memory_bytes))
        yield Write("memory", "memory.memsw.limit_in_bytes", str(spec.memory_bytes), required=False)
        yield Write("memory", "memory.swappiness", "0", required=False)
        yield Write("pids", "pids.max", str(pids))
        yield Write("cpu", "cpu.cfs_period_us", str(CPU_PERIOD_US), late=True)
        yield Write("cpu", "cpu.cfs_quota_us", str(quota_us), late=True)
        return
    yield Write(V2, "memory.max", str(spec.memory_bytes))
    yield Write(V2, "memory.swap.max", "0", required=False)
    yield Write(V2, "memory.oom.group", "1")
    yield Write(V2, "pids.max", str(pids))
    yield Write(V2, "cpu.max", f"{quota_us} {CPU_PERIOD_US}", late=True)


@dataclass(frozen=True)
class Usage:
    """What a sandbox uses, by the host's count."""

    memory_bytes: int
    memory_peak_bytes: int
    cpu_s: float
    oom_kills: int


@dataclass(frozen=True)
class Cgroup:
    """Directories by controller (`unified` alone in version 2): the delegated parents, or one sandbox's."""

    version: int
    dirs: dict[str, str]

    @classmethod
    def from_object(cls, value: dict[str, Any]) -> Cgroup:
        return cls(int(value["version"]), {str(name): str(path) for name, path in value["dirs"].items()})

    def to_object(self) -> dict[str, Any]:
        return {"version": self.version, "dirs": self.dirs}

    def child(self, name: str) -> Cgroup:
        return Cgroup(self.version, {controller: f"{path}/{name}" for controller, path in self.dirs.items()})

    @property
    def main(self) -> str:
        """The one whose path names this cgroup in reports, and whose members are all of them."""
        return self.dirs["memory"] if self.version == 1 else self.dirs[V2]

    def make(self, spec: SandboxSpec) -> None:
        for path in self.dirs.values():
            os.mkdir(path, 0o755)
        self._write([write for write in limits(self.version, spec) if not write.late])

    def limit_cpu(self, spec: SandboxSpec) -> None:
        self._write([write for write in limits(self.version, spec) if write.late])

    def _write(self, writes: list[Write]) -> None:
        for write in writes:
            try:
                put(f"{self.dirs[write.controller]}/{write.file}", write.value)
            except FileNotFoundError:
                if write.required:
                    raise

    def enter(self) -> None:
        """The calling process, which has one thread, moves into it.

        By `tasks` where there is that file: moving one thread of one's own takes no global lock, while moving a
        process waits 10 ms and more for all processors.
        """
        file = "tasks" if self.version == 1 else "cgroup.procs"
        for path in self.dirs.values():
            put(f"{path}/{file}", "0")

    def pids(self) -> list[int]:
        try:
            return [int(line) for line in get(f"{self.main}/cgroup.procs").split()]
        except (FileNotFoundError, OSError) as error:
            if error.errno in (errno.ENOENT, errno.ENODEV):
                return []
            raise

    def remove(self) -> bool:
        """True when nothing of it is left; False while the kernel is still busy with its last process."""
        gone = True
        for path in self.dirs.values():
            try:
                os.rmdir(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
                gone = False
        return gone

    def oom_kills(self) -> int:
        """How often the kernel killed a process in it for memory; 0 when it is gone."""
        file = "memory.oom_control" if self.version == 1 else "memory.events"
        try:
            return _keyed(get(f"{self.main}/{file}"), "oom_kill")
        except FileNotFoundError:
            return 0

    def usage(self) -> Usage:
        if self.version == 1:
            now = int(get(f"{self.main}/memory.usage_in_bytes"))
            peak = int(get(f"{self.main}/memory.max_usage_in_bytes"))
            cpu_s = int(get(f"{self.dirs['cpuacct']}/cpuacct.usage")) / 1e9 if "cpuacct" in self.dirs else 0.0
        else:
            now = int(get(f"{self.main}/memory.current"))
            try:
                peak = int(get(f"{self.main}/memory.peak"))
            except FileNotFoundError:  # before Linux 5.19
                peak = now
            cpu_s = _keyed(get(f"{self.main}/cpu.stat"), "usage_usec") / 1e6
        return Usage(now, peak, cpu_s, self.oom_kills())


def _keyed(text: str, key: str) -> int:
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def put(path: str, value: str) -> None:
    """One write system call: buffered writing would hide the kernel's refusal until close."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)


def get(path: str) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 1 << 16).decode()
    finally:
        os.close(fd)
