"""What an engine's pure `command` module gets and gives: places in, a plan out. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Places:
    """Where things are, as the new process sees them. Chosen by the keeper, never by a message."""

    engine: str
    """Directory of the engine's files."""
    work: str
    """This sandbox's directory."""
    image: str
    """The image file, read-only; empty for an engine that has none."""
    empty: str
    """An empty directory."""
    beside: dict[str, str] = field(default_factory=dict)
    """By name, other directories that the daemon named when it started the keeper. Read-only."""


@dataclass(frozen=True)
class Plan:
    """All that the keeper needs to start one process behind its walls."""

    argv: tuple[str, ...]
    file_bytes_max: int
    """RLIMIT_FSIZE."""
    env: dict[str, str] = field(default_factory=lambda: {"PATH": "/usr/bin:/bin"})
    files: dict[str, bytes] = field(default_factory=dict)
    """Relative to the work directory; written by the keeper, readable by the sandbox's uid."""
    private_dirs: tuple[str, ...] = ()
    """Below the work directory, owned by the sandbox's own uid."""
    meminfo: str | None = None
    """One of the files, shown as /proc/meminfo."""
    state: str | None = None
    """The file that names the processes which the command left behind; None: the command itself is the engine."""
    open_files: int | None = None
    """RLIMIT_NOFILE; None: the keeper's own."""
    bare: bool = False
    """The keeper itself takes everything from it before it begins: every capability, every namespace.

    runsc needs the capabilities of its user namespace and drops them by itself; QEMU has programs before it that do so.
    A bare process has no control socket: it counts as started when it was executed, and its stderr is its log.
    """
    read_only: bool = False
    """It can change no file anywhere: every mount that it sees is read-only."""
