"""The clean machine of the promises: a Debian chroot with a directory of wheels, and Cloche installed by its first user."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.promises.chroots import FIRST_SUBID, Chroot, build_wheels, chroot, prerequisites
from tests.promises.nodes import ROOT

WHEELS, ROOTFS = "/srv/cloche/wheels", "/srv/cloche/python.erofs"
INSTALL = f"python3 -m venv env && env/bin/pip install --quiet --no-index --find-links {WHEELS} 'cloche[server]'"
CALL = "python3 -c 'print(6*7)'"
NO_ROOT = "a chroot with mounts, users and cgroups of its own can only be made by root"
PLACES = ("/etc", "/home", "/opt", "/root", "/srv", "/tmp", "/usr/local", "/var")
"""Where something could stay behind; /run, /dev and /sys are the machine's own and looked at from inside."""


class CleanMachine(Chroot):
    """`alice` has sudo, a subuid range and Cloche in a virtual environment of her own; the others have nothing."""

    def prepare(self, wheels: Path) -> None:
        self.does("echo 127.0.0.1 clean-debian >>/etc/hosts")
        self.add_user("alice", subids=FIRST_SUBID)
        self.does("echo 'alice ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/alice")
        self.give(wheels, WHEELS)
        self.give(ROOT / "build" / "rootfs" / "python.erofs", ROOTFS)
        self.empty_home = self.does("ls -A", user="alice") == "" and self.does("stat -c %a .", user="alice") == "700\n"
        self.installed = self.types("alice", INSTALL, timeout_s=110)

    def alice(self, line: str, *, answer: str = "", rootfs: bool = True) -> tuple[int, str]:
        """One line of hers, with her environment active and, unless not, the root file system named."""
        named = f"export CLOCHE_ROOTFS={ROOTFS}; " if rootfs else ""
        seen = self.types("alice", line, answer=answer, before=f". env/bin/activate; {named}")
        return seen.code, seen.text

    def left(self) -> set[str]:
        """Every path at which something could have stayed, but for what Python compiles in an installation."""
        found = self.files(*PLACES)
        found |= {f"/run/{name}" for name in self.does("ls -A /run").split()}
        return {path for path in found if "__pycache__" not in path}


@contextmanager
def clean_machine() -> Iterator[CleanMachine]:
    tar, wheelhouse = prerequisites()
    scratch = Path(tempfile.mkdtemp(prefix="cloche-wheels-"))
    try:
        build_wheels(scratch / "wheels", wheelhouse)
        with chroot(tar, CleanMachine) as made:
            made.prepare(scratch / "wheels")
            try:
                yield made
            finally:
                _keep(made)
    finally:
        shutil.rmtree(scratch)


def _keep(machine: Chroot) -> None:
    """What people saw, for somebody who reads it as they would."""
    folder = ROOT / "build" / "transcripts"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "clean_machine.txt").write_text("\n".join(machine.transcript))


def is_possible() -> bool:
    return os.getuid() == 0
