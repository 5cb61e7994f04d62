"""The web that the tests' sandboxes may reach: HTTP/1.1, HTTP/2 and WebSocket, with TLS on 443 and without on 80.

    /usr/bin/python3 web_server.py SETTINGS.json

Run by Debian's Python, whose packages it needs (python3-hypercorn). Every request is a JSON line in the settings' `log`, with
its body's size and hash. Paths: `/bytes/N`, `/echo`, `/headers`, `/to?url=…` (a redirect), `/leak`, `/slow/N`; a WebSocket at `/chat`
answers in upper case; everything else is a file below the settings' `files`.
"""

import asyncio
import base64
import hashlib
import json
import sys
import time
import urllib.parse
from pathlib import Path

from hypercorn.asyncio import serve
from hypercorn.config import Config

SETTINGS = json.loads(Path(sys.argv[1]).read_text())
FILES = Path(SETTINGS["files"])
BLOCK = bytes(range(256)) * 256


def note(**fields):
    with open(SETTINGS["log"], "a") as log:
        log.write(json.dumps({"at": time.time(), **fields}) + "\n")


async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        return
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
    about = {
        "scheme": scope["scheme"],
        "http": scope["http_version"],
        "path": scope["path"],
        "query": scope["query_string"].decode("latin-1"),
        "headers": headers,
    }
    if scope["type"] == "websocket":
        note(kind="websocket", **about)
        await chat(receive, send)
    else:
        about["method"] = scope["method"]
        await request(scope, about, receive, send)


async def chat(receive, send):
    await receive()
    await send({"type": "websocket.accept"})
    while (event := await receive())["type"] == "websocket.receive":
        text = event.get("text")
        note(kind="message", text=text, size=len(text or event.get("bytes") or b""))
        if text is None:
            await send({"type": "websocket.send", "bytes": event["bytes"]})
        else:
            await send({"type": "websocket.send", "text": text.upper()})


async def request(scope, about, receive, send):
    path = scope["path"]
    kept, size, digest = b"", 0, hashlib.sha256()
    more = True
    while more:
        event = await receive()
        if event["type"] == "http.disconnect":
            note(kind="cut", size=size, **about)
            return
        body = event.get("body", b"")
        size, more = size + len(body), event.get("more_body", False)
        digest.update(body)
        kept += body[: 65536 - len(kept)]
    note(kind="request", size=size, sha256=digest.hexdigest(), body=kept[:4096].decode("latin-1"), **about)
    parts = path.split("/")
    if parts[1] == "bytes":
        await answer_bytes(send, int(parts[2]))
    elif parts[1] == "slow":
        await answer_slowly(send, int(parts[2]))
    elif parts[1] == "to":
        url = urllib.parse.parse_qs(about["query"])["url"][0]
        await answer(send, 302, b"", ("location", url))
    elif parts[1] == "leak":
        await answer_leak(send, about["headers"])
    elif parts[1] == "headers":
        await answer(send, 200, json.dumps(about["headers"]).encode(), ("content-type", "application/json"))
    elif parts[1] == "echo":
        await answer(send, 200, kept, ("x-size", str(size)), ("x-sha256", digest.hexdigest()))
    else:
        await answer_file(send, path)


async def answer_leak(send, headers):
    """What came as a credential goes back in every form a careless server could give it: header, cookie, redirect, body."""
    found = dict(headers).get("authorization", "").encode()
    value = found.removeprefix(b"Bearer ")
    forms = [value, base64.b64encode(value), base64.b64encode(b"x" + value), base64.b64encode(b"xy" + value)]
    forms += [value.hex().encode(), urllib.parse.quote(value).encode(), json.dumps(found.decode()).encode()]
    where = "https://other.test/take?key=" + urllib.parse.quote(value)
    pairs = [("x-echo", found.decode()), ("set-cookie", f"k={value.decode()}"), ("location", where)]
    await answer(send, 200, b"\n".join(forms), *pairs)


async def answer(send, status, body, *headers):
    pairs = [(name.encode(), value.encode()) for name, value in (("content-length", str(len(body))), *headers)]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


async def answer_bytes(send, size):
    headers = [(b"content-length", str(size).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    while size > 0:
        block = BLOCK[: min(size, len(BLOCK))]
        size -= len(block)
        await send({"type": "http.response.body", "body": block, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def answer_slowly(send, count):
    """A line every 50 ms."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    for number in range(count):
        await send({"type": "http.response.body", "body": f"{number}\n".encode(), "more_body": True})
        await asyncio.sleep(0.05)
    await send({"type": "http.response.body", "body": b""})


async def answer_file(send, path):
    wanted = (FILES / urllib.parse.unquote(path).lstrip("/")).resolve()
    if wanted.is_dir():
        wanted = wanted / "index.html"
    if not wanted.is_relative_to(FILES) or not wanted.is_file():
        await answer(send, 404, b"no such file\n")
        return
    kinds = {".html": "text/html", ".json": "application/json"}
    await answer(send, 200, wanted.read_bytes(), ("content-type", kinds.get(wanted.suffix, "application/octet-stream")))


async def main():
    config = Config()
    config.bind = [f"{address}:443" for address in SETTINGS["addresses"]]
    config.insecure_bind = [f"{address}:80" for address in SETTINGS["addresses"]]
    config.certfile, config.keyfile = SETTINGS["certificate"]
    config.alpn_protocols = ["h2", "http/1.1"]
    config.accesslog = None
    config.keep_alive_timeout = 60
    config.h11_max_incomplete_size = 1 << 17
    await serve(app, config)


asyncio.run(main())
