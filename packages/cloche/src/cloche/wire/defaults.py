"""The one table of defaults (SPECIFICATION.md renders it; a test compares the two)."""

from __future__ import annotations

from typing import Final

MIB: Final = 1024 * 1024
GIB: Final = 1024 * MIB

CPUS: Final = 1.0
MEMORY_BYTES: Final = 512 * MIB
PROCESSES: Final = 256
DISK_BYTES: Final = 2 * GIB
OPEN_FILES: Final = 4096
OUTPUT_BYTES_MAX: Final = 64 * MIB
RETAIN_S: Final = 24 * 3600
RUN_TIMEOUT_S: Final = 5 * 60
TTL_S: Final = 15 * 60
TTL_S_MAX: Final = 24 * 3600
IDLE_TIMEOUT_S: Final = None
EGRESS: Final = "none"
EGRESS_CONNECTIONS: Final = 128
EGRESS_CONNECTIONS_MAX: Final = 240
"""A stream needs a window of 64 KiB, and a sandbox has 16 MiB of them."""
EGRESS_ATTEMPTS_PER_S: Final = 50.0
APPROVAL_S: Final = 120.0
APPROVAL_SCOPE_S_MAX: Final = 600.0
IMAGE: Final = "python:3.12-slim"
"""Where the node was given no other: its operator's choice (`CLOCHE_IMAGE`), or a prebuilt `python`, goes before."""

CPUS_MAX: Final = 64.0
MEMORY_BYTES_MIN: Final = 32 * MIB
MEMORY_BYTES_MAX: Final = 256 * GIB
DISK_BYTES_MIN: Final = 16 * MIB
DISK_BYTES_MAX: Final = 1024 * GIB
PROCESSES_MAX: Final = 32768
OUTPUT_BYTES_LIMIT: Final = 16 * GIB
"""The most output that one command may ask to keep."""
