"""The state directory: a directory for each sandbox, and below it one for each command.

    version                                  the form of this directory
    generation                               how many daemons have served it
    journal/                                 see `journal`
    spares/                                  see `spares`
    sandboxes/ID/record.json                 what is shown of it, 0600
    sandboxes/ID/commands.jsonl              see `command_book`
    sandboxes/ID/egress.jsonl                every attempt to get out, see `egress.records`; made with the first
    sandboxes/ID/commands/ID/{output,index}  see `command_log`; made with the first byte of output

Names below it are our own ids, never a guest's word.
"""

from __future__ import annotations

import os
import shutil
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from cloche.wire.errors import error
from cloche.wire.ids import is_id
from cloche_server.node.command_book import CommandBook
from cloche_server.node.records import CommandRecord, SandboxRecord

VERSION: Final = 1
RECORD: Final = "record.json"
COMMANDS: Final = "commands.jsonl"
BOOKS_MAX: Final = 1024
"""Sandboxes whose command index stays in memory."""
_ENCODE: Final = msgspec.json.Encoder().encode
_SANDBOX: Final = msgspec.json.Decoder(SandboxRecord)


class Store:
    """Reads and writes the directory; decides nothing."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.journal_dir = root / "journal"
        self._sandboxes = root / "sandboxes"
        self._base = str(self._sandboxes)
        self._books: OrderedDict[str, CommandBook] = OrderedDict()
        self._sandboxes.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._check_version()
        self.generation = self._next_generation()

    def _check_version(self) -> None:
        path = self.root / "version"
        if not path.exists():
            _write(str(path), f"{VERSION}\n".encode())
        found = int(path.read_text())
        if found > VERSION:
            raise error("state_too_new", f"{self.root} has version {found}; this node knows {VERSION}.")

    def _next_generation(self) -> int:
        path = self.root / "generation"
        number = int(path.read_text()) + 1 if path.exists() else 1
        _write(str(path), f"{number}\n".encode())
        return number

    # --- sandboxes ----------------------------------------------------------------------------------

    def add_sandbox(self, record: SandboxRecord) -> None:
        directory = f"{self._base}/{record.id}"
        os.mkdir(directory, 0o700)
        _write_new(f"{directory}/{RECORD}", _ENCODE(record))

    def save_sandbox(self, record: SandboxRecord) -> None:
        _write(f"{self._base}/{record.id}/{RECORD}", _ENCODE(record))

    def sandboxes(self) -> list[str]:
        return [name for name in os.listdir(self._sandboxes) if is_id(name, "sandbox")]

    def sandbox(self, sandbox: str) -> SandboxRecord | None:
        """None for a directory whose record was never finished (the daemon died in between)."""
        try:
            return _SANDBOX.decode(_read(f"{self._base}/{sandbox}/{RECORD}"))
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def remove_sandbox(self, sandbox: str) -> int:
        """How many bytes that freed."""
        self._books.pop(sandbox, None)
        directory = self._sandboxes / sandbox
        freed = _bytes_below(directory)
        shutil.rmtree(directory, ignore_errors=False)
        return freed

    def sandbox_dir(self, sandbox: str) -> Path:
        assert is_id(sandbox, "sandbox"), "paths are made of our own ids"
        return Path(f"{self._base}/{sandbox}")

    # --- commands -----------------------------------------------------------------------------------

    def command_dir(self, sandbox: str, command: str) -> Path:
        assert is_id(sandbox, "sandbox"), "paths are made of our own ids"
        assert is_id(command, "command"), "paths are made of our own ids"
        return Path(f"{self._base}/{sandbox}/commands/{command}")

    def add_command(self, record: CommandRecord) -> str:
        """Where its output will be; nothing is made there before there is some."""
        assert is_id(record.id, "command"), "paths are made of our own ids"
        self._book(record.sandbox).add(record)
        return f"{self._base}/{record.sandbox}/commands/{record.id}"

    def save_command(self, record: CommandRecord) -> None:
        self._book(record.sandbox).save(record)

    def commands(self, sandbox: str) -> list[str]:
        return self._book(sandbox).ids()

    def command(self, sandbox: str, command: str) -> CommandRecord | None:
        return self._book(sandbox).get(command)

    def remove_command(self, sandbox: str, command: str) -> None:
        self._book(sandbox).remove(command)
        directory = self.command_dir(sandbox, command)
        if directory.is_dir():
            shutil.rmtree(directory)

    def _book(self, sandbox: str) -> CommandBook:
        assert is_id(sandbox, "sandbox"), "paths are made of our own ids"
        book = self._books.get(sandbox)
        if book is None:
            book = self._books[sandbox] = CommandBook(f"{self._base}/{sandbox}/{COMMANDS}")
            if len(self._books) > BOOKS_MAX:
                self._books.popitem(last=False)
        self._books.move_to_end(sandbox)
        return book

    # --- sizes --------------------------------------------------------------------------------------

    def log_bytes(self) -> int:
        return _bytes_below(self._sandboxes)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _write_new(path: str, data: bytes, flags: int = os.O_EXCL) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def _write(path: str, data: bytes) -> None:
    """Whole or not at all."""
    _write_new(path + ".new", data, os.O_TRUNC)
    os.replace(path + ".new", path)


def _bytes_below(directory: Path) -> int:
    return sum(_sizes(directory))


def _sizes(directory: Path) -> Iterator[int]:
    """What is on the disk, so that a log with a freed front counts for what it takes."""
    for base, _, names in os.walk(directory):
        for name in names:
            try:
                yield os.lstat(os.path.join(base, name)).st_blocks * 512
            except FileNotFoundError:
                continue  # removed while we looked
