"""Replaces texts in a stream of bytes, wherever the chunks end. Pure.

The result is that of one pass over the whole stream which takes, at each point, the leftmost match and of those the
longest. Bytes are held back only while they could still be the beginning of a match, so a stream of small messages flows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_HEAD: Final = 4
"""How much of a text is looked for first, when the end of a buffer may be its beginning."""


class Replacer:
    """One stream. `feed` what comes, send what it gives; `flush` at the end."""

    def __init__(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        self._new = {old: new for old, new in pairs if old}
        self._olds = sorted(self._new, key=len, reverse=True)
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """What may go on now."""
        buffer = self._held + data if self._held else data
        out, self._held = self._pass(buffer, ended=False)
        return out

    def flush(self) -> bytes:
        """The rest, when nothing more comes."""
        out, self._held = self._pass(self._held, ended=True)
        return out

    def finds(self, text: bytes) -> bool:
        """Whether there is anything to replace."""
        return any(old in text for old in self._olds)

    def whole(self, text: bytes) -> bytes:
        """`text` as a stream of its own."""
        return self._pass(text, ended=True)[0]

    def _pass(self, buffer: bytes, *, ended: bool) -> tuple[bytes, bytes]:
        places = {old: at for old in self._olds if (at := buffer.find(old)) >= 0}
        if not places:
            keep = len(buffer) if ended else self._unsure(buffer, 0)
            return buffer[:keep], buffer[keep:]
        out: list[bytes] = []
        done = 0
        unsure = len(buffer) if ended else self._unsure(buffer, 0)
        while True:
            if unsure < done:
                unsure = self._unsure(buffer, done)
            old = min(places, key=lambda old: (places[old], -len(old)), default=None)
            if old is None or places[old] >= unsure:
                out.append(buffer[done:unsure])
                return b"".join(out), buffer[unsure:]
            out += (buffer[done : places[old]], self._new[old])
            done = places[old] + len(old)
            _move_on(places, buffer, done)

    def _unsure(self, buffer: bytes, start: int) -> int:
        """Where the earliest part begins that runs to the buffer's end and may become a match; else the end."""
        earliest = len(buffer)
        for old in self._olds:
            at = max(start, len(buffer) - len(old) + 1)
            while (at := buffer.find(old[:_HEAD], at, earliest + _HEAD)) >= 0 and at < earliest:
                if old.startswith(buffer[at:]):
                    earliest = at
                    break
                at += 1
            for at in range(max(start, len(buffer) - min(_HEAD, len(old)) + 1), earliest):
                if old.startswith(buffer[at:]):
                    earliest = at
                    break
        return earliest


def _move_on(places: dict[bytes, int], buffer: bytes, done: int) -> None:
    for old, at in list(places.items()):
        if at < done:
            places[old] = buffer.find(old, done)
            if places[old] < 0:
                del places[old]
