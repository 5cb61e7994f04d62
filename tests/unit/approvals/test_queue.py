"""The queue decides and knows no clock: everything here is given the time."""

from __future__ import annotations

from typing import Any

import pytest

from cloche.wire.errors import ClocheError
from cloche.wire.ids import new_id
from cloche_server.approvals.queue import OVER_MAX, WAITING_MAX, WAITING_OF_ONE_MAX, Asked, Queue, Verdict
from tests.unit.approvals.questions import BOX, EVIL, question


def ask(
    queue: Queue, now: float = 0.0, *, scope: float | None = None, timeout_s: float = 120.0, **fields: Any
) -> Asked:
    asked = queue.ask(question(**fields), now=now, wall=1000.0 + now, timeout_s=timeout_s, scope_s_max=scope)
    assert isinstance(asked, Asked), asked
    return asked


def verdict(queue: Queue, now: float = 0.0, **fields: Any) -> Verdict | Asked:
    return queue.ask(question(**fields), now=now, wall=now, timeout_s=120.0, scope_s_max=600.0)


def code_of(act: Any) -> str:
    with pytest.raises(ClocheError) as raised:
        act()
    return raised.value.code


@pytest.mark.req("POL-3")
def test_an_answer_is_for_one_action() -> None:
    queue = Queue()
    asked = ask(queue)
    ended = queue.answer(asked, approve=True, by="uid:1000", now=5.0)
    assert ended.verdict() == Verdict(True, "uid:1000", "approved")
    assert code_of(lambda: queue.answer(asked, approve=False, by="x", now=5.0)) == "approval_over"
    assert ask(queue).id != asked.id, "the same action again is a new question"


def test_no_answer_in_time_is_a_no_and_a_late_one_counts_for_nothing() -> None:
    queue = Queue()
    asked = ask(queue, timeout_s=10.0)
    assert queue.expire(9.9) == []
    assert code_of(lambda: queue.answer(asked, approve=True, by="x", now=10.0)) == "approval_over"
    (late,) = queue.expire(10.0)
    assert late.verdict() == Verdict(False, None, "timed_out")
    assert code_of(lambda: queue.answer(asked, approve=True, by="x", now=10.1)) == "approval_over"


@pytest.mark.req("POL-3")
def test_a_scope_only_where_it_is_enabled_and_as_long_as_it_may_be() -> None:
    queue = Queue()
    assert (
        code_of(lambda: queue.answer(ask(queue), approve=True, by="x", now=0, scope_s=1.0)) == "approval_scope_refused"
    )
    short = ask(queue, scope=60.0)
    assert code_of(lambda: queue.answer(short, approve=True, by="x", now=0, scope_s=61.0)) == "approval_scope_refused"
    assert short.id in queue.waiting, "a refused scope is no answer"
    assert ask(queue, scope=100_000.0).scope_s_max == 600.0, "ten minutes is the most, whatever a file says"
    queue.answer(short, approve=True, by="uid:7", now=0.0, scope_s=60.0)
    assert verdict(queue, 59.9) == Verdict(True, "uid:7", "scope")
    assert isinstance(verdict(queue, 60.0), Asked), "its time is over"


@pytest.mark.req("POL-3")
def test_a_scope_is_of_one_sandbox_host_and_port() -> None:
    queue = Queue()
    queue.answer(ask(queue, scope=600.0), approve=True, by="x", now=0.0, scope_s=600.0)
    for other in ({"sandbox": new_id("sandbox")}, {"host": "b.example.com"}, {"port": 8443}):
        assert isinstance(verdict(queue, 1.0, **other), Asked), other
    assert verdict(queue, 1.0, path="/other", method="GET") == Verdict(True, "x", "scope")


def test_a_denial_gives_no_scope() -> None:
    queue = Queue()
    queue.answer(ask(queue, scope=600.0), approve=False, by="x", now=0.0, scope_s=60.0)
    assert queue.scopes == {}


@pytest.mark.req("POL-3")
def test_void_takes_questions_and_scopes_of_that_sandbox_alone() -> None:
    queue = Queue()
    other = new_id("sandbox")
    for sandbox in (BOX, other):
        queue.answer(ask(queue, scope=600.0, sandbox=sandbox), approve=True, by="x", now=0.0, scope_s=600.0)
    mine, theirs = ask(queue, host="b.example"), ask(queue, host="b.example", sandbox=other)
    (void,) = queue.void(BOX, "the policy changed")
    assert (void.id, void.verdict()) == (mine.id, Verdict(False, None, "void"))
    assert isinstance(verdict(queue, 1.0), Asked), "its scope is gone"
    assert verdict(queue, 1.0, sandbox=other) == Verdict(True, "x", "scope")
    assert theirs.id in queue.waiting


def test_the_number_of_questions_is_bounded() -> None:
    queue = Queue()
    for _ in range(WAITING_OF_ONE_MAX):
        ask(queue)
    assert verdict(queue) == Verdict(False, None, "too_many_questions")
    count = WAITING_OF_ONE_MAX
    while count < WAITING_MAX:
        box = new_id("sandbox")
        for _ in range(min(WAITING_OF_ONE_MAX, WAITING_MAX - count)):
            ask(queue, sandbox=box)
            count += 1
    assert verdict(queue, sandbox=new_id("sandbox")) == Verdict(False, None, "too_many_questions")
    queue.expire(1e9)
    assert (len(queue.waiting), len(queue.over)) == (0, OVER_MAX)


@pytest.mark.req("POL-3")
def test_what_a_guest_chose_is_shown_harmless_and_short() -> None:
    queue = Queue()
    fields = dict.fromkeys(("host", "path", "method", "command", "command_line", "rule", "address"), EVIL + "x" * 10000)
    view = ask(queue, **fields).view(3.0)
    shown = view.model_dump()
    for name in fields:
        assert shown[name].isprintable(), name
        assert "evil" in shown[name]
        assert len(shown[name]) < 2000
    assert (view.age_s, view.ends_in_s, view.state, view.asked_at) == (3.0, 117.0, "waiting", 1000.0)


def test_found_by_id_short_form_or_prefix_and_only_by_who_may_see_it() -> None:
    queue = Queue()
    asked = ask(queue)

    def find(text: str, sees: bool = True) -> str:
        return queue.find(text, lambda _: sees).id

    assert {find(asked.id), find(asked.id[0] + asked.id[4:9]), find(asked.id[:8])} == {asked.id}
    assert code_of(lambda: find(asked.id, sees=False)) == "approval_not_found"
    assert code_of(lambda: find("a")) == "approval_not_found", "one letter is every question's"
    ask(queue)
    assert code_of(lambda: find("aloc")) == "ambiguous"


def test_every_change_moves_the_cursor() -> None:
    queue = Queue(cursor=100)
    first = ask(queue)
    assert (queue.cursor, first.changed) == (101, 101)
    assert queue.answer(first, approve=False, by="x", now=0.0).changed == queue.cursor == 102
