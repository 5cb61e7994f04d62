"""Vectored writes that are whole or raise, and holes at the front of a file. Nothing here knows what a log is."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Final

_FALLOCATE: Final = ctypes.CDLL(None, use_errno=True).fallocate
_FALLOCATE.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)
_PUNCH_HOLE: Final = 0x01 | 0x02  # KEEP_SIZE | PUNCH_HOLE


def cut(buffers: Sequence[bytes | memoryview], size: int) -> list[memoryview]:
    kept: list[memoryview] = []
    for each in buffers:
        if size <= 0:
            break
        kept.append(memoryview(each)[:size])
        size -= len(kept[-1])
    return kept


def write_all(fd: int, buffers: Sequence[bytes | memoryview]) -> None:
    written = os.writev(fd, buffers)
    total = sum(map(len, buffers))
    while written < total:  # a signal, or a disk that is nearly full: the next call says which
        rest = skip(buffers, written)
        count = os.writev(fd, rest)
        written += count


def skip(buffers: Sequence[bytes | memoryview], size: int) -> list[memoryview]:
    rest: list[memoryview] = []
    for each in buffers:
        view = memoryview(each)[size:]
        size = max(0, size - len(each))
        if len(view):
            rest.append(view)
    return rest


def punch(fd: int, start: int, size: int) -> None:
    if size and _FALLOCATE(fd, _PUNCH_HOLE, start, size):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
