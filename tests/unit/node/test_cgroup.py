"""Delegated cgroups as data: directories that look like /sys/fs/cgroup."""

import os
import subprocess
from pathlib import Path

import pytest

from cloche.wire.errors import ClocheError
from cloche_server.keeper.cgroups import V2
from cloche_server.node.launch import cgroup
from cloche_server.node.launch.prepare import delegation_fix

ME = os.getuid()
SCOPE = "user.slice/user-1000.slice/user@1000.service/app.slice/run-r1.scope"


def made(path: Path, controllers: str = "cpuset cpu io memory pids") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "cgroup.procs").touch()
    (path / "cgroup.subtree_control").touch()
    (path / "cgroup.controllers").write_text(controllers + "\n")
    return path


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with version 2."""
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    return made(tmp_path)


@pytest.mark.req("RES-1")
@pytest.mark.parametrize("own", [SCOPE, f"{SCOPE}/node"])
def test_version_2_is_found_where_the_process_is(two: Path, own: str) -> None:
    scope = made(two / SCOPE)
    made(two / own)
    found, text = cgroup.find_v2(ME, f"0::/{own}\n")
    assert found is not None, text
    assert found.dirs == {V2: str(scope)}


@pytest.mark.req("RES-1")
def test_version_2_is_not_found_elsewhere(two: Path) -> None:
    """The kernel lets nobody but root enter another branch, so a directory of his there is of no use."""
    made(two / f"cloche-{ME}")
    made(two / "system.slice")
    found, text = cgroup.find_v2(ME + 1, "0::/system.slice\n")
    assert (found, "is not owned" in text) == (None, True)
    made(two / SCOPE, controllers="memory pids")
    found, text = cgroup.find_v2(ME, f"0::/{SCOPE}\n")
    assert (found, "lacks the controllers cpu" in text) == (None, True)


@pytest.mark.req("RES-1")
def test_version_2_refuses_to_make_what_no_daemon_would_find(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(two.rglob("*"))
    with pytest.raises(ClocheError) as refused:
        cgroup.delegate("root")
    assert refused.value.code == "unsupported"
    assert cgroup.IN_A_SCOPE in refused.value.fix
    assert cgroup.IN_A_SCOPE in delegation_fix("root")
    assert sorted(two.rglob("*")) == before
    assert (two / "cgroup.subtree_control").read_text() == ""


@pytest.mark.req("RES-1")
def test_version_1_finds_what_delegate_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    for controller in cgroup.V1_NEEDED:
        (tmp_path / controller).mkdir()
    assert cgroup.find(ME)[0] is None
    for path in cgroup.give(ME, os.getgid(), f"cloche-{ME}"):
        (path / "cgroup.procs").touch()  # the kernel makes it with the directory
    found, text = cgroup.find(ME)
    assert found is not None, text
    assert found.dirs == {name: str(tmp_path / name / f"cloche-{ME}") for name in cgroup.V1_NEEDED}


@pytest.mark.skipif(
    ME != 0 or cgroup.version() != 1, reason="makes directories of cgroup version 1, which only root may"
)
@pytest.mark.req("LIF-2")
def test_what_another_node_still_needs_is_not_taken_back() -> None:
    name = f"cloche-test-{os.getpid()}"
    given = cgroup.give(0, 0, name)
    for path in given:
        (path / "sandbox").mkdir()
    living = subprocess.Popen(["sleep", "60"])
    try:
        busy = next(path for path in given if path.parent.name == "memory")
        (busy / "sandbox" / "cgroup.procs").write_text(str(living.pid))
        for number in range(3):
            (busy / f"set-up-{number}").mkdir()
        assert set(cgroup.take_back(name)) == set(given) - {busy}
        assert len([child for child in busy.iterdir() if child.is_dir()]) == 4, "those that are being set up too"
    finally:
        living.kill()
        living.wait()
        cgroup.take_back(name)
    assert not any(path.exists() for path in given)
