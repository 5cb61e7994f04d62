"""Defects of what a guest says about where it goes, each of which lets one known attack through: names, HTTP and TLS."""

import dataclasses
import re
from types import ModuleType
from typing import Any

from tests.defects.defect import Defect, of_one_test, replace
from tests.defects.egress import take_any_hello

PROMISES = "tests/promises/egress"
NAMES = f"{PROMISES}/test_attacks_names.py"
INTERCEPTED = f"{PROMISES}/test_attacks_intercepted.py"
LOOKS_ALLOWED = f"{NAMES}::test_names_that_only_look_allowed_are_refused"
ADDRESS_FORMS = f"{NAMES}::test_raw_addresses_and_all_their_spellings_are_refused"
TLS_AGREES = f"{NAMES}::test_what_tls_says_must_agree"
HTTP_AGREES = f"{NAMES}::test_what_http_says_must_agree"
SMUGGLED = f"{NAMES}::test_no_request_is_smuggled"
DECIDE = "cloche_server.policy.decide"
CARRY = "cloche_server.egress.conversations.carry"
FORWARD = "cloche_server.egress.forward"
HEADS = "cloche_server.egress.heads"
POLICY_NAMES = "cloche_server.policy.names"

# ----------------------------------------------------------------------------------- names


def take_any_label(names: ModuleType) -> None:
    replace(names, "_check_label", lambda _: lambda label: None)


def pass_over_the_user(heads: ModuleType) -> None:
    """As a URL parser does: the host is what comes after the @."""

    def parted(host_and_port: Any) -> Any:
        return lambda text, default_port=None: host_and_port(text.rpartition("@")[2], default_port)

    replace(heads, "host_and_port", parted)


def fold_letters(heads: ModuleType) -> None:
    """What looks like a letter is taken for it."""

    def folded(parse_head: Any) -> Any:
        def parsed(raw: bytes, *more: Any) -> Any:
            import unicodedata

            text = unicodedata.normalize("NFKC", raw.decode("utf-8", "surrogateescape")).replace("\u0435", "e")
            return parse_head(text.encode("utf-8", "surrogateescape"), *more)

        return parsed

    replace(heads, "parse_head", folded)


def take_names_of_any_length(names: ModuleType) -> None:
    for limit in ("NAME_CHARS_MAX", "LABEL_CHARS_MAX", "TEXT_CHARS_MAX"):
        replace(names, limit, lambda _: 1 << 20)


def let_addresses_through(decide: ModuleType) -> None:
    """An address needs no rule: what it is will be checked later."""

    def for_addresses(otherwise: Any) -> Any:
        def decided(self: Any, target: Any, found: Any, *, seen: bool) -> Any:
            from cloche_server.policy.model import Effect

            decision = otherwise(self, target, found, seen=seen)
            return decision if target.address is None else dataclasses.replace(decision, effect=Effect.ALLOW)

        return decided

    replace(decide.Policy, "_otherwise", for_addresses)


def forget_ports(decide: ModuleType) -> None:
    def as_443(connect: Any) -> Any:
        return lambda self, target: connect(self, dataclasses.replace(target, port=443))

    replace(decide.Policy, "connect", as_443)


def look_up_what_is_asked(resolve: ModuleType) -> None:
    """As a name server does."""

    def eager(answer: Any) -> Any:
        def answered(gate: Any, stream: Any, fields: Any) -> None:
            gate.services.spawn(_looked_up(gate, fields["name"]), "a look-up")
            answer(gate, stream, fields)

        return answered

    replace(resolve, "answer", eager)


async def _looked_up(gate: Any, name: str) -> None:
    from contextlib import suppress

    from cloche_server.egress.services import Unresolved

    with suppress(Unresolved):
        await gate.services.resolver.addresses(name)


# --------------------------------------------------------------------------- what HTTP and TLS say


def take_a_nameless_hello(carry: ModuleType) -> None:
    def lenient(check: Any) -> Any:
        return lambda gate, attempt, hello: None if hello.sni is None else check(gate, attempt, hello)

    replace(carry, "_check_name", lenient)


def take_what_is_no_tls(carry: ModuleType) -> None:
    def lenient(read: Any) -> Any:
        async def taken(gate: Any, guest: Any, attempt: Any, whole: bytearray) -> None:
            from cloche_server.egress.attempt import Refused

            try:
                await read(gate, guest, attempt, whole)
            except Refused as refused:
                if refused.code != "not_tls":
                    raise

        return taken

    replace(carry, "_read_hello", lenient)


def believe_any_host(heads: ModuleType) -> None:
    def target_alone(_: Any) -> Any:
        def name(authority: str, host: str, port: int, fields: Any, default_port: int, *, required: bool) -> str:
            return str(heads.normal_host(host)[0])

        return name

    replace(heads, "_agreeing", target_alone)


def connect_within(forward: ModuleType) -> None:
    """A CONNECT inside a tunnel is answered, and what follows is not looked at."""

    def nested(take: Any) -> Any:
        def taken(self: Any, head: Any) -> None:
            if head.form != "connect":
                take(self, head)
                return
            self._guest.say(b"HTTP/1.1 200 Connection established\r\n\r\n")
            self._opaque = True

        return taken

    replace(forward.Forward, "_take", nested)


def send_all_to_the_first(forward: ModuleType) -> None:
    """What comes on a kept connection goes where the first went, whoever it is for."""

    def kept(take: Any) -> Any:
        def taken(self: Any, head: Any) -> None:
            if self._connection is not None:
                target = self._connection.attempt.at()
                head = dataclasses.replace(head, host=target.host, port=target.port)
            take(self, head)

        return taken

    replace(forward.Forward, "_take", kept)


def take_the_first_length(heads: ModuleType) -> None:
    """Of two that disagree."""

    def forgiving(read_fields: Any) -> Any:
        def read(block: bytes, version: Any) -> Any:
            lines = block.split(b"\r\n")
            lengths = [line for line in lines if line.lower().startswith(b"content-length:")]
            return read_fields(b"\r\n".join(line for line in lines if line not in lengths[1:]), version)

        return read

    replace(heads, "read_fields", forgiving)


def take_a_cr_for_a_blank(heads: ModuleType) -> None:
    def forgiving(parse_head: Any) -> Any:
        return lambda raw, *more: parse_head(re.sub(rb"\r(?!\n)", b" ", raw), *more)

    replace(heads, "parse_head", forgiving)


def read_heads_without_end(heads: ModuleType) -> None:
    for limit in ("HEAD_BYTES_MAX", "TARGET_BYTES_MAX"):
        replace(heads, limit, lambda _: 1 << 30)


def see_only_what_a_rule_says(decide: ModuleType) -> None:
    """Neither `intercept: always` nor a secret makes anybody look into the other hosts."""
    replace(decide.Policy, "sees_all", lambda _: property(lambda self: False))


REQUESTS: tuple[Defect, ...] = (
    of_one_test("NET-3/any-label", f"{NAMES}::test_hostile_socks_names_are_refused", POLICY_NAMES, take_any_label),
    of_one_test("NET-3/user-passed-over", f"{LOOKS_ALLOWED}[userinfo]", HEADS, pass_over_the_user),
    of_one_test("NET-3/folded-letters", f"{LOOKS_ALLOWED}[look-alikes]", HEADS, fold_letters),
    of_one_test("NET-3/any-length", f"{LOOKS_ALLOWED}[long labels]", POLICY_NAMES, take_names_of_any_length),
    of_one_test(
        "NET-3/any-port-of-a-host",
        f"{NAMES}::test_an_allowed_host_at_another_port_is_refused",
        DECIDE,
        forget_ports,
    ),
    of_one_test("NET-4/no-name-needed", f"{ADDRESS_FORMS}[addresses]", DECIDE, let_addresses_through),
    of_one_test(
        "NET-4/names-looked-up",
        f"{PROMISES}/test_attacks_addresses.py::test_names_carry_nothing_out",
        "cloche_server.egress.conversations.resolve",
        look_up_what_is_asked,
    ),
    of_one_test("NET-5/nameless-hello", f"{TLS_AGREES}[sni_missing]", CARRY, take_a_nameless_hello),
    of_one_test("NET-5/no-hello", f"{TLS_AGREES}[not_tls]", CARRY, take_what_is_no_tls),
    of_one_test("NET-5/any-hello-by-name", f"{NAMES}::test_tls_by_name_must_agree_as_well", CARRY, take_any_hello),
    of_one_test("NET-5/any-host", f"{HTTP_AGREES}[Host is another]", HEADS, believe_any_host),
    of_one_test("NET-5/connect-within", f"{HTTP_AGREES}[CONNECT in a tunnel]", FORWARD, connect_within),
    of_one_test(
        "NET-5/all-to-the-first",
        f"{HTTP_AGREES}[absolute form to another, second request]",
        FORWARD,
        send_all_to_the_first,
    ),
    of_one_test("NET-5/one-of-two-lengths", f"{SMUGGLED}[two lengths]", HEADS, take_the_first_length),
    of_one_test("NET-5/bare-cr", f"{SMUGGLED}[a bare CR]", HEADS, take_a_cr_for_a_blank),
    of_one_test("NET-5/endless-head", f"{NAMES}::test_endless_headers_are_cut_off", HEADS, read_heads_without_end),
    of_one_test(
        "NET-5/fronted",
        f"{INTERCEPTED}::test_intercept_always_closes_fronting",
        DECIDE,
        see_only_what_a_rule_says,
    ),
    of_one_test(
        "SEC-3/other-hosts-unseen",
        f"{PROMISES}/test_secrets.py::test_with_a_secret_no_host_is_reached_unseen",
        DECIDE,
        see_only_what_a_rule_says,
    ),
)
