"""Ranges of host ids: read from /etc/subuid, or chosen beside everybody else's and recorded."""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

RANGE_COUNT: Final = 65536
RANGE_COUNT_MIN: Final = 4096
FIRST_CHOICE: Final = 1_000_000_000
"""Where a machine's range is looked for: far above what distributions hand out."""
LAST_CHOICE: Final = 2_000_000_000


@dataclass(frozen=True)
class IdRange:
    """A block of host ids, uid and gid alike."""

    first: int
    count: int

    def overlaps(self, other: IdRange) -> bool:
        return self.first < other.first + other.count and other.first < self.first + self.count

    def map_text(self, own: int) -> str:
        """Inside 0 is the node's own user; inside 1 and above is the range."""
        return f"0 {own} 1\n1 {self.first} {self.count}\n"


def parse_subids(text: str, names: tuple[str, ...] | None = None) -> list[IdRange]:
    """The ranges of these users (by name or number), or of everybody."""
    found = []
    for line in text.splitlines():
        parts = line.strip().split(":")
        if len(parts) != 3 or not parts[1].isdigit() or not parts[2].isdigit():
            continue
        if names is None or parts[0] in names:
            found.append(IdRange(int(parts[1]), int(parts[2])))
    return found


def read_subids(kind: str, names: tuple[str, ...] | None = None) -> list[IdRange]:
    """`kind` is `uid` or `gid`."""
    try:
        text = Path(f"/etc/sub{kind}").read_text()
    except FileNotFoundError:
        return []
    return parse_subids(text, names)


def own_range(name: str, uid: int) -> IdRange | None:
    """The largest range that both files give to this user alike."""
    names = (name, str(uid))
    gids = set(read_subids("gid", names))
    both = [found for found in read_subids("uid", names) if found in gids and found.count >= RANGE_COUNT_MIN]
    return max(both, key=lambda found: found.count, default=None)


def choose_range(taken: list[IdRange], key: str) -> IdRange:
    """Begins at a place that follows from `key`, so that two nodes of one machine do not choose the same."""
    places = (LAST_CHOICE - FIRST_CHOICE) // RANGE_COUNT
    begin = zlib.crc32(key.encode()) % places
    for number in range(places):
        choice = IdRange(FIRST_CHOICE + (begin + number) % places * RANGE_COUNT, RANGE_COUNT)
        if not any(choice.overlaps(other) for other in taken):
            return choice
    raise ValueError("no free range of ids")


def machine_range(record: Path) -> IdRange:
    """The recorded one, else one that nobody in /etc/subuid and /etc/subgid has; recorded before it is used."""
    try:
        value = json.loads(record.read_text())
        return IdRange(int(value["first"]), int(value["count"]))
    except FileNotFoundError:
        chosen = choose_range(read_subids("uid") + read_subids("gid"), str(record))
    temporary = record.with_suffix(".tmp")
    temporary.write_text(json.dumps({"first": chosen.first, "count": chosen.count}))
    temporary.chmod(0o644)
    os.replace(temporary, record)
    return chosen


def recorded_range(record: Path) -> IdRange | None:
    try:
        value = json.loads(record.read_text())
    except FileNotFoundError:
        return None
    return IdRange(int(value["first"]), int(value["count"]))
