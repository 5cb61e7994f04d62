"""The records of one sandbox's commands: one file, a slot each.

Making a file for each command costs half a millisecond on a usual disk, and as much again at its end; a slot is one
write. A slot is a line of JSON with spaces behind it, so that the record of the end, which drops the environment, goes into
the same place. What no longer fits is written at the end of the file, and its old slot is blanked; a crash between the two
leaves both, and the later one counts. Blank slots are taken out when they are most of the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

import msgspec

from cloche_server.node.records import CommandRecord

SPARE_BYTES: Final = 640
"""What an end adds to a record, and some: the state of its output, its reason, detail and times."""
COMPACT_BYTES: Final = 1024 * 1024
_ENCODE: Final = msgspec.json.Encoder().encode
_DECODE: Final = msgspec.json.Decoder(CommandRecord).decode


class _Id(msgspec.Struct):
    id: str


_DECODE_ID: Final = msgspec.json.Decoder(_Id).decode


class CommandBook:
    """Knows where each record is and keeps no descriptor. One writer: the daemon."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._slots: dict[str, tuple[int, int]] = {}
        self._end = 0
        self._blank = 0
        try:
            self._load()
        except FileNotFoundError:
            return

    def ids(self) -> list[str]:
        return list(self._slots)

    def add(self, record: CommandRecord) -> None:
        """A new record, whole in the kernel when this returns."""
        data = _ENCODE(record)
        self._append(record.id, data + b" " * SPARE_BYTES + b"\n")

    def save(self, record: CommandRecord) -> None:
        offset, size = self._slots[record.id]
        data = _ENCODE(record)
        if len(data) < size:
            self._write(offset, data.ljust(size - 1) + b"\n")
            return
        self._append(record.id, data + b"\n")
        self._clear(offset, size)

    def get(self, command: str) -> CommandRecord | None:
        found = self._slots.get(command)
        if found is None:
            return None
        offset, size = found
        with open(self._path, "rb") as file:
            file.seek(offset)
            return _DECODE(file.read(size))

    def remove(self, command: str) -> None:
        found = self._slots.pop(command, None)
        if found is not None:
            self._clear(*found)
            if self._blank > COMPACT_BYTES and self._blank > self._end // 2:
                self._compact()

    # --- the file -----------------------------------------------------------------------------------

    def _append(self, command: str, line: bytes) -> None:
        self._write(self._end, line, os.O_CREAT)
        self._slots[command] = (self._end, len(line))
        self._end += len(line)

    def _clear(self, offset: int, size: int) -> None:
        self._write(offset, b" " * (size - 1) + b"\n")
        self._blank += size

    def _write(self, offset: int, data: bytes, flags: int = 0) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o600)
        try:
            written = os.pwrite(fd, data, offset)
            if written != len(data):  # a full disk: half a line at the end is taken back, then it is told
                os.ftruncate(fd, self._end)
                raise OSError(28, "the disk of the command records is full")
        finally:
            os.close(fd)

    def _load(self) -> None:
        with open(self._path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):  # torn by a crash: it was never journalled
                    break
                self._place(line)
                self._end += len(line)

    def _place(self, line: bytes) -> None:
        size = len(line)
        try:
            command = _DECODE_ID(line).id
        except msgspec.DecodeError:  # blank, or bytes that a power cut took
            self._blank += size
            return
        if command in self._slots:
            self._blank += self._slots[command][1]
        self._slots[command] = (self._end, size)

    def _compact(self) -> None:
        scratch = self._path + ".new"
        with open(scratch, "wb", opener=_private) as file:
            file.writelines(self._lines())
        os.replace(scratch, self._path)
        self._slots.clear()
        self._end = self._blank = 0
        self._load()

    def _lines(self) -> Iterator[bytes]:
        with open(self._path, "rb") as file:
            for offset, size in self._slots.values():
                file.seek(offset)
                yield file.read(size)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
