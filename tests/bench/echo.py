"""A bare grpcio server on a Unix socket, which answers everything with bytes of one size: what gRPC itself costs.

It answers calls, and messages of a stream.

`python echo.py SOCKET REPLY_BYTES`; ends when its standard input does. The first 8 bytes of a request (little-endian)
are the nanoseconds for which the server keeps busy before it answers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

METHOD = "/echo.Echo/Echo"
STREAM_METHOD = "/echo.Echo/Stream"


def main(path: str, reply_bytes: int) -> None:
    """Serves until standard input ends."""
    reply = bytes(reply_bytes)

    def answer(request: bytes, _context: object) -> bytes:
        busy = int.from_bytes(request[:8], "little")
        if busy:
            end = time.perf_counter_ns() + busy
            while time.perf_counter_ns() < end:
                pass
        return reply

    def answer_each(requests: Iterator[bytes], context: object) -> Iterator[bytes]:
        for request in requests:
            yield answer(request, context)

    handlers: dict[str, Any] = {
        "Echo": grpc.unary_unary_rpc_method_handler(answer),
        "Stream": grpc.stream_stream_rpc_method_handler(answer_each),
    }
    server = grpc.server(ThreadPoolExecutor(8), options=(("grpc.so_reuseport", 0),))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo.Echo", handlers),))
    server.add_insecure_port(f"unix:{path}")
    server.start()
    print("ready", flush=True)
    sys.stdin.read()
    server.stop(None).wait(5)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
