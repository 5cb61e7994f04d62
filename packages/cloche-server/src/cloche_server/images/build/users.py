"""Names of users and groups, read from the image's own files as far as they exist. Pure."""

from __future__ import annotations

from typing import Final

FILE_BYTES_MAX: Final = 1024 * 1024
ID_MAX: Final = 2**32 - 2


class NoSuchUser(Exception):
    """The name is not in the image's files."""


def resolve(text: str, passwd: bytes, group: bytes) -> tuple[int, int]:
    """`user[:group]`, names or numbers. A number without a group is its own group, as in Dockerfiles."""
    user, colon, group_name = text.partition(":")
    uid = _number(user)
    gid = uid
    if uid is None:
        fields = _find(passwd, user)
        uid = _number(fields[2]) if len(fields) > 3 else None
        gid = _number(fields[3]) if len(fields) > 3 else None
        if user == "root" and uid is None:
            uid = gid = 0
    if colon:
        gid = _number(group_name)
        if gid is None:
            fields = _find(group, group_name)
            gid = _number(fields[2]) if len(fields) > 2 else None
            if group_name == "root" and gid is None:
                gid = 0
    if uid is None or gid is None:
        raise NoSuchUser(text)
    return uid, gid


def _find(data: bytes, name: str) -> list[str]:
    for line in data.decode("utf-8", "surrogateescape").split("\n"):
        fields = line.split(":")
        if fields[0] == name and name:
            return fields
    return []


def _number(text: str) -> int | None:
    if text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) <= ID_MAX:
        return int(text)
    return None
