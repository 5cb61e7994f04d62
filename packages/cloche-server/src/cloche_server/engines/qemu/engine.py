"""`contract.Engine` and `contract.Instance` for QEMU microVMs, in the daemon: the keeper acts, this asks."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import socket
import subprocess
from functools import cached_property
from pathlib import Path
from typing import Final

from cloche_server.engines import process
from cloche_server.engines.contract import (
    Capabilities,
    EngineError,
    InstanceStats,
    IsolationReport,
    ProcessEnd,
    Unsupported,
)
from cloche_server.engines.qemu import command
from cloche_server.engines.qemu.monitor import Monitor
from cloche_server.engines.spec import SandboxSpec
from cloche_server.keeper.client import Attached

NAME: Final = "qemu"
ISOLATION_CLASS: Final = "microvm"
FLOOR: Final = (7, 2)
"""Debian 12's: the oldest with which the command line was tried."""
_VERSION: Final = re.compile(r"QEMU emulator version (\d+)\.(\d+)[^\s,]*")
WEAKER: Final = (
    "emulated: the VMM's emulator is part of the wall, and no hardware stands behind it",
    "the writable layer is in the guest's memory: the disk limit is at most half of that",
    "the VMM shares the host's pid namespace, and can read host files that everybody can read",
    "the guest's clock runs at the rate that /proc/cpuinfo states",
)


def version_of(text: str) -> str:
    """`7.2.22` from what `qemu --version` prints; EngineError when it is none or too old."""
    found = _VERSION.search(text)
    if found is None:
        raise EngineError("engine_missing", f"qemu says {text[:80]!r}, which names no version")
    if (int(found[1]), int(found[2])) < FLOOR:
        raise EngineError("engine_too_old", f"{found[0]}; the floor is {FLOOR[0]}.{FLOOR[1]}")
    return found[0].rpartition(" ")[2]


def read_version(binary: Path) -> str:
    try:
        done = subprocess.run([str(binary), "--version"], capture_output=True, text=True, timeout=20, check=False)
    except OSError as error:
        raise EngineError("engine_missing", f"{binary}: {error.strerror}") from None
    return version_of(done.stdout)


def kernel_release(directory: Path) -> str:
    try:
        document = json.loads((directory / "manifest.json").read_text())
        return str(document["release"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(
            "engine_missing", f"no microVM kernel in {directory} (tools/build_microvm.sh): {error}"
        ) from None


def digest_of(*files: Path) -> str:
    """One SHA-256 over the digests of all that is executed, in this order."""
    digests = []
    for path in files:
        try:
            with path.open("rb") as file:
                digests.append(hashlib.file_digest(file, "sha256").hexdigest())
        except OSError as error:
            raise EngineError("engine_missing", f"{path}: {error.strerror}") from None
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


class QemuEngine:
    """Made once a daemon. `directory` holds what `tools/build_microvm.sh` made."""

    def __init__(self, directory: Path, keeper: process.Keeper, weaker: tuple[str, ...] = ()) -> None:
        self._directory = directory
        self._version = f"{read_version(Path(command.BINARY))} linux-{kernel_release(directory)}"
        self._keeper = keeper
        self._weaker = (*weaker, *WEAKER)

    @property
    def name(self) -> str:
        return NAME

    @property
    def version(self) -> str:
        return self._version

    @cached_property
    def digest(self) -> str:
        """Over 80 MB: read when first asked for, not at every start of a daemon that may never boot a microVM."""
        files = (self._directory / command.KERNEL, self._directory / command.INITRAMFS)
        return digest_of(Path(command.BINARY), *files)

    def capabilities(self) -> Capabilities:
        return Capabilities(isolation_class=ISOLATION_CLASS, experimental=True, pause=True)

    async def boot(self, spec: SandboxSpec) -> QemuInstance:
        await asyncio.to_thread(lambda: self.digest)
        return self._instance(await process.boot(self._keeper, spec))

    async def adopt(self, spec: SandboxSpec) -> QemuInstance | ProcessEnd:
        await asyncio.to_thread(lambda: self.digest)
        found = await process.adopt(self._keeper, spec.id)
        return found if isinstance(found, ProcessEnd) else self._instance(found)

    def _instance(self, attached: Attached) -> QemuInstance:
        held = attached.held
        found_uid = process.host_uid(held.pid)
        report = IsolationReport(
            isolation_class=ISOLATION_CLASS,
            engine=NAME,
            version=self._version,
            digest=self.digest,
            host_uid=held.host_uid if found_uid is None else found_uid,
            cgroup=None if held.cgroup is None else held.cgroup.main,
            weaker=self._weaker,
            experimental=True,
        )
        return QemuInstance(attached, report, process.Process(attached, self._keeper))


class QemuInstance:
    """One live microVM."""

    def __init__(self, attached: Attached, report: IsolationReport, vmm: process.Process) -> None:
        self._id = attached.held.id
        self._channel = attached.channel
        self._monitor = Monitor(attached.control)
        self._report = report
        self._process = vmm

    @property
    def id(self) -> str:
        return self._id

    @property
    def channel(self) -> socket.socket:
        return self._channel

    @property
    def pid(self) -> int:
        return self._process.pid

    def isolation(self) -> IsolationReport:
        return self._report

    async def start(self) -> None:
        await self._monitor.ask("cont")

    async def seal(self) -> None:
        """A microVM has no helper process."""

    async def pause(self) -> None:
        await self._monitor.ask("stop")

    async def resume(self) -> None:
        await self._monitor.ask("cont")

    async def export_upper(self, sink_fd: int, *, bytes_max: int) -> int:
        raise Unsupported("export the writable layer")

    def stats(self) -> InstanceStats:
        return self._process.stats()

    async def wait_dead(self) -> None:
        await self._process.wait_dead()

    async def kill(self) -> ProcessEnd:
        ended = await self._process.kill()
        self._monitor.close()
        self._channel.close()
        return ended
