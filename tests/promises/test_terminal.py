"""EXE-2: `cloche shell` under a real pseudo-terminal, and the same terminal over the API."""

from __future__ import annotations

import re
import termios
from collections.abc import Iterator

import pytest

from cloche.client import Sandbox
from cloche.wire.commands import Terminal as TerminalRequest
from tests.promises.nodes import CLI, RealNode, wait_until
from tests.promises.screens import Shell

pytestmark = pytest.mark.req("EXE-2")


@pytest.fixture(scope="module")
def box(node: RealNode) -> Iterator[Sandbox]:
    with node.sandbox() as made:
        yield made


@pytest.fixture
def shell(node: RealNode, box: Sandbox) -> Iterator[Shell]:
    """`cloche shell` in the module's sandbox, at its first prompt."""
    with open_shell(node, box.id) as tty:
        yield tty


def open_shell(node: RealNode, *arguments: str) -> Shell:
    stale = {"LINES": "24", "COLUMNS": "80"}  # exported by somebody: the window's own size must win
    tty = Shell([str(CLI), "shell", *arguments], {**node.environment, "NO_COLOR": "", **stale})
    tty.until_shows(r"\$ *$", 60)
    return tty


def test_vi_draws_follows_a_resize_and_gives_the_screen_back(shell: Shell) -> None:
    assert shell.code("seq -f 'line %g of many' 200 > /tmp/many") == 0
    shell.enter("vi /tmp/many")
    shell.until(lambda: shell.screen.lines()[22].startswith("line 23 of many"), "vi fills 24 rows")
    shell.until(lambda: shell.screen.lines()[0].startswith("line 1 of many"))
    shell.resize(40, 110)
    shell.until(lambda: shell.screen.lines()[38].startswith("line 39 of many"), "vi fills 40 rows")
    assert shell.screen.lines()[0].startswith("line 1 of many")
    shell.type("100Gdd")
    shell.until_shows("^line 101 of many")
    assert not [line for line in shell.screen.lines() if line.startswith("line 100 of many")]
    shell.type("i\x16\x1b[31mraw\x1b")  # insert, with a literal escape: it must be shown, not obeyed
    shell.until_shows(r"^\^\[\[31mraw")
    shell.type("\x1b:wq\r")
    shell.until(lambda: not shell.screen.is_alternate)
    assert shell.ask("wc -l < /tmp/many") == "199"
    assert shell.ask("stty size < /dev/tty").split() == ["40", "110"]


def test_top_draws_and_fills_a_larger_window(shell: Shell) -> None:
    shell.enter("top -d 1")
    shell.until_shows(r"^ *PID +USER")
    shell.until_shows(r"Tasks:|Threads:")
    shell.until(lambda: reversed_cells(shell) == 80)
    shell.resize(30, 132)
    shell.until_shows(r"^ *PID +USER")
    shell.until(lambda: reversed_cells(shell) == 132, "its bar is as wide as the window")
    shell.type("q")
    assert shell.ask("stty size < /dev/tty").split() == ["30", "132"]


def reversed_cells(tty: Shell) -> int:
    """How wide the bar with the columns' names is."""
    return max(sum(7 in cell.style for cell in row) for row in tty.screen.cells())


def test_ctrl_c_stops_the_job_and_not_the_shell(shell: Shell) -> None:
    before = shell.ask("echo $$")
    shell.enter("echo be''gun; sleep 1000")
    shell.until_prints("begun")
    shell.press("\x03")
    assert shell.ask("echo $?") == "130"
    assert shell.ask("echo $$") == before
    # A program that reads the terminal raw gets the byte instead of a signal.
    shell.enter("stty raw -echo; echo rea''dy; head -c1 | od -An -tx1; stty sane")
    shell.until_prints("ready")
    shell.type("\x03")
    shell.until_shows(r"^ *03")


def test_job_control(shell: Shell) -> None:
    shell.enter("sleep 301 &")
    shell.until_shows(r"^\[1\] \d+")
    shell.enter("sh -c 'echo be''gun; exec sleep 402'")
    shell.until_prints("begun")
    shell.press("\x1a")
    shell.until_prints(r"\[2\]\+ +Stopped ")
    assert shell.ask("jobs -s").startswith("[2]+  Stopped ")
    assert shell.ask("jobs -r") == "[1]-  Running                 sleep 301 &"
    assert shell.ask("ps -o stat= -p $(jobs -p %2)").startswith("T")
    shell.enter("fg %2")
    shell.until_prints("sh -c .* exec sleep 402'\r\n")
    shell.press("\x1a")
    shell.until_prints(r"\[2\]\+ +Stopped ")
    shell.enter("bg %2; jobs -r | grep -c sleep")
    shell.until_prints("2\r\n")
    shell.enter("fg %2")
    shell.until_prints("sh -c .* exec sleep 402'\r\n")
    shell.press("\x03")
    shell.enter("kill %1; wait %1; jobs > /dev/null; clear")
    assert shell.ask("jobs | wc -l") == "0"


def test_colours_show(shell: Shell) -> None:
    shell.enter("mkdir -p /tmp/dir-of-colour; ls -d --color=auto /tmp/dir-of-colour")
    styles: list[set[tuple[int, ...]]] = []

    def coloured() -> bool:
        styles[:] = [found for found in shell.screen.styles_of("/tmp/dir-of-colour") if found != {()}]
        return bool(styles)

    shell.until(coloured, "a directory is coloured by ls --color=auto")
    assert styles == [{(1, 34)}] or styles == [{(34,)}], styles
    shell.enter(r"printf '\033[38;5;208mam''ber\033[0m pl''ain\n'")
    shell.until_shows("^amber plain")
    assert shell.screen.styles_of("amber") == [{(38, 5, 208)}]
    assert shell.screen.styles_of("plain") == [{()}]


def test_the_exit_code_comes_back_and_the_terminal_as_it_was(node: RealNode) -> None:
    with open_shell(node) as shell:  # a sandbox of its own, which ends with its shell
        assert termios.tcgetattr(shell.slave)[3] & (termios.ICANON | termios.ECHO) == 0
        sandbox = shell.ask("echo $CLOCHE_SANDBOX_ID")
        shell.enter("exit 47")
        assert shell.wait() == 47
        assert termios.tcgetattr(shell.slave) == shell.modes_before
    with node.client() as client:
        wait_until(lambda: client.connect(sandbox).info().ended, what="the sandbox ends with its shell")


def test_a_window_that_is_closed_ends_the_sandbox(node: RealNode) -> None:
    with open_shell(node) as shell:
        sandbox = shell.ask("echo $CLOCHE_SANDBOX_ID")
    assert shell.process.returncode == 129
    with node.client() as client:
        wait_until(lambda: client.connect(sandbox).info().ended, what="the sandbox ends with its window")


def test_the_person_leaves_and_the_shell_goes_on(shell: Shell, box: Sandbox) -> None:
    running = {command.id for command in box.commands.list() if command.ended is None}
    shell.enter("cd /usr; echo le''ft")
    shell.until_prints("left")
    shell.type("\r~.")
    assert shell.wait() == 0
    assert "goes on" in shell.screen.text()
    assert {command.id for command in box.commands.list() if command.ended is None} == running


def test_the_api_goes_on_by_cursor(box: Sandbox) -> None:
    job = box.commands.start(["bash", "--norc"], terminal=TerminalRequest(rows=24, cols=80), env={"PS1": "$ "})
    parts: list[bytes] = []

    def read_to(line: str, pattern: bytes) -> str:
        """One attachment: from the cursor, until the pattern has come; the new cursor."""
        with job.attach(from_=cursors[-1]) as terminal:
            terminal.send(f"{line}\r".encode())
            here = b""
            while not re.search(pattern, here):
                data = terminal.receive()
                assert data, here
                here += data
            parts.append(here)
            return str(terminal.cursor)

    cursors = ["1.0"]
    cursors.append(read_to("seq -f 'a%g' 300; echo first''-end", rb"first-end\r\n"))
    job.send_stdin(job.info().stdin_offset, b"seq -f 'b%g' 300; echo un''seen\r")  # nobody is attached
    wait_until(lambda: b"unseen\r\n" in b"".join(chunk.data for chunk in job.output(follow=False)))
    cursors.append(read_to("seq -f 'c%g' 300; echo third''-end", rb"third-end\r\n"))
    with job.attach(from_=cursors[-1]) as terminal:
        terminal.resize(33, 99)
        terminal.send(b"stty size; exit 5\r")
        while data := terminal.receive():
            parts.append(data)
        assert terminal.ended is not None
        assert (str(terminal.ended.reason), terminal.ended.exit_code) == ("exited", 5)
    whole = b"".join(parts)
    assert whole == b"".join(chunk.data for chunk in job.output())
    for letter in "abc":
        assert re.findall(rf"(?<=[\r\n]){letter}(\d+)\r\n".encode(), whole) == [b"%d" % n for n in range(1, 301)]
    assert b"33 99\r\n" in whole
    print(f"{len(whole)} bytes over 3 attachments, cursors {cursors}")


def test_a_shell_stays_open_while_the_daemon_is_replaced(own_node: RealNode) -> None:
    with open_shell(own_node) as shell:
        assert shell.ask("X=kept; echo $X") == "kept"
        pid = shell.ask("echo $$")
        own_node.restart_daemon()
        shell.type("\r")
        assert shell.ask("echo $X$$") == f"kept{pid}"
        shell.enter("exit 3")
        assert shell.wait() == 3
