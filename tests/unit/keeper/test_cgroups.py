"""Limits as data, for both versions, and reading them back from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloche_server.keeper.cgroups import Cgroup, limits
from tests.unit.keeper.harness import spec

pytestmark = [pytest.mark.req("RES-1")]
WANTED = spec(cpus=0.5, memory_bytes=512 << 20, processes=256)


def test_version_1() -> None:
    assert [(w.controller, w.file, w.value, w.required, w.late) for w in limits(1, WANTED)] == [
        ("memory", "memory.limit_in_bytes", "536870912", True, False),
        ("memory", "memory.memsw.limit_in_bytes", "536870912", False, False),
        ("memory", "memory.swappiness", "0", False, False),
        ("pids", "pids.max", "1088", True, False),
        ("cpu", "cpu.cfs_period_us", "100000", True, True),
        ("cpu", "cpu.cfs_quota_us", "50000", True, True),
    ]


def test_version_2() -> None:
    assert [(w.controller, w.file, w.value, w.required, w.late) for w in limits(2, WANTED)] == [
        ("unified", "memory.max", "536870912", True, False),
        ("unified", "memory.swap.max", "0", False, False),
        ("unified", "memory.oom.group", "1", True, False),
        ("unified", "pids.max", "1088", True, False),
        ("unified", "cpu.max", "50000 100000", True, True),
    ]


@pytest.mark.parametrize("version", [1, 2])
def test_the_net_is_at_least_four_times_the_limit(version: int) -> None:
    for processes in (4, 64, 32768):
        (pids,) = [int(w.value) for w in limits(version, spec(processes=processes)) if w.file == "pids.max"]
        assert pids >= 4 * processes


def test_version_2_is_read(tmp_path: Path) -> None:
    for name, text in {
        "memory.current": "1000\n",
        "memory.peak": "2000\n",
        "memory.events": "low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\n",
        "cpu.stat": "usage_usec 1500000\nuser_usec 1\n",
        "cgroup.procs": "12\n13\n",
    }.items():
        (tmp_path / name).write_text(text)
    cgroup = Cgroup(2, {"unified": str(tmp_path)})
    usage = cgroup.usage()
    assert (usage.memory_bytes, usage.memory_peak_bytes, usage.cpu_s, usage.oom_kills) == (1000, 2000, 1.5, 2)
    assert cgroup.pids() == [12, 13]


def test_version_1_is_read(tmp_path: Path) -> None:
    for name, text in {
        "memory.usage_in_bytes": "1000\n",
        "memory.max_usage_in_bytes": "2000\n",
        "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
        "cpuacct.usage": "2500000000\n",
    }.items():
        (tmp_path / name).write_text(text)
    usage = Cgroup(1, {"memory": str(tmp_path), "cpuacct": str(tmp_path)}).usage()
    assert (usage.memory_bytes, usage.memory_peak_bytes, usage.cpu_s, usage.oom_kills) == (1000, 2000, 2.5, 1)


def test_what_is_gone_counts_nothing(tmp_path: Path) -> None:
    cgroup = Cgroup(2, {"unified": str(tmp_path / "gone")})
    assert cgroup.oom_kills() == 0
    assert cgroup.pids() == []
    assert cgroup.remove()


def test_a_child_is_below_each_parent() -> None:
    parents = Cgroup(1, {"memory": "/m/cloche", "pids": "/p/cloche"})
    assert parents.child("x").dirs == {"memory": "/m/cloche/x", "pids": "/p/cloche/x"}
    assert Cgroup.from_object(parents.to_object()) == parents
