"""Defects of NET-9, SEC-1 and ISO-4 around the interceptor: its walls, what it is believed, what it is told."""

import dataclasses
from types import ModuleType
from typing import Any

from tests.defects.defect import Defect, replace

WALLS_TESTS = "tests/promises/egress/test_interceptor_walls.py"
UNIT_TESTS = "tests/unit/interception"
NEW_NET = 0x40000000


def share_the_network(spawn: ModuleType) -> None:
    replace(spawn, "BARE_NAMESPACES", lambda flags: flags & ~NEW_NET)


def let_it_write(command: ModuleType) -> None:
    replace(command, "plan", lambda plan: lambda spec, places: dataclasses.replace(plan(spec, places), read_only=False))


def let_it_breed(cgroups: ModuleType) -> None:
    replace(cgroups, "WITH_ENVIRONMENT", lambda _: ())


def hold_its_channel(serve: ModuleType) -> None:
    replace(serve, "WITH_ENVIRONMENT", lambda _: ())


def believe_any_number(link: ModuleType) -> None:
    replace(link.Link, "_of", lambda _: lambda self, conn: self._connections.get(conn))


def take_messages_of_any_length(messages: ModuleType) -> None:
    replace(messages, "MESSAGE_BYTES_MAX", lambda _: 1 << 33)


def keep_its_connections(link: ModuleType) -> None:
    replace(link, "_let_go", lambda _: lambda connection: None)


def never_notice_a_hang(control: ModuleType) -> None:
    replace(control.Control, "unread", lambda _: lambda self: 0)


def forget_only_here(supervisor: ModuleType) -> None:
    replace(supervisor.Interception, "forget", lambda _: lambda self, sandbox: self._sandboxes.pop(sandbox, None))


def one_for_all_tenants(supervisor: ModuleType) -> None:
    replace(supervisor.Interception, "_link_of", lambda link_of: lambda self, tenant: link_of(self, "t" + "0" * 19))
    replace(supervisor.Interception, "_living", lambda living: lambda self, tenant: living(self, "t" + "0" * 19))


def log_its_last_words_as_they_are(supervisor: ModuleType) -> None:
    replace(supervisor.Interception, "_hide", lambda _: lambda self, text: text)


def seal_nothing(authority: ModuleType) -> None:
    class Open:
        """A box without a lid."""

        def seal(self, data: bytes, about: bytes) -> bytes:
            return data

        def open(self, sealed: bytes, about: bytes) -> bytes:
            return sealed

    def with_open_box(make: Any) -> Any:
        return lambda self, directory, box: make(self, directory, Open())

    replace(authority.Authorities, "__init__", with_open_box)


INTERCEPTION: tuple[Defect, ...] = (
    Defect(
        "ISO-4/interceptor-with-a-network",
        "ISO-4",
        (f"{WALLS_TESTS}::test_what_it_could_do",),
        "cloche_server.keeper.spawn",
        share_the_network,
    ),
    Defect(
        "ISO-4/interceptor-that-writes",
        "ISO-4",
        (f"{WALLS_TESTS}::test_what_it_could_do",),
        "cloche_server.engines.interceptor.command",
        let_it_write,
    ),
    Defect(
        "ISO-4/interceptor-that-breeds",
        "ISO-4",
        (f"{WALLS_TESTS}::test_its_processes_are_bounded",),
        "cloche_server.keeper.cgroups",
        let_it_breed,
    ),
    Defect(
        "NET-9/believed-number",
        "NET-9",
        (f"{UNIT_TESTS}/test_link.py::test_a_lie_ends_it_and_everything_of_it",),
        "cloche_server.egress.interception.link",
        believe_any_number,
    ),
    Defect(
        "NET-9/endless-message",
        "NET-9",
        (f"{UNIT_TESTS}/test_messages.py::test_a_length_beyond_the_limit_is_refused_before_the_bytes_come",),
        "cloche_server.egress.interception.messages",
        take_messages_of_any_length,
    ),
    Defect(
        "NET-9/connections-without-an-interceptor",
        "NET-9",
        (f"{UNIT_TESTS}/test_link.py::test_a_kill_closes_what_is_open_at_once",),
        "cloche_server.egress.interception.link",
        keep_its_connections,
    ),
    Defect(
        "NET-9/unnoticed-hang",
        "NET-9",
        (f"{UNIT_TESTS}/test_link.py::test_one_that_hangs_is_found",),
        "cloche_server.egress.interception.control",
        never_notice_a_hang,
    ),
    Defect(
        "SEC-1/interceptor-outlives-its-daemon",
        "SEC-1",
        (f"{WALLS_TESTS}::test_it_ends_with_its_daemon",),
        "cloche_server.keeper.serve",
        hold_its_channel,
    ),
    Defect(
        "SEC-1/interceptor-remembers",
        "SEC-1",
        (f"{UNIT_TESTS}/test_supervisor.py::test_a_forgotten_sandbox_is_forgotten_there_too",),
        "cloche_server.egress.interception.supervisor",
        forget_only_here,
    ),
    Defect(
        "SEC-1/one-interceptor-for-all",
        "SEC-1",
        (f"{UNIT_TESTS}/test_supervisor.py::test_one_process_for_each_tenant_and_neither_knows_the_others",),
        "cloche_server.egress.interception.supervisor",
        one_for_all_tenants,
    ),
    Defect(
        "SEC-1/value-in-the-log",
        "SEC-1",
        (f"{UNIT_TESTS}/test_supervisor.py::test_no_value_gets_into_the_log",),
        "cloche_server.egress.interception.supervisor",
        log_its_last_words_as_they_are,
    ),
    Defect(
        "SEC-1/unsealed-authority",
        "SEC-1",
        (f"{UNIT_TESTS}/test_authority.py::test_the_key_is_nowhere_on_disk_and_comes_back",),
        "cloche_server.egress.interception.authority",
        seal_nothing,
    ),
)
