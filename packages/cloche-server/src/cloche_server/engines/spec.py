"""What an engine is asked to start. Standard library only: the keeper imports this and nothing else of ours.

A spec names things; it never carries a path, a uid, a pid, a cgroup or a command line. The keeper finds the
image by its file name below its own image directory, and assigns uid and cgroup itself.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

ID: Final = re.compile(r"s[a-z0-9]{19}")
OTHER_ID: Final = re.compile(r"[a-z][a-z0-9]{19}")
IMAGE_FILE: Final = re.compile(r"(roots/)?[a-z0-9][a-z0-9._-]{0,127}")
"""Below the image directory: a file there, or one of the image store's roots."""
OWNER: Final = re.compile(r"[A-Za-z0-9:._@-]{1,64}")
ENGINES: Final = ("gvisor", "qemu", "converter", "interceptor")
WITHOUT_IMAGE: Final = ("converter",)
WITH_ENVIRONMENT: Final = ("interceptor",)
"""Their `image_file` is a directory of the engine's own, in which its packages are."""
ENVIRONMENT: Final = re.compile(r"3\.[0-9]{1,2}-[0-9a-f]{64}")
"""The interpreter's version, and the digest of the list of packages."""
SPEC_BYTES_MAX: Final = 4096
MIB: Final = 1024 * 1024


class BadSpec(ValueError):
    """The spec is refused; the message names the field."""


@dataclass(frozen=True)
class SandboxSpec:
    """One sandbox to start; every field is bounded by `check`."""

    id: str
    tenant: str
    owner: str
    lineage: str
    engine: str
    image_file: str
    cpus: float
    memory_bytes: int
    processes: int
    disk_bytes: int
    open_files: int

    def check(self) -> SandboxSpec:
        _match("id", ID, self.id)
        _match("tenant", OTHER_ID, self.tenant)
        _match("lineage", OTHER_ID, self.lineage)
        _match("owner", OWNER, self.owner)
        if self.engine not in ENGINES:
            raise BadSpec(f"engine: {self.engine!r} is not one of {ENGINES}")
        if self.engine in WITH_ENVIRONMENT:
            _match("image_file", ENVIRONMENT, self.image_file)
        elif self.engine not in WITHOUT_IMAGE:
            _match("image_file", IMAGE_FILE, self.image_file)
        elif self.image_file != "":
            raise BadSpec(f"image_file: {self.engine} has none")
        _number("cpus", self.cpus, 0.01, 1024.0)
        _integer("memory_bytes", self.memory_bytes, 16 * MIB, 1 << 44)
        _integer("processes", self.processes, 4, 1 << 20)
        _integer("disk_bytes", self.disk_bytes, MIB, 1 << 46)
        _integer("open_files", self.open_files, 64, 1 << 20)
        return self

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_object(cls, value: Any) -> SandboxSpec:
        """From untrusted JSON: exactly these fields, of these types, in these bounds."""
        if not isinstance(value, dict):
            raise BadSpec("spec: not an object")
        names = {f.name for f in fields(cls)}
        if set(value) != names:
            raise BadSpec(f"spec: fields {sorted(set(value) ^ names)} are missing or unknown")
        return cls(**value).check()


def _match(name: str, pattern: re.Pattern[str], value: Any) -> None:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise BadSpec(f"{name}: {str(value)[:80]!r} does not match {pattern.pattern}")


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise BadSpec(f"{name}: {str(value)[:80]} is not an integer in {low}…{high}")


def _number(name: str, value: Any, low: float, high: float) -> None:
    if type(value) not in (int, float) or not low <= value <= high:
        raise BadSpec(f"{name}: {str(value)[:80]} is not a number in {low}…{high}")
