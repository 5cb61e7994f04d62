import json
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import cloche_engine
from cloche_engine import binaries

NOBODY = 65534


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package directory as a wheel leaves it: files and no link."""
    bin_dir = tmp_path / "install" / "bin"
    (bin_dir / "gvisor-bin").mkdir(parents=True)
    (bin_dir / "runsc").write_bytes(b"engine")
    (bin_dir / "gvisor-bin" / "gvisor-sentry-prewarmer").write_bytes(b"prewarmer")
    (bin_dir / "cloche-guest-x86_64").write_bytes(b"agent")
    document = {"version": "release-1", "sha256": {"runsc": "ab" * 32}}
    (bin_dir / "manifest.json").write_text(json.dumps(document))
    monkeypatch.setattr(binaries, "_BIN", bin_dir)
    monkeypatch.setenv("CLOCHE_ENGINE_CACHE", str(tmp_path / "cache"))
    binaries._prepared.cache_clear()
    binaries.manifest.cache_clear()
    return bin_dir


@pytest.fixture(autouse=True)
def _forget() -> object:
    yield
    binaries._prepared.cache_clear()
    binaries.manifest.cache_clear()


def test_the_sentry_is_a_link_to_runsc(install: Path) -> None:
    sentry = cloche_engine.sidecar_dir() / "gvisor_sentry"
    assert sentry.is_symlink()
    assert sentry.samefile(cloche_engine.runsc_path())
    assert cloche_engine.runsc_path().parent == install


def test_many_first_users_at_once_leave_one_link_and_nothing_else(install: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: binaries._link(install), range(200)))
    left = sorted(path.name for path in (install / "gvisor-bin").iterdir())
    assert left == ["gvisor-sentry-prewarmer", "gvisor_sentry"]


def test_an_installation_that_cannot_be_written_is_copied(install: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(directory: Path, made: object = binaries._link) -> None:
        if directory == install:
            raise PermissionError(13, "Permission denied")
        made(directory)

    monkeypatch.setattr(binaries, "_link", refuse)
    runsc = cloche_engine.runsc_path()
    assert runsc.parent.parent == Path(os.environ["CLOCHE_ENGINE_CACHE"])
    assert runsc.read_bytes() == b"engine"
    assert (cloche_engine.sidecar_dir() / "gvisor_sentry").samefile(runsc)
    binaries._prepared.cache_clear()
    assert cloche_engine.runsc_path() == runsc, "the second process finds the first one's copy"


def test_a_cache_that_others_can_write_is_refused(install: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Path(os.environ["CLOCHE_ENGINE_CACHE"])
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setattr(binaries, "_link", _denied)
    with pytest.raises(cloche_engine.EngineUnwritable, match="CLOCHE_ENGINE_CACHE"):
        cloche_engine.runsc_path()


def _denied(directory: Path) -> None:
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize(
    ("gone", "ask"),
    [
        ("runsc", cloche_engine.runsc_path),
        ("gvisor-bin/gvisor-sentry-prewarmer", cloche_engine.sidecar_dir),
        ("cloche-guest-x86_64", lambda: cloche_engine.agent_path("x86_64")),
        ("manifest.json", cloche_engine.manifest),
    ],
)
def test_what_is_missing_is_said_with_the_fix(install: Path, gone: str, ask: object) -> None:
    (install / gone).unlink()
    with pytest.raises(cloche_engine.EngineMissing, match="just setup") as caught:
        ask()
    assert caught.value.path.name == Path(gone).name


SYSTEM_PYTHON = Path("/usr/bin/python3.11")


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which only root can")
@pytest.mark.skipif(not SYSTEM_PYTHON.exists(), reason="needs a Python that every user can run")
def test_another_user_really_gets_a_copy(tmp_path: Path) -> None:
    """No patching: root's installation, used by a user who cannot write to it."""
    shutil.copytree(Path(binaries.__file__).parent, tmp_path / "cloche_engine", symlinks=True)
    link = tmp_path / "cloche_engine" / "bin" / "gvisor-bin" / "gvisor_sentry"
    link.unlink(missing_ok=True)
    cache = tmp_path / "cache"
    cache.mkdir()
    os.chown(cache, NOBODY, NOBODY)
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.stat().st_uid == os.geteuid() and folder.name.startswith(("pytest-", "popen-")):
            folder.chmod(0o755)
    tmp_path.chmod(0o755)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import cloche_engine as e; "
    code += "print(e.runsc_path())"
    ran = subprocess.run(
        [SYSTEM_PYTHON, "-S", "-c", code],
        env={"CLOCHE_ENGINE_CACHE": str(cache), "PYTHONDONTWRITEBYTECODE": "1"},
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        umask=0o077,  # as a daemon has it
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    runsc = Path(ran.stdout.strip())
    assert runsc.is_relative_to(cache)
    assert not link.exists()
    for directory in (runsc.parent, runsc.parent / "gvisor-bin"):
        assert directory.stat().st_mode & 0o777 == 0o755, "sandboxes have other ids, and execute it from there"
