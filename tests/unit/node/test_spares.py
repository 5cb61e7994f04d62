"""Spare logs: whole before they are taken, gone when they are, and never needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cloche.wire.commands import Cursor
from cloche_server.node.command_log import CommandLog
from cloche_server.node.spares import SPARES, Spares


class Later:
    """What was planned, done when a test says so."""

    def __init__(self) -> None:
        self.planned: list[Callable[[], None]] = []

    def __call__(self, seconds: float, action: Callable[[], None]) -> None:
        self.planned.append(action)

    def all_done(self) -> None:
        while self.planned:
            self.planned.pop()()


def log_in(directory: Path, spares: Spares) -> CommandLog:
    return CommandLog.create(directory, bytes_max=1000, on_full="end", spare=spares.take)


def test_a_log_from_a_spare_is_like_any_other(tmp_path: Path) -> None:
    later = Later()
    spares = Spares(tmp_path / "spares", later)
    spares.want()
    later.all_done()
    assert len(list((tmp_path / "spares").iterdir())) == SPARES
    made = {}
    for name, log in (
        ("spare", log_in(tmp_path / "commands" / "spare", spares)),
        ("own", CommandLog.create(tmp_path / "commands" / "own", bytes_max=1000, on_full="end")),
    ):
        log.append(1, [b"out"])
        log.append(2, [b"err"])
        log.close()
        made[name] = {path.name: path.read_bytes() for path in (tmp_path / "commands" / name).iterdir()}
    assert made["spare"] == made["own"]
    assert len(list((tmp_path / "spares").iterdir())) == SPARES - 1
    found = CommandLog.recover(tmp_path / "commands" / "spare", bytes_max=1000, on_full="end")
    with found.reader(Cursor(generation=1, offset=0)) as reader:
        assert [reader.read(), reader.read()] == [(0, 1, b"out"), (3, 2, b"err")]


def test_one_that_was_taken_is_made_again(tmp_path: Path) -> None:
    later = Later()
    spares = Spares(tmp_path / "spares", later)
    spares.want()
    later.all_done()
    log_in(tmp_path / "c" / "1", spares).append(1, [b"x"])
    later.all_done()
    assert len(list((tmp_path / "spares").iterdir())) == SPARES


def test_without_a_spare_the_log_makes_its_own_files(tmp_path: Path) -> None:
    spares = Spares(tmp_path / "spares", Later())
    log = log_in(tmp_path / "c" / "1", spares)
    log.append(1, [b"x"])
    assert (tmp_path / "c" / "1" / "output").read_bytes() == b"x"


def test_a_spare_that_somebody_removed_is_no_loss(tmp_path: Path) -> None:
    later = Later()
    spares = Spares(tmp_path / "spares", later)
    spares.want()
    later.all_done()
    (tmp_path / "spares").rename(tmp_path / "elsewhere")
    log_in(tmp_path / "c" / "1", spares).append(1, [b"x"])
    assert (tmp_path / "c" / "1" / "output").read_bytes() == b"x"


def test_what_a_dead_daemon_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "spares" / "7").mkdir(parents=True)
    later = Later()
    Spares(tmp_path / "spares", later).want()
    later.all_done()
    assert len(list((tmp_path / "spares").iterdir())) == SPARES
    assert (tmp_path / "spares" / "7" / "index").is_file()
