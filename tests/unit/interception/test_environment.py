"""The interceptor's packages: made once, whole, readable for everybody, or a reason and a fix."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
import subprocess
import zipfile
from pathlib import Path

import pytest

from cloche.wire.errors import ClocheError
from cloche_server.egress.interception import interpreter
from cloche_server.egress.interception.environment import MAKING, Environment, name_of

pytestmark = [pytest.mark.req("NET-9"), pytest.mark.timeout(180)]
FOUND = interpreter.find()
needs_python = pytest.mark.skipif(FOUND is None, reason="no Python that the interceptor can run with")


def wheel(directory: Path) -> str:
    """A package of one module; its line of the lock."""
    path = directory / "onething-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("onething.py", "ANSWER = 42\n")
        archive.writestr("onething-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: onething\nVersion: 1.0\n")
        archive.writestr(
            "onething-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(
            "onething-1.0.dist-info/RECORD",
            "onething.py,,\nonething-1.0.dist-info/METADATA,,\nonething-1.0.dist-info/WHEEL,,\nonething-1.0.dist-info/RECORD,,\n",
        )
    return f"onething==1.0 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    index = tmp_path / "index"
    index.mkdir()
    file = tmp_path / "requirements.lock"
    file.write_text(wheel(index))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return file


@needs_python
async def test_made_once_for_all_who_ask_and_open_to_everybody(tmp_path: Path, lock: Path) -> None:
    assert FOUND is not None
    lines: list[str] = []
    directory = tmp_path / "state" / "interceptor"
    old = os.umask(0o077)
    try:
        environment = Environment(directory, FOUND, lock=lock)
        assert not environment.is_ready
        names = await asyncio.gather(environment.ready(lines.append), environment.ready(), environment.ready())
    finally:
        os.umask(old)
    assert set(names) == {name_of(FOUND.version, lock)}
    assert environment.is_ready
    assert sum("Making" in line for line in lines) == 1
    assert any("onething" in line for line in lines)
    assert [path.name for path in directory.iterdir()] == [names[0]]
    site = directory / names[0] / "lib" / f"python{FOUND.version}" / "site-packages"
    for path in (directory, directory / names[0], site, site / "onething.py"):
        assert path.stat().st_mode & stat.S_IROTH
    assert list(site.glob("__pycache__/onething.*.pyc")), "compiled: its process cannot write"
    argv = [
        FOUND.executable,
        "-I",
        "-S",
        "-B",
        "-c",
        "import sys; sys.path.append(sys.argv[1]); import onething; print(onething.ANSWER)",
    ]
    assert subprocess.run([*map(str, argv), str(site)], capture_output=True, check=True).stdout == b"42\n"
    before = (directory / names[0]).stat().st_ino
    assert await Environment(directory, FOUND, lock=lock).ready() == names[0]
    assert (directory / names[0]).stat().st_ino == before


@needs_python
async def test_another_hash_is_refused_and_nothing_is_left(tmp_path: Path, lock: Path) -> None:
    lock.write_text("onething==1.0 --hash=sha256:" + "0" * 64 + "\n")
    directory = tmp_path / "interceptor"
    (directory / f"{MAKING}left").mkdir(parents=True)
    environment = Environment(directory, FOUND, lock=lock)
    with pytest.raises(ClocheError) as caught:
        await environment.ready()
    assert caught.value.code == "interceptor_missing"
    assert "HASHES" in caught.value.message.upper()
    assert "pip" in caught.value.fix
    assert list(directory.iterdir()) == []
    lock.write_text(wheel(tmp_path / "index"))
    assert await environment.ready()


@needs_python
async def test_given_up_when_the_daemon_stops(tmp_path: Path, lock: Path) -> None:
    environment = Environment(tmp_path / "interceptor", FOUND, lock=lock)
    begun = asyncio.Event()
    asking = asyncio.create_task(environment.ready(lambda _: begun.set()))
    await begun.wait()
    await environment.close()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert list((tmp_path / "interceptor").iterdir()) == []


async def test_an_interpreter_without_venv_is_said(tmp_path: Path, lock: Path) -> None:
    prefix = tmp_path / "python"
    program = python(prefix, "3.13")
    program.write_text(
        "#!/bin/sh\necho 'The virtual environment was not created: ensurepip is not available'\nexit 1\n"
    )
    program.chmod(0o755)
    environment = Environment(tmp_path / "interceptor", interpreter.Interpreter(prefix, "3.13"), lock=lock)
    with pytest.raises(ClocheError, match="ensurepip is not available") as caught:
        await environment.ready()
    assert caught.value.code == "interceptor_missing"


# ---------------------------------------------------------------------------- which Python


def python(prefix: Path, version: str, *, program: bytes = b"\x7fELF", library: bool = True) -> Path:
    (prefix / "bin").mkdir(parents=True)
    if library:
        (prefix / "lib" / f"python{version}").mkdir(parents=True)
        (prefix / "lib" / f"python{version}" / "os.py").touch()
    path = prefix / "bin" / f"python{version}"
    path.write_bytes(program)
    return path


def find(tmp_path: Path, **environ: str) -> interpreter.Interpreter | None:
    environ = {"PATH": str(tmp_path / "nowhere"), **environ}
    return interpreter.find(environ, home=tmp_path / "home", versions=("3.99", "3.98"))


def test_the_best_version_that_is_there(tmp_path: Path) -> None:
    assert find(tmp_path) is None
    worse = python(tmp_path / "usr", "3.98")
    assert find(tmp_path, PATH=str(worse.parent)) == interpreter.Interpreter(tmp_path / "usr", "3.98")
    python(tmp_path / "home" / ".pyenv" / "versions" / "3.99.1", "3.99")
    found = find(tmp_path, PATH=str(worse.parent))
    assert found == interpreter.Interpreter(tmp_path / "home" / ".pyenv" / "versions" / "3.99.1", "3.99")


def test_by_a_link_it_is_where_the_link_leads(tmp_path: Path) -> None:
    real = python(tmp_path / "opt", "3.99")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3.99").symlink_to(real)
    assert find(tmp_path, PATH=str(tmp_path / "bin")) == interpreter.Interpreter(tmp_path / "opt", "3.99")


@pytest.mark.parametrize("how", [{"program": b"#!/bin/sh"}, {"library": False}])
def test_a_wrapper_is_no_interpreter(tmp_path: Path, how: dict[str, object]) -> None:
    shim = python(tmp_path / "shims", "3.99", **how)  # type: ignore[arg-type]
    assert find(tmp_path, PATH=str(shim.parent)) is None


def test_the_named_one_or_none(tmp_path: Path) -> None:
    path = python(tmp_path / "usr", "3.99")
    named = python(tmp_path / "other", "3.98")
    found = find(tmp_path, PATH=str(path.parent), CLOCHE_INTERCEPTOR_PYTHON=str(named))
    assert found == interpreter.Interpreter(tmp_path / "other", "3.98")
    assert find(tmp_path, PATH=str(path.parent), CLOCHE_INTERCEPTOR_PYTHON="/nonexistent") is None


async def test_an_interpreter_that_is_closed_to_others_is_said_with_the_fix(tmp_path: Path, lock: Path) -> None:
    python(tmp_path / "usr", "3.13").chmod(0o755)
    found = interpreter.Interpreter(tmp_path / "usr", "3.13")
    assert interpreter.closed_to_others(found) is None
    (tmp_path / "usr" / "lib" / "python3.13").chmod(0o700)
    with pytest.raises(ClocheError, match="closed to other users") as caught:
        await Environment(tmp_path / "interceptor", found, lock=lock).ready()
    assert caught.value.code == "interceptor_missing"
    assert f"chmod -R o+rX {tmp_path / 'usr'}" in caught.value.fix


def test_the_tested_versions_are_data() -> None:
    versions = interpreter.versions_tested()
    assert versions
    assert all(version.startswith("3.") for version in versions)
