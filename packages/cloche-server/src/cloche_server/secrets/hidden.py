"""Bytes that nothing shows by accident: not repr, not a log, not an exception, not a pickle."""

from __future__ import annotations

import hmac
from typing import Final, NoReturn

HIDDEN: Final = "<hidden>"


class Hidden:
    """Holds a copy. `reveal` and `view` are the only ways to it, so that a search finds everybody who looks."""

    __slots__ = ("_held", "_is_wiped")

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._held = bytearray(data)
        self._is_wiped = False

    def reveal(self) -> bytes:
        if self._is_wiped:  # b"" would stand in for a value somewhere
            raise RuntimeError("the value was wiped")
        return bytes(self._held)

    def view(self) -> memoryview:
        """To look at it without another copy; not to be kept."""
        assert not self._is_wiped
        return memoryview(self._held).toreadonly()

    def wipe(self) -> None:
        """Zeroes what is held. Copies that were revealed are the garbage collector's."""
        self._held[:] = bytes(len(self._held))
        self._is_wiped = True

    def __len__(self) -> int:
        return len(self._held)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Hidden)
            and not (self._is_wiped or other._is_wiped)
            and hmac.compare_digest(self._held, other._held)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return HIDDEN

    def __format__(self, _spec: str) -> str:
        return HIDDEN

    def __reduce__(self) -> NoReturn:
        raise TypeError("a hidden value is not pickled")
