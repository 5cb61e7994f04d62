"""One small file a sandbox, written before each effect: what a successor needs to finish or to undo it.

The directory belongs to an id of the keeper's namespace that nobody else is, so the daemon cannot write it. Written by
rename: a reader sees the old record or the new one. Not synced to disk: after a host crash every process is
gone, and `Records.read` finds that by the boot id.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from cloche_server.engines.spec import ENGINES, ID, OTHER_ID

OWNER_ID: Final = 1
"""The inside uid and gid that own the keeper's directory."""
FORM: Final = 1
RECORD_BYTES_MAX: Final = 4096
PHASES: Final = ("booting", "live", "ending")


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def start_time(pid: int) -> int | None:
    """The process's start in clock ticks since boot; None when there is no such process (or only its zombie)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read(4096).rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


@dataclass(frozen=True)
class Record:
    """What must be known to finish or undo one sandbox."""

    id: str
    tenant: str
    engine: str
    slot: int
    boot_id: str
    phase: str = "booting"
    pid: int = 0
    start_time: int = 0
    helper_pid: int = 0
    helper_start_time: int = 0

    def check(self) -> Record:
        if not (
            ID.fullmatch(self.id)
            and OTHER_ID.fullmatch(self.tenant)
            and self.engine in ENGINES
            and self.phase in PHASES
            and isinstance(self.boot_id, str)
        ):
            raise ValueError("not a record")
        for number in (self.slot, self.pid, self.start_time, self.helper_pid, self.helper_start_time):
            if type(number) is not int or number < 0:
                raise ValueError("not a record")
        return self

    def changed(self, **fields: Any) -> Record:
        return replace(self, **fields)


class Records:
    """The directory of records."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def write(self, record: Record) -> None:
        temporary = f"{self._directory}/.{record.id}"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(fd, json.dumps({"form": FORM, **asdict(record)}, separators=(",", ":")).encode())
        finally:
            os.close(fd)
        os.rename(temporary, f"{self._directory}/{record.id}")

    def remove(self, sandbox: str) -> None:
        for name in (f".{sandbox}", sandbox):
            try:
                os.unlink(f"{self._directory}/{name}")
            except FileNotFoundError:
                continue

    def read(self) -> tuple[list[Record], list[str]]:
        """(whole records of this boot, ids of everything else that has a file here: to be undone)."""
        whole: list[Record] = []
        other: list[str] = []
        now = boot_id()
        for name in os.listdir(self._directory):
            sandbox = name.removeprefix(".")
            record = None if name != sandbox else self._one(sandbox)
            if record is not None and record.boot_id == now:
                whole.append(record)
            else:
                other.append(sandbox)
        known = {record.id for record in whole}
        return whole, [sandbox for sandbox in other if sandbox not in known]

    def _one(self, sandbox: str) -> Record | None:
        try:
            with open(f"{self._directory}/{sandbox}", "rb") as file:
                value = json.loads(file.read(RECORD_BYTES_MAX))
            if value.pop("form") != FORM or value.get("id") != sandbox:
                return None
            return Record(**value).check()
        except (ValueError, TypeError, KeyError, AttributeError):
            return None  # half written by a crashed host: undone like one of an earlier boot
