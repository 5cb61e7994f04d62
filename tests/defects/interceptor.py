"""Defects of NET-5, SEC-2 and SEC-3 in the interceptor's own process: what it refuses, looks for, puts in and takes out."""

from types import ModuleType
from typing import Any

from tests.defects.defect import Defect, of_one_test, replace

INTERCEPTED = "tests/promises/egress/test_attacks_intercepted.py"
SECRETS_TESTS = "tests/promises/egress/test_secrets.py"
ELSEWHERE = f"{SECRETS_TESTS}::test_a_placeholder_elsewhere_is_blocked_and_an_alert"
PIECES = f"{SECRETS_TESTS}::test_a_placeholder_in_pieces_is_still_seen"
ECHOES = f"{SECRETS_TESTS}::test_a_server_that_echoes_it_in_every_form"
BOUND = f"{SECRETS_TESTS}::test_method_path_and_a_foreign_key"


def take_any_host(strict: ModuleType) -> None:
    replace(strict, "_authority", lambda _: lambda asked, target: None)


def take_any_form(judge: ModuleType) -> None:
    """What can be read in two ways goes on, in HTTP/1 and in HTTP/2."""
    import functools
    import importlib

    replace(judge, "request", lambda _: lambda asked, target: None)
    replace(judge, "validate_headers", lambda _: lambda message: None)
    replace(importlib.import_module("interceptor.flow"), "raw_head", lambda _: lambda data: None)
    options = importlib.import_module("interceptor.options")
    replace(options, "Options", lambda made: functools.partial(made, validate_inbound_headers=False))


def look_at_no_head(places: ModuleType) -> None:
    replace(places.Guard, "_holds_any", lambda _: lambda self, head: False)


def look_at_no_body(places: ModuleType) -> None:
    replace(places.BodyWatch, "see", lambda _: lambda self, data: None)


def know_one_form(forms: ModuleType) -> None:
    replace(forms, "forms", lambda _: lambda placeholder: (placeholder.encode(),))


def look_at_each_piece_alone(places: ModuleType) -> None:
    def alone(see: Any) -> Any:
        def seen(self: Any, data: bytes) -> None:
            self._tail = b""
            see(self, data)

        return seen

    replace(places.BodyWatch, "see", alone)


def look_at_no_message(judge: ModuleType) -> None:
    async def unseen(self: Any, flow: Any) -> None:
        del flow.websocket.messages[:-1]

    replace(judge.Judge, "websocket_message", lambda _: unseen)


def redact_nothing(redact: ModuleType) -> None:
    replace(redact.Replacer, "_pass", lambda _: lambda self, buffer, *, ended: (buffer, b""))


def redact_what_is_plain(places: ModuleType) -> None:
    replace(places, "value_forms", lambda _: lambda value: (value,))


def give_it_to_any_request(binding: ModuleType) -> None:
    replace(binding.Secret, "fits", lambda _: lambda self, method, path: True)


def take_any_credential(places: ModuleType) -> None:
    replace(places.Guard, "_refuse_foreign", lambda _: lambda self, head: None)


INTERCEPTOR: tuple[Defect, ...] = (
    of_one_test(
        "NET-5/any-host-inside", f"{INTERCEPTED}::test_host_is_what_the_hello_said", "interceptor.strict", take_any_host
    ),
    of_one_test(
        "NET-5/any-authority",
        f"{INTERCEPTED}::test_authority_is_what_the_hello_said",
        "interceptor.strict",
        take_any_host,
    ),
    of_one_test(
        "NET-5/smuggled-inside",
        f"{INTERCEPTED}::test_nothing_is_smuggled_inside_tls",
        "interceptor.judge",
        take_any_form,
    ),
    of_one_test(
        "NET-5/smuggled-downwards",
        f"{INTERCEPTED}::test_nothing_is_smuggled_from_http2_into_http1",
        "interceptor.judge",
        take_any_form,
    ),
    of_one_test("SEC-2/any-request", BOUND, "interceptor.binding", give_it_to_any_request),
    of_one_test("SEC-2/any-credential", BOUND, "interceptor.places", take_any_credential),
    of_one_test("SEC-3/heads-unwatched", f"{ELSEWHERE}[another host]", "interceptor.places", look_at_no_head),
    of_one_test("SEC-3/bodies-unwatched", f"{ELSEWHERE}[the body]", "interceptor.places", look_at_no_body),
    of_one_test("SEC-3/one-form", f"{ELSEWHERE}[base64]", "interceptor.forms", know_one_form),
    of_one_test("SEC-3/pieces-unwatched", f"{PIECES}[chunks]", "interceptor.places", look_at_each_piece_alone),
    of_one_test("SEC-3/messages-unwatched", f"{PIECES}[messages]", "interceptor.judge", look_at_no_message),
    of_one_test("SEC-3/echoed", ECHOES, "interceptor.redact", redact_nothing),
    of_one_test("SEC-3/echoed-in-another-form", ECHOES, "interceptor.places", redact_what_is_plain),
)
