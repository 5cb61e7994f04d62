"""A clean Debian for one test, in namespaces of its own: mounts, processes, cgroups and (no) network. Needs root.

It is a `pivot_root`, not a `chroot`: the kernel makes no user namespace for whoever is in a chroot. Its first process holds
everything; when that ends, every process and mount of it is gone, and `close` looks that nothing stayed.
"""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests.promises.nodes import ROOT, wait_until
from tests.promises.screens import Screen

HOST_CGROUPS = Path("/sys/fs/cgroup")
IS_CGROUP_V2 = (HOST_CGROUPS / "cgroup.controllers").exists()
V1_NAMES = ("memory", "pids", "cpu", "cpuacct")
NAMESPACES = ("--mount", "--pid", "--cgroup", "--net", "--ipc", "--uts")
FIRST_SUBID, SUBIDS = 300_000, 65_536
NOTE_CHARS_MAX = 400

SET_UP = r"""
set -eu
tree=$1 tar=$2; shift 2
mount -t tmpfs -o mode=0755,size=16g tmpfs "$tree"
cd "$tree"
tar -xpf "$tar" --numeric-owner
mount -t proc -o nosuid,nodev,noexec proc proc
mount -t sysfs -o nosuid,nodev,noexec sysfs sys
if [ "$1" = v2 ]; then
    mount -t cgroup2 cgroup2 sys/fs/cgroup
else
    mount -t tmpfs -o mode=0755 tmpfs sys/fs/cgroup
    for name; do mkdir "sys/fs/cgroup/$name"; mount -t cgroup -o "$name" cgroup "sys/fs/cgroup/$name"; done
fi
mount -t tmpfs -o mode=0755,nosuid tmpfs dev
for node in 'null 1 3' 'zero 1 5' 'full 1 7' 'random 1 8' 'urandom 1 9' 'tty 5 0'; do
    set -- $node
    mknod -m 0666 "dev/$1" c "$2" "$3"
done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620,gid=5 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount -t tmpfs -o mode=0755,nosuid tmpfs run
pivot_root . mnt
umount -l /mnt
hostname clean-debian
trap '' CHLD
echo ready
exec sleep infinity
"""
"""`trap '' CHLD` reaps: what the first process ignores, the kernel buries at once."""

ENTER = r"""
for file in $1; do echo $$ >"$file" || exit 97; done
shift
exec "$@"
"""


Machine = TypeVar("Machine", bound="Chroot")


@dataclass(frozen=True)
class Seen:
    """What one typed line gave."""

    code: int
    text: str


class Chroot:
    """The clean machine. `types` is a person at a terminal; `does` is the test's own hand, as root."""

    def __init__(self, base: Path, tar: Path) -> None:
        self.transcript: list[str] = []
        self._cgroups = _make_cgroups(base.name)
        controllers = ["v2"] if IS_CGROUP_V2 else [path.parent.name for path in self._cgroups]
        set_up = ["sh", "-c", SET_UP, "sh", str(base), str(tar), *controllers]
        self._unshare = subprocess.Popen(
            [*self._in_cgroups(), "unshare", *NAMESPACES, "--fork", "--kill-child", *set_up],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._unshare.stdout is not None
        assert self._unshare.stdout.readline() == "ready\n"
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children").read_text().split()
        self.first_pid = int(children[0])
        self.tree = Path(f"/proc/{self.first_pid}/root")
        """Its files as the host can reach them: they are in memory, and seen in no other mount namespace."""

    def _in_cgroups(self) -> list[str]:
        files = " ".join(str(path / "cgroup.procs") for path in self._cgroups)
        return ["sh", "-c", ENTER, "sh", files]

    def _argv(self, user: str, line: str) -> list[str]:
        enter = ["nsenter", "--target", str(self.first_pid), *NAMESPACES, "--"]
        return [*self._in_cgroups(), *enter, "su", "-", user, "-c", line]

    def does(self, line: str, *, user: str = "root", timeout_s: float = 60) -> str:
        """Prepares or looks; it has to work. Answers stdout."""
        done = subprocess.run(
            self._argv(user, line),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{user}: {line}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def piped(self, user: str, line: str, *, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """A script of this user: no terminal anywhere."""
        begin = time.monotonic()
        done = subprocess.run(
            self._argv(user, line),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        self._note(
            user,
            line,
            (done.stdout if len(done.stdout) < NOTE_CHARS_MAX else "(long)\n") + done.stderr,
            time.monotonic() - begin,
        )
        return done

    def types(self, user: str, line: str, *, before: str = "", answer: str = "", timeout_s: float = 60) -> Seen:
        """One line at a terminal of 100 columns, and the answer to its question; what then stands there, uncoloured."""
        begin = time.monotonic()
        ours, theirs = pty.openpty()
        subprocess.run(["stty", "cols", "100", "rows", "40"], stdin=theirs, check=True)
        process = subprocess.Popen(
            self._argv(user, f"export TERM=xterm-256color LANG=C.UTF-8; {before}{line}"),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        os.write(ours, answer.encode())
        text = as_shown(_read_all(ours, process, timeout_s))
        self._note(user, line, text, time.monotonic() - begin)
        return Seen(process.returncode, text)

    def _note(self, user: str, line: str, text: str, seconds: float) -> None:
        sign = "#" if user == "root" else "$"
        self.transcript.append(f"{user}@clean-debian{sign} {line}      [{seconds:.2f} s]\n{text}")

    def add_user(self, name: str, *, subids: int | None = None) -> None:
        """An ordinary person with an empty, closed home; `subids` is where his range begins."""
        self.does(
            f"useradd --create-home --skel /nonexistent --shell /bin/bash -K SUB_UID_COUNT=0 -K SUB_GID_COUNT=0 {name}"
        )
        self.does(f"chmod 0700 /home/{name} && sed -i /^{name}:/d /etc/subuid /etc/subgid")
        if subids is not None:
            self.does(
                f"usermod --add-subuids {subids}-{subids + SUBIDS - 1} --add-subgids {subids}-{subids + SUBIDS - 1} {name}"
            )

    def give(self, source: Path, target: str) -> None:
        """A file or directory of the host, copied into it."""
        place = self.tree / target.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, place)
        else:
            shutil.copyfile(source, place)
            place.chmod(0o644)

    def processes(self) -> list[tuple[int, str]]:
        """(uid, command line) of all that runs in it, sandboxes too, but for its first process: all of its cgroups."""
        found = []
        for file in self._cgroups[0].rglob("cgroup.procs"):
            for pid in set(file.read_text().split()) - {str(self.first_pid), str(self._unshare.pid)}:
                try:
                    line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found.append((os.stat(f"/proc/{pid}").st_uid, line))
                except OSError:  # it ended while we looked
                    continue
        return found

    def cgroups(self) -> list[str]:
        """Directories below this machine's own cgroups."""
        return sorted(
            str(found.relative_to(root)) for root in self._cgroups for found in root.rglob("*") if found.is_dir()
        )

    def files(self, *below: str) -> set[str]:
        """Every path there, as seen from inside."""
        found: set[str] = set()
        for top in below:
            for directory, names, files in os.walk(self.tree / top.lstrip("/")):
                found.update("/" + os.path.relpath(os.path.join(directory, name), self.tree) for name in names + files)
        return found

    def close(self) -> None:
        """Everything of it ends; what cannot be removed then was leaked, and that is an error."""
        self._unshare.kill()  # and with it its child, by --kill-child: the first process, and so all others
        self._unshare.wait(10)
        if self._unshare.stdout is not None:
            self._unshare.stdout.close()
        for root in self._cgroups:
            for path in sorted((found for found in root.rglob("*") if found.is_dir()), reverse=True):
                _remove_cgroup(path)
            _remove_cgroup(root)


def as_shown(data: bytes) -> str:
    """What stands on the screen at the end: spinners are gone, as for a person."""
    screen = Screen(rows=60, cols=300)
    screen.feed(data)
    text = "\n".join(line.rstrip() for line in screen.lines()).rstrip("\n")
    return f"{text}\n" if text else ""


def _remove_cgroup(path: Path) -> None:
    def removed() -> bool:
        try:
            path.rmdir()
        except OSError:
            return False
        return True

    wait_until(removed, seconds=10, what=f"{path} is still in use")


def _make_cgroups(name: str) -> list[Path]:
    parents = (
        [HOST_CGROUPS] if IS_CGROUP_V2 else [HOST_CGROUPS / one for one in V1_NAMES if (HOST_CGROUPS / one).is_dir()]
    )
    made: list[Path] = []
    for parent in {(path.stat().st_dev, path.stat().st_ino): path for path in parents}.values():
        (parent / name).mkdir()
        made.append(parent / name)
    return made


def _read_all(fd: int, process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    import select

    data, deadline = b"", time.monotonic() + timeout_s
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"not within {timeout_s} s; it printed:\n{data.decode(errors='replace')}")
        if select.select([fd], [], [], min(left, 0.2))[0]:
            try:
                piece = os.read(fd, 65536)
            except OSError:  # the last writer closed the terminal
                piece = b""
            if not piece:
                break
            data += piece
        elif process.poll() is not None:
            break
    process.wait(10)
    os.close(fd)
    return data


def prerequisites() -> tuple[Path, Path]:
    """(the chroot's tar, the directory of third-party wheels): cached, made by the first who asks."""
    done = subprocess.run([str(ROOT / "tools" / "build_chroot.sh")], stdout=subprocess.PIPE, text=True, check=True)
    chroot, wheelhouse = done.stdout.split()
    return Path(chroot), Path(wheelhouse)


def build_wheels(target: Path, wheelhouse: Path) -> None:
    """The directory that a release is: ours, built from this checkout, and what they depend on."""
    environment = {**os.environ, "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}", "VIRTUAL_ENV": f"{ROOT}/.venv"}
    subprocess.run(
        [str(ROOT / "tools" / "wheels.sh"), str(target)], env=environment, check=True, stdout=subprocess.DEVNULL
    )
    for wheel in wheelhouse.iterdir():
        shutil.copyfile(wheel, target / wheel.name)


@contextmanager
def chroot(tar: Path, kind: type[Machine]) -> Iterator[Machine]:
    base = Path(tempfile.mkdtemp(prefix="cloche-chroot-"))
    base.chmod(0o755)
    made = kind(base, tar)
    try:
        yield made
    finally:
        made.close()
        base.rmdir()
