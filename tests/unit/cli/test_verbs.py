"""Each verb: what it sends, what it prints, which exit code it gives."""

import json

import click
import pytest

from cloche.cli.main import VERBS, cli
from cloche.wire import defaults
from cloche.wire.ends import End, EndReason


def test_every_verb_loads_and_says_the_same_in_both_lists() -> None:
    context = click.Context(cli)
    for name, (_module, text) in VERBS.items():
        command = cli.get_command(context, name)
        assert command is not None
        assert command.name == name
        assert command.help, name
        assert text.endswith("."), name


def test_run_is_one_request_with_the_tables_limits(node, cloche) -> None:
    node.chunks = [(1, b"42\n"), (2, b"warn\n")]
    result = cloche("run", "--", "python3", "-c", "print(6*7)")
    assert result.exit_code == 0
    assert result.stdout == "42\n"
    assert result.stderr == "warn\n"
    (request,) = node.created
    assert request.command.argv == ["python3", "-c", "print(6*7)"]
    assert request.command.timeout_s == defaults.RUN_TIMEOUT_S
    assert request.command.stdin is False
    assert request.end_with_command
    assert request.limits.memory_bytes == defaults.MEMORY_BYTES
    assert request.image is None, "the node's default"


def test_run_takes_dockers_options(node, cloche, tmp_path) -> None:
    file = tmp_path / "env"
    file.write_text("# comment\nA=file\nB=two=2\n\n")
    result = cloche(
        "run", "-e", "A=flag", "--env-file", str(file), "-w", "/tmp", "-u", "root", "-m", "64m", "--cpus", "0.5", "--pids", "32",
        "--disk", "1g", "--name", "x", "--label", "k=v", "--timeout", "90s", "--ttl", "1h", "--keep", "--rm", "python", "--", "env", "-i",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    (request,) = node.created
    assert request.image == "python"
    assert request.command.argv == ["env", "-i"]
    assert request.command.env == {"A": "flag", "B": "two=2"}
    assert (request.command.cwd, request.command.user, request.command.timeout_s) == ("/tmp", "root", 90)
    assert (request.limits.memory_bytes, request.limits.cpus) == (64 << 20, 0.5)
    assert (request.limits.processes, request.limits.disk_bytes) == (32, 1 << 30)
    assert (request.name, request.labels, request.ttl_s) == ("x", {"k": "v"}, 3600)
    assert not request.end_with_command
    assert "cloche kill sk3m9q" in result.stderr


def test_dockers_own_form_works_too(node, cloche) -> None:
    assert cloche("run", "python", "sh", "-c", "echo -e hi").exit_code == 0
    assert node.created[0].image == "python"
    assert node.created[0].command.argv == ["sh", "-c", "echo -e hi"]


@pytest.mark.parametrize(
    "arguments", [("run",), ("run", "--"), ("run", "a", "b", "--", "c"), ("exec",), ("exec", "x"), ("kill",)]
)
def test_half_a_command_line_is_refused(node, cloche, arguments) -> None:
    result = cloche(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("✗ invalid_request: ")
    assert not node.created


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (End(reason=EndReason.EXITED, exit_code=3), 3),
        (End(reason=EndReason.SIGNALLED, signal=9), 137),
        (End(reason=EndReason.TIMED_OUT, by="timeout"), 124),
        (End(reason=EndReason.OUT_OF_MEMORY), 137),
        (End(reason=EndReason.OUTPUT_LIMIT), 153),
        (End(reason=EndReason.KILLED, by="uid:1000"), 137),
        (End(reason=EndReason.PROTOCOL_ERROR), 125),
        (End(reason=EndReason.UNRESPONSIVE), 125),
        (End(reason=EndReason.HOST_FAILURE), 125),
        (End(reason=EndReason.NOT_STARTED, error_code="command_not_found"), 127),
        (End(reason=EndReason.NOT_STARTED, error_code="not_executable"), 126),
    ],
)
@pytest.mark.req("EXE-5")
def test_each_end_has_its_exit_code(node, cloche, end, code) -> None:
    node.end = end
    for arguments in (("run", "--", "x"), ("exec", "sk3m9q", "--", "x")):
        assert cloche(*arguments).exit_code == code


def test_ps_looks_as_promised(node, cloche) -> None:
    lines = cloche("ps").stdout.splitlines()
    assert lines[0] == "ID      IMAGE   CLASS   STATE    CPU  MEM        AGE  ENDS IN  OWNER"
    assert lines[1].startswith("sk3m9q  python  gvisor  running  2 %  48/512 MB  4m   56m      ")


def test_listings_speak_json(node, cloche) -> None:
    assert json.loads(cloche("ps", "--json").stdout)["sandboxes"][0]["isolation"]["class"] == "gvisor"
    assert json.loads(cloche("df", "--json").stdout)["ended_sandboxes"] == 2
    assert json.loads(cloche("version", "--json").stdout)["node"]["mode"] == "user"
    assert json.loads(cloche("top", "--json").stdout)["sandboxes"]
    assert json.loads(cloche("node", "show", "--json").stdout)["mode"] == "user"


def test_without_a_terminal_nothing_asks(node, cloche) -> None:
    refused = cloche("prune")
    assert refused.exit_code == 2
    assert "--yes" in refused.stderr
    assert cloche("prune", "--yes").exit_code == 0


def test_logs_are_raw_for_a_pipe(node, cloche) -> None:
    node.chunks = [(1, b"\x1b[31mred\x1b[0m\n")]
    assert cloche("logs", "c7f3k2").stdout == "\x1b[31mred\x1b[0m\n"


def test_completion_scripts(cloche) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert "_CLOCHE_COMPLETE" in cloche("completion", shell).stdout


def test_version_needs_no_node_and_no_models(cloche) -> None:
    assert cloche("--version").stdout.startswith("cloche ")
