"""Secrets on disk: one sealed file for each (tenant, owner, name).

    key.id             which key this directory is sealed with
    HASH.sealed        a line of JSON that says whose it is, then the sealed binding and value
    placeholders/ID    what stands inside for them, by lineage; not secret, so plain

The line is only for telling which secret does not open; what counts is bound into the seal. Everything is 0600 below 0700.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from cloche.wire.errors import error
from cloche_server.secrets.binding import Binding
from cloche_server.secrets.box import SEALED, SEALED_BYTES_MAX, Box, about, unavailable, write_whole
from cloche_server.secrets.hidden import Hidden

SECRETS_MAX: Final = 1000
"""Of one node: each is opened when they are listed."""
LINE_BYTES_MAX: Final = 4096
_ENCODE: Final = msgspec.json.Encoder().encode
_SIZE: Final = struct.Struct("<I")


class Whose(msgspec.Struct, frozen=True):
    """The first line of a file."""

    tenant: str
    owner: str
    name: str


_WHOSE: Final = msgspec.json.Decoder(Whose)
_BINDING: Final = msgspec.json.Decoder(Binding)


class SealedFiles:
    """Reads and writes; decides nothing."""

    def __init__(self, directory: Path, box: Box) -> None:
        self._directory = directory
        self._box = box
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.chmod(0o700)

    def write(self, binding: Binding, value: Hidden | None) -> None:
        path = self._path(binding.tenant, binding.owner, binding.name)
        if not path.exists() and sum(1 for _ in self._directory.glob(f"*{SEALED}")) >= SECRETS_MAX:
            raise error(
                "overloaded", f"The node has {SECRETS_MAX} secrets already.", fix="Remove some: cloche secret rm"
            )
        head = _ENCODE(binding)
        content = bytearray(_SIZE.pack(len(head)) + head)
        if value is not None:
            content += value.view()
        sealed = self._box.seal(content, _about(binding.tenant, binding.owner, binding.name), name=binding.name)
        content[:] = bytes(len(content))
        whose = Whose(binding.tenant, binding.owner, binding.name)
        write_whole(path, _ENCODE(whose) + b"\n" + sealed)

    def read(self, tenant: str, owner: str, name: str) -> tuple[Binding, Hidden] | None:
        """None when there is none. A given value comes with it; of another source's, nothing."""
        try:
            return self._open(self._path(tenant, owner, name), Whose(tenant, owner, name))
        except FileNotFoundError:
            return None

    def remove(self, tenant: str, owner: str, name: str) -> bool:
        try:
            self._path(tenant, owner, name).unlink()
        except FileNotFoundError:
            return False
        return True

    def bindings(self) -> Iterator[Binding]:
        """Of everybody, oldest name first; the values are opened and wiped at once."""
        for path in sorted(self._directory.glob(f"*{SEALED}")):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                binding, value = self._open(path, None)
                value.wipe()
                yield binding

    def _open(self, path: Path, expected: Whose | None) -> tuple[Binding, Hidden]:
        with open(path, "rb") as file:
            line = file.readline(LINE_BYTES_MAX)
            sealed = file.read(SEALED_BYTES_MAX + LINE_BYTES_MAX)
        try:
            whose = _WHOSE.decode(line)
        except msgspec.DecodeError:
            raise unavailable(expected.name if expected else path.name, "its file is damaged") from None
        if expected is not None and whose != expected:
            raise unavailable(expected.name, "another secret's file stands in its place")
        if path != self._path(whose.tenant, whose.owner, whose.name):
            raise unavailable(whose.name, "its file stands in another's place")
        opened = self._box.open_wipeable(sealed, _about(whose.tenant, whose.owner, whose.name), name=whose.name)
        try:
            return _parts(opened, whose.name)
        finally:
            opened[:] = bytes(len(opened))

    def _path(self, tenant: str, owner: str, name: str) -> Path:
        digest = hashlib.sha256("\0".join((tenant, owner, name)).encode()).hexdigest()
        return self._directory / f"{digest[:48]}{SEALED}"


def _parts(opened: bytearray, name: str) -> tuple[Binding, Hidden]:
    try:
        (size,) = _SIZE.unpack_from(opened)
        begin = _SIZE.size + size
        binding = _BINDING.decode(bytes(opened[_SIZE.size : begin]))
    except (struct.error, msgspec.DecodeError):
        raise unavailable(name, "its file is of another version") from None
    return binding, Hidden(opened[begin:])


def _about(tenant: str, owner: str, name: str) -> bytes:
    return about("secret", tenant, owner, name)


class PlaceholderFiles:
    """One small file for each lineage: name → placeholder."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(self, lineage: str) -> dict[str, str]:
        try:
            return msgspec.json.decode((self._directory / lineage).read_bytes(), type=dict[str, str])
        except FileNotFoundError:
            return {}

    def write(self, lineage: str, placeholders: dict[str, str]) -> None:
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(self._directory / lineage, _ENCODE(placeholders))

    def remove(self, lineage: str) -> None:
        (self._directory / lineage).unlink(missing_ok=True)

    def lineages(self) -> list[str]:
        try:
            return [name for name in os.listdir(self._directory) if not name.startswith(".")]
        except FileNotFoundError:
            return []
