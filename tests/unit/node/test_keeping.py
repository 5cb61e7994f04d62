"""The agenda: deadlines in order, on the boot clock, also after a sleep."""

import asyncio

import pytest

from cloche_server.node.clock import NS
from cloche_server.node.keeping import CANCELLED_MAX, Agenda
from tests.unit.node.fake_clock import FakeClock


@pytest.mark.req("RES-2")
async def test_deadlines_come_in_order_and_cancelled_ones_never() -> None:
    clock, said = FakeClock(), list[str]()
    agenda = Agenda(clock)
    agenda.after(20, lambda: said.append("late"))
    agenda.after(10, lambda: said.append("early"))
    agenda.after(15, lambda: said.append("never")).cancel()
    assert (agenda.run_due(), said) == (0, [])
    clock.pass_s(12)
    assert (agenda.run_due(), said) == (1, ["early"])
    clock.pass_s(3600)  # the laptop slept
    assert (agenda.run_due(), said) == (1, ["early", "late"])
    agenda.stop()


async def test_the_loop_runs_what_is_due() -> None:
    clock = FakeClock()
    agenda = Agenda(clock)
    fired = asyncio.Event()
    agenda.at(clock.ns + NS // 1000, fired.set)
    clock.pass_s(1)
    await asyncio.wait_for(fired.wait(), 5)
    agenda.stop()


async def test_an_action_that_fails_does_not_stop_the_agenda() -> None:
    clock, said = FakeClock(), list[int]()
    agenda = Agenda(clock)

    def fail() -> None:
        raise RuntimeError("planned")

    agenda.after(0, fail)
    agenda.after(0, lambda: said.append(1))
    clock.pass_s(1)
    with pytest.raises(RuntimeError):
        agenda.run_due()
    agenda.run_due()
    assert said == [1]
    agenda.stop()


async def test_cancelled_deadlines_take_no_memory() -> None:
    agenda = Agenda(FakeClock())
    for _ in range(10 * CANCELLED_MAX):
        agenda.after(300, lambda: None).cancel()
    assert len(agenda._heap) <= CANCELLED_MAX + 1
    agenda.stop()
