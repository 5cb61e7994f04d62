"""A sandbox's records: numbered without gaps, bounded, told to the journal first, readable after a crash."""

import asyncio
from pathlib import Path

import pytest

from cloche.wire.egress import EgressRecord
from cloche_server.egress.records import RECENT, Records

pytestmark = pytest.mark.req("NET-6")


def denied(host: str = "a.example") -> EgressRecord:
    return EgressRecord(
        seq=0, at=0, sandbox="", verdict="denied", code="no_rule", rule="default", host=host, port=443, connection=1
    )


def writer(path: Path, **options: object) -> Records:
    return Records(path, sandbox="s1", journal=lambda record: None, **options)  # type: ignore[arg-type]


def test_the_journal_is_told_first_and_what_it_refuses_is_not_kept(tmp_path: Path) -> None:
    told: list[int] = []

    def journal(record: EgressRecord) -> None:
        told.append(record.seq)
        assert not (tmp_path / "egress.jsonl").exists()
        raise OSError(28, "full")

    records = Records(tmp_path / "egress.jsonl", sandbox="s1", journal=journal)
    with pytest.raises(OSError, match="full"):
        records.write(denied())
    assert told == [1]
    assert records.seq == 0


def test_read_goes_on_where_the_reader_was(tmp_path: Path) -> None:
    records = writer(tmp_path / "egress.jsonl", clock=lambda: 7.0)
    for number in range(RECENT * 2):
        records.write(denied(f"h{number}.example"))
    assert [each.seq for each in records.read(0, 3)] == [1, 2, 3]
    assert [each.seq for each in records.read(RECENT * 2 - 2)] == [RECENT * 2 - 1, RECENT * 2]
    assert records.read(RECENT * 2) == []
    first = records.read(0, 1)[0]
    assert (first.at, first.sandbox, first.host, first.code) == (7.0, "s1", "h0.example", "no_rule")


def test_the_files_take_turns_and_the_last_ones_are_kept(tmp_path: Path) -> None:
    records = writer(tmp_path / "egress.jsonl", file_lines_max=10)
    for _ in range(35):
        records.write(denied())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["egress.1.jsonl", "egress.jsonl"]
    again = writer(tmp_path / "egress.jsonl", file_lines_max=10)
    assert [each.seq for each in again.read()] == list(range(21, 36))
    assert [again.write(denied()).seq for _ in range(6)] == list(range(36, 42))
    assert again.read(0)[0].seq == 31


@pytest.mark.req("NET-9")
def test_a_torn_line_is_cut_and_numbers_go_on(tmp_path: Path) -> None:
    path = tmp_path / "egress.jsonl"
    records = writer(path)
    records.write(denied())
    records.write(denied("b.example"))
    records.close()
    path.write_bytes(path.read_bytes() + b'{"seq":3,"at":1')
    reader = Records(path)
    assert [each.seq for each in reader.read()] == [1, 2]
    again = writer(path)
    assert again.write(denied("c.example")).seq == 3
    assert [each.host for each in Records(path).read()] == ["a.example", "b.example", "c.example"]


def test_a_file_that_is_only_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "egress.jsonl"
    path.write_bytes(b'{"seq":3')
    records = writer(path)
    assert records.write(denied()).seq == 1
    assert len(Records(path).read()) == 1


async def test_wait_ends_with_the_next_record(tmp_path: Path) -> None:
    records = writer(tmp_path / "egress.jsonl")
    waiting = asyncio.create_task(records.wait(0))
    await asyncio.sleep(0)
    assert not waiting.done()
    records.write(denied())
    await asyncio.wait_for(waiting, 1)
    await asyncio.wait_for(records.wait(0), 1)
    gave_up = asyncio.create_task(records.wait(1))
    await asyncio.sleep(0)
    gave_up.cancel()
    await asyncio.wait([gave_up])
    records.write(denied())
