"""The interceptor's directory of packages: made once from its hash lock, by a virtual environment's own pip.

It is made beside its place and renamed, so what is there is whole. Its name is the interpreter's version and the lock's digest:
another lock or another Python makes another one. The daemon asks the index that its operator's pip is configured for.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from cloche.wire.errors import ClocheError, error
from cloche_server.egress.interception import interpreter as interpreters
from cloche_server.egress.interception.interpreter import LOCK_FILE, Interpreter
from cloche_server.egress.text import escaped

MAKE_S: Final = 900.0
LINE_CHARS_MAX: Final = 300
REASON_LINES: Final = 5
MAKING: Final = ".making-"
PIP: Final = (
    "install",
    "--require-hashes",
    "--no-deps",
    "--only-binary=:all:",
    "--no-input",
    "--disable-pip-version-check",
    "--no-warn-script-location",
    "--progress-bar=off",
)

Progress = Callable[[str], None]


def nobody(line: str) -> None:
    """Nobody wants to know how far it is."""


def name_of(version: str, lock: Path = LOCK_FILE) -> str:
    return f"{version}-{hashlib.sha256(lock.read_bytes()).hexdigest()}"


class Environment:
    """Of one node. There is one maker at a time; all who ask meanwhile wait for the same one."""

    def __init__(self, directory: Path, interpreter: Interpreter | None, *, lock: Path = LOCK_FILE) -> None:
        self._directory = directory
        self._interpreter = interpreter
        self._lock = lock
        self._making: asyncio.Task[str] | None = None
        self._hearing: list[Progress] = []

    def problem(self) -> str | None:
        """Why it can never be made; None when it is there or can be tried."""
        if self._interpreter is None:
            return interpreters.why_none(interpreters.versions_tested())
        return None

    @property
    def is_ready(self) -> bool:
        return self._interpreter is not None and (self._directory / self._name(self._interpreter)).is_dir()

    async def ready(self, progress: Progress = nobody) -> str:
        """Its name below the directory. `interceptor_missing` with the reason when it cannot be made."""
        if self._interpreter is None:
            versions = interpreters.versions_tested()
            raise _missing("no_python", interpreters.why_none(versions), interpreters.fix_for_none(versions))
        if (closed := interpreters.closed_to_others(self._interpreter)) is not None:
            fix = f"chmod -R o+rX {self._interpreter.prefix}, or name another Python with {interpreters.VARIABLE}."
            raise _missing("closed_python", f"{closed} is closed to other users, and the interceptor is one.", fix)
        name = self._name(self._interpreter)
        if (self._directory / name).is_dir():
            return name
        self._hearing.append(progress)
        try:
            if self._making is None or self._making.done():
                self._making = asyncio.create_task(self._make(self._interpreter, name), name="interceptor environment")
            return await asyncio.shield(self._making)
        finally:
            self._hearing.remove(progress)

    async def close(self) -> None:
        """What is half made is given up."""
        if self._making is not None and not self._making.done():
            self._making.cancel()
            await asyncio.wait([self._making])

    def _name(self, interpreter: Interpreter) -> str:
        return name_of(interpreter.version, self._lock)

    def _tell(self, line: str) -> None:
        for hear in tuple(self._hearing):
            hear(line)

    async def _make(self, interpreter: Interpreter, name: str) -> str:
        loop = asyncio.get_running_loop()
        stop = threading.Event()

        def tell(line: str) -> None:
            loop.call_soon_threadsafe(self._tell, line)

        maker = _Maker(self._directory, interpreter, self._lock, tell, stop)
        work = asyncio.create_task(asyncio.to_thread(maker.make, name))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait([work])
            raise
        return name


class _Maker:
    """Works in a thread of its own."""

    def __init__(
        self, directory: Path, interpreter: Interpreter, lock: Path, tell: Progress, stop: threading.Event
    ) -> None:
        self._directory = directory
        self._interpreter = interpreter
        self._lock = lock
        self._tell = tell
        self._stop = stop

    def make(self, name: str) -> None:
        self._tell("Making the interceptor's environment (once; it takes a minute).")
        place: Path | None = None
        try:
            make_directory(self._directory)
            for left in self._directory.glob(f"{MAKING}*"):
                shutil.rmtree(left)
            place = Path(tempfile.mkdtemp(prefix=MAKING, dir=self._directory))
            self._run(str(self._interpreter.executable), "-I", "-m", "venv", str(place))
            self._run(str(place / "bin" / "python"), "-I", "-m", "pip", *PIP, "-r", str(self._lock))
            place.chmod(0o755)
            place.rename(self._directory / name)
            place = None
        except OSError as bad:
            raise _missing("not_made", f"The interceptor's environment cannot be made: {bad}.") from bad
        finally:
            if place is not None:
                shutil.rmtree(place, ignore_errors=True)
        self._remove_others(name)
        self._tell("The interceptor's environment is ready.")

    def _run(self, *argv: str) -> None:
        environ = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
        last: list[str] = []
        with subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**environ, "LC_ALL": "C.UTF-8"},
            umask=0o022,
            cwd="/",
            start_new_session=True,
        ) as process:
            watch = threading.Thread(target=self._end_late, args=(process,), daemon=True)
            watch.start()
            assert process.stdout is not None
            for raw in process.stdout:
                line = escaped(raw[: 4 * LINE_CHARS_MAX].decode(errors="replace").strip(), LINE_CHARS_MAX)
                if line:
                    last = [*last[-REASON_LINES:], line]
                    self._tell(line)
            status = process.wait()
            watch.join()
        if self._stop.is_set():
            raise _missing("stopped", "Making the interceptor's environment was given up: the daemon stops.")
        if status != 0:
            raise _missing("not_made", f"The interceptor's environment cannot be made: {' | '.join(last)}")

    def _end_late(self, process: subprocess.Popen[bytes]) -> None:
        waited = 0.0
        while process.poll() is None:
            if self._stop.wait(0.2) or waited > MAKE_S:
                process.kill()
                return
            waited += 0.2

    def _remove_others(self, name: str) -> None:
        for other in self._directory.iterdir():
            if other.name != name and other.is_dir():
                shutil.rmtree(other, ignore_errors=True)


def make_directory(directory: Path) -> None:
    """The keeper shows it to interceptors, which are somebody else."""
    directory.mkdir(parents=True, exist_ok=True)
    with suppress(PermissionError):  # made by root for the system user
        directory.chmod(0o755)


def _missing(reason: str, text: str, fix: str | None = None) -> ClocheError:
    fix = fix or (
        "Check that the node's pip reaches its index (pip download mitmproxy) and that venv is installed; the next sandbox "
        "that needs it tries again."
    )
    return error("interceptor_missing", text, detail={"reason": reason}, fix=fix)
