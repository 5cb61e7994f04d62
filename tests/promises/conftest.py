"""The nodes that the promises are made by: one for a module, or one of its own for a test that breaks things."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.promises import clean_machines
from tests.promises.clean_machines import CleanMachine
from tests.promises.evil import EvilImages
from tests.promises.nodes import ROOT, RealNode, real_node

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a daemon that compiles itself at each start costs every test a second


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Beside other workers (`-n`), a test marked `alone` runs while they wait, because it measures time."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    directory = ROOT / "build" / "promises"
    directory.mkdir(parents=True, exist_ok=True)
    alone = item.get_closest_marker("alone") is not None
    # Whoever wants to be alone shuts the door first, so that those inside come out and nobody follows them.
    with _locked(directory / "door", fcntl.LOCK_EX) as door, _locked(directory / "room", _how(alone=alone)):
        if not alone:
            fcntl.flock(door, fcntl.LOCK_UN)
        return (yield)


def _how(*, alone: bool) -> int:
    return fcntl.LOCK_EX if alone else fcntl.LOCK_SH


@contextmanager
def _locked(path: Path, how: int) -> Iterator[int]:
    held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(held, how)
        yield held
    finally:
        os.close(held)


@pytest.fixture(scope="module")
def node() -> Iterator[RealNode]:
    """A node shared by the tests of a module; none of them may kill its processes."""
    with real_node() as made:
        yield made


@pytest.fixture
def own_node() -> Iterator[RealNode]:
    """A node for one test, which may do to it what it likes."""
    with real_node() as made:
        yield made


@pytest.fixture(scope="session")
def evil_image() -> Iterator[EvilImages]:
    """`evil_image("reset-silent")` is an image's name; a node over `evil_image.directory` has it."""
    base = Path(tempfile.mkdtemp(prefix="cloche-evil-"))
    base.chmod(0o755)
    try:
        yield EvilImages(base / "images")
    finally:
        shutil.rmtree(base, ignore_errors=True)


@pytest.fixture(scope="module")
def evil_node(evil_image: EvilImages) -> Iterator[RealNode]:
    """A node that has evil images beside the honest one, shared by a module."""
    with real_node(images=evil_image.directory) as made:
        yield made


@pytest.fixture
def own_evil_node(evil_image: EvilImages) -> Iterator[RealNode]:
    with real_node(images=evil_image.directory) as made:
        yield made


@pytest.fixture(scope="session")
def clean_machine() -> Iterator[CleanMachine]:
    """A clean Debian on which `alice` has installed Cloche from wheels; whoever uses it leaves it so."""
    if not clean_machines.is_possible():
        pytest.skip(clean_machines.NO_ROOT)
    with clean_machines.clean_machine() as made:
        yield made
