"""The keeper's private mounts: the few directories that an engine's process can reach, on short paths.

A user's home may be closed to everybody else, and every sandbox is somebody else. So a small tmpfs hides an unused
directory of the keeper's own mount namespace, and what is needed is bound there: `e` the engine's binaries, `b` what an
engine needs beside them, `w` the sandboxes' work directories, `i/<inode>` each image in use, `n` an empty directory. The
binds are made from open descriptors, so the paths above them do not matter, and an image cannot be exchanged after it was
checked. A bind would keep a removed image's bytes on the disk: `forget_removed` lets go of it.
"""

from __future__ import annotations

import os
import stat
from typing import Final

from cloche_server.keeper import kernel
from cloche_server.keeper.verbs import Refusal

_CANDIDATES: Final = ("/mnt", "/media", "/srv", "/opt", "/var/tmp")


class View:
    """Lives as long as the keeper's mount namespace; nothing of it is seen outside."""

    def __init__(
        self,
        *,
        engines: dict[str, str],
        beside: dict[str, str],
        images: str,
        store: str,
        work: str,
        avoid: tuple[str, ...],
    ) -> None:
        self.root = _unused_directory((*engines.values(), *beside.values(), images, store, work, *avoid))
        self.beside = {name: f"{self.root}/b/{name}" for name in beside}
        self._images_fd = os.open(images, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._store_fd = os.open(store, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._bound: set[str] = set()
        wanted = {f"e/{name}": path for name, path in engines.items()}
        wanted |= {f"b/{name}": path for name, path in beside.items()}
        sources = {name: os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) for name, path in wanted.items()}
        work_fd = os.open(work, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        kernel.mount("cloche", self.root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=0755,size=1m")
        for name in ("e", "b", "w", "i", "n"):
            os.mkdir(f"{self.root}/{name}", 0o755)
        for name, fd in sources.items():
            os.mkdir(f"{self.root}/{name}", 0o755)
            kernel.bind_read_only(fd, f"{self.root}/{name}")
            os.close(fd)
        kernel.mount(f"/proc/self/fd/{work_fd}", f"{self.root}/w", None, kernel.MS_BIND)
        os.close(work_fd)

    @property
    def empty(self) -> str:
        return f"{self.root}/n"

    def engine(self, name: str) -> str:
        return f"{self.root}/e/{name}"

    def work(self, sandbox: str) -> str:
        return f"{self.root}/w/{sandbox}"

    def image(self, name: str) -> str:
        """The path of an image for engines; Refusal when it is missing, unreadable to others, or not a plain file."""
        directory = self._store_fd if name.startswith("roots/") else self._images_fd
        try:
            fd = kernel.open_beneath(directory, name, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise Refusal("image_not_found", f"{name}: {error.strerror or error}") from None
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise Refusal("image_not_found", f"{name}: not a plain file")
            if not found.st_mode & stat.S_IROTH:
                raise Refusal("image_unreadable", f"{name}: must be readable by everybody (chmod a+r)")
            path = f"{self.root}/i/{found.st_dev:x}-{found.st_ino:x}"
            if path not in self._bound:
                os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o444))
                kernel.bind_read_only(fd, path)
                self._bound.add(path)
            return path
        finally:
            os.close(fd)

    def forget_removed(self) -> None:
        """Binds of images that have no name any more. Who runs from one holds it by a descriptor of its own."""
        for path in [bound for bound in self._bound if os.stat(bound).st_nlink == 0]:
            kernel.unmount(path)
            os.unlink(path)
            self._bound.remove(path)


def _unused_directory(used: tuple[str, ...]) -> str:
    real = [os.path.realpath(path) for path in used]
    for candidate in _CANDIDATES:
        if os.path.isdir(candidate) and not any(f"{path}/".startswith(f"{candidate}/") for path in real):
            return candidate
    raise OSError(f"no directory of {', '.join(_CANDIDATES)} exists and is unused")
