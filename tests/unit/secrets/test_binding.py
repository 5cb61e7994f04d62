"""What an operator may ask for, and in which form it is kept."""

from __future__ import annotations

from typing import Any

import pytest

from cloche.wire.errors import ClocheError
from cloche_server.secrets.binding import bind, check_value
from tests.unit.secrets.room import ALICE, ROOT, asked

COMMAND = {"kind": "command", "argv": ["/bin/echo", "x"]}


def refused(code: str = "invalid_request", caller: Any = ROOT, **fields: Any) -> str:
    with pytest.raises(ClocheError) as raised:
        bind(caller, "TOKEN", asked(**fields), now=1.0)
    assert raised.value.code == code
    return raised.value.message


def test_hosts_have_one_form() -> None:
    wanted = [
        "API.Example.com.",
        "api.example.com",
        "*.Example.com",
        "bücher.example",
        "api.example.com:8443",
        "203.0.113.9:80",
        "[2001:DB8::1]:443",
    ]
    found = bind(ALICE, "TOKEN", asked(hosts=wanted), now=1.0).hosts
    assert found == (
        "api.example.com",
        "*.example.com",
        "xn--bcher-kva.example",
        "api.example.com:8443",
        "203.0.113.9:80",
        "[2001:db8::1]:443",
    )


@pytest.mark.parametrize(
    "host",
    [
        "*",
        "*.",
        "*.com",
        "*.10.0.0.1",
        "a b",
        "user@host.example",
        "0x7f.1",
        "host.example:0",
        "host.example:99999",
        "http://host.example",
        "host.example/path",
        "[2001:db8::1",
    ],
)
def test_what_is_no_host_or_too_wide_is_refused(host: str) -> None:
    assert "hosts" in refused(hosts=[host])


@pytest.mark.parametrize(
    "place",
    [
        {"kind": "header"},
        {"kind": "header", "name": "Host"},
        {"kind": "header", "name": "Transfer-Encoding"},
        {"kind": "header", "name": "X-A: b"},
        {"kind": "header", "name": "X-A\r\nX-B"},
        {"kind": "header", "name": "X-A", "format": "Bearer"},
        {"kind": "header", "name": "X-A", "format": "{} {}"},
        {"kind": "header", "name": "X-A", "format": "{}\r\nX-B: 1"},
        {"kind": "basic", "name": "us:er"},
        {"kind": "query"},
    ],
)
def test_a_place_that_could_do_something_else_is_refused(place: dict[str, Any]) -> None:
    assert "places" in refused(places=[place])


@pytest.mark.parametrize(
    "source",
    [
        {"kind": "value"},
        {"kind": "value", "value": "long enough", "ttl_s": 5},
        {"kind": "file", "path": "relative"},
        {"kind": "file"},
        {"kind": "command", "argv": []},
        {"kind": "command", "argv": [""]},
        {"kind": "command", "argv": ["a\0b"]},
        {"kind": "command", "argv": ["/bin/x"], "path": "/etc/passwd"},
        {"kind": "http"},
        {"kind": "http", "url": "https://x.example", "headers_from": {"X-A": "b\r\nc"}},
    ],
)
def test_a_source_has_its_own_fields_and_no_other(source: dict[str, Any]) -> None:
    assert "source" in refused(source=source)


@pytest.mark.req("SEC-4")
@pytest.mark.parametrize(
    "source", [COMMAND, {"kind": "file", "path": "/etc/shadow"}, {"kind": "http", "url": "http://127.0.0.1/x"}]
)
def test_what_the_node_does_itself_only_its_operator_asks_for(source: dict[str, Any]) -> None:
    assert "operator" in refused("forbidden", ALICE, source=source)
    assert bind(ROOT, "TOKEN", asked(source), now=1.0).origin.kind == source["kind"]


@pytest.mark.parametrize(
    "value", [b"", b"short", b"x" * (64 * 1024 + 1), b"two\nlines here", b"with a nul\0", b"del\x7fete it"]
)
def test_values_that_cannot_be_put_into_a_request(value: bytes) -> None:
    assert check_value(value)
    assert check_value(b"an ordinary value") is None
    assert check_value("grüße an alle".encode()) is None


def test_a_binding_shows_whose_it_is_and_nothing_of_its_source() -> None:
    binding = bind(
        ROOT,
        "TOKEN",
        asked({"kind": "http", "url": "https://x.example/planted", "headers_from": {"X-Key": "planted"}}),
        now=1.0,
    )
    assert "planted" not in repr(binding) + str(binding) + binding.view(0).model_dump_json()
    assert binding.origin.url == "https://x.example/planted"


@pytest.mark.parametrize(
    "url",
    [
        "http://198.51.100.7/x",
        "ftp://127.0.0.1/",
        "https://user@host.example/",
        "file:///etc/passwd",
        "https://",
        "x",
        "http://[::1",
    ],
)
def test_only_plain_https_or_this_machine(url: str) -> None:
    assert "source.url is" in refused(source={"kind": "http", "url": url})
    for good in ("https://host.example/", "http://127.0.0.1:8200/v1", "http://localhost/"):
        assert bind(ROOT, "TOKEN", asked({"kind": "http", "url": good}), now=1.0).origin.url == good
