"""The journal: a chain that shows every change, and recovers from every crash."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloche_server.node.journal import ChainBroken, Journal, files, verify
from tests.unit.node.fake_clock import FakeClock


def write_some(directory: Path, count: int = 5) -> None:
    journal = Journal(directory, FakeClock())
    for number in range(count):
        journal.write("sandbox.creating", sandbox=f"s{number}", owner="uid:1", tenant="t", detail={"n": number})
    journal.close()


@pytest.mark.req("LIF-6")
def test_lines_are_chained_and_numbered(tmp_path: Path) -> None:
    write_some(tmp_path)
    lines = [json.loads(line) for line in files(tmp_path)[0].read_text().splitlines()]
    assert [line["seq"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["prev"] for line in lines] == ["0" * 64, *(line["hash"] for line in lines[:-1])]
    assert {"boot_ns", "wall", "owner", "tenant", "sandbox", "command", "kind", "detail"} <= set(lines[0])
    assert verify(tmp_path) == 5


def test_a_new_daemon_goes_on_with_the_chain(tmp_path: Path) -> None:
    write_some(tmp_path, 2)
    journal = Journal(tmp_path, FakeClock())
    assert [line.sandbox for line in journal.lines] == ["s0", "s1"]
    assert journal.write("node.started").seq == 3
    assert verify(tmp_path) == 3


@pytest.mark.req("LIF-6")
def test_a_torn_last_line_is_cut_and_recorded(tmp_path: Path) -> None:
    write_some(tmp_path, 3)
    path = files(tmp_path)[0]
    whole = path.read_bytes()
    starts = [0, *(at + 1 for at, byte in enumerate(whole) if byte == 10)]
    for size in range(1, len(whole) + 1):
        path.write_bytes(whole[:size])
        journal = Journal(tmp_path, FakeClock())
        kept = sum(start <= size for start in starts) - 1
        torn = size not in starts
        assert len(journal.lines) == kept
        assert journal.seq == kept + torn
        if torn:
            cut = json.loads(path.read_bytes().splitlines()[-1])
            assert (cut["kind"], cut["detail"]["bytes"]) == ("journal.cut", size - starts[kept])
        os.close(journal._fd)  # not close(): a thousand syncs say nothing here
        assert verify(tmp_path) == kept + torn


@pytest.mark.parametrize("change", ["edit", "remove", "swap"])
def test_a_change_in_the_middle_has_a_name(tmp_path: Path, change: str) -> None:
    write_some(tmp_path)
    path = files(tmp_path)[0]
    lines = path.read_bytes().splitlines(keepends=True)
    if change == "edit":
        lines[2] = lines[2].replace(b'"n":2', b'"n":7')
    elif change == "remove":
        del lines[2]
    else:
        lines[1], lines[2] = lines[2], lines[1]
    path.write_bytes(b"".join(lines))
    with pytest.raises(ChainBroken):
        verify(tmp_path)
    with pytest.raises(ChainBroken):
        Journal(tmp_path, FakeClock())


def test_rotation_goes_on_with_the_chain_and_carries_what_lives(tmp_path: Path) -> None:
    def carry() -> Iterator[dict[str, Any]]:
        yield {"sandbox": "s1", "owner": "uid:1", "tenant": "t", "detail": {"running": True}}

    journal = Journal(tmp_path, FakeClock(), file_bytes_max=2000, carry=carry)
    for number in range(40):
        journal.write("command.starting", sandbox="s1", command=f"c{number}", detail={"stream": number})
    journal.close()
    assert len(files(tmp_path)) > 3
    assert verify(tmp_path) == journal.seq
    again = Journal(tmp_path, FakeClock())
    assert [line.kind for line in again.lines[:2]] == ["journal.rotated", "carried"]
    assert again.seq == journal.seq
    numbers = [line.seq for line in again.read(10)]
    assert numbers == list(range(11, again.seq + 1))


def test_a_rotation_cut_short_by_a_crash_is_forgotten(tmp_path: Path) -> None:
    write_some(tmp_path, 2)
    (tmp_path / f"{3:016}.new").write_bytes(b"half")
    journal = Journal(tmp_path, FakeClock())
    assert journal.write("node.started").seq == 3
    assert [path.name for path in files(tmp_path)] == [f"{1:016}.jsonl"]


def test_a_rotation_whose_carrying_fails_changes_nothing(tmp_path: Path) -> None:
    def carry() -> Iterator[dict[str, Any]]:
        raise RuntimeError("planned")
        yield {}

    journal = Journal(tmp_path, FakeClock(), file_bytes_max=400, carry=carry)
    journal.write("node.started")
    with pytest.raises(RuntimeError):
        journal.write("node.started", detail={"filler": "x" * 300})
    assert (len(files(tmp_path)), journal.seq) == (1, 1)
    journal.carry = None
    journal.write("node.started", detail={"filler": "x" * 300})
    assert verify(tmp_path) == 3
