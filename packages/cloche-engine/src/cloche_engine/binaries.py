"""Where the binaries are, and the one link a wheel cannot carry.

runsc wants its sentry as a second program, `gvisor-bin/gvisor_sentry`. It is the same
file as runsc, so it is a symlink; wheels keep no symlinks, so it is made at first use,
in the installation if that can be written to, else in a copy in the user's cache.
"""

import json
import os
import platform
import shutil
import stat
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_BIN = Path(__file__).with_name("bin")
_SENTRY = "gvisor_sentry"
_SIDECARS = "gvisor-bin"
_PREWARMER = f"{_SIDECARS}/gvisor-sentry-prewarmer"
_LINK_TARGET = "../runsc"


class EngineMissing(Exception):
    """A binary is not where the package should carry it; the message says how to get it."""

    def __init__(self, what: str, path: Path) -> None:
        super().__init__(
            f"{what} is not at {path}. "
            "Install the platform wheel (pip install 'cloche[server]'), "
            "or, in a checkout, run `just setup`."
        )
        self.what = what
        self.path = path


class EngineUnwritable(Exception):
    """Neither the installation nor the user's cache can hold the sidecar link."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"cannot prepare the engine in {path}: {reason}. "
            "Set CLOCHE_ENGINE_CACHE to a directory that only you can write to."
        )
        self.path = path


@dataclass(frozen=True)
class Manifest:
    """What the build wrote down: the engine's release and each file's SHA-256 by path."""

    version: str
    sha256: dict[str, str]


@cache
def manifest() -> Manifest:
    """The record of this package's binaries."""
    document = json.loads(_existing("the engine's manifest", _BIN / "manifest.json").read_text())
    return Manifest(version=document["version"], sha256=document["sha256"])


def runsc_path() -> Path:
    """runsc, with its sidecars in place beside it."""
    return _prepared() / "runsc"


def sidecar_dir() -> Path:
    """The directory with `gvisor_sentry` and the prewarmer."""
    return _prepared() / _SIDECARS


def agent_path(arch: str | None = None) -> Path:
    """The guest agent for a machine name as `uname -m` gives it; this machine's by default."""
    arch = arch or platform.machine()
    return _existing(f"the guest agent for {arch}", _BIN / f"cloche-guest-{arch}")


@cache
def _prepared() -> Path:
    """A directory with runsc and complete sidecars; where it is depends on what is writable."""
    _existing("runsc", _BIN / "runsc")
    _existing("runsc's prewarmer", _BIN / _PREWARMER)
    if _is_linked(_BIN):
        return _BIN
    try:
        _link(_BIN)
    except OSError:  # installed by another user, or on a read-only file system
        return _cached_copy()
    return _BIN


def _existing(what: str, path: Path) -> Path:
    if not path.is_file():
        raise EngineMissing(what, path)
    return path


def _is_linked(directory: Path) -> bool:
    try:
        return os.readlink(directory / _SIDECARS / _SENTRY) == _LINK_TARGET
    except OSError:
        return False


def _link(directory: Path) -> None:
    """Make the link under another name and rename it: two starters at once both succeed."""
    sidecars = directory / _SIDECARS
    with tempfile.TemporaryDirectory(prefix=".link-", dir=sidecars) as scratch:
        made = Path(scratch) / _SENTRY
        made.symlink_to(_LINK_TARGET)
        made.replace(sidecars / _SENTRY)


def _cache_root() -> Path:
    override = os.environ.get("CLOCHE_ENGINE_CACHE")
    if override:
        return Path(override)
    cache_home = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache_home) if cache_home else Path.home() / ".cache") / "cloche" / "engine"


def _require_private(directory: Path) -> None:
    """We execute what lies here, so nobody else may have been able to put it there."""
    found = directory.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise EngineUnwritable(directory, "it belongs to, or can be written by, somebody else")


def _cached_copy() -> Path:
    """A copy named by runsc's digest, complete from the moment its name exists."""
    recorded = manifest()
    root = _cache_root()
    target = root / f"{recorded.version}-{recorded.sha256['runsc'][:16]}"
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o755)
        _require_private(root)
        if not _is_linked(target):
            _copy_to(target, root)
        for directory in (target, target / _SIDECARS):
            directory.chmod(0o755)  # every sandbox is another user; a daemon's umask would shut them all out
    except OSError as error:
        raise EngineUnwritable(root, error.strerror or str(error)) from error
    return target


def _copy_to(target: Path, root: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".copy-", dir=root) as scratch:
        made = Path(scratch) / "engine"
        (made / _SIDECARS).mkdir(parents=True)
        shutil.copy2(_BIN / "runsc", made / "runsc")
        shutil.copy2(_BIN / _PREWARMER, made / _PREWARMER)
        _link(made)
        try:
            made.rename(target)
        except OSError:
            if not _is_linked(target):  # else another process was first, with the same bytes
                raise
