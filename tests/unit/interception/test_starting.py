"""How an interceptor is started: its command line, what the keeper shows it, what a machine's daemon is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloche_server.egress.interception import interpreter
from cloche_server.engines.interceptor import command
from cloche_server.engines.plan import Places
from cloche_server.engines.spec import BadSpec, SandboxSpec
from cloche_server.keeper.cgroups import limits
from cloche_server.node.launch import keepers, up
from cloche_server.node.launch.places import NodePaths
from cloche_server.node.launch.reach import needed_paths
from tests.unit.keeper.harness import IMAGES, spec

pytestmark = [pytest.mark.req("NET-9"), pytest.mark.req("ISO-4")]
ENVIRONMENT = "3.13-" + "a" * 64


def interceptor(**changes: object) -> SandboxSpec:
    return spec("interceptor", **{"image_file": ENVIRONMENT, "processes": 16, **changes}).check()


def test_the_command_line() -> None:
    beside = {command.PYTHON: "/mnt/b/interceptor-python", command.PROGRAM: "/mnt/b/interceptor-program"}
    places = Places(engine="/mnt/e/interceptor", work="/mnt/w/s1", image="", empty="/mnt/n", beside=beside)
    plan = command.plan(interceptor(), places)
    assert plan.argv == (
        "/mnt/b/interceptor-python/bin/python3.13", "-I", "-S", "-B", "-c", command.BOOT,
        f"/mnt/e/interceptor/{ENVIRONMENT}/lib/python3.13/site-packages", "/mnt/b/interceptor-program/main.py",
    )  # fmt: skip
    assert plan.env["LD_LIBRARY_PATH"] == "/mnt/b/interceptor-python/lib"
    assert (plan.bare, plan.read_only, plan.file_bytes_max) == (True, True, 0)
    assert (plan.files, plan.private_dirs, plan.state) == ({}, (), None)
    assert command.control_path("s1") is None


def test_a_keeper_without_an_interpreter_says_so() -> None:
    places = Places(engine="/mnt/e/interceptor", work="/mnt/w/s1", image="", empty="/mnt/n")
    with pytest.raises(BadSpec, match="without an interpreter"):
        command.plan(interceptor(), places)


@pytest.mark.parametrize(
    "bad", ["", "python.erofs", "3.13-" + "a" * 63, "../../etc", "3.13-" + "A" * 64, "4.1-" + "a" * 64]
)
def test_an_environment_is_a_version_and_a_digest(bad: str) -> None:
    with pytest.raises(BadSpec, match="image_file"):
        interceptor(image_file=bad)


def test_its_pids_are_what_the_spec_says() -> None:
    for version in (1, 2):
        assert {write.value for write in limits(version, interceptor()) if write.file == "pids.max"} == {"16"}
        assert {write.value for write in limits(version, spec()) if write.file == "pids.max"} != {"64"}


def test_what_the_keeper_is_told(tmp_path: Path) -> None:
    paths = NodePaths(tmp_path / "state", tmp_path / "run", IMAGES)
    assert keepers.interceptor_directory(paths) == {"interceptor": str(tmp_path / "state" / "interceptor")}
    assert (tmp_path / "state" / "interceptor").stat().st_mode & 0o777 == 0o755
    found = interpreter.find()
    wanted = {} if found is None else {command.PYTHON: str(found.prefix), command.PROGRAM: str(interpreter.PROGRAM)}
    assert keepers.beside_directories() == wanted


def test_without_an_interpreter_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(interpreter.VARIABLE, "/nonexistent")
    assert keepers.beside_directories() == {}


@pytest.mark.skipif(interpreter.find() is None, reason="no Python that the interceptor can run with")
def test_a_machines_daemon_gets_the_interpreter_and_the_index_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://packages.example/simple")
    monkeypatch.setenv("npm_config_registry", "https://packages.example/npm")
    monkeypatch.setenv("CARGO_SOURCE_COMPANY_REGISTRY", "sparse+https://packages.example/cargo/")
    others = ("SECRET_OF_THE_OPERATOR", "CARGO_REGISTRY_TOKEN", "CARGO_REGISTRIES_COMPANY_TOKEN", "npm_config__auth")
    for name in others:
        monkeypatch.setenv(name, "x")
    found = interpreter.find()
    assert found is not None
    environ = up._machine_environment(NodePaths(tmp_path, tmp_path, IMAGES))
    assert environ[interpreter.VARIABLE] == str(found.executable)
    assert environ["PIP_INDEX_URL"] == "https://packages.example/simple"
    assert environ["npm_config_registry"] == "https://packages.example/npm"
    assert environ["CARGO_SOURCE_COMPANY_REGISTRY"] == "sparse+https://packages.example/cargo/"
    assert not environ.keys() & set(others)
    assert found.prefix in needed_paths(IMAGES)
