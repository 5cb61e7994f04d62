"""Values of the organisation's file by their type; an error names the file and the line."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final

from cloche.wire.errors import ClocheError, error
from cloche_server.policy.rules import shown
from cloche_server.policy.yaml_tree import BadYaml, Tree, parse

BYTES_MAX: Final = 1024 * 1024
ENTRIES_MAX: Final = 1000


def read_document(path: Path) -> tuple[str, Table] | None:
    """The text of a file and its mapping; None if there is no such file. One that cannot be read is an error."""
    try:
        with path.open("rb") as file:
            data = file.read(BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    except OSError as raised:
        raise bad_file(path, None, f"it cannot be read: {raised.strerror}") from None
    if len(data) > BYTES_MAX:
        raise bad_file(path, None, f"it has more than {BYTES_MAX} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise bad_file(path, None, "it is not UTF-8") from None
    try:
        return text, Table(path, parse(text), "the file")
    except BadYaml as bad:
        raise bad_file(path, bad.line, shown(bad.why).strip("'")) from None


def bad_file(path: Path, line: int | None, why: str) -> ClocheError:
    place = f"{path}:{line}" if line else str(path)
    return error(
        "policy_invalid",
        f"{place}: {why.rstrip('.')}.",
        detail={"file": str(path), "line": line},
        fix=f"Correct {place}.",
    )


class Entry:
    """One item of a list."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.line = tree.line

    def plain(self) -> object:
        return _plain(self._tree)


class Table:
    """A mapping of the file."""

    def __init__(self, path: Path, tree: Tree | None, name: str) -> None:
        self.path = path
        self._name = name
        self._own_line = 1 if tree is None else tree.line
        self._lines = {} if tree is None else tree.key_lines
        value = {} if tree is None else tree.value
        if not isinstance(value, dict):
            raise bad_file(path, self._own_line, f"{name} is not a mapping")
        self._table = value

    def names(self) -> list[str]:
        return list(self._table)

    def has(self, key: str) -> bool:
        return key in self._table

    def line(self, key: str) -> int:
        return self._lines.get(key, self._own_line)

    def only(self, known: Collection[str]) -> None:
        for key in self._table:
            if key not in known:
                raise self.wrong(self.line(key), f"{shown(key)} is not known; here can be: {', '.join(sorted(known))}")

    def bad(self, key: str, why: str) -> ClocheError:
        return self.wrong(self.line(key), f"`{key}` {why}")

    def wrong(self, line: int, why: str) -> ClocheError:
        return bad_file(self.path, line, why)

    def table(self, key: str) -> Table:
        return Table(self.path, self._table.get(key), f"`{key}`")

    def text(self, key: str) -> str:
        value = self._value(key)
        if not isinstance(value, str):
            raise self.bad(key, "is not a text")
        return value

    def file(self, key: str) -> Path | None:
        """Relative to the file that names it."""
        return self.path.parent / self.text(key) if self.has(key) else None

    def one_of(self, key: str, words: tuple[str, ...]) -> Any:
        """One of `words`; the first when nothing is said."""
        value = self._value(key) if self.has(key) else words[0]
        if value not in words:
            raise self.bad(key, f"is not one of: {', '.join(words)}")
        return value

    def number(
        self, key: str, default: float, *, above: float | None = None, most: float | None = None, whole: bool = False
    ) -> float:
        value = self._value(key) if self.has(key) else default
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise self.bad(key, "is not a whole number" if whole else "is not a number")
        if (above is not None and value <= above) or (most is not None and value > most):
            raise self.bad(key, f"is not above {above} and at most {most}")
        return value

    def entries(self, key: str) -> Iterator[Entry]:
        value = self._value(key) if self.has(key) else []
        if not isinstance(value, list):
            raise self.bad(key, "is not a list")
        if len(value) > ENTRIES_MAX:
            raise self.bad(key, f"has more than {ENTRIES_MAX} entries")
        yield from map(Entry, value)

    def texts(self, key: str) -> Iterator[tuple[int, str]]:
        for entry in self.entries(key):
            text = entry.plain()
            if not isinstance(text, str):
                raise self.wrong(entry.line, f"`{key}` is not a list of texts")
            yield entry.line, text

    def _value(self, key: str) -> object:
        tree = self._table.get(key)
        return None if tree is None else tree.value


def _plain(tree: Tree) -> object:
    if isinstance(tree.value, dict):
        return {key: _plain(each) for key, each in tree.value.items()}
    if isinstance(tree.value, list):
        return [_plain(each) for each in tree.value]
    return tree.value
