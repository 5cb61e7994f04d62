"""Where values come from at a lease: a file of the node, or a command's output. HTTP is in `minting.py`.

What a source says when it fails is dropped: it may hold the value. The error names the secret and how it failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import signal
import stat
from typing import Final

from cloche_server.secrets.binding import VALUE_BYTES_MAX, Binding, check_value
from cloche_server.secrets.box import unavailable
from cloche_server.secrets.hidden import Hidden

COMMAND_S_MAX: Final = 10.0
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


async def from_file(binding: Binding) -> Hidden:
    path = binding.origin.path or ""
    try:
        data = await asyncio.to_thread(_read_file, path)
    except OSError as failed:
        raise unavailable(binding.name, f"the node cannot read its file ({failed.strerror})") from None
    if data is None:
        raise unavailable(binding.name, "what it is read from is not an ordinary file")
    return checked(binding, data)


def _read_file(path: str) -> bytearray | None:
    """At most one byte more than a value may have. A pipe or a device is not waited for."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        data = bytearray()
        while part := os.read(fd, VALUE_BYTES_MAX + 2 - len(data)):
            data += part
        return data
    finally:
        os.close(fd)


async def from_command(binding: Binding, *, time_s_max: float = COMMAND_S_MAX) -> Hidden:
    """Its standard output. Nothing of the daemon goes with it: no environment, no descriptor, no input."""
    try:
        process = await asyncio.create_subprocess_exec(
            *binding.origin.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=clean_environment(),
            cwd="/",
            start_new_session=True,
        )
    except OSError as failed:
        raise unavailable(binding.name, f"its command cannot be started ({failed.strerror})") from None
    try:
        async with asyncio.timeout(time_s_max):
            data = await _output(process)
            if data is None:
                raise unavailable(binding.name, f"its command printed more than {VALUE_BYTES_MAX} bytes")
            code = await process.wait()
    except TimeoutError:
        raise unavailable(binding.name, f"its command did not end within {time_s_max:g} s") from None
    finally:
        await _end(process)
    if code != 0:
        raise unavailable(binding.name, f"its command failed (exit code {code})")
    return checked(binding, data)


async def _output(process: asyncio.subprocess.Process) -> bytearray | None:
    assert process.stdout is not None
    data = bytearray()
    while part := await process.stdout.read(64 * 1024):
        data += part
        if len(data) > VALUE_BYTES_MAX + 1:
            return None
    return data


async def _end(process: asyncio.subprocess.Process) -> None:
    """With all that it started: it leads a session of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def clean_environment() -> dict[str, str]:
    """What a command line tool needs to find itself and its user's configuration; nothing of ours."""
    found = {"PATH": PATH, "LANG": "C.UTF-8"}
    with contextlib.suppress(KeyError):
        entry = pwd.getpwuid(os.geteuid())
        found |= {"HOME": entry.pw_dir, "USER": entry.pw_name, "LOGNAME": entry.pw_name}
    return found


def checked(binding: Binding, data: bytearray) -> Hidden:
    """Without the line end that programs and editors add; zeroed where it was read."""
    try:
        end = len(data)
        if data[-1:] == b"\n":
            end -= 2 if data[-2:] == b"\r\n" else 1
        value = Hidden(memoryview(data)[:end])
    finally:
        data[:] = bytes(len(data))
    why = check_value(value.view())
    if why is not None:
        value.wipe()
        raise unavailable(binding.name, why)
    return value
