"""Bytes both ways, and Ctrl-C."""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cloche.cli import carry
from tests.unit.cli.conftest import FakeCommand, FakeNode, make_command


@pytest.mark.req("EXE-9")
def test_stdin_goes_in_byte_for_byte_then_end_of_file() -> None:
    node = FakeNode()
    data = bytes(range(256)) * 5000
    reader, writer = os.pipe()

    def write() -> None:
        with os.fdopen(writer, "wb") as stream:
            stream.write(data)

    threading.Thread(target=write).start()
    carry.pump_stdin(FakeCommand(node, make_command()), reader)  # type: ignore[arg-type]
    assert node.stdin == data
    assert node.stdin_closed.is_set()
    os.close(reader)


@pytest.mark.req("EXE-9")
def test_without_i_nothing_is_read(node, cloche) -> None:
    assert cloche("run", "--", "cat").exit_code == 0
    assert node.created[0].command.stdin is False
    assert not node.stdin_closed.is_set()


class Stubborn(FakeCommand):
    """Goes on until its sandbox is killed."""

    def __init__(self, node: FakeNode) -> None:
        super().__init__(node, make_command())
        self.got_signal = threading.Event()
        self.was_killed = threading.Event()

    def output(self, **_fields: Any) -> Iterator[Any]:
        os.kill(os.getpid(), signal.SIGINT)
        assert self.got_signal.wait(10)
        os.kill(os.getpid(), signal.SIGINT)
        assert self.was_killed.wait(10)
        yield from super().output()

    def signal(self, number: int) -> None:
        super().signal(number)
        self.got_signal.set()

    def kill(self) -> None:
        super().kill()
        self.was_killed.set()


def test_the_first_interrupt_is_the_commands_the_second_ends_it() -> None:
    node = FakeNode()
    job: Any = Stubborn(node)
    before = signal.getsignal(signal.SIGINT)
    carry.carry(job, stdin=False, kill=job.kill)
    assert node.signals == [signal.SIGINT]
    assert node.killed == [job.id]
    assert signal.getsignal(signal.SIGINT) is before
