"""The build step of the microVM's kernel and initramfs, on a kernel package in miniature."""

import lzma
import struct
from pathlib import Path

import pytest

from tools.microvm import pack

ELF = b"\x7fELF" + b"\x04\x00\x00\x00Xen\x00" + b"kernel" * 1000


def bzimage(payload: bytes, sectors: int = 3) -> bytes:
    head = bytearray((sectors + 1) * 512)
    head[0x1F1] = sectors
    head[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", head, 0x248, 100, len(payload))
    return bytes(head) + b"\xcc" * 100 + payload + b"the rest of the image"


def test_vmlinux_is_found_by_the_header_and_the_size_after_it_is_no_part_of_it() -> None:
    packed = lzma.compress(ELF, check=lzma.CHECK_CRC32) + struct.pack("<I", len(ELF))
    assert pack.extract_vmlinux(bzimage(packed)) == ELF


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (b"\x00" * 4096, "HdrS"),
        (bzimage(b"\x28\xb5\x2f\xfd" + b"x" * 100), "neither xz nor gzip"),
        (bzimage(lzma.compress(b"not a kernel")), "not an ELF file"),
    ],
)
def test_what_is_no_such_kernel_is_named(image: bytes, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        pack.extract_vmlinux(image)


@pytest.fixture
def modules(tmp_path: Path) -> pack.Modules:
    needs = {"virtio-ring": "", "virtio_mmio": "virtio-ring,virtio", "virtio": "", "erofs": "libcrc32c", "lost": "gone"}
    (tmp_path / "kernel").mkdir()
    for name, depends in needs.items():
        (tmp_path / "kernel" / f"{name}.ko").write_bytes(f"\x7fELF\x00depends={depends}\x00name={name}\x00".encode())
    (tmp_path / "kernel" / "mute.ko").write_bytes(b"\x7fELF")
    (tmp_path / "modules.builtin").write_text("kernel/lib/libcrc32c.ko\n")
    return pack.Modules(tmp_path)


def test_a_module_comes_after_what_it_depends_on_and_what_is_built_in_not_at_all(modules: pack.Modules) -> None:
    names = [name for name, _ in modules.in_order(("virtio_mmio", "erofs", "virtio"))]
    assert names == ["virtio_ring.ko", "virtio.ko", "virtio_mmio.ko", "erofs.ko"]


@pytest.mark.parametrize(("name", "message"), [("lost", "no module gone"), ("mute", "does not say")])
def test_a_missing_module_ends_the_build(modules: pack.Modules, name: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        modules.in_order((name,))


def read_cpio(data: bytes) -> dict[str, tuple[int, bytes]]:
    """An independent reader of the "newc" form."""
    found: dict[str, tuple[int, bytes]] = {}
    at = 0
    while True:
        assert data[at : at + 6] == b"070701"
        fields = [int(data[at + 6 + 8 * n : at + 14 + 8 * n], 16) for n in range(13)]
        mode, size, name_size = fields[1], fields[6], fields[11]
        name = data[at + 110 : at + 110 + name_size - 1].decode()
        start = (at + 110 + name_size + 3) & ~3
        if name == "TRAILER!!!":
            return found
        found[name] = (mode, data[start : start + size])
        at = (start + size + 3) & ~3


def test_the_initramfs_has_the_agent_as_init_and_the_order_to_load() -> None:
    archive = pack.initramfs(b"agent", [("b.ko", b"123"), ("a.ko", b"1234")])
    assert read_cpio(archive) == {
        "init": (0o100555, b"agent"),
        "mod": (0o040555, b""),
        "mod/order": (0o100444, b"b.ko\na.ko\n"),
        "mod/b.ko": (0o100444, b"123"),
        "mod/a.ko": (0o100444, b"1234"),
    }
    assert archive == pack.initramfs(b"agent", [("b.ko", b"123"), ("a.ko", b"1234")])
    assert len(archive) % 4 == 0
