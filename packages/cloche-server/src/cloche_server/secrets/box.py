"""The box: what is sealed on disk opens only with a key that is not in the data directory.

AES-256-GCM with a random nonce for each seal. What and whose it is are associated data, so that a file put in another's place does
not open. The data directory remembers which key it was sealed with (`key.id`, a fingerprint): with that key missing or
another one in its place everything fails by name, and no new key is ever made beside sealed files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import struct
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cloche.wire.errors import ClocheError, error

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
MAGIC: Final = b"CLB1"
SEALED_BYTES_MAX: Final = 1024 * 1024
SEALED: Final = ".sealed"
UNNAMED: Final = "what is sealed"
_KIND: Final = b"cloche sealed 1\0"
_PUT_BACK: Final = (
    "Put the key back where it was, or remove what it sealed and set the secrets again: cloche secret set"
)


class Box:
    """`key_file` is in the configuration directory; `id_file` lies beside what is sealed."""

    def __init__(self, key_file: Path, id_file: Path) -> None:
        self._key_file = key_file
        self._id_file = id_file
        self._cipher: AESGCM | None = None

    def seal(self, data: bytes | bytearray, about: bytes, *, name: str = UNNAMED) -> bytes:
        """`about` says what and whose it is; it opens only with the same. `name` is for errors."""
        assert len(data) < SEALED_BYTES_MAX
        nonce = os.urandom(NONCE_BYTES)
        return MAGIC + nonce + self._key(name, make=True).encrypt(nonce, data, _KIND + about)

    def open(self, sealed: bytes, about: bytes, *, name: str = UNNAMED) -> bytes:
        return bytes(self.open_wipeable(sealed, about, name=name))

    def open_wipeable(self, sealed: bytes, about: bytes, *, name: str = UNNAMED) -> bytearray:
        """A copy that its holder can zero."""
        begin = len(MAGIC) + NONCE_BYTES
        size = len(sealed) - begin - TAG_BYTES
        if not sealed.startswith(MAGIC) or not 0 <= size < SEALED_BYTES_MAX:
            raise unavailable(name, "its file is damaged")
        opened = bytearray(size)
        nonce, content = sealed[len(MAGIC) : begin], sealed[begin:]
        try:
            self._key(name, make=False).decrypt_into(nonce, content, _KIND + about, opened)
        except InvalidTag:
            raise unavailable(name, "its file does not open: it is damaged, or was sealed for another") from None
        return opened

    def _key(self, name: str, *, make: bool) -> AESGCM:
        if self._cipher is not None:
            return self._cipher
        wanted = _read_text(self._id_file)
        key = self._read(name)
        if key is None:
            if wanted is not None or not make or any(self._id_file.parent.glob(f"*{SEALED}")):
                raise unavailable(name, f"the key {self._key_file} is missing", fix=_PUT_BACK)
            key = self._make(name)
        fingerprint = _fingerprint(key)
        if wanted is None:
            _write_id(self._id_file, fingerprint)
        elif wanted != fingerprint:
            raise unavailable(name, f"{self._key_file} is not the key that it was sealed with", fix=_PUT_BACK)
        self._cipher = AESGCM(key)
        return self._cipher

    def _read(self, name: str) -> bytes | None:
        try:
            with open(self._key_file, "rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                key = file.read(KEY_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as failed:
            raise unavailable(name, f"the key {self._key_file} cannot be read ({failed.strerror})") from None
        if stat.S_IMODE(mode) & 0o077:
            fix = f"Close it and think of who could have read it: chmod 600 {self._key_file}"
            raise unavailable(name, f"the key {self._key_file} is open to other users", fix=fix)
        if len(key) != KEY_BYTES:
            raise unavailable(name, f"{self._key_file} does not hold a key", fix=_PUT_BACK)
        return key

    def _make(self, name: str) -> bytes:
        try:
            make_key(self._key_file)
        except OSError as failed:
            raise unavailable(
                name,
                f"the key {self._key_file} cannot be made ({failed.strerror})",
                fix="On a machine's node its administrator makes it: sudo cloche up",
            ) from None
        key = self._read(name)
        assert key is not None, "it was just made"
        return key


def make_key(path: Path, *, uid: int = -1, gid: int = -1) -> bool:
    """A new key, 0600 and of that user, unless there is one. Whole or not at all; who comes second takes the first's."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.exists():
        return False
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(fd, os.urandom(KEY_BYTES))
        os.fchown(fd, uid, gid)
        os.fsync(fd)
        with contextlib.suppress(FileExistsError):
            os.link(fresh, path)
            return True
        return False
    finally:
        os.close(fd)
        fresh.unlink()


def unavailable(name: str, why: str, *, fix: str | None = None) -> ClocheError:
    """What is said of a value that cannot be had. `why` is our own text, never a source's."""
    return error("secret_unavailable", f"{name}: {why}.", fix=fix, detail={"secret": name})


def write_whole(path: Path, data: bytes) -> None:
    """0600, whole or not at all, on the disk when it returns."""
    fresh = path.with_name(f".{path.name}.new")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        os.fsync(fd)
    finally:
        os.close(fd)
    fresh.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def about(*parts: str) -> bytes:
    """Parts with their lengths: no two lists of them look the same."""
    encoded = [part.encode() for part in parts]
    return b"".join(struct.pack("<I", len(each)) + each for each in encoded)


def _fingerprint(key: bytes) -> str:
    return hashlib.sha256(b"cloche key id\0" + key).hexdigest()[:32]


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text("ascii").strip()
    except FileNotFoundError:
        return None


def _write_id(path: Path, fingerprint: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_whole(path, f"{fingerprint}\n".encode())
