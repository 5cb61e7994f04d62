"""The form of a log's `index` file: a header, then one entry for each change of the descriptor."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

MAGIC: Final = b"CLOCHE-1"
HEADER: Final = struct.Struct("<8sQQQ")
"""Magic, generation, the bytes freed at the front of `output`, the entries freed at the front of `index`."""
ENTRY: Final = struct.Struct("<QQB7x")
"""Where the run begins in `output`, where it begins in its descriptor's own stream, the descriptor."""


class Run(NamedTuple):
    """One index entry: bytes of one descriptor without a switch."""

    offset: int
    fd_offset: int
    fd: int
