"""The command line of the converter: pure, standard library, `engines.plan` and `engines.spec` only.

Its stdin is the channel, as with every engine: a connected socket over which one job comes, with its descriptors.
"""

from __future__ import annotations

import os
from typing import Final

from cloche_server.engines.plan import Places, Plan
from cloche_server.engines.spec import SandboxSpec

BINARY: Final = f"cloche-convert-{os.uname().machine}"
MKFS: Final = "mkfs.erofs"
OPEN_FILES_MIN: Final = 256
"""A job has a descriptor for each of up to 128 layers."""
STATE_BYTES_MAX: Final = 0


def plan(spec: SandboxSpec, places: Places) -> Plan:
    return Plan(
        argv=(f"{places.engine}/{BINARY}", f"{places.engine}/{MKFS}"),
        env={},
        file_bytes_max=spec.disk_bytes,
        open_files=max(spec.open_files, OPEN_FILES_MIN),
        bare=True,
    )


def control_path(sandbox: str) -> None:
    """There is no control socket."""


def engine_pids(state: bytes) -> tuple[int, int]:
    """Never asked: it leaves no state file."""
    raise ValueError("a converter has no state file")
