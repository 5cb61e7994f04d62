"""The thinnest path: HTTP/1.1 in TLS, a verdict for each request, a placeholder in its place."""

from __future__ import annotations

import pytest

from tests.unit.interceptor.conftest import World
from tests.unit.interceptor.gate import ALLOWED, secret, wait_until
from tests.unit.interceptor.talk import Talk, request, say

TOKEN = secret("TOKEN", "real-value-of-the-token", "api.test")


@pytest.mark.req("NET-5")
def test_a_request_goes_through_and_is_asked_for(world: World) -> None:
    reply = say(world, request("GET", "/hello?x=1"))
    assert reply.status == 200
    assert reply.body.startswith(b"GET /hello?x=1 HTTP/1.1\r\n")
    (asked,) = world.gate.of("request", reply.connection)
    assert (asked["method"], asked["path"]) == ("GET", "/hello")
    (response,) = wait_until(lambda: world.gate.of("response", reply.connection), "the report")
    assert response["ask"] == asked["ask"]
    assert response["status"] == 200
    wait_until(lambda: world.gate.of("closed", reply.connection), "the end of the connection")


@pytest.mark.req("SEC-2")
def test_a_placeholder_in_its_header_is_replaced_and_the_value_does_not_come_back(world: World) -> None:
    world.gate.sandbox("s2", TOKEN)
    reply = say(world, request("GET", "/", f"Authorization: Bearer {TOKEN['placeholder']}"), sandbox="s2")
    assert world.http1.seen[-1].header("authorization") == b"Bearer real-value-of-the-token"
    assert b"real-value" not in reply.raw
    assert reply.status == 200


def test_a_denied_request_is_answered_readably_and_reaches_nobody(world: World) -> None:
    before = len(world.http1.seen)
    refused = {
        "allow": False,
        "status": 403,
        "code": "path_not_allowed",
        "text": "no rule allows DELETE /x",
        "rule": "r",
    }
    world.gate.verdict = lambda asked: refused if asked["method"] == "DELETE" else ALLOWED
    talk = Talk(world)
    assert talk.say(request("GET", "/one")).status == 200
    reply = talk.say(request("DELETE", "/x", body=b"y" * 1000))
    world.gate.verdict = lambda asked: ALLOWED
    assert reply.status == 403
    assert reply.raw.startswith(b"HTTP/1.1 403 Cloche: no rule allows DELETE /x\r\n")
    assert b"x-cloche-denied: path_not_allowed" in reply.head.lower()
    assert b"no rule allows DELETE /x" in reply.body
    assert len(world.http1.seen) == before + 1
