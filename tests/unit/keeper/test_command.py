"""The command line and config.json of gVisor, frozen: each flag was measured, and losing one loses a wall."""

from __future__ import annotations

import json

import pytest

from cloche_server.engines.contract import EngineError
from cloche_server.engines.gvisor import command
from cloche_server.engines.gvisor.engine import release_of
from cloche_server.engines.plan import Places
from tests.unit.keeper.harness import spec

pytestmark = [pytest.mark.req("ISO-1")]
ID = "s" + "b" * 19
PLACES = Places(engine="/mnt/e/gvisor", work=f"/mnt/w/{ID}", image="/mnt/i/1-2", empty="/mnt/n")
SPEC = spec(id=ID, memory_bytes=512 << 20, disk_bytes=2 << 30)


def test_argv() -> None:
    assert command.argv(SPEC, PLACES) == (
        "/mnt/e/gvisor/runsc",
        f"--root=/mnt/w/{ID}/s",
        "--network=none",
        "--platform=systrap",
        "--ignore-cgroups",
        "--directfs=false",
        "--host-settings=ignore",
        "--sidecar-usage-policy=STRICT",
        "--sidecar-release-enforcement-policy=ALWAYS",
        f"--overlay2=root:dir=/mnt/w/{ID}/f",
        "create",
        f"--bundle=/mnt/w/{ID}/b",
        ID,
    )


def test_config() -> None:
    config = command.config(SPEC, PLACES)
    process = config["process"]
    assert process["user"] == {"uid": 64000, "gid": 64000}
    assert process["args"] == ["/.cloche/agent"]
    assert process["noNewPrivileges"] is True
    assert process["capabilities"]["bounding"] == [
        f"CAP_{name}"
        for name in (
            "CHOWN",
            "DAC_OVERRIDE",
            "FOWNER",
            "FSETID",
            "KILL",
            "SETUID",
            "SETGID",
            "SETPCAP",
            "SETFCAP",
            "SYS_ADMIN",
        )
    ]
    assert config["root"] == {"path": "/mnt/n", "readonly": False}
    assert [kind["type"] for kind in config["linux"]["namespaces"]] == ["pid", "ipc", "uts", "mount", "network"]
    assert config["annotations"] == {
        "dev.gvisor.spec.rootfs.source": "/mnt/i/1-2",
        "dev.gvisor.spec.rootfs.type": "erofs",
        "dev.gvisor.spec.rootfs.overlay": "dir=/layer",
        "dev.gvisor.spec.rootfs.options": "size=2147483648",
    }


def test_mounts() -> None:
    mounts = {mount["destination"]: mount for mount in command.config(SPEC, PLACES)["mounts"]}
    assert list(mounts) == ["/proc", "/dev", "/dev/shm", "/sys", "/.cloche/placeholder"]
    assert "ro" in mounts["/dev"]["options"], "writable, /dev is a tmpfs without a limit"
    assert "ro" in mounts["/sys"]["options"]
    assert f"size={64 << 20}" in mounts["/dev/shm"]["options"]
    assert mounts["/.cloche/placeholder"]["source"] == PLACES.empty
    assert [mount for mount in mounts.values() if mount["type"] == "bind"] == [mounts["/.cloche/placeholder"]]


def test_plan() -> None:
    plan = command.plan(SPEC, PLACES)
    assert plan.files["meminfo"] == b"MemTotal: 524288 kB\n"
    assert json.loads(plan.files["b/config.json"]) == command.config(SPEC, PLACES)
    assert plan.private_dirs == ("s", "f")
    assert plan.env == {"PATH": "/usr/bin:/bin"}


@pytest.mark.parametrize(("disk", "limit"), [(1 << 20, 2 << 30), (1 << 30, 2 << 30), ((1 << 30) + 1, 3 << 30)])
def test_the_net_below_the_layer(disk: int, limit: int) -> None:
    assert command.file_bytes_max(disk) == limit


def test_pids() -> None:
    assert command.engine_pids(b'{"sandbox":{"pid":12},"goferPid":13}') == (12, 13)
    assert command.engine_pids(b'{"sandbox":{"pid":12}}') == (12, 0)
    for bad in (
        b"[]",
        b"{}",
        b'{"sandbox":{"pid":1}}',
        b'{"sandbox":{"pid":"2"}}',
        b'{"sandbox":{"pid":2},"goferPid":-1}',
        b"x",
    ):
        with pytest.raises(ValueError):
            command.engine_pids(bad)


@pytest.mark.req("ISO-5")
def test_an_old_engine_is_refused() -> None:
    assert release_of("runsc version release-20260905.0\nspec: 1.2.1") == "release-20260905.0"
    for old in ("runsc version release-20240729.0", "runsc version VERSION_MISSING", ""):
        with pytest.raises(EngineError) as caught:
            release_of(old)
        assert caught.value.code == "engine_too_old"
