"""A tree to copy from: the build's context, another stage, an image, an archive. Entries of an index over one plain tar file.

Every name and link is a stranger's. Nothing here touches a path of the host: links are followed within the tree, by name.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from cloche_server.images.build.glob import Automaton, match_tokens
from cloche_server.images.build.protocols import Indexed

LINKS_MAX: Final = 40
_META: Final = frozenset("*?[\\")


@dataclass(frozen=True)
class Node:
    """One name. `fd` and `offset` say where a file's bytes are; `data` holds those of a heredoc."""

    path: str
    type: str
    mode: int
    uid: int
    gid: int
    mtime: float
    size: int = 0
    link: str | None = None
    sha256: str | None = None
    fd: int = -1
    offset: int = 0
    data: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Match:
    """What a source named: the name it keeps, and what is there (behind links)."""

    name: str
    node: Node


class Tree:
    """Names below one root."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._nodes: dict[str, Node] = {"": Node("", "dir", 0o755, 0, 0, 0)}
        self._names: dict[str, set[str]] = {"": set()}
        for node in nodes:
            self._add(node)

    @classmethod
    def of(
        cls, entries: Sequence[Indexed], fd: int, *, keep: Iterable[str] | None = None, is_context: bool = False
    ) -> Tree:
        """From an index. A hard link becomes the file it names; devices are left out; a context is all root's."""
        kept = None if keep is None else set(keep)
        files: dict[str, Node] = {}
        nodes: list[Node] = []
        for entry in entries:
            path = entry.path.strip("/")
            if path in ("", "."):
                continue
            node = Node(
                path,
                entry.type,
                entry.mode & 0o7777,
                0 if is_context else entry.uid,
                0 if is_context else entry.gid,
                entry.mtime,
                entry.size,
                entry.link,
                entry.sha256,
                fd,
                entry.offset,
            )
            if entry.type == "hardlink":
                original = files.get((entry.link or "").strip("/"))
                if original is None:
                    continue
                node = Node(path, *_same(original))
            if node.type == "file":
                files[path] = node
            if node.type in ("file", "dir", "symlink", "fifo") and (kept is None or path in kept):
                nodes.append(node)
        return cls(nodes)

    def _add(self, node: Node) -> None:
        before = self._nodes.get(node.path)
        if before is not None and before.type == "dir" and node.type != "dir":
            self._forget(node.path)
        self._nodes[node.path] = node
        if node.type == "dir":
            self._names.setdefault(node.path, set())
        path = node.path
        while path:
            parent, _, name = path.rpartition("/")
            self._names.setdefault(parent, set()).add(name)
            if parent in self._nodes and self._nodes[parent].type == "dir":
                break
            self._nodes[parent] = Node(parent, "dir", 0o755, 0, 0, 0)
            path = parent

    def _forget(self, path: str) -> None:
        for name in self._names.pop(path, set()):
            child = f"{path}/{name}"
            self._forget(child)
            self._nodes.pop(child, None)

    def __contains__(self, path: str) -> bool:
        return path in self._nodes

    @property
    def paths(self) -> list[str]:
        """Parents first."""
        return sorted(path for path in self._nodes if path)

    def get(self, path: str) -> Node | None:
        return self._nodes.get(path)

    def names(self, path: str) -> list[str]:
        return sorted(self._names.get(path, ()))

    def resolve(self, path: str) -> Node | None:
        """What is at a path, all links followed and never out of the tree. None: nothing."""
        todo = [part for part in path.split("/") if part and part != "."][::-1]
        at = ""
        links = 0
        while todo:
            part = todo.pop()
            if part == "..":
                at = posixpath.dirname(at)
                continue
            if self._nodes[at].type != "dir":
                return None
            node = self._nodes.get(f"{at}/{part}" if at else part)
            if node is None:
                return None
            if node.type == "symlink":
                links += 1
                if links > LINKS_MAX:
                    return None
                target = node.link or ""
                if target.startswith("/"):
                    at = ""
                todo += [each for each in target.split("/") if each and each != "."][::-1]
                continue
            at = node.path
        return self._nodes.get(at)

    def match(self, source: str, *, follow: bool = True) -> list[Match]:
        """Go's `filepath.Match` part by part; links are followed on the way, and at the end too unless told. BadPattern."""
        clean = posixpath.normpath("/" + source).lstrip("/")
        found = [""]
        for part in [part for part in clean.split("/") if part]:
            found = [name for at in found for name in self._matching(at, part)]
        matches = []
        for name in found:
            node = self.resolve(name) if follow else self._nodes.get(name)
            if node is not None:
                matches.append(Match(name, node))
        return matches

    def _matching(self, at: str, part: str) -> list[str]:
        prefix = f"{at}/" if at else ""
        folder = self.resolve(at)
        if folder is None or folder.type != "dir":
            return []
        if not has_wildcard(part):
            return [prefix + part] if part in self._names[folder.path] else []
        automaton = Automaton([match_tokens(part)])
        return [prefix + name for name in self.names(folder.path) if automaton.matched(name)]

    def below(self, path: str) -> Iterator[Node]:
        """Everything in a directory, parents first, names in order. Links are themselves."""
        for name in self.names(path):
            node = self._nodes[f"{path}/{name}" if path else name]
            yield node
            if node.type == "dir":
                yield from self.below(node.path)


def has_wildcard(source: str) -> bool:
    return any(char in _META for char in source)


def _same(node: Node) -> tuple[str, int, int, int, float, int, str | None, str | None, int, int]:
    return (
        node.type,
        node.mode,
        node.uid,
        node.gid,
        node.mtime,
        node.size,
        node.link,
        node.sha256,
        node.fd,
        node.offset,
    )
