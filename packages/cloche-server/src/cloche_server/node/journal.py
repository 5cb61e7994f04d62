"""The journal: append-only JSON lines, each with the hash of the one before.

A line is what was decided, written (the write has returned) before its effect can be seen. Its `hash` is SHA-256 over
the line's own bytes up to that field, and `prev` is the hash before it, so that removing or changing a line shows.
Files are named by their first line's number. A file that is full is followed by one that begins with a `carried` line for each
sandbox that still lives: a start reads the last file only.

No fsync a line: a killed daemon loses nothing, because the kernel has the bytes; a machine that loses power may lose the
last second, and with it lost the sandboxes. Synced at rotation and at stop. No payload, argument or environment
value is ever in it: hashes are.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from cloche_server.node.clock import Clock

FILE_BYTES_MAX: Final = 16 * 1024 * 1024
LINE_BYTES_MAX: Final = 1024 * 1024
GENESIS: Final = "0" * 64
_TAIL: Final = re.compile(rb',"hash":"([0-9a-f]{64})"}$')
_NAME: Final = re.compile(r"(\d{16})\.jsonl")


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line, in the order of its fields; `hash` is the last."""

    seq: int
    boot_ns: int
    wall: float
    kind: str
    sandbox: str | None = None
    command: str | None = None
    owner: str | None = None
    tenant: str | None = None
    detail: dict[str, Any] = {}
    prev: str
    hash: str = ""


class ChainBroken(Exception):
    """A line in the middle is not what was written: file and line number are in the message."""


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(Line)


class Journal:
    """The one writer. Opening recovers what a crash left; `lines` is then what the last file says."""

    def __init__(
        self,
        directory: Path,
        clock: Clock,
        *,
        file_bytes_max: int = FILE_BYTES_MAX,
        carry: Callable[[], Iterable[dict[str, Any]]] | None = None,
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._file_bytes_max = file_bytes_max
        self.carry = carry
        """Gives, at a rotation, the fields of one `carried` line for each sandbox that lives."""
        self.seq = 0
        self.head = GENESIS
        self.lines: list[Line] = []
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for unfinished in directory.glob("*.new"):  # a rotation that a crash cut short: the old file still goes on
            unfinished.unlink()
        found = files(directory)
        cut = self._recover(found) if found else None
        path = found[-1] if found else directory / f"{1:016}.jsonl"
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._fd).st_size
        if cut is not None:
            detail = {"bytes": len(cut), "sha256": hashlib.sha256(cut).hexdigest()}
            self._append_plain("journal.cut", detail)  # in this file: nobody has read yet what a new one must restate

    def write(
        self,
        kind: str,
        *,
        sandbox: str | None = None,
        command: str | None = None,
        owner: str | None = None,
        tenant: str | None = None,
        detail: dict[str, Any] | None = None,
    ) -> Line:
        """Returns when the kernel has the line."""
        line = self._next(kind, sandbox, command, owner, tenant, detail or {})
        data = _sealed(line)
        if self._size + len(data) > self._file_bytes_max and self._size:
            self._rotate()
            line = self._next(kind, sandbox, command, owner, tenant, detail or {})
            data = _sealed(line)
        self._append(data)
        return self._advance(line, data)

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1

    @property
    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in files(self._directory))

    def read(self, after: int) -> Iterator[Line]:
        """Lines with a number above `after`, oldest first."""
        found = files(self._directory)
        for path, following in zip(found, [*found[1:], None], strict=True):
            if following is None or _first(following) > after + 1:
                for line, _ in _lines_of(path):
                    if line.seq > after:
                        yield line

    def _next(
        self,
        kind: str,
        sandbox: str | None,
        command: str | None,
        owner: str | None,
        tenant: str | None,
        detail: dict[str, Any],
    ) -> Line:
        return Line(
            seq=self.seq + 1,
            boot_ns=self._clock.boot_ns(),
            wall=round(self._clock.wall_s(), 6),
            kind=kind,
            sandbox=sandbox,
            command=command,
            owner=owner,
            tenant=tenant,
            detail=detail,
            prev=self.head,
        )

    def _advance(self, line: Line, data: bytes) -> Line:
        self.seq = line.seq
        self.head = data[-67:-3].decode()
        return line

    def _append(self, data: bytes) -> None:
        assert len(data) <= LINE_BYTES_MAX, "a line holds names and hashes, never payloads"
        written = os.write(self._fd, data)
        if written != len(data):  # a disk that is full: take the half line back, then say so
            os.ftruncate(self._fd, self._size)
            raise OSError(28, "the journal's disk is full")
        self._size += written

    def _rotate(self) -> None:
        """The new file is complete, with its carried lines, when it gets its name."""
        os.fsync(self._fd)
        path = self._directory / f"{self.seq + 1:016}.jsonl"
        scratch = path.with_suffix(".new")
        old, seq, head, size = self._fd, self.seq, self.head, self._size
        self._fd = os.open(scratch, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._size = 0
        try:
            self._append_plain("journal.rotated", {"after": seq})
            for fields in self.carry() if self.carry is not None else ():
                self._append_plain(
                    "carried", fields.get("detail", {}), **{k: v for k, v in fields.items() if k != "detail"}
                )
            os.fsync(self._fd)
            scratch.rename(path)
        except BaseException:
            os.close(self._fd)
            scratch.unlink(missing_ok=True)
            self._fd, self.seq, self.head, self._size = old, seq, head, size
            raise
        os.close(old)

    def _append_plain(self, kind: str, detail: dict[str, Any], **who: str | None) -> None:
        line = self._next(kind, who.get("sandbox"), who.get("command"), who.get("owner"), who.get("tenant"), detail)
        data = _sealed(line)
        self._append(data)
        self._advance(line, data)

    # --- after a crash ------------------------------------------------------------------------------

    def _recover(self, found: list[Path]) -> bytes | None:
        """Reads the last file; what was cut from its end, or None."""
        last = found[-1]
        cut = _cut_torn_line(last)
        before = _last_hash(found[-2]) if len(found) > 1 else None
        if before is not None:
            self.head = before
        elif _first(last) != 1:
            self.head = ""  # older files were taken away to an archive: the chain starts where this file says
        self.seq = _first(last) - 1
        for line, data in _lines_of(last):
            self._check(last, line)
            self.lines.append(line)
            self._advance(line, data)
        return cut

    def _check(self, path: Path, line: Line) -> None:
        if line.seq != self.seq + 1 or (self.head and line.prev != self.head):
            raise ChainBroken(f"{path.name}: line {line.seq} does not follow line {self.seq}")


def verify(directory: Path) -> int:
    """Checks the whole chain, all files; how many lines it holds. Raises ChainBroken."""
    head, seq = None, 0
    for path in files(directory):
        for line, data in _lines_of(path):
            if head is not None and (line.prev != head or line.seq != seq + 1):
                raise ChainBroken(f"{path.name}: line {line.seq} does not follow line {seq}")
            seq, head = line.seq, data[-67:-3].decode()
    return seq


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if _NAME.fullmatch(path.name))


def _first(path: Path) -> int:
    return int(path.name[:16])


def _sealed(line: Line) -> bytes:
    body = _ENCODER.encode(line)
    body = body[: -len(b',"hash":""}')]
    return body + b',"hash":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def _lines_of(path: Path) -> Iterator[tuple[Line, bytes]]:
    """Each whole line with its bytes, its own hash checked."""
    with path.open("rb") as file:
        for number, data in enumerate(file, 1):
            if not data.endswith(b"\n"):
                return  # being written, or torn: `_cut_torn_line` is for the writer to call
            found = _TAIL.search(data[:-1])
            if found is None or hashlib.sha256(data[: found.start()]).hexdigest().encode() != found[1]:
                raise ChainBroken(f"{path.name}: line {number} is not what was written")
            try:
                yield _DECODER.decode(data), data
            except msgspec.DecodeError as bad:
                raise ChainBroken(f"{path.name}: line {number}: {bad}") from bad


def _last_hash(path: Path) -> str | None:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LINE_BYTES_MAX))
        found = _TAIL.search(file.read().rstrip(b"\n"))
    if found is None:
        raise ChainBroken(f"{path.name}: its last line is not what was written")
    return found[1].decode()


def _cut_torn_line(path: Path) -> bytes | None:
    """A crash in the middle of a write leaves a line without its end (or, after a power cut, zeros)."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - LINE_BYTES_MAX)
        file.seek(start)
        tail = file.read()
        keep = tail.rfind(b"\n") + 1
        if keep == len(tail):
            return None
        file.truncate(start + keep)
        return tail[keep:]
