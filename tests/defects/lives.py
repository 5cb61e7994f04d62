"""Defects of EXE and LIF: what a command and a sandbox may rely on."""

from types import ModuleType
from typing import Any

from tests.defects.defect import Defect, replace

# ------------------------------------------------------------------------------------ EXE


def skip_the_checksum(frames: ModuleType) -> None:
    """The decoder's only: it takes the frame's own word for it."""

    class Whatever:
        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 0

    def trusting(decode: Any) -> Any:
        def decoded(self: Any, buffer: bytearray, end: int) -> Any:
            names = vars(frames)
            crc32, names["crc32"] = names["crc32"], lambda *_: Whatever()
            try:
                yield from decode(self, buffer, end)
            finally:
                names["crc32"] = crc32

        return decoded

    replace(frames.Decoder, "frames", trusting)


def forget_the_size(sandbox: ModuleType) -> None:
    def usual(exec_fields: Any) -> Any:
        def fields(self: Any, *arguments: Any) -> Any:
            found = exec_fields(self, *arguments)
            return {**found, "pty": found["pty"] and {**found["pty"], "rows": 24, "cols": 80}}

        return fields

    replace(sandbox.Sandbox, "_exec_fields", usual)


def leave_the_terminal_cooked(terminal: ModuleType) -> None:
    import contextlib

    replace(terminal, "raw_mode", lambda _: lambda fd: contextlib.nullcontext())


def grant_credit_without_end(credit: ModuleType) -> None:
    def endless(_: Any) -> Any:
        def grant(self: Any) -> tuple[int, int]:
            self.limit = self._bound = self.consumed + (1 << 40)
            return self.consumed, self.limit

        return grant

    replace(credit.Inbound, "grant", endless)


def begin_a_byte_late(log_reader: ModuleType) -> None:
    def late(make: Any) -> Any:
        return lambda self, log, start, fd, follows: make(self, log, min(log.end, start + (start > 0)), fd, follows)

    replace(log_reader.LogReader, "__init__", late)


def start_again_with_each_request(sandbox: ModuleType) -> None:
    replace(sandbox, "command_of_key", lambda _: lambda sandbox_id, key: sandbox.new_id("command"))


def overlook_memory(lifecycle: ModuleType) -> None:
    replace(lifecycle, "_MAY_BE_OOM", lambda _: ())


def call_a_time_out_a_kill(lifecycle: ModuleType) -> None:
    replace(lifecycle, "_BY_THE_CLOCK", lambda _: ())


def remove_without_being_asked(files: ModuleType) -> None:
    def always(fields_of: Any) -> Any:
        return lambda path, user, **more: fields_of(
            path, user, **{**more, **dict.fromkeys(more.keys() & {"recursive"}, True)}
        )

    replace(files, "fields_of", always)


def drop_errors_of_files(files: ModuleType) -> None:
    replace(files, "tree_result", lambda result: lambda ok: result({**ok, "errors": [], "errors_more": 0}))


def let_sockets_pass_the_gate(asking: ModuleType) -> None:
    def open_to_sockets(identify: Any) -> Any:
        def asked(peer: Any, headers: Any, rules: Any) -> Any:
            from cloche_server.api.backend import Caller

            if any(name.lower() == b"upgrade" for name, _ in headers):
                return Caller(rules.tenant, "uid:0", True)
            return identify(peer, headers, rules)

        return asked

    replace(asking, "identify", open_to_sockets)


def connect_for_anyone(node: ModuleType) -> None:
    def as_admin(connect: Any) -> Any:
        from dataclasses import replace as changed

        return lambda self, caller, sandbox, port: connect(self, changed(caller, is_admin=True), sandbox, port)

    replace(node.Node, "connect_port", as_admin)


def miss_the_port(files: ModuleType) -> None:
    def beside(connect: Any) -> Any:
        return classmethod(lambda cls, call, port: connect.__func__(cls, call, port ^ 1))

    replace(files.Port, "connect", beside)


def translate_line_ends(stdin: ModuleType) -> None:
    def translated(send: Any) -> Any:
        return lambda self, offset, piece: send(self, offset, bytes(piece).replace(b"\r", b"\n"))

    replace(stdin.Stdin, "_send", translated)


# ------------------------------------------------------------------------------------ LIF


def ignore_the_key(roster: ModuleType) -> None:
    replace(roster.Roster, "by_key", lambda _: lambda self, caller, key: None)


def shorten_when_extended(lifecycle: ModuleType) -> None:
    from dataclasses import replace as changed

    def to_the_letter(_: Any) -> Any:
        return lambda self, now_ns, ttl_s: changed(self, ttl_deadline_ns=now_ns + lifecycle.seconds(ttl_s))

    replace(lifecycle.Life, "extended", to_the_letter)


def leave_directories(steps: ModuleType) -> None:
    from dataclasses import replace as changed

    def nothing(house: Any, sandbox: Any) -> Any:
        yield from ()

    def without(all_steps: Any) -> Any:
        return tuple(changed(step, undo=nothing) if step.name == "directories" else step for step in all_steps)

    replace(steps, "STEPS", without)


def take_nobody_over(engine: ModuleType) -> None:
    def ending(adopt: Any) -> Any:
        async def ended(self: Any, spec: Any) -> Any:
            found = await adopt(self, spec)
            return await found.kill() if hasattr(found, "kill") else found

        return ended

    replace(engine.GVisorEngine, "adopt", ending)


def go_on_a_byte_early(adoption: ModuleType) -> None:
    def early(kept: Any) -> Any:
        return lambda command, states: {stream: max(0, at - 1) for stream, at in kept(command, states).items()}

    replace(adoption, "_kept", early)


LIVES = (
    Defect(
        "EXE-1/unchecked-frame",
        "EXE-1",
        ("tests/unit/channel/test_frames.py::test_vector_at_every_split",),
        "cloche_server.channel.frames",
        skip_the_checksum,
    ),
    Defect(
        "EXE-2/size-not-passed",
        "EXE-2",
        ("tests/contract/test_backend.py::test_signals_terminals_and_sizes",),
        "cloche_server.node.sandbox",
        forget_the_size,
    ),
    Defect(
        "EXE-2/cooked-terminal",
        "EXE-2",
        ("tests/promises/test_terminal.py::test_the_exit_code_comes_back_and_the_terminal_as_it_was",),
        "cloche.cli.terminal",
        leave_the_terminal_cooked,
    ),
    Defect(
        "EXE-3/endless-credit",
        "EXE-3",
        ("tests/unit/channel/test_pump.py::test_a_reader_that_stops_stops_the_guest",),
        "cloche_server.channel.credit",
        grant_credit_without_end,
    ),
    Defect(
        "EXE-4/lost-byte",
        "EXE-4",
        ("tests/contract/test_backend.py::test_a_reader_goes_on_from_its_cursor",),
        "cloche_server.node.log_reader",
        begin_a_byte_late,
    ),
    Defect(
        "EXE-4/key-ignored",
        "EXE-4",
        ("tests/contract/test_backend.py::test_commands_are_idempotent_by_key",),
        "cloche_server.node.sandbox",
        start_again_with_each_request,
    ),
    Defect(
        "EXE-5/no-out-of-memory",
        "EXE-5",
        ("tests/unit/node/test_lifecycle.py::test_ends_of_a_sandbox",),
        "cloche_server.node.lifecycle",
        overlook_memory,
    ),
    Defect(
        "EXE-5/no-time-out",
        "EXE-5",
        ("tests/contract/test_backend.py::test_a_timeout_and_a_kill_are_told_apart",),
        "cloche_server.node.lifecycle",
        call_a_time_out_a_kill,
    ),
    Defect(
        "EXE-6/always-recursive",
        "EXE-6",
        ("tests/unit/node/test_files.py::test_files",),
        "cloche_server.node.files",
        remove_without_being_asked,
    ),
    Defect(
        "EXE-8/open-gate",
        "EXE-8",
        ("tests/contract/test_api.py::test_websockets_go_through_the_same_gate",),
        "cloche_server.api.asking",
        let_sockets_pass_the_gate,
    ),
    Defect(
        "EXE-6/errors-dropped",
        "EXE-6",
        ("tests/promises/test_files.py::test_errors_come_file_by_file",),
        "cloche_server.node.files",
        drop_errors_of_files,
    ),
    Defect(
        "EXE-8/any-caller",
        "EXE-8",
        ("tests/promises/test_ports.py::test_another_user_does_not_reach_it",),
        "cloche_server.node.node",
        connect_for_anyone,
    ),
    Defect(
        "EXE-8/another-port",
        "EXE-8",
        ("tests/unit/node/test_files.py::test_ports",),
        "cloche_server.node.files",
        miss_the_port,
    ),
    Defect(
        "EXE-9/translated-stdin",
        "EXE-9",
        ("tests/promises/test_stdio.py::test_half_close_and_the_exit_code",),
        "cloche_server.node.stdin",
        translate_line_ends,
    ),
    Defect(
        "LIF-1/key-ignored",
        "LIF-1",
        ("tests/contract/test_backend.py::test_create_is_idempotent_by_key",),
        "cloche_server.node.roster",
        ignore_the_key,
    ),
    Defect(
        "LIF-1/extend-shortens",
        "LIF-1",
        ("tests/unit/node/test_lifecycle.py::test_extend_never_shortens_and_never_passes_the_maximum",),
        "cloche_server.node.lifecycle",
        shorten_when_extended,
    ),
    Defect(
        "LIF-2/directories-left",
        "LIF-2",
        ("tests/contract/test_engines.py::test_an_id_is_used_once[gvisor]",),
        "cloche_server.keeper.steps",
        leave_directories,
    ),
    Defect(
        "LIF-6/nobody-taken-over",
        "LIF-6",
        ("tests/unit/keeper/test_live.py::test_a_daemons_death_is_not_noticed_by_a_sandbox",),
        "cloche_server.engines.gvisor.engine",
        take_nobody_over,
    ),
    Defect(
        "LIF-6/byte-repeated",
        "LIF-6",
        (
            "tests/unit/node/test_adoption.py::test_killed_at_the_end_of_a_command_its_end_and_output_are_there_once[node.log.after_write:1]",
        ),
        "cloche_server.node.adoption",
        go_on_a_byte_early,
    ),
)
