"""Defects of IMG: what an image is, where it is built, whose bytes it shares, and how it runs."""

from types import ModuleType
from typing import Any

from tests.defects.defect import Defect, replace

# ------------------------------------------------------------------------------------ IMG-1


def take_any_bytes(blobs: ModuleType) -> None:
    replace(blobs.Partial, "is_right", lambda _: property(lambda self: self.offset == self._size))


def ask_for_no_signature(trust: ModuleType) -> None:
    def nobody(_: Any) -> Any:
        async def verified(*_: Any) -> tuple[str, ...]:
            return ()

        return verified

    replace(trust, "verify", nobody)


def believe_every_signature(trust: ModuleType) -> None:
    replace(trust, "is_signed", lambda _: lambda key, signature: True)


def take_what_the_name_means_now(service: ModuleType) -> None:
    """A pinned digest is ignored where there is a tag beside it."""

    def unpinned(parse: Any) -> Any:
        def parsed(self: Any, name: str) -> Any:
            import dataclasses

            found = parse(self, name)
            return dataclasses.replace(found, digest=None, tag="1") if found.digest is not None else found

        return parsed

    replace(service.Lookup, "parse", unpinned)


# ------------------------------------------------------------------------------------ IMG-2


def leave_rooms_open(workshop: ModuleType) -> None:
    replace(workshop, "end_leftovers", lambda _: lambda roster: None)


def build_as_the_caller(workshop: ModuleType) -> None:
    """A room is his own sandbox: he sees it, and reaches into a step that runs."""

    def his(make: Any) -> Any:
        def init(self: Any, maker: Any, caller: Any, empty: Any) -> None:
            make(self, maker, caller, empty)
            self._caller = caller

        return init

    replace(workshop.Workshop, "__init__", his)


def build_without_its_privileges(workshop: ModuleType) -> None:
    replace(workshop, "PRIVILEGES", lambda _: "none")


# ------------------------------------------------------------------------------------ IMG-3


def pull_for_each_caller(flights: ModuleType) -> None:
    def alone(join: Any) -> Any:
        return lambda self, key, work, listener=None: join(self, (key, object()), work, listener)

    replace(flights.Flights, "join", alone)


def collect_what_runs(store: ModuleType) -> None:
    replace(store.Store, "is_root_busy", lambda _: lambda self, key, uses=None: False)


def share_the_store(opening: ModuleType) -> None:
    def unlocked(_: Any) -> Any:
        def opened(layout: Any) -> int:
            import os

            return os.open(layout.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

        return opened

    replace(opening, "take_lock", unlocked)


# ------------------------------------------------------------------------------------ IMG-4


def forget_the_images_user(views: ModuleType) -> None:
    def as_root(root_of: Any) -> Any:
        def made(*arguments: Any) -> Any:
            import dataclasses

            return dataclasses.replace(root_of(*arguments), user=None)

        return made

    replace(views, "root_of", as_root)


def ask_a_shell(making: ModuleType) -> None:
    """As if every image had one."""

    def through_it(first_command: Any) -> Any:
        def wrapped(request: Any, root: Any) -> Any:
            import shlex

            found = first_command(request, root)
            return found and found.model_copy(update={"argv": ["/bin/sh", "-c", shlex.join(found.argv)]})

        return wrapped

    replace(making, "first_command", through_it)


PULLED = "tests/promises/test_image_verbs.py::test_an_image_that_is_not_here_is_pulled_once_and_runs_as_it_says"
ROOM = "tests/unit/node/test_workshop.py::test_nobody_sees_a_room_and_the_next_daemon_ends_it"

IMAGES = (
    Defect(
        "IMG-1/unchecked-blob",
        "IMG-1",
        ("tests/unit/images/test_pulling.py::test_a_damaged_partial_is_fetched_anew",),
        "cloche_server.images.blobs",
        take_any_bytes,
    ),
    Defect(
        "IMG-1/no-signature-asked",
        "IMG-1",
        ("tests/unit/images/test_trust.py::test_no_signature",),
        "cloche_server.images.trust",
        ask_for_no_signature,
    ),
    Defect(
        "IMG-1/any-signature",
        "IMG-1",
        ("tests/unit/images/test_trust.py::test_any_and_all",),
        "cloche_server.images.trust",
        believe_every_signature,
    ),
    Defect(
        "IMG-1/unpinned",
        "IMG-1",
        ("tests/unit/images/test_service.py::test_a_moved_tag_means_the_new_image_and_a_digest_the_old",),
        "cloche_server.images.service",
        take_what_the_name_means_now,
    ),
    Defect("IMG-2/room-left", "IMG-2", (ROOM,), "cloche_server.node.workshop", leave_rooms_open),
    Defect("IMG-2/the-callers-own-room", "IMG-2", (ROOM,), "cloche_server.node.workshop", build_as_the_caller),
    Defect(
        "IMG-2/no-privileges",
        "IMG-2",
        ("tests/unit/node/test_workshop.py::test_steps_and_how_they_end",),
        "cloche_server.node.workshop",
        build_without_its_privileges,
    ),
    Defect(
        "IMG-3/pulled-by-each",
        "IMG-3",
        ("tests/unit/images/test_service.py::test_twenty_callers_one_pull_one_conversion",),
        "cloche_server.images.flights",
        pull_for_each_caller,
    ),
    Defect(
        "IMG-3/collected-while-it-runs",
        "IMG-3",
        ("tests/unit/images/test_gc.py::test_what_runs_or_is_about_to_or_is_held_stays",),
        "cloche_server.images.store",
        collect_what_runs,
    ),
    Defect(
        "IMG-3/store-not-locked",
        "IMG-3",
        ("tests/unit/node/test_images.py::test_a_second_node_on_the_same_store_is_refused",),
        "cloche_server.images.opening",
        share_the_store,
    ),
    Defect("IMG-4/user-forgotten", "IMG-4", (PULLED,), "cloche_server.images.views", forget_the_images_user),
    Defect("IMG-4/needs-a-shell", "IMG-4", (PULLED,), "cloche_server.node.making", ask_a_shell),
)
