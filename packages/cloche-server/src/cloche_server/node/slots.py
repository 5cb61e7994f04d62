"""Which of a sandbox's proxy addresses belongs to which running command, so that an attempt can be joined to it. Pure.

Slot n is one address on guest loopback; each command that runs has its own. What a slot says is the guest's word: a program
can use another one's address. It names, it never decides.
"""

from __future__ import annotations

from typing import Final

SLOT_MAX: Final = 63
FIRST: Final = 1
"""The environment that is bound names this one: a command that runs alone needs no variable of its own."""
NONE: Final = 0
"""More commands run than there are slots."""


class Slots:
    """The lowest free one first."""

    def __init__(self) -> None:
        self._holders: dict[int, str] = {}

    def next(self) -> int:
        for slot in range(FIRST, SLOT_MAX + 1):
            if slot not in self._holders:
                return slot
        return NONE

    def hold(self, slot: int, command: str) -> None:
        if slot != NONE:
            self._holders[slot] = command

    def free(self, slot: int, command: str) -> None:
        if self._holders.get(slot) == command:
            del self._holders[slot]

    def command_of(self, slot: int) -> str | None:
        """Slot 0 tells nothing, unless there is only one command that it can be."""
        if slot == NONE and len(self._holders) == 1:
            return next(iter(self._holders.values()))
        return self._holders.get(slot)
