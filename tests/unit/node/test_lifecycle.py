"""The one typed end, as a table over causes and facts; and the times of a sandbox."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche.wire.ends import End, EndReason
from cloche.wire.sandboxes import SandboxState
from cloche_server.node import lifecycle
from cloche_server.node.clock import NS
from cloche_server.node.lifecycle import Cause, Facts, Life, Why

EXITED = End(reason=EndReason.EXITED, exit_code=3)


@pytest.mark.req("EXE-5")
@pytest.mark.parametrize(
    ("cause", "oom_kills", "reason", "by"),
    [
        (Cause(Why.KILLED, by="uid:7"), 0, EndReason.KILLED, "uid:7"),
        (Cause(Why.KILLED, by="uid:7"), 1, EndReason.KILLED, "uid:7"),
        (Cause(Why.TTL), 0, EndReason.TIMED_OUT, "ttl"),
        (Cause(Why.IDLE), 0, EndReason.TIMED_OUT, "idle"),
        (Cause(Why.MAXIMUM), 0, EndReason.TIMED_OUT, "maximum"),
        (Cause(Why.DIED), 0, EndReason.HOST_FAILURE, None),
        (Cause(Why.DIED), 1, EndReason.OUT_OF_MEMORY, None),
        (Cause(Why.HOST), 0, EndReason.HOST_FAILURE, None),
        (Cause(Why.HOST), 2, EndReason.OUT_OF_MEMORY, None),
        (Cause(Why.UNRESPONSIVE), 0, EndReason.UNRESPONSIVE, None),
        (Cause(Why.PROTOCOL_ERROR), 0, EndReason.PROTOCOL_ERROR, None),
        (Cause(Why.PROTOCOL_ERROR), 1, EndReason.PROTOCOL_ERROR, None),
        (Cause(Why.CREATE_FAILED), 0, EndReason.HOST_FAILURE, None),
    ],
)
def test_ends_of_a_sandbox(cause: Cause, oom_kills: int, reason: EndReason, by: str | None) -> None:
    end = lifecycle.sandbox_end(Facts(cause, oom_kills), at=5.0)
    assert (end.reason, end.by, end.at) == (reason, by, 5.0)


@pytest.mark.req("EXE-5")
def test_a_sandbox_that_ends_with_its_command_ends_as_it_did() -> None:
    end = lifecycle.sandbox_end(Facts(Cause(Why.COMMAND, by="command"), 0, EXITED), at=5.0)
    assert (end.reason, end.exit_code, end.by) == (EndReason.EXITED, 3, "command")
    assert lifecycle.sandbox_end(Facts(Cause(Why.COMMAND, by="command")), at=5.0).reason is EndReason.KILLED


@pytest.mark.req("EXE-5")
@pytest.mark.parametrize(
    ("answer", "cause", "expected"),
    [
        ({"ok": {"code": 0}}, None, End(reason=EndReason.EXITED, exit_code=0)),
        ({"ok": {"signal": 11}}, None, End(reason=EndReason.SIGNALLED, signal=11)),
        ({"ok": {"signal": 9}}, Cause(Why.TIMEOUT), End(reason=EndReason.TIMED_OUT, signal=9, by="timeout")),
        ({"ok": {"code": 4}}, Cause(Why.TIMEOUT), End(reason=EndReason.EXITED, exit_code=4)),
        ({"ok": {"signal": 9}}, Cause(Why.KILLED, by="uid:7"), End(reason=EndReason.KILLED, signal=9, by="uid:7")),
        ({"ok": {"code": 0}}, Cause(Why.KILLED, by="uid:7"), End(reason=EndReason.EXITED, exit_code=0)),
        ({"ok": {"signal": 9}}, Cause(Why.OUTPUT_LIMIT), End(reason=EndReason.OUTPUT_LIMIT, signal=9)),
        ({"ok": {"code": 1}}, Cause(Why.OUTPUT_LIMIT), End(reason=EndReason.OUTPUT_LIMIT, exit_code=1)),
        ({"ok": {"signal": 9}}, Cause(Why.HOST), End(reason=EndReason.HOST_FAILURE, signal=9)),
    ],
)
def test_ends_of_a_command(answer: dict[str, object], cause: Cause | None, expected: End) -> None:
    assert lifecycle.command_end(answer, cause, at=1.0) == expected.model_copy(update={"at": 1.0})


@pytest.mark.req("EXE-5")
@pytest.mark.parametrize(
    ("guest", "ours", "exit_code"),
    [
        ("not_found", "command_not_found", 127),
        ("not_executable", "not_executable", 126),
        ("permission_denied", "permission_denied", 126),
        ("no_such_user", "no_such_user", 126),
        ("something new", "guest_io", 127),
    ],
)
def test_a_command_that_could_not_start(guest: str, ours: str, exit_code: int) -> None:
    end = lifecycle.command_end({"error": {"code": guest, "message": "m"}}, None, at=1.0)
    assert (end.reason, end.error_code, end.cli_exit_code) == (EndReason.NOT_STARTED, ours, exit_code)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.dictionaries(st.sampled_from(["ok", "error", "code", "signal", "message"]), inner),
    )
)
def test_no_answer_of_a_guest_is_without_an_end(answer: object) -> None:
    assert lifecycle.command_end(answer if isinstance(answer, dict) else {}, None, at=1.0).reason in EndReason


@pytest.mark.req("EXE-5")
@pytest.mark.parametrize("reason", list(EndReason))
def test_commands_end_with_their_sandbox(reason: EndReason) -> None:
    end = lifecycle.end_with_sandbox(End(reason=reason, exit_code=1, by="ttl"))
    assert end.exit_code is None
    if reason in (EndReason.KILLED, EndReason.EXITED, EndReason.SIGNALLED, EndReason.NOT_STARTED):
        assert (end.reason, end.by) == (EndReason.KILLED, "sandbox")
    else:
        assert end.reason is reason


@pytest.mark.req("LIF-1")
def test_extend_never_shortens_and_never_passes_the_maximum() -> None:
    life = Life.begin(0, ttl_s=60, idle_timeout_s=None)
    assert life.extended(0, 10) == life
    assert life.extended(50 * NS, 60).ttl_deadline_ns == 110 * NS
    assert life.extended(0, 10**9).ttl_deadline_ns == life.maximum_ns


@pytest.mark.req("LIF-1")
@pytest.mark.req("RES-2")
def test_the_earliest_deadline_counts() -> None:
    life = Life.begin(0, ttl_s=60, idle_timeout_s=10)
    assert life.deadline(None) == (60 * NS, Why.TTL)
    assert life.deadline(5 * NS) == (15 * NS, Why.IDLE)
    assert life.deadline(55 * NS) == (60 * NS, Why.TTL)
    assert life.extended(0, 10**9).deadline(None)[1] is Why.MAXIMUM
    assert life.ends_in_s(20 * NS, None) == 40
    assert life.ends_in_s(90 * NS, None) == 0


def test_states_only_step_forward() -> None:
    assert lifecycle.step(SandboxState.CREATING, SandboxState.RUNNING) is SandboxState.RUNNING
    for then in SandboxState:
        with pytest.raises(AssertionError):
            lifecycle.step(SandboxState.ENDED, then)
