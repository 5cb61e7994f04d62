"""Waiting for a person: bounded, woken by the answer, void when its ground is gone."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from cloche.wire.approvals import Answer, Approval
from cloche.wire.errors import ClocheError
from cloche.wire.ids import new_id
from cloche_server.approvals.asking import Approvals
from cloche_server.approvals.queue import Verdict
from tests.unit.approvals.questions import ALICE, BOB, BOX, ROOT, question

APPROVE, DENY = Answer(answer="approve"), Answer(answer="deny")


class Desk:
    """Approvals, what was told of them, and questions under way."""

    def __init__(self, scope_s_max: float | None = None, **fields: Any) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.approvals = Approvals(
            scope_s_max=lambda: scope_s_max, told=lambda kind, _q, detail: self.told.append((kind, detail)), **fields
        )

    async def ask(self, timeout_s: float = 30.0, **fields: Any) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(self.approvals.ask(question(**fields), timeout_s=timeout_s))
        await asyncio.sleep(0)
        return task

    async def waiting(self, caller: Any = ALICE) -> list[Approval]:
        return (await self.approvals.list(caller)).approvals

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.told]


@pytest.mark.req("POL-3")
async def test_it_waits_until_a_person_says_yes_or_no() -> None:
    desk = Desk()
    for answer, approved, reason in ((APPROVE, True, "approved"), (DENY, False, "denied")):
        task = await desk.ask()
        (asked,) = await desk.waiting()
        assert (asked.host, asked.address, asked.command_line) == (
            "hooks.example.com",
            "203.0.113.7",
            "python3 agent.py",
        )
        assert not task.done()
        answered = desk.approvals.answer(ALICE, asked.id, answer)
        assert (answered.state, answered.answered_by) == (reason, ALICE.owner)
        assert await task == Verdict(approved, ALICE.owner, reason)
        assert await desk.waiting() == []
    assert desk.kinds() == ["approval.asked", "approval.answered"] * 2


@pytest.mark.req("POL-3")
async def test_without_a_person_it_is_a_no_after_its_time() -> None:
    desk = Desk()
    began = time.monotonic()
    assert await desk.approvals.ask(question(), timeout_s=0.2) == Verdict(False, None, "timed_out")
    assert 0.2 <= time.monotonic() - began < 2.0
    (over,) = (await desk.approvals.list(ALICE, include_over=True)).approvals
    assert over.state == "timed_out"
    with pytest.raises(ClocheError) as raised:
        desk.approvals.answer(ALICE, over.id, APPROVE)
    assert raised.value.code == "approval_over"


@pytest.mark.req("POL-3")
@pytest.mark.parametrize("why", ["policy changed", "sandbox ended", "restored", "forked"])
async def test_void_is_a_no_at_once(why: str) -> None:
    desk = Desk()
    task, other = await desk.ask(), await desk.ask(sandbox=new_id("sandbox"))
    desk.approvals.void(BOX, why)
    assert await task == Verdict(False, None, "void")
    assert desk.told[-1][1]["why"] == why
    assert not other.done()
    other.cancel()


async def test_who_leaves_takes_his_question_with_him() -> None:
    desk = Desk()
    task = await desk.ask()
    (asked,) = await desk.waiting()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await desk.waiting() == []
    with pytest.raises(ClocheError) as raised:
        desk.approvals.answer(ALICE, asked.id, APPROVE)
    assert raised.value.code == "approval_over"
    assert desk.approvals._futures == {}


@pytest.mark.req("POL-3")
async def test_others_neither_see_nor_answer_it() -> None:
    desk = Desk()
    task = await desk.ask()
    (asked,) = await desk.waiting()
    assert await desk.waiting(BOB) == []
    with pytest.raises(ClocheError) as raised:
        desk.approvals.answer(BOB, asked.id, APPROVE)
    assert raised.value.code == "approval_not_found"
    assert len(await desk.waiting(ROOT)) == 1
    desk.approvals.answer(ROOT, asked.id, DENY)
    assert (await task).by == ROOT.owner


@pytest.mark.req("POL-3")
async def test_each_use_of_a_scope_is_told_anew_and_never_another_sandboxs() -> None:
    desk = Desk(scope_s_max=60.0)
    task = await desk.ask()
    (asked,) = await desk.waiting()
    desk.approvals.answer(ALICE, asked.id, Answer(answer="approve", scope_s=30.0))
    assert (await task).reason == "approved"
    for _ in range(3):
        assert await desk.approvals.ask(question(), timeout_s=0.0) == Verdict(True, ALICE.owner, "scope")
    assert desk.kinds().count("approval.used") == 3
    assert not (await desk.approvals.ask(question(sandbox=new_id("sandbox")), timeout_s=0.01)).approved
    desk.approvals.void(BOX, "policy changed")
    assert not (await desk.approvals.ask(question(), timeout_s=0.01)).approved


@pytest.mark.req("POL-3")
async def test_a_scope_that_the_organisation_does_not_allow_is_no_answer() -> None:
    desk = Desk()
    task = await desk.ask()
    (asked,) = await desk.waiting()
    with pytest.raises(ClocheError) as raised:
        desk.approvals.answer(ALICE, asked.id, Answer(answer="approve", scope_s=30.0))
    assert raised.value.code == "approval_scope_refused"
    assert not task.done()
    task.cancel()


async def test_beyond_the_bound_the_answer_is_no_at_once() -> None:
    desk = Desk()
    tasks = [await desk.ask() for _ in range(64)]
    assert await desk.approvals.ask(question(), timeout_s=30.0) == Verdict(False, None, "too_many_questions")
    assert desk.kinds()[-1] == "approval.refused"
    desk.approvals.void(BOX, "over")
    await asyncio.gather(*tasks)


async def test_a_watcher_is_woken_by_what_he_may_see() -> None:
    desk = Desk()
    first = await desk.approvals.list(ALICE)
    alice = asyncio.ensure_future(desk.approvals.list(ALICE, after=first.cursor, wait_s=30.0))
    bob = asyncio.ensure_future(desk.approvals.list(BOB, after=first.cursor, wait_s=30.0))
    await asyncio.sleep(0)
    task = await desk.ask()
    found = await asyncio.wait_for(alice, 5.0)
    assert [each.state for each in found.approvals] == ["waiting"]
    assert not bob.done(), "what others are asked is not his to know"
    again = asyncio.ensure_future(desk.approvals.list(ALICE, after=found.cursor, wait_s=30.0))
    await asyncio.sleep(0)
    desk.approvals.answer(ALICE, found.approvals[0].id, DENY)
    assert (await asyncio.wait_for(again, 5.0)).approvals == []
    await task
    bob.cancel()


async def test_a_watcher_waits_no_longer_than_he_said_and_not_at_all_with_an_old_cursor() -> None:
    desk = Desk()
    now = await desk.approvals.list(ALICE)
    began = time.monotonic()
    assert (await desk.approvals.list(ALICE, after=now.cursor, wait_s=0.2)).approvals == []
    assert 0.2 <= time.monotonic() - began < 2.0
    for cursor in (now.cursor + 10**6, 0):
        task = await desk.ask()
        began = time.monotonic()
        assert len((await desk.approvals.list(ALICE, after=cursor, wait_s=30.0)).approvals) == 1
        assert time.monotonic() - began < 2.0, "a cursor of another daemon's made it wait"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_the_next_daemon_begins_above_the_cursors_of_this_one() -> None:
    first = Desk(wall=lambda: 1000.0)
    for _ in range(50):
        await first.approvals.ask(question(), timeout_s=0.0)
    last = (await first.approvals.list(ALICE)).cursor
    assert (await Desk(wall=lambda: 1001.0).approvals.list(ALICE)).cursor > last


async def test_a_webhook_that_is_set_up_wrongly_holds_nothing_up() -> None:
    def unreadable() -> None:
        raise PermissionError(13, "Permission denied", "/etc/hook.key")

    desk = Desk(announcer=unreadable)
    task = await desk.ask()
    assert desk.told[1] == (
        "approval.not_announced",
        {"approval": desk.told[0][1]["approval"], "why": "its key cannot be read (Permission denied)"},
    )
    desk.approvals.answer(ALICE, (await desk.waiting())[0].id, APPROVE)
    assert (await task).approved


async def test_a_journal_that_fails_leaves_no_question_behind() -> None:
    def full(_kind: str, _question: Any, _detail: Any) -> None:
        raise OSError(28, "No space left on device")

    approvals = Approvals(told=full)
    with pytest.raises(OSError, match="No space"):
        await approvals.ask(question(), timeout_s=30.0)
    assert approvals._futures == {}
    assert (await approvals.list(ALICE)).approvals == []
