"""What this host gives a node: facts, judged one by one, each with the command that improves it (`cloche doctor`).

Reading and judging are apart: `read` collects text from the host, every `_check` is a pure function of it. Nothing is
changed here, and nothing is started but `runsc --version`.
"""

from __future__ import annotations

import os
import platform
import pwd
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import cloche_engine
from cloche.wire.errors import TABLE
from cloche_server.egress.interception import interpreter
from cloche_server.engines.contract import EngineError
from cloche_server.engines.gvisor.engine import FLOOR, digest_of, read_release
from cloche_server.node.launch import cgroup as cgroups
from cloche_server.node.launch.ids import IdRange, own_range
from cloche_server.node.launch.prepare import APPARMOR_PROFILE, SYSCTLS, command_for_root, delegation_fix

KERNEL_FLOOR: Final = (5, 6)
"""openat2 and pidfds."""
_STATES: Final = {"ok": "ok", "warn": "weaker", "fail": "missing"}
_FILES: Final = {
    "smt": "/sys/devices/system/cpu/smt/active",
    "ksm": "/sys/kernel/mm/ksm/run",
    "swaps": "/proc/swaps",
    "core_pattern": "/proc/sys/kernel/core_pattern",
    "lsm": "/sys/kernel/security/lsm",
}


@dataclass(frozen=True)
class Check:
    """One fact and its judgement: `ok`, `warn` (weaker than production) or `fail` (a node cannot start so)."""

    name: str
    status: str
    found: str
    why: str = ""
    fix: str = ""
    code: str | None = None

    @property
    def state(self) -> str:
        return _STATES[self.status]

    @property
    def text(self) -> str:
        return f"{self.found}: {self.why}" if self.why else self.found


@dataclass(frozen=True)
class Host:
    """What was read. None or empty where the host does not say."""

    kernel: str
    machine: str
    root: bool
    user: str
    uid: int
    runsc: str
    runsc_digest: str
    runsc_problem: tuple[str, str] | None
    cgroup_version: int
    cgroup_found: bool
    cgroup_text: str
    newuidmap: bool
    ids: IdRange | None
    kvm: bool
    sysctls: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    apparmor_profile: bool = False
    interceptor: tuple[str, str] | None = None
    """The Python that an interceptor would run with: its version and where it is."""


def checks() -> list[Check]:
    host = read()
    return [check(host) for check in CHECKS]


def read() -> Host:
    uid = os.getuid()
    user = _user_name(uid)
    delegated, text = cgroups.find(uid)
    runsc, digest, problem = _read_engine()
    return Host(
        kernel=platform.release(),
        machine=platform.machine(),
        root=uid == 0,
        user=user,
        uid=uid,
        runsc=runsc,
        runsc_digest=digest,
        runsc_problem=problem,
        cgroup_version=cgroups.version(),
        cgroup_found=delegated is not None,
        cgroup_text=text,
        newuidmap=all(shutil.which(tool) for tool in ("newuidmap", "newgidmap")),
        ids=own_range(user, uid),
        kvm=os.access("/dev/kvm", os.R_OK | os.W_OK),
        sysctls={path: _text(path) for path in SYSCTLS},
        files={name: _text(path) for name, path in _FILES.items()},
        apparmor_profile=APPARMOR_PROFILE.exists(),
        interceptor=_read_interpreter(),
    )


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _read_engine() -> tuple[str, str, tuple[str, str] | None]:
    try:
        binary = cloche_engine.runsc_path()
        return read_release(binary), digest_of(binary), None
    except (cloche_engine.EngineMissing, cloche_engine.EngineUnwritable) as missing:
        return "", "", ("engine_missing", str(missing))
    except EngineError as refused:
        return "", "", (refused.code, str(refused))


def _read_interpreter() -> tuple[str, str] | None:
    found = interpreter.find()
    return None if found is None else (found.version, str(found.executable))


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:  # absent on this kernel, or not ours to read: the check says "unknown"
        return ""


def _kernel(host: Host) -> Check:
    parts = host.kernel.replace("-", ".").split(".")
    number = tuple(int(part) for part in parts[:2] if part.isdigit())
    if number < KERNEL_FLOOR:
        floor = ".".join(map(str, KERNEL_FLOOR))
        return Check("kernel", "fail", host.kernel, f"older than {floor}", "Use a newer kernel.", "no_linux_kernel")
    return Check("kernel", "ok", f"Linux {host.kernel}")


def _architecture(host: Host) -> Check:
    if host.machine != "x86_64":
        fix = "Use an x86_64 machine for the node and set CLOCHE_URL."
        return Check("architecture", "fail", host.machine, "no engine is built for it", fix, "unsupported_architecture")
    return Check("architecture", "ok", host.machine)


def _engine(host: Host) -> Check:
    if host.runsc_problem is not None:
        code, text = host.runsc_problem
        return Check("engine", "fail", text, "", TABLE[code].fix, code)
    return Check("engine", "ok", f"runsc {host.runsc} (floor release-{FLOOR}), sha256 {host.runsc_digest}")


def _platform(host: Host) -> Check:
    if host.kvm:
        return Check("platform", "ok", "gVisor on systrap; /dev/kvm is there for microVMs")
    return Check("platform", "ok", "gVisor on systrap; no /dev/kvm, which it does not need")


def _cgroup(host: Host) -> Check:
    if not host.root and not host.cgroup_found:
        why = "memory, processes and CPU of a sandbox cannot be limited from outside"
        return Check("cgroup", "fail", host.cgroup_text, why, delegation_fix(host.user), "no_cgroup_delegation")
    found = "`cloche up` as root makes its own" if host.root else f"delegated: {host.cgroup_text}"
    if host.cgroup_version == 1:
        why = "limits hold, but the kernel ends one process for memory where version 2 ends the sandbox at once"
        fix = "Boot with systemd.unified_cgroup_hierarchy=1 on the kernel's command line."
        return Check("cgroup", "warn", f"version 1, {found}", why, fix)
    return Check("cgroup", "ok", f"version 2, {found}")


def _subuids(host: Host) -> Check:
    if host.root:
        return Check("subuids", "ok", "root writes the map of the node's own range; none is needed")
    if not host.newuidmap:
        fix = "Install it: sudo apt-get install uidmap"
        return Check("subuids", "fail", "no newuidmap", "each sandbox needs a uid of its own", fix, "no_newuidmap")
    if host.ids is None:
        fix = f"sudo usermod --add-subuids 300000-365535 --add-subgids 300000-365535 {host.user}"
        why = "each sandbox needs a uid of its own"
        return Check("subuids", "fail", "no common range in /etc/subuid and /etc/subgid", why, fix, "no_subuids")
    return Check("subuids", "ok", f"{host.ids.count} ids from {host.ids.first}")


def _userns(host: Host) -> Check:
    for path, forbidding in SYSCTLS.items():
        if host.sysctls.get(path) != forbidding:
            continue
        name = path.removeprefix("/proc/sys/").replace("/", ".")
        if name.endswith("apparmor_restrict_unprivileged_userns"):
            if host.apparmor_profile or host.root:
                continue
            fix = "sudo cp deploy/apparmor/cloche /etc/apparmor.d/ && sudo systemctl reload apparmor"
        else:
            fix = f"sudo sysctl -w {name}={'1' if name.endswith('clone') else '15000'}"
        return Check("user-namespaces", "fail", f"{name} = {forbidding}", "forbidden here", fix, "userns_forbidden")
    return Check("user-namespaces", "ok", "allowed")


def _smt(host: Host) -> Check:
    if host.files.get("smt") == "1":
        why = "two sandboxes can share a core's caches; side channels between tenants are easier"
        return Check("smt", "warn", "on", why, "For tenants that distrust each other: boot with nosmt.")
    return Check("smt", "ok", "off" if host.files.get("smt") == "0" else "not reported")


def _ksm(host: Host) -> Check:
    if host.files.get("ksm") == "1":
        why = "equal pages of different sandboxes are merged, which can be timed"
        return Check("ksm", "warn", "on", why, "echo 2 | sudo tee /sys/kernel/mm/ksm/run")
    return Check("ksm", "ok", "off")


def _swap(host: Host) -> Check:
    used = host.files.get("swaps", "").splitlines()[1:]
    if used:
        why = "the host may write a sandbox's memory to disk (sandboxes themselves get no swap)"
        return Check("swap", "warn", f"{len(used)} in use", why, "sudo swapoff -a, or encrypt it")
    return Check("swap", "ok", "none")


def _core(host: Host) -> Check:
    pattern = host.files.get("core_pattern", "")
    if pattern.startswith("|"):
        why = "a crash hands memory to a program on the host (engines run with RLIMIT_CORE 0)"
        return Check("core-dumps", "warn", pattern[:60], why, "sudo sysctl -w kernel.core_pattern=core")
    return Check("core-dumps", "ok", "to files only; engines have RLIMIT_CORE 0")


def _sharing(host: Host) -> Check:
    if host.root:
        return Check("node-user", "ok", "a system user of its own")
    why = "node and sandboxes are apart by uid, but the node runs as you: who breaks the node has your files"
    return Check("node-user", "warn", f"your own ({host.user})", why, f"On a server: sudo {command_for_root()} up")


def _interceptor(host: Host) -> Check:
    if host.interceptor is None:
        versions = interpreter.versions_tested()
        why = "secrets, and egress rules with methods or paths, are refused by name; nothing else needs it"
        wanted = " or ".join(versions)
        return Check("interceptor", "ok", f"none, for want of Python {wanted}", why, interpreter.fix_for_none(versions))
    version, path = host.interceptor
    return Check("interceptor", "ok", f"Python {version} ({path}); its packages are made at first need")


CHECKS: Final[tuple[Callable[[Host], Check], ...]] = (
    _kernel,
    _architecture,
    _engine,
    _platform,
    _cgroup,
    _subuids,
    _userns,
    _smt,
    _ksm,
    _swap,
    _core,
    _sharing,
    _interceptor,
)
