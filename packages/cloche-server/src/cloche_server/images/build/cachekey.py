"""The name of what a step makes: the same key, the same result. Pure.

A key is the hash of the key before it, the instruction with everything expanded, the variables that it can see, and the content that
it copies (names, types, modes, owners, links, hashes; no times). COPY --from another stage depends on that stage's key, not
on its files: so a whole build's keys are known before anything runs, and stages that nothing misses never run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any, Final

from cloche_server.images.build.copying import Chosen
from cloche_server.images.build.steps import CopyWork, DirectoryWork, RunWork, Step
from cloche_server.images.build.tree import Node

VERSION: Final = 1
"""Raise it when the same step would make something else."""


def _hashed(*parts: Any) -> str:
    text = json.dumps([VERSION, *parts], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def start(base: str, platform: str) -> str:
    """Of a stage: its base's digest or key, or `scratch`."""
    return _hashed("from", base, platform)


def after(parent: str, step: Step, copied: str | None) -> str:
    """`copied`: `content` or `origin`, for a COPY. Steps that change no file have no key of their own: what they change
    is in the variables, user, directory and shell of those that do.
    """
    work = step.work
    if work is None:
        return parent
    if isinstance(work, RunWork):
        return _hashed("run", parent, work.argv, work.script, step.visible, work.user, work.workdir)
    if isinstance(work, DirectoryWork):
        return _hashed("workdir", parent, work.path, work.user)
    return _copy(parent, work, copied)


def _copy(parent: str, work: CopyWork, copied: str | None) -> str:
    return _hashed("copy", parent, work.is_add, work.inline, work.dest, work.chown, work.mode, copied)


def content(chosen: Chosen) -> str:
    """What a COPY from the context takes."""
    digest = hashlib.sha256()
    files = (_line(match.name, match.node) for match in chosen.files)
    below = (_line(node.path, node) for node in chosen.content)
    for part in (files, [b"\0"], below):
        _feed(digest, part)
    digest.update(b"d" if chosen.has_directory else b"f")
    return digest.hexdigest()


def _feed(digest: Any, lines: Iterable[bytes]) -> None:
    for line in lines:
        digest.update(line)


def _line(name: str, node: Node) -> bytes:
    fields = [name, node.type, node.mode, node.size, node.link if node.type == "symlink" else None, node.sha256]
    return json.dumps(fields).encode() + b"\n"


def origin(source_key: str, sources: Iterable[str]) -> str:
    """What a COPY --from takes: the stage's key or the image's digest, and the names as written."""
    return _hashed("origin", source_key, list(sources))
