from __future__ import annotations

import socket
from pathlib import Path

import pytest

from cloche.client._failures import PATIENCE_NEW_S, Patience, refusal, translate
from cloche.client._target import Target, choose_target, parse_url, user_socket_path
from cloche.wire.errors import TABLE, ClocheError, Problem, error, from_problem, to_problem


def listening(path: Path) -> socket.socket:
    path.parent.mkdir(parents=True, exist_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


@pytest.mark.req("UX-1")
def test_url_first_then_machine_then_user(tmp_path: Path) -> None:
    machine, runtime = tmp_path / "machine.sock", tmp_path / "run"
    environ = {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(runtime)}
    state = tmp_path / ".local/state/cloche/run/api.sock"

    nobody = choose_target(environ, machine_socket=machine)
    assert (nobody.chosen, nobody.socket) == ("user", str(runtime / "cloche/api.sock"))
    with listening(state):
        assert choose_target(environ, machine_socket=machine).socket == str(state)
        with listening(runtime / "cloche/api.sock"):
            assert choose_target(environ, machine_socket=machine).socket == str(runtime / "cloche/api.sock")
            with listening(machine):
                assert choose_target(environ, machine_socket=machine).chosen == "machine"
                url = {**environ, "CLOCHE_URL": "https://node.example/", "CLOCHE_API_KEY": "k"}
                assert choose_target(url, machine_socket=machine) == Target("url", "https://node.example", None, "k")


@pytest.mark.req("UX-1")
def test_a_machines_socket_that_is_dead_is_still_the_one_asked(tmp_path: Path) -> None:
    machine = tmp_path / "machine.sock"
    listening(machine).close()
    environ = {"HOME": str(tmp_path)}
    with listening(tmp_path / ".local/state/cloche/run/api.sock"):
        assert choose_target(environ, machine_socket=machine).chosen == "machine"
        machine.unlink()
        machine.symlink_to("/nowhere")
        assert choose_target(environ, machine_socket=machine).chosen == "machine"


def test_somebody_elses_file_is_not_my_node(tmp_path: Path) -> None:
    path = user_socket_path({"HOME": str(tmp_path)})
    path.parent.mkdir(parents=True)
    path.write_text("")
    with pytest.raises(ClocheError) as raised:
        choose_target({"HOME": str(tmp_path)}, machine_socket=tmp_path / "none")
    assert raised.value.code == "node_refused"


def test_without_a_runtime_directory_it_is_below_the_state(tmp_path: Path) -> None:
    assert user_socket_path({"HOME": "/home/u"}) == Path("/home/u/.local/state/cloche/run/api.sock")
    assert user_socket_path({"HOME": "/home/u", "XDG_STATE_HOME": "/s"}) == Path("/s/cloche/run/api.sock")
    assert user_socket_path({"HOME": "/home/u", "XDG_RUNTIME_DIR": "relative"}).parts[1] == "home"


@pytest.mark.parametrize(
    "url",
    [
        "ftp://x",
        "nonsense",
        "http://",
        "unix://relative",
        "http://u:p@h",
        "http://h?q",
        "http://h:99999",
        "http://[::1",
    ],
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ClocheError) as raised:
        parse_url(url, None)
    assert raised.value.code == "invalid_request"


def test_a_key_never_crosses_the_network_in_clear() -> None:
    with pytest.raises(ClocheError) as raised:
        parse_url("http://node.example", "key")
    assert raised.value.code == "tls_required"
    assert parse_url("http://127.0.0.1:80/", "key").url == "http://127.0.0.1:80"
    assert parse_url("http://[::1]:80", "key").url == "http://[::1]:80"
    assert parse_url("unix:///a/b.sock", "key").socket == "/a/b.sock"
    assert "key" not in repr(parse_url("unix:///a/b.sock", "key"))


@pytest.mark.req("UX-6")
@pytest.mark.parametrize("code", TABLE)
def test_every_error_survives_the_way(code: str) -> None:
    sent = error(code, "What happened.", detail={"n": 1}, fix="Do this.", retry_after_s=2.5)
    problem = Problem.model_validate_json(to_problem(sent).model_dump_json())
    got = from_problem(problem)
    assert type(got) is type(sent)
    assert (got.code, got.message, got.detail, got.fix, got.retry_after_s) == (
        code,
        "What happened.",
        {"n": 1},
        "Do this.",
        2.5,
    )
    assert problem.status == TABLE[code].status
    assert refusal(problem.status, to_problem(sent).model_dump_json().encode(), {}).code == code


@pytest.mark.req("UX-6")
def test_an_answer_that_is_not_the_nodes() -> None:
    assert refusal(502, b"<html>", {"server": "nginx"}).code == "node_unavailable"
    assert refusal(401, b"", {}).code == "unauthenticated"
    assert refusal(500, b"\xff", {}).code == "internal"


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (PermissionError(13, "x"), "node_refused"),
        (FileNotFoundError(2, "x"), "node_unavailable"),
        (ConnectionRefusedError(111, "x"), "node_unavailable"),
        (ConnectionResetError(104, "x"), "node_unavailable"),
        (TimeoutError(), "time_out"),
        (ValueError("odd"), "node_unavailable"),
    ],
)
def test_what_is_underneath_decides(raised: Exception, code: str) -> None:
    target = Target("machine", "http://cloche", "/s")
    assert translate(raised, target).code == code
    outer = RuntimeError("wrapped, as transports do")
    outer.__cause__ = RuntimeError("and again")
    outer.__cause__.__context__ = raised
    assert translate(outer, target).code == code


def test_patience_ends_and_progress_renews_it() -> None:
    now = 0.0
    patience = Patience(lambda: PATIENCE_NEW_S, clock=lambda: now)
    lost = error("node_unavailable", "x")
    delays: list[float] = []
    while sum(delays) < PATIENCE_NEW_S - 0.001:
        delays.append(patience.delay_s(lost))
        now += delays[-1]
    now += 0.01
    with pytest.raises(ClocheError):
        patience.delay_s(lost)
    assert delays[:3] == [0.05, 0.1, 0.2]
    assert abs(sum(delays) - PATIENCE_NEW_S) < 0.01
    patience.progressed()
    assert patience.delay_s(lost) == 0.05
    with pytest.raises(ClocheError):
        patience.delay_s(error("not_found", "x"))
