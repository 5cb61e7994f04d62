"""The binaries that Cloche executes, and where they are.

Words used here: the *engine* is gVisor's `runsc`, pinned to one release; a *sidecar* is
a program runsc starts beside itself (`gvisor-bin/`); the *agent* is the static program
that is PID 1 inside every sandbox; the *manifest* names each file with its SHA-256, as
written when they were built.

This package finds files and says what they should be. It starts nothing, downloads
nothing and never looks on PATH: a runsc that somebody else installed is not the one
whose walls were measured. Checking the digests before executing is the node's work.

Deliberately absent: dependencies, configuration, and any knowledge of sandboxes.
"""

from cloche_engine.binaries import (
    EngineMissing,
    EngineUnwritable,
    Manifest,
    agent_path,
    manifest,
    runsc_path,
    sidecar_dir,
)

__all__ = [
    "EngineMissing",
    "EngineUnwritable",
    "Manifest",
    "agent_path",
    "manifest",
    "runsc_path",
    "sidecar_dir",
]
