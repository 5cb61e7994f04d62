"""What is typed goes in; `~.` at the beginning of a line comes back out."""

import pytest

from cloche.cli.terminal import DetachFilter

pytestmark = pytest.mark.req("EXE-2")


def typed(*pieces: bytes) -> tuple[bytes, bool]:
    found = DetachFilter()
    return b"".join(found.feed(piece) for piece in pieces), found.detached


@pytest.mark.parametrize(
    ("pieces", "sent", "detached"),
    [
        ((b"ls\r", b"\x03\x1a\x04"), b"ls\r\x03\x1a\x04", False),
        ((b"a~.b",), b"a~.b", False),
        ((b"x\r~.",), b"x\r", True),
        ((b"~", b"."), b"", True),
        ((b"\r~~.",), b"\r~.", False),
        ((b"\r~", b"x"), b"\r~x", False),
        ((b"~\r~.",), b"~\r", True),
    ],
)
def test_detaching(pieces, sent, detached) -> None:
    assert typed(*pieces) == (sent, detached)
