"""Defects of NET and SEC-3: what the gate checks, records, limits and says. What is decided is in `policy`."""

from types import ModuleType
from typing import Any

from tests.defects.defect import Defect, replace

# ------------------------------------------------------------------------------------ NET-1


def tell_nobody_the_way(way: ModuleType) -> None:
    replace(way, "environment", lambda _: lambda *args, **named: {})


def believe_who_the_guest_says_it_is(gate: ModuleType) -> None:
    """Any sandbox's attempt is judged by the policy that was given first: the channel no longer says who asks."""
    first: list[Any] = []

    def of_the_first(init: Any) -> Any:
        def made(self: Any, *args: Any, **named: Any) -> None:
            init(self, *args, **named)
            first.append(self)

        return made

    def as_the_first(attempt: Any) -> Any:
        def tried(self: Any, *args: Any, **named: Any) -> Any:
            self.policy = first[0].policy
            return attempt(self, *args, **named)

        return tried

    replace(gate.Gate, "__init__", of_the_first)
    replace(gate.Gate, "attempt", as_the_first)


# ------------------------------------------------------------------------------------ NET-4


def dial_loopback_only() -> None:
    """Under a defect that lets addresses through nothing may leave this machine."""
    from cloche_server.egress import sockets

    def near(dial: Any) -> Any:
        async def dialled(addresses: Any, port: int) -> Any:
            return await dial([address for address in addresses if address.is_loopback], port)

        return dialled

    replace(sockets, "dial", near)


def check_no_address(check: ModuleType) -> None:
    replace(check, "refusal", lambda _: lambda address, own=(): None)
    dial_loopback_only()


def be_content_with_one_good_address(check: ModuleType) -> None:
    def leniently(judge: Any) -> Any:
        def judged(attempt: Any, address: Any) -> None:
            from contextlib import suppress

            from cloche_server.egress.attempt import Refused

            for each in attempt.addresses:
                with suppress(Refused):
                    judge(attempt, each)
                    return
            judge(attempt, address)

        return judged

    replace(check, "_check", leniently)
    dial_loopback_only()


def resolve_again_to_dial(dial: ModuleType) -> None:
    def anew(step: Any) -> Any:
        async def dialled(attempt: Any) -> None:
            attempt.addresses = await attempt.gate.services.resolver.addresses(attempt.at().host)
            await step(attempt)

        return dialled

    replace(dial, "step", anew)


# ------------------------------------------------------------------------------------ NET-5


def take_any_hello(carry: ModuleType) -> None:
    replace(carry, "_check_name", lambda _: lambda gate, attempt, hello: None)


# ------------------------------------------------------------------------------------ NET-6, NET-7


def go_on_unrecorded(record: ModuleType) -> None:
    def anyway(step: Any) -> Any:
        async def recorded(attempt: Any) -> None:
            from contextlib import suppress

            from cloche_server.egress.attempt import Refused

            with suppress(Refused):
                await step(attempt)

        return recorded

    replace(record, "step", anyway)


def keep_no_bytes(gate: ModuleType) -> None:
    def without(release: Any) -> Any:
        def released(self: Any, attempt: Any, code: str, **_: int) -> None:
            release(self, attempt, code)

        return released

    replace(gate.Gate, "release", without)


def refuse_without_a_word(refusals: ModuleType) -> None:
    replace(refusals, "http", lambda _: lambda *args, **named: b"")


def show_what_the_guest_wrote(refusals: ModuleType) -> None:
    replace(refusals, "_line", lambda _: lambda text: text)


# ------------------------------------------------------------------------------------ NET-8, NET-9


def count_no_attempts(limits: ModuleType) -> None:
    replace(limits.Attempts, "take", lambda _: lambda self, now: True)


def count_no_bytes(limits: ModuleType) -> None:
    replace(limits.Bytes, "wait_s", lambda _: lambda self, now: 0.0)


def count_no_connections(limits: ModuleType) -> None:
    def every(_: Any) -> Any:
        def take(self: Any) -> bool:
            self.connections += 1
            return True

        return take

    replace(limits.Limits, "take_connection", every)


def pass_on_what_should_be_seen(gate: ModuleType) -> None:
    """Without an interceptor the connection is dialled as if nobody had to look."""

    def opaque(_: Any) -> Any:
        async def dialled(self: Any, attempt: Any, *, tls: bool) -> None:
            from cloche_server.egress import steps

            await steps.run_later(attempt)

        return dialled

    replace(gate.Gate, "intercept", opaque)


# ------------------------------------------------------------------------------------ SEC-3


def look_for_no_placeholder(gate: ModuleType) -> None:
    def blind(init: Any) -> Any:
        def made(self: Any, *args: Any, **named: Any) -> None:
            init(self, *args, **named)
            self.placeholders = lambda: None

        return made

    replace(gate.Gate, "__init__", blind)


UNIT = "tests/unit/egress"
PROMISES = "tests/promises/egress"
GATE = "cloche_server.egress.gate"

EGRESS = (
    Defect(
        "NET-1/nobody-is-told",
        "NET-1",
        ("tests/unit/node/test_ways.py::test_commands_are_told_where_the_way_out_is_unless_the_caller_says_otherwise",),
        "cloche_server.node.way",
        tell_nobody_the_way,
    ),
    Defect(
        "NET-1/another-sandboxs-policy",
        "NET-1",
        (f"{PROMISES}/test_attacks_sockets.py::test_identity_is_the_channel",),
        GATE,
        believe_who_the_guest_says_it_is,
    ),
    Defect(
        "NET-4/unchecked",
        "NET-4",
        (f"{PROMISES}/test_attacks_addresses.py::test_an_allowed_name_with_a_refused_address_is_refused[alone]",),
        "cloche_server.egress.steps.check",
        check_no_address,
    ),
    Defect(
        "NET-4/one-is-enough",
        "NET-4",
        (f"{PROMISES}/test_attacks_addresses.py::test_an_allowed_name_with_a_refused_address_is_refused[beside]",),
        "cloche_server.egress.steps.check",
        be_content_with_one_good_address,
    ),
    Defect(
        "NET-4/resolved-again",
        "NET-4",
        (f"{PROMISES}/test_attacks_addresses.py::test_an_answer_that_changes_between_check_and_dial",),
        "cloche_server.egress.steps.dial",
        resolve_again_to_dial,
    ),
    Defect(
        "NET-5/any-hello",
        "NET-5",
        (f"{PROMISES}/test_attacks_names.py::test_what_tls_says_must_agree[sni_mismatch]",),
        "cloche_server.egress.conversations.carry",
        take_any_hello,
    ),
    Defect(
        "NET-6/unrecorded",
        "NET-6",
        (f"{UNIT}/test_gate.py::test_what_cannot_be_recorded_does_not_happen",),
        "cloche_server.egress.steps.record",
        go_on_unrecorded,
    ),
    Defect(
        "NET-6/no-bytes",
        "NET-6",
        (f"{UNIT}/test_tunnels.py::test_an_allowed_tunnel_carries_bytes_both_ways_and_is_recorded",),
        GATE,
        keep_no_bytes,
    ),
    Defect(
        "NET-7/without-a-word",
        "NET-7",
        (f"{UNIT}/test_tunnels.py::test_nothing_is_allowed_by_nothing_and_the_refusal_can_be_read",),
        "cloche_server.egress.refusals",
        refuse_without_a_word,
    ),
    Defect(
        "NET-7/guests-own-words",
        "NET-7",
        (f"{UNIT}/test_environment.py::test_no_text_of_a_guest_breaks_a_refusal",),
        "cloche_server.egress.refusals",
        show_what_the_guest_wrote,
    ),
    Defect(
        "NET-8/any-rate",
        "NET-8",
        (f"{UNIT}/test_tunnels.py::test_connections_and_attempts_are_limited",),
        "cloche_server.egress.limits",
        count_no_attempts,
    ),
    Defect(
        "NET-8/any-speed",
        "NET-8",
        (f"{UNIT}/test_relay.py::test_the_byte_rate_holds_within_ten_percent",),
        "cloche_server.egress.limits",
        count_no_bytes,
    ),
    Defect(
        "NET-8/any-number-of-connections",
        "NET-8",
        (f"{UNIT}/test_tunnels.py::test_connections_and_attempts_are_limited",),
        "cloche_server.egress.limits",
        count_no_connections,
    ),
    Defect(
        "NET-9/open-without-an-interceptor",
        "NET-9",
        (f"{UNIT}/test_intercepted.py::test_without_an_interceptor_nothing_goes_out",),
        GATE,
        pass_on_what_should_be_seen,
    ),
    Defect(
        "SEC-3/names-unwatched",
        "SEC-3",
        (f"{UNIT}/test_gate.py::test_a_placeholder_in_a_name_is_an_alert_and_goes_nowhere",),
        GATE,
        look_for_no_placeholder,
    ),
)
