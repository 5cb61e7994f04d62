"""The book of a sandbox's commands: one slot each, whatever moment the writer was killed at."""

from pathlib import Path

import pytest

from cloche_server.node import command_book
from cloche_server.node.command_book import SPARE_BYTES, CommandBook
from cloche_server.node.records import CommandRecord

ENV = {"TOKEN": "hush" * 50}


def record(number: int, **changes: object) -> CommandRecord:
    request = {"argv": ["true"], "env": dict(ENV)}
    return CommandRecord(
        id=f"c{number:019}",
        sandbox="s" + "0" * 19,
        request=request,
        stream=2 * number,
        created_ns=1,
        created_at=1.0,
        **changes,  # type: ignore[arg-type]
    )


def ended(number: int, detail: str = "") -> CommandRecord:
    found = record(number, end={"reason": "exited", "exit_code": 0, "detail": detail}, ended_at=2.0)
    found.request = {**found.request, "env": {}}
    return found


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "commands.jsonl")


def test_an_end_goes_into_the_same_slot_and_the_environment_is_gone(path: str) -> None:
    book = CommandBook(path)
    book.add(record(1))
    size = Path(path).stat().st_size
    assert b"hush" in Path(path).read_bytes()
    book.save(ended(1))
    assert Path(path).stat().st_size == size
    assert b"hush" not in Path(path).read_bytes()
    again = CommandBook(path)
    assert again.get(f"c{1:019}") == ended(1)
    assert Path(path).stat().st_mode & 0o777 == 0o600


def test_an_end_that_does_not_fit_is_written_behind_and_the_old_slot_blanked(path: str) -> None:
    book = CommandBook(path)
    for number in (1, 2):
        book.add(record(number))
    long = ended(1, "x" * 3 * (SPARE_BYTES + len(str(ENV))))
    book.save(long)
    assert Path(path).read_bytes().count(b"hush" * 50) == 1, "that of the second, which runs"
    for each in (book, CommandBook(path)):
        assert each.get(f"c{1:019}") == long
        assert each.get(f"c{2:019}") == record(2)
        assert sorted(each.ids()) == [f"c{1:019}", f"c{2:019}"]


def test_killed_between_the_new_slot_and_the_blanking_the_later_counts(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = CommandBook(path)
    book.add(record(1))
    long = ended(1, "x" * 3000)
    monkeypatch.setattr(book, "_clear", lambda offset, size: None)
    book.save(long)
    assert CommandBook(path).get(f"c{1:019}") == long


@pytest.mark.parametrize("cut", [1, 7, 200, -1])
def test_a_torn_last_line_is_not_there_and_is_written_over(path: str, cut: int) -> None:
    book = CommandBook(path)
    book.add(record(1))
    whole = Path(path).read_bytes()
    book.add(record(2))
    Path(path).write_bytes(Path(path).read_bytes()[: cut if cut < 0 else len(whole) + cut])
    again = CommandBook(path)
    assert again.ids() == [f"c{1:019}"]
    assert again.get(f"c{2:019}") is None
    again.add(record(3))
    third = CommandBook(path)
    assert third.get(f"c{3:019}") == record(3)
    assert third.get(f"c{1:019}") == record(1)


def test_removed_ones_are_gone_and_their_room_is_taken_back(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_book, "COMPACT_BYTES", 4096)
    book = CommandBook(path)
    for number in range(40):
        book.add(record(number))
        book.save(ended(number))
    before = Path(path).stat().st_size
    for number in range(30):
        book.remove(f"c{number:019}")
    assert Path(path).stat().st_size < before // 2
    for each in (book, CommandBook(path)):
        assert sorted(each.ids()) == [f"c{number:019}" for number in range(30, 40)]
        assert each.get(f"c{35:019}") == ended(35)
        assert each.get(f"c{3:019}") is None
    book.add(record(99))
    assert CommandBook(path).get(f"c{99:019}") == record(99)


def test_a_full_disk_takes_half_a_line_back(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    book = CommandBook(path)
    book.add(record(1))
    size = Path(path).stat().st_size
    real = command_book.os.pwrite
    monkeypatch.setattr(command_book.os, "pwrite", lambda fd, data, at: real(fd, data[:10], at))
    with pytest.raises(OSError, match="full"):
        book.add(record(2))
    monkeypatch.undo()
    assert Path(path).stat().st_size == size
    book.add(record(3))
    assert CommandBook(path).ids() == [f"c{1:019}", f"c{3:019}"]
