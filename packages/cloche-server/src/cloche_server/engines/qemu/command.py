"""The command line of a QEMU microVM: pure, standard library, `engines.plan` and `engines.spec` only.

Every flag here was measured; a golden test freezes them. The command is the VMM itself: it stays, and
the guest does not run before the monitor is told `cont`. Its stdin is the channel: a connected socket, as with
every engine, so that the carrier has no name that anybody could connect to.

runsc makes namespaces and drops capabilities by itself; QEMU does not. Two programs of util-linux do it here, each
replacing itself by the next, so that the process the keeper started is the VMM in the end.
"""

from __future__ import annotations

import math
import re
from typing import Final

from cloche_server.engines.plan import Places, Plan
from cloche_server.engines.spec import MIB, BadSpec, SandboxSpec

BINARY: Final = "/usr/bin/qemu-system-x86_64"
"""Debian's own: dynamic, with its firmware in /usr/share. Nothing of it is in the engine's directory."""
NAMESPACES: Final = ("/usr/bin/unshare", "--net", "--ipc", "--uts", "--cgroup", "--")
NO_CAPABILITY: Final = (
    *("/usr/bin/setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all"),
    # The VMM is uid 0 of its two-id namespace (an ordinary id outside), and that uid is worth nothing.
    *("--securebits=+noroot,+noroot_locked,+no_setuid_fixup,+no_setuid_fixup_locked", "--"),
)
KERNEL: Final = "vmlinux"
INITRAMFS: Final = "initramfs.cpio"
DAEMONIZES: Final = False
"""The command is the engine: it does not exit while the sandbox lives."""
PRIVATE_DIRS: Final = ("s",)
"""Below the work directory, owned by the sandbox's own uid: the monitor's socket."""
STATE_BYTES_MAX: Final = 0

TRANSLATION_MIB: Final = 32
"""The emulator's cache of translated code. The default, a share of the host's memory, would be the guest's to fill."""
VMM_BYTES: Final = 64 * MIB
"""What QEMU needs for itself, translated code included. The spec's memory bounds both, as it does with a sentry."""
GUEST_BYTES_MIN: Final = 96 * MIB
"""Debian's kernel does not reach its init with 64 MiB."""
VCPUS_MAX: Final = 16
FILE_BYTES_MAX: Final = MIB
"""QEMU writes no file but its last words."""
CPUINFO_BYTES_MAX: Final = 16 * 1024
"""Enough for the first processor's lines."""
TSC_KHZ_MIN: Final = 100_000
TSC_KHZ_MAX: Final = 20_000_000

SANDBOX: Final = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
MACHINE: Final = "microvm,isa-serial=off,mem-merge=off,dump-guest-core=off"


def plan(spec: SandboxSpec, places: Places) -> Plan:
    """BadSpec when a microVM cannot be that small or that wide. Reads one fact of the host: its clock's rate."""
    with open("/proc/cpuinfo") as file:
        cpuinfo = file.read(CPUINFO_BYTES_MAX)
    return Plan(
        argv=argv(spec, places, host_tsc_khz(cpuinfo)),
        file_bytes_max=FILE_BYTES_MAX,
        private_dirs=PRIVATE_DIRS,
    )


def control_path(sandbox: str) -> str:
    """The monitor's socket, relative to the work directory."""
    return "s/monitor.sock"


def engine_pids(state: bytes) -> tuple[int, int]:
    """Never asked: the command is the engine and leaves no state file."""
    raise ValueError("a microVM has no state file")


def argv(spec: SandboxSpec, places: Places, tsc_khz: int) -> tuple[str, ...]:
    return (
        *NAMESPACES,
        *NO_CAPABILITY,
        BINARY,
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        # Stopped until the monitor is told otherwise: nothing of the guest runs before `start`.
        "-S",
        *("-sandbox", SANDBOX),
        *("-machine", MACHINE),
        *("-accel", f"tcg,tb-size={TRANSLATION_MIB}"),
        *("-cpu", "max"),
        *("-smp", f"cpus={vcpus(spec)}"),
        *("-m", f"size={guest_bytes(spec) // MIB}M"),
        *("-kernel", f"{places.engine}/{KERNEL}"),
        *("-initrd", f"{places.engine}/{INITRAMFS}"),
        *("-append", kernel_arguments(spec, tsc_khz)),
        # The carrier comes first: the guest names a port after its device's number, and expects vport0p1.
        *("-chardev", "socket,id=channel,fd=0"),
        *("-device", "virtio-serial-device", "-device", "virtserialport,chardev=channel,name=cloche"),
        *("-drive", f"if=none,id=root,format=raw,readonly=on,file={_value(places.image)}"),
        *("-device", "virtio-blk-device,drive=root"),
        *("-chardev", f"socket,id=monitor,server=on,wait=off,path={_value(places.work)}/{control_path(spec.id)}"),
        *("-mon", "chardev=monitor,mode=control"),
    )


def kernel_arguments(spec: SandboxSpec, tsc_khz: int) -> str:
    """Without the TSC's rate the guest measures it against the timer, which fails under emulation, at random."""
    return f"quiet reboot=t panic=-1 oops=panic tsc_early_khz={tsc_khz} cloche.layer_bytes={layer_bytes(spec)}"


def layer_bytes(spec: SandboxSpec) -> int:
    """The writable layer is in the guest's memory for now: the spec's disk, but never more than half of that."""
    return min(spec.disk_bytes, guest_bytes(spec) // 2)


def guest_bytes(spec: SandboxSpec) -> int:
    """The guest's memory: what the spec allows, less what the VMM needs, in whole MiB."""
    guest = (spec.memory_bytes - VMM_BYTES) // MIB * MIB
    if guest < GUEST_BYTES_MIN:
        raise BadSpec(f"memory_bytes: a microVM needs at least {VMM_BYTES + GUEST_BYTES_MIN}")
    return guest


def vcpus(spec: SandboxSpec) -> int:
    count = math.ceil(spec.cpus)
    if count > VCPUS_MAX:
        raise BadSpec(f"cpus: a microVM has at most {VCPUS_MAX}")
    return count


def host_tsc_khz(cpuinfo: str) -> int:
    """The rate of the host's TSC from /proc/cpuinfo, which under emulation is the guest's.

    "cpu MHz" is exact in a virtual machine; on bare metal it follows the load, and the processor's name is the better
    word ("@ 2.10GHz"). BadSpec when neither is there. A rate that is off makes the guest's clock run fast or slow by as much.
    """
    named = re.search(r"^model name\s*:.*@ *([0-9.]+) *GHz", cpuinfo, re.MULTILINE)
    current = re.search(r"^cpu MHz\s*:\s*([0-9.]+)", cpuinfo, re.MULTILINE)
    virtual = re.search(r"^flags\s*:.*\bhypervisor\b", cpuinfo, re.MULTILINE)
    khz = float(current[1]) * 1e3 if current else 0.0
    if named and not virtual:
        khz = float(named[1]) * 1e6
    if not TSC_KHZ_MIN <= khz <= TSC_KHZ_MAX:
        raise BadSpec("engine: qemu: /proc/cpuinfo does not say the processor's frequency")
    return round(khz)


def _value(text: str) -> str:
    """As a value in QEMU's comma-separated options."""
    return text.replace(",", ",,")
