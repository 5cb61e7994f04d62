"""Files inside a sandbox."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

PATH_MAX: Final = 4096
EntryType = Literal["file", "dir", "symlink", "fifo", "socket", "char", "block"]


def _short_enough(path: str) -> str:
    if len(path) > PATH_MAX:
        raise ValueError(f"a path has at most {PATH_MAX} characters")
    return path


# Not Field(max_length=…): that refuses lone surrogates, with which a name that is not UTF-8 is written.
GuestPath = Annotated[str, AfterValidator(_short_enough), WithJsonSchema({"type": "string", "maxLength": PATH_MAX})]


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

    path: GuestPath
    parents: bool = True
    mode: int | None = Field(default=None, ge=0, le=0o7777)
    user: str | None = Field(default=None, max_length=128)


class Move(BaseModel):
    """`POST …/files/move`."""

    model_config = ConfigDict(extra="forbid")

    source: GuestPath
    target: GuestPath
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
