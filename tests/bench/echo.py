"""A bare grpcio server on a Unix socket, which answers every call with bytes of one size: what gRPC itself costs.

`python echo.py SOCKET REPLY_BYTES`; ends when its standard input does.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import grpc

METHOD = "/echo.Echo/Echo"


def main(path: str, reply_bytes: int) -> None:
    """Serves until standard input ends."""
    reply = bytes(reply_bytes)
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(lambda _request, _context: reply)
    server = grpc.server(ThreadPoolExecutor(8), options=(("grpc.so_reuseport", 0),))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo.Echo", {"Echo": handler}),))
    server.add_insecure_port(f"unix:{path}")
    server.start()
    print("ready", flush=True)
    sys.stdin.read()
    server.stop(None).wait(5)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
