"""The clients that people use, as they are called inside, and what each prints when the gate says no.

`refused` are words that really come: docs/reference/refusals.md shows them, and a promise runs every client to see them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cloche.client import Sandbox
from cloche_server.egress.interception.trust import JAVA_PASSWORD, ders, java_store
from tests.promises.egress.worlds import DATABASE, GRPC, WEB, World

PLACE = "/workspace/ca.pem"
JAVA_PLACE = "/workspace/cacerts"
TRUST = dict.fromkeys(
    ("SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO"),
    PLACE,
)
"""For hosts that are not intercepted: the tests' own authority. The product sets these itself where it intercepts."""

JAVA = """
import java.net.URI;
import java.net.http.*;
public class Get {
    public static void main(String[] args) throws Exception {
        var request = HttpRequest.newBuilder(URI.create(args[0])).build();
        try {
            var answer = HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.ofString());
            System.out.println(answer.statusCode() + " " + answer.version() + " " + answer.body());
        } catch (java.io.IOException refused) {
            System.out.println(refused + " " + refused.getCause());
            System.exit(1);
        }
    }
}
"""
CHAT = """
import asyncio, sys, websockets
async def main():
    async with websockets.connect(sys.argv[1]) as chat:
        for word in ("hello", "again"):
            await chat.send(word)
            print(await chat.recv())
asyncio.run(main())
"""
CALL = """
import os, sys, grpc
credentials = grpc.ssl_channel_credentials(open(os.environ["SSL_CERT_FILE"], "rb").read())
with grpc.secure_channel(sys.argv[1] + ":443", credentials) as channel:
    call = channel.unary_unary("/cloche.test.Greeter/Hello")
    answer, about = call.with_call(b"grpc", timeout=20)
    print(answer.decode(), about.trailing_metadata()[0])
    print([int(n) for n in channel.unary_stream("/cloche.test.Greeter/Count")(b"5", timeout=20)])
"""
FETCH = """
fetch(process.argv[1]).then(r => r.text()).then(t => console.log(t),
    e => { console.log(String(e), String(e.cause)); process.exit(1) })
"""
FILES = {"Get.java": JAVA, "chat.py": CHAT, "call.py": CALL, "fetch.js": FETCH}


@dataclass(frozen=True)
class Client:
    """`line` with the host in place of `{host}`; `said` is in its output when it is allowed."""

    name: str
    line: str
    said: str
    refused: tuple[str, ...]
    """Each is in what it prints when no rule allows the host."""
    host: str = WEB
    rule: str = "{host}"
    own_words: bool = False
    """It has no way to show a proxy's text: it looks names up itself."""
    files: tuple[str, ...] = field(default=())


CLIENTS = (
    Client(
        "curl, https",
        "curl -sS https://{host}/echo -d hello-curl",
        "hello-curl",
        ("curl: (56) CONNECT tunnel failed, response 403",),
    ),
    Client(
        "curl, http",
        "curl -sSi http://{host}/echo -d hello-curl",
        "hello-curl",
        ("HTTP/1.1 403 Cloche: No rule allows", "X-Cloche-Denied: no_rule", "cloche egress allow"),
    ),
    Client(
        "curl, without a proxy",
        "curl -sS --noproxy '*' https://{host}/echo -d hello-curl",
        "hello-curl",
        ("curl: (6) Could not resolve host",),
        own_words=True,
    ),
    Client(
        "curl, HTTP/2",
        "curl -sS --http2 -o /dev/null -w '%{{http_version}} %{{size_download}}' https://{host}/bytes/8000000",
        "2 8000000",
        ("curl: (56) CONNECT tunnel failed, response 403",),
    ),
    Client(
        "pip",
        "pip install --disable-pip-version-check --no-cache-dir --retries 1 --target /tmp/p -i https://{host}/simple"
        " cloche-hello && PYTHONPATH=/tmp/p python3 -c 'import cloche_hello; print(cloche_hello.hello())'",
        "hello from the wheel",
        ("Tunnel connection failed: 403 Cloche: No rule allows",),
    ),
    Client(
        "npm",
        "mkdir -p /tmp/n && cd /tmp/n && npm install --no-audit --no-fund --no-update-notifier --fetch-retries=0"
        " --registry https://{host} cloche-hello && node -p \"require('cloche-hello')\"",
        "hello from npm",
        ("npm ERR!", "403"),
    ),
    Client(
        "git",
        "rm -rf /tmp/g; git clone -q https://{host}/git/hello.git /tmp/g && cat /tmp/g/README",
        "hello from git",
        ("fatal: unable to access", "CONNECT tunnel failed, response 403"),
    ),
    Client(
        "Python, urllib",
        "python3 -c \"import urllib.request as u; print(u.urlopen('https://{host}/echo', b'hello-urllib').read())\"",
        "hello-urllib",
        ("Tunnel connection failed: 403 Cloche: No rule allows",),
    ),
    Client(
        "Python, httpx",
        "python3 -c \"import httpx; print(httpx.post('https://{host}/echo', content=b'hello-httpx').text)\"",
        "hello-httpx",
        ("httpx.ProxyError: 403 Cloche: No rule allows",),
    ),
    Client(
        "Python, websockets",
        "python3 /workspace/chat.py wss://{host}/chat",
        "HELLO\nAGAIN",
        ("socket.gaierror", "Name or service not known"),
        own_words=True,
        files=("chat.py",),
    ),
    Client(
        "gRPC",
        "python3 /workspace/call.py {host}",
        "[0, 1, 2, 3, 4]",
        ("StatusCode.UNAVAILABLE", "403"),
        host=GRPC,
        files=("call.py",),
    ),
    Client(
        "Node, fetch",
        'node -e "$(cat /workspace/fetch.js)" https://{host}/bytes/3',
        "\x00\x01\x02",
        ("TypeError: fetch failed", "getaddrinfo ENOTFOUND"),
        own_words=True,
        files=("fetch.js",),
    ),
    Client(
        "Java, HttpClient",
        f"java -Djavax.net.ssl.trustStore={JAVA_PLACE} -Djavax.net.ssl.trustStorePassword={JAVA_PASSWORD}"
        " -XX:TieredStopAtLevel=1 /workspace/Get.java https://{host}/git/hello.git/HEAD",
        "200 HTTP_2 ref: refs/heads/main",
        ("java.net.ConnectException",),
        own_words=True,
        files=("Get.java",),
    ),
    Client(
        "psql",
        "psql -h {host} -U postgres -Atc 'select 6 * 7'",
        "42",
        ("psql: error: could not translate host name", "Name or service not known"),
        host=DATABASE,
        rule="{host}:5432",
        own_words=True,
    ),
    Client(
        "openssl s_client",
        "echo | openssl s_client -connect {host}:443 -servername {host} 2>&1 | head -20",
        "CONNECTED",
        ("Name or service not known",),
        own_words=True,
    ),
    Client(
        "curl, SOCKS5",
        "curl -sS --noproxy '' -x $CLOCHE_SOCKS https://{host}/echo -d hello-socks",
        "hello-socks",
        ("curl: (97)", "(2)"),
    ),
)


def place_files(box: Sandbox, earth: World) -> None:
    """What the lines above use, and the tests' authority."""
    for name, text in FILES.items():
        box.files.write(f"/workspace/{name}", text)
    box.files.write(PLACE, earth.ca)
    box.files.write(JAVA_PLACE, java_store(ders(earth.ca)))
