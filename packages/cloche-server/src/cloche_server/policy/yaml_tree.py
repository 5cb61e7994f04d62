"""A small, strict part of YAML as a tree with line numbers: mappings, lists, texts, numbers, true, false, null.

No anchors, aliases, tags, merge keys or second documents; a key stands once. A plain word is a text unless it is one
of `true`, `false`, `null`, or a decimal number (so `no` is a text and `12:30` is not 750).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import yaml

DEPTH_MAX: Final = 8
NODES_MAX: Final = 20_000

Scalar = str | int | float | bool | None
_INTEGER: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,17})")
_DECIMAL: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,17})\.[0-9]{1,17}")
_WORDS: Final[dict[str, bool | None]] = {"true": True, "false": False, "null": None, "~": None, "": None}


class BadYaml(ValueError):
    """What is wrong, and on which line."""

    def __init__(self, line: int, why: str) -> None:
        super().__init__(why)
        self.line = line
        self.why = why


@dataclass(frozen=True)
class Tree:
    """One value and the line on which it starts. A mapping's keys have lines of their own."""

    line: int
    value: Scalar | dict[str, Tree] | list[Tree]
    key_lines: dict[str, int]


def parse(text: str) -> Tree:
    """The one document of `text`; an empty one is an empty mapping."""
    try:
        events = _checked(yaml.parse(text, Loader=yaml.SafeLoader))
        tree = _document(events)
    except yaml.MarkedYAMLError as raised:
        mark = raised.problem_mark or raised.context_mark
        raise BadYaml(mark.line + 1 if mark else 1, raised.problem or "this is not YAML") from None
    except yaml.YAMLError as raised:
        raise BadYaml(1, str(raised).splitlines()[0]) from None
    return tree


def _checked(events: Iterator[yaml.Event]) -> Iterator[yaml.Event]:
    for count, event in enumerate(events):
        line = _line(event)
        if count > NODES_MAX:
            raise BadYaml(line, f"it has more than {NODES_MAX} parts")
        if isinstance(event, yaml.AliasEvent):
            raise BadYaml(line, "aliases (*) are not taken")
        if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
            raise BadYaml(line, "anchors (&) are not taken")
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag is not None:
            raise BadYaml(line, "tags (!) are not taken")
        yield event


def _document(events: Iterator[yaml.Event]) -> Tree:
    found: Tree | None = None
    for event in events:
        if isinstance(event, yaml.DocumentStartEvent):
            if found is not None:
                raise BadYaml(_line(event), "it has a second document")
            found = _node(next(events), events, 0)
    return found if found is not None and found.value is not None else Tree(1, {}, {})


def _node(event: yaml.Event, events: Iterator[yaml.Event], depth: int) -> Tree:
    line = _line(event)
    if depth > DEPTH_MAX:
        raise BadYaml(line, "it is nested too deeply")
    if isinstance(event, yaml.ScalarEvent):
        return Tree(line, event.value if event.style else _plain(event.value), {})
    if isinstance(event, yaml.SequenceStartEvent):
        items = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            items.append(_node(event, events, depth + 1))
        return Tree(line, items, {})
    return _mapping(line, events, depth)


def _mapping(line: int, events: Iterator[yaml.Event], depth: int) -> Tree:
    table: dict[str, Tree] = {}
    lines: dict[str, int] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        at = _line(event)
        if not isinstance(event, yaml.ScalarEvent):
            raise BadYaml(at, "a key is not a text")
        if event.value in table:
            raise BadYaml(at, f"'{event.value[:80]}' stands here a second time")
        lines[event.value] = at
        table[event.value] = _node(next(events), events, depth + 1)
    return Tree(line, table, lines)


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 1


def _plain(text: str) -> Scalar:
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _DECIMAL.fullmatch(text):
        return float(text)
    return text
