"""The engine that `just setup` built is the one we pinned and measured."""

import hashlib
import os
import subprocess
from pathlib import Path

import cloche_engine


def test_runsc_says_the_pinned_release() -> None:
    argv = [str(cloche_engine.runsc_path()), "--version"]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[0] == f"runsc version {cloche_engine.manifest().version}"


def test_every_file_has_the_recorded_digest() -> None:
    folder = cloche_engine.runsc_path().parent
    for name, digest in cloche_engine.manifest().sha256.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name


def test_the_prewarmer_becomes_what_it_is_told() -> None:
    prewarmer = str(cloche_engine.sidecar_dir() / "gvisor-sentry-prewarmer")
    script = "echo $0 $1; ls -l /proc/self/fd | wc -l"
    argv = [prewarmer, "/bin/sh", "renamed", "-c", script, "zero", "one"]
    ran = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[0] == "zero one"


def test_the_prewarmer_works_without_stdin() -> None:
    """runsc may start it with descriptor 0 closed; the descriptor table must still grow."""
    prewarmer = str(cloche_engine.sidecar_dir() / "gvisor-sentry-prewarmer")
    argv = ["/bin/sh", "-c", f"exec {prewarmer} /bin/cat cat /proc/self/status 0<&-"]
    status = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert "FDSize:\t256" in status


def test_the_prewarmer_refuses_to_guess() -> None:
    prewarmer = str(cloche_engine.sidecar_dir() / "gvisor-sentry-prewarmer")
    assert subprocess.run([prewarmer], check=False).returncode == 2
    assert subprocess.run([prewarmer, "/nowhere", "x"], check=False).returncode == 127


def test_runsc_can_be_reached_by_the_sandbox_user() -> None:
    """The sentry is another uid: it must be able to enter the directory and execute."""
    mode = Path(cloche_engine.runsc_path()).stat().st_mode
    assert mode & 0o005 == 0o005
    assert os.access(cloche_engine.sidecar_dir(), os.X_OK)
