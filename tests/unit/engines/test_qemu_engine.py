"""What the QEMU engine says of itself, and how the keeper's refusals reach a caller."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from cloche_server.engines import process
from cloche_server.engines.contract import EngineError, ProcessEnd
from cloche_server.engines.process import host_uid
from cloche_server.engines.qemu import command
from cloche_server.engines.qemu import engine as engine_module
from cloche_server.engines.qemu.engine import QemuEngine, digest_of, kernel_release, version_of
from cloche_server.engines.spec import MIB, SandboxSpec
from cloche_server.keeper.client import Ended, KeeperClient, KeeperGone, KeeperRefused

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


class RefusingKeeper:
    """Answers every boot and attach with one error, and notes what it was told to end."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.asked = 0
        self.killed: list[str] = []

    async def boot(self, spec: SandboxSpec) -> Any:
        raise self.error

    async def attach(self, sandbox: str) -> Any:
        self.asked += 1
        raise self.error

    async def kill(self, sandbox: str) -> Ended:
        self.killed.append(sandbox)
        return Ended(0, None)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], tuple[QemuEngine, RefusingKeeper]]:
    for name, text in {"vmlinux": "k", "initramfs.cpio": "i", "manifest.json": '{"release": "6.1.0-1"}'}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(command, "BINARY", str(tmp_path / "vmlinux"))
    monkeypatch.setattr(engine_module, "read_version", lambda _binary: "7.2.22")
    monkeypatch.setattr(process, "ATTACH_AGAIN_S", 0.0)

    def make(error: Exception) -> tuple[QemuEngine, RefusingKeeper]:
        keeper = RefusingKeeper(error)
        return QemuEngine(tmp_path, lambda: cast(KeeperClient, keeper), weaker=("no-cgroup",)), keeper

    return make


def test_it_is_experimental_and_says_what_it_lacks(
    made: Callable[[Exception], tuple[QemuEngine, RefusingKeeper]],
) -> None:
    engine, _ = made(KeeperGone("gone"))
    assert engine.name == "qemu"
    assert engine.version == "7.2.22 linux-6.1.0-1"
    found = engine.capabilities()
    assert found.experimental
    assert found.pause
    assert not found.checkpoint
    assert not found.export_upper


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeeperRefused("bad_spec", "memory_bytes: too small"), "invalid_request"),
        (KeeperRefused("image_not_found", "x"), "image_not_found"),
        (KeeperRefused("no_slot", "x"), "overloaded"),
        (KeeperRefused("engine_failed", "x"), "create_failed"),
        (KeeperGone("x"), "keeper_failed"),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_a_refused_boot_has_a_public_code(
    made: Callable[[Exception], tuple[QemuEngine, RefusingKeeper]], error: Exception, code: str
) -> None:
    engine, _ = made(error)
    with pytest.raises(EngineError) as caught:
        await engine.boot(SPEC)
    assert caught.value.code == code


@pytest.mark.parametrize("code", ["not_found", "dead", "no_channel", "no_control"])
async def test_what_is_not_alive_is_not_adopted_and_its_rest_is_removed(
    made: Callable[[Exception], tuple[QemuEngine, RefusingKeeper]], code: str
) -> None:
    engine, keeper = made(KeeperRefused(code, "x"))
    assert isinstance(await engine.adopt(SPEC), ProcessEnd)
    assert keeper.killed == [SPEC.id]
    # A monitor that still has its last client is given time.
    assert keeper.asked == (process.ATTACH_TRIES if code == "no_control" else 1)


async def test_a_keeper_in_trouble_is_no_death_of_the_sandbox(
    made: Callable[[Exception], tuple[QemuEngine, RefusingKeeper]],
) -> None:
    engine, keeper = made(KeeperGone("gone"))
    with pytest.raises(EngineError) as caught:
        await engine.adopt(SPEC)
    assert caught.value.code == "keeper_failed"
    assert keeper.killed == []


def test_versions() -> None:
    debian = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)\nCopyright (c) 2003-2022\n"
    assert version_of(debian) == "7.2.22"
    assert version_of("QEMU emulator version 10.0.2") == "10.0.2"
    for text, code in (("QEMU emulator version 6.2.0", "engine_too_old"), ("command not found", "engine_missing")):
        with pytest.raises(EngineError) as caught:
            version_of(text)
        assert caught.value.code == code


@pytest.mark.parametrize("manifest", [None, "", "[]", "{}"])
def test_a_missing_kernel_is_a_missing_engine(tmp_path: Path, manifest: str | None) -> None:
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(EngineError, match="build_microvm") as caught:
        kernel_release(tmp_path)
    assert caught.value.code == "engine_missing"


def test_the_digest_covers_all_that_is_executed(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"1")
    two.write_bytes(b"2")
    digests = [hashlib.sha256(content).hexdigest() for content in (b"1", b"2")]
    assert digest_of(one, two) == hashlib.sha256("\n".join(digests).encode()).hexdigest()
    assert digest_of(one, two) != digest_of(two, one)
    with pytest.raises(EngineError):
        digest_of(one, tmp_path / "three")


def test_the_uid_is_read_back_from_the_process() -> None:
    assert host_uid(os.getpid()) == os.geteuid()
    assert host_uid(2**22) is None
