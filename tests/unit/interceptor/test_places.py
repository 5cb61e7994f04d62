"""Pure: a value goes in at its place and nowhere else, and comes out of no answer."""

from __future__ import annotations

import base64
import gzip
import json
from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche_server.interceptor.binding import Sandbox, Target, matches_host, path_pattern, sandbox_of, split_port
from cloche_server.interceptor.inflate import BadEncoding, Inflater, coding_of
from cloche_server.interceptor.places import Guard, Head, Misplaced
from cloche_server.policy import paths
from tests.unit.interceptor.gate import Message, secret

HOST = Target("api.test", 443, tls=True)
REAL = 'real"value/of+the token'
PH = str(secret("TOKEN", REAL, "api.test")["placeholder"])
OTHER_PH = str(secret("OTHER", "x" * 20, "other.test")["placeholder"])


def guard(*secrets: Message, target: Target = HOST) -> Guard:
    return Guard(sandbox_of({"id": "s", "lineage": "l", "secrets": secrets}, None), target)


def token(*places: Message, **more: Any) -> Message:
    return secret("TOKEN", REAL, "api.test", places=list(places) or None, **more)


def head(target: str = "/", *headers: tuple[str, str], method: str = "GET") -> Head:
    return Head(method, target.encode(), tuple((n.encode(), v.encode()) for n, v in headers))


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


HEADER = {"kind": "header", "name": "X-Api-Key", "format": "{}"}
COOKIE = {"kind": "header", "name": "Cookie", "format": "session={}"}
BASIC = {"kind": "basic", "name": "bob", "format": "{}"}
ANY_BASIC = {"kind": "basic", "name": None, "format": "{}"}
QUERY = {"kind": "query", "name": "key", "format": "{}"}
BODY = {"kind": "body", "name": None, "format": "{}"}


@pytest.mark.req("SEC-2")
@pytest.mark.parametrize(
    ("binding", "before", "after"),
    [
        (token(), head("/", ("Authorization", f"Bearer {PH}")), head("/", ("Authorization", f"Bearer {REAL}"))),
        (token(), head("/", ("authorization", f"bearer {PH}")), head("/", ("authorization", f"Bearer {REAL}"))),
        (token(HEADER), head("/", ("x-api-key", PH)), head("/", ("x-api-key", REAL))),
        (token(COOKIE), head("/", ("Cookie", f"a=1; session={PH}")), head("/", ("Cookie", f"a=1; session={REAL}"))),
        (
            token(BASIC),
            head("/", ("Authorization", basic(f"bob:{PH}"))),
            head("/", ("Authorization", basic(f"bob:{REAL}"))),
        ),
        (
            token(ANY_BASIC),
            head("/", ("Authorization", basic(f"{PH}:"))),
            head("/", ("Authorization", basic(f"{REAL}:"))),
        ),
        (token(QUERY), head(f"/p?a=1&key={PH}"), head("/p?a=1&key=real%22value%2Fof%2Bthe%20token")),
    ],
)
def test_a_placeholder_in_its_place_is_replaced(binding: Message, before: Head, after: Head) -> None:
    assert guard(binding).head(before) == after


@pytest.mark.req("SEC-3")
@pytest.mark.parametrize(
    ("binding", "sent", "where"),
    [
        (token(), head("/", ("X-Other", PH)), "the header X-Other"),
        (token(), head("/", (PH, "x")), "a header's name"),
        (token(), head("/", ("Authorization", PH)), "the header Authorization"),
        (token(), head("/", ("Authorization", f"Bearer {PH} {PH}")), "the header Authorization"),
        (token(), head("/", ("Authorization", basic(f"bob:{PH}"))), "the header Authorization"),
        (token(), head("/", ("Cookie", f"a={PH}")), "the header Cookie"),
        (token(), head(f"/{PH}"), "the path"),
        (token(), head("/" + "".join(f"%{ord(char):02x}" for char in PH)), "the path"),
        (token(), head(f"/?key={PH}"), "the query parameter key"),
        (token(QUERY), head(f"/?other={PH}"), "the query parameter other"),
        (token(QUERY), head(f"/?{PH}=key"), f"the query parameter {PH}"),
        (token(QUERY), head(f"/?key=a{PH}"), "the query parameter key"),
        (token(BASIC), head("/", ("Authorization", basic(f"eve:{PH}"))), "the header Authorization"),
        (token(), head("/", ("X", base64.b64encode(f"..{PH}".encode()).decode())), "the header X"),
        (token(), head("/", ("X", PH.encode().hex())), "the header X"),
        (token(methods=["POST"]), head("/", ("Authorization", f"Bearer {PH}")), "the header Authorization"),
        (token(paths=["/v1/*"]), head("/v2/x", ("Authorization", f"Bearer {PH}")), "the header Authorization"),
        (token(), head("/", method=PH), "the method"),
        (secret("TOKEN", REAL), head("/", ("Authorization", f"Bearer {PH}")), "the header Authorization"),
        (secret("TOKEN", REAL, "*.api.test"), head("/", ("Authorization", f"Bearer {PH}")), "the header Authorization"),
    ],
)
def test_a_placeholder_anywhere_else_is_refused(binding: Message, sent: Head, where: str) -> None:
    with pytest.raises(Misplaced) as found:
        guard(binding).head(sent)
    assert (found.value.kind, found.value.where, found.value.secret) == ("placeholder_elsewhere", where, "TOKEN")
    assert REAL not in found.value.text


@pytest.mark.req("SEC-3")
def test_what_stands_beside_a_replaced_part_is_looked_at_too() -> None:
    other = secret("OTHER", "x" * 20, "other.test")
    for sent in (
        head("/", ("Cookie", f"session={PH}; a={OTHER_PH}")),
        head("/", ("Authorization", basic(f"{OTHER_PH}:{PH}"))),
        head("/", ("Authorization", basic(f"{PH}:{OTHER_PH}"))),
        head(f"/?key={PH}&a={OTHER_PH}"),
    ):
        with pytest.raises(Misplaced) as found:
            guard(token(COOKIE, ANY_BASIC, QUERY), other).head(sent)
        assert found.value.secret == "OTHER"


@pytest.mark.req("SEC-2")
def test_without_tls_a_value_goes_only_where_the_binding_names_the_port() -> None:
    plain = Target("api.test", 80, tls=False)
    sent = head("/", ("Authorization", f"Bearer {PH}"))
    with pytest.raises(Misplaced, match="without TLS"):
        guard(token(), target=plain).head(sent)
    named = secret("TOKEN", REAL, "api.test:80")
    assert guard(named, target=plain).head(sent).headers[0][1] == f"Bearer {REAL}".encode()
    with pytest.raises(Misplaced, match="not bound to"):
        guard(named).head(sent)


@pytest.mark.req("SEC-3")
@pytest.mark.parametrize(
    "sent",
    [
        head("/", ("Authorization", "Bearer my-own-key-of-somebody")),
        head("/", ("X-Api-Key", "my-own-key")),
        head("/", ("Authorization", basic("bob:hunter2"))),
        head("/?key=mine"),
        head("/?a=1&%6bey=mine"),
    ],
)
def test_another_credential_is_refused_where_the_bound_one_is_required(sent: Head) -> None:
    with pytest.raises(Misplaced) as found:
        guard(token(HEADER, QUERY, require=True)).head(sent)
    assert found.value.kind == "foreign_credential"
    assert guard(token(HEADER, QUERY)).head(sent) == sent


def test_a_required_credential_may_be_absent_or_the_placeholder() -> None:
    strict = guard(token(HEADER, QUERY, BASIC, require=True))
    assert strict.head(head("/?a=1", ("Accept", "*/*"))) == head("/?a=1", ("Accept", "*/*"))
    assert strict.head(head("/", ("X-Api-Key", PH))).headers[0][1] == REAL.encode()
    assert strict.head(head("/", ("Authorization", basic(f"bob:{PH}")))).headers[0][1] == basic(f"bob:{REAL}").encode()


@pytest.mark.req("SEC-1")
def test_a_real_value_in_a_request_is_refused() -> None:
    with pytest.raises(Misplaced) as found:
        guard(token()).head(head("/", ("X", f"a {REAL} b")))
    assert found.value.kind == "secret_in_request"


def _body(binding: Message, chunks: list[bytes], kind: str = "application/json") -> bytes:
    watch = guard(binding).body(head("/", method="POST"), kind.encode())
    assert watch is not None
    return b"".join(map(watch.feed, chunks)) + watch.flush()


@pytest.mark.req("SEC-2")
@pytest.mark.parametrize(
    ("kind", "coded"),
    [
        ("application/json; charset=utf-8", json.dumps(REAL)[1:-1]),
        ("application/x-www-form-urlencoded", "real%22value%2Fof%2Bthe%20token"),
        ("text/plain", REAL),
    ],
)
def test_a_body_gets_the_value_as_its_type_writes_it(kind: str, coded: str) -> None:
    sent = f"before {PH} after".encode()
    for at in range(len(sent)):
        assert _body(token(BODY), [sent[:at], sent[at:]], kind) == f"before {coded} after".encode()


@pytest.mark.req("SEC-3")
@given(st.data())
def test_a_placeholder_in_a_body_is_seen_however_it_is_cut(data: st.DataObject) -> None:
    written = data.draw(
        st.sampled_from(
            [
                PH.encode(),
                base64.b64encode(b"zz" + PH.encode()),
                PH.encode().hex().encode(),
                "".join(f"%{ord(char):02x}" for char in PH).encode(),
                "".join(f"\\u{ord(char):04x}" for char in PH).encode(),
            ]
        )
    )
    text = data.draw(st.binary(max_size=300)) + written + data.draw(st.binary(max_size=300))
    borders = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    chunks = [text[a:b] for a, b in zip([0, *borders], [*borders, len(text)], strict=True)]
    with pytest.raises(Misplaced):
        _body(token(), chunks)


@pytest.mark.req("SEC-2")
def test_a_method_in_a_header_must_fit_the_secret_too() -> None:
    narrow = token(methods=["POST"])
    sent = head("/", ("Authorization", f"Bearer {PH}"), method="POST")
    assert guard(narrow).head(sent).headers[0][1] == f"Bearer {REAL}".encode()
    with pytest.raises(Misplaced):
        guard(narrow).head(replace(sent, other_methods=("DELETE",)))


def test_a_body_without_placeholders_passes_as_it_is() -> None:
    assert _body(token(), [b"abc", b"", b"def" * 1000]) == b"abc" + b"def" * 1000
    assert Guard(Sandbox("s", "l"), HOST).body(head("/"), b"") is None


@pytest.mark.req("SEC-3")
@pytest.mark.parametrize(
    "written",
    [
        REAL,
        json.dumps(REAL)[1:-1],
        "real%22value%2Fof%2Bthe%20token",
        "real%22value%2fof%2bthe%20token",
        base64.b64encode(f"bob:{REAL}".encode()).decode(),
        REAL.encode().hex(),
    ],
)
def test_answers_lose_the_value_and_keep_their_length(written: str) -> None:
    watching = guard(token())
    out = watching.redactor().whole(f"<{written}>".encode())
    assert len(out) == len(written.encode()) + 2
    core = written[4:-4].encode()
    assert core not in out
    assert core not in watching.clean(f"https://x/?a={written}".encode())
    assert watching.clean(REAL.encode()) == PH.encode()


def test_a_value_that_was_taken_away_is_still_kept_out_of_answers() -> None:
    first = sandbox_of({"id": "s", "lineage": "l", "secrets": [token()]}, None)
    second = sandbox_of({"id": "s", "lineage": "l", "secrets": []}, first)
    later = Guard(sandbox_of({"id": "s", "lineage": "l", "secrets": []}, second), HOST)
    assert REAL.encode() not in later.redactor().whole(b"a " + REAL.encode())
    assert not later.watches


def test_patterns() -> None:
    assert split_port("api.test:8443") == ("api.test", 8443)
    assert split_port("[::1]:443") == ("::1", 443)
    assert split_port("*.test") == ("*.test", None)
    assert matches_host("*.test", "a.b.test")
    assert not matches_host("*.test", "test")
    assert not matches_host("*.test", "atest")
    assert path_pattern("/v1/*/x").fullmatch("/v1/a/x")
    assert not path_pattern("/v1/*/x").fullmatch("/v1/a/b/x")
    assert path_pattern("/v1/**").fullmatch("/v1/a/b\nc")
    assert not path_pattern("/v1.x").fullmatch("/v1ax")


_TEXT = st.text(st.sampled_from("ab/*%2fF5e0;.\\?# A"), max_size=12).map(lambda text: "/" + text)


@pytest.mark.req("SEC-2")
@given(_TEXT, _TEXT)
def test_a_path_that_fits_a_secret_fits_a_rule_too(pattern: str, path: str) -> None:
    """The interceptor cannot import the policy's paths; its own reading is never wider."""
    binding = secret("TOKEN", REAL, "api.test", paths=[pattern])
    fits = sandbox_of({"id": "s", "lineage": "l", "secrets": [binding]}, None).secrets[0].fits("GET", path)
    try:
        rule = paths.compiled(pattern)
    except paths.BadPattern:
        return
    if fits:
        assert paths.refused(path) is None
        assert rule.matches(paths.split(path))


@pytest.mark.parametrize(
    ("pattern", "path", "fits"),
    [
        ("/v1/*", "/v1/a%20b", True),
        ("/v1/*", "/v1/a%2Fb", False),
        ("/v1/*", "/v1/a//b", False),
        ("/v1/**", "/v1/a/b", True),
        ("/v1/**", "/v1/a;x/b", False),
        ("/v1/**", "/v1/%61", False),
        ("/", "/", True),
    ],
)
def test_paths_of_a_secret(pattern: str, path: str, fits: bool) -> None:
    binding = secret("TOKEN", REAL, "api.test", paths=[pattern])
    assert sandbox_of({"id": "s", "lineage": "l", "secrets": [binding]}, None).secrets[0].fits("GET", path) is fits


def test_codings() -> None:
    assert [
        coding_of(text) for text in ("", "identity", "aws-chunked", "gzip", "aws-chunked, GZIP", "br", "gzip, br")
    ] == [
        "identity",
        "identity",
        "identity",
        "inflate",
        "inflate",
        "unknown",
        "unknown",
    ]


def test_an_inflater_is_bounded_and_wants_a_whole_body() -> None:
    coded = gzip.compress(b"a" * 1_000_000) + gzip.compress(b"second")
    inflater = Inflater()
    pieces = [piece for at in range(0, len(coded), 100) for piece in inflater.feed(coded[at : at + 100])]
    inflater.finish()
    assert b"".join(pieces) == b"a" * 1_000_000 + b"second"
    assert max(map(len, pieces)) <= 64 << 10
    cut = Inflater()
    list(cut.feed(coded[:50]))
    with pytest.raises(BadEncoding):
        cut.finish()
    with pytest.raises(BadEncoding):
        list(Inflater().feed(b"not gzip at all"))
    bomb = gzip.compress(bytes(300 << 20), 9)
    with pytest.raises(BadEncoding, match="256 MiB"):
        deque(Inflater().feed(bomb), maxlen=0)
