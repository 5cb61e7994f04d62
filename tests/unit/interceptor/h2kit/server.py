"""An HTTP/2 server. `python server.py CERT`: prints its port, then serves until its input ends.

/echo: the request as JSON. /size: how many bytes were sent. /big?N: N bytes. /trailers: the request's credential and
trailers, as trailers. /reset: resets. /leave: says goodbye, then answers. Everything is flow controlled.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from typing import Any

import h2.config
import h2.connection
import h2.events
import hyperframe.frame

PIECE = 16_384


class Server(asyncio.Protocol):
    def __init__(self) -> None:
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding=None))
        self.requests: dict[int, dict[str, Any]] = {}
        self.sending: dict[int, tuple[bytes | int, list[tuple[bytes, bytes]]]] = {}
        self.paused = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.h2.initiate_connection()
        self.flush()

    def flush(self) -> None:
        if data := self.h2.data_to_send():
            self.transport.write(data)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self.push()

    def data_received(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            stream = getattr(event, "stream_id", None)
            if isinstance(event, h2.events.RequestReceived):
                self.requests[stream] = {"headers": event.headers, "body": b"", "size": 0, "trailers": []}
            elif isinstance(event, h2.events.DataReceived):
                asked = self.requests[stream]
                asked["size"] += len(event.data)
                if len(asked["body"]) < 1 << 20:
                    asked["body"] += event.data
                self.h2.acknowledge_received_data(event.flow_controlled_length, stream)
            elif isinstance(event, h2.events.TrailersReceived):
                self.requests[stream]["trailers"] = event.headers
            elif isinstance(event, h2.events.StreamEnded):
                self.answer(stream, self.requests.pop(stream))
            elif isinstance(event, h2.events.StreamReset):
                self.requests.pop(stream, None)
                self.sending.pop(stream, None)
        self.push()

    def answer(self, stream: int, asked: dict[str, Any]) -> None:
        fields = dict(asked["headers"])
        path = fields[b":path"]
        headers = [(b":status", b"200"), (b"content-type", b"text/plain")]
        trailers: list[tuple[bytes, bytes]] = []
        body: bytes | int
        if path.startswith(b"/big"):
            body = int(path.partition(b"?")[2])
        elif path == b"/size":
            body = b"%d" % asked["size"]
        elif path == b"/leave":
            goodbye = hyperframe.frame.GoAwayFrame(0)
            goodbye.last_stream_id = stream
            self.transport.write(goodbye.serialize())
            body = 300_000
        elif path == b"/reset":
            self.h2.reset_stream(stream)
            return
        elif path == b"/trailers":
            body = asked["body"]
            trailers = [(b"grpc-status", b"0"), (b"grpc-message", fields.get(b"authorization", b"none"))]
            trailers += [(b"x-seen-" + name, value) for name, value in asked["trailers"]]
        else:
            shown = [[n.decode("latin-1"), v.decode("latin-1")] for n, v in asked["headers"]]
            body = json.dumps({"headers": shown, "body": asked["body"].decode("latin-1")}).encode()
        self.h2.send_headers(stream, headers)
        self.sending[stream] = (body, trailers)

    def push(self) -> None:
        for stream in list(self.sending):
            body, trailers = self.sending[stream]
            while not self.paused:
                room = min(self.h2.local_flow_control_window(stream), PIECE)
                left = body if isinstance(body, int) else len(body)
                if left == 0:
                    if trailers:
                        self.h2.send_headers(stream, trailers, end_stream=True)
                    else:
                        self.h2.end_stream(stream)
                    del self.sending[stream]
                    break
                if room <= 0:
                    break
                piece = min(room, left)
                self.h2.send_data(stream, bytes(piece) if isinstance(body, int) else body[:piece])
                body = body - piece if isinstance(body, int) else body[piece:]
                self.sending[stream] = (body, trailers)
                self.flush()
        self.flush()


async def main(certificate: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    context.set_alpn_protocols(["h2"])
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Server, "127.0.0.1", 0, ssl=context)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
