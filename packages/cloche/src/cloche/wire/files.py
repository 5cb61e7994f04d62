"""Files inside a sandbox."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

EntryType = Literal["file", "dir", "symlink", "fifo", "socket", "char", "block"]


class Entry(BaseModel):
    """One file. Names are the guest's: text that may hold anything, escaped before a person sees it."""

    model_config = ConfigDict(frozen=True)

    name: str
    path: str
    type: EntryType
    size: int = 0
    mode: int = 0
    uid: int = 0
    gid: int = 0
    user: str | None = None
    group: str | None = None
    mtime_ns: int = 0
    target: str | None = None


class EntryList(BaseModel):
    """`GET …/files/list`."""

    entries: list[Entry]
    truncated: bool = False


class MakeDirectory(BaseModel):
    """`POST …/files/mkdir`."""

    model_config = ConfigDict(extra="forbid")

    path: str = Field(max_length=4096)
    parents: bool = True
    mode: int | None = Field(default=None, ge=0, le=0o7777)
    user: str | None = Field(default=None, max_length=128)


class Move(BaseModel):
    """`POST …/files/move`."""

    model_config = ConfigDict(extra="forbid")

    source: str = Field(max_length=4096)
    target: str = Field(max_length=4096)
    overwrite: bool = False
    user: str | None = Field(default=None, max_length=128)


class FileError(BaseModel):
    """What went wrong with one file of a tree."""

    model_config = ConfigDict(frozen=True)

    path: str
    code: str
    message: str


class TreeResult(BaseModel):
    """The outcome of moving a tree in or out."""

    files: int
    errors: list[FileError] = []
    errors_more: int = 0


class Written(BaseModel):
    """`PUT …/files`."""

    bytes: int


class Removed(BaseModel):
    """`DELETE …/files`."""

    removed: int


class WatchEvent(BaseModel):
    """One change below a watched path."""

    type: Literal["created", "modified", "removed", "renamed", "attributes", "overflow"]
    path: str
    source: str | None = None
    dir: bool = False
