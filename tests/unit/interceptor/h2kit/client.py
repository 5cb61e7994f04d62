"""An HTTP/2 client. `python client.py PORT CA HOST`: requests as JSON lines on its input, results on its output.

A request: {"headers": [[name, value], …], "body": text, "trailers": [[…]], "upload": bytes, "window": false, "wait_s": s}.
"""

from __future__ import annotations

import json
import socket
import ssl
import sys
import time
from typing import Any

import h2.config
import h2.connection
import h2.events

Asked = dict[str, Any]


class Client:
    def __init__(self, port: int, authority: str, host: str) -> None:
        context = ssl.create_default_context(cafile=authority)
        context.set_alpn_protocols(["h2"])
        plain = socket.create_connection(("127.0.0.1", port), 20)
        self.socket = context.wrap_socket(plain, server_hostname=host)
        config = h2.config.H2Configuration(
            client_side=True, header_encoding=None, validate_outbound_headers=False, normalize_outbound_headers=False
        )
        self.h2 = h2.connection.H2Connection(config)
        self.h2.initiate_connection()
        self.result: dict[str, Any] = {}
        self.over = False

    def flush(self) -> None:
        if data := self.h2.data_to_send():
            self.socket.sendall(data)

    def take(self, stream: int, *, credit: bool) -> None:
        data = self.socket.recv(1 << 16)
        if not data:
            self.over = True
            self.result["closed"] = True
        for event in self.h2.receive_data(data) if data else ():
            if isinstance(event, h2.events.ResponseReceived):
                self.result["headers"] = [[n.decode("latin-1"), v.decode("latin-1")] for n, v in event.headers]
            elif isinstance(event, h2.events.DataReceived):
                self.result["size"] += len(event.data)
                if len(self.result["body"]) < 1 << 20:
                    self.result["body"] += event.data.decode("latin-1")
                if credit:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.TrailersReceived):
                self.result["trailers"] = [[n.decode("latin-1"), v.decode("latin-1")] for n, v in event.headers]
            elif isinstance(event, h2.events.StreamEnded) and event.stream_id == stream:
                self.over = True
            elif isinstance(event, h2.events.StreamReset):
                self.result["reset"] = int(event.error_code)
                self.over = True
            elif isinstance(event, h2.events.ConnectionTerminated):
                self.result["goaway"] = int(event.error_code)
                self.over = True
        self.flush()

    def ask(self, asked: Asked) -> dict[str, Any]:
        self.result, self.over = {"size": 0, "body": ""}, False
        stream = self.h2.get_next_available_stream_id()
        left = int(asked.get("upload", 0))
        body = asked.get("body", "").encode("latin-1")
        trailers = [(n.encode(), v.encode("latin-1")) for n, v in asked.get("trailers", [])]
        headers = [(n.encode(), v.encode("latin-1")) for n, v in asked["headers"]]
        self.h2.send_headers(stream, headers, end_stream=not (left or body or trailers))
        self.flush()
        for at in range(0, len(body), 16_000):
            self.h2.send_data(stream, body[at : at + 16_000])
            self.flush()
        piece = bytes(16_384)
        while left and not self.over:
            room = min(self.h2.local_flow_control_window(stream), left, len(piece))
            if room:
                self.h2.send_data(stream, piece[:room])
                self.flush()
                left -= room
            else:
                self.take(stream, credit=True)
        if ((left == 0 and asked.get("upload")) or body or trailers) and not self.over:
            if trailers:
                self.h2.send_headers(stream, trailers, end_stream=True)
            else:
                self.h2.end_stream(stream)
            self.flush()
        end = time.monotonic() + float(asked.get("wait_s", 20))
        while not self.over and (left_s := end - time.monotonic()) > 0:
            self.socket.settimeout(left_s)
            try:
                self.take(stream, credit=asked.get("window", True))
            except TimeoutError:
                self.result["late"] = True
                break
            except OSError as failure:
                self.result["failed"] = type(failure).__name__
                break
        self.socket.settimeout(20)
        return self.result


def main() -> None:
    client = Client(int(sys.argv[1]), sys.argv[2], sys.argv[3])
    for line in sys.stdin:
        print(json.dumps(client.ask(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
