"""Where a node keeps its things, for both modes: one table."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MODES: Final = ("machine", "user")
SYSTEM_USER: Final = "cloche"
MACHINE_STATE: Final = Path("/var/lib/cloche")
MACHINE_RUN: Final = Path("/run/cloche")
MACHINE_CONFIG: Final = Path("/etc/cloche")
SOCKET_PATH_MAX: Final = 100


@dataclass(frozen=True)
class NodePaths:
    """The directories of one node. `state` survives a reboot, `run` need not."""

    state: Path
    run: Path
    images: Path
    """Root file systems that were made elsewhere; only read."""
    store_dir: Path | None = None
    config_dir: Path | None = None
    """The operator's own files: registries, trust, policy. None: the usual place of the mode."""

    @property
    def store(self) -> Path:
        """The image store: what the node itself pulled, imported and built."""
        return self.store_dir or self.state / "images"

    def config(self, mode: str) -> Path:
        return self.config_dir or default_config_dir(mode)

    def keys(self, mode: str) -> Path:
        """Keys of the node's own making. Apart from the state, so that a copy of that opens nothing."""
        return self.config(mode) / "keys"

    @property
    def api_socket(self) -> Path:
        return self.run / "api.sock"

    @property
    def keeper_socket(self) -> Path:
        return self.run / "keeper.sock"

    @property
    def keeper_dir(self) -> Path:
        return self.state / "keeper"

    @property
    def interceptor_dir(self) -> Path:
        """The environments that interceptors run with."""
        return self.state / "interceptor"

    @property
    def daemon_log(self) -> Path:
        return self.state / "logs" / "daemon.log"

    @property
    def keeper_log(self) -> Path:
        return self.state / "logs" / "keeper.log"

    @property
    def range_file(self) -> Path:
        return self.state / "ids.json"


def default_state_dir(mode: str) -> Path:
    if mode == "machine":
        return MACHINE_STATE
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "cloche"


def default_run_dir(mode: str) -> Path:
    if mode == "machine":
        return MACHINE_RUN
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "cloche" if runtime else default_state_dir(mode) / "run" / "cloche"


def default_config_dir(mode: str) -> Path:
    """Where `registries.toml`, `trust.toml` and `policy.yaml` are looked for."""
    if mode == "machine":
        return MACHINE_CONFIG
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "cloche"


def default_images_dir() -> Path:
    """Of root file systems made elsewhere. `CLOCHE_ROOTFS` names a file; in a checkout, what `just setup` made."""
    rootfs = os.environ.get("CLOCHE_ROOTFS")
    if rootfs:
        return Path(rootfs).resolve().parent
    for parent in Path(__file__).resolve().parents:
        if (parent / "build" / "rootfs" / "python.erofs").is_file():
            return parent / "build" / "rootfs"
    return default_state_dir("user") / "images"


def microvm_dir() -> Path | None:
    """`CLOCHE_MICROVM` names a directory; in a checkout, what `tools/build_microvm.sh` made. None: no microVMs here."""
    named = os.environ.get("CLOCHE_MICROVM")
    if named:
        return Path(named).resolve()
    for parent in Path(__file__).resolve().parents:
        if (parent / "build" / "microvm" / "manifest.json").is_file():
            return parent / "build" / "microvm"
    return None
