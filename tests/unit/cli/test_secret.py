"""`cloche secret` against the real rooms over a real socket: what is typed, what is bound, and that no value is printed."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.secrets.room import ROOT as ADMIN
from tests.unit.secrets.room import VALUE
from tests.unit.secrets.rooms_served import ServedRooms, rooms

BOUND = ("--host", "api.example.com", "--header", "Authorization: Bearer {}")
EVIL = "\x1b]52;c;aGk=\x07evil\u202e"


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedRooms]:
    with rooms(tmp_path) as one:
        monkeypatch.setenv("CLOCHE_URL", one.url)
        yield one


def value_of(served: ServedRooms, name: str) -> str:
    """As a sandbox would get it."""
    owner = next(each.owner for each in served.run(served.backend.list_secrets(ADMIN)).result(5) if each.name == name)
    ids = {"sandbox": "sloc" + "a" * 16, "lineage": "lloc" + "b" * 16}
    (lease,) = served.run(served.backend.secrets.lease(owner, ADMIN.tenant, [name], **ids)).result(10)
    value = lease.value.reveal().decode()
    served.backend.secrets.release(ids["sandbox"])
    return value


@pytest.mark.req("SEC-4")
def test_from_env_file_and_stdin_are_read_here(served, cloche, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TOKEN", VALUE)
    monkeypatch.setenv("MINE", "another value")
    (tmp_path / "file").write_text("value in a file\n")
    result = cloche("secret", "set", "TOKEN", "--from", "env", *BOUND)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "✓ secret TOKEN is bound to api.example.com\n"
    assert cloche("secret", "set", "OTHER", "MINE", "--from", "env", *BOUND).exit_code == 0
    assert cloche("secret", "set", "FILED", str(tmp_path / "file"), "--from", "file", *BOUND).exit_code == 0
    assert [value_of(served, name) for name in ("TOKEN", "OTHER", "FILED")] == [
        VALUE,
        "another value",
        "value in a file",
    ]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"value by stdin\n")))
    from cloche.cli.secret import _file

    assert _file("-") == "value by stdin"


@pytest.mark.req("SEC-4")
def test_what_the_node_asks_is_sent_as_it_is(served, cloche) -> None:
    line = ("secret", "set", "TOKEN", "--from", "command", "--ttl", "10m", *BOUND)
    assert cloche(*line, "--", "/bin/echo", "-n", "a minted value").exit_code == 0
    assert value_of(served, "TOKEN") == "a minted value"
    http = ("--from", "http", "--field", "data.token", "--request-header", "X-Key: $KEY", "--post", "{}")
    assert cloche("secret", "set", "HTTP", "https://vault.example/v1", *http, *BOUND).exit_code == 0
    binding, _ = served.backend.secrets._files.read(ADMIN.tenant, served_owner(served), "HTTP") or (None, None)
    assert binding is not None
    origin = binding.origin
    assert (origin.url, origin.field, origin.method, origin.body) == (
        "https://vault.example/v1",
        "data.token",
        "POST",
        "{}",
    )
    assert origin.headers_from == {"X-Key": "$KEY"}
    assert cloche("secret", "set", "ON", "/etc/token", "--from", "file", "--on-node", *BOUND).exit_code == 0
    views = json.loads(cloche("secret", "ls", "--json").stdout)["secrets"]
    assert {view["name"]: view["source"] for view in views} == {"TOKEN": "command", "HTTP": "http", "ON": "file"}


def served_owner(served: ServedRooms) -> str:
    return str(served.run(served.backend.list_secrets(ADMIN)).result(5)[0].owner)


@pytest.mark.req("SEC-2")
def test_every_place_and_limit_reaches_the_node(served, cloche, monkeypatch) -> None:
    monkeypatch.setenv("TOKEN", VALUE)
    places = ("--header", "X-Key:", "--basic", "git", "--basic", "*", "--query", "key", "--body", "--require")
    limits = ("--method", "get", "--path", "/repos/**", "--host", "*.example.com:8443")
    result = cloche("secret", "set", "TOKEN", "--from", "env", "--json", *places, *limits)
    view = json.loads(result.stdout)
    assert view["places"] == [
        {"kind": "header", "name": "X-Key", "format": "{}"},
        {"kind": "basic", "name": "git", "format": "{}"},
        {"kind": "basic", "name": None, "format": "{}"},
        {"kind": "query", "name": "key", "format": "{}"},
        {"kind": "body", "name": None, "format": "{}"},
    ]
    assert (view["methods"], view["paths"], view["hosts"]) == (["GET"], ["/repos/**"], ["*.example.com:8443"])
    assert view["require"] is True


def test_ls_and_rm(served, cloche, monkeypatch) -> None:
    monkeypatch.setenv("TOKEN", VALUE)
    cloche("secret", "set", "TOKEN", "--from", "env", *BOUND)
    lines = cloche("secret", "ls").stdout.splitlines()
    assert lines[0].split() == ["NAME", "FROM", "HOSTS", "PLACES", "REQUIRED", "HELD", "BY", "SET", "OWNER"]
    assert lines[1].split()[:5] == ["TOKEN", "value", "api.example.com", "header", "Authorization"]
    assert cloche("secret", "ls", "-q").stdout == "TOKEN\n"
    assert cloche("secret", "rm", "TOKEN").stdout == "TOKEN\n"
    gone = cloche("secret", "rm", "TOKEN")
    assert (gone.exit_code, "secret_not_found" in gone.stderr) == (125, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--from", "env"), "--host"),
        (("--from", "env", "--host", "a.example"), "where in a request"),
        (("--from", "env", "--host", "a.example", "--header", "no colon"), "--header is NAME: TEXT"),
        (("--from", "env", "--host", "a.example", "--header", "X-Key: Bearer"), "write {} where"),
        (("NOT_SET", "--from", "env", *BOUND), "no variable NOT_SET"),
        (("--from", "file", *BOUND), "which file?"),
        (("--from", "http", *BOUND), "which URL?"),
        (("--from", "command", *BOUND), "which command?"),
        (("a", "b", "--from", "env", *BOUND), "too many"),
        (("--from", "env", "--field", "x", *BOUND), "--field is for --from http"),
        (("--from", "env", "--request-header", "A: b", *BOUND), "--request-header is for --from http"),
        (("--from", "env", "--on-node", *BOUND), "--on-node is for --from file"),
        (("--from", "env", "--ttl", "5m", *BOUND), "--ttl is for values"),
    ],
)
def test_what_was_typed_wrong_is_named(served, cloche, monkeypatch, words, said) -> None:
    monkeypatch.setenv("TOKEN", VALUE)
    result = cloche("secret", "set", "TOKEN", *words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert served.run(served.backend.list_secrets(ADMIN)).result(5) == []


@pytest.mark.req("SEC-1")
def test_no_value_is_printed_whatever_goes_wrong(served, cloche, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TOKEN", VALUE + "\nsecond line")
    monkeypatch.setenv("GOOD", VALUE)
    monkeypatch.setenv("CLOCHE_DEBUG", "1")
    (tmp_path / "binary").write_bytes(VALUE.encode() + b"\xff")
    lines = [
        ("TOKEN", "--from", "env", *BOUND),
        ("GOOD", "--from", "env", "--host", "not a host", "--header", "X: {}"),
        ("GOOD", "--from", "env", "--host", "a.example", "--header", "Host: {}"),
        ("GOOD", "--from", "env", *BOUND),
        ("no-name", "GOOD", "--from", "env", *BOUND),
        ("FILE", str(tmp_path / "binary"), "--from", "file", *BOUND),
        ("FILE", str(tmp_path / "none"), "--from", "file", *BOUND),
    ]
    results = [cloche("secret", "set", *line) for line in lines]
    assert [result.exit_code for result in results] == [2, 2, 2, 0, 2, 2, 1]
    results += [cloche("secret", "ls"), cloche("secret", "ls", "--json")]
    assert not [result for result in results if VALUE in result.output + str(result.exception)]


def test_names_that_others_chose_are_shown_and_not_obeyed(cloche, node) -> None:
    from types import SimpleNamespace

    from cloche.wire.secrets import Place, SecretView

    view = SecretView.model_construct(
        name=EVIL,
        owner=EVIL,
        source="value",
        hosts=[EVIL],
        places=[Place(kind="query", name=EVIL)],
        require=False,
        set_at=0.0,
        leases=0,
    )
    node.secrets = SimpleNamespace(list=lambda: [view], remove=lambda _name: view)
    for words in (("ls",), ("ls", "-q"), ("ls", "--json"), ("rm", "x")):
        text = cloche("secret", *words).output
        assert "evil" in text
        assert not any(char in text for char in "\x1b\x07\u202e"), words
