"""Local trees for tests of files: made from a seed, and compared by what they hold."""

from __future__ import annotations

import os
import random
from pathlib import Path

ODD_NAMES = (
    b"line\nbreak",
    b"tab\there",
    b"\x1b[31mred\x1b[0m",
    b"\x1b]52;c;aGk=\x07",
    "right\u202eto left".encode(),
    "zero\u200bwidth".encode(),
    "漢字 é 🎉".encode(),
    b"not \xff\xfe utf-8",
    b"-rf",
    b"--help",
    b" leading and trailing ",
    b"quote'\"`$(id)",
    b"back\\slash",
    b"percent%2F%00",
    b"dot.",
    b"...",
    b"n" * 255,
)


def make_tree(place: Path, count: int, seed: int) -> None:
    """`count` files, most of them small, some empty or executable, in directories three deep; links; odd names."""
    rng = random.Random(seed)
    for number in range(count):
        folder = place / f"d{number % 17}" / f"e{number % 5}" / f"f{number % 3}"
        if number < 300:
            folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"file-{number}"
        file.write_bytes(rng.randbytes(rng.choice((0, 1, 511, 512, 513, 3000))))
        file.chmod(rng.choice((0o644, 0o600, 0o755)))
    (place / "large").write_bytes(rng.randbytes(3_000_000))
    (place / "empty-directory").mkdir()
    (place / "link").symlink_to("d1/e1/f1/file-1")
    (place / "link-to-directory").symlink_to("d1")
    os.mkdir(os.fsencode(place) + b"/odd")
    for number, name in enumerate(ODD_NAMES):
        with open(os.fsencode(place) + b"/odd/" + name, "wb") as file:
            file.write(b"%d" % number)


def tree_of(place: Path) -> dict[bytes, tuple[str, int, bytes]]:
    """Each name below: what it is, its mode, and its content or target."""
    found: dict[bytes, tuple[str, int, bytes]] = {}
    root = os.fsencode(place)
    for folder, directories, files in os.walk(root):
        for name in (*directories, *files):
            path = os.path.join(folder, name)
            status = os.lstat(path)
            key = os.path.relpath(path, root)
            if os.path.islink(path):
                found[key] = ("link", 0, os.readlink(path))
            elif name in directories:
                found[key] = ("directory", status.st_mode & 0o777, b"")
            else:
                with open(path, "rb") as file:
                    found[key] = ("file", status.st_mode & 0o777, file.read())
    return found
