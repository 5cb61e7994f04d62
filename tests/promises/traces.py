"""What a node leaves on the host, counted before and after: LIF-2's "nothing left" as a comparison."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path

from cloche_server.node.launch import cgroup as cgroups
from tests.promises.nodes import RealNode


@dataclass(frozen=True)
class Traces:
    """Names, not numbers: a difference says what was left."""

    processes: frozenset[str]
    cgroups: frozenset[str]
    mounts: frozenset[str]
    namespaces: frozenset[str]
    files: frozenset[str]
    daemon_descriptors: int
    keeper_descriptors: int

    def more_than(self, before: Traces) -> dict[str, object]:
        """What is here and was not there; {} when nothing is."""
        found: dict[str, object] = {}
        for field in fields(self):
            now, then = getattr(self, field.name), getattr(before, field.name)
            extra = now - then if not isinstance(now, int) else max(0, now - then)
            if extra:
                found[field.name] = sorted(extra) if not isinstance(extra, int) else f"{then} → {now}"
        return found


def traces(node: RealNode) -> Traces:
    """Everything on this host that belongs to this node's sandboxes."""
    daemon, keeper = node.pid, node.keeper_pid()
    family = _family({daemon, keeper})
    return Traces(
        processes=frozenset(f"{pid} {_command(pid)}" for pid in family - {daemon, keeper}),
        cgroups=frozenset(_cgroups(node)),
        mounts=frozenset(line for line in Path("/proc/mounts").read_text().splitlines() if str(node.base) in line),
        namespaces=frozenset(_namespaces(family - {daemon, keeper})),
        files=frozenset(_files(node)),
        daemon_descriptors=len(os.listdir(f"/proc/{daemon}/fd")),
        keeper_descriptors=len(os.listdir(f"/proc/{keeper}/fd")),
    )


def _family(roots: set[int]) -> set[int]:
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found = set(roots)
    while True:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        if not more:
            return found
        found |= more


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:80]
    except (FileNotFoundError, ProcessLookupError):
        return "?"


def _namespaces(pids: set[int]) -> set[str]:
    found = set()
    for pid in pids:
        for kind in ("user", "mnt", "net", "pid", "ipc", "uts"):
            try:
                found.add(os.readlink(f"/proc/{pid}/ns/{kind}"))
            except OSError:
                continue
    return found


def _cgroups(node: RealNode) -> set[str]:
    """Of this node's sandboxes: other nodes of the machine have theirs below the same parent."""
    found = set()
    parent = "cloche" if os.getuid() == 0 else f"cloche-{os.getuid()}"
    for place in (cgroups.ROOT / "memory" / parent, cgroups.ROOT / "pids" / parent, cgroups.ROOT / "cpu" / parent):
        if place.is_dir():
            found |= {str(path) for path in place.iterdir() if path.is_dir()}
    if not found:
        return found
    journal = b"".join(path.read_bytes() for path in (node.paths.state / "journal").rglob("*") if path.is_file())
    return {path for path in found if os.path.basename(path).encode() in journal}


def _files(node: RealNode) -> set[str]:
    """All files of the node but its own logs, journal and few spare logs, and what is kept of ended sandboxes (`retain_s`)."""
    kept = [node.paths.state / name for name in ("logs", "journal", "spares", "sandboxes")]
    return {str(path) for path in node.base.rglob("*") if not any(path.is_relative_to(directory) for directory in kept)}
