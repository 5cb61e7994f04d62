"""Where a node cannot run, it is said by name with the ways out; where none runs, one is started."""

import importlib.util
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from cloche.cli import local, session
from cloche.wire.errors import ClocheError
from cloche.wire.nodes import NodeView

VIEW = NodeView(
    version="0.1.0",
    mode="user",
    pid=1,
    engines={"gvisor": "release-20260905"},
    cgroup="cgroup v2",
    state_dir="/s",
    uptime_s=0.0,
    sandboxes_running=0,
    generation=1,
)


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A user without a node, on a machine without one."""
    monkeypatch.delenv("CLOCHE_URL", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(
        "cloche.client._target.choose_target.__kwdefaults__", {"machine_socket": tmp_path / "machine.sock"}
    )
    return tmp_path


@pytest.mark.req("UX-8")
@pytest.mark.parametrize(("system", "name"), [("darwin", "macOS"), ("win32", "Windows")])
@pytest.mark.parametrize("arguments", [("run", "--", "true"), ("create",), ("shell",), ("up",), ("ps",)])
def test_without_linux_it_says_so_and_where_to_go(nowhere, cloche, monkeypatch, system, name, arguments) -> None:
    monkeypatch.setattr("sys.platform", system)
    result = cloche(*arguments)
    assert result.exit_code == 125
    assert result.stderr.startswith("✗ no_linux_kernel: ")
    assert name in result.stderr
    assert "CLOCHE_URL" in result.stderr
    assert "docs/how-to/macos-and-windows.md" in result.stderr


@pytest.mark.req("UX-8")
def test_another_architecture_is_named(nowhere, cloche, monkeypatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    result = cloche("up")
    assert result.stderr.startswith("✗ unsupported_architecture: there is no engine for riscv64 yet.")


@pytest.mark.req("UX-8")
def test_the_client_alone_says_what_to_install(nowhere, cloche, monkeypatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "cloche_server" else found(name, *rest)
    )
    result = cloche("run", "--", "true")
    assert result.exit_code == 125
    assert result.stderr.startswith("✗ server_missing: ")
    assert "uv tool install 'cloche[server]'" in result.stderr


@pytest.mark.req("UX-8")
def test_what_the_host_lacks_is_an_error_with_its_fix_and_nothing_is_started(nowhere, cloche, monkeypatch) -> None:
    from cloche.wire.errors import error

    def start(*_args: Any, **_fields: Any) -> NodeView:
        raise error("no_subuids", "/etc/subuid gives no range to you")

    monkeypatch.setattr(local, "start", start)
    result = cloche("run", "--", "true")
    assert result.exit_code == 125
    assert result.stdout == ""
    assert "usermod --add-subuids" in result.stderr


def test_a_listing_without_a_node_names_the_next_command(nowhere, cloche) -> None:
    result = cloche("ps")
    assert result.exit_code == 125
    assert result.stderr.startswith("✗ node_unavailable: ")
    assert "cloche up" in result.stderr


@pytest.mark.req("UX-1")
def test_run_without_a_node_starts_one_and_says_so_once(nowhere, monkeypatch, capsys) -> None:
    started: list[local.Place] = []
    listener = socket.socket(socket.AF_UNIX)

    def start(where: local.Place) -> NodeView:
        started.append(where)
        path = nowhere / "cloche" / "api.sock"
        path.parent.mkdir()
        listener.bind(str(path))
        listener.listen()
        return VIEW

    monkeypatch.setattr(local, "start", start)
    monkeypatch.setattr(local, "limits_by", lambda: "cgroup v2")
    with listener:
        for _ in range(2):
            with session.connect(start=True) as node:
                assert node.target.socket == str(nowhere / "cloche" / "api.sock")
    assert len(started) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "✓ node started for you (gVisor release-20260905; limits by cgroup v2)\n"


@pytest.mark.req("UX-7")
def test_a_machines_node_that_refuses_is_not_replaced_by_an_own_one(nowhere, monkeypatch) -> None:
    (nowhere / "machine.sock").touch()
    monkeypatch.setattr(local, "start", lambda *_args, **_fields: pytest.fail("a weaker node was started"))
    with session.connect(start=True) as node, pytest.raises(ClocheError) as refused:
        node.info()
    assert refused.value.code in ("node_unavailable", "node_refused")


@pytest.mark.req("UX-7")
def test_a_weaker_node_must_be_asked_for_by_a_known_name(cloche) -> None:
    result = cloche("up", "--accept", "everything")
    assert result.exit_code == 2
    assert "single-uid, no-cgroup" in result.stderr


def test_doctor_on_another_system_is_one_missing_thing(monkeypatch, cloche) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    result = cloche("doctor")
    assert result.exit_code == 1
    assert "✗ platform" in result.stdout


def test_delegate_needs_root(monkeypatch, cloche) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    result = cloche("delegate", "ada")
    assert result.exit_code == 125
    assert re.search(r"Type: sudo (/\S+/)?cloche delegate ada", result.stderr)


@pytest.mark.req("IMG-1")
def test_without_a_prebuilt_image_the_default_one_is_pulled(nowhere, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(local, "MACHINE_STATE", tmp_path / "machine")
    monkeypatch.setattr(local, "__file__", str(tmp_path / "a/b/c/d/e/f.py"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for name in ("CLOCHE_ROOTFS", "CLOCHE_IMAGE"):
        monkeypatch.delenv(name, raising=False)
    assert local.find_images() is None
    assert local.place().images_dir == local.place().state_dir / "images"
    assert local._image_check()["text"] == "python:3.12-slim, pulled when it is first used"
    (tmp_path / "data" / "cloche" / "images").mkdir(parents=True)
    (tmp_path / "data" / "cloche" / "images" / "python.erofs").touch()
    assert local.place().images_dir == tmp_path / "data" / "cloche" / "images"
    assert local._image_check()["text"].startswith("python in ")
    monkeypatch.setenv("CLOCHE_IMAGE", "mine:1")
    assert local._image_check()["text"].startswith("mine:1 (CLOCHE_IMAGE)")
    monkeypatch.setenv("CLOCHE_ROOTFS", str(tmp_path / "nowhere"))
    with pytest.raises(ClocheError) as wrong:
        local.place()
    assert wrong.value.code == "image_not_found"
    assert local._image_check()["state"] == "missing"


@pytest.mark.req("UX-8")
def test_a_reset_names_an_image_store_elsewhere(nowhere, cloche, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr(
        "cloche_server.node.launch.up.up", lambda paths, **how: paths.state.mkdir(parents=True, exist_ok=True)
    )
    monkeypatch.setattr("cloche_server.node.launch.places.default_config_dir", lambda mode: tmp_path / "config")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(local, "running", lambda where: VIEW)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    local.start(local.place(store=elsewhere))
    monkeypatch.setattr(local, "running", lambda where: None)
    result = cloche("reset", "--all", "--yes")
    assert result.exit_code == 0, result.stderr
    assert f"The image store {elsewhere} is not in the state directory, and stays." in result.stderr
    assert elsewhere.is_dir()
    assert not (tmp_path / "state" / "cloche").exists()
    monkeypatch.setattr(local, "running", lambda where: VIEW)
    local.start(local.place())
    assert local.store_elsewhere(local.place()) is None
