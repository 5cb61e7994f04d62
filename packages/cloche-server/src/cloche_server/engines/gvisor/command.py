"""config.json and the command line of `runsc create`: pure, standard library, `engines.plan` and `engines.spec` only.

Every flag and mount here was measured with the pinned release; a golden test freezes them.
"""

from __future__ import annotations

import json
from typing import Any, Final

from cloche_server.engines.plan import Places, Plan
from cloche_server.engines.spec import MIB, SandboxSpec

AGENT: Final = "/.cloche/agent"
PLACEHOLDER: Final = "/.cloche/placeholder"
AGENT_ID: Final = 64000
"""The agent's uid and gid: gVisor does not protect PID 1 from its own uid, so no command ever has this one."""
AGENT_CAPABILITIES: Final = (
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_SETUID",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETFCAP",
    "CAP_SYS_ADMIN",
)
AGENT_OPEN_FILES_MIN: Final = 8192
"""The agent holds pipes for hundreds of streams; commands get their own, lower limit from it."""
FLAGS: Final = (
    "--network=none",
    "--platform=systrap",
    "--ignore-cgroups",
    "--directfs=false",
    "--host-settings=ignore",
    "--sidecar-usage-policy=STRICT",
    "--sidecar-release-enforcement-policy=ALWAYS",
)
SHM_BYTES_MAX: Final = 64 * MIB
GIB: Final = 1024 * MIB
STATE_BYTES_MAX: Final = MIB
GUEST_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

BINARY: Final = "runsc"
PRIVATE_DIRS: Final = ("s", "f")
"""Below the work directory, owned by the sandbox's own uid: runsc's state, and the (unlinked) layer."""
MEMINFO: Final = "meminfo"


def plan(spec: SandboxSpec, places: Places) -> Plan:
    return Plan(
        argv=argv(spec, places),
        files={
            "b/config.json": json.dumps(config(spec, places), separators=(",", ":")).encode(),
            MEMINFO: meminfo(spec),
        },
        private_dirs=PRIVATE_DIRS,
        meminfo=MEMINFO,
        file_bytes_max=file_bytes_max(spec.disk_bytes),
        state=f"s/{spec.id}_sandbox:{spec.id}.state",
    )


def argv(spec: SandboxSpec, places: Places) -> tuple[str, ...]:
    return (
        f"{places.engine}/{BINARY}",
        f"--root={places.work}/s",
        *FLAGS,
        f"--overlay2=root:dir={places.work}/f",
        "create",
        f"--bundle={places.work}/b",
        spec.id,
    )


def config(spec: SandboxSpec, places: Places) -> dict[str, Any]:
    open_files = max(spec.open_files, AGENT_OPEN_FILES_MIN)
    return {
        "ociVersion": "1.0.2",
        "hostname": "sandbox",
        "process": {
            "terminal": False,
            "user": {"uid": AGENT_ID, "gid": AGENT_ID},
            "args": [AGENT],
            "env": [f"PATH={GUEST_PATH}"],
            "cwd": "/",
            "capabilities": {
                kind: list(AGENT_CAPABILITIES)
                for kind in ("bounding", "effective", "inheritable", "permitted", "ambient")
            },
            "noNewPrivileges": True,
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": open_files, "soft": open_files}],
        },
        "root": {"path": places.empty, "readonly": False},
        "mounts": _mounts(spec, places),
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")]},
        "annotations": {
            "dev.gvisor.spec.rootfs.source": places.image,
            "dev.gvisor.spec.rootfs.type": "erofs",
            # The directory comes from --overlay2; this path is not used, so that all specs are alike.
            "dev.gvisor.spec.rootfs.overlay": "dir=/layer",
            "dev.gvisor.spec.rootfs.options": f"size={spec.disk_bytes}",
        },
    }


def _mounts(spec: SandboxSpec, places: Places) -> list[dict[str, Any]]:
    shm_bytes = min(SHM_BYTES_MAX, spec.memory_bytes // 8)
    return [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        # Writable, /dev would be a tmpfs without a limit: its size option is ignored.
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["ro", "nosuid"]},
        {
            "destination": "/dev/shm",
            "type": "tmpfs",
            "source": "tmpfs",
            "options": ["nosuid", "nodev", f"size={shm_bytes}", "mode=1777"],
        },
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"]},
        {"destination": PLACEHOLDER, "type": "bind", "source": places.empty, "options": ["rbind", "ro"]},
    ]


def control_path(sandbox: str) -> str:
    """The control socket, relative to the work directory."""
    return f"s/runsc-{sandbox}.sock"


def meminfo(spec: SandboxSpec) -> bytes:
    return f"MemTotal: {spec.memory_bytes // 1024} kB\n".encode()


def file_bytes_max(disk_bytes: int) -> int:
    """The layer's file grows in steps of 1 GiB; one more step than its limit ends the sandbox."""
    return -(-disk_bytes // GIB) * GIB + GIB


def engine_pids(state: bytes) -> tuple[int, int]:
    """(sentry, gofer) from what `runsc create` wrote before any guest code ran. ValueError when it is not that."""
    document = json.loads(state)
    sandbox = document.get("sandbox") if isinstance(document, dict) else None
    pid = sandbox.get("pid") if isinstance(sandbox, dict) else None
    gofer = document.get("goferPid", 0) if isinstance(document, dict) else None
    if type(pid) is not int or type(gofer) is not int or pid <= 1 or gofer < 0:
        raise ValueError("runsc's state file names no process")
    return pid, gofer
