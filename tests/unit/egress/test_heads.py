"""HTTP/1 requests through a proxy: forms, the table of smuggling, framing in any pieces, and speed."""

import pytest

from cloche_server.egress.fields import FIELDS_MAX
from cloche_server.egress.heads import HEAD_BYTES_MAX, Head
from tests.unit.egress.http_requests import CHUNKED, GET, head, refusal, taken


@pytest.mark.req("NET-5")
@pytest.mark.parametrize(
    ("raw", "form", "host", "port", "path"),
    [
        (GET, "absolute", "a.example", 80, "/x"),
        (head("GET http://a.example HTTP/1.1"), "absolute", "a.example", 80, "/"),
        (head("GET http://a.example?q HTTP/1.1"), "absolute", "a.example", 80, "/?q"),
        (head("GET HTTP://A.Example:8080/x?y=http://b/ HTTP/1.1", host="a.example:8080"), "absolute", "a.example", 8080, "/x?y=http://b/"),
        (head("GET http://a.example:80/ HTTP/1.1"), "absolute", "a.example", 80, "/"),
        (head("GET http://A.Example./ HTTP/1.1", host="a.EXAMPLE:80"), "absolute", "a.example", 80, "/"),
        (head("GET http://[2606:4700::1]:8080/ HTTP/1.1", host="[2606:4700:0::1]:8080"), "absolute", "2606:4700::1", 8080, "/"),
        (head("GET http://a.example/ HTTP/1.0", host=None), "absolute", "a.example", 80, "/"),
        (head("GET /x?y HTTP/1.1"), "origin", "a.example", 80, "/x?y"),
        (head("GET /x HTTP/1.1", host="a.example:8080"), "origin", "a.example", 8080, "/x"),
        (head("OPTIONS * HTTP/1.1"), "origin", "a.example", 80, "*"),
        (head("CONNECT a.example:443 HTTP/1.1", host="a.example:443"), "connect", "a.example", 443, ""),
        (head("CONNECT a.example:443 HTTP/1.1", host="a.example"), "connect", "a.example", 443, ""),
        (head("CONNECT a.example:443 HTTP/1.0", host=None), "connect", "a.example", 443, ""),
        (head("CONNECT a.example:443 HTTP/1.1", host=None), "connect", "a.example", 443, ""),
        (head("CONNECT [2606:4700::1]:443 HTTP/1.1", host=None), "connect", "2606:4700::1", 443, ""),
        (head("M-SEARCH /x HTTP/1.1"), "origin", "a.example", 80, "/x"),
    ],
)  # fmt: skip
def test_forms(raw: bytes, form: str, host: str, port: int, path: str) -> None:
    for size in (None, 1):
        found = taken(raw, size)[0]
        assert isinstance(found, Head)
        assert (found.form, found.host, found.port, found.path) == (form, host, port, path)
        assert found.raw == raw


@pytest.mark.req("NET-5")
@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        # framing
        (head("POST / HTTP/1.1", "Content-Length: 5", "Transfer-Encoding: chunked"), "length_and_encoding"),
        (head("POST / HTTP/1.1", "Transfer-Encoding: chunked", "Content-Length: 0"), "length_and_encoding"),
        (head("POST / HTTP/1.1", "Content-Length: 5", "Content-Length: 5"), "length_twice"),
        (head("POST / HTTP/1.1", "Content-Length: 5", "Content-Length: 6"), "length_twice"),
        (head("POST / HTTP/1.1", "Content-Length: 5, 5"), "length_twice"),
        (head("POST / HTTP/1.1", "Content-Length: +1"), "length"),
        (head("POST / HTTP/1.1", "Content-Length: -1"), "length"),
        (head("POST / HTTP/1.1", "Content-Length: 0x10"), "length"),
        (head("POST / HTTP/1.1", "Content-Length: 1_0"), "length"),
        (head("POST / HTTP/1.1", "Content-Length: 1 0"), "length"),
        (head("POST / HTTP/1.1", "Content-Length: "), "length"),
        (head("POST / HTTP/1.1", "Content-Length: " + "9" * 30), "length"),
        (head("POST / HTTP/1.1", "Content-Length: \xb2"), "length"),
        (head("POST / HTTP/1.1", "Transfer-Encoding: gzip, chunked"), "transfer_encoding"),
        (head("POST / HTTP/1.1", "Transfer-Encoding: chunked, identity"), "transfer_encoding"),
        (head("POST / HTTP/1.1", "Transfer-Encoding: identity"), "transfer_encoding"),
        (head("POST / HTTP/1.1", "Transfer-Encoding: xchunked"), "transfer_encoding"),
        (head("POST / HTTP/1.1", "Transfer-Encoding: \"chunked\""), "transfer_encoding"),
        (head("POST / HTTP/1.1", "Transfer-Encoding: chunked", "Transfer-Encoding: chunked"), "transfer_encoding"),
        (head("POST / HTTP/1.0", "Transfer-Encoding: chunked"), "transfer_encoding"),
        (head("POST / HTTP/1.1", "Transfer_Encoding: chunked"), "header"),
        (head("POST / HTTP/1.1", "Content_Length: 5"), "header"),
        (head("POST / HTTP/1.1", "Transfer-Encoding : chunked"), "space_before_colon"),
        (head("POST / HTTP/1.1", "Transfer-Encoding\t: chunked"), "space_before_colon"),
        (head("POST / HTTP/1.1", "Transfer-Encoding:\x0bchunked"), "header"),
        (head("POST / HTTP/1.1", "Transfer-Encoding:", " chunked"), "folded_line"),
        (head("POST / HTTP/1.1", "X: y", "\tfolded"), "folded_line"),
        (head("POST / HTTP/1.1", "X: a\rTransfer-Encoding: chunked"), "bare_cr"),
        (head("POST / HTTP/1.1", "X: a\nTransfer-Encoding: chunked"), "bare_lf"),
        (b"GET / HTTP/1.1\nHost: a.example\n\n", "bare_lf"),
        (b"GET / HTTP/1.1\r\nHost: a.example\r\n\n", "bare_lf"),
        (head("POST / HTTP/1.1", "X: a\0b"), "nul"),
        (head("POST / HTTP/1.1", "X\0: a"), "nul"),
        (head("POST / HTTP/1.1", ": empty"), "header"),
        (head("POST / HTTP/1.1", "no colon"), "header"),
        (head("POST / HTTP/1.1", "X(y): z"), "header"),
        (head("POST / HTTP/1.1", "X: \x7f"), "header"),
        # hosts
        (head("GET / HTTP/1.1", "Host: b.example"), "host_twice"),
        (head("GET / HTTP/1.1", "hOsT: a.example"), "host_twice"),
        (head("GET / HTTP/1.1", host=None), "host_missing"),
        (head("GET / HTTP/1.0", host=None), "host_missing"),
        (head("GET http://a.example/ HTTP/1.1", host=None), "host_missing"),
        (head("GET http://a.example/ HTTP/1.1", host="b.example"), "host_mismatch"),
        (head("GET http://a.example/ HTTP/1.1", host="a.example:8080"), "host_mismatch"),
        (head("GET http://a.example:8080/ HTTP/1.1", host="a.example"), "host_mismatch"),
        (head("CONNECT a.example:443 HTTP/1.1", host="b.example:443"), "host_mismatch"),
        (head("CONNECT a.example:443 HTTP/1.1", host="a.example:444"), "host_mismatch"),
        (head("GET / HTTP/1.1", host=""), "bad_host"),
        (head("GET / HTTP/1.1", host="a.example, b.example"), "bad_host"),
        (head("GET / HTTP/1.1", host="a.example:x"), "bad_host"),
        (head("GET / HTTP/1.1", host="a.example/"), "bad_host"),
        (head("GET / HTTP/1.1", host="user@a.example"), "userinfo"),
        (head("GET / HTTP/1.1", host="\xe4.example"), "bad_host"),
        (head("GET / HTTP/1.1", host="2852039166"), "bad_host"),
        # targets
        (head("GET http://user:pw@a.example/ HTTP/1.1"), "userinfo"),
        (head("GET http://a.example@b.example/ HTTP/1.1"), "userinfo"),
        (head("GET http://a.example\\@b.example/ HTTP/1.1"), "userinfo"),
        (head("GET http://a.example%00.b.example/ HTTP/1.1"), "bad_host"),
        (head("GET http:///x HTTP/1.1"), "bad_host"),
        (head("GET http://0xA9FEA9FE/ HTTP/1.1"), "bad_host"),
        (head("GET http://127.1/ HTTP/1.1"), "bad_host"),
        (head("GET http://a.example:0/ HTTP/1.1"), "bad_host"),
        (head("GET http://a.example/#x HTTP/1.1"), "fragment"),
        (head("GET /#x HTTP/1.1"), "fragment"),
        (head("GET https://a.example/ HTTP/1.1"), "scheme"),
        (head("GET ftp://a.example/ HTTP/1.1"), "scheme"),
        (head("GET a.example/ HTTP/1.1"), "target"),
        (head("GET * HTTP/1.1"), "target"),
        (head("CONNECT a.example HTTP/1.1"), "bad_host"),
        (head("CONNECT /x HTTP/1.1"), "bad_host"),
        (head("CONNECT http://a.example:443/ HTTP/1.1"), "bad_host"),
        (head("CONNECT a.example:99999 HTTP/1.1"), "bad_host"),
        (head("CONNECT u@a.example:443 HTTP/1.1"), "userinfo"),
        (head("CONNECT a.example:443 HTTP/1.1", "Content-Length: 5", host=None), "connect_body"),
        (head("CONNECT a.example:443 HTTP/1.1", "Transfer-Encoding: chunked", host=None), "connect_body"),
        (head("GET /" + "x" * 20_000 + " HTTP/1.1"), "target_too_long"),
        # request lines
        (b"GET /\r\n\r\n", "version"),
        (head("GET / HTTP/0.9"), "version"),
        (head("GET / HTTP/2.7"), "version"),
        (head("GET / HTTP/2.0"), "version"),
        (head("GET / HTTP/1.2"), "version"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "version"),
        (head("GET / http/1.1"), "request_line"),
        (head("GET / HTTP/1.10"), "request_line"),
        (head("GET  / HTTP/1.1"), "request_line"),
        (head("GET /  HTTP/1.1"), "request_line"),
        (head("GET\t/ HTTP/1.1"), "request_line"),
        (head("GET / HTTP/1.1 "), "request_line"),
        (head("GET /\xe4 HTTP/1.1"), "request_line"),
        (head(" GET / HTTP/1.1"), "request_line"),
        (b"\r\nGET / HTTP/1.1\r\nHost: a.example\r\n\r\n", "request_line"),
        (b"\x16\x03\x01\x02\x00", "request_line"),
        (head("G" * 40 + " / HTTP/1.1"), "request_line"),
        (head("G(T / HTTP/1.1"), "request_line"),
        # connection and upgrades
        (head("GET / HTTP/1.1", "Connection: close, Host"), "connection"),
        (head("GET / HTTP/1.1", "Connection: Content-Length"), "connection"),
        (head("GET / HTTP/1.1", "Connection: transfer-encoding"), "connection"),
        (head("GET / HTTP/1.1", "Connection: Authorization"), "connection"),
        (head("GET / HTTP/1.1", "Connection: a b"), "connection"),
        (head("GET / HTTP/1.1", "Connection: Upgrade", "Upgrade: TLS/1.0"), "upgrade"),
        (head("GET / HTTP/1.1", "Connection: Upgrade", "Upgrade: websocket, foo"), "upgrade"),
        (head("GET / HTTP/1.1", "Upgrade: websocket"), "upgrade"),
        (head("GET / HTTP/1.0", "Connection: Upgrade", "Upgrade: websocket"), "upgrade"),
        (head("POST / HTTP/1.1", "Connection: Upgrade", "Upgrade: websocket"), "upgrade"),
        (head("GET / HTTP/1.1", "Connection: Upgrade", "Upgrade: websocket", "Content-Length: 5"), "upgrade"),
        (head("POST / HTTP/1.1", "X-HTTP-Method-Override: PUT", "X-HTTP-Method: DELETE"), "override"),
        (head("POST / HTTP/1.1", "X-Method-Override: "), "override"),
        (head("POST / HTTP/1.1", "X-HTTP-Method-Override: A B"), "override"),
        # sizes
        (head("GET / HTTP/1.1", *["X: y"] * FIELDS_MAX), "too_many_headers"),
        (head("GET / HTTP/1.1", "X: " + "y" * HEAD_BYTES_MAX), "too_long"),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * HEAD_BYTES_MAX, "too_long"),
    ],
)  # fmt: skip
def test_smuggling(raw: bytes, reason: str) -> None:
    assert refusal(raw) == reason
    assert refusal(GET + raw) == reason


@pytest.mark.req("NET-5")
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"5;ext=1\r\nhello\r\n0\r\n\r\n", "chunk_extension"),
        (b"5 \r\nhello\r\n", "chunk_size"),
        (b" 5\r\nhello\r\n", "chunk_size"),
        (b"0x5\r\nhello\r\n", "chunk_size"),
        (b"+5\r\nhello\r\n", "chunk_size"),
        (b"-5\r\nhello\r\n", "chunk_size"),
        (b"5_0\r\n", "chunk_size"),
        (b"\r\n", "chunk_size"),
        (b"g\r\n", "chunk_size"),
        (b"5\nhello", "chunk_size"),
        (b"5\rhello", "chunk_size"),
        (b"10000000000000000\r\n", "chunk_size"),
        (b"ffffffffffffffff\r\n", "chunk_size"),
        (b"5\r\nhelloX\r\n", "chunk_end"),
        (b"5\r\nhello\n", "chunk_end"),
        (b"5\r\nhello0\r\n\r\n", "chunk_end"),
        (b"0\r\nTrailer: x\r\n\r\n", "trailers"),
        (b"0\r\n\n", "trailers"),
        (b"0;x\r\n\r\n", "chunk_extension"),
    ],
)
def test_bad_chunks(body: bytes, reason: str) -> None:
    assert refusal(CHUNKED + body) == reason
