"""Redirects and token servers that a hostile registry names: no login reaches a stranger, no request an inner address."""

import asyncio
import json
import ssl
from pathlib import Path

import pytest

from cloche.wire.errors import ClocheError
from cloche_server.images.settings import HostSettings, Timeouts
from tests.unit.images.hostile_client import ALICE, BLOB, MANIFEST, client_of, fails, says
from tests.unit.images.hostile_server import Answer, Asked, digest_of, hostile, manifest_of, redirect, reply
from tests.unit.images.registries import Ca

# ------------------------------------------------------------------------------ redirects


@pytest.mark.req("IMG-1")
async def test_a_login_does_not_follow_a_redirect_to_another_host() -> None:
    async with hostile(says(reply(200, BLOB))) as store:

        async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
            known = asked.headers.get("authorization") == ALICE.basic
            writer.write(
                redirect(f"{store.url}/x?signed=1")
                if known
                else reply(401, headers={"www-authenticate": "Basic realm=x"})
            )

        async with hostile(answer) as server:
            assert await client_of(server, "blob", offset=7) == BLOB[7:]
    assert store.paths() == ["/x?signed=1"]
    assert "authorization" not in store.asked[0].headers
    assert store.asked[0].headers["range"] == "bytes=7-"


@pytest.mark.req("IMG-1")
async def test_a_login_does_follow_on_the_same_host() -> None:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if asked.headers.get("authorization") != ALICE.basic:
            writer.write(reply(401, headers={"www-authenticate": 'Basic realm="x"'}))
        else:
            writer.write(reply(200, BLOB) if asked.path == "/elsewhere" else redirect("/elsewhere", 302))

    async with hostile(answer) as server:
        assert await client_of(server, "blob") == BLOB


@pytest.mark.req("IMG-1")
async def test_another_host_behind_a_redirect_may_not_ask_for_the_login() -> None:
    challenge = {"www-authenticate": 'Basic realm="x"'}
    async with hostile(says(reply(401, headers=challenge))) as thief:
        found = await fails(says(redirect(f"{thief.url}/x")), "blob")
        assert found.code == "registry_denied"
    assert ["authorization" in each.headers for each in thief.asked] == [False]


@pytest.mark.req("IMG-1")
@pytest.mark.parametrize(
    ("location", "word"),
    [
        ("http://169.254.169.254/latest/meta-data/", "may not come from"),
        ("http://[fe80::1]/", "may not come from"),
        ("http://[fd00:ec2::254]/", "may not come from"),
        ("http://[::ffff:169.254.169.254]/", "may not come from"),
        ("http://168.63.129.16/", "may not come from"),
        ("http://10.0.0.1/", "may not come from"),
        ("http://0.0.0.0/", "may not come from"),
        ("http://224.0.0.1/", "may not come from"),
        ("file:///etc/passwd", "plain http or https"),
        ("ftp://127.0.0.1/", "plain http or https"),
        ("http://user:pass@127.0.0.1/", "plain http or https"),
        ("http://127.0.0.1:99999/", "not a URL"),
        ("http://[::1/", "not a URL"),
        ("", "nowhere"),
        ("http://127.0.0.1/" + "x" * 20_000, "nowhere"),
    ],
)
async def test_redirects_that_are_not_followed(location: str, word: str) -> None:
    found = await fails(says(redirect(location)), "blob", times=Timeouts(retries=0))
    assert found.code == "registry_unreachable"
    assert word in found.message


@pytest.mark.req("IMG-1")
async def test_redirects_without_end() -> None:
    async with hostile(says(redirect("/again"))) as server:
        with pytest.raises(ClocheError, match="more than 5 times"):
            await client_of(server)
        assert len(server.asked) == 6


def tls_of(ca: Ca, directory: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*ca.issue(directory))
    return context


@pytest.mark.req("IMG-1")
async def test_from_https_nothing_goes_on_to_plain_http(tmp_path: Path) -> None:
    ca = Ca.make(tmp_path)
    async with hostile(says(reply(200, BLOB))) as plain:
        realm = f'Bearer realm="{plain.url}/token"'
        answers = {
            "redirects": redirect(f"{plain.url}/x"),
            "not asked over TLS": reply(401, headers={"www-authenticate": realm}),
        }
        for word, answer in answers.items():
            async with hostile(says(answer), tls_of(ca, tmp_path)) as server:
                with pytest.raises(ClocheError, match=word):
                    await client_of(server, "blob", hosts={server.host: HostSettings(ca_file=ca.file)})
    assert plain.asked == []


# --------------------------------------------------------------------------------- tokens


def asks_for_token(realm: str, token: str = "good") -> Answer:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if asked.path.startswith("/token"):
            writer.write(reply(200, json.dumps({"token": token}).encode()))
        elif asked.headers.get("authorization") == "Bearer good":
            writer.write(reply(200, MANIFEST))
        else:
            challenge = f'Basic realm="no", Bearer realm="{realm}",service="a, \\"b\\"",scope="repository:evil:*"'
            writer.write(reply(401, headers={"www-authenticate": challenge}))

    return answer


async def test_a_token_is_asked_for_what_we_want_to_do() -> None:
    async with hostile(asks_for_token("")) as other:
        async with hostile(asks_for_token(f"{other.url}/token?x=1")) as server:
            assert await client_of(server) == MANIFEST
    [asked] = other.asked
    assert asked.path == ("/token?x=1&service=a%2C+%22b%22&scope=repository%3Aapp%3Apull&account=alice")
    assert asked.headers["authorization"] == ALICE.basic


@pytest.mark.req("IMG-1")
@pytest.mark.parametrize(
    ("realm", "word"),
    [
        ("http://169.254.169.254/token", "may not come from"),
        ("http://10.0.0.1/token", "may not come from"),
        ("file:///token", "plain http or https"),
        ("", "plain http or https"),
        ("http://u:p@127.0.0.1/token", "plain http or https"),
    ],
)
async def test_token_servers_that_are_not_asked(realm: str, word: str) -> None:
    found = await fails(asks_for_token(realm), times=Timeouts(retries=0))
    assert found.code == "registry_unreachable"
    assert word in found.message


@pytest.mark.req("IMG-1")
@pytest.mark.parametrize(
    ("answer", "code", "count"),
    [
        (reply(200, b'{"token": "bad"}'), "registry_denied", 1),
        (reply(200, b'{"token": "a\\r\\nx: y"}'), "registry_unreachable", 1),
        (reply(200, b'{"token": 7}'), "registry_unreachable", 1),
        (reply(200, b'{"token": "%s"}' % (b"x" * 70_000)), "registry_unreachable", 1),
        (reply(200, b"[" * 100_000), "registry_unreachable", 1),
        (reply(200, b" " * 300_000), "registry_unreachable", 1),
        (reply(200, b'{"token": "bad", "expires_in": NaN}'), "registry_denied", 1),
        (reply(200, b'{"token": "bad", "expires_in": %s}' % (b"9" * 4000)), "registry_denied", 1),
        (reply(200, b'{"token": "bad", "expires_in": -5}'), "registry_denied", 1),
        (reply(401), "registry_denied", 1),
        (reply(302, headers={"location": "/elsewhere"}), "registry_unreachable", 1),
        (reply(500), "registry_unreachable", 3),
    ],
)  # fmt: skip
async def test_wrong_answers_for_a_token(answer: bytes, code: str, count: int) -> None:
    async with hostile(says(answer)) as other:
        found = await fails(asks_for_token(f"{other.url}/token"))
        assert found.code == code
        assert len(other.asked) == count  # no loop of refusals


@pytest.mark.req("IMG-1")
@pytest.mark.parametrize("challenge", ["", "Negotiate", "Basic", 'Digest realm="x"', "=", '"', ", ,", "Bearer" * 2000])
async def test_challenges_that_cannot_be_met_end_at_once(challenge: str) -> None:
    async with hostile(says(reply(401, headers={"www-authenticate": challenge}))) as server:
        with pytest.raises(ClocheError) as raised:
            await client_of(server, login=ALICE if challenge == "Basic" else None)
        assert raised.value.code == "registry_denied"
        assert len(server.asked) == (2 if challenge == "Basic" else 1)


@pytest.mark.req("IMG-1")
async def test_the_callers_login_is_not_for_a_mirror() -> None:
    async with hostile(says(reply(401, headers={"www-authenticate": "Basic realm=x"}))) as mirror:
        async with hostile(says(reply(200, MANIFEST))) as server:
            assert await client_of(server, hosts={server.host: HostSettings(mirrors=(mirror.url,))}) == MANIFEST
    assert ["authorization" in each.headers for each in mirror.asked] == [False]


@pytest.mark.req("IMG-1")
async def test_a_mirror_with_other_bytes_is_passed_by() -> None:
    async with hostile(says(reply(200, manifest_of({"x": 1})))) as mirror:
        async with hostile(says(reply(200, MANIFEST))) as server:
            hosts = {server.host: HostSettings(mirrors=(mirror.url,))}
            assert await client_of(server, digest=digest_of(MANIFEST), hosts=hosts) == MANIFEST
    assert len(mirror.asked) == 1
