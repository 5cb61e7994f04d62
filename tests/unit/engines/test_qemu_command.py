"""The microVM's command line, frozen: a changed flag is a changed wall."""

import re
from dataclasses import replace

import pytest

from cloche_server.engines.plan import Places
from cloche_server.engines.qemu import command
from cloche_server.engines.spec import MIB, BadSpec, SandboxSpec

SPEC = SandboxSpec(
    id="s" + "a" * 19,
    tenant="t" + "a" * 19,
    owner="uid:1000",
    lineage="l" + "a" * 19,
    engine="qemu",
    image_file="python.erofs",
    cpus=1.0,
    memory_bytes=512 * MIB,
    processes=256,
    disk_bytes=2048 * MIB,
    open_files=1024,
).check()
PLACES = Places(engine="/mnt/e/qemu", work="/mnt/w/s1", image="/mnt/i/fe00-1,2", empty="/mnt/n")

GOLDEN = """
/usr/bin/unshare --net --ipc --uts --cgroup --
/usr/bin/setpriv --no-new-privs --bounding-set=-all --inh-caps=-all --ambient-caps=-all
--securebits=+noroot,+noroot_locked,+no_setuid_fixup,+no_setuid_fixup_locked --
/usr/bin/qemu-system-x86_64 -nodefaults -no-user-config -display none -no-reboot -S
-sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny
-machine microvm,isa-serial=off,mem-merge=off,dump-guest-core=off
-accel tcg,tb-size=32
-cpu max
-smp cpus=1
-m size=448M
-kernel /mnt/e/qemu/vmlinux
-initrd /mnt/e/qemu/initramfs.cpio
-append <quiet reboot=t panic=-1 oops=panic tsc_early_khz=2100000 cloche.layer_bytes=234881024>
-chardev socket,id=channel,fd=0
-device virtio-serial-device -device virtserialport,chardev=channel,name=cloche
-drive if=none,id=root,format=raw,readonly=on,file=/mnt/i/fe00-1,,2
-device virtio-blk-device,drive=root
-chardev socket,id=monitor,server=on,wait=off,path=/mnt/w/s1/s/monitor.sock
-mon chardev=monitor,mode=control
"""


def test_the_command_line_is_the_golden_one() -> None:
    found = command.argv(SPEC, PLACES, 2_100_000)
    assert " ".join(f"<{word}>" if " " in word else word for word in found).split() == GOLDEN.split()


def test_the_plan_is_a_process_that_stays_with_its_monitor_in_a_directory_of_its_own() -> None:
    plan = command.plan(SPEC, PLACES)
    [tsc_khz] = re.findall(r"tsc_early_khz=(\d+)", " ".join(plan.argv))
    assert plan.argv == command.argv(SPEC, PLACES, int(tsc_khz))
    assert not command.DAEMONIZES
    assert plan.state is None
    assert command.control_path(SPEC.id) == "s/monitor.sock"
    assert not plan.bare
    assert plan.private_dirs == ("s",)
    assert plan.files == {}


def test_nothing_of_the_spec_but_numbers_reaches_the_command_line() -> None:
    other = replace(SPEC, id="s" + "b" * 19, tenant="t" + "b" * 19, owner="x,y", image_file="other", lineage="l" * 20)
    assert command.argv(other, PLACES, 2_100_000) == command.argv(SPEC, PLACES, 2_100_000)


@pytest.mark.parametrize(("cpus", "vcpus"), [(0.01, 1), (1.0, 1), (1.5, 2), (16, 16)], ids=str)
def test_a_part_of_a_cpu_is_a_whole_one_to_the_guest(cpus: float, vcpus: int) -> None:
    assert command.vcpus(replace(SPEC, cpus=cpus)) == vcpus


def test_the_layer_is_the_disk_or_half_of_the_memory() -> None:
    assert command.layer_bytes(SPEC) == 224 * MIB
    assert command.layer_bytes(replace(SPEC, disk_bytes=100 * MIB)) == 100 * MIB


@pytest.mark.parametrize(
    ("spec", "field"),
    [(replace(SPEC, cpus=17), "cpus"), (replace(SPEC, memory_bytes=160 * MIB - 1), "memory_bytes")],
    ids=["cpus", "memory"],
)
def test_what_a_microvm_cannot_be_is_refused_by_name(spec: SandboxSpec, field: str) -> None:
    with pytest.raises(BadSpec, match=f"^{field}: "):
        command.plan(spec, PLACES)


@pytest.mark.parametrize(
    ("cpuinfo", "khz"),
    [
        ("model name\t: Intel(R) Xeon(R) Processor\ncpu MHz\t\t: 2000.000\nflags\t: fpu hypervisor\n", 2_000_000),
        ("model name\t: Xeon @ 2.10GHz\ncpu MHz\t\t: 2095.078\nflags\t: fpu hypervisor tsc\n", 2_095_078),
        ("model name\t: Core i7 @ 1.80GHz\ncpu MHz\t\t: 801.004\nflags\t: fpu vme\n", 1_800_000),
        ("model name\t: AMD EPYC\ncpu MHz\t\t: 2250.000\nflags\t: fpu vme\n", 2_250_000),
    ],
    ids=["virtual", "virtual-named", "metal-named", "metal"],
)
def test_the_rate_of_the_tsc_is_read_from_cpuinfo(cpuinfo: str, khz: int) -> None:
    assert command.host_tsc_khz(cpuinfo) == khz


@pytest.mark.parametrize("cpuinfo", ["", "cpu MHz\t: 0.000\n", "cpu MHz : 99999999.0\n", "BogoMIPS : 50.00\n"])
def test_a_rate_that_is_not_there_is_an_error_and_no_guess(cpuinfo: str) -> None:
    with pytest.raises(BadSpec, match="frequency"):
        command.host_tsc_khz(cpuinfo)
