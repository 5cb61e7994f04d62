"""Two steps: `pack.py kernel TREE OUT` (TREE: an unpacked Debian kernel package), `pack.py initramfs KERNEL AGENT OUT`.

Standard library only: it runs in setup, before the environment exists.

QEMU starts an uncompressed `vmlinux` by its PVH entry in a fraction of the time that a compressed kernel takes to
unpack itself under emulation; the initramfs is uncompressed for the same reason. It holds the agent as /init, the
modules that the agent needs to reach its root file system, and /mod/order, their file names in the order to load.
"""

import hashlib
import json
import lzma
import re
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

# What the root file system and the carrier need. crc32c_generic is asked for by name, because libcrc32c (and so
# erofs) wants an implementation that no dependency names.
WANTED = ("virtio_mmio", "virtio_blk", "virtio_console", "overlay", "crc32c_generic", "erofs")
VMLINUX_BYTES_MAX = 256 << 20
SETUP_SECTORS_AT, HEADER_MAGIC_AT, PAYLOAD_AT = 0x1F1, 0x202, 0x248
SECTOR_BYTES = 512


def extract_vmlinux(image: bytes) -> bytes:
    """The ELF file inside a bzImage, found by the boot protocol's header (2.08 or newer)."""
    if image[HEADER_MAGIC_AT : HEADER_MAGIC_AT + 4] != b"HdrS":
        raise SystemExit("not a bzImage: it has no HdrS")
    offset, length = struct.unpack_from("<II", image, PAYLOAD_AT)
    start = ((image[SETUP_SECTORS_AT] or 4) + 1) * SECTOR_BYTES + offset
    unpacked = _unpack(image[start : start + length])
    if unpacked[:4] != b"\x7fELF" or b"Xen\x00" not in unpacked:
        raise SystemExit("the kernel's payload is not an ELF file with a PVH note")
    return unpacked


def _unpack(payload: bytes) -> bytes:
    # The unpacked size follows the stream, hence decompressor objects, which stop where it ends.
    if payload.startswith(b"\xfd7zXZ\x00"):
        return lzma.LZMADecompressor().decompress(payload, VMLINUX_BYTES_MAX)
    if payload.startswith(b"\x1f\x8b\x08"):
        return zlib.decompressobj(wbits=31).decompress(payload, VMLINUX_BYTES_MAX)
    raise SystemExit(f"the kernel is compressed with neither xz nor gzip (it begins with {payload[:6].hex()})")


class Modules:
    """The modules of one kernel, by name as the kernel spells it, with their dependencies."""

    def __init__(self, directory: Path) -> None:
        self._files = {_module_name(path.name): path for path in sorted(directory.rglob("*.ko*"))}
        self._built_in = {_module_name(line) for line in (directory / "modules.builtin").read_text().split()}

    def in_order(self, wanted: tuple[str, ...]) -> list[tuple[str, bytes]]:
        """`wanted` and all that they depend on, each after its dependencies: (file name, bytes)."""
        ordered: dict[str, bytes] = {}
        for name in wanted:
            self._add(name, ordered)
        return [(f"{name}.ko", content) for name, content in ordered.items()]

    def _add(self, name: str, ordered: dict[str, bytes]) -> None:
        if name in ordered or name in self._built_in:
            return
        if name not in self._files:
            raise SystemExit(f"the kernel package has no module {name}")
        path = self._files[name]
        content = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        found = re.search(rb"\x00depends=([a-z0-9_,-]*)\x00", content)
        if found is None:
            raise SystemExit(f"{path.name} does not say what it depends on")
        for dependency in filter(None, found[1].decode().split(",")):
            self._add(_module_name(dependency), ordered)
        ordered[name] = content


def _module_name(path: str) -> str:
    return path.rpartition("/")[2].partition(".ko")[0].replace("-", "_")


def initramfs(agent: bytes, modules: list[tuple[str, bytes]]) -> bytes:
    """A cpio archive in "newc" form, the same bytes for the same input."""
    order = "".join(f"{name}\n" for name, _ in modules).encode()
    files = [(f"mod/{name}", 0o100444, content) for name, content in modules]
    entries = [("init", 0o100555, agent), ("mod", 0o040555, b""), ("mod/order", 0o100444, order), *files]
    return b"".join(_cpio(entries))


def _cpio(entries: list[tuple[str, int, bytes]]) -> Iterator[bytes]:
    for inode, (name, mode, content) in enumerate([*entries, ("TRAILER!!!", 0, b"")], start=1):
        encoded = name.encode() + b"\x00"
        links = 2 if mode & 0o040000 and not mode & 0o100000 else 1
        numbers = (inode, mode, 0, 0, links, 0, len(content), 0, 0, 0, 0, len(encoded), 0)
        head = b"070701" + b"".join(b"%08x" % number for number in numbers) + encoded
        yield head + bytes(-len(head) % 4)
        yield content + bytes(-len(content) % 4)


def unpack_kernel(tree: Path, out: Path) -> None:
    """Keep of a package's tree what a microVM needs: vmlinux, the modules, their order, the release."""
    [image] = tree.glob("boot/vmlinuz-*")
    [directory] = tree.glob("lib/modules/*")
    modules = Modules(directory).in_order(WANTED)
    (out / "vmlinux").write_bytes(extract_vmlinux(image.read_bytes()))
    (out / "mod").mkdir()
    for name, content in modules:
        (out / "mod" / name).write_bytes(content)
    document = {"release": directory.name, "modules": [name for name, _ in modules]}
    (out / "kernel.json").write_text(json.dumps(document, indent=2) + "\n")


def pack_initramfs(kernel: Path, agent: Path, out: Path) -> None:
    """Write initramfs.cpio, and manifest.json over it and the kernel."""
    document = json.loads((kernel / "kernel.json").read_text())
    modules = [(name, (kernel / "mod" / name).read_bytes()) for name in document["modules"]]
    archive = initramfs(agent.read_bytes(), modules)
    (out / "initramfs.cpio").write_bytes(archive)
    document["agent_sha256"] = hashlib.sha256(agent.read_bytes()).hexdigest()
    document["sha256"] = {
        "vmlinux": hashlib.sha256((kernel / "vmlinux").read_bytes()).hexdigest(),
        "initramfs.cpio": hashlib.sha256(archive).hexdigest(),
    }
    (out / "manifest.json").write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    verb, *paths = sys.argv[1:]
    if verb == "kernel":
        unpack_kernel(*map(Path, paths))
    else:
        pack_initramfs(*map(Path, paths))
