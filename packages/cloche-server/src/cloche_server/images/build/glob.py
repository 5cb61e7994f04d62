"""Patterns of names, matched in time linear in the name, whatever the pattern. Pure.

All patterns of one file become one automaton, whose states are worked out when first met. (Python's `re` can take exponential time
for a pattern that somebody chose; Go's cannot, and both Go's `filepath.Match` and `.dockerignore` are defined by it.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

STATES_KEPT_MAX: Final = 4096
TOKENS_MAX: Final = 20_000

CHAR, ANY, STAR, SET, DIRS, ALL = range(6)
"""One character; one but `/`; any run without `/`; a class; `(.*/)?`; anything."""


class BadPattern(Exception):
    """Not a pattern."""


@dataclass(frozen=True)
class Token:
    """One part of a pattern."""

    kind: int
    char: str = ""
    ranges: tuple[tuple[str, str], ...] = ()
    negated: bool = False

    def takes(self, char: str) -> bool:
        if self.kind == CHAR:
            return char == self.char
        if self.kind == SET:
            return any(low <= char <= high for low, high in self.ranges) != self.negated
        return self.kind == ANY and char != "/"


def match_tokens(pattern: str) -> list[Token]:
    """Go's `filepath.Match`."""
    found: list[Token] = []
    at = 0
    while at < len(pattern):
        char = pattern[at]
        at += 1
        if char == "*":
            if not found or found[-1].kind != STAR:
                found.append(Token(STAR))
        elif char == "?":
            found.append(Token(ANY))
        elif char == "[":
            token, at = character_class(pattern, at)
            found.append(token)
        elif char == "\\":
            if at == len(pattern):
                raise BadPattern(pattern)
            found.append(Token(CHAR, pattern[at]))
            at += 1
        else:
            found.append(Token(CHAR, char))
    return found


def character_class(pattern: str, at: int) -> tuple[Token, int]:
    """From behind the `[` to behind the `]`."""
    negated = pattern[at : at + 1] == "^"
    at += negated
    ranges: list[tuple[str, str]] = []
    while True:
        if pattern[at : at + 1] == "]" and ranges:
            return Token(SET, ranges=tuple(ranges), negated=negated), at + 1
        low, at = _member(pattern, at)
        high = low
        if pattern[at : at + 1] == "-":
            high, at = _member(pattern, at + 1)
        ranges.append((low, high))


def _member(pattern: str, at: int) -> tuple[str, int]:
    char = pattern[at : at + 1]
    if char in ("", "-", "]"):
        raise BadPattern(pattern)
    if char == "\\":
        at += 1
        char = pattern[at : at + 1]
    if not char or at + 1 >= len(pattern):
        raise BadPattern(pattern)
    return char, at + 1


@dataclass
class State:
    """A set of places in the patterns, and which patterns end here."""

    places: frozenset[tuple[int, int]]
    matched: frozenset[int]
    moves: dict[str, State] = field(default_factory=dict)


class Automaton:
    """Several patterns at once. A place is (pattern, twice the token's index, plus one when inside a `DIRS`)."""

    def __init__(self, patterns: Sequence[Sequence[Token]]) -> None:
        if sum(len(each) + 1 for each in patterns) > TOKENS_MAX:
            raise BadPattern(f"more than {TOKENS_MAX} characters of patterns")
        self._patterns = [list(each) for each in patterns]
        self._known: dict[frozenset[tuple[int, int]], State] = {}
        self.start = self._state({(index, 0) for index in range(len(patterns))})

    def matched(self, name: str) -> frozenset[int]:
        return self.after(self.start, name).matched

    def after(self, state: State, text: str) -> State:
        for char in text:
            following = state.moves.get(char)
            if following is None:
                following = self._step(state, char)
                if len(state.moves) < STATES_KEPT_MAX:
                    state.moves[char] = following
            state = following
        return state

    def _step(self, state: State, char: str) -> State:
        places: set[tuple[int, int]] = set()
        for pattern, place in state.places:
            tokens = self._patterns[pattern]
            index, inside = divmod(place, 2)
            if index == len(tokens):
                continue
            token = tokens[index]
            if token.kind == DIRS:
                places.add((pattern, 2 * index + 1))
                if char == "/":
                    places.add((pattern, 2 * index + 2))
            elif token.kind == ALL or (token.kind == STAR and char != "/"):
                places.add((pattern, place - inside))
            elif token.takes(char):
                places.add((pattern, 2 * index + 2))
        return self._state(places)

    def _state(self, places: set[tuple[int, int]]) -> State:
        todo = list(places)
        while todo:
            pattern, place = todo.pop()
            tokens = self._patterns[pattern]
            index, inside = divmod(place, 2)
            may_be_nothing = index < len(tokens) and not inside and tokens[index].kind in (STAR, DIRS, ALL)
            if may_be_nothing and (further := (pattern, 2 * index + 2)) not in places:
                places.add(further)
                todo.append(further)
        key = frozenset(places)
        known = self._known.get(key)
        if known is None:
            ended = frozenset(p for p, place in key if place == 2 * len(self._patterns[p]))
            known = State(key, ended)
            if len(self._known) >= STATES_KEPT_MAX:
                # Moves of states that are still referred to stay right; they are only worked out again.
                self._known.clear()
            self._known[key] = known
        return known
