"""The entry of one front of several: `python -m topkd.server._fleet_child ...`, started by `topkd.server.fleet`.

It says on a pipe when it serves, and where its metrics are; when the fleet's process dies, it drains and ends.
"""

import argparse
import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from .config import ServerConfig, ServerLimits
from .front import serve
from .worker import die_with

__all__ = ["decode", "encode", "main"]


def encode(config: ServerConfig) -> str:
    """Writes a configuration as `decode` reads it."""
    return json.dumps(dataclasses.asdict(config), default=str)


def decode(text: str) -> ServerConfig:
    """Reads a configuration."""
    given: dict[str, Any] = json.loads(text)
    for name in ("socket_dir", "tcp_token_file", "tls_cert", "tls_key", "tls_client_ca"):
        if given[name] is not None:
            given[name] = Path(given[name])
    for name in ("allowed_uids", "allowed_gids"):
        if given[name] is not None:
            given[name] = tuple(given[name])
    given["limits"] = ServerLimits(**given["limits"])
    return ServerConfig(**given)


def main(arguments: list[str] | None = None) -> int:
    """Runs the front; returns the exit status."""
    parser = argparse.ArgumentParser(prog="topkd.server._fleet_child")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--report-fd", type=int, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--config", required=True)
    options = parser.parse_args(arguments)
    die_with(options.parent, signal.SIGTERM)
    os.set_inheritable(options.report_fd, False)

    def report(serving: dict[str, Any]) -> None:
        os.write(options.report_fd, json.dumps(serving).encode() + b"\n")
        os.close(options.report_fd)

    return serve(decode(options.config), report, front=options.name)


if __name__ == "__main__":
    sys.exit(main())
