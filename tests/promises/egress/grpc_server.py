"""A real gRPC server with TLS: `/usr/bin/python3 grpc_server.py ADDRESS CERTIFICATE KEY`. One call each way, one stream.

Run by Debian's Python (python3-grpcio). Messages are plain bytes; no generated code is needed.
"""

import sys
from concurrent import futures
from pathlib import Path

import grpc


class Greeter(grpc.GenericRpcHandler):
    def service(self, details):
        if details.method == "/cloche.test.Greeter/Hello":
            return grpc.unary_unary_rpc_method_handler(hello)
        if details.method == "/cloche.test.Greeter/Count":
            return grpc.unary_stream_rpc_method_handler(count)
        return None


def hello(request, context):
    context.set_trailing_metadata((("x-cloche-test", "trailer"),))
    return b"hello " + request


def count(request, context):
    for number in range(int(request)):
        yield str(number).encode()


address, certificate, key = sys.argv[1:]
server = grpc.server(futures.ThreadPoolExecutor(4))
server.add_generic_rpc_handlers((Greeter(),))
pair = (Path(key).read_bytes(), Path(certificate).read_bytes())
server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
server.start()
print("ready", flush=True)
server.wait_for_termination()
